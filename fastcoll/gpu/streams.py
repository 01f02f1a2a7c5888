"""StreamCarrier: the base of the carriers that only queue work on a GPU.

A carrier executes a group's operations on GPU arrays. The carriers of NCCL and of CUDA IPC derive from StreamCarrier. A
StreamCarrier works on one GPU, that of its group's first array, and has its own stream there. It queues a call in these
steps:

    prepare()     may block: the first call waits for the peers here; nothing is queued yet
    own stream    waits for the work that the streams of the call's arrays hold
    work(scope)   queues the call on `scope.stream`
    outputs       packed outputs are unpacked on this stream
    event         is recorded last; the StreamWork ends with it, and makes the arrays' streams wait for it

An error in `work` fails the group, because the peers wait for this rank. An error in `prepare` fails the group if the
peers do not see the error themselves. A UsageError never fails the group, so all ranks must raise the same one. The
watcher is a thread (stream_work.py). It fails the group when a peer is dead, when a call takes longer than the group's
timeout, or when `trouble` returns an error. For this it calls `fail`, which notifies the peers and calls `break_off`.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from ..arrays.arrays import ImportedArray
from ..core import signature
from ..core.backend import DeviceCarrier, StreamCall
from ..core.group import ProcessGroup
from ..core.operation import Operation
from ..core.operations import BLOCKS_TO_BLOCKS, BLOCKS_TO_ONE, KINDS
from ..core.reduce_op import PREMUL_SUM, ReduceOp
from ..errors import AbortedError, ArrayError, FastcollError, GroupError, UsageError
from . import idle
from .device_array import DeviceArray, OnDevice, import_array, parts, scratch
from .own_stream import OwnStream
from .runtime import Runtime, runtime
from .stream_work import StreamWork, Watcher

_name = cache(str)  # the name of a dtype; NumPy takes 5 us to make it


class Compared(NamedTuple):
    """The values of a call that the ranks compare.

    `call` and `shape` are as in core/signature.py. `gives` and `takes` have, for each rank, the bytes sent to it and
    received from it, or -1 if there is no message. They are empty if comparing `shape` suffices.
    """

    call: int
    shape: int
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()

    @classmethod
    def of(cls, operation: Operation, size: int) -> Compared:
        """Return an operation's values in a group of `size` ranks."""
        kind, outs, ins, op, root, parts, _ = operation
        given, taken, absent = sizes_of(ins), sizes_of(outs), (-1,) * size
        coalesced = KINDS[kind].made_of
        if coalesced:
            parts = parts or tuple(x.size for x in ins)
            kind = coalesced
        of = KINDS[kind]
        word = _word(kind, (outs or ins)[0].dtype, parts) | root << signature.ROOT_SHIFT
        word |= (0 if op is None else op.code) << signature.OP_SHIFT
        if of.form == BLOCKS_TO_BLOCKS:
            return cls(word, 0, given, taken)
        if of.takes_blocks and not of.root:
            return cls(word, 0, (sum(given),) * size, tuple(sum(taken[r::size]) for r in range(size)))
        if of.takes_blocks:
            return cls(word, 0, tuple(given[0] if r == root else -1 for r in range(size)), taken or absent)
        if of.root and of.gives_blocks:
            return cls(word, 0, given or absent, tuple(taken[0] if r == root else -1 for r in range(size)))
        if of.form == BLOCKS_TO_ONE:
            return cls(word, signature.shape_of(given), given, taken * size)
        return cls(word, sum(given) if coalesced else signature.shape_of(given))


@lru_cache(maxsize=1024)
def _word(kind: str, dtype: np.dtype[Any], parts: tuple[int, ...]) -> int:
    return signature.encode(kind, dtype, parts=parts)


def sizes_of(arrays: Sequence[DeviceArray]) -> tuple[int, ...]:
    """Return the bytes of each array."""
    return tuple(x.nbytes for x in arrays)


