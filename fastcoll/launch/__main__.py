"""`python -m fastcoll.launch`."""

import signal
import sys

# A KeyboardInterrupt during an import may be lost: an exception in a callback of importlib has no caller to reach.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .command import main

sys.exit(main())
