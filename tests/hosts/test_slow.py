"""Ranks on a slow network that loses and reorders packets; links that are down for a while.

The network's random numbers have a seed, but TCP's timing varies: only promises are checked. Root is needed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hosts import slow
from hosts.network import Network
from hosts.nodes import Node, finish, output_of, ranks_on, until
from hosts.slow import SlowNetwork

Join = Callable[..., Network]
Slowly = Callable[..., SlowNetwork]
PROGRAM = Path(__file__).with_name("slow_ranks.py")
LOSSY = {"most": 0.002, "loss": 0.03, "twice": 0.01}
ALL = {"least": 0.02, "most": 0.15, "loss": 0.01, "twice": 0.01}


@pytest.fixture
def slowly(join_hosts: Join) -> Iterator[Slowly]:
    """Return a function that makes slow networks, by the number of hosts; skip if none can be made."""
    if reason := slow.lacking():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda hosts, **settings: stack.enter_context(
            SlowNetwork(join_hosts(hosts, own_pids=True), 7, **settings)
        )


def running(network: SlowNetwork, each: int, *words: str) -> AbstractContextManager[list[Node]]:
    """Start `each` ranks on every host; kill what runs at the end."""
    return ranks_on([host for host in network.hosts for _ in range(each)], [str(PROGRAM), *words])


def said(node: Node, what: str) -> list[dict[str, Any]]:
    """Return the lines with `what` so far."""
    whole = node.out[: node.out.rfind("\n") + 1].splitlines()
    return [line for line in map(json.loads, whole) if what in line]


def await_calls(nodes: list[Node], count: int) -> None:
    """Wait until every rank has made `count` more calls, or has an error."""
    wanted = [len(said(node, "call")) + count for node in nodes]

    def have() -> bool:
        assert all(node.code is None for node in nodes), output_of(nodes)
        return all(len(said(node, "call")) >= n for node, n in zip(nodes, wanted, strict=True))

    until(have, nodes)


@pytest.mark.parametrize(
    ("hosts", "each", "settings"),
    [
        pytest.param(3, 1, LOSSY, id="three-hosts-lossy"),
        pytest.param(2, 2, ALL, id="two-hosts-of-two-all", marks=pytest.mark.long),
    ],
)
def test_all_results_are_right_over_a_slow_network(
    slowly: Slowly, hosts: int, each: int, settings: dict[str, Any]
) -> None:
    network = slowly(hosts, **settings)
    with running(network, each, "all") as nodes:
        finish(nodes)
        assert [node.code for node in nodes] == [0] * len(nodes), output_of(nodes)
        assert all(said(node, "left") for node in nodes), output_of(nodes)
        assert not any("Error" in node.err or "died" in node.err for node in nodes), output_of(nodes)
        # The network has been what it promises: each part needs several packets after one another.
        counts = network.change()
        assert settings["loss"] / 3 < counts["lost"] / counts["sent"] < 3 * settings["loss"], counts
        assert settings["twice"] / 3 < counts["doubled"] / counts["sent"] < 3 * settings["twice"], counts
        for part in said(nodes[0], "part"):
            assert part["seconds"] > 3 * settings.get("least", 0.0), part


@pytest.mark.long  # tests/faults has it over a fast network
def test_survivors_shrink_over_a_slow_network(slowly: Slowly) -> None:
    with running(slowly(3, least=0.03, most=0.06), 1, "shrink", "0") as nodes:
        finish(nodes)
        assert [node.code for node in nodes] == [-9, 0, 0], output_of(nodes)
        for node in nodes[1:]:
            assert [line["died"] for line in said(node, "died")] == [[0]], output_of(nodes)
            assert [line["shrunk"] for line in said(node, "shrunk")] == [2], output_of(nodes)


@pytest.mark.long  # a lossy network, above, also sends again and only delays
def test_a_link_that_comes_back_in_time_only_delays(slowly: Slowly, tmp_path: Path) -> None:
    """Ranks survive an outage of up to 4 s: one of a host for 1 s, and one in one direction only for 3 s."""
    network = slowly(3, least=0.01, most=0.03)
    first, _, last = network.hosts
    with running(network, 1, "calls", str(tmp_path / "over")) as nodes:
        for seconds, lose in ((1.0, partial(network.cut, last)), (3.0, partial(network.lose, last, first))):
            await_calls(nodes, 3)
            lose()
            time.sleep(seconds)  # of the kernel's timers
            network.mend()
        await_calls(nodes, 3)
        (tmp_path / "over").touch()
        finish(nodes)
        assert [node.code for node in nodes] == [0, 0, 0], output_of(nodes)
        assert all(said(node, "left") for node in nodes), output_of(nodes)
