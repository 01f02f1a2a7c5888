"""The ranks of an MPI job as a group, through the MPI library that mpi4py has found.

Each call begins with a meeting of its own (agreement.py), so calls that do not match are refused on all ranks before
MPI, which does not look, moves anything. Then MPI moves the data, and our reducers combine it (execution.py); small
data has come with the meeting. A synchronous call on small plain arrays that was seen before is one compiled call.
Every wait comes back every 50 ms to look at signals, the clock and the peers.

A call on arrays in the memory of GPUs is another one than that on the host's, and nothing of theirs is in a row.
Messages are those of the p2p room over a pipe of MPI (pipe.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ...core import signature
from ...core.backend import Backend
from ...core.gate import Gate
from ...core.group import ProcessGroup
from ...core.monitor import Wait
from ...core.operands import Array, is_plain
from ...core.operation import Call, Operation
from ...core.operations import KINDS
from ...core.prepared import PreparedCalls
from ...core.reduce_op import ReduceOp
from ...core.sizes import sized, sizes_of
from ...core.status import DONE
from ...core.work import Work
from ...errors import AbortedError, GroupError
from ...failpoints import reach
from ...kernels.reduce import Reducer
from ...p2p.engine import Engine
from ...p2p.pipe import Pipe
from ...record import dump
from ...record.recorder import GroupRecorder
from ...rendezvous.control import NetMonitor
from ...store import Store
from ...system.processes import Member
from . import compiled as c
from .agreement import MEETING_WORDS, Meeting, Prepared, Requests, abandon
from .execution import Addressed, Execution, HostMemory, Memory, are_near
from .library import Library, load
from .membership import MpiControl, lay_down, make_comm
from .pipe import INSIDE, MpiPipe

_CLOSE_SECONDS = 5.0
_NOTICE, _MEET, _MOVE, *_MAIL = range(1, 7)  # tags
_LITTLE = 4 << 10  # bytes of an array that goes with the meeting to all ranks, though it is for one


class MpiBackend(Backend):
    """Collectives and point-to-point between the ranks of an MPI job. A group is a communicator."""

    name = "mpi"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] | None = None,
    ) -> MpiBackend:
        """Make the group's communicator; collective. As TcpBackend.make, and raises UnavailableError where MPI is not
        there, or the members are not ranks of one MPI job.
        """
        library = load()
        comm, cuda_aware = make_comm(library, store, name, members, rank, timeout)
        here = [member for member in crowd or members if member.boot_id == members[rank].boot_id]
        dedicated = len(here) <= len(os.sched_getaffinity(0))  # there is a core for each rank of this host
        gate = Gate(name, [member.rank for member in members], rank, timeout)
        return cls(library, comm, gate, members, dedicated, cuda_aware)

    def __init__(
        self,
        library: Library,
        comm: Any,
        gate: Gate,
        members: Sequence[Member],
        dedicated: bool,
        cuda_aware: bool,
    ) -> None:
        self.gate = gate
        self.cuda_aware = cuda_aware
        self._library = library
        self._comm = comm
        self._control = MpiControl(library, comm, _NOTICE)
        self.monitor = NetMonitor(members, comm.rank, self._control)
        self._record = GroupRecorder(gate.name, members, gate.rank, self.name, MEETING_WORDS)
        self.monitor.record = self._record
        self._meeting = Meeting(library, comm, dedicated, _MEET, self._record)
        self._requests = Requests(library, dedicated)
        self._execution = partial(Execution, library, comm, self._requests, _MOVE, self._look)
        self._host = self._execution(HostMemory(gate.size))
        self._gpus: Execution | None = None
        room, little = self._meeting.room, min(self._meeting.room, _LITTLE)
        self._most_attached = {"all_reduce": room, "scan": room, "exscan": room, "broadcast": room}
        self._most_attached |= {"all_gather": room, "reduce": little, "gather": little}
        self._prepared: PreparedCalls[Prepared] = PreparedCalls()
        self._wait: Wait | None = None
        self._limit = gate.timeout
        self._moving = False
        self.pipe = MpiPipe(library, comm, _MAIL, dedicated)
        routes: list[tuple[Pipe, int]] = [(self.pipe, rank) for rank in range(comm.size)]
        self.messages: Engine = Engine(routes, comm.rank, self.monitor, gate.timeout)

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        at_once = self._at_once

        def all_reduce(tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
            if not async_op and type(op) is ReduceOp and at_once("all_reduce", tensor, tensor, op):
                return None
            return group.all_reduce(tensor, op, async_op)

        def broadcast(tensor: Any, root: int, async_op: bool = False) -> Any:
            if not async_op and type(root) is int and at_once("broadcast", tensor, tensor, None, root):
                return None
            return group.broadcast(tensor, root, async_op)

        def all_gather_single(output: Any, input: Any, async_op: bool = False) -> Work | None:
            if not async_op and at_once("all_gather", output, input):
                return None
            return group.all_gather_single(output, input, async_op)

        def barrier(async_op: bool = False, timeout: float | None = None) -> Work | None:
            if not async_op and timeout is None and at_once("barrier"):
                return None
            return group.barrier(async_op, timeout)

        methods = (all_reduce, broadcast, all_gather_single, barrier)
        return {method.__name__: method for method in methods}

    # ---- calls -------------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """See ProcessGroup. Takes arrays on GPUs too, after `take_gpus`: then the call returns whether it did it, which
        all ranks do alike or none.
        """
        kind, outputs, inputs, op, root, parts = operation
        arrays = inputs or outputs
        on_gpu = bool(arrays) and type(arrays[0]) is not np.ndarray
        execution = self._gpus if on_gpu else self._host
        assert execution is not None
        takes, gives = execution.memory.blocks(outputs), execution.memory.blocks(inputs)
        dtype = arrays[0].dtype if arrays else None
        how = None if op is None else execution.memory.reducer(op, arrays[0].dtype, [*takes, *gives])
        ready = Addressed(kind, takes, gives, how, root)
        nbytes = tuple([size for _, size in sized(kind, takes, gives)])
        key = (kind, dtype, op, root, nbytes, tuple(parts), on_gpu)
        said = self._prepared.get_or_make(key, lambda: self._prepare(key, how))
        most = -1 if on_gpu else self._most_attached.get(kind, -1)
        fits = bool(gives) and gives[0][1] <= most
        attached = gives[0] if fits and (kind != "broadcast" or self.gate.rank == root) else (0, 0)
        has_blocks = KINDS[kind].has_blocks
        near = not has_blocks or on_gpu or (are_near(takes) and are_near(gives))
        able = op is None or how is not None  # which a GPU may not be

        def call() -> bool:
            self.gate.check_usable()
            try:
                reach("mpi.OPERATION.enter", kind)
                self._begin(timeout)
                if self._meeting.meet(said, near and able, attached, self._look) != DONE:
                    raise self._mismatch(said)
                self._moving = True
                reach("mpi.OPERATION.after_meeting", kind)
                done = bool(self._meeting[c.NEAR]) or not on_gpu
                if fits and (not has_blocks or self._meeting.rows[:, c.ROW_SHAPE].max() <= most):
                    execution.run_attached(ready, self._meeting.attached)
                elif done:
                    execution.run(ready, bool(self._meeting[c.NEAR]), operation)
                reach("mpi.OPERATION.before_done", kind)
                self._meeting.end()
                return done
            except BaseException as error:
                raise self._torn(error) from error.__cause__

        return call

    def _prepare(self, key: tuple[Any, ...], how: Reducer | None) -> Prepared:
        """What this rank says of a call, and what is left to do of it where all data is attached.

        The key is kind, dtype, reduce operation, root, bytes, parts, and whether the arrays are on GPUs.
        """
        kind, dtype, op, root, nbytes, parts, on_gpu = key
        code = signature.encode(kind, dtype, op=op, parts=parts) | root << signature.ROOT_SHIFT
        sizes = sizes_of(kind, self.gate.size, self.gate.rank, nbytes, root)
        own = nbytes[0] if nbytes else 0
        finish: tuple[int, ...] = ()
        if kind == "barrier":
            finish = (c.NOTHING,)
        elif not on_gpu and own <= self._meeting.room and len(set(nbytes)) == 1:
            if kind == "broadcast":
                finish = (c.FROM_ROOT, own, root)
            elif kind == "all_gather":
                finish = (c.FROM_ALL, own)
            elif kind == "all_reduce" and how is not None:
                finish = (c.REDUCE, own, root, how.address, how.code, own // how.itemsize)
        return Prepared(code | c.ON_GPU * on_gpu, sizes, self.gate.rank, finish)

    def _begin(self, timeout: float | None = None) -> None:
        """A call begins, as far as waiting is concerned."""
        self._wait, self._limit = None, self.gate.timeout if timeout is None else timeout
        self._moving = False

    def _look(self) -> None:
        """Every 50 ms of a call: raise if going on is hopeless."""
        if self._wait is None:
            self._wait = Wait(self.monitor, self._doing(), self._late, self._limit)
        self._wait.look()

    def _doing(self) -> str:
        """The call under way, for messages."""
        _, code, shape = self._meeting.rows[self.gate.rank, : c.ROW_BALANCE].tolist()
        what = signature.describe(code & ~c.ON_GPU, shape)
        return self.gate.name_of(what, self._meeting[c.CALLS])

    def _late(self) -> list[int]:
        """The group ranks that have not come; once all have, those that may still be in the call."""
        if not self._moving:
            return self._meeting.late()
        others = (rank for rank in range(self.gate.size) if rank != self.gate.rank)
        return [rank for rank in others if not self.monitor.has_left(rank)]

    def _mismatch(self, said: Prepared) -> Exception:
        """The error of calls that differ, which all ranks have seen; the group goes on."""
        rows = self._meeting.rows[:, c.ROW_CODE : c.ROW_SHAPE + 1].tolist()
        heads = [(code & ~c.ON_GPU, shape) for code, shape in rows]
        on_gpus = [self.gate.ranks[rank] for rank, (code, _) in enumerate(rows) if code & c.ON_GPU]
        some = 0 < len(on_gpus) < self.gate.size
        also = f"the arrays of {on_gpus} are on GPUs, those of the others are not" if some else ""
        sizes = said.sizes.gives, said.sizes.takes
        error = signature.difference(heads, self.gate, self._meeting[c.CALLS], self._gather, sizes, also=also)
        number = self._meeting[c.CALLS]
        self._meeting.end()
        self._record.did_not_match(number)
        return dump.after(error)

    def _gather(self, everybody: Array, own: Array) -> None:
        """Every rank's array; all of them ask, since all have seen that something does not fit."""
        blocks, x = self._host.memory.blocks(list(everybody)), self._host.memory.blocks([own])
        self._host.run(Addressed("all_gather", blocks, x, None, 0), True, (everybody, own))

    def _torn(self, error: BaseException) -> BaseException:
        """What to raise for an exception; the group fails if it was half-way, since the peers go on with it."""
        if isinstance(error, self._library.MPI.Exception):
            error = AbortedError(f"{self._doing()}: the MPI library says: {error}")
        if isinstance(error, GroupError) or self._meeting[c.UNDER_WAY]:
            self.interrupted(error, self._doing())
        return error

    # ---- small plain arrays, in one compiled call ------------------------------------------------------

    def _at_once(self, kind: str, out: Any = None, x: Any = None, op: Any = None, root: int = 0) -> bool:
        """Do a synchronous call that was seen before, so what was prepared for it is known to be right.

        Only with nothing before it, and where MPI was initialised for many threads. False: it takes the general way.
        """
        dtype = None
        nbytes: tuple[int, ...] = ()
        if kind != "barrier":
            if not is_plain(x):
                return False
            dtype, nbytes = x.dtype, (x.nbytes,)
            if out is not x:
                nbytes *= self.gate.size
                if not is_plain(out) or out.dtype != dtype or out.nbytes != sum(nbytes):
                    return False
        said = self._prepared.get((kind, dtype, op, root, nbytes, (), False))
        if said is None or not said.finishes or self._library.serial or not self.gate.is_clear():
            return False
        self.gate.in_turn(self._carry_out, said, out, x)
        return True

    def _carry_out(self, said: Prepared, out: Any, x: Any) -> None:
        """The call itself, by the thread that has the turn."""
        self.gate.check_usable()
        context, call = self._meeting.address, said.address
        try:
            code = c.carry_out.call(context, call, out, x)
            if code == DONE:
                return
            self._begin()
            again = partial(c.carry_out.call, context | c.RESUMED, call, out, x)
            if self._meeting.resume(code, again, self._look) != DONE:
                raise self._mismatch(said)
        except BaseException as error:
            raise self._torn(error) from error.__cause__

    # ---- GPUs --------------------------------------------------------------------------------------

    def take_gpus(self, memory: Memory, current: Callable[[], AbstractContextManager[None]]) -> None:
        """From now on `plan` also takes dense arrays on GPUs, which `memory` knows; all libraries must be CUDA-aware.

        In the context `current` their GPU is the thread's current one, for the threads that carry messages.
        """
        self._gpus = self._execution(memory)
        self.pipe.current = current

    @property
    def least_on_gpus(self) -> int:
        """Messages up to so many bytes must come from and go to the host's memory."""
        return INSIDE

    # ---- the end -----------------------------------------------------------------------------------

    def close(self, reason: GroupError | None) -> None:
        self.messages.close(reason)
        # A call under way was aborted and ends within moments; a signal handler's own call never does.
        turn = not self.gate.is_inside() and self.gate.turn.acquire(timeout=_CLOSE_SECONDS)
        self.monitor.leave()
        self._record.close()
        failed = self.monitor.failure is not None
        if turn:
            if failed:
                abandon([], (self._meeting, self._host, self._gpus))
            else:
                self._meeting.free()
            lay_down(self._library, self._comm, self._control, failed)
            self.gate.turn.release()

    def disown(self, error: GroupError) -> None:
        """In a child of fork: make every use raise. MPI is the parent's."""
