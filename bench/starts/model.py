"""A simulated start of a job: every rank, every message to the store, and every connection between ranks.

A rank's start is a generator (`start_of`) that does what `init_process_group` does, and yields each step with what it
waits for. Messages cost time in the store's server, which handles one after the other, and on their way; a rank's own
work and each connection cost time on a core. The costs are measured (`Costs`). If ranks share cores, they start one
after the other, and short steps, the server's, looks and connections, interrupt longer ones.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from fastcoll.net.tcp.mesh import control_peers
from fastcoll.store.table import MAX_KEYS_PER_REQUEST
from fastcoll.store.waiting import LOOKS_PER_SECOND, SLICE_SECONDS

OPEN_TRIPS = 5  # one way, until a new connection is usable: TCP's three, and the two openings


@dataclass(frozen=True)
class Costs:
    """What was measured, in processor seconds and bytes.

    Attributes:
        before: a rank's work before `init_process_group`: the interpreter and the imports.
        alone, between: a rank's work in `init_process_group` without lists and connections, on one node and on several.
        record: a rank's work for each member in a list that it reads.
        dial: the work for a connection, half of it at each end.
        look: a rank's work when a slice of its wait has ended: two messages.
        message, byte: the server's work for each message, and for each byte of a list that it sends.
        member, address: bytes of one rank in the list of all ranks, and in the list of their addresses.
    """

    before: float
    alone: float
    between: float
    record: float
    dial: float
    look: float
    message: float
    byte: float
    member: float
    address: float


@dataclass(frozen=True)
class Machine:
    """Where the job runs: cores that all ranks share (None: one for each rank), seconds one way, bytes a second."""

    cores: int | None = None
    latency: float = 50e-6
    bandwidth: float = 1.25e9


@dataclass(frozen=True)
class Job:
    """A job of `nodes` with `local` ranks each; `proxies`: a process of each node answers for the store."""

    nodes: int
    local: int
    proxies: bool = False

    @property
    def size(self) -> int:
        return self.nodes * self.local


@dataclass
class Work:
    """Keep a core busy."""

    seconds: float


@dataclass
class Ask:
    """Send a message to the store, and wait for the answer.

    Attributes:
        needs: the key that must be set before the answer, and how often.
        sets: the key that is set.
        size: bytes of the answer that are a list.
        shared: all ranks of a node ask for the same; a proxy would ask once.
    """

    needs: tuple[str, int] = ("", 0)
    sets: str = ""
    size: float = 0.0
    shared: bool = False
    opens: bool = False
    crowd: int = 1


@dataclass
class Meet:
    """Connect with the peers of one group; of two ranks, the lower one dials."""

    group: str
    me: int
    peers: Sequence[int]
    rank_of: Callable[[int], int]


Step = Work | Ask | Meet


def start_of(rank: int, job: Job, costs: Costs) -> Iterator[Step]:
    """What a rank does from its first instruction until it has the default group."""
    size = job.size
    yield Work(costs.before)
    yield Ask(opens=True)
    yield Ask()  # has this rank settled before?
    yield Ask()  # is it the first?
    if rank == 0:
        yield Ask(sets="terms")
    else:
        yield Ask(("terms", 1), shared=True, crowd=size)
    yield Ask()  # it claims its rank
    yield from _meeting("join", rank, size, costs.member, costs)
    if job.nodes == 1:
        yield Work(costs.alone)
        yield from _segment("node0", rank, size)
    else:
        node, local = divmod(rank, job.local)
        yield Work(costs.between / 2)
        near = range(node * job.local, (node + 1) * job.local)
        yield from _group("world", rank, size, costs, sorted({*control_peers(rank, size), *near} - {rank}))
        yield Work(costs.between / 2)
        if job.local > 1:
            yield from _segment(f"node{node}", local, job.local)
            rail = control_peers(node, job.nodes)
            yield from _group(
                f"rail{local}", node, job.nodes, costs, rail, lambda place: place * job.local + local
            )
    yield Ask()  # it has settled


def _meeting(name: str, place: int, size: int, record: float, costs: Costs) -> Iterator[Step]:
    """`Meeting.gather`: all write, the member at place 0 reads all and publishes the list, and all read it."""
    block = place // MAX_KEYS_PER_REQUEST
    yield Ask(sets=f"{name}/{block}")
    if place == 0:
        for begin in range(0, size, MAX_KEYS_PER_REQUEST):
            amount = min(MAX_KEYS_PER_REQUEST, size - begin)
            yield Ask((f"{name}/{begin // MAX_KEYS_PER_REQUEST}", amount), size=amount * 250.0)
        yield Work(size * costs.record)
        yield Ask()
        yield Ask(sets=f"{name}/end")
    else:
        yield Ask((f"{name}/end", 1), size=size * record, shared=True, crowd=size)
        yield Work(size * costs.record)


def _group(
    name: str, place: int, size: int, costs: Costs, peers: Sequence[int], rank_of: Callable[[int], int] = int
) -> Iterator[Step]:
    """`Mesh.make`: the terms, a meeting with all addresses, and the connections."""
    yield (
        Ask(sets=f"{name}/terms")
        if place == 0
        else Ask((f"{name}/terms", 1), shared=name == "world", crowd=size)
    )
    yield from _meeting(name, place, size, costs.address, costs)
    yield Meet(name, place, peers, rank_of)


def _segment(name: str, local: int, size: int) -> Iterator[Step]:
    """The first rank of a node makes the shared memory, and the others open it."""
    yield Ask(sets=f"{name}/segment") if local == 0 else Ask((f"{name}/segment", 1), crowd=size)


@dataclass
class Outcome:
    """What a simulated start took: seconds until the last rank has its group, and the sums over all ranks."""

    seconds: float = 0.0
    server: float = 0.0
    messages: int = 0
    looks: int = 0
    sent: float = 0.0
    connections: int = 0
    finished: int = 0


class Simulation:
    """One start."""

    def __init__(self, job: Job, costs: Costs, machine: Machine) -> None:
        self._job, self._costs, self._machine = job, costs, machine
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = 0.0
        self._ranks = [start_of(rank, job, costs) for rank in range(job.size)]
        self._free = [0.0] * (machine.cores or job.size)  # when each core is free
        self._interrupted = [0.0] * len(
            self._free
        )  # seconds of the steps that have interrupted others on each core
        self._server_free = self._link_free = 0.0
        self._proxy_free: dict[int, float] = defaultdict(float)
        self._set: Counter[str] = Counter()
        self._parked: dict[str, dict[int, Ask]] = defaultdict(dict)
        # The ranks that wait for what their node's proxy fetches, by node and key; None: it is there.
        self._fetching: dict[tuple[int, str], list[int] | None] = {}
        self._open: Counter[int] = Counter()  # connections that a rank still waits for
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Let all ranks start at 0."""
        for rank in range(self._job.size):
            self._resume(0.0, rank)
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        assert self.outcome.finished == self._job.size, "a rank waits for ever"
        return self.outcome

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), act))

    def _resume(self, when: float, rank: int) -> None:
        self._at(when, lambda: self._go_on(rank))

    def _work(self, rank: int, seconds: float, then: Callable[[], None], is_short: bool = True) -> None:
        """Keep a core busy, and call `then`. On shared cores, short steps interrupt others, which are queued."""
        core = min(range(len(self._free)), key=self._free.__getitem__) if self._machine.cores else rank
        if self._machine.cores and is_short:
            self._free[core] = max(self._now, self._free[core]) + seconds
            self._interrupted[core] += seconds
            self._at(self._now + seconds, then)
            return
        self._free[core] = max(self._now, self._free[core]) + seconds
        self._end(core, self._free[core], self._interrupted[core], then)

    def _end(self, core: int, when: float, interrupted: float, then: Callable[[], None]) -> None:
        """Call `then` at a time, later by what has interrupted the core meanwhile."""

        def look() -> None:
            more = self._interrupted[core] - interrupted
            if more > 0:
                self._end(core, self._now + more, self._interrupted[core], then)
            else:
                then()

        self._at(when, look)

    def _go_on(self, rank: int) -> None:
        step = next(self._ranks[rank], None)
        if step is None:
            self.outcome.finished += 1
            self.outcome.seconds = self._now
        elif isinstance(step, Work):
            self._work(rank, step.seconds, lambda: self._go_on(rank), is_short=False)
        elif isinstance(step, Ask):
            self._send(rank, step)
        else:
            self._connect(rank, step)

    # ---- the store ---------------------------------------------------------------------------------------

    def _send(self, rank: int, ask: Ask) -> None:
        if self._job.proxies and ask.shared:
            node = rank // self._job.local
            waiting = self._fetching.setdefault((node, ask.needs[0]), [])
            if waiting is None:
                self._resume(self._by_proxy(node), rank)
                return
            waiting.append(rank)
            if len(waiting) > 1:
                return
        trips = OPEN_TRIPS if ask.opens else 1
        self._at(self._now + trips * self._machine.latency, lambda: self._serve(rank, ask))

    def _serve(self, rank: int, ask: Ask) -> None:
        """The server gets a message, as the next in its queue."""
        self.outcome.messages += 1
        seconds = self._costs.message + (ask.size * self._costs.byte if self._is_set(ask) else 0.0)
        self._at(self._serves(seconds), lambda: self._served(rank, ask))

    def _serves(self, seconds: float) -> float:
        """Let the server work next for some time; return when it has done that."""
        self._server_free = max(self._now, self._server_free) + seconds
        self.outcome.server += seconds
        if self._machine.cores:
            self._work(0, seconds, lambda: None)
        return self._server_free

    def _is_set(self, ask: Ask) -> bool:
        key, times = ask.needs
        return self._set[key] >= times

    def _served(self, rank: int, ask: Ask) -> None:
        if ask.sets:
            self._set[ask.sets] += 1
            waiting = self._parked[ask.sets]
            for other in [other for other, parked in waiting.items() if self._is_set(parked)]:
                self._answer(other, waiting.pop(other))
        if self._is_set(ask):
            self._answer(rank, ask)
        else:
            self._parked[ask.needs[0]][rank] = ask
            slice_seconds = max(SLICE_SECONDS, ask.crowd / LOOKS_PER_SECOND)
            self._at(self._now + slice_seconds, lambda: self._look(rank, ask))

    def _look(self, rank: int, ask: Ask) -> None:
        """A slice of a wait has ended: the rank looks for failures, and asks again."""
        if self._parked[ask.needs[0]].pop(rank, None) is None:
            return
        self.outcome.looks += 1
        self.outcome.messages += 1
        self._serves(self._costs.message)
        self._work(rank, self._costs.look, lambda: self._send(rank, ask))

    def _answer(self, rank: int, ask: Ask) -> None:
        self.outcome.sent += ask.size
        self._link_free = max(self._link_free, self._now) + ask.size / self._machine.bandwidth
        arrives = self._link_free + self._machine.latency
        node = rank // self._job.local
        waiting = self._fetching.get((node, ask.needs[0])) if ask.shared else None
        if waiting is None:
            self._resume(arrives, rank)
            return
        self._fetching[node, ask.needs[0]] = None
        for each in waiting:
            self._resume(max(arrives, self._by_proxy(node)), each)

    def _by_proxy(self, node: int) -> float:
        """Return when a node's proxy has handled one more message."""
        self._proxy_free[node] = max(self._now, self._proxy_free[node]) + self._costs.message
        return self._proxy_free[node]

    # ---- connections -------------------------------------------------------------------------------------

    def _connect(self, rank: int, meet: Meet) -> None:
        """Dial the higher peers; go on when the connections with all peers are there."""
        self._open[rank] += len(meet.peers)
        mine = [peer for peer in meet.peers if peer > meet.me]
        self._work(
            rank, len(mine) * self._costs.dial / 2, lambda: self._dialed(rank, map(meet.rank_of, mine))
        )
        if self._open[rank] == 0:  # all others have connected before
            self._resume(self._now, rank)

    def _dialed(self, rank: int, others: Iterable[int]) -> None:
        for other in others:
            self.outcome.connections += 1
            self._at(self._now + 3 * self._machine.latency, partial(self._accept, rank, other))

    def _accept(self, rank: int, other: int) -> None:
        """`other` accepts the connection, on its listener's thread, which shares the rank's core."""
        self._work(other, self._costs.dial / 2, lambda: self._connected(rank, other))

    def _connected(self, *ranks: int) -> None:
        for rank in ranks:
            self._open[rank] -= 1
            if self._open[rank] == 0:
                self._resume(self._now + 2 * self._machine.latency, rank)
