"""One rank of a job on real GPUs: every operation of one backend against NumPy.

test_hardware.py runs it, or by hand:

    PYTHONPATH=tests python -m fastcoll.launch -n 2 tests/gpu/hardware_ranks.py shm IpcCarrier
    PYTHONPATH=tests python -m fastcoll.launch -n 2 tests/gpu/hardware_ranks.py nccl NcclCarrier messages

Ranks share the available GPUs. NCCL refuses that, unless each rank claims to be on a host of its own, as it does with
"apart" and with "messages", which checks messages only. NCCL then moves the data through its network.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
from typing import Any

import cupy
import numpy as np
import oracle

import fastcoll as dist
from fastcoll import ReduceOp
from fastcoll.gpu.carriers import carrier_name
from fastcoll.gpu.ipc.backend import HAND_OVER_ABOVE
from fastcoll.job.groups import groups

Array = np.ndarray[Any, Any]

DTYPES = [dtype for dtype in oracle.DTYPES if dtype.name != "bfloat16"]  # CuPy lacks it
COUNTS = (0, 1, 1009, 300_007, 9_000_001)
"""Some beyond a slot of 16 MiB."""


def main(backend: str, carrier: str, part: str = "all") -> None:
    logging.basicConfig(level=logging.INFO)  # fastcoll then says which carrier it has chosen, and why
    faulthandler.dump_traceback_later(110)
    if part != "all":
        os.environ.setdefault("NCCL_HOSTID", f"rank-{os.environ['RANK']}")
    dist.init_process_group(backend, timeout=120)
    rank, size = dist.get_rank(), dist.get_world_size()
    cupy.cuda.Device(rank % cupy.cuda.runtime.getDeviceCount()).use()
    exact = exact_up_to(backend, size)
    with cupy.cuda.Stream(non_blocking=True):
        if part != "messages":
            check_reductions(rank, size, exact)
            check_moves(rank, size)
            check_order(rank, size)
        check_crossing(rank, size)
        check_waiting(rank, size)
    if part == "messages":
        check_directions(size)
    check_carrier(carrier)
    dist.destroy_process_group()
    print(f"rank {rank} of {size}: {backend} is right")


def check_carrier(wanted: str) -> None:
    """Check that the intended carrier was tested."""
    found = carrier_name(groups.world)
    assert found == wanted, f"{found} carried the arrays"


def exact_up_to(backend: str, size: int) -> float:
    """Return the bytes of an array up to which reductions have the CPU's bits; NCCL's order differs."""
    if backend == "nccl":
        return -1
    by_nccl = backend == "shm" and size <= cupy.cuda.runtime.getDeviceCount()
    return HAND_OVER_ABOVE if by_nccl else np.inf


def compare(got: Any, want: Array, exact: bool, what: object) -> None:
    host = cupy.asnumpy(got)
    if exact:
        oracle.assert_same(host, want, what)
    else:
        rtol = 2e-2 if want.dtype == np.float16 else 1e-4
        np.testing.assert_allclose(host, want, rtol=rtol, atol=rtol, err_msg=str(what))


def check_reductions(rank: int, size: int, exact: float) -> None:
    def check(got: Any, want: Array, what: object) -> None:
        compare(got, want, want.nbytes <= exact, what)

    cases = [(op, dtype, 1009) for dtype in DTYPES for op in oracle.ops_for(dtype)]
    cases = cases if size == 2 else cases[:: len(cases) // 10]
    cases += [(ReduceOp.SUM, np.dtype("f4"), count) for count in COUNTS]
    for op, dtype, count in cases:
        inputs = [oracle.values(r, count, dtype) for r in range(size)]
        want, what = oracle.reduced(inputs, op), (op, dtype, count)
        x = cupy.asarray(inputs[rank])
        dist.all_reduce(x, op)
        check(x, want, what)
    f4 = np.dtype("f4")
    inputs = [oracle.values(r, size * 5000, f4) for r in range(size)]
    total = oracle.reduced(inputs, ReduceOp.SUM)
    scaled = oracle.reduced([x * f4.type(0.5) for x in inputs], ReduceOp.SUM)
    in_place: dict[str, tuple[Any, Array]] = {
        "reduce": (lambda x: dist.reduce(x, size - 1), total if rank == size - 1 else inputs[rank]),
        "scan": (dist.scan, oracle.reduced(inputs[: rank + 1], ReduceOp.SUM)),
        "PREMUL_SUM": (lambda x: dist.all_reduce(x, ReduceOp.PREMUL_SUM(0.5)), scaled),
    }
    for name, (call, want) in in_place.items():
        call(x := cupy.asarray(inputs[rank]))
        check(x, want, name)
    part = cupy.zeros(5000, f4)
    dist.reduce_scatter_single(part, cupy.asarray(inputs[rank]))
    check(part, total[5000 * rank : 5000 * (rank + 1)], "reduce_scatter")
    wide = cupy.asarray(inputs[rank]).reshape(-1, 10)
    dist.all_reduce(wide[:, ::3])
    check(wide[:, ::3], total.reshape(-1, 10)[:, ::3].copy(), "strided")


def check_moves(rank: int, size: int) -> None:
    i4 = np.dtype("i4")
    blocks = [oracle.values(r, 70_000 * r + 3, i4) for r in range(size)]
    x = cupy.asarray(blocks[-1] if rank == size - 1 else np.zeros_like(blocks[-1]))
    dist.broadcast(x, size - 1)
    compare(x, blocks[-1], True, "broadcast")
    gives = [oracle.values(rank, 1000 * (rank + peer), i4, peer) for peer in range(size)]
    takes = [oracle.values(peer, 1000 * (rank + peer), i4, rank) for peer in range(size)]
    every, gathered, taken = ([cupy.zeros(x.shape, i4) for x in xs] for xs in (blocks, blocks, takes))
    mine, at_root = cupy.zeros(blocks[rank].shape, i4), rank == 0
    dist.all_gather(every, cupy.asarray(blocks[rank]))
    dist.gather(cupy.asarray(blocks[rank]), gathered if at_root else None, 0)
    dist.scatter(mine, [cupy.asarray(block) for block in blocks] if at_root else None, 0)
    dist.all_to_all(taken, [cupy.asarray(x) for x in gives])
    compare(mine, blocks[rank], True, "scatter")
    for name, outs, wants in (
        ("all_gather", every, blocks),
        ("gather", gathered if at_root else [], blocks if at_root else []),
        ("all_to_all", taken, takes),
    ):
        for out, want in zip(outs, wants, strict=True):
            compare(out, want, True, name)


def check_order(rank: int, size: int) -> None:
    """Check the order of calls and the work of the array's stream before and after; the host does not wait."""
    x = cupy.zeros(1 << 22, "f4")
    for round in range(20):
        x += rank + 1
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        x /= size
        if round % 7 == 0:
            assert work.wait(timeout=60)
    compare(x[:5], np.full(5, 20 * (size + 1) / 2, "f4"), False, "order")


