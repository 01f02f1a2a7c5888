"""A rank is killed while ranks communicate over TCP or between nodes: every survivor raises and names it."""

from __future__ import annotations

import pytest

from faults import crew, net_victims
from faults.crew import WITHIN, see
from faults.failing_victims import FIFTH, LONG, MESSAGES, MIDDLE, SHORT, die

PHASES = {
    "enter": (FIFTH,),
    "after_publish": (),
    "after_meeting": (FIFTH, FIFTH + 1),
    "before_done": (FIFTH, FIFTH + 1),
    "after_done": (FIFTH, FIFTH + 1),
}
# The failpoint and the rank that is killed; one node has ranks 0 and 1, the other 2 and 3.
ON_NODES = {
    "all_reduce": [
        ("hybrid.all_reduce.after_meeting", 0), ("shm.reduce_scatter.after_publish", 1),
        ("tcp.all_reduce.mid_chunk", 2),
    ],
    "broadcast": [
        ("hybrid.broadcast.before_done", 0), ("shm.all_gather.mid_chunk", 3), ("tcp.broadcast.mid_chunk", 2),
    ],
    "all_gather": [
        ("hybrid.all_gather.after_meeting", 0), ("shm.all_gather.before_done", 1), ("tcp.all_gather.enter", 2),
    ],
    "reduce_scatter": [("hybrid.reduce_scatter.before_done", 0), ("tcp.reduce_scatter.mid_chunk", 1)],
    "reduce": [("hybrid.reduce.before_done", 1), ("tcp.reduce.mid_chunk", 2), ("shm.gather.after_publish", 1)],
    "batch_isend_irecv": [("tcp.message.piece_sent", 3), ("shm.message.piece_read", 1)],
}  # fmt: skip
# The same of ranks that meet by nodes; the first rank of each node goes out.
BY_NODES = {
    "barrier": [
        ("tcp.barrier.enter", 0), ("tcp.barrier.enter", 3), ("tcp.none.mid_chunk", 1), ("tcp.barrier.after_meeting", 1),
        ("tcp.barrier.after_done", 0),
    ],
    "all_reduce": [("hybrid.all_reduce.after_meeting", 0), ("shm.reduce_scatter.after_publish", 3)],
    "reduce": [("tcp.reduce.enter", 2), ("hybrid.reduce.before_done", 1), ("shm.gather.enter", 1)],
    "broadcast": [("tcp.broadcast.before_done", 0), ("hybrid.broadcast.before_done", 3)],
    "all_gather": [("tcp.all_gather.after_meeting", 2), ("hybrid.all_gather.before_done", 1)],
    "reduce_scatter": [("hybrid.reduce_scatter.after_meeting", 3), ("tcp.reduce_scatter.enter", 0)],
}  # fmt: skip

CARRIED = [
    ("all_reduce", "tcp.all_reduce.after_meeting", 0), ("reduce", "tcp.none.mid_chunk", 3),
    ("broadcast", "tcp.broadcast.before_done", 2), ("all_gather", "tcp.all_gather.enter", 1),
    ("reduce_scatter", "tcp.reduce_scatter.after_done", 3),
]  # fmt: skip

# The same if the first rank of each node relays the data of the others.
RELAYED = [
    ("all_reduce", "after_meeting", 0), ("all_reduce", "mid_chunk", 3), ("all_reduce", "mid_chunk", 2),
    ("reduce", "after_meeting", 3), ("broadcast", "after_meeting", 0), ("all_gather", "mid_chunk", 1),
    ("reduce_scatter", "before_done", 2),
]  # fmt: skip

# In a meeting of three nodes, two of two ranks, the first rank of a node reaches tcp.none.mid_chunk six times.
POSTED, SENT, RECEIVED, SENT_AGAIN, RECEIVED_ALL, POSTED_RESULT = range(1, 7)
VICTIMS = {POSTED: 2, SENT: 0, RECEIVED: 2, SENT_AGAIN: 4, RECEIVED_ALL: 2, POSTED_RESULT: 2}


def fourth(step: int) -> str:
    """Return the failpoint of a step in a rank's fourth meeting."""
    return f"tcp.none.mid_chunk@{3 * POSTED_RESULT + step}"


def in_meetings() -> list[tuple[object, ...]]:
    return [die("barrier", fourth(step), SHORT, victim, "by nodes", n=5) for step, victim in VICTIMS.items()]


def by_nodes(op: str, count: int) -> list[tuple[object, ...]]:
    return [die(op, f"{place}@4", count, victim, "by nodes", n=4) for place, victim in BY_NODES[op]]


def on_nodes(op: str) -> list[tuple[object, ...]]:
    return [die(op, f"{place}@3", LONG, victim, "nodes", n=4) for place, victim in ON_NODES[op]]


