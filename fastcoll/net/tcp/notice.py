"""What ranks tell one another over control connections, as bytes.

A notice has 1,120 bytes (big-endian), whatever it says, so nothing announces a length that has to be believed:

    offset  bytes  field
    0       8      magic "FASTNOTE"
    8       1      state of the sender: 1 left in order, 2 failed the group, 3 is leaving it
    9       1      what happened: 1 a process died or cannot be reached, 2 one did not come in time, else 0
    10      2      number of ranks at fault
    12      4      group rank of whoever first said so
    16      4      length of the text
    20      12     zero
    32      64     global ranks at fault, 4 bytes each
    96      1024   text, UTF-8
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...core.monitor import FAILED, LEAVING, LEFT

_MAGIC = b"FASTNOTE"
MOST_RANKS = 16
TEXT_BYTES = 1024
_DIED, _LATE = 1, 2
_FORMAT = struct.Struct(f"!8sBBHII12s{MOST_RANKS}I{TEXT_BYTES}s")
NOTICE_SIZE = _FORMAT.size


class NoticeError(ValueError):
    """Bytes that are no notice."""


@dataclass(frozen=True)
class Notice:
    """That a rank left or failed the group, or is leaving it.

    Attributes:
        state: LEFT, FAILED or LEAVING.
        origin: group rank of whoever first said so; others pass it on.
        ranks: global ranks at fault, at most 16.
        died: whether those died or cannot be reached.
        late: whether those did not come in time.
        text: why, in words.
    """

    state: int
    origin: int
    ranks: tuple[int, ...] = ()
    died: bool = False
    late: bool = False
    text: str = ""

    def to_bytes(self) -> bytes:
        """The notice, its text cut to 1 KiB and its ranks to 16."""
        text = self.text.encode()[:TEXT_BYTES].decode(errors="ignore").encode()
        ranks = self.ranks[:MOST_RANKS]
        filled = (*ranks, *(0 for _ in range(MOST_RANKS - len(ranks))))
        what = _DIED if self.died else _LATE if self.late else 0
        return _FORMAT.pack(
            _MAGIC, self.state, what, len(ranks), self.origin, len(text), bytes(12), *filled, text
        )

    @classmethod
    def from_bytes(cls, data: bytes, size: int) -> Notice:
        """The notice of a rank of a group of `size`.

        Raises:
            NoticeError: it is none.
        """
        magic, state, what, count, origin, length, zero, *ranks, text = _FORMAT.unpack(data)
        if (
            magic != _MAGIC
            or state not in (LEFT, FAILED, LEAVING)
            or what not in (0, _DIED, _LATE)
            or count > MOST_RANKS
            or origin >= size
            or length > TEXT_BYTES
            or any(zero)
        ):
            raise NoticeError(f"not a notice: {data[:32]!r}")
        why = text[:length].decode(errors="replace")
        return cls(state, origin, tuple(ranks[:count]), what == _DIED, what == _LATE, why)
