"""`python -m fastcoll.launch`."""

import sys

from .command import main

sys.exit(main())
