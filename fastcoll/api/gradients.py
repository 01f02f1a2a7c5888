"""GradientReducer: averages gradients over the ranks, in buckets, during the backward pass.

It works like torch's DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020). The first bucket has the gradients of the last parameters, because these are computed
first. All ranks start to reduce the buckets in the same order. A rank starts a bucket as soon as the bucket's gradients
are ready and all earlier buckets have been started. Error feedback (`travel`) is described by Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from ..arrays.arrays import import_array, libraries, room_like
from ..arrays.dtypes import widened
from ..core.operands import whole
from ..core.reduce_op import ReduceOp
from ..core.travel import TRAVELS, refuse_unknown
from ..core.work import Work
from ..errors import UsageError
from ..job.groups import Group, entered
from .collectives import all_reduce

Key = int | str


class GradientReducer:
    """Average gradients over the ranks of a group, while the rest of the backward pass is computed.

    The program writes each gradient into `grads`, calls `ready` for it, and calls `wait` before it uses the averages.
    All ranks construct the reducer with the same parameters, and do the same steps.

    Args:
        params: arrays (NumPy's, or CuPy's on one GPU), in a list or a dict, in the order of the forward pass. Only
            their shapes and dtypes are used; a bucket has gradients of one dtype.
        bucket_bytes: the approximate size of a bucket; the first bucket to be reduced has a quarter of this size.
        average: whether to divide by the number of ranks; if False, compute sums.
        travel: the type in which gradients travel: "bfloat16", "float16" or "int8". The rounding error is added to this
            rank's gradient of the next step (error feedback). float32 in host memory uses `all_reduce`'s `travel`.
            float64, arrays on GPUs and backends without `travel` are converted to 16 bits before all_reduce; this is
            impossible for "int8", and needs ml_dtypes for "bfloat16". None: no conversion.
        find_unused: if True, gradients that are not ready when `wait` is called count as zeros, unless they were ready
            in a step of `no_sync` before; `unused` names those that no rank had. If False, `wait` raises UsageError for
            them.
        group: from `new_group`; None: the default group.

    Attributes:
        grads: a list or dict like `params`. Its arrays are views of the buckets, initially zero; write the gradients
            into them, in place.
        unused: after `wait`, the indices or names of the gradients that no rank had in this step, or in the steps of
            `no_sync` before it.
        bytes_sent: how many bytes this rank has passed to `all_reduce` so far.

    Raises:
        UsageError: `params` is empty, an argument is wrong, or `travel` does not suit a dtype.

    Examples:
        >>> reducer = dist.GradientReducer({"w": w, "b": b})
        >>> reducer.grads["b"][:] = error.sum(0)
        >>> reducer.grads["w"][:] = x.T @ error
        >>> reducer.ready("w", "b")
        >>> reducer.wait()
        >>> w -= rate * reducer.grads["w"]
    """

    def __init__(
        self,
        params: Sequence[Any] | Mapping[str, Any],
        *,
        bucket_bytes: int = 4 << 20,
        average: bool = True,
        travel: str | None = None,
        find_unused: bool = False,
        group: Group = None,
    ) -> None:
        named = _named(params)
        if not named:
            raise UsageError("params is empty; give at least one array")
        if whole("bucket_bytes", bucket_bytes) < 1:
            raise UsageError(f"bucket_bytes is {bucket_bytes}; give at least 1")
        self._group, self._average, self._find_unused = group, average, find_unused
        if travel is not None:
            refuse_unknown(travel)
        backend = entered(group).backend
        backend.begin_at_once()  # the program computes while gradients are reduced
        self._buckets: list[_Bucket] = []
        self._place: dict[Key, _Bucket] = {}
        views: dict[Key, Any] = {}
        for chunk in _cut(named, bucket_bytes):
            bucket = _Bucket([(key, named[key]) for key in chunk], travel, backend.narrows)
            self._buckets.append(bucket)
            self._place |= dict.fromkeys(chunk, bucket)
            views |= bucket.views
        in_order = {key: views[key] for key in named}
        self.grads: Any = in_order if isinstance(params, Mapping) else list(in_order.values())
        self.unused: list[Key] = []
        self.bytes_sent = 0
        # The state of this step. Ctrl-C may end a call of `wait`, and the next call continues the step.
        self._begun = 0  # how many buckets have been started
        self._knows_unused = False  # whether `unused` is that of this step
        self._accumulated: set[Key] = set()  # gradients of steps in `no_sync` that are not reduced yet
        self._syncs = True
        self._active: _Active | None = None  # set in a block of `join`

    # ---- a step ----------------------------------------------------------------------------------------------

    def ready(self, *keys: Key) -> None:
        """Mark gradients in `grads` as ready, and start to reduce complete buckets.

        Does not wait for other ranks. After this call, do not write to these gradients until `wait` has returned.

        Raises:
            UsageError: there is no such gradient, or it was already marked in this step.
        """
        for key in keys:
            bucket = self._place.get(key)
            if bucket is None:
                raise UsageError(
                    f"there is no gradient {key!r}; there are {', '.join(map(repr, self._place))}"
                )
            if key not in bucket.missing:
                raise UsageError(
                    f"the gradient {key!r} was ready before in this step; call wait() between steps"
                )
            bucket.missing.discard(key)
        if not self._syncs:
            return
        while self._begun < len(self._buckets) and not self._buckets[self._begun].missing:
            with self._abandoning():
                self._begin()

    def wait(self) -> None:
        """Wait until `grads` has the averages over the ranks, and begin the next step.

        Raises:
            UsageError: a gradient was not ready on this rank, and `find_unused` is not set; the message names it.
            GroupError: as for all_reduce. The content of `grads` is then undefined. If the group is still usable, the
                next step begins.
        """
        missing = [key for bucket in self._buckets for key in bucket.missing]
        if self._syncs and missing and not self._find_unused:
            raise UsageError(
                f"there is no gradient for {', '.join(map(repr, missing))}; call ready() for each, or pass "
                "find_unused=True"
            )
        had = self._accumulated | (self._place.keys() - missing)
        if self._syncs:
            self._finish(had)
        else:
            self._accumulated = had
            self._begin_step()

    def reduce(self, gradients: Any) -> Any:
        """Average all gradients of a step in one call, for immutable arrays such as JAX's.

        The buckets are reduced one after another, the last parameters first. Meanwhile JAX may still compute the
        gradients of the later buckets. In a block of `no_sync` the gradients are only added up on this rank, and the
        first call after the block reduces the sums.

        Args:
            gradients: a list or dict like `params`.

        Returns:
            A list or dict like `gradients`, with new arrays of the same libraries; in a block of `no_sync`, the sums of
            this rank so far.

        Raises:
            UsageError, ArrayError: the keys or shapes differ from those of `params`, a gradient is no array, or is
                complex although its parameter is not; or as for `wait`.
        """
        named = _named(gradients)
        if named.keys() != self._place.keys():
            raise UsageError(f"gradients has {list(named)}; params had {list(self._place)}")
        arrays = {key: _readable(key, named[key], bucket.views[key]) for key, bucket in self._place.items()}
        for key, bucket in self._place.items():
            view = bucket.views[key]
            with self._abandoning():  # a computation of JAX may fail only now
                view[...] = view + arrays[key] if key in self._accumulated else arrays[key]
            self.ready(key)
        self.wait()
        averages = {key: _like(named[key], self._place[key].views[key]) for key in named}
        return averages if isinstance(gradients, Mapping) else list(averages.values())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Reduce nothing in the steps in this block; the first step after the block reduces the sums.

        The program adds the gradients of all these steps, including the first one after the block, to `grads`.
        """
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def zero(self) -> None:
        """Set all gradients to zero, before steps that accumulate into them."""
        self._accumulated.clear()
        for bucket in self._buckets:
            bucket.flat[:] = 0

    @contextmanager
    def join(self) -> Iterator[None]:
        """Support different numbers of batches: a rank without batches contributes zeros until no rank has any.

        Each rank puts the loop over its batches in the block. Averages are over the ranks that still have batches.

        Raises:
            GroupError: as for all_reduce.
        """
        self._active = _Active(self._group)
        try:
            yield
            while self._active.begin(0):
                self._finish(())
        finally:
            self._active = None

    # ---- how a step goes -------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Start to reduce the next bucket."""
        if self._active is not None and self._begun == 0 and not self._active.is_counted:
            self._active.begin(1)
        bucket = self._buckets[self._begun]
        self._begun += 1
        averages = self._average and self._active is None
        bucket.work = all_reduce(
            bucket.packed(),
            ReduceOp.AVG if averages else ReduceOp.SUM,
            self._group,
            async_op=True,
            **bucket.narrow,
        )
        self.bytes_sent += bucket.nbytes

    def _finish(self, had: Collection[Key]) -> None:
        """Reduce all gradients, and begin the next step; those that this rank has not `had` count as zeros."""
        with self._abandoning():
            for bucket in self._buckets[self._begun :]:
                for key in bucket.views.keys() - had:
                    bucket.views[key][...] = 0
            while self._begun < len(self._buckets):
                self._begin()
            if self._find_unused and not self._knows_unused:
                used = np.array([key in had for key in self._place], np.uint8)
                all_reduce(used, ReduceOp.MAX, self._group)
                self.unused = [key for key, one in zip(self._place, used, strict=True) if not one]
                self._knows_unused = True
            active = self._active.count if self._active is not None else 0
            for bucket in self._buckets:
                bucket.finish(active if self._average else 0)
        self._accumulated.clear()
        self._begin_step()

    def _begin_step(self) -> None:
        for bucket in self._buckets:
            bucket.missing = set(bucket.views)
        self._begun, self._knows_unused = 0, False
        if self._active is not None:
            self._active.is_counted = False

    @contextmanager
    def _abandoning(self) -> Iterator[None]:
        """After an error, give up the step: wait for its reductions, which use the buckets, and begin the next one."""
        try:
            yield
        except Exception:
            for bucket in self._buckets[: self._begun]:
                bucket.abandon()
            self._accumulated.clear()
            self._begin_step()
            raise


