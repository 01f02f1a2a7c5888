"""The cases of a run, their sizes, and the bus factors of nccl-tests."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcoll.arrays.dtypes import parse_dtype
from fastcoll.bench.cases import (
    SHAPES,
    cases,
    format_size,
    parse_operation,
    parse_redop,
    parse_size,
    size_range,
)
from fastcoll.errors import UsageError


def test_bus_factors_are_those_of_nccl_tests():
    factors = {name: shape.bus_factor(4) for name, shape in SHAPES.items()}
    twice = ("all_reduce", "update_all_reduce", "update_symmetric_all_reduce")
    once = ("reduce", "broadcast", "sendrecv", "barrier")
    assert factors == dict.fromkeys(SHAPES, 0.75) | dict.fromkeys(twice, 1.5) | dict.fromkeys(once, 1)


@pytest.mark.parametrize(
    ("operation", "dtype", "sizes", "found"),
    [
        ("all_gather", "float32", [64], [(4, 64)]),  # the size counts the blocks of all ranks
        ("all_reduce", "float32", [64], [(16, 64)]),
        (
            "all_to_all",
            "float64",
            [8, 16, 32, 64],
            [(1, 32), (2, 64)],
        ),  # rounded up to an element, and taken once
    ],
)
def test_sizes_are_rounded_up_to_an_element_and_taken_once(operation, dtype, sizes, found):
    assert [(case.count, case.size) for case in cases([operation], [dtype], ["sum"], sizes, 0, 4)] == found


def test_only_reductions_vary_the_reduction_and_only_rooted_ones_have_a_root():
    names = ["all_reduce", "broadcast", "barrier"]
    found = list(cases(names, ["int8", "int16"], ["sum", "max"], [8, 16], 1, 2))
    assert [case.redop for case in found].count("max") == 4
    assert {(case.operation, case.root) for case in found} == {*zip(names, (-1, 1, -1), strict=True)}
    assert [case.operation for case in found].count("barrier") == 1


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((parse_operation, "All-Reduce", "all_reduce"), (parse_redop, "prod", "product")),
        *((parse_size, "8", 8), (parse_size, "0", 0), (parse_size, "100B", 100), (parse_size, "4K", 4096)),
        *((parse_size, "4k", 4096), (parse_size, "1.5K", 1536), (parse_size, "16 KB", 16 << 10)),
        *((parse_size, "64M", 64 << 20), (parse_size, "2MiB", 2 << 20), (parse_size, "1G", 1 << 30)),
    ],
)
def test_what_words_mean(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "named"),
    [
        (parse_operation, "allreduce", "all_reduce"),
        (parse_redop, "mean", "avg"),
        (parse_dtype, "float31", "float32"),
        (parse_dtype, "S8", "float32"),
        (parse_dtype, "object", "float32"),
        *(
            (parse_size, text, "no size in bytes")
            for text in ["x", "-8", "4T", "8 8", "1.3", "0.5", "1e3", "K"]
        ),
    ],
)
def test_unknown_names_are_refused_with_what_is_known(parse, text, named):
    with pytest.raises(UsageError, match=named) as caught:
        parse(text)
    assert text.lower() in str(caught.value).lower()


@settings(deadline=None)
@given(st.integers(0, 1 << 40))
def test_format_is_read_back(nbytes):
    assert parse_size(format_size(nbytes)) == nbytes


def test_formats_shortest():
    sizes = (0, 8, 1024, 1536, 64 << 20, 1 << 30)
    assert list(map(format_size, sizes)) == ["0", "8", "1K", "1536", "64M", "1G"]


def test_range_has_both_ends_and_a_small_factor_goes_on():
    assert size_range(8, 64, 2) == [8, 16, 32, 64]
    assert size_range(8, 8, 2) == [8]
    assert size_range(8, 100, 10) == [8, 80]
    sizes = size_range(1, 100, 1.1)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1] > 90) == (1, True)


@pytest.mark.parametrize(("begin", "end", "factor"), [(16, 8, 2), (0, 8, 2), (8, 16, 1), (8, 16, 0.5)])
def test_refuses_ranges_that_never_end(begin, end, factor):
    with pytest.raises(UsageError):
        size_range(begin, end, factor)
