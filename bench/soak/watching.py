"""What a victim notices while it is attacked: outcomes of its calls, and the tracebacks that threads print."""

from __future__ import annotations

import logging
import resource
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcoll.errors import FastcollError

ADDRESS_SPACE = 4 << 30
PORT, OVER = 0, 1  # places of Fleet.marks: the port of the victim's store; not 0: the attack is over
VICTIM, ATTACKER = 0, 1  # places of Fleet.turns
_MOST_FAULTS = 20


class Seen:
    """The outcomes of a victim's calls, by name, and its faults."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.faults: list[str] = []

    def attempt(self, call: Callable[[], object], culprit: str) -> bool:
        """Make a call, which may raise a FastcollError with the text `culprit`; return whether it returned."""
        try:
            call()
        except FastcollError as error:
            self.outcomes[type(error).__name__] += 1
            if culprit not in str(error):
                self.fault(f"{type(error).__name__} does not name {culprit}: {error}")
            return False
        except Exception:
            self.outcomes["another exception"] += 1
            self.fault(traceback.format_exc())
            return False
        self.outcomes["returned"] += 1
        return True

    def fault(self, text: str) -> None:
        """Note a fault; only the first ones are kept."""
        if len(self.faults) < _MOST_FAULTS:
            self.faults.append(text)


class _Handler(logging.Handler):
    """Takes what fastcoll logs; a record with a traceback is a fault."""

    def __init__(self, seen: Seen) -> None:
        super().__init__(logging.WARNING)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._seen.fault(
                f"{record.getMessage()}\n{''.join(traceback.format_exception(*record.exc_info))}"
            )


def watch() -> Seen:
    """Begin to watch this process, and limit the address space that it may still take."""
    seen = Seen()
    log = logging.getLogger("fastcoll")
    log.addHandler(_Handler(seen))
    log.propagate = False

    def raised(args: Any) -> None:
        kind, error, trace = args.exc_type, args.exc_value, args.exc_traceback
        seen.fault("".join(traceback.format_exception(kind, error, trace)))

    threading.excepthook = sys.unraisablehook = raised
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return seen


def peak_bytes(pid: int) -> int:
    """Return the largest resident memory that a process has had."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise ProcessLookupError(pid)
