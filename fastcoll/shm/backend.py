"""The backend of the ranks of one node, over one shared-memory segment.

The synchronous path is in fast.py. Here is the rarer one: what the other calls are made of, and what happens
when an entry comes back early (signals, deadlines, dead peers, mismatches).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..compiler.jit import Entry
from ..core import signature
from ..core.backend import Backend, Refuge
from ..core.gate import Gate
from ..core.group import ProcessGroup
from ..core.monitor import Wait
from ..core.operands import Array, refuses
from ..core.operation import Call, Operation
from ..core.operations import KINDS, NO_ARRAY
from ..core.reduce_op import ReduceOp
from ..core.status import AGAIN, DONE, LATER, MISMATCH, MIXED, UNMAPPED, UNREADABLE, WORKED
from ..errors import ArrayError, GroupError, ResourceError
from ..failpoints import reach
from ..kernels import waiting
from ..kernels.reduce import reducer
from ..p2p.engine import Engine
from ..p2p.pipe import Pipe
from ..p2p.transfers import kind_of
from ..record import dump
from ..record.recorder import GroupRecorder
from ..store import Store
from ..system.processes import Member, dead_among
from . import arena, known, learned, movement, reductions, ring_kernels, rounds, symmetric
from . import context_layout as words
from .callers import ShmWays
from .context import HANDED_OVER, Context, Report, What, changed, kept, patience, words_for
from .fast import Fast
from .head_start import HeadStart
from .layout import PUSHING, STATE
from .monitor import ShmMonitor
from .pipe import RingPipe
from .reach import READS, unreadable
from .refuge import ShmRefuge
from .segment import Met, meet
from .symmetric import ShmMemory, SymmetricArrays

_log = logging.getLogger("fastcoll")
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 1e-4
_WRITER_SECONDS = 0.2  # to write a piece of 64 KiB takes 10 us; who takes longer was stopped
_ENDING_SECONDS = 0.2  # from when an ending process has no descriptors any more until it is seen to be dead
_SHARED = np.dtype(np.int64), np.dtype(np.uint8)
_UNDER_WAY = (AGAIN, WORKED, MIXED, UNREADABLE, UNMAPPED)


class ShmBackend(Backend):
    """Collectives and point-to-point between the ranks of one node, through POSIX shared memory."""

    name = "shm"

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        neighbours: int | None = None,
    ) -> ShmBackend:
        """Meet the other members, who are in the order of their group ranks, in a new segment; collective.

        Args:
            store: the group's own (prefixed) store.
            timeout: seconds, for this and for every call on the group.
            neighbours: ranks of the job on this node, members or not; None: all of its ranks.

        Raises:
            ResourceError: no shared memory; raised on every rank.
            PeerDiedError, StoreTimeoutError: a member died or did not come.
        """
        there = members[rank].world_size if neighbours is None else neighbours
        met = meet(store, members, rank, timeout, there)
        made = cls(Gate(name, [member.rank for member in members], rank, timeout), members, met)
        made.go_direct(met.reach)
        return made

    def __init__(self, gate: Gate, members: Sequence[Member], met: Met) -> None:
        segment, cores, share, self._conditions, already, _ = met
        rank = gate.rank
        self.gate = gate
        self.monitor = ShmMonitor(segment, members, rank)
        self._segment = segment
        self._record = GroupRecorder(gate.name, members, rank, self.name, words_for(gate.size))
        since = words.PATIENCE + waiting.TIMED
        self._record.follow(words.CALLS, words.FINISHED, since, words.LATE, words.PENDING)
        self.monitor.record = self._record
        self.context = Context(segment.address, segment.layout, rank, cores, self._record.context)
        self.context.words[words.RING] = self._record.ring
        self._c = self.context.address
        self._report = Report(segment, self.context, gate)
        self._whats: dict[Any, What] = {}
        modes = patience(gate.size, cores)
        self.pipe = RingPipe(segment.address, segment.layout, rank, self.monitor, modes, self._c)
        routes: list[tuple[Pipe, int]] = [(self.pipe, peer) for peer in range(gate.size)]
        learned.fill(self._ways, *already)
        self.messages: Engine = Engine(routes, rank, self.monitor, gate.timeout)
        self.head_start = HeadStart(gate, self.context, self.resume, self.torn, share)
        self._arenas: list[arena.Mapping] = []
        self._symmetric = SymmetricArrays(gate, self.monitor, self.context, self.fail)
        for dtype in _SHARED:  # while the memo has room
            self.what("all_gather", dtype)
        gate.also(
            inside=lambda: self.context.is_mine() or self.head_start.is_handing_over(),
            busy=lambda: self.context[words.BUSY] != 0 or bool(self._symmetric.waits),
        )
        gate.queue.count_in(self.context.words[words.PENDING : words.PENDING + 1])

    @cached_property
    def ways(self) -> ShmWays | None:  # type: ignore[override]  # made when it is first asked for
        """None where the record has where calls come from, which compiled callers cannot say."""
        return None if self._record.keeps_sites else ShmWays(self)

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        return Fast(group, self).table()

    def go_direct(self, reach: int) -> None:
        """Let calls and messages be read where they are, as all ranks can do that (reach.py)."""
        pids = [member.pid for member in self.monitor.members]
        ways = self.context.go_direct(pids, reach)
        if reach & READS:
            sections = map(self._segment.layout.section, range(self.gate.size))
            self.pipe.go_direct(ways, pids, [self._segment.address + at + STATE for at in sections])

    def begin_at_once(self) -> None:
        self.head_start.begin_at_once()

    def learn(self, dtype: np.dtype[Any]) -> None:
        self.what("message", dtype)

    # ---- when an entry comes back early --------------------------------------------------------------

    def resume(
        self, code: int, entry: Entry, *args: Any, tags: int = 0, timeout: float | None = None
    ) -> bool:
        """Call an entry again until it has an end; whether it has done the call, which it may not have begun."""
        begun = code in _UNDER_WAY
        wait: Wait | None = None
        limit = self.gate.timeout if timeout is None else timeout

        def look(code: int) -> None:
            nonlocal wait
            wait = wait or Wait(self.monitor, self._report.doing(entry.name), self._report.late, limit)
            wait.look() if code == AGAIN else wait.worked()

        while code in _UNDER_WAY:
            if code == UNREADABLE:
                self._refuse_to_read(entry, look)
            elif code == UNMAPPED:
                self._map_arena(self.context[words.LATE], look)
            elif code == MIXED:
                self._record.broken_off("made anew")
            else:
                look(code)
            how = rounds.HELD if code == MIXED else rounds.RESUMED
            code = entry.call(self._c | tags | how, *args)
        if code == MISMATCH:
            self._record.broken_off("mismatch")
            difference = self._report.mismatch(self._gather)
            self.context.let_go()
            raise dump.after(difference)
        if begun and code == LATER:
            raise changed(self._report.doing(entry.name))
        return code == DONE

    def _refuse_to_read(self, entry: Entry, look: Callable[[int], None]) -> None:
        """A peer's array cannot be read: raise why, first of all that it or another one died, or failed the group."""
        look(AGAIN)  # which raises what it has seen twice
        deadline = time.monotonic() + _ENDING_SECONDS
        while True:
            look(AGAIN)
            if time.monotonic() > deadline:
                raise unreadable(self.monitor, self.context[words.LATE], self._report.doing(entry.name))
            time.sleep(_POLL_SECONDS)

    def _map_arena(self, peer: int, look: Callable[[int], None]) -> None:
        """Map the arena that a peer's call has named; a peer that has ended meanwhile is what `look` raises."""
        base, nbytes, fd, nonce = map(int, self._segment.reach(peer)[2:6])
        reach("shm.arena.before_mapping")
        deadline = time.monotonic() + _ENDING_SECONDS
        while True:
            try:
                mapping = arena.map_peer(self.monitor.members[peer].pid, fd, nonce, nbytes)
                break
            except ResourceError:
                look(AGAIN)
                if time.monotonic() > deadline:
                    raise
                time.sleep(_POLL_SECONDS)
        reach("shm.arena.after_mapping")
        self._arenas.append(mapping)
        self.context.note_arena(peer, base, nbytes, mapping.address)

    def _gather(self, everybody: Array, own: Array) -> None:
        """Every rank's array, by the thread whose call has the context; its dtype is one of `_SHARED`."""
        code = movement.all_gather.call(self._c | rounds.HELD, everybody, own)
        self.resume(code, movement.all_gather, everybody, own, tags=rounds.HELD)

    def torn(self, entry: Entry, error: BaseException, *integers: Any) -> None:
        """An entry's call was left by an exception, which goes on; where the call was half-way, the group fails.

        Where the entry refused one of the integers it does not, since the general path then says what is wrong.
        """
        if not self.context.is_mine():
            if refuses(error, integers):
                return
            raise error
        self.interrupted(error, self._report.doing(entry.name))
        self._await_writers()
        self.context.let_go()
        raise error

    def _await_writers(self) -> None:
        """The group has failed: no peer writes into this rank's array any more, or it is withdrawn (single_copy.py)."""
        address, nbytes = self.context[words.EXPOSED], self.context[words.EXPOSED_BYTES]
        deadline = time.monotonic() + _WRITER_SECONDS
        while address and (writers := self._living_writers()):
            if time.monotonic() > deadline:
                names = ", ".join(map(str, writers))
                _log.warning("%s may still write into a shared array: arrays are shared no more", names)
                arena.withdraw(address, nbytes)
                break
            time.sleep(_POLL_SECONDS)
        self.context.words[words.EXPOSED] = 0

    def _living_writers(self) -> list[Member]:
        members = self.monitor.members
        writers = [members[peer] for peer in range(self.gate.size) if self._segment.reach(peer)[PUSHING]]
        dead = dead_among(writers)
        return [member for member in writers if member not in dead]

    def refuge(self) -> Refuge:
        return ShmRefuge(self._segment, self.gate.rank)

    def stop(self) -> None:
        self.context.words[words.SHUT] = 1  # leave the synchronous path from now on

    # ---- what calls are made of ----------------------------------------------------------------------

    def what(
        self,
        operation: str,
        dtype: np.dtype[Any],
        op: ReduceOp | None = None,
        *,
        pieces: int = 1,
        parts: Sequence[int] = (),
    ) -> What:
        """The description of a call, made at its first use; `op`: of a reducing one.

        Args:
            pieces: how many pieces, of at least one element each, must fit into a slot of a reducing call.
            parts: sizes of the arrays of a coalesced call; its description is not kept.
        """
        key = (operation, op, dtype)
        if not parts and key in self._whats:
            return self._whats[key]
        nbytes, largest = dtype.itemsize, self._segment.layout.slot // pieces
        if op is not None and nbytes > largest:
            raise ArrayError(f"an element of {dtype} has {nbytes} bytes; {operation} takes {largest} here")
        call = signature.encode(operation, dtype, op=op, parts=parts)
        if operation == "message":
            call = kind_of(0, dtype)
        what = What(call, nbytes, (0, 0) if op is None else reducer(op, dtype)[:2])
        if not parts and self._whats.setdefault(key, what) is what:
            self.context.remember(signature.code_of(operation), dtype, op, what)
        return what

    def _plan(self, entry: Entry, what: What | None, *args: Any, timeout: float | None = None) -> Call:
        """A call of an entry on prepared arrays."""
        if what is not None:
            args = kept(entry.name, args, what.itemsize)
        tags = rounds.PREPARED
        handle = self._c | tags

        def call() -> None:
            self.gate.check_usable()
            if what is not None:
                self.context.words[words.GIVEN] = what.address
            try:
                while not self.resume(entry.call(handle, *args), entry, *args, tags=tags, timeout=timeout):
                    # The synchronous call of another thread is under way, which ends within its own timeout.
                    time.sleep(_POLL_SECONDS)
                    self.gate.check_usable()
            except BaseException as error:
                self.torn(entry, error)

        return call

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        kind, outputs, inputs, op, _, parts = operation
        if KINDS[kind].form == NO_ARRAY:
            return self._plan(reductions.barrier, None, signature.encode(kind), timeout=timeout)
        pieces = max(1, self.gate.size - 1) if kind == "reduce_scatter" else 1
        what = self.what(kind, (outputs or inputs)[0].dtype, op, pieces=pieces, parts=parts)
        entry, arguments = _ENTRIES[kind]
        return self._plan(entry, what, *arguments(operation), timeout=timeout)

    # ---- symmetric arrays ----------------------------------------------------------------------------

    def symmetric_memory(self, group: ProcessGroup, nbytes: int, label: str) -> ShmMemory:
        return self._symmetric.allocate(partial(self._exchange, group), nbytes, label)

    def _exchange(self, group: ProcessGroup, note: str) -> list[str]:
        """Every rank's note."""

        def gather(everybody: Array, own: Array) -> None:
            what = self.what("symmetric.empty", own.dtype)
            group.run("symmetric.empty", self._plan(movement.all_gather, what, everybody, own), (), False)

        return signature.tell(note, self.gate.size, gather)

    # ---- what the group finds out --------------------------------------------------------------------

    @property
    def _ways(self) -> Array:
        return self.context.words[words.CHOOSING : words.MEMO]

    def forget(self) -> None:
        """Begin anew to find out what is fast; on all ranks between the same two calls."""
        self._ways[:] = 0

    def keep(self, command: str = known.RUNNING, one_shot: int | None = None) -> Path | None:
        """Write down what this rank has found out; see known.py."""
        return known.keep(self._conditions, *learned.found(self._ways), command, one_shot)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, reason: GroupError | None) -> None:
        self.context.words[words.SHUT] = 1
        self.context.let_go(HANDED_OVER)
        # A signal handler that closes the group whose call it interrupted would wait for itself; one that interrupted a
        # message would have it go on in memory that is gone. Closed messages keep their pipe, so look before.
        inside = self.gate.is_inside() or self.messages.has_turn()
        self.messages.close(reason)
        # A call under way was aborted and ends within moments. One that a killed thread has left behind is
        # not worth waiting for: then the mapping stays until the process ends.
        deadline = time.monotonic() + _CLOSE_SECONDS
        turn = not inside and self.gate.turn.acquire(timeout=_CLOSE_SECONDS)
        free = turn
        while free and waiting.seize.call(self._c + 8 * words.BUSY) == LATER:
            free = time.monotonic() < deadline
            time.sleep(_POLL_SECONDS)
        self.monitor.leave()
        if self.gate.rank == 0 and free and reason is None:
            try:
                self.keep()
            except OSError as error:
                _log.debug("what the group %s has learned is not kept: %s", self.gate.name, error)
        if free:
            self._segment.close()
            for mapping in self._arenas:
                mapping.close()
        self._record.close()
        if turn:
            self.gate.turn.release()

    def disown(self, error: GroupError) -> None:
        self.stop()  # the segment is the parent's


