"""Trees (nested dicts, lists and tuples of arrays) as the argument of one call; and all_gather into new arrays.

All ranks use the arrays in the same order: lists and tuples by index, dicts sorted by the keys' types and `repr`.
None means "no array". The *structure* encodes the nesting, and the dtype and shape of each array. Ranks compare it, so
different trees raise MismatchError on all ranks. Small arrays are packed together, and each large array has a call of
its own.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arrays.arrays import Array, FunctionalResult, ImportedArray, room_like
from ..errors import ArrayError, MismatchError, UsageError
from .arguments import Caller
from .operands import arrays_of
from .operation import Call, Operation, flattened, then_split
from .reduce_op import ReduceOp
from .signature import SHAPES, dtype_code

CONTAINERS = (dict, list, tuple)

# Bytes. Packing copies an array twice; a separate call costs one synchronisation. Measured with 8 float32 arrays in one
# tree, and 2 ranks on 2 shared cores: arrays of 512 KiB take 12.2 ms packed and 16.6 ms in separate calls; arrays of
# 1 MiB take 22.1 and 19.4 ms; arrays of 4 MiB take 149 and 66 ms.
LARGE = 1 << 20
_SHOWN = 1000  # how many characters of a structure an error may show


class Tree(ImportedArray):
    """One rank's tree, with its arrays imported by `import_array`.

    Attributes:
        structure: the text that ranks compare.
        leaves: the arrays, in the same order on all ranks. One empty array if the tree has no arrays, since ranks must
            make a call to compare their trees.
    """

    __slots__ = ("_apart", "_given", "_tree", "leaves", "structure")

    def __init__(self, tree: Any, import_array: Callable[..., ImportedArray]) -> None:
        self._tree = tree
        self._given: list[Any] = []
        self.leaves: list[ImportedArray] = []

        def described(x: Any, name: str) -> str:
            leaf = import_array(x, what=name)
            self.leaves.append(leaf)
            self._given.append(x)
            return f"{leaf.array.dtype} {leaf.array.shape}"

        self.structure = outline(tree, described)
        if not self.leaves:
            self.leaves.append(ImportedArray(np.empty(0, np.float32)))
        if len({type(leaf.array) for leaf in self.leaves}) > 1:
            raise ArrayError(
                "some arrays of the tree are on a GPU and some are not; make a call for each kind"
            )
        self._apart = [] if self.on_gpu else [k for k, x in enumerate(self.arrays) if x.nbytes >= LARGE]

    @property
    def arrays(self) -> list[Any]:
        return [leaf.array for leaf in self.leaves]

    @property
    def on_gpu(self) -> bool:
        return type(self.leaves[0].array) is not np.ndarray

    def unshare(self) -> None:
        """Replace leaves by copies, so that no two leaves share memory if the tree has several calls.

        Two calls would reduce shared memory twice.
        """
        if not self._apart or len(self.leaves) == 1:
            return
        end = 0
        by_address = sorted(range(len(self.leaves)), key=lambda k: self.leaves[k].array.ctypes.data)
        for k in by_address:
            x, start = self.leaves[k].array, self.leaves[k].array.ctypes.data
            if x.nbytes and start < end:
                self.leaves[k] = ImportedArray(x.copy(), owner=x)
            end = max(end, start + x.nbytes)

    @property
    def parts(self) -> tuple[int, ...]:
        """Return a checksum of the structure, and the indices of the leaves that have their own calls.

        Both are part of the calls' signatures.
        """
        return zlib.crc32(self.structure.encode()), *self._apart

    def batches(self, kind: Callable[[Any], Any]) -> list[list[ImportedArray]]:
        """Divide the leaves among calls; return the leaves of each call.

        A large leaf has its own call. Of the other leaves, those with an equal result of `kind` share a call.
        """
        batches: dict[Any, list[ImportedArray]] = {}
        for index, leaf in enumerate(self.leaves):
            batches.setdefault(index if index in self._apart else str(kind(leaf.array)), []).append(leaf)
        return list(batches.values())

    def run_exclusively(self, calls: Sequence[Call]) -> Call:
        """Return a call that runs `calls` in order.

        The signature of every call includes `parts`, so the first call finds a mismatch of the trees.
        """

        def run() -> None:
            try:
                for call in calls:
                    call()
            except MismatchError as error:
                shown = self.structure if len(self.structure) <= _SHOWN else f"{self.structure[:_SHOWN]} ..."
                raise MismatchError(f"{error}. This rank gave {shown}") from None

        return run

    def finish(self) -> Any:
        """Finish the leaves; return a tree with new arrays for immutable ones, or None if no array is immutable."""
        done = [leaf.finish() for leaf in self.leaves]
        if all(new is None for new in done):
            return None
        pairs = zip(done, self._given, strict=True)
        return rebuilt(self._tree, iter([old if new is None else new for new, old in pairs]))


def outline(x: Any, describe: Callable[[Any, str], str], name: str = "tensor") -> str:
    """Return the nesting of a tree as text, in the form of Python's literals.

    The text of a leaf is `describe(leaf, name)`, which is called in the order that all ranks share. Dynamo traces this
    function.
    """
    if x is None:
        return "None"
    if isinstance(x, dict):
        items = [f"{key!r}: {outline(x[key], describe, f'{name}[{key!r}]')}" for key in _keys(x)]
        return f"{{{', '.join(items)}}}"
    if isinstance(x, list | tuple):
        inner = ", ".join([outline(y, describe, f"{name}[{index}]") for index, y in enumerate(x)])
        if isinstance(x, list):
            return f"[{inner}]"
        return f"({inner},)" if len(x) == 1 else f"({inner})"
    return describe(x, name)


def _keys(x: dict[Any, Any]) -> list[Any]:
    by_text = {(type(key).__name__, repr(key)): key for key in x}
    if len(by_text) < len(x):
        raise UsageError(
            f"the keys {', '.join(map(repr, x))} of a dict cannot be put in an order, because some have the same type "
            "and repr; use other keys"
        )
    return [by_text[text] for text in sorted(by_text)]


def flat(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the leaves of a tree in the order that all ranks share, each with the keys and indices that lead to it."""
    if isinstance(x, dict):
        for key in _keys(x):
            yield from flat(x[key], (*path, key))
    elif isinstance(x, list | tuple):
        for index, y in enumerate(x):
            yield from flat(y, (*path, index))
    elif x is not None:
        yield path, x