class _Bucket:
    """Gradients that are reduced together, in one array.

    Attributes:
        flat: the gradients.
        travels: the array that is passed to all_reduce: `flat`, or an array of 16-bit floats.
        narrow: further arguments of all_reduce.
        nbytes: the bytes in which the gradients travel.
        missing: the keys of the gradients that are not ready in this step.
    """

    def __init__(self, params: Sequence[tuple[Key, Any]], travel: str | None, narrows: bool) -> None:
        first = params[0][1]
        sizes = [int(np.prod(param.shape)) for _, param in params]
        self.flat = np.zeros_like(first, shape=(sum(sizes),))
        ends = np.cumsum(sizes).tolist()
        self.views: dict[Key, Any] = {
            key: self.flat[end - size : end].reshape(param.shape)
            for (key, param), size, end in zip(params, sizes, ends, strict=True)
        }
        wide = self.flat.dtype.name in ("float32", "float64")
        inside = narrows and isinstance(self.flat, np.ndarray) and self.flat.dtype == np.float32
        dtype = _half(travel) if travel is not None and wide and not inside else None
        self.narrow: dict[str, Any] = {}
        if travel is not None and inside:
            self.narrow = {"travel": travel, "lost": np.zeros_like(self.flat)}
        self.travels = self.flat if dtype is None else self.flat.astype(dtype)
        self.nbytes = TRAVELS[travel].nbytes(self.flat.size) if travel and inside else self.travels.nbytes
        self.lost = None if dtype is None else np.zeros_like(self.flat)  # sum of the rounding errors
        self.missing: set[Key] = set(self.views)
        self.work: Work | None = None

    def packed(self) -> Any:
        """Return the array for all_reduce, converted if needed."""
        if self.lost is not None:
            self.lost += self.flat
            self.travels[...] = self.lost.astype(self.travels.dtype)
            self.lost -= self.travels.astype(self.flat.dtype)
        return self.travels

    def finish(self, divisor: int) -> None:
        """Wait for the reduction; if `divisor` is not 0, divide the sums by it. A second call has no effect."""
        if self.work is None:
            return
        self.work.wait()
        if self.lost is not None:
            self.flat[...] = self.travels.astype(self.flat.dtype)
        if divisor:
            self.flat /= divisor
        self.work = None

    def abandon(self) -> None:
        """Wait for the reduction, if there is one, whatever its result."""
        if self.work is not None:
            with suppress(Exception):
                self.work.wait()
            self.work = None


