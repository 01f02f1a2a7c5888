"""FakeNccl: libnccl.so.2 over host memory, for ranks that are threads and share a FakeRuntime.

Its functions take the arguments that the binding passes to the real ones. Communicators are non-blocking: a call
returns "in progress" and is polled. Queued operations run on the fake stream, block there until the peers have queued
theirs, and end at an abort. It detects uses that NCCL leaves undefined: collectives that do not match, use after the
end, arrays that overlap, messages of unexpected sizes, a stream of another GPU or several streams for a communicator.
`violations` lists these; `calls` has the functions' names in order.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .fake_runtime import FakeRuntime

Array = np.ndarray[Any, Any]
Parts = tuple[Callable[[], None], Callable[[], None]]

SUCCESS, INVALID_USAGE, REMOTE_ERROR, IN_PROGRESS = 0, 5, 6, 7
_DTYPES = [*map(np.dtype, "i1 u1 i4 u4 i8 u8 f2 f4 f8".split()), np.dtype(ml_dtypes.bfloat16)]
_FUNCTIONS = [np.add, np.multiply, np.fmax, np.fmin, np.add]
_AVG, _FIRST_MADE = 4, 5
_SECONDS = 120.0


class _World:
    """The ranks that made a communicator together."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.comms: dict[int, _Comm] = {}
        self.met: dict[int, dict[int, tuple[Any, ...]]] = defaultdict(dict)
        self.mail: dict[tuple[int, int], deque[list[Any]]] = defaultdict(deque)
        self.splitting: dict[_Comm, tuple[int, int, Any]] = {}


class _Comm:
    def __init__(self, world: _World, rank: int, device: int) -> None:
        self.world, self.rank, self.device = world, rank, device
        self.state = IN_PROGRESS
        self.count = self.under_way = 0
        self.aborted = self.ended = self.finalized = False
        self.made: dict[int, Any] = {}
        self.stream: int | None = None


