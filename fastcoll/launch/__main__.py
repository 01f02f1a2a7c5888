"""`python -m fastcoll.launch`."""

import signal
import sys

# A KeyboardInterrupt during an import could be lost, because Python discards exceptions that are raised in importlib's
# weakref callbacks. So until `main` runs, SIGINT kills the process.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .command import main

sys.exit(main())
