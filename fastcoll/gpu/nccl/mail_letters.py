"""Letter: what two ranks tell each other on the host about one message between their GPUs.

    bytes    0  number of the message, the sender's own
             8  verdict, of an answer
            16  kind: tag and dtype of the array on this side, as in messages/
            24  nbytes of the array on this side
            32  Seat of this side (nccl_seats.py); in the first answer that says NCCL with the communicator's id

An envelope, on the user's tag, goes before the message, and the answer comes back on ANSWER.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from ...core.operands import LARGEST_TAG
from ...interop.arrays import Array
from ...p2p.transfers import LETTER
from .seats import Seat

ANSWER, DATA = LARGEST_TAG + 1, LARGEST_TAG + 2
"""Tags that no user has: of answers, and of messages that go through the host all the same."""

MISFIT, NOTHING, STAGED, NCCL = range(1, 5)
"""Verdicts: another size or dtype; both arrays are empty; through the host; by NCCL."""

_HEAD = struct.Struct("<4q")


@dataclass(frozen=True)
class Letter:
    """See this module's docstring."""

    number: int
    kind: int
    nbytes: int
    seat: Seat
    verdict: int = 0

    def to_array(self) -> Array:
        """As a host array that can be sent."""
        array = blank()
        flat = array.view(np.uint8)
        flat[: _HEAD.size] = np.frombuffer(
            _HEAD.pack(self.number, self.verdict, self.kind, self.nbytes), np.uint8
        )
        row = self.seat.to_row()
        flat[_HEAD.size : _HEAD.size + row.size] = row
        return array

    @classmethod
    def from_array(cls, array: Array) -> Letter:
        """What `to_array` gave."""
        flat = array.view(np.uint8)
        number, verdict, kind, nbytes = _HEAD.unpack(flat[: _HEAD.size].tobytes())
        return cls(number, kind, nbytes, Seat.from_row(flat[_HEAD.size :]), verdict)


def blank() -> Array:
    """An array to receive a letter into."""
    return np.zeros(1, LETTER)