class FakeNccl:
    """The fake library.

    Args:
        gpu: where streams run.
        version: NCCL_VERSION_CODE.

    Attributes:
        statuses: by function name, an ncclResult_t that the function returns without doing anything.
        absent: ranks that never join the creation of a communicator.
    """

    def __init__(self, gpu: FakeRuntime, version: int = 22605) -> None:
        self.gpu, self.version = gpu, version
        self.calls: list[str] = []
        self.violations: list[str] = []
        self.statuses: dict[str, int] = {}
        self.absent: set[int] = set()
        self.comms: list[_Comm] = []
        self._worlds: dict[bytes, _World] = {}
        self._changed = threading.Condition()
        self._here = threading.local()
        for name, does in self._functions().items():
            setattr(self, name, self._function(name, does))
        self.ncclGetErrorString = lambda status: f"error {status}".encode()
        self.ncclGetLastError = lambda handle: b"what it was"

    def _functions(self) -> dict[str, Callable[..., int]]:
        queued = "AllReduce Reduce ReduceScatter Broadcast AllGather Send Recv".split()
        return {
            "ncclGetVersion": self._version,
            "ncclGetUniqueId": self._unique_id,
            "ncclCommInitRankConfig": self._init,
            "ncclCommSplit": self._split,
            "ncclCommFinalize": self._finalize,
            "ncclCommDestroy": self._destroy,
            "ncclCommAbort": self._abort,
            "ncclCommGetAsyncError": self._async_error,
            "ncclRedOpCreatePreMulSum": self._premul,
            "ncclRedOpDestroy": self._end_premul,
            "ncclGroupStart": self._start,
            "ncclGroupEnd": self._end,
            **{f"nccl{name}": self._queueing(name) for name in queued},
        }

    def _function(self, name: str, does: Callable[..., int]) -> Any:
        def function(*args: Any) -> int:
            with self._changed:
                self.calls.append(name)
                status = self.statuses.get(name)
            return does(*args) if status is None else status

        return function

    def break_network(self) -> None:
        """Give every communicator an asynchronous error from now on."""
        with self._changed:
            for comm in self.comms:
                comm.state = REMOTE_ERROR

    # ---- communicators -------------------------------------------------------------------------------

    def _version(self, out: Any) -> int:
        out._obj.value = self.version
        return SUCCESS

    def _unique_id(self, out: Any) -> int:
        with self._changed:
            name = f"world {len(self._worlds)}".encode()
            self._worlds[name] = _World(0)
        ctypes.memmove(ctypes.addressof(out._obj), name.ljust(128, b"\0"), 128)
        return SUCCESS

    def _init(self, out: Any, size: int, identity: Any, rank: int, config: Any) -> int:
        _check(config)
        with self._changed:
            world = self._worlds[identity.internal]
            world.size = size
            self._seat(out, world, rank, self.gpu.current())
        return IN_PROGRESS

    def _split(self, handle: Any, color: int, key: int, out: Any, config: Any) -> int:
        comm = self._comm(handle, "ncclCommSplit")
        _check(config)
        with self._changed:
            if comm.under_way or comm.state != SUCCESS:
                self._violate("ncclCommSplit while something is under way")
            asked = comm.world.splitting
            asked[comm] = (color, key, out)
            comm.state = IN_PROGRESS
            if len(asked) == comm.world.size:
                colors = {color for color, _, _ in asked.values()} - {-1}
                for members in ([c for c in asked if asked[c][0] == color] for color in colors):
                    world = _World(len(members))
                    for rank, member in enumerate(sorted(members, key=lambda c: (asked[c][1], c.rank))):
                        self._seat(asked[member][2], world, rank, member.device)
                for peer in asked:
                    peer.state = SUCCESS
                asked.clear()
        return IN_PROGRESS

    def _seat(self, out: Any, world: _World, rank: int, device: int) -> None:
        comm = world.comms[rank] = _Comm(world, rank, device)
        self.comms.append(comm)
        out._obj.value = len(self.comms)
        if len(world.comms) == world.size and not self.absent:
            for peer in world.comms.values():
                peer.state = SUCCESS
        self._changed.notify_all()

    def _comm(self, handle: Any, name: str) -> _Comm:
        comm = self.comms[handle.value - 1]
        if comm.aborted or comm.ended:
            self._violate(f"{name} after the end of a communicator")
        return comm

    def _violate(self, text: str) -> None:
        self.violations.append(text)
        raise AssertionError(text)

    def _finalize(self, handle: Any) -> int:
        comm = self._comm(handle, "ncclCommFinalize")
        with self._changed:
            comm.finalized = True
            comm.state = IN_PROGRESS
            peers = comm.world.comms.values()
            if all(peer.finalized for peer in peers):
                for peer in peers:
                    peer.state = SUCCESS
        return IN_PROGRESS

    def _destroy(self, handle: Any) -> int:
        comm = self._comm(handle, "ncclCommDestroy")
        comm.ended = True
        return SUCCESS

    def _abort(self, handle: Any) -> int:
        comm = self._comm(handle, "ncclCommAbort")
        with self._changed:
            comm.aborted = True
            self._changed.notify_all()
        return SUCCESS

    def _async_error(self, handle: Any, out: Any) -> int:
        out._obj.value = self._comm(handle, "ncclCommGetAsyncError").state
        return SUCCESS

    def _premul(self, out: Any, scalar: int, dtype: int, residence: int, handle: Any) -> int:
        comm = self._comm(handle, "ncclRedOpCreatePreMulSum")
        assert residence == 1
        out._obj.value = number = _FIRST_MADE + len(comm.made)
        comm.made[number] = _at(scalar, 1, dtype).copy()
        return SUCCESS

    def _end_premul(self, op: int, handle: Any) -> int:
        self._comm(handle, "ncclRedOpDestroy")
        return SUCCESS

    # ---- operations ----------------------------------------------------------------------------------

    def _start(self) -> int:
        assert not hasattr(self._here, "group"), "a group in a group"
        self._here.group = []
        return SUCCESS

    def _queueing(self, name: str) -> Callable[..., int]:
        def queue(*args: Any) -> int:
            *rest, handle, stream = args
            comm = self._comm(handle, f"nccl{name}")
            if comm.state != SUCCESS:
                self._violate(f"nccl{name} while another call is in progress")
            if comm.stream not in (None, stream):
                self._violate(f"nccl{name} on another stream than what a communicator did before")
            if self.gpu.device_of(stream) != comm.device:
                self._violate(f"nccl{name} on a stream of another GPU than its communicator's")
            comm.stream = stream
            self._here.group.append((name, comm, stream, rest))
            return SUCCESS

        return queue

    def _end(self) -> int:
        group = self._here.group
        del self._here.group
        if not group:
            return SUCCESS
        comm, stream = group[0][1:3]
        # All operations of a group run at once; a send ends when it is received, so the receives come first here.
        group.sort(key=lambda call: call[0] == "Send")
        works = [self._prepared(name, comm, rest) for name, _, _, rest in group]

        def run() -> None:
            for begin, _ in works:
                begin()
            for _, finish in works:
                finish()
            with self._changed:
                comm.under_way -= 1

        with self._changed:
            comm.under_way += 1
        self.gpu.queue("nccl", stream, run)
        return IN_PROGRESS

    def _prepared(self, name: str, comm: _Comm, rest: list[Any]) -> Parts:
        """Return the two parts of an operation: it begins, and it finishes once the peers have begun."""
        if name == "Send":
            return self._sending(comm, *rest)
        if name == "Recv":
            return self._receiving(comm, *rest)
        number, comm.count = comm.count, comm.count + 1
        src, dst, count, dtype = rest[:4]
        op = rest[4] if "Reduce" in name else None
        root = rest[-1] if name in ("Reduce", "Broadcast") else None
        self._check_places(name, comm, src, dst, count * _DTYPES[dtype].itemsize, root)
        made = comm.made.get(op)
        # Under the lock: a garbage collection within defaultdict's lookup may let another rank make the same entry.
        with self._changed:
            met = comm.world.met[number]
        length = count * (comm.world.size if name == "ReduceScatter" else 1)

        def begin() -> None:
            reads = name != "Broadcast" or root == comm.rank
            data = _at(src, length, dtype).copy() if reads else None
            if made is not None and data is not None:
                data *= made
            called = (name, count, dtype, _FIRST_MADE if made is not None else op, root)
            with self._changed:
                met[comm.rank] = (called, data)
                self._changed.notify_all()

        def finish() -> None:
            if not self._until(comm, lambda: len(met) == comm.world.size):
                return
            called = {there for there, _ in met.values()}
            if len(called) > 1:
                self._violate(f"operation {number} of the ranks differs: {called}")
            datas = [met[rank][1] for rank in range(comm.world.size)]
            _finish(name, comm, datas, dst, count, dtype, op, root)

        return begin, finish

    def _check_places(
        self, name: str, comm: _Comm, src: int, dst: int, nbytes: int, root: int | None
    ) -> None:
        """Check that arrays are in place as NCCL defines it for the operation, or do not overlap."""
        size, here = comm.world.size, comm.rank * nbytes
        reads = nbytes * (size if name == "ReduceScatter" else 1)
        writes = nbytes * (size if name == "AllGather" else 1)
        in_place = {"ReduceScatter": dst == src + here, "AllGather": src == dst + here}.get(name, src == dst)
        apart = src + reads <= dst or dst + writes <= src
        idle = (name == "Broadcast" and root != comm.rank) or (name == "Reduce" and root != comm.rank)
        if not (in_place or apart or idle):
            self._violate(f"{name} of {src:#x} into {dst:#x} overlaps")

    def _sending(self, comm: _Comm, src: int, count: int, dtype: int, peer: int) -> Parts:
        parcel: list[Any] = []

        def begin() -> None:
            parcel.append(_at(src, count, dtype).copy())
            with self._changed:
                comm.world.mail[comm.rank, peer].append(parcel)
                self._changed.notify_all()

        def finish() -> None:
            self._until(comm, lambda: not parcel)

        return begin, finish

    def _receiving(self, comm: _Comm, dst: int, count: int, dtype: int, peer: int) -> Parts:
        def finish() -> None:
            with self._changed:  # as in `_prepared`
                mail = comm.world.mail[peer, comm.rank]
            if self._until(comm, lambda: len(mail) > 0):
                with self._changed:
                    data = mail.popleft().pop()
                    self._changed.notify_all()
                if data.size != count:
                    self._violate(f"received {data.size} bytes, expected {count}")
                _at(dst, count, dtype)[:] = data

        return lambda: None, finish

    def _until(self, comm: _Comm, ready: Callable[[], bool]) -> bool:
        """Wait on the GPU; False at an abort."""
        with self._changed:
            done = self._changed.wait_for(lambda: comm.aborted or ready(), _SECONDS)
            assert done, "a peer did not come"
            return not comm.aborted


def _finish(
    name: str, comm: _Comm, datas: list[Any], dst: int, count: int, dtype: int, op: Any, root: Any
) -> None:
    if name == "Broadcast":
        _at(dst, count, dtype)[:] = datas[root]
    elif name == "AllGather":
        _at(dst, count * len(datas), dtype)[:] = np.concatenate(datas)
    elif name != "Reduce" or root == comm.rank:
        total = datas[0]
        for data in datas[1:]:
            total = _FUNCTIONS[op if op < _FIRST_MADE else 0](total, data)
        if op == _AVG:
            total = np.trunc(total / len(datas)) if total.dtype.kind in "iu" else total / len(datas)
        total = total.astype(_DTYPES[dtype])
        if name == "ReduceScatter":
            total = total[comm.rank * count :][:count]
        _at(dst, count, dtype)[:] = total


def _check(config: Any) -> None:
    given = config._obj
    assert (given.size, given.magic, given.version, given.blocking) == (24, 0xCAFEBEEF, 21400, 0)


def _at(address: int, count: int, dtype: int) -> Array:
    kind = _DTYPES[dtype]
    memory = (ctypes.c_ubyte * (count * kind.itemsize)).from_address(address)
    return np.frombuffer(memory, kind)
