"""The cases of a run, their sizes, and the bus factors of nccl-tests."""

import pytest

from fastcoll.arrays.dtypes import parse_dtype
from fastcoll.bench.cases import SHAPES, cases, parse_operation, parse_redop
from fastcoll.errors import UsageError


def test_bus_factors_are_those_of_nccl_tests():
    factors = {name: shape.bus_factor(4) for name, shape in SHAPES.items()}
    twice = ("all_reduce", "update_all_reduce", "update_symmetric_all_reduce")
    once = ("reduce", "broadcast", "sendrecv", "barrier")
    assert factors == dict.fromkeys(SHAPES, 0.75) | dict.fromkeys(twice, 1.5) | dict.fromkeys(once, 1)


def test_size_of_block_operations_counts_all_ranks():
    (case,) = cases(["all_gather"], ["float32"], ["sum"], [64], 0, 4)
    assert (case.count, case.size) == (4, 64)
    (case,) = cases(["all_reduce"], ["float32"], ["sum"], [64], 0, 4)
    assert (case.count, case.size) == (16, 64)


def test_sizes_are_rounded_up_to_an_element_and_taken_once():
    found = list(cases(["all_to_all"], ["float64"], ["sum"], [8, 16, 32, 64], 0, 4))
    assert [case.size for case in found] == [32, 64]


def test_only_reductions_vary_the_reduction_and_only_rooted_ones_have_a_root():
    names = ["all_reduce", "broadcast", "barrier"]
    found = list(cases(names, ["int8", "int16"], ["sum", "max"], [8, 16], 1, 2))
    assert [case.redop for case in found].count("max") == 4
    assert {(case.operation, case.root) for case in found} == {*zip(names, (-1, 1, -1), strict=True)}
    assert [case.operation for case in found].count("barrier") == 1


def test_names_have_aliases():
    assert parse_operation("All-Reduce") == "all_reduce"
    assert parse_redop("prod") == "product"
    assert parse_dtype("half").name == "float16"
    assert parse_dtype("bfloat16").name == "bfloat16"


@pytest.mark.parametrize(
    ("parse", "text", "named"),
    [
        (parse_operation, "allreduce", "all_reduce"),
        (parse_redop, "mean", "avg"),
        (parse_dtype, "float31", "float32"),
        (parse_dtype, "S8", "float32"),
        (parse_dtype, "object", "float32"),
    ],
)
def test_unknown_names_are_refused_with_what_is_known(parse, text, named):
    with pytest.raises(UsageError, match=named) as caught:
        parse(text)
    assert text.lower() in str(caught.value).lower()
