"""`python -m fastcoll`."""

import sys

from .tools.command import main

if __name__ == "__main__":  # the benchmark starts workers, which import this module again
    sys.exit(main())
