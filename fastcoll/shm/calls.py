"""The compiled calls of a group: their specs, and what Python does when an *entry* returns early.

An entry is a compiled function. It returns early so that Python can check signals, deadlines and peers, after a
mismatch, and for work that only Python can do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..compiler.jit import Entry
from ..core import signature
from ..core.gate import Gate
from ..core.monitor import Wait
from ..core.operands import Array, refuses
from ..core.operation import Call
from ..core.reduce_op import ReduceOp
from ..core.status import AGAIN, DONE, LATER, MISMATCH, MIXED, UNALLOCATED, UNMAPPED, UNREADABLE, WORKED
from ..core.travel import Travel
from ..errors import ArrayError, ResourceError
from ..failpoints import reach
from ..kernels.reduce import reducer
from ..p2p.transfers import kind_of
from ..record import dump
from ..record.recorder import GroupRecorder
from ..system.processes import Member, dead_among
from . import arena, movement, rounds, slot_memory
from . import context_layout as words
from .context import CallReport, CallSpec, ShmContext, changed, pinned
from .layout import PUSHING, REACH
from .monitor import ShmMonitor
from .reach import unreadable
from .segment import Segment

_log = logging.getLogger("fastcoll")
_POLL_SECONDS = 1e-4
_WRITER_SECONDS = 0.2  # a peer writes a piece of 64 KiB in 10 us; if it takes longer, the process is stopped
_ENDING_SECONDS = 0.2  # from when an ending process closes its descriptors until it is found dead
_SHARED = np.dtype(np.int64), np.dtype(np.uint8)
_RETURNED_EARLY = (AGAIN, WORKED, MIXED, UNREADABLE, UNMAPPED, UNALLOCATED)


class Calls:
    """The calls of one rank of a group.

    Args:
        interrupted: a function that fails the group after an exception has ended a call.
    """

    def __init__(
        self,
        gate: Gate,
        monitor: ShmMonitor,
        segment: Segment,
        context: ShmContext,
        record: GroupRecorder,
        interrupted: Callable[[BaseException, str], None],
    ) -> None:
        self.gate, self.monitor, self.context = gate, monitor, context
        self.report = CallReport(segment, context, gate)
        self.carry_on: Callable[[], bool] = lambda: False  # completes the open call, if any (inline_start.py)
        self._segment, self._record, self._interrupted = segment, record, interrupted
        self._specs: dict[Any, CallSpec] = {}
        self._mapped: list[arena.Mapping] = []
        for dtype in _SHARED:  # while the memo has room
            self.spec("all_gather", dtype)

    def spec(
        self,
        operation: str,
        dtype: np.dtype[Any],
        op: ReduceOp | None = None,
        *,
        parts: Sequence[int] = (),
        travel: Travel | None = None,
    ) -> CallSpec:
        """Return the spec of a call, made at the first use; `op` is None if the call moves data.

        Args:
            parts: sizes of the arrays of a coalesced call; its spec is not kept.
            travel: the narrow type that ranks compare. Elements of `dtype` are reduced as they are.
        """
        named = dtype if travel is None else travel.items
        key = (operation, op, named)
        if not parts and key in self._specs:
            return self._specs[key]
        nbytes, largest = dtype.itemsize, self._segment.layout.slot
        if operation == "reduce_scatter":  # a slot has an element for each peer
            largest //= max(1, self.gate.size - 1)
        if op is not None and nbytes > largest:
            raise ArrayError(f"an element of {dtype} has {nbytes} bytes; {operation} takes {largest} here")
        call = signature.encode(operation, named, op=op, parts=parts)
        if operation == "message":
            call = kind_of(0, dtype)
        spec = CallSpec(call, nbytes, (0, 0) if op is None else reducer(op, dtype)[:2])
        if not parts and self._specs.setdefault(key, spec) is spec and travel is None:
            self.context.remember(signature.code_of(operation), dtype, op, spec)
        return spec

    def prepared(self, entry: Entry, spec: CallSpec | None, *args: Any, timeout: float | None = None) -> Call:
        """Return a call of an entry on validated arrays."""
        if spec is not None:
            args = pinned(entry.name, args, spec.itemsize)
        tags = rounds.PREPARED
        handle = self.context.address | tags

        def call() -> None:
            self.gate.check_usable()
            if spec is not None:
                self.context.words[words.GIVEN] = spec.address
            try:
                while not self.resume(entry.call(handle, *args), entry, *args, tags=tags, timeout=timeout):
                    if not self.carry_on():
                        # Another thread's call owns the context; it ends within its own timeout.
                        time.sleep(_POLL_SECONDS)
                    self.gate.check_usable()
            except BaseException as error:
                self.torn(entry, error)

        return call

    # ---- when an entry returns early -----------------------------------------------------------------

    def resume(
        self, code: int, entry: Entry, *args: Any, tags: int = 0, timeout: float | None = None
    ) -> bool:
        """Call an entry again until its call ends; return whether the entry has done the call.

        False: the entry did not begin the call (LATER), so the general path must make it.
        """
        begun = code in _RETURNED_EARLY
        wait: Wait | None = None
        limit = self.gate.timeout if timeout is None else timeout

        def look(code: int) -> None:
            nonlocal wait
            wait = wait or Wait(self.monitor, self.report.doing(entry.name), self.report.late, limit)
            wait.look() if code == AGAIN else wait.worked()

        while code in _RETURNED_EARLY:
            if code == UNREADABLE:
                self._refuse_to_read(entry, look)
            elif code == UNMAPPED:
                self._map_arena(self.context[words.LATE], look)
            elif code == UNALLOCATED:
                self.allocate_slots()
            elif code == MIXED:
                self._record.broken_off("made anew")
            else:
                look(code)
            how = rounds.HELD if code == MIXED else rounds.RESUMED
            code = entry.call(self.context.address | tags | how, *args)
        if code == MISMATCH:
            self._record.broken_off("mismatch")
            difference = self.report.mismatch(self._gather)
            self.context.let_go()
            raise dump.after(difference)
        if begun and code == LATER:
            raise changed(self.report.doing(entry.name))
        return code == DONE

    def allocate_slots(self) -> None:
        """Allocate the memory of this rank's slots, for a call that owns the context.

        Raises:
            ResourceError: /dev/shm is full.
        """
        slot_memory.allocate(self._segment, self.context, self.gate.rank)

    def _refuse_to_read(self, entry: Entry, look: Callable[[int], None]) -> None:
        """Raise the reason why a peer's array cannot be read: a death, a failure of the group, or the array itself."""
        look(AGAIN)  # `look` raises a failure that it finds in two consecutive checks
        deadline = time.monotonic() + _ENDING_SECONDS
        while True:
            look(AGAIN)
            if time.monotonic() > deadline:
                raise unreadable(self.monitor, self.context[words.LATE], self.report.doing(entry.name))
            time.sleep(_POLL_SECONDS)

    def _map_arena(self, peer: int, look: Callable[[int], None]) -> None:
        """Map the arena that a peer's call has published; if the peer has ended, `look` raises an error."""
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
        self._mapped.append(mapping)
        self.context.note_arena(peer, base, nbytes, mapping.address)

    def _gather(self, everybody: Array, own: Array) -> None:
        """Gather every rank's array, on the thread whose call owns the context; the dtype is one of `_SHARED`."""
        code = movement.all_gather.call(self.context.address | rounds.HELD, everybody, own)
        self.resume(code, movement.all_gather, everybody, own, tags=rounds.HELD)

    def torn(self, entry: Entry, error: BaseException, *integers: Any) -> None:
        """Raise the exception that has ended an entry's call; fail the group if the call had begun.

        Return instead if the entry rejected one of `integers`: the general path then raises the proper error.
        """
        if not self.context.is_mine():
            if refuses(error, integers):
                return
            raise error
        self._interrupted(error, self.report.doing(entry.name))
        self._await_writers()
        self.context.let_go()
        raise error

    def _await_writers(self) -> None:
        """After a failure wait until no peer writes into this rank's array, or withdraw the array (single_copy.py)."""
        address, nbytes = self.context[words.EXPOSED], self.context[words.EXPOSED_BYTES]
        deadline = time.monotonic() + _WRITER_SECONDS
        while address and (writers := self._living_writers()):
            if time.monotonic() > deadline:
                names = ", ".join(map(str, writers))
                _log.warning(
                    "%s may still write into a shared array; this process shares no more arrays", names
                )
                arena.withdraw(address, nbytes)
                break
            time.sleep(_POLL_SECONDS)
        self.context.words[words.EXPOSED] = 0

    def _living_writers(self) -> list[Member]:
        members = self.monitor.members
        pushing = REACH + 8 * PUSHING
        writers = [members[peer] for peer in range(self.gate.size) if self._segment.acquire(peer, pushing)]
        dead = dead_among(writers)
        return [member for member in writers if member not in dead]

    def close(self) -> None:
        """Unmap peers' arenas. No call may run afterwards."""
        slot_memory.forget(self.context)
        for mapping in self._mapped:
            mapping.close()
