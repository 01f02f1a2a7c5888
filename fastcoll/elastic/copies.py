"""Copy trees of values into existing memory, and convert them to a form that one rank can send to the others.

A tree is a value, or a nesting of dicts, lists and tuples of values, which are its leaves. There are two kinds of
leaves. Arrays of NumPy and torch are copied in place and sent separately. Other leaves are copied by `copy.deepcopy`
and sent by pickle. If an object is in a tree twice, it is one object in the copy too. Each existing array receives the
copy of at most one object.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.trees import flat, rebuilt

Tree = Any


def is_array(x: Any) -> bool:
    """Return whether a leaf is copied in place: an ndarray without objects, or a tensor."""
    return (type(x) is np.ndarray and not x.dtype.hasobject) or _is_tensor(x)


Writes = Callable[[], None]
"""A function that copies arrays into existing ones. It may be called again if an exception has ended it."""


def copied(tree: Tree, into: Tree = None) -> tuple[Tree, Writes]:
    """Return a copy of a tree, and a function to call next, which writes the arrays that are copied in place.

    Each array is copied into the array at the same path of `into`, if both are alike. No array of `into` changes before
    the function is called, because other values may turn out to be impossible to copy.
    """
    buffers, copies, memo = _Buffers(into), dict[int, Any](), dict[int, Any]()
    pairs: list[tuple[Any, Any]] = []

    def copy_of(path: tuple[Any, ...], x: Any) -> Any:
        if not is_array(x):
            return copy.deepcopy(x, memo)
        if id(x) not in copies:
            buffer = buffers.take(path, tuple(x.shape), x.dtype, _device(x))
            if buffer is None:
                buffer = x.detach().clone() if _is_tensor(x) else x.copy()
            else:
                pairs.append((buffer, x))
            copies[id(x)] = buffer
        return copies[id(x)]

    def write() -> None:
        for buffer, x in pairs:
            if _is_tensor(x):
                buffer.detach().copy_(x.detach())
            else:
                np.copyto(buffer, x)

    return rebuilt(tree, iter([copy_of(path, x) for path, x in flat(tree)])), write


@dataclass(frozen=True)
class Slot:
    """A placeholder for an array in a tree that is sent without its arrays."""

    index: int
    shape: tuple[int, ...]
    dtype: Any
    is_tensor: bool


def without_arrays(tree: Tree) -> tuple[Tree, list[Any]]:
    """Return a tree with a `Slot` in place of each array, and the list of the arrays, in host memory."""
    slots, arrays = dict[int, Slot](), list[Any]()

    def slot_for(x: Any) -> Any:
        if not is_array(x):
            return x
        if id(x) not in slots:
            slots[id(x)] = Slot(len(arrays), tuple(x.shape), x.dtype, _is_tensor(x))
            arrays.append(x.detach().cpu() if _is_tensor(x) else x)
        return slots[id(x)]

    return rebuilt(tree, iter([slot_for(x) for _, x in flat(tree)])), arrays


def with_buffers(skeleton: Tree, into: Tree) -> tuple[Tree, list[Any]]:
    """Replace the slots of `skeleton` by arrays to receive into; return this tree and the list of the arrays.

    `skeleton` is a tree from `without_arrays`. An array at the same path of `into` is used if it fits.
    """
    buffers, found = _Buffers(into), dict[int, Any]()

    def buffer_for(path: tuple[Any, ...], x: Any) -> Any:
        if not isinstance(x, Slot):
            return x
        if x.index not in found:
            torch: Any = sys.modules["torch"] if x.is_tensor else None
            buffer = buffers.take(path, x.shape, x.dtype, torch and torch.device("cpu"))
            found[x.index] = (torch or np).empty(x.shape, dtype=x.dtype) if buffer is None else buffer
        return found[x.index]

    tree = rebuilt(skeleton, iter([buffer_for(path, x) for path, x in flat(skeleton)]))
    arrays = [found[index] for index in range(len(found))]
    return tree, [x.detach() if _is_tensor(x) else x for x in arrays]


class _Buffers:
    """The arrays of a tree, as memory for copies; `take` returns each array only once."""

    def __init__(self, tree: Tree) -> None:
        self._at = {path: x for path, x in flat(tree) if is_array(x)}
        self._taken: set[int] = set()

    def take(self, path: tuple[Any, ...], shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        """Return the array at a path if it is free and has this shape, dtype and device; else None."""
        x = self._at.get(path)
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
