"""The list of all ranks: it survives packing, is short, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import json
import uuid
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcoll.errors import StoreError
from fastcoll.rendezvous.assemble import compact, expand, pack, unpack
from fastcoll.system.processes import Member, ProcessId

ME = Member.here(0, 1, "shm")


def nodes_of_eight(size: int) -> list[Member]:
    return [
        dataclasses.replace(
            ME,
            rank=rank,
            host=f"node{rank // 8:05}",
            boot_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, f"node{rank // 8}")),
            pid=1000 + rank * 7919 % 4_000_000,
            start_time=40_000_000 + rank * 104_729 % 3_000_000,
        )
        for rank in range(size)
    ]


def test_the_record_of_a_member_takes_few_bytes() -> None:
    members = nodes_of_eight(1000)
    data = pack(members)
    assert unpack(Member, data, 1000) == members
    assert len(data) < 20 * 1000
    assert sum(len(member.to_bytes()) for member in members) > 250 * 1000


processes = st.builds(
    ProcessId,
    host=st.text(max_size=5),
    pid=st.integers(0, 3),
    start_time=st.integers(-(1 << 70), 1 << 70),
    boot_id=st.text(max_size=2),
    pid_namespace=st.just("pid:[1]"),
)


@given(st.lists(processes, min_size=1, max_size=20))
def test_any_processes_survive_pack_and_unpack(some: list[ProcessId]) -> None:
    assert unpack(ProcessId, pack(some), len(some)) == some


def columns(**changes: object) -> bytes:
    record = {name: [value] * 2 for name, value in dataclasses.asdict(ME).items()} | changes
    return compact({name: column for name, column in record.items() if column is not None})


def test_the_columns_written_by_hand_are_a_list() -> None:
    assert unpack(Member, columns(), 2) == [ME, ME]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense",
        zlib.compress(b"{"),
        compact([]),
        compact(None),
        compact({}),
        columns(rank=None),
        columns(crank=[1, 1]),
        columns(rank=[1]),
        columns(rank=[1, 1, 1]),
        columns(rank=[1, "1"]),
        columns(rank=[1, True]),
        columns(rank=7),
        columns(rank={"1": 1, "2": 2}),
        columns(rank="11"),
        columns(host=[None, None]),
        pack([ME, ME])[:-1],
        pack([ME, ME]) + b"x",
        zlib.compress(b"[" * 100_000),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        unpack(Member, data, 2)


def test_a_decompression_bomb_is_not_inflated() -> None:
    bomb = zlib.compress(json.dumps("x" * 50_000_000).encode(), 9)
    assert len(bomb) < 100_000
    with pytest.raises(StoreError, match="longer than 8192 bytes"):
        unpack(Member, bomb, 2)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=4)
    )
)
def test_json_values_survive_compact_and_expand(value: object) -> None:
    data = compact(value)
    length = len(zlib.decompress(data))
    assert expand(data, length) == value
    for most in {0, length - 1}:
        with pytest.raises(StoreError, match="longer than"):
            expand(data, most)
