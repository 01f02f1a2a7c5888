"""Entry point of `python -m fastcoll.bench`."""

import sys
from collections.abc import Sequence

from . import command, tune


def main(words: Sequence[str]) -> int:
    """Run the benchmark, or its tuning, with the arguments of a command line; return the exit code."""
    return tune.main(words) if "--tune" in words else command.main(words)


if __name__ == "__main__":  # the workers import this module again
    sys.exit(main(sys.argv[1:]))
