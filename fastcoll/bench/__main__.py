"""Entry point of `python -m fastcoll.bench`."""

import sys
from collections.abc import Sequence

from ..system.standard_streams import run_command
from . import command


def main(words: Sequence[str]) -> int:
    """Run the benchmark, or its tuning, with the arguments of a command line; return the exit code."""
    if "--tune" in words:
        from . import tune  # imports the backend, which the parent of ranks does not need

        return tune.main(words)
    return command.main(words)


if __name__ == "__main__":  # the workers import this module again
    sys.exit(run_command(lambda: main(sys.argv[1:])))
