"""Calls that a backend prepares once and reuses, and the fast methods that carry them out.

Calls with the same `CallKey` share one preparation. A *fast method* replaces a ProcessGroup's method in `group.fast`.
It makes the key as a plain tuple, which equals a `CallKey` but takes 25 ns instead of 250. If the backend does not run
the call for that key, or the arrays are not plain (operands.py), the fast method calls the ProcessGroup's method.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays.tensors import header_of, headers_for, plain_types
from . import signature
from .operands import is_plain
from .operations import (
    BLOCKS_TO_BLOCKS,
    BLOCKS_TO_ONE,
    IN_PLACE,
    KINDS,
    NO_ARRAY,
    ONE_TO_BLOCKS,
    ONE_TO_ONE,
)
from .reduce_op import ReduceOp
from .work import Work

_MOST = 1024
_T = TypeVar("_T")


class CallKey(NamedTuple):
    """The properties in which calls must agree to share one preparation.

    Attributes:
        nbytes: the bytes of each array whose size ranks compare (core/sizes.py).
        parts: as in `Operation`.
        variant: a further property that the backend distinguishes.
    """

    kind: str
    dtype: np.dtype[Any] | None
    op: ReduceOp | None
    root: int
    nbytes: tuple[int, ...]
    parts: tuple[int, ...]
    variant: Any

    @property
    def word(self) -> int:
        """The call word (core/signature.py), with the root."""
        word = signature.encode(self.kind, self.dtype, op=self.op, parts=self.parts)
        return word | self.root << signature.ROOT_SHIFT


class PreparedCalls(dict[CallKey, _T]):
    """The latest 1024 prepared calls of one group. Thread-safe."""

    def __init__(self) -> None:
        self._adding = threading.Lock()

    def get_or_make(self, key: CallKey, make: Callable[[CallKey], _T]) -> _T:
        """Return the prepared call of `key`; if there is none, make it with `make`."""
        found = self.get(key)
        if found is None:
            found = make(key)
            with self._adding:
                while len(self) >= _MOST:  # remove the oldest
                    del self[next(iter(self))]
                self[key] = found
        return found


# ---- fast methods ------------------------------------------------------------------------------------------

Run = Callable[[Any, tuple[Any, ...]], bool]
"""A function that carries out the call with a key on a tuple of plain arrays, and returns whether it did so.

