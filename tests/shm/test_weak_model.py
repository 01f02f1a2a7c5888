"""The protocols of fastcoll/shm with store buffers: the models of the other files, on a `weak` Explorer (explorer.py).

x86 keeps the order of stores, so there a missing release changes nothing; on Arm it gives wrong data. Each planted
fault is one that x86 hides, or that only store buffers show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shm import collectives, test_requests_model, test_rings_model
from shm.explorer import ALL, FOUND, PLAIN

COLLECTIVES: list[tuple[int, str, dict[str, Any]]] = [
    (2, "all_reduce, barrier, broadcast, all_reduce", {}),
    (2, "all_reduce 4 +1, barrier, all_reduce 3 +1", {"again": True}),
    (2, "broadcast 4 +1, broadcast, broadcast 3 @1 +1", {"hurried": True}),
    (2, "all_reduce 2, sizes_differ 2 +1, all_reduce 3 +1, broadcast 3", {}),
    (2, "all_gather 2, all_to_all 4, gather 4 @1 +1", {"slot": 64}),
    (3, "barrier", {"group": 2, "weak": PLAIN}),  # with ALL it has millions of states
    # Direct copies.
    (2, "broadcast 2 direct, all_reduce 2 direct, broadcast 2 @1 +1", {}),
    (2, "all_gather 1 direct, all_to_all 2 direct, reduce_scatter 2 direct", {"arena": True}),
    (2, "all_reduce 3 direct", {"again": True, "arena": True, "quitter": 0}),
    (2, "all_reduce 3 direct", {"again": True, "arena": True, "quitter": 1}),
    (2, "broadcast 2 direct", {"again": True, "quitter": 0}),
]
MESSAGES = ["pieces wrap unevenly", "reversed tags", "one tag", "both ways"]
REQUESTS = [
    ("0: send a 0 1, wait a", "1: recv a 0 1, wait a"),
    ("0: send a 0 1, test a", "1: recv a 0 1, test a"),
]


@pytest.mark.parametrize(("size", "program", "how"), COLLECTIVES)
def test_collectives(size: int, program: str, how: dict[str, Any]) -> None:
    assert collectives.explore(size, program, **{"weak": ALL} | how) > 50


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name: str) -> None:
    assert test_rings_model.explore(*test_rings_model.PROGRAMS[name], weak=ALL) > 100


def test_direct_messages() -> None:
    assert test_rings_model.explore(*test_rings_model.DIRECT, direct=True, weak=ALL) > 50


@pytest.mark.parametrize("threads", REQUESTS)
def test_requests(threads: tuple[str, ...]) -> None:
    assert test_requests_model.explore(*threads, weak=ALL) > 500


def plain(base: str, index: str, value: str, address: str = "", call: str = "store_release(") -> str:
    """Return the change that turns a release store into a plain one."""
    return f"{call}{address or base}, {value} => store_word({base}, {index}, {value}"


SHOW = "_show(c, "


CALLS = "load_word(c, at.CALLS)"
ARENA = {"again": True, "arena": True, "quitter": 1}
PLANTS: list[tuple[Callable[..., int], tuple[Any, ...], str, dict[str, Any]]] = [
    (collectives.explore, (2, "all_reduce"),
     "rounds: " + plain("line", "layout.SEQUENCE", CALLS, "line + 8 * layout.SEQUENCE", SHOW), {}),
    (collectives.explore, (2, "broadcast 3"),
     "rounds: " + plain("word", "0", "load_word(c, at.ROUND) + wrote + 1", "", SHOW), {}),
    (collectives.explore, (3, "broadcast, barrier"),
     "rounds: _show(c, combined + 8 * layout.SEQUENCE, " + CALLS + ", first) "
     "=> store_word(combined, layout.SEQUENCE, " + CALLS + ")", {"group": 2}),
    # Both ranks miss the other's store: PUSHING and STATE.
    (collectives.explore, (2, "all_reduce 3 direct"),
     "single_copy: swap_if_equal(pushing, 0, 1) => store_release(pushing, 1)", ARENA),
    (test_rings_model.explore, test_rings_model.LONG,
     "rings: " + plain("load_word(channel, OUT_HEAD_AT)", "0", "head + part"), {}),
    (test_rings_model.explore, test_rings_model.TAGS, "rings: " + plain("ack", "0", "given + 1"), {}),
    # The words of a request: another thread waits for it, or reuses its record.
    (test_requests_model.explore, test_requests_model.ATTENDED,
     "requests: - 1)\n    store_release(record + 8 * r.STATE, state) => - 1)\n    store_word(record, r.STATE, state)",
     {}),
    (test_requests_model.explore, test_requests_model.AGAIN,
     "requests: " + plain("record", "r.PEER", "peer", "record + 8 * r.PEER"), {}),
]  # fmt: skip


@pytest.mark.parametrize(("explore", "program", "plant", "how"), PLANTS)
def test_a_missing_order_is_found(
    explore: Callable[..., int], program: tuple[Any, ...], plant: str, how: dict[str, Any]
) -> None:
    with pytest.raises(AssertionError, match=FOUND):
        explore(*program, weak=ALL, plant=f"shm.{plant}", **how)
