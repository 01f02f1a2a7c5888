"""The table of kinds: the numbers that ranks compare, and the methods of a group that are made from it."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest

from fastcoll import failpoints
from fastcoll.core import operations
from fastcoll.core.backend import Backend, DeviceCarrier
from fastcoll.core.group import ProcessGroup
from fastcoll.core.operation import COMPOSITIONS
from fastcoll.core.operations import KINDS, METHODS


def test_kinds_keep_the_numbers_of_other_versions_and_cached_files() -> None:
    assert (
        "none all_reduce reduce scan exscan reduce_scatter broadcast all_gather gather scatter all_to_all barrier "
        "message symmetric.empty symmetric:all_reduce refused monitored_barrier"
    ).split() == operations.OPERATIONS
    assert failpoints.number_of("shm.all_reduce.enter") == failpoints.number_of("shm.OPERATION.enter") + 1


def test_backends_have_all_kinds_but_compositions_and_carriers_all_with_arrays() -> None:
    assert {name for name, kind in KINDS.items() if kind.made_of} == COMPOSITIONS.keys()
    assert Backend.natively.isdisjoint(COMPOSITIONS)
    assert DeviceCarrier.natively - Backend.natively == COMPOSITIONS.keys()
    assert Backend.natively - DeviceCarrier.natively == {"barrier", "monitored_barrier", "refused"}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_a_root_and_an_op_where_its_kind_has_one(method: str) -> None:
    names = inspect.signature(getattr(ProcessGroup, method)).parameters
    kind = KINDS[METHODS[method]]
    assert ["root" in names, "op" in names] == [kind.root != "", kind.reduces]


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("reduce", {"tensor": "out", "root": "a root", "op": "an op"}),
        ("reduce_scatter_single", {"output": "out", "input": "in", "op": "an op"}),
        ("gather", {"tensor": "in", "output_list": "out", "root": "a root"}),
        ("scatter_single", {"tensor": "out", "input": "in", "root": "a root"}),
        ("all_to_all", {"output_list": "out", "input_list": "in"}),
        ("all_reduce_coalesced", {"tensors": "out", "op": "an op"}),
        ("barrier", {}),
    ],
)
def test_a_method_is_called_with_its_arguments_in_order(method: str, expected: dict[str, str]) -> None:
    names = [*inspect.signature(getattr(ProcessGroup, method)).parameters][1:]
    fast = SimpleNamespace(**{method: lambda *given: dict(zip(names, given, strict=False))})
    assert operations.call(SimpleNamespace(fast=fast), method, "out", "in", "a root", "an op") == expected
