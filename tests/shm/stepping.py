"""The points of a thread's Python code at which CPython may switch threads and run signal handlers."""

from __future__ import annotations

import dis
from types import FrameType

AFTER = ("CALL", "JUMP_BACKWARD", "RESUME")


def is_step(frame: FrameType, last: dict[FrameType, str]) -> bool:
    """Whether such a point is before the instruction that a frame runs next; `last`: the frames' latest instructions.

    Called by a trace function for each event "opcode".
    """
    before = last.get(frame, "RESUME")
    last[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return before.startswith(AFTER)
