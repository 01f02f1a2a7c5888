"""The conformance suite through numba.njit: its tests run with functions that call fastcoll's from compiled code.

These functions release the GIL (`nogil=True`); those of the other files here hold it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numba
import numpy as np
import oracle
import pytest
from conformance import test_moves, test_point_to_point, test_reductions

import fastcoll as dist
import fastcoll.callers.njit

pytestmark = pytest.mark.long  # test_njit.py calls every function once

DTYPES = [np.dtype(name) for name in ("int8", "bool", "float32", "complex128")]
MOVABLE = [*DTYPES, np.dtype([("value", "f4"), ("index", "i8")])]
SUM = dist.ReduceOp.SUM


compiled = numba.njit(cache=True, nogil=True)
COMPILED: dict[str, Any] = {
    "all_reduce": compiled(lambda x, op=SUM: dist.all_reduce(x, op)),
    "reduce": compiled(lambda x, dst, op=SUM: dist.reduce(x, dst, op)),
    "scan": compiled(lambda x, op=SUM: dist.scan(x, op)),
    "exscan": compiled(lambda x, op=SUM: dist.exscan(x, op)),
    "reduce_scatter_single": compiled(
        lambda out, x, op=SUM, input_split_sizes=None: dist.reduce_scatter_single(
            out, x, op, input_split_sizes=input_split_sizes
        )
    ),
    "broadcast": compiled(lambda x, src: dist.broadcast(x, src)),
    "gather_single": compiled(lambda x, out, dst: dist.gather_single(x, out, dst)),
    "scatter_single": compiled(lambda out, x, src: dist.scatter_single(out, x, src)),
    "all_to_all_single": compiled(lambda out, x: dist.all_to_all_single(out, x)),
    "send": compiled(lambda x, dst, tag=0: dist.send(x, dst, tag=tag)),
    "recv": compiled(lambda x, src=None, tag=0: dist.recv(x, src, tag=tag)),
}


def one_by_one(posted):
    """`batch_isend_irecv` of a send and a receive around a ring: rank 0 sends first."""
    for op in posted if dist.get_rank() == 0 else posted[::-1]:
        COMPILED["send" if op.op is dist.isend else "recv"](op.tensor, op.peer, 0)
    return []


TESTS = [
    (test_reductions, "test_all_reduce"),
    (test_reductions, "test_reduce"),
    (test_reductions, "test_scan_and_exscan"),
    (test_reductions, "test_reduce_scatter_single"),
    (test_reductions, "test_reduce_scatter_into_parts_of_the_given_sizes"),
    (test_reductions, "test_truth_values"),
    (test_moves, "test_broadcast"),
    (test_moves, "test_gather_and_scatter_of_one_array"),
    (test_point_to_point, "test_ring_of_every_dtype"),
    (test_point_to_point, "test_any_source_returns_the_sender"),
]
BY_TWO = ["test_tags_are_matched_and_one_tag_never_overtakes", "test_strided_arrays"]


@pytest.mark.parametrize(("module", "name"), TESTS, ids=[name for _, name in TESTS])
@pytest.mark.ranks(2, 3)
def test_the_suite_passes_inside_njit(rank, world_size, module, name):
    run(rank, world_size, module, name)


@pytest.mark.parametrize("name", BY_TWO)
@pytest.mark.ranks(2)
def test_messages_of_the_suite_pass_inside_njit(rank, world_size, name):
    run(rank, world_size, test_point_to_point, name)


def run(rank, world_size, module, name):
    names = {each: getattr(dist, each) for each in dist.__all__}
    with (
        patch.object(
            module, "dist", SimpleNamespace(**{**names, **COMPILED, "batch_isend_irecv": one_by_one})
        ),
        patch.object(oracle, "DTYPES", DTYPES),
        patch.object(oracle, "MOVABLE", MOVABLE),
    ):
        getattr(module, name)(rank, world_size)