class _Active:
    """The number of ranks that still have batches, in `join`. A small all_reduce before each step counts them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.is_counted = False  # for this step
        self._count = np.zeros(1, np.int64)

    def begin(self, mine: int) -> int:
        """Count the ranks that have a batch for this step, and return the number. `mine`: 1 if this rank has one."""
        self._count[0], self.is_counted = mine, True
        all_reduce(self._count, group=self._group)
        return self.count

    @property
    def count(self) -> int:
        return int(self._count[0])


def _named(arrays: Any) -> dict[Key, Any]:
    """Return the arrays as a dict: those of a dict by name, those of a list by index."""
    return {**arrays} if isinstance(arrays, Mapping) else dict(enumerate(arrays))


def _readable(key: Key, gradient: Any, view: Any) -> Any:
    """Return a gradient as an array that can be assigned to `view`; raise an error if it does not fit.

    An array of JAX is returned unchanged, as an import would wait until it is computed.
    """
    array = gradient
    if isinstance(view, np.ndarray) and not any(name.startswith("jax") for name in libraries(gradient)):
        array = import_array(gradient, writable=False, what=f"gradients[{key!r}]").array
        if array.dtype.name == "bfloat16" and array.dtype != view.dtype:
            array = widened(array)
    if array.shape != view.shape:
        raise UsageError(f"gradients[{key!r}] has shape {array.shape}; params[{key!r}] had {view.shape}")
    if array.dtype.kind == "c" != view.dtype.kind:
        raise UsageError(f"gradients[{key!r}] is of {array.dtype}; params[{key!r}] was of {view.dtype}")
    return array


def _like(x: Any, view: Any) -> Any:
    """Return a new array of the same library and shape as `x`, with the content of the view."""
    if not isinstance(view, np.ndarray):
        return view.copy()
    room = room_like(x, view, view.shape)
    room.array[...] = view
    return room.finish()


def _cut(params: Mapping[Key, Any], bucket_bytes: int) -> Iterable[list[Key]]:
    """Yield the keys of each bucket, the last parameters first. The first bucket is small, so it is ready early."""
    bucket: list[Key] = []
    dtype, filled, most = None, 0, max(1, bucket_bytes // 4)
    for key in reversed(list(params)):
        param = params[key]
        for attribute in ("shape", "dtype", "nbytes"):
            if not hasattr(param, attribute):
                raise UsageError(f"params[{key!r}] is of type {type(param).__name__}; give an array")
        if "torch" in libraries(param):
            raise UsageError(
                f"params[{key!r}] is a tensor of torch; use torch.nn.parallel.DistributedDataParallel on the backend "
                "'fastcoll', or give NumPy arrays of the same shapes"
            )
        if param.dtype.kind not in "fcV" or param.dtype.hasobject:
            raise UsageError(f"params[{key!r}] is of {param.dtype}; gradients are floats or complex")
        if bucket and (param.dtype != dtype or filled + param.nbytes > most):
            yield bucket
            bucket, filled, most = [], 0, bucket_bytes
        bucket.append(key)
        dtype, filled = param.dtype, filled + param.nbytes
    yield bucket


def _half(travel: str) -> Any:
    """Return the 16-bit dtype to which a bucket is converted if all_reduce cannot do it."""
    if travel == "int8":
        raise UsageError(
            "travel='int8' needs gradients of float32 in host memory, and a backend with all_reduce(travel='int8'); "
            "use 'bfloat16' or 'float16'"
        )
    if travel == "float16":
        return np.dtype(travel)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise UsageError("travel='bfloat16' needs ml_dtypes: pip install ml_dtypes") from error
    return np.dtype(bfloat16)
