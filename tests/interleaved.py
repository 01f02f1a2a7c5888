"""Thread switches between any two opcodes of some code, which are rare in an ordinary run."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def shaken(files: Collection[str], seed: int, limit: float = 60.0) -> Iterator[None]:
    """In this block, new threads let others run at random opcodes of the code in the given files.

    Threads that are still in such code after `limit` seconds end with an AssertionError.
    """
    chance, end = random.Random(seed), time.monotonic() + limit

    def step(frame: FrameType, event: str, _: Any) -> Any:
        assert time.monotonic() < end, f"it does not end within {limit:g} s"
        if chance.random() < 0.02:
            time.sleep(chance.choice([0, 0, 2e-4]))  # the other threads run, for one step or many
        return step

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes = True
        return step

    interval = sys.getswitchinterval()
    threading.settrace(enter)
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        threading.settrace(None)  # type: ignore[arg-type]
        sys.setswitchinterval(interval)