def check_crossing(rank: int, size: int) -> None:
    """All ranks first send to all others, small and large, and take by tags in another order; then from any source."""
    peers = [peer for peer in range(size) if peer != rank]
    for count in (1, 1009, 5_000_011):
        works = [
            dist.isend(cupy.full(count, 100 * rank + tag, "f4"), peer, tag=tag)
            for tag in (1, 2)
            for peer in peers
        ]
        got = {(peer, tag): cupy.zeros(count, "f4") for tag in (2, 1) for peer in peers}
        works += [dist.irecv(x, peer, tag=tag) for (peer, tag), x in got.items()]
        for work in works:
            assert work is not None
            work.wait()
        for (peer, tag), x in got.items():
            compare(x, np.full(count, 100 * peer + tag, "f4"), True, "crossing messages")
    left, mine, theirs = (rank - 1) % size, cupy.full(3, rank, "i4"), cupy.zeros(3, "i4")
    work = dist.isend(mine, (rank + 1) % size, tag=5)
    assert dist.recv(theirs, tag=5) == left
    compare(theirs, np.full(3, left, "i4"), True, "from anybody")
    assert work is not None
    work.wait(timeout=60)
    dist.send(mine, rank)
    dist.recv(theirs, rank)
    compare(theirs, np.full(3, rank, "i4"), True, "to oneself")


def check_waiting(rank: int, size: int) -> None:
    """Check that messages follow the work that their arrays' streams hold, and later work follows the messages."""
    x = cupy.zeros(1 << 22, "f4")
    y = cupy.zeros_like(x)
    for _ in range(20):
        x += 1
        works = [dist.isend(x, (rank + 1) % size), dist.irecv(y, (rank - 1) % size)]
        for work in works:
            assert work is not None
            work.wait()
        x[:] = y
    compare(x[-5:], np.full(5, 20, "f4"), True, "messages and streams")


def check_directions(size: int) -> None:
    """Check that NCCL moved the messages."""
    devices: Any = groups.world.devices()
    connected = [pair for pair, one in devices.messages._directions.items() if one.is_connected]
    assert len(connected) == 2 * (size - 1), f"NCCL carried the messages of {connected} only"


if __name__ == "__main__":
    main(*sys.argv[1:4])
