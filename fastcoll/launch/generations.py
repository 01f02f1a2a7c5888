"""The state machine of a job with generations: its input is events from launchers, its output is orders to launchers.

A launcher runs the ranks of one node. A generation is one set of ranks that start together; its members are the
launchers that run them. A launcher is ready to start ranks, runs its ranks of the current generation, or has run them
successfully. Only the launcher that leads the job has a `Generations`, so the job has one state. Its phases are:

    GATHERING  until `most` launchers are ready, or at least `least` are ready and the time for more to join is over
    RUNNING    until the ranks of all members have succeeded (the job is over), or an event ends the generation
    ENDING     until each member has ended its ranks and is ready again; a member that is late counts as lost
    OVER       final

A failed rank ends its generation and uses one restart; if no restart is left, the job is over. A generation also ends
when a member is lost, or when a launcher joins and the generation has fewer than `most` members. Neither uses a
restart. If nodes have fixed numbers (`Rules.fixed`), the loss of a member ends the job. Events of an earlier generation
are ignored, so a late event cannot end a later generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from .pauses import Pauses


@dataclass(frozen=True)
class Node:
    """A launcher and its node, as the launcher publishes them when it is ready to run ranks."""

    key: str  # unique to the launcher
    host: str  # the node's host name, for log lines
    size: int  # the number of ranks on the node
    role: str
    address: str  # where rank 0 of the job listens, if rank 0 runs on this node
    port: int
    node_rank: int | None = None  # the launcher's --node_rank; None: nodes are numbered as they join

    def __str__(self) -> str:
        return (
            f"the launcher on {self.host}"
            if self.node_rank is None
            else f"node {self.node_rank} ({self.host})"
        )


@dataclass(frozen=True)
class Rules:
    """The options that all launchers of the job share; times in seconds."""

    least: int  # the least number of nodes in a generation
    most: int  # the greatest number of nodes in a generation
    max_restarts: int
    last_call: float  # how long the first generation waits for further nodes once it has `least`
    join: float  # how long a generation waits for `least` nodes
    end: float  # how long a launcher may take to end its ranks
    fixed: bool = False  # each node has a fixed number (--node_rank), so the loss of a node ends the job


@dataclass(frozen=True)
class Start:
    """Order the members of a generation to start their ranks, which are numbered in the order of `members`."""

    generation: int
    restarts: int  # how many restarts are used so far, one for each failure
    members: tuple[Node, ...]


@dataclass(frozen=True)
class End:
    """Order the members of a generation to end their ranks and to publish when they are ready again.

    `code` is the exit code of the rank that failed; 0 if none failed.
    """

    generation: int
    code: int
    text: str


@dataclass(frozen=True)
class Over:
    """Order the launchers to end their ranks and to exit with this code.

    If `only` is empty, the order applies to all launchers. Otherwise it applies only to the launcher with this key,
    which cannot join the job.
    """

    code: int
    text: str
    only: str = ""


Order = Start | End | Over


class Phase(Enum):
    """The phase of a job."""

    GATHERING = auto()
    RUNNING = auto()
    ENDING = auto()
    OVER = auto()


@dataclass
class Generations:
    """The state of a job.

    The caller passes the current time with each event, always from the same clock. After each event, the caller sends
    the orders in `orders` and then clears the list.
    """

    rules: Rules
    now: float
    phase: Phase = Phase.GATHERING
    generation: int = -1  # the number of the current generation, or of the last one if none runs
    restarts: int = 0
    members: tuple[Node, ...] = ()  # of the current generation
    orders: list[Order] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ready: dict[str, Node] = {}
        # By launcher, the number of launchers that had joined before it. Nodes are sorted by this number, so that nodes
        # keep their order from one generation to the next.
        self._seniority: dict[str, int] = {}
        self._done: set[str] = set()  # members whose ranks have succeeded
        # Those of them that have left, with the code and text of `left`.
        self._gone: dict[str, tuple[int, str]] = {}
        self._pauses = Pauses()
        self._started = self.now
        self._not_before = self._end_by = self.now
        self._give_up = self.now + self.rules.join
        self._last_call = math.inf

    # ---- events of launchers ------------------------------------------------------------------------------------

    def ready(self, node: Node, now: float) -> None:
        """Handle the event that a launcher has joined, or has ended its ranks of the last generation."""
        if self.phase is Phase.OVER:
            return
        others = [other for other in self._present() if other.key != node.key]
        if any(other.node_rank == node.node_rank is not None for other in others):
            self._order(Over(1, f"another launcher is {node}; give each --node_rank once", only=node.key))
            return
        is_new = not self._is_member(node.key)
        self._ready[node.key] = node
        self._seniority.setdefault(node.key, len(self._seniority))
        if self.phase is Phase.RUNNING and is_new and len(self.members) < self.rules.most and not self._done:
            self._end(0, f"{node} has joined: the ranks restart with its own", now)
        self.tick(now)

    def failed(self, key: str, generation: int, code: int, text: str, now: float) -> None:
        """Handle the failure of a member's rank."""
        if not self._counts(key, generation):
            return
        if self.restarts >= self.rules.max_restarts:
            self.over(1, text)  # torchrun's exit code, whatever the exit code of the rank
            return
        self.restarts += 1
        self._not_before = now + self._pauses.after(now - self._started)
        self._end(code, text, now)
        self.tick(now)

    def done(self, key: str, generation: int, now: float) -> None:
        """Handle the success of all ranks of a member."""
        if self._counts(key, generation):
            self._done.add(key)
            if self._done >= {node.key for node in self.members}:
                self.over(0, "")

    def left(self, key: str, code: int, text: str, now: float) -> None:
        """Handle the end of a launcher and its ranks, by a signal or unexpectedly."""
        is_member, was_ready = self._is_member(key), self._ready.pop(key, None) is not None
        if self.phase is Phase.RUNNING and key in self._done:
            self._gone.setdefault(key, (code, text))
            return
        is_spare = self.phase is Phase.RUNNING and not is_member
        if self.phase is Phase.OVER or not (is_member or was_ready) or is_spare:
            return
        left = {node.key for node in self._present()} - {key}
        was_asked = code > 128 and len(left) < self.rules.least and self.generation >= 0
        if self.rules.fixed or was_asked:
            self.over(code, text)
            return
        if self.phase is Phase.RUNNING:
            self._end(0, f"{text}: the ranks restart without its own", now)
        self.members = tuple(node for node in self.members if node.key != key)
        self.tick(now)

    def over(self, code: int, text: str) -> None:
        """End the job."""
        if self.phase is not Phase.OVER:
            self.phase = Phase.OVER
            self._order(Over(code, text))

    def tick(self, now: float) -> None:
        """Handle deadlines that have passed. The launcher that leads calls this at regular intervals."""
        if self.phase is Phase.ENDING:
            late = [node for node in self.members if node.key not in self._ready]
            if late and now < self._end_by:
                return
            if late and self.rules.fixed:
                self.over(1, f"{late[0]} does not end its ranks: it is stopped or unreachable")
                return
            self.phase, self.members = Phase.GATHERING, ()
            self._give_up = max(now, self._not_before) + self.rules.join
        if self.phase is Phase.GATHERING:
            self._gather(now)

    # ---- transitions --------------------------------------------------------------------------------------------

    def _gather(self, now: float) -> None:
        joined, rules = len(self._ready), self.rules
        if joined >= rules.least:
            self._last_call = min(self._last_call, now + (rules.last_call if self.generation < 0 else 0.0))
        else:
            self._last_call = math.inf
            if now >= self._give_up:
                self.over(1, f"{joined} of at least {rules.least} nodes joined within {rules.join:g} s")
            return
        if now >= self._not_before and (joined >= rules.most or now >= self._last_call):
            self._start(now)

    def _start(self, now: float) -> None:
        nodes = sorted(
            self._ready.values(), key=lambda node: (node.node_rank or 0, self._seniority[node.key])
        )
        self.members = tuple(nodes[: self.rules.most])
        for node in self.members:
            del self._ready[node.key]
        self._done, self._gone, self._last_call, self._started = set(), {}, math.inf, now
        self.generation += 1
        self.phase = Phase.RUNNING
        self._order(Start(self.generation, self.restarts, self.members))

    def _end(self, code: int, text: str, now: float) -> None:
        self.phase, self._end_by = Phase.ENDING, now + self.rules.end
        self._order(End(self.generation, code, text))
        for key, (its_code, its_text) in self._gone.items():  # the next generation needs them
            self.left(key, its_code, its_text, now)

    def _order(self, order: Order) -> None:
        self.orders.append(order)

    def _counts(self, key: str, generation: int) -> bool:
        return self.phase is Phase.RUNNING and generation == self.generation and self._is_member(key)

    def _is_member(self, key: str) -> bool:
        return any(node.key == key for node in self.members)

    def _present(self) -> Iterator[Node]:
        yield from self.members
        yield from self._ready.values()


@dataclass(frozen=True)
class RankRange:
    """The ranks of one node in a generation."""

    node_rank: int
    first: int  # the lowest rank of the node
    world_size: int
    role_first: int  # the index of the node's lowest rank among the ranks of all nodes with the same role
    role_size: int  # the number of ranks with that role


def range_of(members: Sequence[Node], key: str) -> RankRange | None:
    """Return the ranks of the launcher with this key, or None if it is no member."""
    keys = [node.key for node in members]
    if key not in keys:
        return None
    at = keys.index(key)
    before, role = members[:at], members[at].role
    return RankRange(
        at,
        sum(node.size for node in before),
        sum(node.size for node in members),
        sum(node.size for node in before if node.role == role),
        sum(node.size for node in members if node.role == role),
    )
