"""Notices: what is said arrives, and whatever else comes is refused without being believed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.core.monitor import FAILED, LEAVING, LEFT
from fastcoll.net.tcp.control import MOST_RANKS, NOTICE_SIZE, TEXT_BYTES, Notice, NoticeError


@settings(deadline=None)
@given(
    st.sampled_from([LEFT, FAILED, LEAVING]),
    st.integers(0, 7),
    st.lists(st.integers(0, 2**32 - 1), max_size=MOST_RANKS),
    st.sampled_from([(False, False), (True, False), (False, True)]),
    st.text(st.characters(codec="utf-8"), max_size=200),
)
def test_what_is_said_arrives(
    state: int, origin: int, ranks: list[int], what: tuple[bool, bool], text: str
) -> None:
    notice = Notice(state, origin, tuple(ranks), *what, text)
    data = notice.to_bytes()
    assert len(data) == NOTICE_SIZE
    assert Notice.from_bytes(data, 8) == notice


def test_long_texts_and_many_ranks_are_cut() -> None:
    notice = Notice.from_bytes(Notice(FAILED, 0, tuple(range(40)), text="é" * 2000).to_bytes(), 8)
    assert notice.ranks == tuple(range(MOST_RANKS))
    assert notice.text == "é" * (TEXT_BYTES // 2)


@settings(deadline=None)
@given(st.binary(min_size=NOTICE_SIZE, max_size=NOTICE_SIZE))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(NoticeError):
        Notice.from_bytes(data, 8)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (8, b"\0"),
        (8, b"\4"),
        (9, b"\3"),
        (10, b"\0\x11"),
        (12, b"\0\0\0\x08"),
        (16, b"\xff\xff\xff\xff"),
        (20, b"\1"),
    ],
)
def test_every_field_has_its_bounds(place: int, value: bytes) -> None:
    data = Notice(FAILED, 1, (1,), text="x").to_bytes()
    with pytest.raises(NoticeError, match="not a notice"):
        Notice.from_bytes(data[:place] + value + data[place + len(value) :], 8)
