"""Entry point of `python -m fastcoll.bench`."""

import sys

from .command import main

if __name__ == "__main__":  # the workers import this module again
    sys.exit(main())