def rebuilt(x: Any, arrays: Iterator[Any]) -> Any:
    """Return a tree with the structure of x and the leaves `arrays`."""
    if x is None:
        return None
    if isinstance(x, dict):
        new = copy.copy(x)
        for key in _keys(x):
            new[key] = rebuilt(x[key], arrays)  # a Counter's `update` would add
        return new
    if isinstance(x, list | tuple):
        return sequence_like(x, [rebuilt(y, arrays) for y in x])
    return next(arrays)


def sequence_like(x: Any, items: list[Any]) -> Any:
    """Return a list, tuple or namedtuple of the type of x with these items."""
    return x._make(items) if hasattr(x, "_make") else type(x)(items)


def all_reduce(group: Caller, tensors: Any, op: ReduceOp, async_op: bool) -> Any:
    with group.preparing("all_reduce"):
        tree = Tree(tensors, partial(group.import_array, writable=True, functional=True))
        tree.unshare()
        batches = tree.batches(lambda x: x.dtype)
        calls = []
        for leaves in batches:
            xs = arrays_of(leaves)
            calls.append(group.planned(Operation("all_reduce_coalesced", xs, xs, op, parts=tree.parts)))
    return _run(group, "all_reduce", tree, batches, calls, async_op)


def broadcast(group: Caller, tensors: Any, root: Any, async_op: bool) -> Any:
    def planned(leaves: Sequence[ImportedArray]) -> Call:
        if tree.on_gpu:
            return plan(leaves[0].array)
        xs = [leaf.array.reshape(-1).view(np.uint8) for leaf in leaves]
        flat = xs[0] if len(xs) == 1 else flattened(xs)
        return plan(flat) if is_root or len(xs) == 1 else then_split(plan(flat), flat, xs)

    def plan(x: Any) -> Call:
        return group.planned(Operation("broadcast", (x,), (x,), root=root, parts=tree.parts))

    with group.preparing("broadcast"):
        root = group.checked_rank("src", root)
        is_root = group.rank == root
        tree = Tree(tensors, partial(group.import_array, writable=not is_root, functional=True))
        batches = [[leaf] for leaf in tree.leaves] if tree.on_gpu else tree.batches(lambda x: "bytes")
        calls = list(map(planned, batches))
    return _run(group, "broadcast", tree, batches, calls, async_op)


