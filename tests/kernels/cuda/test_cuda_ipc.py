"""The kernels that synchronise ranks with shared GPU memory: the words that they write, and the end of their waits.

One rank runs, number 0 of two. Its page contains in advance everything that it would read from both ranks. It publishes
to two other pages.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

from fastcoll.core import signature
from fastcoll.kernels.cuda import page as at

pytestmark = pytest.mark.gpu

CALL = signature.encode("all_reduce", np.dtype("f4"))
FLOATS = [*oracle.FLOATS, *oracle.HALVES, *oracle.COMPLEX]


class Rank:
    """Its page, its peers' pages and its control words, as words on the device, with given initial values."""

    def __init__(self, device: Any, page: dict[int, int], stop: int = 0) -> None:
        self._control = self._words(device, at.CONTROL_BYTES, {at.STOP: stop})
        self._peers = [self._words(device, at.PAGE, {}) for _ in range(2)]
        here = {at.SIZE: 2, at.RANK: 0, at.CONTROL: self._control.address}
        there = {at.PEERS + 8 * rank: peer.address for rank, peer in enumerate(self._peers)}
        self._page = self._words(device, at.PAGE, {**here, **there, **page})

    @staticmethod
    def _words(device: Any, nbytes: int, values: dict[int, int]) -> Any:
        words = np.zeros(nbytes // 8, np.int64)
        for offset, value in values.items():
            words[offset // 8] = value
        return device(words)

    def launch(self, name: str, *words: int) -> None:
        from fastcoll.kernels.cuda import steps as ipc

        ipc.compiled(getattr(ipc, name))(1, 0, self._page.address, *words)

    def is_dead(self) -> bool:
        return bool(self._page.get()[at.DEAD // 8])

    def control(self, offset: int, count: int = 1) -> list[int]:
        return self._control.get()[offset // 8 :][:count].tolist()

    def published(self, offset: int, count: int = 1) -> list[list[int]]:
        """Return the words written into each rank's page."""
        return [peer.get()[offset // 8 :][:count].tolist() for peer in self._peers]


def lines(number: int, *signatures: tuple[int, int, int, int]) -> dict[int, int]:
    return {
        at.line(rank, number) + 8 * word: value
        for rank, line in enumerate(signatures)
        for word, value in enumerate(line)
    }


@pytest.mark.parametrize("number", [1, 6, 1 << 45])
def test_a_meeting_publishes_to_all_ranks_and_compares(device, number) -> None:
    rank = Rank(device, lines(number, (number, CALL, 8, 5), (number, CALL, 8, -5)))
    rank.launch("meet", number, CALL, 8, 5)
    assert rank.published(at.line(0, number), 4) == [[number, CALL, 8, 5]] * 2
    assert rank.published(at.line(0, number + 1), 4) == [[0] * 4] * 2
    assert rank.control(at.ARRIVED, 2) == [number] * 2
    assert rank.control(at.STOPPED) == [0]
    assert not rank.is_dead()


UNEVEN = signature.encode("gather", np.dtype("f4"))
AHEAD = lines(5, (0, 0, 0, 0), (5, CALL, 16, 0))
ARRIVED = {
    "a call ahead": ((4, CALL, 8, 0), lines(4, (4, CALL, 8, 0), (4, CALL, 8, 0)) | AHEAD, 0),
    "sizes may differ": ((1, UNEVEN, 8, 3), lines(1, (1, UNEVEN, 8, 3), (1, UNEVEN, 4, (1 << 48) - 3)), 0),
    "despite stop": ((2, CALL, 8, 0), lines(2, (2, CALL, 8, 0), (2, CALL, 8, 0)), 1),
}  # fmt: skip


@pytest.mark.parametrize("how", ARRIVED)
def test_a_peer_has_arrived(device, how) -> None:
    words, page, stop = ARRIVED[how]
    rank = Rank(device, page, stop)
    rank.launch("meet", *words)
    assert rank.control(at.STOPPED) == [0]
    assert not rank.is_dead()


OTHERS = {
    "call": (7, CALL + 1, 8, 0),
    "shape": (7, CALL, 16, 0),
    "balance": (7, CALL, 8, 1),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_mismatch_is_reported_to_the_host_and_stops_publishing(device, what) -> None:
    rank = Rank(device, lines(7, (7, CALL, 8, 0), OTHERS[what]))
    rank.launch("meet", 7, CALL, 8, 0)
    assert rank.is_dead()
    assert rank.control(at.STOPPED) == [7]
    assert rank.control(at.WHY) == [at.MISMATCH]
    assert rank.control(at.REPORTED, 8) == [7, CALL, 8, 0, *OTHERS[what]]
    rank.launch("step", 7 << at.STEP_BITS | 1)
    rank.launch("publish", at.BYE, 1)
    rank.launch("announce", 8, CALL, 8, 0)
    rank.launch("meet", 8, CALL, 8, 0)
    assert rank.published(at.rank_words(0) + at.STEP, 2) == [[0, 0]] * 2
    assert rank.published(at.line(0, 8)) == [[0]] * 2
    assert rank.control(at.STOPPED) == [7]


def test_waiting_ends_when_the_host_sets_stop(device) -> None:
    rank = Rank(device, lines(2, (2, CALL, 8, 0), (1, CALL, 8, 0)), stop=1)
    rank.launch("meet", 2, CALL, 8, 0)
    assert rank.is_dead()
    assert rank.control(at.STOPPED) == [2]
    assert rank.control(at.WHY) == [at.GAVE_UP]
    assert rank.control(at.ARRIVED, 2) == [2, 0]


def test_poison_is_no_arrival(device) -> None:
    from fastcoll.kernels.cuda.steps import POISON

    steps = {at.rank_words(rank) + at.STEP: POISON for rank in range(2)}
    rank = Rank(device, steps)
    rank.launch("step", 3 << at.STEP_BITS | 1)
    assert rank.is_dead()
    assert rank.control(at.STOPPED) == [3]


def test_steps_count_also_those_of_later_calls_and_last_ones(device) -> None:
    word = 3 << at.STEP_BITS | 2
    for other in (word, word + 1, 3 << at.STEP_BITS | at.LAST_STEP, 4 << at.STEP_BITS | 1):
        rank = Rank(device, {at.rank_words(0) + at.STEP: word, at.rank_words(1) + at.STEP: other})
        rank.launch("step", word)
        assert rank.published(at.rank_words(0) + at.STEP) == [[word]] * 2
        assert not rank.is_dead()


def test_publish_and_announce_do_not_wait(device) -> None:
    rank = Rank(device, {})
    rank.launch("publish", at.BYE, 1)
    rank.launch("announce", 9, CALL, 4, 2)
    assert rank.published(at.rank_words(0) + at.BYE) == [[1]] * 2
    assert rank.published(at.line(0, 9), 4) == [[9, CALL, 4, 2]] * 2


def test_bfloat16_without_ml_dtypes_is_scaled(device) -> None:
    from fastcoll.arrays.dtypes import bfloat
    from fastcoll.kernels.cuda.packing import scale

    record = np.dtype((bfloat, np.dtype([("bfloat16", "V2")])))
    x = oracle.values(1, 37, np.dtype(ml_dtypes.bfloat16))
    src, dst, want = device(x), device(x.view(record)), device(x)
    scale(want.address, src.address, x.size, x.dtype, 1.7, 0)
    scale(dst.address, src.address, x.size, record, 1.7, 0)
    assert dst.get().tobytes() == want.get().tobytes()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_arrays_are_scaled_as_numpy_does(device, dtype) -> None:
    from fastcoll.kernels.cuda.packing import scale

    x = oracle.values(1, 37, dtype)
    factor = np.array([1.7 - 0.3j if dtype.kind == "c" else 1.7]).astype(dtype)
    src, dst = device(x), device(np.zeros_like(x))
    scale(dst.address, src.address, x.size, dtype, factor[0], 0)
    oracle.assert_same(dst.get(), np.asarray(x * factor[0], dtype))
    scale(src.address, src.address, x.size, dtype, factor[0], 0)
    oracle.assert_same(src.get(), dst.get())
