"""The points of a thread's Python code at which CPython may switch threads and run signal handlers."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from types import CodeType, FrameType
from typing import Any

AFTER = ("CALL", "JUMP_BACKWARD", "RESUME")


@cache
def _ends_at_point(code: CodeType) -> bytes:
    """Return, for each offset in the code, 1 if such a point is after the instruction there.

    Cached, because CPython makes a copy of the code at each access.
    """
    return bytes(dis.opname[each].startswith(AFTER) for each in code.co_code)


def is_step(frame: FrameType, last: dict[FrameType, int]) -> int:
    """Whether such a point is before the instruction that a frame runs next.

    Called by a trace function for each event "opcode".

    Args:
        last: for each frame, whether such a point is after its latest instruction.
    """
    before = last.get(frame, 1)
    last[frame] = _ends_at_point(frame.f_code)[frame.f_lasti]
    return before


class Between:
    """Calls `act` before step number `step` of this thread's code in `files`, and counts the steps."""

    def __init__(self, files: Collection[str], step: int, act: Callable[[], None]) -> None:
        self.files, self.left, self.act, self.steps = files, step, act, 0
        self.last: dict[FrameType, int] = {}

    def __enter__(self) -> Between:
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self.files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and is_step(frame, self.last):
            self.steps += 1
            if self.steps == self.left:
                self.act()
        return self.trace
