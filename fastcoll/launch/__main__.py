"""`python -m fastcoll.launch`."""

import signal
import sys

# A KeyboardInterrupt that comes during an import may be lost (importlib's callbacks have nobody to raise it to).
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from .command import main

sys.exit(main())
