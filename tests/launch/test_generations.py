"""The state machine of generations: each rule alone, and a model with random launchers; without processes."""

from __future__ import annotations

import random
import re
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
    RankRange,
    Rules,
    Start,
    range_of,
)

RULES = Rules(least=1, most=3, max_restarts=2, last_call=30.0, join=600.0, end=10.0)


def node(name: str, node_rank: int | None = None, size: int = 2, role: str = "default") -> Node:
    return Node(name, f"host-{name}", size, role, "10.0.0.1", 1234, node_rank)


def taken(job: Generations) -> list[Order]:
    orders, job.orders = job.orders, []
    return orders


def shown(order: Order) -> str:
    """Return an order as the scripts below have it; a generation's members are shown in the order of their ranks."""
    if isinstance(order, Start):
        members = "".join(member.key for member in order.members)
        return f"start {order.generation} of {members} after {order.restarts} restarts"
    if isinstance(order, End):
        return f"end {order.generation} with {order.code}: {order.text}"
    return f"over {order.code}{f' for {order.only}' if order.only else ''}: {order.text}"


JOINS = "the launcher on host-c has joined: the ranks restart with its own"
# Lines `TIME EVENT LAUNCHERS [NUMBER] -> ORDERS`. The number is the generation of `failed` and `done`, the code of
# `left`, and the node's number of `ready` where nodes have numbers. A line `rules` has those that differ from RULES.
SCRIPTS = {
    "a generation starts after the last call": """
        100 ready a
        129.9 tick
        130 tick -> start 0 of a after 0 restarts""",
    "a generation starts at once with all nodes": "0 ready abc -> start 0 of abc after 0 restarts",
    "the wait for the least number of nodes ends": """
        rules least=2
        0 ready a
        599 tick
        600 tick -> over 1: 1 of at least 2 nodes joined within 600 s""",
    "a failure ends the generation and starts the next one, in the old order": """
        0 ready abc -> start 0 of abc after 0 restarts
        70 failed b 0 -> end 0 with 1: b failed
        70 ready cb
        70 ready a -> start 1 of abc after 1 restarts""",
    "failures beyond the last restart end the job": """
        rules max_restarts=0
        0 ready abc -> start 0 of abc after 0 restarts
        70 failed b 0 -> over 1: b failed
        70 failed c 0
        1000000 tick""",
    "events of an earlier generation are ignored": """
        0 ready abc -> start 0 of abc after 0 restarts
        70 failed b 0 -> end 0 with 1: b failed
        70 failed c 0
        70 ready abc -> start 1 of abc after 1 restarts
        71 failed c 0
        71 done abc 0
        71 done ab 1
        71 done c 1 -> over 0:""",
    "a launcher that joins while there is room restarts the ranks": f"""
        0 ready ab
        30 tick -> start 0 of ab after 0 restarts
        40 ready c -> end 0 with 0: {JOINS}
        40 ready b
        40 ready a -> start 1 of abc after 0 restarts""",
    "a launcher that joins a full job waits for room": """
        0 ready abc -> start 0 of abc after 0 restarts
        1 ready d
        2 left a 1 -> end 0 with 0: a left: the ranks restart without its own
        3 ready bc -> start 1 of bcd after 0 restarts""",
    "a launcher that joins after ranks succeeded restarts none, and theirs may leave": """
        0 ready ab
        30 tick -> start 0 of ab after 0 restarts
        31 done a 0
        32 ready c
        33 left a 1
        34 done b 0 -> over 0:""",
    "a launcher that left after its ranks succeeded is not waited for": """
        0 ready abc -> start 0 of abc after 0 restarts
        1 done ab 0
        2 left a 143
        2 left b 1
        70 failed c 0 -> end 0 with 1: c failed
        70 ready c -> start 1 of c after 1 restarts""",
    "a launcher that left after its ranks succeeded, and that others need, ends the job at a failure": """
        rules least=2 most=2
        0 ready ab -> start 0 of ab after 0 restarts
        1 done a 0
        2 left a 143
        70 failed b 0 -> end 0 with 1: b failed, over 143: a left""",
    "a numbered node that left after its ranks succeeded ends the job at a failure": """
        rules least=2 most=2 fixed=1
        0 ready a 0
        0 ready b 1 -> start 0 of ab after 0 restarts
        1 done b 0
        2 left b 1
        3 failed a 0 -> end 0 with 1: a failed, over 1: b left""",
    "a lost launcher shrinks the generation, and too few wait": """
        rules least=2
        0 ready abc -> start 0 of abc after 0 restarts
        50 left a 1 -> end 0 with 0: a left: the ranks restart without its own
        50 ready bc -> start 1 of bc after 0 restarts
        60 left b 1 -> end 1 with 0: b left: the ranks restart without its own
        60 ready c
        659 tick
        659 ready d -> start 2 of cd after 0 restarts""",
    "a signal to a launcher that others need ends the job": """
        rules least=3
        0 ready abc -> start 0 of abc after 0 restarts
        50 left b 130 -> over 130: b left""",
    "a launcher that does not end its ranks is left out until it is ready": f"""
        0 ready abc -> start 0 of abc after 0 restarts
        70 failed a 0 -> end 0 with 1: a failed
        70 ready ab
        79.9 tick
        80 tick -> start 1 of ab after 1 restarts
        90 failed c 1
        90 ready c -> end 1 with 0: {JOINS}""",
    "each numbered node is needed once": """
        rules least=2 most=2 fixed=1
        0 ready b 1
        0 ready c 1 -> over 1 for c: another launcher is node 1 (host-c); give each --node_rank once
        0 ready a 0 -> start 0 of ab after 0 restarts
        1 left b 1 -> over 1: b left""",
    "a numbered node that does not end its ranks ends the job": """
        rules least=2 most=2 fixed=1
        0 ready a 0
        0 ready b 1 -> start 0 of ab after 0 restarts
        1 failed a 0 -> end 0 with 1: a failed
        1 ready a 0
        11 tick -> over 1: node 1 (host-b) does not end its ranks: it is stopped or unreachable""",
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_rules(script: str) -> None:
    rules, lines = RULES, script.strip().splitlines()
    if "rules" in lines[0]:
        words = re.findall(r"(\w+)=(\d)", lines.pop(0))
        rules = replace(RULES, **{name: int(value) for name, value in words})
    job = Generations(rules, 0.0)
    for line in lines:
        event, _, expected = line.partition("->")
        time, what, names, number = (*event.split(), "", "")[:4]
        now = float(time)
        for name in names:
            if what == "ready":
                job.ready(node(name, int(number) if rules.fixed else None), now)
            elif what == "failed":
                job.failed(name, int(number), 1, f"{name} failed", now)
            elif what == "done":
                job.done(name, int(number), now)
            elif what == "left":
                job.left(name, int(number), f"{name} left", now)
        job.tick(now)
        assert ", ".join(map(shown, taken(job))).strip() == expected.strip(), line


def test_quick_failures_are_followed_by_pauses() -> None:
    job, now, starts = Generations(replace(RULES, most=1, max_restarts=9), 0.0), 0.0, []
    for generation in range(6):
        job.ready(node("a"), now)
        while not isinstance((taken(job) or [None])[-1], Start):
            now += 0.5
            job.tick(now)
        starts.append(now)
        job.failed("a", generation, 1, "", now)
    assert [round(b - a) for a, b in pairwise(starts)] == [0, 1, 2, 4, 8]


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
