"""Users' reductions on a GPU: every kind of dtype, records, and any callable, as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from kernels import checks

from fastcoll.core.reduce_op import ReduceOp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [*checks.DTYPES, "c16"], ids=str)
def test_any_dtype_in_rank_order_into_any_destination(cuda_reduce, dtype):
    checks.check_rank_order(cuda_reduce, dtype, 75)


@pytest.mark.parametrize("name", checks.RECORDS)
def test_records_for_argmax(cuda_reduce, name):
    checks.check_argmax(cuda_reduce, checks.RECORDS[name], 30)


def test_records_without_fields_have_nothing_to_reduce(device):
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    nothing = np.dtype([])
    cuda_reducer(ReduceOp.custom(lambda a, b: a), nothing).launch(0, [0, 0], 3)  # address 0 would be a fault


@pytest.mark.parametrize("check", checks.ALWAYS)
def test_always(cuda_reduce, check):
    check(cuda_reduce)
