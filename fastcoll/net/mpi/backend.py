"""The backend for the ranks of an MPI job. It uses the MPI library that mpi4py finds.

Each call begins with a meeting of its own, in which each rank sends every other rank a row that describes its call
(agreement.py). MPI itself does not check that the ranks' calls match. The meeting does: if the calls differ, every rank
raises an error before MPI moves data. If they match, MPI moves the data, and our reducers combine it (execution.py);
small data has already arrived in the rows. If a synchronous call on small plain arrays was prepared before, a single
compiled call carries it out. Waits return every 50 ms, so that Python checks signals, the clock and the peers.

A call on arrays in GPU memory does not match the same call on host arrays, and its data never travels in rows. Messages
use the engine of p2p/ with a pipe over MPI (pipe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from ...core.backend import Backend
from ...core.collective import Collective
from ...core.gate import Gate
from ...core.group import ProcessGroup
from ...core.operands import Array
from ...core.operation import Call, Operation
from ...core.operations import BLOCKS_TO_BLOCKS, BLOCKS_TO_ONE, KINDS, NO_ARRAY, WORD
from ...core.prepared import CallKey, PreparedCalls, fast_methods
from ...core.sizes import sized, sizes_of
from ...core.status import DONE
from ...errors import AbortedError, GroupError
from ...failpoints import reach
from ...kernels.reduce import Reducer
from ...p2p.engine import Engine
from ...p2p.pipe import Pipe
from ...record.recorder import GroupRecorder
from ...rendezvous.control import NetMonitor
from ...store import Store
from ...system.processes import Member, have_own_cores
from . import compiled as c
from .agreement import MEETING_WORDS, Prepared, Requests, RowExchange, abandon
from .execution import Addressed, Execution, HostMemory, Memory, are_near
from .library import MpiLibrary, load
from .membership import MpiControl, make_comm, retire_comm
from .pipe import INLINE_BYTES, MpiPipe

_CLOSE_SECONDS = 5.0
_NOTICE, _MEET, _MOVE, *_MAIL = range(1, 7)  # tags
# Rows go to all ranks. So an array that only the root needs is attached to a row only up to this many bytes.
_LITTLE = 4 << 10


class MpiBackend(Backend):
    """Collectives and point-to-point messages between the ranks of an MPI job.

    Each group has a communicator.
    """

    name = "mpi"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] = (),
    ) -> MpiBackend:
        """Make the group's communicator; collective.

        Arguments and errors are those of TcpBackend.make.

        Raises:
            UnavailableError: there is no MPI, or the members are not ranks of one MPI job.
        """
        library = load()
        comm, cuda_aware = make_comm(library, store, name, members, rank, timeout)
        dedicated = have_own_cores(
            [member for member in members if member.boot_id == members[rank].boot_id], crowd
        )
        gate = Gate(name, [member.rank for member in members], rank, timeout)
        return cls(library, comm, gate, members, dedicated, cuda_aware)

    def __init__(
        self,
        library: MpiLibrary,
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
        self._meeting = RowExchange(library, comm, dedicated, _MEET, self._record)
        self._requests = Requests(library, dedicated)
        self._execution = partial(Execution, library, comm, self._requests, _MOVE, self._look)
        self._host = self._execution(HostMemory(gate.size))
        self._gpus: Execution | None = None
        room, little = self._meeting.room, min(self._meeting.room, _LITTLE)
        # For each kind in which a rank contributes one array: an array of up to this many bytes is attached to the row.
        self._most_attached = {
            name: little if kind.root == "dst" else room
            for name, kind in KINDS.items()
            if kind.form not in (WORD, NO_ARRAY, BLOCKS_TO_ONE, BLOCKS_TO_BLOCKS) and not kind.made_of
        }
        self._prepared: PreparedCalls[Prepared] = PreparedCalls()
        self._collective = Collective(gate, self.monitor, self._head, self._late, self._gather)
        self._wait = self._collective.wait(None)
        self._moving = False
        self.pipe = MpiPipe(library, comm, _MAIL, dedicated)
        routes: list[tuple[Pipe, int]] = [(self.pipe, rank) for rank in range(comm.size)]
        self.messages: Engine = Engine(routes, comm.rank, self.monitor, gate.timeout)
        library.at_finalize.append(self.end)

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        kinds = "all_reduce", "broadcast", "all_gather", "barrier"
        return fast_methods(group, kinds, self._at_once, None, False)

    # ---- calls -------------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        """See Backend. After `take_gpus`, arrays may be on GPUs.

        The call returns True if it was carried out. It returns False, on all ranks, if some rank's GPU cannot reduce
        its arrays.
        """
        kind, outputs, inputs, op, root, parts, _ = operation
        arrays = inputs or outputs
        on_gpu = bool(arrays) and type(arrays[0]) is not np.ndarray
        execution = self._gpus if on_gpu else self._host
        assert execution is not None
        takes, gives = execution.memory.blocks(outputs), execution.memory.blocks(inputs)
        dtype = arrays[0].dtype if arrays else None
        how = None if op is None else execution.memory.reducer(op, arrays[0].dtype, [*takes, *gives])
        ready = Addressed(kind, takes, gives, how, root)
        nbytes = tuple([size for _, size in sized(kind, takes, gives)])
        key = CallKey(kind, dtype, op, root, nbytes, tuple(parts), on_gpu)
        prepared = self._prepared.get_or_make(key, lambda key: self._prepare(key, how))
        most = -1 if on_gpu else self._most_attached.get(kind, -1)
        fits = bool(gives) and gives[0][1] <= most
        attached = gives[0] if fits and (kind != "broadcast" or self.gate.rank == root) else (0, 0)
        has_blocks = KINDS[kind].has_blocks
        near = not has_blocks or on_gpu or (are_near(takes) and are_near(gives))
        can_reduce = op is None or how is not None  # false if a GPU cannot reduce these arrays

        def call() -> bool:
            self.gate.check_usable()
            try:
                reach("mpi.OPERATION.enter", kind)
                self._wait, self._moving = self._collective.wait(timeout), False
                if self._meeting.meet(prepared, near and can_reduce, attached, self._look) != DONE:
                    raise self._mismatch(prepared)
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
                raise self._failed_call(error) from error.__cause__

        return call

    def _prepare(self, key: CallKey, how: Reducer | None) -> Prepared:
        """Prepare a call: make its table (compiled.py).

        If all data is attached to the rows, the table also describes how to finish the call. The key's variant, its
        last field, is whether the arrays are on GPUs.
        """
        kind, _, _, root, nbytes, _, on_gpu = key
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
        return Prepared(key.word | c.ON_GPU * on_gpu, sizes, self.gate.rank, finish)

    def _look(self) -> None:
        """Raise an error if the current call cannot complete; called every 50 ms."""
        self._wait.look()

    def _head(self) -> tuple[int, int, int]:
        """Return number, call word and shape of the current call."""
        _, code, shape = self._meeting.rows[self.gate.rank, : c.ROW_BALANCE].tolist()
        return self._meeting[c.CALLS], code & ~c.ON_GPU, shape

    def _late(self) -> list[int]:
        """Return the group ranks whose rows have not arrived.

        After the meeting, any rank may still be in the call. So this then returns the other ranks that have not left.
        """
        if not self._moving:
            return self._meeting.late()
        others = (rank for rank in range(self.gate.size) if rank != self.gate.rank)
        return [rank for rank in others if not self.monitor.has_left(rank)]

    def _mismatch(self, prepared: Prepared) -> Exception:
        """Return the error for calls that differ.

        All ranks have found the mismatch and raise this error, so the group stays usable.
        """
        rows = self._meeting.rows[:, c.ROW_CODE : c.ROW_SHAPE + 1].tolist()
        heads = [(code & ~c.ON_GPU, shape) for code, shape in rows]
        on_gpus = [self.gate.ranks[rank] for rank, (code, _) in enumerate(rows) if code & c.ON_GPU]
        some = 0 < len(on_gpus) < self.gate.size
        also = f"the arrays of {on_gpus} are on GPUs, those of the others are not" if some else ""
        self._record.broken_off("mismatch")
        error = self._collective.mismatch(
            self._meeting[c.CALLS], heads, (prepared.sizes.gives, prepared.sizes.takes), also
        )
        self._meeting.end("mismatch")
        return error

    def _gather(self, everybody: Array, own: Array) -> None:
        """Do an all_gather without a meeting.

        Used after a mismatch, which all ranks have found, so all of them call this.
        """
        blocks, x = self._host.memory.blocks(list(everybody)), self._host.memory.blocks([own])
        self._host.run(Addressed("all_gather", blocks, x, None, 0), True, (everybody, own))

    def _failed_call(self, error: BaseException) -> BaseException:
        """Return the error to raise for an exception that has interrupted a call.

        If the call has begun, this also fails the group, because peers are still in the call.
        """
        if isinstance(error, self._library.MPI.Exception):
            error = AbortedError(f"{self._collective.doing()}: the MPI library reports: {error}")
        if isinstance(error, GroupError) or self._meeting[c.IN_PROGRESS]:
            self.interrupted(error, self._collective.doing())
        return error

    # ---- small plain arrays, in one compiled call ------------------------------------------------------

    def _at_once(self, key: Any, arrays: tuple[Array, ...]) -> bool:
        """Carry out a synchronous call that was prepared before, unless other calls are queued.

        Returns False, with nothing done, if the caller has to take the general path; without MPI_THREAD_MULTIPLE, this
        is always so.
        """
        prepared = self._prepared.get(key)
        if prepared is None or not prepared.finishes or self._library.serial or not self.gate.is_clear():
            return False
        self.gate.run_exclusively(self._carry_out, prepared, arrays[0], arrays[-1])
        return True

    def _carry_out(self, prepared: Prepared, out: Any, x: Any) -> None:
        """Carry out a prepared call. The caller holds the gate's lock."""
        self.gate.check_usable()
        context, call = self._meeting.address, prepared.address
        try:
            code = c.carry_out.call(context, call, out, x)
            if code == DONE:
                return
            self._wait, self._moving = self._collective.wait(None), False
            again = partial(c.carry_out.call, context | c.RESUMED, call, out, x)
            if self._meeting.resume(code, again, self._look) != DONE:
                raise self._mismatch(prepared)
        except BaseException as error:
            raise self._failed_call(error) from error.__cause__

    # ---- GPUs --------------------------------------------------------------------------------------

    def take_gpus(self, memory: Memory, current: Callable[[], AbstractContextManager[None]]) -> None:
        """Let `plan` accept dense arrays in GPU memory.

        The MPI libraries of all ranks must be CUDA-aware.

        Args:
            memory: how calls use the GPU's memory.
            current: returns a context manager in which the GPU is the thread's current device. Threads that move
                messages use it.
        """
        self._gpus = self._execution(memory)
        self.pipe.current = current

    @property
    def least_on_gpus(self) -> int:
        """The largest number of bytes of a message that must be in host memory.

        A longer message may be in GPU memory.
        """
        return INLINE_BYTES

    # ---- the end -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Leave the group because the program calls MPI_Finalize; later calls raise AbortedError."""
        me = self.monitor.name(self.gate.rank)
        self.fail(AbortedError(f"{me} called MPI_Finalize before it left the group {self.gate.name}"))
        self.close(self.monitor.failure)

    def close(self, reason: GroupError | None) -> None:
        if self.end not in self._library.at_finalize:
            return  # `end` has closed it
        self._library.at_finalize.remove(self.end)
        self.messages.close(reason)
        # Wait for the current call, which has been aborted and ends soon. But if this is a signal handler that has
        # interrupted the call, do not wait, because the call cannot end before the handler returns.
        turn = not self.gate.is_inside() and self.gate.lock.acquire(timeout=_CLOSE_SECONDS)
        self.monitor.leave()
        self._record.close()
        failed = self.monitor.failure is not None
        if turn:
            if failed:
                abandon([], (self._meeting, self._host, self._gpus))
            else:
                self._meeting.free()
            retire_comm(self._library, self._comm, self._control, failed)
            self.gate.lock.release()

    def disown(self, error: GroupError) -> None:
        """Do nothing in a forked child, because MPI belongs to the parent."""
