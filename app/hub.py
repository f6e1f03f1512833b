"""Hub id -> local directory, in a process of its own: `python -m app.hub ID [--revision R] [--with-code]`.

`app.cli` starts it, so that huggingface_hub (and what it loads) never enters the control plane. The directory
is the last line of standard output.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Final

from app.errors import ConfigError

# No pickles: weights come as safetensors or not at all.
FILES: Final = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
CODE: Final = ["*.py"]  # only for those who are going to run it


def resolve_checkpoint(checkpoint: str, revision: str, download_dir: str, *, with_code: bool = False) -> str:
    """checkpoint itself if it is a directory, else the hub's snapshot of it, with its Python files only if
    they are wanted. ConfigError if neither works."""
    if Path(checkpoint).is_dir():
        return str(Path(checkpoint).resolve())
    if checkpoint.startswith((".", "/", "~")) or checkpoint.count("/") > 1:
        raise ConfigError(f"checkpoint {checkpoint} is not a directory")
    command = [sys.executable, "-m", "app.hub", checkpoint]
    command += ["--revision", revision] if revision else []
    command += ["--download-dir", download_dir] if download_dir else []
    command += ["--with-code"] if with_code else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise ConfigError(f"checkpoint {checkpoint} is no directory and could not be had from the hub")
    return done.stdout.strip().splitlines()[-1]


def main() -> None:
    """The child's work."""
    parser = argparse.ArgumentParser(prog="python -m app.hub")
    parser.add_argument("repository")
    parser.add_argument("--revision")
    parser.add_argument("--download-dir")
    parser.add_argument("--with-code", action="store_true")
    arguments = parser.parse_args()
    from huggingface_hub import snapshot_download

    print(
        snapshot_download(
            arguments.repository,
            revision=arguments.revision,
            cache_dir=arguments.download_dir,
            allow_patterns=FILES + CODE if arguments.with_code else FILES,
        )
    )


if __name__ == "__main__":
    main()
