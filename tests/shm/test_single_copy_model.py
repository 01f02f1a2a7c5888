"""The protocol of fastcoll/shm/single_copy.py: the package's code in every schedule of small worlds.

Pieces have one word. A rank overwrites its arrays as soon as its call has ended, with or without an error. If another
rank reads these values, or writes into the arrays then, that is an error. One rank may fail the group in any wait.
"""

from __future__ import annotations

import pytest
from shm.collectives import explore
from shm.explorer import FOUND

BROADCASTS = "broadcast 2 direct, broadcast 2 @1 direct"
REDUCED = "all_reduce 3 direct, broadcast 1 direct"
BLOCKS = "broadcast 10 +1, all_to_all 3 direct, reduce_scatter 3 direct"

PROGRAMS = [
    (2, "broadcast 2 direct, all_reduce 2 direct, broadcast 2 @1 +1"),
    (2, "reduce 2 direct, reduce 1 @1 direct, all_reduce 2"),
    (2, "all_gather 1 direct, all_to_all 2 direct, reduce_scatter 2 direct"),
    (2, "gather 1 direct, gather 2 @1 direct, all_reduce 3 direct"),
    (3, "broadcast 1 direct, broadcast 1 @2 direct"),
    (3, "all_reduce 3 direct, barrier"),
    (3, BLOCKS),
]


@pytest.mark.parametrize("arena", [False, True], ids=["", "arena"])
@pytest.mark.parametrize(("size", "program"), PROGRAMS)
def test_every_schedule(size: int, program: str, arena: bool) -> None:
    assert explore(size, program, again=size == 2, hurried=size == 2, arena=arena) > 50


@pytest.mark.parametrize("arena", [False, True], ids=["", "arena"])
@pytest.mark.parametrize("quitter", [0, 1])
@pytest.mark.parametrize(("size", "program"), [(2, BROADCASTS), (2, REDUCED), (3, "broadcast 1 direct")])
def test_every_schedule_of_a_failure(size: int, program: str, quitter: int, arena: bool) -> None:
    assert explore(size, program, again=True, arena=arena, quitter=quitter) > 100


PLANTS = [
    # A rank returns while others read its array, or reads data that is not written yet.
    (2, BROADCASTS, "given and r.await_peer(c, peer, 1) != DONE: => False:"),
    (2, BROADCASTS, "load_word(receive_sizes, peer)\n => load_word(receive_sizes, peer); r.publish(c, 0, 0, 0)\n"),
    (2, "reduce 1 direct, barrier", "not here and r.await_peer(c, root, 1) != DONE: => False:"),
    (2, "reduce_scatter 2 direct, barrier", "if r.await_all(c) != DONE: => if False:"),
    (2, REDUCED, "reads and r.await_peer(c, peer, 2) != DONE: => False:"),
    (2, REDUCED, "peer, 2) != DONE:\n            return AGAIN => peer, 2) != DONE:\n            return DONE"),
    (2, REDUCED, "if r.await_peer(c, peer, 1) != DONE:\n            return AGAIN\n        if load => if load"),
    (2, REDUCED, "    met = r.meet(c, call, nbytes, 0)\n =>     met = DONE\n"),
    (2, REDUCED, "if load_word(c, at.EXPOSED) == 0: => if False:"),
    (2, "broadcast 2 direct, broadcast 3 direct", "store_word(c, at.DID, 0) => 0"),
    (3, BLOCKS, "r.slot_of(c, rank, 1 + (shift - 1) => r.slot_of(c, rank, (shift - 1)"),
    (3, BLOCKS, "if opened != DONE:\n            return opened\n        line, base = _line(c, rank, words), 0"
     " => line, base = _line(c, rank, words), 0"),
]  # fmt: skip
WITH_A_QUITTER = [
    # No rank checks whether the owner of an array has failed.
    (0, BROADCASTS, "_check_sound(c, peer)\n\n\n@kernel\ndef exchange => DONE\n\n\n@kernel\ndef exchange"),
    (0, "reduce 2 @1 direct", "    return _check_all_sound(c)\n\n =>     return DONE\n\n"),
    # A rank writes into the array of a failed rank.
    (1, REDUCED, "if _check_sound(c, peer) != DONE:\n                store => if False:\n                store"),
    (1, REDUCED, "swap_if_equal(pushing, 0, 1) => 0"),
    (1, REDUCED, "reached(_PUSHING) => store_release(pushing, 0)"),
]  # fmt: skip


@pytest.mark.parametrize(("size", "program", "plant"), PLANTS)
def test_a_planted_fault_is_found(size: int, program: str, plant: str) -> None:
    with pytest.raises(AssertionError, match=FOUND):
        explore(size, program, again=size == 2, plant=f"shm.single_copy: {plant}")


@pytest.mark.parametrize(("quitter", "program", "plant"), WITH_A_QUITTER)
def test_a_planted_fault_is_found_when_a_rank_fails(quitter: int, program: str, plant: str) -> None:
    plant = f"shm.single_copy: {plant}"
    with pytest.raises(AssertionError, match=FOUND):
        explore(2, program, again=True, arena=bool(quitter), quitter=quitter, plant=plant)
