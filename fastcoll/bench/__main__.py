"""Entry point of `python -m fastcoll.bench`."""

import sys

from . import command, tune

if __name__ == "__main__":  # the workers import this module again
    sys.exit(tune.main(sys.argv[1:]) if "--tune" in sys.argv[1:] else command.main())