class StreamScope:
    """Scratch memory and copies of one call, on a stream.

    Attributes:
        runtime, device, stream: the runtime; the GPU, which must be the current one; a stream of this GPU.
        kept: objects that must stay alive until the GPU has finished the call.
    """

    def __init__(self, runtime: Runtime, device: int, stream: int, kept: Sequence[Any] = ()) -> None:
        self.runtime, self.device, self.stream = runtime, device, stream
        self.kept = [*kept]

    def scratch(self, size: int, dtype: np.dtype[Any]) -> DeviceArray:
        """Return a flat array for this call only."""
        x = scratch(size, dtype, self.device, self.stream)
        self.kept.append(x)
        return x

    def scratch_like(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Return a flat array with room for copies of arrays of one dtype, one after the other."""
        return self.scratch(sum(x.size for x in arrays), arrays[0].dtype)

    def copied(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Copy arrays into one flat array, one after the other, and return it."""
        copies = self.scratch_like(arrays)
        self.copy_each(parts(copies, arrays), arrays)
        return copies

    def apart(
        self, ins: Sequence[DeviceArray], outs: Sequence[DeviceArray], rank: int = 0
    ) -> list[DeviceArray]:
        """Return the inputs, with copies in place of those that share memory with an output.

        An input that begins at the same address as an output is not copied if each of the two is either the only one or
        this rank's own (the one with index `rank`).
        """

        def extent(arrays: Sequence[DeviceArray]) -> tuple[int, int]:
            ends = [(x.address, x.address + x.nbytes) for x in arrays if x.nbytes] or [(0, 0)]
            return min(ends)[0], max(end for _, end in ends)

        def clashes(k: int, x: DeviceArray) -> bool:
            own = len(ins) == 1 or k == rank
            return any(
                x.overlaps(out) and not (own and (len(outs) == 1 or j == rank) and x.address == out.address)
                for j, out in enumerate(outs)
            )

        (start, end), (other_start, other_end) = extent(ins), extent(outs)
        if start >= other_end or other_start >= end:  # the two ranges do not overlap
            return [*ins]
        return [self.copied([x]) if clashes(k, x) else x for k, x in enumerate(ins)]

    def as_one(self, operation: Operation, size: int) -> tuple[Operation, Callable[[], None]]:
        """Turn an all_reduce or a coalesced operation into one with a single flat input, which is scaled.

        Returns:
            the operation, and a function that copies its results to the original outputs.
        """
        kind, outs, ins, op, _, sizes, _ = operation
        flat = self.scaled(ins[0] if len(ins) == 1 else self.copied(ins), op)
        lists = [outs] if op is not None else [outs[rank::size] for rank in range(size)]
        flats = (flat,) if op is not None else tuple(map(self.scratch_like, lists))
        if KINDS[kind].made_of:
            kind, sizes = KINDS[kind].made_of, sizes or tuple(x.size for x in ins)

        def finish() -> None:
            for one, xs in zip(flats, lists, strict=True):
                self.copy_each(xs, parts(one, xs))

        return operation._replace(kind=kind, outputs=flats, inputs=(flat,), parts=sizes), finish

    def scaled(self, x: DeviceArray, op: ReduceOp | None) -> DeviceArray:
        """Return x; for PREMUL_SUM, x times its factor, in scratch memory."""
        if op is None or op.code != PREMUL_SUM or not x.size:
            return x
        from ..kernels.cuda.packing import scale

        result = self.scratch(x.size, x.dtype)
        scale(result.address, x.address, x.size, x.dtype, op.factor, self.stream)
        return result

    def copy_each(self, dsts: Sequence[DeviceArray], srcs: Sequence[DeviceArray]) -> None:
        for dst, src in zip(dsts, srcs, strict=True):
            self.copy(dst, src)

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Copy an array to one of its size, which may overlap it.

        Does nothing if both begin at the same address.
        """
        if dst.address != src.address:
            if dst.overlaps(src):
                src = self.copied([src])
            self.runtime.copy(dst.address, src.address, src.nbytes, self.stream)


class QueuedCall(StreamCall):
    """A call whose work is queued on a stream.

    Args:
        arrays: all arrays that the call reads or writes, at least one.
    """

    def __init__(self, carrier: StreamCarrier, arrays: Sequence[DeviceArray]) -> None:
        self.carrier, self.arrays = carrier, arrays

    @abstractmethod
    def prepare(self, name: str) -> None:
        """Do the part of the call that may block, before anything is queued."""

    @abstractmethod
    def work(self, scope: StreamScope) -> None:
        """Queue the call on the scope's stream; any error but a UsageError fails the group."""

    def handle(self, describe: str, own: OwnStream) -> StreamWork:
        """Return the call's Work; called after `prepare`."""
        return StreamWork(describe, own, self.arrays)

    def start(self, name: str, owners: Sequence[ImportedArray]) -> StreamWork:
        carrier, arrays = self.carrier, self.arrays
        with carrier.run_exclusively(name):
            self.prepare(name)
            own = carrier.own(arrays)
            handle = self.handle(carrier.describe(name, arrays), own)
            with carrier.queueing([handle], own, carrier.watcher, arrays) as scope:
                own.follow({x.stream for x in arrays if x.size})  # empty ones may be on another GPU
                self.work(scope)
                for owner in owners:
                    cast(OnDevice, owner).unpack(scope.stream)
            return handle


class StreamCarrier(DeviceCarrier):
    """The base class that the module docstring describes; the group's CPU backend detects dead peers."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.runtime = runtime()
        self.watcher = Watcher(group.name, lambda: group.timeout, self.look, self.fail)
        self.own_stream: OwnStream | None = None  # the carrier's stream; None before the first array
        self.broken = False  # the group has failed, and work on the GPU was cancelled
        self._own_stream_lock = threading.Lock()
        self._queue_lock = threading.RLock()
        self._inside = False
        self._count = 0
        self._breaking = threading.Lock()

    @abstractmethod
    def trouble(self) -> GroupError | None:
        """Return the carrier's reason why outstanding work cannot end, or None; called every 50 ms."""

    @abstractmethod
    def break_off(self) -> None:
        """Cancel the work on the GPU after the group has failed, without waiting for it.

        Called from any thread, at most once.
        """

    @abstractmethod
    def release(self) -> None:
        """Free everything: the group is closed and no work runs. `break_off` may have been called."""

    # ---- arrays --------------------------------------------------------------------------------------

    def import_array(self, x: Any, *, writable: bool, what: str) -> ImportedArray:
        imported = import_array(x, writable=writable, what=what)
        self._device_of((imported.array,))
        return imported

    def _device_of(self, arrays: Sequence[DeviceArray]) -> int:
        """Return the GPU of the arrays, which must be that of the group's earlier arrays.

        Empty arrays may be anywhere.
        """
        device = next((x.device for x in arrays if x.size), None)
        if self.own_stream is None:
            return arrays[0].device if device is None else device
        if device not in (None, self.own_stream.device):
            raise ArrayError(
                f"the group {self.group.name} works on GPU {self.own_stream.device}, that of its first array, and this "
                f"array is on GPU {device}; put it there, or make another group for this GPU"
            )
        return self.own_stream.device

    # ---- queueing ------------------------------------------------------------------------------------

    def own(self, arrays: Sequence[DeviceArray]) -> OwnStream:
        """Return the carrier's stream; the first arrays determine its GPU."""
        device = self._device_of(arrays)
        with self._own_stream_lock:  # because messages call this without `run_exclusively`
            if self.own_stream is None:
                self.own_stream = OwnStream(self.runtime, device)
            return self.own_stream

    def describe(self, name: str, arrays: Sequence[DeviceArray]) -> str:
        """Count a call, and return its description for error messages."""
        self._count += 1
        x = arrays[0]
        return f"{name}({_name(x.dtype)}, {x.size} elements) on GPU {self._device_of(arrays)}, call {self._count}"

    @contextmanager
    def run_exclusively(self, name: str) -> Iterator[None]:
        """Let one thread at a time queue a call; raise UsageError in a signal handler that interrupts it."""
        self.watcher.await_room()
        idle.free_unused()
        self.group.gate.check_usable()  # the group may have failed during the wait
        with self._queue_lock:
            if self._inside:
                raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    @contextmanager
    def queueing(
        self, works: Sequence[StreamWork], own: OwnStream, watcher: Watcher, kept: Sequence[Any] = ()
    ) -> Iterator[StreamScope]:
        """Yield a scope for the queueing of a call; then record the events that complete `works`.

        An error in the `with` block fails the group, except a UsageError.
        """
        scope, error = StreamScope(own.runtime, own.device, own.stream, kept), None
        with own.runtime.on(own.device):
            try:
                with self.failing(works[0].describe):
                    yield scope
            except BaseException as problem:
                error = problem
                raise
            finally:
                # Also after an error, because the part that was queued still uses memory.
                for work in works:
                    event = own.event()
                    own.runtime.record(event, own.stream)
                    work.queued(own, event, scope.kept, error)
                    watcher.add(work)

    @contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """Fail the group on an error that the peers do not see by themselves."""
        try:
            yield
        except UsageError:
            raise
        except GroupError as error:
            self.fail(error)
            raise
        except FastcollError as error:
            self.fail_with(name, error)
            assert self.group.failure is not None
            raise self.group.failure.with_traceback(None) from error
        except BaseException as error:
            self.fail_with(name, error)
            raise

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def look(self, doing: str) -> GroupError | None:
        """Return why waiting is useless, or None."""
        group = self.group
        return group.failure or self.trouble() or group.monitor.decide([], doing)

    def fail(self, error: GroupError) -> None:
        """Fail the group and its outstanding work, and notify the peers."""
        self.group.fail(error)
        self.abort()

    def fail_with(self, name: str, error: BaseException) -> None:
        """Fail the group because of an operation's error, which may be of any type."""
        here = self.group.ranks[self.group.rank]
        self.fail(AbortedError(f"{name} failed on rank {here}: {type(error).__name__}: {error}", [here]))

    def abort(self) -> None:
        with self._breaking:
            first, self.broken = not self.broken, True
        error = self.why_broken()
        # Before `break_off`, because cancelled work looks like finished work; and again, for work queued meanwhile.
        self.watcher.break_off(error)
        if first:
            self.break_off()
        self.watcher.break_off(error)

    def why_broken(self) -> GroupError:
        """Return the error that completes the Works of a failed group."""
        return self.group.failure or AbortedError(f"the group {self.group.name} was aborted")

    def close(self, reason: GroupError | None) -> None:
        if reason is not None:
            self.abort()
        self.watcher.drain()
        self.release()
        self.watcher.close()
        if self.own_stream is not None:
            self.own_stream.end(self.broken)
        idle.free_unused()
