"""`python -m app` and the console script `encoderd`."""

import sys

from app.cli import run_command


def main() -> None:
    """Exit with the command's status."""
    sys.exit(run_command(sys.argv[1:]))


if __name__ == "__main__":
    main()
