"""StreamCarrier: what carriers share that only queue work on a GPU. NCCL's and that of CUDA IPC build on it.

A carrier works on one GPU, that of its group's first array, and has a stream of its own there. A call is queued so:

    prepare()     may block: the first call meets the peers here; nothing is queued yet
    own stream    waits for what the streams of the call's arrays hold
    work(turn)    queues the work on `turn.stream`
    outputs       that were packed are unpacked there
    event         what the StreamWork, and through it the arrays' streams, wait for

An error of `work` or `prepare` other than a UsageError fails the group, as the peers count on this rank. A UsageError
must be one that all ranks raise. The watcher fails the group (`fail`, which tells the peers) when a peer is dead, a
call takes longer than the group's timeout, or `trouble` says so; then `break_off` is called.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple, cast

import numpy as np

from ..arrays.arrays import Adopted
from ..core import signature
from ..core.backend import DeviceCarrier, StreamCall
from ..core.group import ProcessGroup
from ..core.operation import Operation
from ..core.operations import BLOCKS_TO_BLOCKS, BLOCKS_TO_ONE, KINDS
from ..core.reduce_op import PREMUL_SUM, ReduceOp
from ..errors import AbortedError, ArrayError, FastcollError, GroupError, UsageError
from .device_array import DeviceArray, OnDevice, adopt, parts, scratch
from .runtime import Runtime, runtime
from .stream_work import Own, StreamWork, Watcher

_name = cache(str)  # of a dtype, which takes NumPy 5 us


class Compared(NamedTuple):
    """What the ranks compare of a call: its words, as core/signature.py says, and bytes for each rank and from each.

    These are -1 for no message, and there are none where `shape` says it all.
    """

    call: int
    shape: int
    gives: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()

    @classmethod
    def of(cls, operation: Operation, size: int) -> Compared:
        """An operation's, in a group of some size."""
        kind, outs, ins, op, root, parts = operation
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
    """Bytes of each."""
    return tuple(x.nbytes for x in arrays)


