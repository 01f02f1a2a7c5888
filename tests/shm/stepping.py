"""The points of a thread's Python code at which CPython may switch threads and run signal handlers."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FrameType

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
