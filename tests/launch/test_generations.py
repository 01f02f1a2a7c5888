"""The state machine of generations: each rule alone, and a model with random launchers; without processes."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from fastcoll.launch.gathering import decode, encode
from fastcoll.launch.generations import (
    End,
    Generations,
    Node,
    Order,
    Over,
    Phase,
    RankRange,
    Rules,
    Start,
    range_of,
)

RULES = Rules(least=1, most=3, max_restarts=2, last_call=30.0, join=600.0, end=10.0)


def node(name: str, node_rank: int | None = None, size: int = 2, role: str = "default") -> Node:
    return Node(name, f"host-{name}", size, role, "10.0.0.1", 1234, node_rank)


def started(names: str, rules: Rules = RULES) -> Generations:
    """Return a job whose first generation has these members and started at time 0."""
    job = Generations(rules, 0.0)
    for at, name in enumerate(names):
        job.ready(node(name, at if rules.fixed else None), 0.0)
    job.tick(0.0 if len(names) == rules.most else rules.last_call)
    assert names_of(taken(job)[-1]) == names
    return job


def taken(job: Generations) -> list[Order]:
    orders, job.orders = job.orders, []
    return orders


def names_of(order: Order) -> str:
    assert isinstance(order, Start)
    return "".join(member.key for member in order.members)


def test_a_generation_starts_at_once_with_all_nodes_or_after_the_last_call() -> None:
    job = Generations(RULES, 0.0)
    job.ready(node("a"), 100.0)
    job.tick(129.9)
    assert not taken(job)
    job.tick(130.0)
    assert taken(job) == [Start(0, 0, (node("a"),))]
    assert job.phase is Phase.RUNNING
    started("abc")


def test_the_wait_for_the_least_number_of_nodes_ends() -> None:
    job = Generations(replace(RULES, least=2), 0.0)
    job.ready(node("a"), 0.0)
    job.tick(599.0)
    assert not taken(job)
    job.tick(600.0)
    assert taken(job) == [Over(1, "1 of at least 2 nodes joined within 600 s")]


def test_a_failure_ends_the_generation_and_starts_the_next_one() -> None:
    job = started("abc")
    job.failed("b", 0, 3, "rank 2 failed", 70.0)
    assert taken(job) == [End(0, 3, "rank 2 failed")]
    for name in "cb":
        job.ready(node(name), 70.0)
    assert not taken(job)
    job.ready(node("a"), 70.0)
    assert taken(job) == [Start(1, 1, (node("a"), node("b"), node("c")))]  # in the old order


def test_failures_beyond_the_last_restart_end_the_job() -> None:
    job = started("abc", replace(RULES, max_restarts=0))
    job.failed("b", 0, 3, "rank 2 failed", 70.0)
    job.failed("c", 0, 4, "rank 3 failed", 70.0)
    job.tick(1e6)
    assert taken(job) == [Over(1, "rank 2 failed")]


def test_quick_failures_are_followed_by_pauses() -> None:
    job, now, starts = started("a", replace(RULES, max_restarts=9)), 30.0, [30.0]
    for generation in range(5):
        job.failed("a", generation, 1, "", now)
        job.ready(node("a"), now)
        while not isinstance((taken(job) or [None])[-1], Start):
            now += 0.5
            job.tick(now)
        starts.append(now)
    assert [round(b - a) for a, b in pairwise(starts)] == [0, 1, 2, 4, 8]


def test_events_of_an_earlier_generation_are_ignored() -> None:
    job = started("abc")
    job.failed("b", 0, 3, "", 70.0)
    job.failed("c", 0, 3, "", 70.0)
    for name in "abc":
        job.ready(node(name), 70.0)
    assert [type(order) for order in taken(job)] == [End, Start]
    job.failed("c", 0, 3, "", 71.0)
    for name in "abc":
        job.done(name, 0, 71.0)
    assert (taken(job), job.phase, job.restarts) == ([], Phase.RUNNING, 1)
    for name in "abc":
        job.done(name, 1, 71.0)
    assert taken(job) == [Over(0, "")]


def test_a_launcher_that_joins_while_there_is_room_restarts_the_ranks() -> None:
    job = started("ab")
    job.ready(node("c"), 40.0)
    [end] = taken(job)
    assert end == End(0, 0, "the launcher on host-c has joined: the ranks restart with its own")
    job.ready(node("b"), 40.0)
    job.ready(node("a"), 40.0)
    [start] = taken(job)
    assert (names_of(start), job.restarts) == ("abc", 0)


def test_a_launcher_that_joins_a_full_job_waits_for_room() -> None:
    job = started("abc")
    job.ready(node("d"), 1.0)
    assert not taken(job)
    job.left("a", 1, "the launcher on host-a ended unexpectedly", 2.0)
    assert [type(order) for order in taken(job)] == [End]
    for name in "bc":
        job.ready(node(name), 3.0)
    assert names_of(taken(job)[-1]) == "bcd"


def test_a_launcher_that_joins_after_ranks_succeeded_restarts_none() -> None:
    job = started("ab")
    job.done("a", 0, 31.0)
    job.ready(node("c"), 32.0)
    assert not taken(job)
    job.left("a", 1, "gone", 33.0)  # a launcher whose ranks have succeeded may leave
    job.done("b", 0, 34.0)
    assert taken(job) == [Over(0, "")]


def test_a_lost_launcher_shrinks_the_generation_and_too_few_wait() -> None:
    job = started("abc", replace(RULES, least=2))
    job.left("a", 1, "gone", 50.0)
    job.ready(node("b"), 50.0)
    job.ready(node("c"), 50.0)
    assert names_of(taken(job)[-1]) == "bc"
    job.left("b", 1, "gone", 60.0)
    job.ready(node("c"), 60.0)
    assert [type(order) for order in taken(job)] == [End]
    job.tick(659.0)
    job.ready(node("d"), 659.0)
    assert names_of(taken(job)[-1]) == "cd"


def test_a_signal_to_a_launcher_that_others_need_ends_the_job() -> None:
    job = started("abc", replace(RULES, least=3))
    job.left("b", 130, "the launcher on host-b was ended", 50.0)
    assert taken(job) == [Over(130, "the launcher on host-b was ended")]


def test_a_launcher_that_does_not_end_its_ranks_is_left_out_until_it_is_ready() -> None:
    job = started("abc")
    job.failed("a", 0, 1, "", 70.0)
    job.ready(node("a"), 70.0)
    job.ready(node("b"), 70.0)
    job.tick(79.9)
    assert [type(order) for order in taken(job)] == [End]
    job.tick(80.0)
    assert names_of(taken(job)[-1]) == "ab"
    job.failed("c", 1, 1, "", 90.0)
    assert not taken(job)
    job.ready(node("c"), 90.0)
    assert [type(order) for order in taken(job)] == [End]


def test_each_numbered_node_is_needed_once() -> None:
    fixed = replace(RULES, least=2, most=2, fixed=True)
    job = Generations(fixed, 0.0)
    job.ready(node("b", 1), 0.0)
    job.ready(node("c", 1), 0.0)
    assert taken(job) == [
        Over(1, "another launcher is node 1 (host-c); give each --node_rank once", only="c")
    ]
    job.ready(node("a", 0), 0.0)
    assert names_of(taken(job)[-1]) == "ab"
    job.left("b", 1, "gone", 1.0)
    assert taken(job) == [Over(1, "gone")]
    job = started("ab", fixed)
    job.failed("a", 0, 1, "", 1.0)
    job.ready(node("a", 0), 1.0)
    job.tick(11.0)
    assert taken(job)[-1] == Over(1, "node 1 (host-b) does not end its ranks: it is stopped or unreachable")


def test_rank_ranges_of_nodes_with_different_sizes_and_roles() -> None:
    members = [node("a", size=2, role="x"), node("b", size=1, role="y"), node("c", size=3, role="x")]
    assert range_of(members, "c") == RankRange(2, 3, 6, 2, 5)
    assert range_of(members, "b") == RankRange(1, 2, 6, 0, 1)
    assert range_of(members, "d") is None


@pytest.mark.parametrize("order", [Start(3, 1, (node("a"), node("b", 1))), End(2, 0, "x"), Over(1, "y", "a")])
def test_orders_survive_encoding(order: Order) -> None:
    assert decode(encode(order).encode()) == order


class Launcher:
    """A launcher of the model: it reads orders at any time, and its ranks end at any time."""

    def __init__(self, name: str, job: Generations, now: float = 0.0) -> None:
        self.node, self.job = node(name), job
        self.read, self.running, self.member_of = 0, None, -1
        job.ready(self.node, now)

    def obey(self, log: list[Order], now: float) -> None:
        """Read one order, if there is one."""
        if self.read == len(log):
            return
        order = log[self.read]
        self.read += 1
        if isinstance(order, Start) and self.node in order.members:
            self.running = self.member_of = order.generation
        elif isinstance(order, End) and self.member_of == order.generation:
            self.running = None
            self.job.ready(self.node, now)


@pytest.mark.parametrize("seed", range(200))
def test_random_launchers(seed: int) -> None:
    """Orders are consistent whatever the launchers do, and the job ends once no more failures occur."""
    chance = random.Random(seed)
    rules = replace(RULES, least=chance.randint(1, 2), max_restarts=chance.randint(0, 5))
    job, log, now = Generations(rules, 0.0), list[Order](), 0.0
    launchers = [Launcher(name, job) for name in "abc"[: chance.randint(1, 3)]]
    names = iter("defghijklmnopqrstuvwxyz")

    def harm() -> None:
        one = chance.choice(launchers)
        what = chance.randrange(8)
        if what == 0 and one.running is not None:
            job.failed(one.node.key, one.running, 1, "failed", now)
        elif what == 1 and len(launchers) > rules.least:
            launchers.remove(one)
            job.left(one.node.key, 1, "gone", now)
        elif what == 2 and (name := next(names, "")):
            launchers.append(Launcher(name, job, now))
        elif what == 3:
            job.failed(one.node.key, one.member_of - 1, 1, "late", now)
        elif what == 4:
            job.done(one.node.key, one.member_of - 1, now)

    for step in range(1500):
        now += chance.choice((0.0, 0.1, 1.0, 20.0))
        if step < 300:
            harm()
        one = chance.choice(launchers)
        one.obey(log, now)
        if one.running is not None and step >= 300:
            job.done(one.node.key, one.running, now)
        job.tick(now)
        log += taken(job)
    kinds = [type(order) for order in log]
    assert kinds[-1] is Over
    assert kinds.count(Over) == 1
    generations = [order.generation for order in log if isinstance(order, Start)]
    assert generations == list(range(len(generations)))
    for before, after in pairwise(log):  # each generation ends before the next one starts
        assert isinstance(before, End) or not isinstance(after, Start)
        assert isinstance(after, Start | Over) or not isinstance(before, End)
        if isinstance(after, End):
            assert isinstance(before, Start)
            assert before.generation == after.generation
    for order in log:
        if isinstance(order, Start):
            assert rules.least <= len(order.members) == len(set(order.members)) <= rules.most
            assert order.restarts <= rules.max_restarts
    if rules.max_restarts == 5 and job.restarts < 5:
        assert log[-1] == Over(0, "")
