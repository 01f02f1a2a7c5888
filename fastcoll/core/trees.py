"""Trees: dicts, lists and tuples of arrays, nested as they may be, which one call takes as a whole.

All ranks take the arrays in one order: lists and tuples as they stand, dicts sorted by their keys' types and `repr`.
None stands for no array. The *structure* says all of it, with the dtype and shape of each array, and ranks compare it,
so that different trees are a MismatchError on all of them. Small arrays travel together, large ones by themselves.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import ArrayError, MismatchError
from ..interop.arrays import Adopted
from .operation import Call

CONTAINERS = (dict, list, tuple)

# Bytes. Packing copies an array twice, a call of its own costs a meeting: with 2 ranks on 2 cores that others use too,
# 8 float32 arrays in one tree, packed against alone: 512 KiB each 12.2 : 16.6 ms, 1 MiB 22.1 : 19.4, 4 MiB 149 : 66.
LARGE = 1 << 20
_SHOWN = 1000  # characters of a structure in an error


class Tree(Adopted):
    """One rank's tree, adopted.

    Args:
        tree: the caller's.
        adopt: takes an array and its name in.

    Attributes:
        structure: what ranks compare.
        leaves: its arrays, in the common order; an empty one if it has none, as ranks must meet also then.
    """

    __slots__ = ("_apart", "_given", "_tree", "leaves", "structure")

    def __init__(self, tree: Any, adopt: Callable[[Any, str], Adopted]) -> None:
        self._tree = tree
        self._given: list[Any] = []
        self.leaves: list[Adopted] = []
        self.structure = self._flatten(tree, "tensor", adopt)
        if not self.leaves:
            self.leaves.append(Adopted(np.empty(0, np.float32)))
        if len({type(leaf.array) for leaf in self.leaves}) > 1:
            raise ArrayError(
                "some arrays of the tree are on a GPU and some are not; make a call for each kind"
            )
        self._apart = [] if self.on_gpu else sorted(_large_and_apart(self.arrays))

    @property
    def arrays(self) -> list[Any]:
        """The leaves' arrays."""
        return [leaf.array for leaf in self.leaves]

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are on GPUs."""
        return type(self.leaves[0].array) is not np.ndarray

    @property
    def parts(self) -> list[int]:
        """The structure and how it travels, for the calls' fingerprints."""
        return [zlib.crc32(self.structure.encode()), *self._apart]

    def batches(self, kind: Callable[[Any], Any]) -> list[list[Adopted]]:
        """The leaves that travel together: those of one kind; large ones that share no memory by themselves."""
        batches: dict[Any, list[Adopted]] = {}
        for index, leaf in enumerate(self.leaves):
            batches.setdefault(index if index in self._apart else str(kind(leaf.array)), []).append(leaf)
        return list(batches.values())

    def in_turn(self, calls: Sequence[Call]) -> Call:
        """The calls one after the other; what they compare is the same, so a mismatch is found by the first."""

        def run() -> None:
            try:
                for call in calls:
                    call()
            except MismatchError as error:
                shown = self.structure if len(self.structure) <= _SHOWN else f"{self.structure[:_SHOWN]} ..."
                raise MismatchError(f"{error}. This rank gave {shown}") from None

        return run

    def finish(self) -> Any:
        """Finish the leaves; a tree with new arrays in the place of immutable ones, or None if there are none."""
        done = [leaf.finish() for leaf in self.leaves]
        if all(new is None for new in done):
            return None
        pairs = zip(done, self._given, strict=True)
        return _rebuilt(self._tree, iter([old if new is None else new for new, old in pairs]))

    def _flatten(self, x: Any, name: str, adopt: Callable[[Any, str], Adopted]) -> str:
        if x is None:
            return "None"
        if isinstance(x, dict):
            items = (f"{key!r}: {self._flatten(x[key], f'{name}[{key!r}]', adopt)}" for key in _keys(x))
            return f"{{{', '.join(items)}}}"
        if isinstance(x, list | tuple):
            inner = ", ".join(self._flatten(y, f"{name}[{index}]", adopt) for index, y in enumerate(x))
            return f"[{inner}]" if isinstance(x, list) else f"({inner})"
        leaf = adopt(x, name)
        self.leaves.append(leaf)
        self._given.append(x)
        return f"{leaf.array.dtype} {leaf.array.shape}"


def _keys(x: dict[Any, Any]) -> list[Any]:
    """A dict's keys in the order that all ranks take."""
    return sorted(x, key=lambda key: (type(key).__name__, repr(key)))


def _rebuilt(x: Any, arrays: Iterator[Any]) -> Any:
    """A tree as x, with these arrays."""
    if x is None:
        return None
    if isinstance(x, dict):
        new = copy.copy(x)
        new.update({key: _rebuilt(x[key], arrays) for key in _keys(x)})
        return new
    if isinstance(x, list | tuple):
        items = [_rebuilt(y, arrays) for y in x]
        return x._make(items) if hasattr(x, "_make") else type(x)(items)  # a namedtuple
    return next(arrays)


def _large_and_apart(arrays: Sequence[Any]) -> Iterator[int]:
    """Which arrays are large and share no memory with another: in place, that would be reduced twice."""
    if all(x.nbytes < LARGE for x in arrays):
        return
    spans = sorted(
        (x.ctypes.data, x.ctypes.data + x.nbytes, index) for index, x in enumerate(arrays) if x.nbytes
    )
    furthest = 0
    for place, (start, end, index) in enumerate(spans):
        following = spans[place + 1][0] if place + 1 < len(spans) else end
        if arrays[index].nbytes >= LARGE and furthest <= start and end <= following:
            yield index
        furthest = max(furthest, end)
