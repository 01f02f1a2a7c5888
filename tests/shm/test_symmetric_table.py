"""The table of symmetric arrays: lookups, and rows whose owner was garbage-collected."""

from __future__ import annotations

import numpy as np

from fastcoll.compiler.jit import entry
from fastcoll.kernels.primitives import address_of
from fastcoll.kernels.pyobjects import Index, integer
from fastcoll.shm.context_layout import SYMMETRIC
from fastcoll.shm.layout import CHANNELS, LINE, PAGE, SymmetricLayout
from fastcoll.shm.symmetric import ID, STRIDE, SymmetricTable, find_row


class Owner:
    """Keeps an array."""


@entry
def find(context: Index, address: Index, nbytes: Index) -> int:
    return find_row(integer(context), integer(address), integer(nbytes))


def found(table: SymmetricTable, address: int, nbytes: int) -> tuple[int, int] | None:
    """ID and STRIDE of the row that an entry finds."""
    row = find.call(address_of(table._context), address, nbytes)
    if row == 0:
        return None
    words = table._words
    first = (row - address_of(words)) // 8
    return int(words[first + ID]), int(words[first + STRIDE])


def new_table() -> SymmetricTable:
    table = SymmetricTable(np.zeros(SYMMETRIC + 1, np.int64))
    table.add(Owner(), 1 << 40, 0, 1, 0)  # whose row is free again
    return table


def test_ranges_are_found_to_the_byte() -> None:
    table, owner = new_table(), Owner()
    table.add(owner, 1000, 64, 77, 4096)
    assert found(table, 1000, 64) == found(table, 1000, 1) == found(table, 1063, 1) == (77, 4096)
    assert found(table, 1064, 0) == (77, 4096)
    for address, nbytes in ((999, 1), (999, 2), (1000, 65), (1064, 1), (0, 2000), (1 << 40, 0)):
        assert found(table, address, nbytes) is None


def test_rows_are_removed_and_reused() -> None:
    table = new_table()
    owners = [Owner() for _ in range(100)]
    for number, owner in enumerate(owners):
        table.add(owner, 1000 * number + 1000, 10, number, 8)
    assert [found(table, 1000 * n + 1005, 5) for n in range(100)] == [(n, 8) for n in range(100)]
    rows = table._words[0]
    del owner, owners[1::2]
    left = [None if n % 2 else (n, 8) for n in range(100)]
    assert [found(table, 1000 * n + 1005, 5) for n in range(100)] == left
    for turn in range(500):
        passing = Owner()
        table.add(passing, 10**6, 10, turn, 8)
        assert found(table, 10**6, 10) == (turn, 8)
    assert table._words[0] == rows


def test_signals_and_arrays_do_not_overlap_in_a_segment() -> None:
    for size in (1, 2, 5, 33):
        layout = SymmetricLayout(size, 1001)
        taken = np.zeros(layout.nbytes, np.int64)
        taken[:PAGE] += 1
        for rank in range(size):
            first = layout.section(rank) + layout.array_at
            assert first % PAGE == 0
            taken[first : first + 1001] += 1
            for peer in range(size):
                for channel in range(CHANNELS):
                    word = layout.signal(rank, peer, channel)
                    assert word // LINE == layout.signal(rank, peer, 0) // LINE
                    taken[word : word + 8] += 1
        assert taken.max() == 1
