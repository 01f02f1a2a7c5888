"""The engines of several ranks on one thread: the test decides which one runs next, and carries the bytes between them.

An engine does one sweep at a time. Every connection is a pair of sockets to the test, with small buffers. So the test's
choices determine everything, and it can try any order.
"""

from __future__ import annotations

import random
import socket
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import numpy as np

from fastcoll import ReduceOp
from fastcoll.core import signature
from fastcoll.core.status import AGAIN, DONE, MISMATCH, WORKED
from fastcoll.kernels import waiting
from fastcoll.kernels.reduce import reducer
from fastcoll.net.tcp import engine_layout as words
from fastcoll.net.tcp import executor as engine
from fastcoll.net.tcp.context import NetContext, PreparedPlan
from fastcoll.net.tcp.plans.choose import plan_for
from fastcoll.net.tcp.plans.shape import CallShape, default_limits

Array = np.ndarray[Any, Any]
_STEPS = 200_000
FREE = 1 << 30  # bytes at a time without a limit


class Engines:
    """Engines of n ranks, for the methods `calls` and `run`.

    Args:
        streams: connections between two ranks.
        payload: bytes that may be attached to a header, with many short segments; None: as in a group.
        seed: of the order in which ranks and connections are served.
        transfer: most bytes that are carried at a time.
        buffer: bytes that a connection asks the kernel to buffer in one direction; the kernel more than doubles it.
    """

    def __init__(
        self,
        n: int,
        streams: int = 1,
        payload: int | None = None,
        seed: int = 0,
        transfer: int = FREE,
        buffer: int = 2048,
    ) -> None:
        self.size, self.limits = n, default_limits(n)
        if payload is not None:
            self.limits = self.limits._replace(payload=payload, segment=300)
        self._random, self._transfer = random.Random(seed), transfer
        self.contexts = [NetContext(n, rank, self.limits, streams, 1 << 40) for rank in range(n)]
        self._wires: dict[tuple[int, int, int], tuple[socket.socket, socket.socket]] = {}
        self._held: dict[tuple[int, int, int], bytes] = {}
        self._carried: Counter[tuple[int, int, int]] = Counter()
        self.reported: list[list[tuple[int, int]]] = [[] for _ in range(n)]
        """For each rank, the earlier calls whose mismatch it has reported, and the call that reported it."""
        self.loses_records = False
        """A fault to plant: the records of calls are cleared at once."""
        for context in self.contexts:
            context.words[words.BACKOFF + waiting.BUDGET] = -1  # return after every sweep
        for here, there in permutations(range(n), 2):
            for stream in range(streams):
                key = (here, there, stream)
                self._wires[key] = _pair(buffer)
                self._held[key] = b""
                self.contexts[here].fds[there, stream] = self._wires[key][0].fileno()

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        for pair in self._wires.values():
            for end in pair:
                end.close()

    def prepare(
        self,
        rank: int,
        operation: str,
        arrays: Sequence[Array],
        nbytes: Sequence[int],
        op: ReduceOp | None = None,
        root: int = 0,
    ) -> PreparedPlan:
        """Prepare a rank's call as TcpBackend does."""
        dtype = arrays[0].dtype if arrays else None
        itemsize = 1 if dtype is None else dtype.itemsize
        ordered = op is not None and op.function is not None
        shape = CallShape(
            operation, self.size, rank, tuple(nbytes), self.limits, itemsize, root=root, ordered=ordered
        )
        code = signature.encode(operation, dtype, op=op) | root << signature.ROOT_SHIFT
        folds = (0, 0) if op is None else reducer(op, dtype)[:2]
        prepared = PreparedPlan(code, shape, plan_for(shape), folds)
        self.contexts[rank].make_room(prepared)
        return prepared

    def begin(self, rank: int, prepared: PreparedPlan, arrays: Sequence[Array]) -> int:
        """Begin a call with one sweep; return the engine's status."""
        return engine.collective.call(
            self.contexts[rank].address | words.MAY_RETURN_EARLY, prepared.address, tuple(arrays)
        )

    def go_on(self, rank: int, prepared: PreparedPlan) -> int:
        """Do one more sweep of the current call; return the engine's status."""
        return engine.collective.call(self.contexts[rank].address | words.RESUMED, prepared.address, ())

    def carry(self, here: int, there: int, stream: int = 0, most: int = FREE) -> int:
        """Carry bytes that `here` has sent to `there`; return how many have arrived."""
        key = (here, there, stream)
        if not self._held[key]:
            try:
                self._held[key] = self._wires[key][1].recv(min(most, 1 << 16))
            except BlockingIOError:
                return 0
        try:
            sent = self._wires[there, here, stream][1].send(self._held[key])
        except BlockingIOError:
            return 0
        self._held[key] = self._held[key][sent:]
        self._carried[key] += sent
        return sent

    def cut(self, here: int, there: int) -> None:
        """Close all connections between two ranks."""
        for key, (_, end) in self._wires.items():
            if {here, there} == set(key[:2]):
                end.close()

    def write(self, giver: int, taker: int, data: bytes) -> None:
        """Deliver bytes to `taker` that `giver` has not sent."""
        assert self._wires[taker, giver, 0][1].send(data) == len(data)

    def run(self, programs: Sequence[Sequence[tuple[PreparedPlan, Sequence[Array]]]]) -> list[list[int]]:
        """Let each rank make its calls one after the other, in a random order; return their statuses.

        After a mismatch, `after_mismatch` follows. A rank stops at the first call that fails, and otherwise runs
        `settle` at the end. `reported` has the mismatches of earlier calls.
        """
        results: list[list[int]] = [[] for _ in programs]
        in_progress: set[int] = set()
        waiting_ranks = set(range(self.size))
        links = list(self._wires)
        for _ in range(_STEPS):
            if not waiting_ranks:
                return results
            for link in self._random.sample(links, min(len(links), 4)):
                self.carry(*link, most=self._random.randint(1, self._transfer))
            rank = self._random.choice(sorted(waiting_ranks))
            if len(results[rank]) == len(programs[rank]):
                if engine.settle.call(self.contexts[rank].address, 0) == DONE:
                    waiting_ranks.discard(rank)
                    while self.contexts[rank][words.DIFFERS]:
                        self._note(rank)
                continue
            prepared, arrays = programs[rank][len(results[rank])]
            resumed = rank in in_progress
            status = self.go_on(rank, prepared) if resumed else self.begin(rank, prepared, arrays)
            in_progress.add(rank)
            if self.loses_records:
                self.contexts[rank]._kept[words.RECORDS].fill(0)
            if status not in (AGAIN, WORKED):
                in_progress.discard(rank)
                context = self.contexts[rank]
                if status == MISMATCH and context.in_progress:
                    engine.after_mismatch.call(context.address)
                elif status == MISMATCH:
                    self._note(rank)
                    status = DONE
                results[rank].append(status)
                if status not in (DONE, MISMATCH):
                    waiting_ranks.discard(rank)
        raise AssertionError(f"stuck: {results} of {[len(each) for each in programs]} calls")

    def _note(self, rank: int) -> None:
        found = self.contexts[rank].take_earlier_heads()
        assert found is not None, "reported before all headers have arrived"
        number, heads, _ = found
        assert len(set(heads)) > 1
        self.reported[rank].append((number, self.contexts[rank][words.CALLS]))

    def carried(self) -> dict[tuple[int, int, int], int]:
        """The bytes that each connection has carried, by (giver, taker, stream)."""
        return dict(self._carried)

    def nothing_left(self) -> bool:
        """Return whether all bytes sent have been received."""
        for key, (end, wire) in self._wires.items():
            for each in (end, wire):
                try:
                    if each.recv(1):
                        return False
                except BlockingIOError:
                    continue
            if self._held[key]:
                return False
        return all((context._kept[words.HAVE] == 0).all() for context in self.contexts)


def _pair(buffer: int) -> tuple[socket.socket, socket.socket]:
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    return pair
