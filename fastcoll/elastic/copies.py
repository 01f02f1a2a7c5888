"""Copies of trees of values in memory that is there already, and trees as one rank sends them to the others.

Leaves are of two kinds. Arrays, NumPy's and torch's, are copied in place and travel by themselves. All else is copied
by `copy.deepcopy` and travels by pickle. What is one object at two places of a tree is one object in its copy, and no
memory is written to for two places.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.trees import flat, rebuilt

Tree = Any


def is_array(x: Any) -> bool:
    """Whether a leaf is copied in place: an ndarray without objects, or a tensor."""
    return (type(x) is np.ndarray and not x.dtype.hasobject) or _is_tensor(x)


def copied(tree: Tree, into: Tree = None) -> Tree:
    """A copy of a tree; its arrays are those at the same places of `into`, where they fit."""
    rooms, copies, memo = _Rooms(into), dict[int, Any](), dict[int, Any]()

    def copy_of(place: tuple[Any, ...], x: Any) -> Any:
        if not is_array(x):
            return copy.deepcopy(x, memo)
        if id(x) not in copies:
            room = rooms.take(place, tuple(x.shape), x.dtype, _device(x))
            copies[id(x)] = _fresh(x) if room is None else _write(room, x)
        return copies[id(x)]

    return rebuilt(tree, iter([copy_of(place, x) for place, x in flat(tree)]))


@dataclass(frozen=True)
class Slot:
    """Stands for an array in a tree that travels without its arrays."""

    index: int
    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool


def parted(tree: Tree) -> tuple[Tree, list[Any]]:
    """A tree with slots in the places of its arrays, and these, in host memory."""
    slots, arrays = dict[int, Slot](), list[Any]()

    def slot_for(x: Any) -> Any:
        if not is_array(x):
            return x
        if id(x) not in slots:
            slots[id(x)] = Slot(len(arrays), tuple(x.shape), x.dtype, _is_tensor(x))
            arrays.append(x.detach().cpu() if _is_tensor(x) else x)
        return slots[id(x)]

    return rebuilt(tree, iter([slot_for(x) for _, x in flat(tree)])), arrays


def furnished(skeleton: Tree, into: Tree) -> tuple[Tree, list[Any]]:
    """A tree that `parted` has made with arrays to receive into, and these; they are those of `into` where they fit."""
    rooms, found = _Rooms(into), dict[int, Any]()

    def room_for(place: tuple[Any, ...], x: Any) -> Any:
        if not isinstance(x, Slot):
            return x
        if x.index not in found:
            torch: Any = sys.modules["torch"] if x.is_tensor else None
            room = rooms.take(place, x.shape, x.dtype, torch and torch.device("cpu"))
            found[x.index] = (torch or np).empty(x.shape, dtype=x.dtype) if room is None else room
        return found[x.index]

    tree = rebuilt(skeleton, iter([room_for(place, x) for place, x in flat(skeleton)]))
    arrays = [found[index] for index in range(len(found))]
    return tree, [x.detach() if _is_tensor(x) else x for x in arrays]


class _Rooms:
    """The arrays of a tree, to be written to, each by one only."""

    def __init__(self, tree: Tree) -> None:
        self._at = {place: x for place, x in flat(tree) if is_array(x)}
        self._taken: set[int] = set()

    def take(self, place: tuple[Any, ...], shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        """The array at this place, if it is free and just like this; `device` is a tensor's. Else None."""
        x = self._at.get(place)
        if x is None or id(x) in self._taken or (tuple(x.shape), x.dtype) != (shape, dtype):
            return None
        if _device(x) != device or (type(x) is np.ndarray and not x.flags.writeable):
            return None
        self._taken.add(id(x))
        return x


def _is_tensor(x: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _device(x: Any) -> Any:
    return x.device if _is_tensor(x) else None


def _fresh(x: Any) -> Any:
    return x.detach().clone() if _is_tensor(x) else x.copy()


def _write(room: Any, x: Any) -> Any:
    if _is_tensor(x):
        room.detach().copy_(x.detach())
    else:
        np.copyto(room, x)
    return room
