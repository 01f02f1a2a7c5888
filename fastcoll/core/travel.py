"""The narrow types in which float32 travels between ranks.

An array is converted to *items*. An item of bfloat16 or float16 is one element. An item of int8 is a block: 256
elements as integers of -127..127, and behind them the block's scale in float32, by which they are multiplied. Elements
that an incomplete last block lacks are zeros.

Ranks compare the dtype of the items like that of any array (signature.py), so a rank with another `travel` is found
before data moves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..errors import ArrayError, UsageError
from .reduce_op import AVG, SUM, ReduceOp

Array = np.ndarray[Any, np.dtype[Any]]

BLOCK = 256
"""Elements that share a scale in int8. The scale adds 1.6 % to the bytes."""

NARROW, WIDEN = -1, -2
"""The `op` by which the reducer of a narrow type (kernels/narrow.py) converts from float32, and to float32."""


class Travel(NamedTuple):
    """A narrow type.

    Attributes:
        name: the name that callers pass as `travel`.
        elements: the elements of an item.
        items: the dtype of items, which no array of a caller has.
    """

    name: str
    elements: int
    items: np.dtype[Any]

    def nbytes(self, count: int) -> int:
        """Return the bytes in which `count` elements travel."""
        return -(-count // self.elements) * self.items.itemsize


TRAVELS = {
    name: Travel(name, elements, np.dtype([(f"fastcoll: float32 as {name}", np.uint8, (nbytes,))]))
    for name, elements, nbytes in (("bfloat16", 1, 2), ("float16", 1, 2), ("int8", BLOCK, BLOCK + 4))
}

TRAVEL_OF = {made.items: made for made in TRAVELS.values()}
"""The narrow type of a dtype of items."""


class Narrow(NamedTuple):
    """How the array of one call travels.

    Attributes:
        travel: the narrow type.
        lost: the array for error feedback, or None.
    """

    travel: Travel
    lost: Array | None


def add_lost(narrow: Narrow | None, x: Array) -> None:
    """Add `lost` to the array, and clear it; for a reduction in float32 that comes before any rounding."""
    if narrow is not None and narrow.lost is not None:
        x.reshape(-1)[...] += narrow.lost.reshape(-1)
        narrow.lost[...] = 0


def refuse_unknown(travel: Any) -> None:
    if travel not in TRAVELS:
        raise UsageError(f"travel is {travel!r}; give {', '.join(map(repr, TRAVELS))} or None")


def checked(travel: Any, x: Any, op: ReduceOp, lost: Any) -> Narrow:
    """Return how an array travels, or refuse the arguments.

    Raises:
        UsageError: the type is unknown or missing, or the reduction is not SUM or AVG.
        ArrayError: an array does not suit.
    """
    if travel is None:
        names = ", ".join(map(repr, TRAVELS))
        raise UsageError(f"lost is given without travel; give travel, one of {names}, or leave lost out")
    refuse_unknown(travel)
    if not isinstance(op, ReduceOp) or op.code not in (SUM, AVG):
        raise UsageError(f"op is {op!r}; with travel={travel!r} give ReduceOp.SUM or ReduceOp.AVG")
    if type(x) is not np.ndarray or x.dtype != np.float32:
        raise ArrayError(
            f"travel={travel!r} needs an array of float32 in host memory, got {type(x).__name__} of {x.dtype}; "
            "leave travel out"
        )
    if lost is not None and not (
        isinstance(lost, np.ndarray)
        and lost.dtype == x.dtype
        and lost.size == x.size
        and lost.flags.c_contiguous
        and lost.flags.writeable
        and not np.may_share_memory(lost, x)
    ):
        raise ArrayError(
            f"lost must be another contiguous, writable float32 ndarray of {x.size} elements, as tensor has"
        )
    return Narrow(TRAVELS[travel], lost)
