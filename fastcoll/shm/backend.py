"""The backend of the ranks of one node, over one shared-memory segment.

The synchronous path is in fast.py. calls.py continues a call whose *entry*, a compiled function, has returned early.
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
from ..core.backend import Backend, RecoveryEndpoint
from ..core.gate import Gate
from ..core.group import ProcessGroup
from ..core.operands import Array
from ..core.operation import Call, Operation
from ..core.operations import KINDS, NO_ARRAY
from ..core.status import LATER
from ..core.travel import add_lost
from ..errors import GroupError, MismatchError
from ..kernels import shared_words, waiting
from ..p2p.engine import Engine
from ..p2p.pipe import Pipe
from ..record.recorder import GroupRecorder
from ..store import Store
from ..system.processes import Member
from . import context_layout as words
from . import (
    movement,
    open_calls,
    reductions,
    requests,
    ring_kernels,
    slot_memory,
    symmetric,
    tuning_cache,
    tuning_table,
)
from .callers import ShmNativeCalls
from .calls import Calls
from .context import ShmContext, backoff, words_for
from .fast import Fast
from .inline_start import InlineStart
from .layout import HEADER, LINE, RELAY, RESULT, STATE
from .meeting import Met, meet
from .monitor import ShmMonitor
from .pipe import RingPipe
from .reach import READS
from .recovery_endpoint import ShmRecoveryEndpoint
from .symmetric import ShmMemory, SymmetricArrays

_log = logging.getLogger("fastcoll")
_CLOSE_SECONDS = 5.0
_POLL_SECONDS = 1e-4


class ShmBackend(Backend):
    """Collectives and point-to-point between the ranks of one node, through POSIX shared memory."""

    name = "shm"
    narrows = True
    keeps_memory: bool | None = None
    """Whether `close` leaves the segment mapped until the process ends; None: if this thread is inside a message.

    A larger group sets it, because its calls and messages use the memory, too.
    """

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        crowd: Sequence[Member] = (),
        relay: int = 0,
    ) -> ShmBackend:
        """Meet the other members, in the order of their group ranks, in a new segment; collective.

        Args:
            store: the group's own (prefixed) store.
            timeout: seconds, for this and for every call on the group.
            crowd: the job's ranks that this rank knows, members or not. Some of them may run on the members' cores.
            relay: bytes of each rank's relay memory, for a larger group (net/tcp/plans/relayed.py).

        Raises:
            ResourceError: no shared memory; raised on every rank.
            PeerDiedError, StoreTimeoutError: a member died or did not arrive.
        """
        met = meet(store, members, rank, timeout, crowd, relay)
        made = cls(Gate(name, [member.rank for member in members], rank, timeout), members, met)
        made.go_direct(met.reach)
        return made

    def __init__(self, gate: Gate, members: Sequence[Member], met: Met) -> None:
        segment, share, self.conditions, already, _ = met
        rank = gate.rank
        self.gate = gate
        self.monitor = ShmMonitor(segment, members, rank)
        self._segment = segment
        self._record = GroupRecorder(gate.name, members, rank, self.name, words_for(gate.size))
        since = words.BACKOFF + waiting.TIMED
        self._record.follow(words.CALLS, words.FINISHED, since, words.LATE, words.PENDING)
        self.monitor.record = self._record
        self.context = ShmContext(segment.address, segment.layout, rank, share, self._record.context)
        self.context.words[words.RING] = self._record.ring
        self._c = self.context.address
        self.calls = Calls(gate, self.monitor, segment, self.context, self._record, self.interrupted)
        modes = backoff(share)
        self.pipe = RingPipe(segment, rank, self.monitor, modes, self._c)
        routes: list[tuple[Pipe, int]] = [(self.pipe, peer) for peer in range(gate.size)]
        tuning_table.fill(self._tuning, *already)
        self.messages: Engine = Engine(routes, rank, self.monitor, gate.timeout)
        self.inline_start = InlineStart(
            gate,
            self.context,
            self.calls.resume,
            self.calls.torn,
            self.calls.allocate_slots,
            share,
            self._record.unawaited,
        )
        self.calls.carry_on = self.inline_start.carry_on
        self._symmetric = SymmetricArrays(gate, self.monitor, self.context, self.fail)
        gate.also(
            inside=self.context.is_mine,
            busy=lambda: self.context[words.BUSY] not in (0, words.FREEING) or bool(self._symmetric.waits),
        )
        gate.queue.count_in(self.context.words[words.PENDING : words.PENDING + 1])

    @cached_property
    def native_calls(self) -> ShmNativeCalls | None:  # type: ignore[override]  # made when it is first asked for
        """None if the record must have the file and line of each call, which compiled callers cannot pass."""
        return None if self._record.keeps_sites else ShmNativeCalls(self.calls, self.pipe, self.messages)

    def fast(self, group: ProcessGroup) -> Mapping[str, Callable[..., Any]]:
        return Fast(group, self.calls, self.messages, self.pipe.address, self.inline_start).table()

    def go_direct(self, reach: int) -> None:
        """Allow direct calls and messages, if all ranks can access one another's memory (reach.py)."""
        pids = [member.pid for member in self.monitor.members]
        algorithms = self.context.go_direct(pids, reach)
        if reach & READS:
            sections = map(self._segment.layout.section, range(self.gate.size))
            self.pipe.go_direct(algorithms, pids, [self._segment.address + at + STATE for at in sections])

    def lines(self) -> list[int]:
        """Return the addresses of a larger group's lines (layout.py), valid until the backend is closed.

        They are the lines for headers, of each rank and then of the result, and those for relayed data, in this order.
        """
        layout = self._segment.layout
        sections = [self._segment.address + layout.section(rank) for rank in range(self.gate.size)]
        headers = [section + HEADER for section in sections]
        return [
            *headers,
            sections[0] + RESULT,
            *(at + RELAY for at in sections),
            sections[0] + RELAY + LINE // 2,
        ]

    def relays(self) -> list[int]:
        """Return the address of each rank's relay memory, valid until the backend is closed."""
        layout = self._segment.layout
        return [
            self._segment.address + layout.section(rank) + layout.relay_at for rank in range(self.gate.size)
        ]

    def allocate_relay(self, start: int, nbytes: int) -> None:
        """Allocate a part of this rank's relay memory before the first write to it.

        Raises:
            ResourceError: /dev/shm is full.
        """
        layout = self._segment.layout
        address = layout.section(self.gate.rank) + layout.relay_at + start
        slot_memory.with_room(lambda: self._segment.allocate(address, nbytes))

    def begin_at_once(self) -> None:
        self.inline_start.begin_at_once()

    def learn(self, dtype: np.dtype[Any]) -> None:
        self.calls.spec("message", dtype)

    def recovery_endpoint(self) -> RecoveryEndpoint:
        return ShmRecoveryEndpoint(self._segment, self.gate.rank)

    def stop(self) -> None:
        self.context.words[words.SHUT] = 1  # entries return LATER from now on

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        kind, outputs, inputs, op, _, parts, narrow = operation
        if KINDS[kind].form == NO_ARRAY:
            return self.calls.prepared(reductions.barrier, None, signature.encode(kind), timeout=timeout)
        travel = None if narrow is None else narrow.travel
        spec = self.calls.spec(kind, (outputs or inputs)[0].dtype, op, parts=parts, travel=travel)
        call = self.calls.prepared(_ENTRIES[kind], spec, *arguments_of(operation), timeout=timeout)
        lost = None if narrow is None else narrow.lost
        if lost is None or not lost.any():
            return call

        def with_lost() -> None:
            x_before, lost_before = outputs[0].copy(), lost.copy()
            add_lost(narrow, outputs[0])
            try:
                call()
            except MismatchError:
                outputs[0][...], lost[...] = x_before, lost_before
                raise

        return with_lost

    # ---- symmetric arrays ----------------------------------------------------------------------------

    def symmetric_memory(self, group: ProcessGroup, nbytes: int, label: str) -> ShmMemory:
        return self._symmetric.allocate(partial(self._exchange, group), nbytes, label)

    def _exchange(self, group: ProcessGroup, note: str) -> list[str]:
        """Exchange notes with all ranks."""

        def gather(everybody: Array, own: Array) -> None:
            spec = self.calls.spec("symmetric.empty", own.dtype)
            call = self.calls.prepared(movement.all_gather, spec, everybody, own)
            group.run("symmetric.empty", call, (), False)

        return signature.gather_texts(note, self.gate.size, gather)

    # ---- the tuner's times ---------------------------------------------------------------------------

    @property
    def _tuning(self) -> Array:
        return self.context.words[words.CHOOSING : words.MEMO]

    def reset_tuning(self) -> None:
        """Forget all times; collective: between the same two calls on all ranks."""
        self._tuning[:] = 0

    def save_tuning(self, command: str = tuning_cache.RUNNING, one_shot: int | None = None) -> Path | None:
        """Merge this rank's times into the tuning cache; see `tuning_cache.save`."""
        return tuning_cache.save(self.conditions, *tuning_table.results(self._tuning), command, one_shot)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, reason: GroupError | None) -> None:
        self.context.words[words.SHUT] = 1
        self.inline_start.close()
        # The caller may be a signal handler. If it has interrupted a call of this group, it would wait for itself; if
        # it has interrupted a message, it would unmap the memory that the message uses. Check this first, because
        # closing the messages takes the lock for which `has_lock` looks.
        keeps = self.messages.has_lock() if self.keeps_memory is None else self.keeps_memory
        inside = self.gate.is_inside() or keeps
        self.messages.close(reason)
        # A running call was aborted and ends within moments. If a thread was killed inside a call or message, no thread
        # releases the context or the messages' lock; then the mapping stays until the process ends.
        deadline = time.monotonic() + _CLOSE_SECONDS
        turn = not inside and self.gate.lock.acquire(timeout=_CLOSE_SECONDS)
        free = turn and self.messages.has_lock()
        while free and waiting.seize.call(self._c + 8 * words.BUSY) == LATER:
            free = time.monotonic() < deadline
            time.sleep(_POLL_SECONDS)
        self.monitor.leave()
        if self.gate.rank == 0 and free and reason is None:
            try:
                self.save_tuning()
            except OSError as error:
                _log.debug("the times of group %s are not kept: %s", self.gate.name, error)
        if free:
            self._segment.close()
            self.calls.close()
        self._record.close()
        if turn:
            self.gate.lock.release()

    def disown(self, error: GroupError) -> None:
        self.stop()  # the segment belongs to the parent process


