"""StreamCarrier: what carriers share that only queue work on a GPU. NCCL's and that of CUDA IPC build on it.

A carrier works on one GPU, that of its group's first array, and has a stream of its own there. A call is queued so:

    prepare()     may block: the first call meets the peers here; nothing is queued yet
    own stream    waits for what the streams of the call's arrays hold
    work(turn)    queues the work on `turn.stream`
    outputs       that were packed are unpacked there
    event         what the StreamWork, and through it the arrays' streams, wait for

What a subclass does:

    _plan_*       return self._queued(arrays, work, prepare): all arrays that are read or written, and the two functions
    _trouble()    asked every 50 ms while something is outstanding: why it cannot end, or None
    _break_off()  the group has failed: end what runs on the GPU; from any thread, at most once
    _release()    the group is closed and nothing runs any more

An error of `work` or `prepare` other than a UsageError fails the group, as the peers count on this rank. A UsageError
must be one that all ranks raise. The watcher fails the group (`_fail`, which tells the peers) when a peer is dead, a
call takes longer than the group's timeout, or `_trouble` says so; then `_break_off` is called.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, cast

import numpy as np

from ..core.carrier import DeviceCarrier, StreamCall
from ..core.group import ProcessGroup
from ..errors import AbortedError, ArrayError, FastcollError, GroupError, UsageError
from ..interop.arrays import Adopted
from .array import DeviceArray
from .border import OnDevice, adopt
from .runtime import runtime
from .stream_watch import Watcher
from .stream_work import Own, StreamWork


class Turn:
    """One call while it is queued.

    Attributes:
        runtime, device, stream: the runtime, the GPU, which is current, and the carrier's own stream there.
        kept: what stays alive until the GPU is past the call.
    """

    def __init__(self, own: Own, arrays: Sequence[DeviceArray]) -> None:
        self.runtime, self.device, self.stream = own.runtime, own.device, own.stream
        self.kept: list[Any] = [arrays]

    def scratch(self, size: int, dtype: np.dtype[Any]) -> DeviceArray:
        """A flat array for this call alone."""
        memory = self.runtime.allocate(size * dtype.itemsize, self.device, self.stream)
        self.kept.append(memory)
        return DeviceArray(memory.ptr, dtype, (size,), self.device, self.stream, memory)

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        """Copy an array to another of its size; nothing to do for the same memory."""
        if dst.address != src.address:
            self.runtime.copy(dst.address, src.address, src.nbytes, self.stream)


Queue = Callable[[Turn], None]

_name = cache(str)  # of a dtype, which takes NumPy 5 us


class _Queued(StreamCall):
    def __init__(
        self,
        carrier: StreamCarrier,
        arrays: Sequence[DeviceArray],
        work: Queue,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._carrier, self._arrays, self._work, self._prepare = carrier, arrays, work, prepare

    def start(self, name: str, owners: Sequence[Adopted]) -> StreamWork:
        def work(turn: Turn) -> None:
            self._work(turn)
            for owner in owners:
                cast(OnDevice, owner).unpack(turn.stream)

        carrier = self._carrier
        with carrier._in_turn(name):
            if self._prepare is not None:
                with carrier._failing(name):
                    self._prepare()
            handle = StreamWork(
                carrier._describe(name, self._arrays), carrier._own(self._arrays), self._arrays
            )
            carrier._queue([handle], self._arrays, work)
            return handle


class StreamCarrier(DeviceCarrier):
    """See this module's docstring.

    Args:
        group: whose arrays are carried; its CPU backend tells of dead peers.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._runtime = runtime()
        self._watcher = Watcher(group.name, group.timeout, self._look, self._fail)
        self._lane: Own | None = None
        self._lane_lock = threading.Lock()
        self._turn = threading.RLock()
        self._inside = False
        self._count = 0
        self._broken = False
        self._breaking = threading.Lock()

    @abstractmethod
    def _trouble(self) -> GroupError | None:
        """Why what is outstanding cannot end, as the carrier sees it."""

    @abstractmethod
    def _break_off(self) -> None:
        """End what runs on the GPU, without waiting for it."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the carrier has. `_break_off` may have been called before."""

    # ---- arrays --------------------------------------------------------------------------------------

    def adopt(self, x: Any, *, writable: bool, what: str) -> Adopted:
        adopted = adopt(x, writable=writable, what=what)
        self._device_of((adopted.array,))
        return adopted

    def _device_of(self, arrays: Sequence[DeviceArray]) -> int:
        """The GPU that arrays are on, which must be that of the group's earlier ones; empty ones are anywhere."""
        device = next((x.device for x in arrays if x.size), None)
        if self._lane is None:
            return arrays[0].device if device is None else device
        if device not in (None, self._lane.device):
            raise ArrayError(
                f"the group {self._group.name} works on GPU {self._lane.device}, that of its first array, and this "
                f"array is on GPU {device}; put it there, or make another group for this GPU"
            )
        return self._lane.device

    # ---- queueing ------------------------------------------------------------------------------------

    def _queued(
        self, arrays: Sequence[DeviceArray], work: Queue, prepare: Callable[[], None] | None = None
    ) -> StreamCall:
        """The call that queues `work`.

        Args:
            arrays: all that it reads or writes; one at least.
            work: queues on the turn's stream; an error of it fails the group, if it is no UsageError.
            prepare: what comes before, and may block.
        """
        return _Queued(self, arrays, work, prepare)

    def _own(self, arrays: Sequence[DeviceArray]) -> Own:
        """The carrier's stream on the arrays' GPU; made with the first ones."""
        device = self._device_of(arrays)
        with self._lane_lock:  # not in turn, as messages are not
            if self._lane is None:
                self._lane = Own(self._runtime, device)
            return self._lane

    def _describe(self, name: str, arrays: Sequence[DeviceArray]) -> str:
        self._count += 1
        x = arrays[0]
        return f"{name}({_name(x.dtype)}, {x.size} elements) on GPU {self._device_of(arrays)}, call {self._count}"

    @contextmanager
    def _in_turn(self, name: str) -> Iterator[None]:
        """Calls are queued one after the other; a signal handler cannot come in between."""
        self._watcher.await_room()
        self._group.gate.check_usable()  # which may have ended meanwhile
        with self._turn:
            if self._inside:
                raise UsageError(f"{name}: a signal handler may not use the group whose call it interrupted")
            self._inside = True
            try:
                yield
            finally:
                self._inside = False

    @contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        """An error that the peers know nothing of fails the group."""
        try:
            yield
        except UsageError:
            raise
        except GroupError as error:
            self._fail(error)
            raise
        except FastcollError as error:
            self._fail(self._failed(name, error))
            assert self._group.failure is not None
            raise self._group.failure.with_traceback(None) from error
        except BaseException as error:
            self._fail(self._failed(name, error))
            raise

    def _failed(self, name: str, error: BaseException) -> AbortedError:
        here = self._group.ranks[self._group.rank]
        return AbortedError(f"{name} failed on rank {here}: {type(error).__name__}: {error}", [here])

    def _queue(self, works: Sequence[StreamWork], arrays: Sequence[DeviceArray], work: Queue) -> None:
        """Queue `work`, whose end is that of all `works`; in turn."""
        own = self._own(arrays)
        turn = Turn(own, arrays)
        with self._runtime.on(own.device):
            try:
                with self._failing(works[0]._describe):
                    own.follow({x.stream for x in arrays})
                    work(turn)
            finally:
                # Also what was queued in part uses memory.
                for handle in works:
                    event = own.event()
                    self._runtime.record(event, own.stream)
                    handle._queued(event, turn.kept)
                    self._watcher.add(handle)

    # ---- when things go wrong, and the end -----------------------------------------------------------

    def _look(self, doing: str) -> GroupError | None:
        group = self._group
        return group.failure or self._trouble() or group.monitor.verdict([], doing)

    def _fail(self, error: GroupError) -> None:
        """Fail the group with what is under way here."""
        self._group.fail(error)
        self.abort()

    def abort(self) -> None:
        with self._breaking:
            first, self._broken = not self._broken, True
        if first:
            self._break_off()
        self._watcher.break_off(
            self._group.failure or AbortedError(f"the group {self._group.name} was aborted")
        )

    def _close(self, reason: GroupError | None) -> None:
        if reason is not None:
            self.abort()
        self._watcher.drain()
        self._release()
        self._watcher.close()
        if self._lane is not None:
            # A GPU that failed gives nothing back.
            with suppress(FastcollError) if self._broken else nullcontext():
                self._lane.end()