def _run(
    group: Caller,
    name: str,
    tree: Tree,
    batches: list[list[ImportedArray]],
    calls: list[Call],
    async_op: bool,
) -> Any:
    if not tree.on_gpu:
        return group.run(name, tree.run_exclusively(calls), (tree,), async_op)
    # A stream of the GPU runs the calls in order, so the last call's Work is complete when all calls are.
    for call, leaves in zip(calls[:-1], batches, strict=False):
        group.run(name, call, leaves, False)
    return group.run(name, calls[-1], batches[-1], async_op)


# ---- arrays of unknown shape ---------------------------------------------------------------------------

# The dtype and shape of a rank's array, which the other ranks need before they allocate memory for it.
_SHAPE_NOTE = np.dtype([("code", "i8"), ("dtype", "S64"), ("ndim", "i8"), ("shape", "i8", 64)])


def all_gather_new(group: Caller, tensor: Any, async_op: bool) -> Any:
    """Gather into a list of new arrays; the ranks exchange shapes first."""
    preparing = group.preparing("all_gather")
    with preparing:
        x = group.import_array(tensor, writable=False)
        on_host = type(x.array) is np.ndarray
        if not on_host and (async_op or not hasattr(tensor, "new_empty")):
            raise UsageError(
                "all_gather(tensor) without a list takes, on a GPU, only torch's tensors and no async_op; give a "
                "list of arrays to gather into"
            )
        note, notes = np.zeros(1, _SHAPE_NOTE), np.empty(group.size, _SHAPE_NOTE)
        note["code"], note["dtype"] = dtype_code(x.array.dtype), str(x.array.dtype).encode()
        note["ndim"], note["shape"][0, : x.array.ndim] = x.array.ndim, x.array.shape
        own, rows = note.view(np.int64), tuple(notes.view(np.int64).reshape(group.size, -1))
        exchange = group.planned(Operation("all_gather", rows, (own,), parts=SHAPES))
    if not on_host:
        group.run("all_gather", exchange, (), False)
        shapes = _agreed_shapes(notes, group.ranks)
        with preparing:
            outs = [tensor.new_empty(shape) for shape in shapes]
        group.fast.all_gather(outs, tensor)
        return outs
    rooms: list[FunctionalResult] = []

    def call() -> None:
        exchange()
        shapes = _agreed_shapes(notes, group.ranks)
        try:
            rooms.extend(room_like(tensor, x.array, shape) for shape in shapes)
        except Exception as error:  # there is no memory for them
            preparing.refuse_inside(error)
            raise
        group.planned(Operation("all_gather", tuple(room.array for room in rooms), (x.array,)))()

    made = FunctionalResult(own, lambda _: [room.finish() for room in rooms])
    return group.run("all_gather", call, (made,), async_op)


def _agreed_shapes(notes: Array, ranks: Sequence[int]) -> list[list[int]]:
    """Return every rank's shape; raise MismatchError, on all ranks, if dtypes or numbers of dimensions differ."""
    shapes = [note["shape"][: note["ndim"]].tolist() for note in notes]
    if len(set(notes["code"].tolist())) > 1 or len(set(notes["ndim"].tolist())) > 1:
        gave = (
            f"rank {rank} gave {note['dtype'].decode(errors='replace')} of shape {tuple(shape)}"
            for rank, note, shape in zip(ranks, notes, shapes, strict=True)
        )
        raise MismatchError(
            f"all_gather(tensor) takes arrays of one dtype and number of dimensions: {'; '.join(gave)}"
        )
    return shapes