def arguments_of(operation: Operation) -> tuple[Any, ...]:
    """Return the arguments that the entry of an operation's kind takes after the handle."""
    kind = KINDS[operation.kind]
    outputs = (operation.outputs or None) if kind.takes_blocks else operation.outputs[0]
    inputs = (operation.inputs or None) if kind.gives_blocks else operation.inputs[0]
    arrays = (outputs,) if kind.is_in_place else (outputs, inputs)
    rest: tuple[Any, ...] = ((operation.op,) if kind.reduces else ()) + (
        (operation.root,) if kind.root else ()
    )
    if operation.kind in ("scan", "exscan"):
        rest = *rest, operation.kind == "exscan"
    elif operation.kind == "all_to_all":
        rest = operation.inputs[:1]  # an array with the dtype of all blocks
    return *arrays, *rest


_COLLECTIVES = (
    reductions.all_reduce, reductions.reduce, reductions.scan, reductions.reduce_scatter,
    movement.broadcast, movement.all_gather, movement.gather, movement.scatter, movement.all_to_all,
)  # fmt: skip
_ENTRIES: dict[str, Entry] = {entry.name: entry for entry in _COLLECTIVES} | {"exscan": reductions.scan}

ENTRIES: tuple[Entry, ...] = (
    waiting.seize, shared_words.publish, shared_words.read,
    open_calls.take_over, open_calls.watch, slot_memory.free, tuning_table.read_clock,
    reductions.barrier, *_COLLECTIVES,
    ring_kernels.send, ring_kernels.receive, requests.post_send, requests.post_receive, requests.wait, requests.test,
    requests.attend, ring_kernels.begin, ring_kernels.accept, ring_kernels.acknowledge, ring_kernels.advance,
    ring_kernels.claim, ring_kernels.retire,
    symmetric.copy_bytes, symmetric.count_signal, symmetric.await_signal,
)  # fmt: skip
"""All entries, for compilation ahead of time."""