The tuple has the output, then the input if that is another array; for a call without arrays it is (None,). If the
function returns False, the fast method calls the group's method.
"""
Folds = Callable[[ReduceOp], bool] | None
"""A function that returns whether `Run` completes reductions with an op. (AVG may need a division afterwards.) None:
`Run` completes all reductions."""


def fast_methods(
    group: Any, kinds: Iterable[str], run: Run, folds: Folds, variant: Any
) -> dict[str, Callable[..., Any]]:
    """Return `Backend.fast`'s functions for synchronous calls of some kinds.

    Args:
        group: the ProcessGroup.
        kinds: names of kinds (operations.py). For a kind with blocks, the function replaces the method `..._single`,
            which takes all blocks as one array. For a gather or scatter, it replaces both methods, but the root's calls
            are not fast.
        run: see `Run`.
        folds: see `Folds`.
        variant: the `variant` of the calls' keys.

    Returns:
        The functions, by the names of the group's methods.
    """
    made = {}
    for kind in kinds:
        row = KINDS[kind]
        make = _MAKERS[row.form, row.root != "", row.reduces]
        names = [f"{kind}_single"] if row.has_blocks else [kind]
        if row.has_blocks and row.root:
            names.append(kind)
        for name in names:
            made[name] = make(kind, getattr(group, name), group.size, run, folds, variant)
    return made


def _barrier(kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any) -> Callable[..., Any]:
    key = (kind, None, None, 0, (), (), variant)

    def fast(async_op: bool = False, timeout: float | None = None) -> Work | None:
        if not async_op and timeout is None and run(key, (None,)):
            return None
        return method(async_op, timeout)  # type: ignore[no-any-return]

    return fast


def _all_reduce(
    kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any
) -> Callable[..., Any]:
    def fast(tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        x = header_of(tensor) if type(tensor) in plain_types else tensor
        if not async_op and is_plain(x) and type(op) is ReduceOp and (folds is None or folds(op)):
            key = (kind, x.dtype, op, 0, (x.nbytes,), (), variant)
            if run(key, (x,)):
                return None
        return method(tensor, op, async_op)

    return fast


def _broadcast(kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any) -> Callable[..., Any]:
    def fast(tensor: Any, root: int, async_op: bool = False) -> Any:
        x = header_of(tensor) if type(tensor) in plain_types else tensor
        # Structured dtypes are left to the method: they may be broadcasts of objects, which take several calls.
        if not async_op and is_plain(x) and type(root) is int and x.dtype.names is None:
            key = (kind, x.dtype, None, root, (x.nbytes,), (), variant)
            if run(key, (x,)):
                return None
        return method(tensor, root, async_op)

    return fast


def _reduce(kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any) -> Callable[..., Any]:
    def fast(tensor: Any, root: int, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        x = header_of(tensor) if type(tensor) in plain_types else tensor
        if (
            not async_op
            and is_plain(x)
            and type(root) is int
            and type(op) is ReduceOp
            and (folds is None or folds(op))
        ):
            key = (kind, x.dtype, op, root, (x.nbytes,), (), variant)
            if run(key, (x, x)):
                return None
        return method(tensor, root, op, async_op)

    return fast


def _all_gather(
    kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any
) -> Callable[..., Any]:
    def fast(output: Any, input: Any, async_op: bool = False) -> Work | None:
        out, x = headers_for((output, input)) if type(input) in plain_types else (output, input)
        if not async_op and _are_blocks(out, x, size):
            key = (kind, x.dtype, None, 0, (x.nbytes,) * size, (), variant)
            if run(key, (out, x)):
                return None
        return method(output, input, async_op)  # type: ignore[no-any-return]

    return fast


def _reduce_scatter(
    kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any
) -> Callable[..., Any]:
    def fast(
        output: Any,
        input: Any,
        op: ReduceOp = ReduceOp.SUM,
        async_op: bool = False,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Work | None:
        out, x = headers_for((output, input)) if type(input) in plain_types else (output, input)
        if (
            not async_op
            and input_split_sizes is None
            and _are_blocks(x, out, size)
            and type(op) is ReduceOp
            and (folds is None or folds(op))
        ):
            key = (kind, x.dtype, op, 0, (out.nbytes,) * size, (), variant)
            if run(key, (out, x)):
                return None
        return method(output, input, op, async_op, input_split_sizes)  # type: ignore[no-any-return]

    return fast


def _all_to_all(
    kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any
) -> Callable[..., Any]:
    def fast(
        output: Any,
        input: Any,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        out, x = headers_for((output, input)) if type(input) in plain_types else (output, input)
        is_even = output_split_sizes is None and input_split_sizes is None
        is_fast = not async_op and is_even and is_plain(out) and is_plain(x) and out.dtype == x.dtype
        if is_fast and _are_rows(out, x.size, size) and _are_rows(x, out.size, size):
            key = (kind, x.dtype, None, 0, (x.nbytes // size,) * (2 * size), (), variant)
            if run(key, (out, x)):
                return None
        return method(output, input, output_split_sizes, input_split_sizes, async_op)  # type: ignore[no-any-return]

    return fast


def _without_blocks(
    kind: str, method: Any, size: int, run: Run, folds: Folds, variant: Any
) -> Callable[..., Any]:
    """Make the function of a gather or scatter: fast on ranks other than the root, which have no blocks."""
    rank = method.__self__.rank

    def fast(tensor: Any, blocks: Any, root: int, async_op: bool = False) -> Any:
        x = header_of(tensor) if type(tensor) in plain_types else tensor
        is_elsewhere = blocks is None and type(root) is int and root != rank
        if is_elsewhere and not async_op and is_plain(x) and x.dtype.names is None:
            key = (kind, x.dtype, None, root, (x.nbytes,), (), variant)
            if run(key, (x,)):
                return None
        return method(tensor, blocks, root, async_op)

    return fast


def _are_rows(x: Any, count: int, size: int) -> bool:
    """Whether an array has `count` elements, at least one, in equal blocks of rows."""
    return x.ndim > 0 and x.size == count > 0 == x.shape[0] % size  # type: ignore[no-any-return]


def _are_blocks(x: Any, block: Any, size: int) -> bool:
    """Whether both arrays are plain, and `x` consists of a block like `block` for each rank.

    Overlap is not checked.
    """
    return is_plain(x) and is_plain(block) and x.dtype == block.dtype and x.size == block.size * size > 0


_MAKERS = {  # by form, whether there is a root, and whether it reduces; each makes a function of fixed arity
    (NO_ARRAY, False, False): _barrier,
    (IN_PLACE, False, True): _all_reduce,
    (IN_PLACE, True, False): _broadcast,
    (ONE_TO_ONE, True, True): _reduce,
    (ONE_TO_BLOCKS, False, False): _all_gather,
    (BLOCKS_TO_ONE, False, True): _reduce_scatter,
    (BLOCKS_TO_BLOCKS, False, False): _all_to_all,
    (ONE_TO_BLOCKS, True, False): _without_blocks,
    (BLOCKS_TO_ONE, True, False): _without_blocks,
}
