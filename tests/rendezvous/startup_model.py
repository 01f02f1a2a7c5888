"""A job's start through one store, simulated event by event: messages, bytes and seconds for any number of ranks.

The store's server takes one message after the other. Each rank runs a script, the messages that
`init_process_group` sends with the backend "tcp"; a request that waits for a key is parked until it is
set, and answered with a timeout after a slice, as in the library. There are two machines: a cluster, where each rank
has a core of its own and a network lies between, and one machine whose few cores do the work of all.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from fastcoll.store.table import MAX_KEYS_PER_REQUEST
from fastcoll.store.waiting import LOOKS_PER_SECOND, SLICE_SECONDS

BACKLOG = 4096
"""Connections that may wait to be accepted (net.core.somaxconn); who comes then tries again after 1, 2, 4 ... s."""


@dataclass(frozen=True)
class Costs:
    """The costs of messages and ranks.

    Attributes:
        server_message, server_byte: CPU seconds of the server for a message, and for each byte of lists.
        client_rank: CPU seconds of a rank for all its messages, client_record: for each record of a list.
        rank_sent, rank_received: bytes of a rank's messages without lists; record: bytes of lists for each rank.
    """

    server_message: float
    server_byte: float
    client_rank: float
    client_record: float
    rank_sent: float
    rank_received: float
    record: float


@dataclass(frozen=True)
class Machine:
    """The machine: shared cores (None: each rank has its own), one-way latency in seconds, bytes per second."""

    cores: int | None = None
    latency: float = 50e-6
    bandwidth: float = 1.25e9


CLUSTER = Machine()


@dataclass(frozen=True)
class Step:
    """One message of a script, repeated `times` times.

    Attributes:
        needs: the key that others must have set before it is answered.
        sets: the key that it sets, or to which it adds one if all ranks set it.
        lists: the share of the list bytes in its answer.
    """

    op: str
    needs: str = ""
    sets: str = ""
    lists: float = 0.0
    times: int = 1


def script(rank: int, size: int) -> list[Step]:
    """Return the messages of `rank` from its start until it has the default group."""
    blocks = math.ceil(size / MAX_KEYS_PER_REQUEST)
    start = [Step("OPEN"), Step("ADD"), Step("TERMS"), Step("ADD"), Step("SET", sets="members")]
    if rank:
        joining = [Step("GET", "list", lists=0.5), Step("GET", "group")]
        meeting = [Step("SET", sets="places"), Step("GET", "all", lists=0.5), Step("ADD")]
    else:
        joining = [Step("GET", "members", times=blocks), Step("ADD"), Step("SET", sets="list")]
        meeting = [Step("SET", sets="group"), Step("SET", sets="places"), Step("GET", "places", times=blocks)]
        meeting += [Step("ADD"), Step("SET", sets="all"), Step("ADD")]
    return [step for step in (*start, *joining, *meeting) for _ in range(step.times)]


# Keys that are complete when all ranks have set theirs.
_COUNTED = ("members", "places")


@dataclass
class Outcome:
    """The cost of a simulated start.

    Attributes:
        seconds: until the last rank had its group. server_busy: of the server's thread.
        messages: by operation. sent, received: bytes of all clients.
        retried: connections that found the queue full. parked: the largest number of waiting requests.
    """

    seconds: float = 0.0
    server_busy: float = 0.0
    messages: Counter[str] = field(default_factory=Counter)
    sent: float = 0.0
    received: float = 0.0
    retried: int = 0
    parked: int = 0


class Simulation:
    """One start of `size` ranks."""

    def __init__(self, size: int, costs: Costs, machine: Machine = CLUSTER) -> None:
        self._size, self._costs, self._machine = size, costs, machine
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._scripts = [script(rank, size) for rank in range(size)]
        self._place = [0] * size
        self._set: Counter[str] = Counter()
        self._parked: dict[str, dict[int, float]] = {}
        # Connections are accepted before messages are read.
        self._opening: deque[tuple[int, Step]] = deque()
        self._inbox: deque[tuple[int, Step]] = deque()
        self._serving = False
        self._idle_cores = machine.cores or math.inf
        self._ready: deque[tuple[float, Callable[[], None]]] = deque()
        self._link_free = 0.0
        self._slice = max(SLICE_SECONDS, size / LOOKS_PER_SECOND)
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run the start; all ranks begin at time 0."""
        for rank in range(self._size):
            self._client_works(rank)
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        return self.outcome

    def _at(self, time: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), act))

    def _work(self, seconds: float, then: Callable[[], None]) -> None:
        """Wait for a core, and keep it busy."""
        if self._idle_cores <= 0:
            self._ready.append((seconds, then))
            return
        self._idle_cores -= 1

        def done() -> None:
            self._idle_cores += 1
            then()
            if self._ready and self._idle_cores > 0:
                self._work(*self._ready.popleft())

        self._at(self._now + seconds, done)

    # ---- a rank -----------------------------------------------------------------------------------------

    def _client_works(self, rank: int, lists: float = 0.0) -> None:
        """Read the last answer and make the next message, if any."""
        place, steps = self._place[rank], self._scripts[rank]
        seconds = self._costs.client_rank / len(steps) + lists * self._size * self._costs.client_record
        if place < len(steps):
            self._work(seconds, lambda: self._send(rank, steps[place]))
        else:
            self._work(seconds, self._finish)

    def _finish(self) -> None:
        self.outcome.seconds = self._now

    def _send(self, rank: int, step: Step, attempt: int = 0) -> None:
        trips = 3 if step.op == "OPEN" else 1  # TCP's handshake comes first
        self._at(self._now + trips * self._machine.latency, lambda: self._arrive(rank, step, attempt))

    # ---- the server -------------------------------------------------------------------------------------

    def _arrive(self, rank: int, step: Step, attempt: int) -> None:
        if step.op == "OPEN":
            if len(self._opening) >= BACKLOG:
                self.outcome.retried += 1
                self._at(self._now + 2.0**attempt, lambda: self._send(rank, step, attempt + 1))
                return
            self._opening.append((rank, step))
        else:
            self._inbox.append((rank, step))
        self._serve()

    def _serve(self) -> None:
        if self._serving or not (self._opening or self._inbox):
            return
        self._serving = True
        rank, step = (self._opening or self._inbox).popleft()
        seconds = self._costs.server_message + step.lists * self._list_bytes() * self._costs.server_byte

        def served() -> None:
            self._serving = False
            self.outcome.server_busy += seconds
            self._carry_out(rank, step)
            self._serve()

        self._work(seconds, served)

    def _carry_out(self, rank: int, step: Step) -> None:
        op = step.op
        if op == "TERMS":
            op = "GET" if self._set["terms"] else "SET"
            self._set["terms"] = 1
        self.outcome.messages[op] += 1
        if step.sets:
            self._set[step.sets] += 1
            if self._is_set(step.sets):
                for other in self._parked.pop(step.sets, {}):
                    self._answer(other, self._scripts[other][self._place[other]])
        if op == "PEEK":
            self._send(rank, self._scripts[rank][self._place[rank]])
        elif step.needs and not self._is_set(step.needs):
            self._park(rank, step)
        else:
            self._answer(rank, step)

    def _is_set(self, what: str) -> bool:
        return self._set[what] >= (self._size if what in _COUNTED else 1)

    def _park(self, rank: int, step: Step) -> None:
        slice_seconds = SLICE_SECONDS if rank == 0 and step.needs in _COUNTED else self._slice
        until = self._now + slice_seconds
        self._parked.setdefault(step.needs, {})[rank] = until
        self.outcome.parked = max(self.outcome.parked, sum(map(len, self._parked.values())))
        self._at(until, lambda: self._time_out(rank, step, until))

    def _time_out(self, rank: int, step: Step, until: float) -> None:
        if self._parked.get(step.needs, {}).get(rank) == until:
            del self._parked[step.needs][rank]
            self._send(rank, Step("PEEK"))

    def _answer(self, rank: int, step: Step) -> None:
        self._place[rank] += 1
        size = step.lists * self._list_bytes()
        self._link_free = max(self._link_free, self._now) + size / self._machine.bandwidth
        arrival = self._link_free + self._machine.latency
        share = 1 / len(self._scripts[rank])
        self.outcome.sent += share * self._costs.rank_sent
        self.outcome.received += share * self._costs.rank_received + size
        self._at(arrival, lambda: self._client_works(rank, step.lists))

    def _list_bytes(self) -> float:
        return self._size * self._costs.record
