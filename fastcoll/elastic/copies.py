"""Copy trees of values into existing memory, and convert them to a form that one rank can send to the others.

A tree is a value, or a nesting of dicts, lists and tuples of values, which are its leaves. There are two kinds of
leaves. Arrays of NumPy and dense tensors are copied in place and sent separately. Other leaves are copied by
`copy.deepcopy`, or `clone` if they are tensors, and sent by pickle. If an object is in a tree twice, it is one object
in the copy too. Each existing array receives the copy of at most one object.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.trees import flat, rebuilt, sequence_like

Tree = Any

Path = tuple[Any, ...]
"""The keys and indices that lead to a value in a tree."""


def is_array(x: Any) -> bool:
    """Return whether a leaf is copied in place: an ndarray without objects, or a dense tensor."""
    if type(x) is np.ndarray:
        return not x.dtype.hasobject
    return _is_tensor(x) and x.layout is sys.modules["torch"].strided and not x.is_quantized


def replaced(tree: Tree, replacement: Callable[[Path, Any], Any], path: Path = ()) -> Tree:
    """Return a copy of a tree with `replacement(path, x)` in place of each x, a leaf or a dict, list or tuple.

    If the replacement of a dict, list or tuple is itself, the values inside it are replaced.
    """
    new = replacement(path, tree)
    if new is not tree:
        return new
    if isinstance(tree, dict):
        new = copy.copy(tree)
        for key, x in tree.items():
            new[key] = replaced(x, replacement, (*path, key))
        return new
    if isinstance(tree, list | tuple):
        items = [replaced(x, replacement, (*path, index)) for index, x in enumerate(tree)]
        return sequence_like(tree, items)
    return tree


Writes = Callable[[], None]
"""A function that copies arrays into existing ones. It may be called again if an exception has ended it."""


def copied(tree: Tree, into: Tree = None) -> tuple[Tree, Writes]:
    """Return a copy of a tree, and a function to call next, which writes the arrays that are copied in place.

    Each array is copied into the array at the same path of `into`, if both are alike. No array of `into` changes before
    the function is called, because other values may turn out to be impossible to copy.
    """
    buffers, copies, memo = _Buffers(into), dict[int, Any](), dict[int, Any]()
    pairs: list[tuple[Any, Any]] = []

    def copy_of(path: Path, x: Any) -> Any:
        if not is_array(x):
            if _is_tensor(x) and id(x) not in memo:
                memo[id(x)] = x.detach().clone()
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
            if type(x) is np.ndarray:
                np.copyto(buffer, x)
            else:
                buffer.detach().copy_(x.detach())

    return rebuilt(tree, iter([copy_of(path, x) for path, x in flat(tree)])), write


@dataclass(frozen=True)
class Slot:
    """A placeholder for an array in a tree that is sent without its arrays."""

    index: int
    shape: tuple[int, ...]
    dtype: Any
    device: str | None  # the kind of a tensor's device, such as cuda; None for an ndarray


def without_arrays(tree: Tree) -> tuple[Tree, list[Any]]:
    """Return a tree with a `Slot` in place of each array, and the list of the arrays, in host memory."""
    slots, arrays = dict[int, Slot](), list[Any]()

    def slot_for(x: Any) -> Any:
        if not is_array(x):
            return x
        if id(x) not in slots:
            slots[id(x)] = Slot(len(arrays), tuple(x.shape), x.dtype, _device(x))
            arrays.append(x.detach().cpu() if _is_tensor(x) else x)
        return slots[id(x)]

    return rebuilt(tree, iter([slot_for(x) for _, x in flat(tree)])), arrays


def with_buffers(skeleton: Tree, into: Tree) -> tuple[Tree, list[Any], Writes]:
    """Replace the slots of `skeleton` by arrays; return this tree, arrays to receive into, and a function to call next.

    `skeleton` is a tree from `without_arrays`. An array at the same path of `into` is used if it fits, a tensor on any
    device. A new tensor is on a device of the source's kind, or on the CPU if there is none here. The arrays to receive
    into are in host memory; the function copies what they received to tensors on other devices.
    """
    buffers, found = _Buffers(into), dict[int, Any]()

    def buffer_for(path: Path, x: Any) -> Any:
        if not isinstance(x, Slot):
            return x
        if x.index not in found:
            buffer = buffers.take(path, x.shape, x.dtype)
            if buffer is None and x.device is not None:
                torch: Any = sys.modules["torch"]
                kind = getattr(torch, x.device, None)  # a module, but not for the device meta
                device = "cpu" if kind is not None and not kind.is_available() else x.device
                buffer = torch.empty(x.shape, dtype=x.dtype, device=device)
            found[x.index] = np.empty(x.shape, x.dtype) if buffer is None else buffer
        return found[x.index]

    tree = rebuilt(skeleton, iter([buffer_for(path, x) for path, x in flat(skeleton)]))
    arrays = [x.detach() if _is_tensor(x) else x for _, x in sorted(found.items())]
    rooms = [x if _device(x) in (None, "cpu") else x.new_empty(x.shape, device="cpu") for x in arrays]

    def write() -> None:
        for x, room in zip(arrays, rooms, strict=True):
            if room is not x:
                x.copy_(room)

    return tree, rooms, write


class _Buffers:
    """The arrays of a tree, as memory for copies; `take` returns each array only once."""

    def __init__(self, tree: Tree) -> None:
        self._at = {path: x for path, x in flat(tree) if is_array(x)}
        self._taken: set[int] = set()

    def take(self, path: Path, shape: tuple[int, ...], dtype: Any, device: str | None = None) -> Any:
        """Return the array at a path if it is free and has this shape, dtype and device (None: any); else None."""
        x = self._at.get(path)
        if x is None or id(x) in self._taken or (tuple(x.shape), x.dtype) != (shape, dtype):
            return None
        if type(x) is np.ndarray:
            is_free, strides = x.flags.writeable, x.strides
        else:
            is_free, strides = device in (None, x.device.type), x.stride()
        if not is_free:
            return None
        if 0 in strides and any(n > 1 and stride == 0 for n, stride in zip(shape, strides, strict=True)):
            return None  # its elements share memory, as after `expand`
        self._taken.add(id(x))
        return x


def _is_tensor(x: Any) -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _device(x: Any) -> str | None:
    return x.device.type if _is_tensor(x) else None
