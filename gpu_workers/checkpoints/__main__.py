"""python -m gpu_workers.checkpoints FAMILY DIRECTORY [--size ...] [--seed N] [--dtype ...]"""

import argparse
import sys
from pathlib import Path

import transformers

from gpu_workers.checkpoints.make import RECIPES, make_checkpoint
from gpu_workers.checkpoints.recipe import SIZES


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m gpu_workers.checkpoints")
    parser.add_argument("family", choices=sorted(RECIPES))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32")
    options = parser.parse_args()
    transformers.logging.disable_progress_bar()
    make_checkpoint(options.family, options.directory, options.size, options.seed, dtype=options.dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