class Turn:
    """Memory and copies of one call, on a stream.

    Attributes:
        runtime, device, stream: the runtime, the GPU, which is current, and a stream there that is not the caller's.
        kept: what stays alive until the GPU is past the call.
    """

    def __init__(self, runtime: Runtime, device: int, stream: int, kept: Sequence[Any] = ()) -> None:
        self.runtime, self.device, self.stream = runtime, device, stream
        self.kept = [*kept]

    def scratch(self, size: int, dtype: np.dtype[Any]) -> DeviceArray:
        """A flat array for this call alone."""
        x = scratch(size, dtype, self.device, self.stream)
        self.kept.append(x)
        return x

    def scratch_like(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """As `scratch`, for copies of arrays of one dtype, one after the other."""
        return self.scratch(sum(x.size for x in arrays), arrays[0].dtype)

    def copied(self, arrays: Sequence[DeviceArray]) -> DeviceArray:
        """Copies of arrays, one after the other."""
        whole = self.scratch_like(arrays)
        self.copy_each(parts(whole, arrays), arrays)
        return whole

    def apart(
        self, ins: Sequence[DeviceArray], outs: Sequence[DeviceArray], rank: int = 0
    ) -> list[DeviceArray]:
        """The inputs, copied where they share memory with an output; a rank's own two, or the only ones, may be one."""

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
        if start >= other_end or other_start >= end:  # no need to compare every two
            return [*ins]
        return [self.copied([x]) if clashes(k, x) else x for k, x in enumerate(ins)]

    def as_one(self, operation: Operation, size: int) -> tuple[Operation, Callable[[], None]]:
        """An all_reduce or a coalesced operation on single arrays, scaled, and what brings their results to its own."""
        kind, outs, ins, op, _, sizes = operation
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
        """x; for PREMUL_SUM x times its factor, in memory of the call's own."""
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
        """Copy an array to another of its size, also to where it overlaps; nothing to do for the same memory."""
        if dst.address != src.address:
            if dst.overlaps(src):
                src = self.copied([src])
            self.runtime.copy(dst.address, src.address, src.nbytes, self.stream)


class QueuedCall(StreamCall):
    """A call that is queued; `arrays` are all that it reads or writes, one at least."""

    def __init__(self, carrier: StreamCarrier, arrays: Sequence[DeviceArray]) -> None:
        self.carrier, self.arrays = carrier, arrays

    @abstractmethod
    def prepare(self, name: str) -> None:
        """What comes before, and may block."""

    @abstractmethod
    def work(self, turn: Turn) -> None:
        """Queue the call on the turn's stream; an error of it fails the group, if it is no UsageError."""

    def handle(self, describe: str, own: Own) -> StreamWork:
        """The call's Work, after `prepare`."""
        return StreamWork(describe, own, self.arrays)

    def start(self, name: str, owners: Sequence[Adopted]) -> StreamWork:
        carrier, arrays = self.carrier, self.arrays
        with carrier.in_turn(name):
            self.prepare(name)
            own = carrier.own(arrays)
            handle = self.handle(carrier.describe(name, arrays), own)
            with carrier.queueing([handle], own, carrier.watcher, arrays) as turn:
                own.follow({x.stream for x in arrays})
                self.work(turn)
                for owner in owners:
                    cast(OnDevice, owner).unpack(turn.stream)
            return handle


class StreamCarrier(DeviceCarrier):
    """See this module's docstring; the group's CPU backend tells of dead peers."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.runtime = runtime()
        self.watcher = Watcher(group.name, lambda: group.timeout, self.look, self.fail)
        self.lane: Own | None = None  # its stream on its GPU, once there is one
        self.broken = False  # whether the group has failed, and what runs on the GPU was ended
        self._lane_lock = threading.Lock()
        self._turn = threading.RLock()
        self._inside = False
        self._count = 0
        self._breaking = threading.Lock()

    @abstractmethod
    def trouble(self) -> GroupError | None:
        """Why what is outstanding cannot end, as the carrier sees it; asked every 50 ms meanwhile."""

    @abstractmethod
    def break_off(self) -> None:
        """The group has failed: end what runs on the GPU, without waiting for it; from any thread, at most once."""

    @abstractmethod
    def release(self) -> None:
        """The group is closed, and nothing runs any more: give everything back. `break_off` may have been called."""

    # ---- arrays --------------------------------------------------------------------------------------

    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        adopted = adopt(x, writable=writable, what=what)
        self._device_of((adopted.array,))
        return adopted

    def _device_of(self, arrays: Sequence[DeviceArray]) -> int:
        """The GPU that arrays are on, which must be that of the group's earlier ones; empty ones are anywhere."""
        device = next((x.device for x in arrays if x.size), None)
        if self.lane is None:
            return arrays[0].device if device is None else device
        if device not in (None, self.lane.device):
            raise ArrayError(
                f"the group {self.group.name} works on GPU {self.lane.device}, that of its first array, and this "
                f"array is on GPU {device}; put it there, or make another group for this GPU"
            )
        return self.lane.device

    # ---- queueing ------------------------------------------------------------------------------------

    def own(self, arrays: Sequence[DeviceArray]) -> Own:
        """The carrier's stream on the arrays' GPU; made with the first ones."""
        device = self._device_of(arrays)
        with self._lane_lock:  # not in turn, as messages are not
            if self.lane is None:
                self.lane = Own(self.runtime, device)
            return self.lane

    def describe(self, name: str, arrays: Sequence[DeviceArray]) -> str:
        """The next call, for messages."""
        self._count += 1
        x = arrays[0]
        return f"{name}({_name(x.dtype)}, {x.size} elements) on GPU {self._device_of(arrays)}, call {self._count}"

    @contextmanager
    def in_turn(self, name: str) -> Iterator[None]:
        """Calls are queued one after the other; a signal handler cannot come in between."""
        self.watcher.await_room()
        self.group.gate.check_usable()  # which may have ended meanwhile
        with self._turn:
            if self._inside:
                raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    @contextmanager
    def queueing(
        self, works: Sequence[StreamWork], own: Own, watcher: Watcher, kept: Sequence[Any] = ()
    ) -> Iterator[Turn]:
        """Queue what ends some Works, on a stream; an error fails the group."""
        turn, error = Turn(own.runtime, own.device, own.stream, kept), None
        with own.runtime.on(own.device):
            try:
                with self.failing(works[0].describe):
                    yield turn
            except BaseException as problem:
                error = problem
                raise
            finally:
                # Also what was queued in part uses memory.
                for work in works:
                    event = own.event()
                    own.runtime.record(event, own.stream)
                    work.queued(own, event, turn.kept, error)
                    watcher.add(work)

    @contextmanager
    def failing(self, name: str) -> Iterator[None]:
        """An error that the peers know nothing of fails the group."""
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
        """Why waiting is in vain, or None."""
        group = self.group
        return group.failure or self.trouble() or group.monitor.verdict([], doing)

    def fail(self, error: GroupError) -> None:
        """Fail the group with what is under way here, and tell the peers."""
        self.group.fail(error)
        self.abort()

    def fail_with(self, name: str, error: BaseException) -> None:
        """As `fail`, with any error of an operation."""
        here = self.group.ranks[self.group.rank]
        self.fail(AbortedError(f"{name} failed on rank {here}: {type(error).__name__}: {error}", [here]))

    def abort(self) -> None:
        with self._breaking:
            first, self.broken = not self.broken, True
        if first:
            self.break_off()
        self.watcher.break_off(self.why_broken())

    def why_broken(self) -> GroupError:
        """What ends the Works of a group that has failed."""
        return self.group.failure or AbortedError(f"the group {self.group.name} was aborted")

    def close(self, reason: GroupError | None) -> None:
        if reason is not None:
            self.abort()
        self.watcher.drain()
        self.release()
        self.watcher.close()
        if self.lane is not None:
            self.lane.end(self.broken)