def of_short_calls(op: str) -> list[tuple[object, ...]]:
    return [die(op, f"tcp.{op}.{phase}", SHORT, number % 3, "tcp") for number, phase in enumerate(PHASES)]


@pytest.mark.parametrize("op", ["all_reduce", pytest.param("all_gather", marks=pytest.mark.long), "barrier"])
def test_killed_rank_of_a_short_call(op: str) -> None:
    see(of_short_calls(op), calls=list(PHASES.values()))


@pytest.mark.timed
def test_killed_rank_is_named_within_two_seconds() -> None:
    see(of_short_calls("all_reduce"), WITHIN)
    see([die("send_recv", "tcp.message.piece_read@9", LONG, 1, "tcp")], WITHIN)
    see(on_nodes("all_reduce"), WITHIN)
    see(by_nodes("barrier", SHORT), WITHIN)
    see(in_meetings(), WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("op", ["all_reduce", "broadcast", "all_gather", "reduce_scatter"])
def test_killed_rank_of_a_long_call(op: str) -> None:
    places = enumerate(["mid_chunk@20", "after_meeting", "before_done"])
    see([die(op, f"tcp.{op}.{place}", LONG, number % 3, "tcp") for number, place in places])


@pytest.mark.long
@pytest.mark.parametrize("op", MESSAGES)
def test_killed_rank_of_a_short_message(op: str) -> None:
    see([die(op, f"tcp.{place}", SHORT, number % 3, "tcp") for number, place in enumerate(MESSAGES[op])])


def test_killed_rank_of_a_long_message() -> None:
    places = enumerate(["piece_sent@9", "piece_read@9", "before_ack@3"])
    see([die("send_recv", f"tcp.message.{place}", LONG, n, "tcp") for n, place in places])


def test_killed_rank_of_a_call_in_a_narrow_type() -> None:
    see(
        [
            die("all_reduce as int8", f"tcp.all_reduce.{place}", LONG, 1, "tcp")
            for place in ("enter@5", "mid_chunk@20")
        ]
    )


def test_killed_rank_of_four() -> None:
    see([die("all_reduce", "tcp.all_reduce.mid_chunk@9", LONG, 3, "tcp", n=4)])


@pytest.mark.long
@pytest.mark.parametrize("op", ON_NODES)
def test_killed_rank_of_two_nodes(op: str) -> None:
    see(on_nodes(op))


@pytest.mark.long
@pytest.mark.parametrize("op", [op for op in BY_NODES if op != "barrier"])
def test_killed_rank_of_two_nodes_whose_ranks_meet_by_nodes(op: str) -> None:
    see(by_nodes(op, LONG))


@pytest.mark.long
def test_killed_rank_in_calls_whose_headers_carry_the_data() -> None:
    see([die(op, f"{place}@4", SHORT, victim, "by nodes", n=4) for op, place, victim in CARRIED])


@pytest.mark.long
def test_killed_rank_in_relayed_calls() -> None:
    see([die(op, f"tcp.{op}.{place}@4", MIDDLE, victim, "by nodes", n=4) for op, place, victim in RELAYED])


def test_killed_rank_in_a_barrier_by_nodes() -> None:
    see(by_nodes("barrier", SHORT))


@pytest.mark.long
def test_killed_rank_that_meets_those_of_other_nodes() -> None:
    see(in_meetings(), calls=[(4, 5)] * len(VICTIMS))


@pytest.mark.long
def test_killed_rank_on_the_rails_of_a_long_reduce() -> None:
    places = [
        ("tcp.reduce.mid_chunk", 2),
        ("shm.reduce_scatter.after_publish", 3),
        ("tcp.reduce.after_meeting", 1),
    ]
    see([die("reduce", f"{place}@3", LONG, victim, "by nodes", n=4) for place, victim in places])


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "count", "place", "victim"),
    [
        ("all_reduce", SHORT, fourth(RECEIVED_ALL), 6),
        ("reduce", MIDDLE, "tcp.reduce.mid_chunk@4", 11),
    ],
)
def test_killed_rank_of_three_large_nodes(op: str, count: int, place: str, victim: int) -> None:
    """With 18 ranks."""
    with crew.nothing_left():
        outcomes = crew.run(*die(op, place, count, victim, "large nodes", n=18), deadline=250.0)
    crew.check(outcomes, victim, op)


@pytest.mark.parametrize("victim", [2, 4])
def test_killed_rank_of_a_node_of_another_size(victim: int) -> None:
    see([die("all_reduce", "hybrid.all_reduce.after_meeting@3", LONG, victim, "nodes", n=5)])


def test_ctrl_c_in_the_middle_of_64_mib_reaches_all() -> None:
    with crew.nothing_left():
        first, *others = crew.run(net_victims.interrupt_large, 4, "nodes")
    crew.check_interrupted(first, others)
