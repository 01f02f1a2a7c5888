"""all_reduce of sparse tensors: every rank gathers the entries of all ranks and adds them.

The number of entries differs between ranks, so the ranks exchange the sizes first. Both exchanges are one operation of
the group, so that no other call of a rank can run between them.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch

from ..core.group import ProcessGroup
from ..core.operation import Operation
from ..core.reduce_op import ReduceOp
from ..core.signature import gather_texts
from ..core.work import Work
from ..errors import MismatchError, UnavailableError


def all_reduce_sparse(
    group: ProcessGroup, x: torch.Tensor, op: ReduceOp, async_op: bool = False
) -> Work | None:
    """Sum sparse COO tensors of one shape and dtype over all ranks, in place; the result is coalesced.

    Raises:
        UnavailableError: the operation is not SUM, or the tensor is not on the CPU.
        MismatchError: the ranks' tensors differ in shape, dtype or number of sparse dimensions.
    """
    if op is not ReduceOp.SUM:
        raise UnavailableError(f"op is {op.name}; sparse tensors are summed only, so use SUM")
    if x.device.type != "cpu":
        raise UnavailableError(
            f"the tensor is sparse and on {x.device}; fastcoll takes sparse tensors on the CPU"
        )
    part = x.detach().coalesce()
    indices, values = part.indices(), part.values()
    dims, entry = part.sparse_dim(), values.shape[1:]
    kind = f"{x.dtype}, shape {tuple(x.shape)}, {dims} sparse dimensions"
    mine = np.array([values.shape[0], zlib.crc32(kind.encode())], np.int64)
    sent = np.concatenate([_bytes(indices), _bytes(values)])

    def call() -> None:
        rows = group.rows_of_all(mine)
        others = (rows[:, 1] != rows[0, 1]).nonzero()[0]
        if others.size:
            texts = gather_texts(kind, group.size, lambda all_, own: np.copyto(all_, group.rows_of_all(own)))
            rank = int(others[0])
            raise MismatchError(
                f"all_reduce: the sparse tensors of ranks 0 and {rank} differ: {texts[0]}; {texts[rank]}"
            )
        counts = rows[:, 0].tolist()
        each = 8 * dims + values.itemsize * entry.numel()
        parts = [torch.empty(count * each, dtype=torch.uint8) for count in counts]
        outs = tuple(part.numpy() for part in parts)
        group.planned(Operation("all_gather", outs, (sent,)))()
        found = [got.tensor_split([8 * dims * n]) for got, n in zip(parts, counts, strict=True)]
        all_indices = torch.cat(
            [i.view(torch.int64).view(dims, n) for (i, _), n in zip(found, counts, strict=True)], 1
        )
        all_values = torch.cat(
            [v.view(x.dtype).view(n, *entry) for (_, v), n in zip(found, counts, strict=True)]
        )
        # The entries of valid tensors need no check. By default torch does not check either, but it warns, and warnings
        # may be errors.
        whole = torch.sparse_coo_tensor(all_indices, all_values, x.shape, check_invariants=False)
        with torch.no_grad():
            x.copy_(whole.coalesce())

    return group.run("all_reduce", call, (), async_op)


def _bytes(x: torch.Tensor) -> Any:
    return x.flatten().view(torch.uint8).numpy()
