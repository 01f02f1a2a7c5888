"""Parsing and formatting of sizes, and ranges of sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.bench.cases import format_size, parse_size, size_range
from fastcoll.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *(("8", 8), ("0", 0), ("100B", 100)),
        *(("4K", 4096), ("4k", 4096), ("1.5K", 1536), ("16 KB", 16 << 10)),
        *(("64M", 64 << 20), ("2MiB", 2 << 20), ("1G", 1 << 30)),
    ],
)
def test_reads(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "x", "-8", "4T", "8 8", "1.3", "0.5", "1e3", "K"])
def test_refuses_texts_that_are_no_size(text):
    with pytest.raises(UsageError, match="no size in bytes"):
        parse_size(text)


@settings(deadline=None)
@given(st.integers(0, 1 << 40))
def test_format_is_read_back(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


def test_formats_shortest():
    sizes = (0, 8, 1024, 1536, 64 << 20, 1 << 30)
    assert list(map(format_size, sizes)) == ["0", "8", "1K", "1536", "64M", "1G"]


def test_range_has_both_ends():
    assert size_range(8, 64, 2) == [8, 16, 32, 64]
    assert size_range(8, 8, 2) == [8]
    assert size_range(8, 100, 10) == [8, 80]


def test_small_factor_goes_on():
    sizes = size_range(1, 100, 1.1)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] > 90


@pytest.mark.parametrize(("begin", "end", "factor"), [(16, 8, 2), (0, 8, 2), (8, 16, 1), (8, 16, 0.5)])
def test_refuses_ranges_that_never_end(begin, end, factor):
    with pytest.raises(UsageError):
        size_range(begin, end, factor)