_ENTRIES: dict[str, tuple[Entry, Callable[[Operation], tuple[Any, ...]]]] = {
    "all_reduce": (reductions.all_reduce, lambda o: (o.outputs[0], o.op)),
    "reduce": (reductions.reduce, lambda o: (o.outputs[0], o.inputs[0], o.op, o.root)),
    "scan": (reductions.scan, lambda o: (o.outputs[0], o.inputs[0], o.op, False)),
    "exscan": (reductions.scan, lambda o: (o.outputs[0], o.inputs[0], o.op, True)),
    "reduce_scatter": (reductions.reduce_scatter, lambda o: (o.outputs[0], o.inputs, o.op)),
    "broadcast": (movement.broadcast, lambda o: (o.outputs[0], o.root)),
    "all_gather": (movement.all_gather, lambda o: (o.outputs, o.inputs[0])),
    "gather": (movement.gather, lambda o: (o.outputs or None, o.inputs[0], o.root)),
    "scatter": (movement.scatter, lambda o: (o.outputs[0], o.inputs or None, o.root)),
    "all_to_all": (movement.all_to_all, lambda o: (o.outputs, o.inputs, o.inputs[0])),
}
"""What each kind's entry takes, after the context."""

ENTRIES: tuple[Entry, ...] = (
    waiting.seize, learned.read_clock, reductions.barrier, *dict.fromkeys(entry for entry, _ in _ENTRIES.values()),
    ring_kernels.send, ring_kernels.receive, ring_kernels.post_send, ring_kernels.post_receive, ring_kernels.complete,
    ring_kernels.begin, ring_kernels.accept, ring_kernels.acknowledge, ring_kernels.advance, ring_kernels.claim,
    ring_kernels.retire,
    symmetric.copy_bytes, symmetric.count_signal, symmetric.await_signal,
)  # fmt: skip
"""Every entry there is, for whoever wants them compiled ahead."""
