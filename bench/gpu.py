"""The cost of GPU arrays on one GPU.

    python bench/gpu.py                         # a table
    python bench/gpu.py --json gpu.json

| row    | what is measured                                                               | aim         |
|--------|--------------------------------------------------------------------------------|-------------|
| reduce | bandwidth (bytes read and written per second) of the sum of two arrays of      | >= 85 %     |
|        | 256 MiB (float32), over that of a device-to-device copy of 256 MiB             |             |
| ipc    | all_reduce of 64 MiB, two ranks on one GPU: shared GPU memory (backend shm)    | >= 3 times  |
|        | against staging through pinned host memory (same backend)                      | as fast     |
| nccl   | the same all_reduce by NCCL, whose ranks share the GPU as if they were on two hosts: | (none)      |
|        | it moves the data through its network, so this is no comparison with NCCL on two GPUs |            |
| launch | host time of CudaReducer.launch on 4 elements, until the kernel is queued      | < 30 us     |

Needs one GPU and CuPy. The times of kernels and copies are measured by CUDA events; the times of collectives by the
host's clock, from before the call until the result is on the GPU, on the slowest rank. All are medians over repetitions
after a warm-up. Every result is checked. No other process may use the GPU meanwhile.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

REDUCE_BYTES = 256 << 20
ALL_REDUCE_BYTES = 64 << 20
REPEATS = 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--tiny", action="store_true", help="with arrays of 1 MiB, to try this program")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        global REDUCE_BYTES, ALL_REDUCE_BYTES
        REDUCE_BYTES = ALL_REDUCE_BYTES = 1 << 20
    if options.rank_of:
        return rank_of(options.rank_of)
    found: dict[str, Any] = {"machine": machine()}
    for name, measure in (("reduce", reduce), ("launch", launch), ("ipc", all_reduce)):
        found[name] = measure()
        print(f"{name}: {found[name]}", flush=True)  # in case that a later one hangs
    print("\n".join(table(found)))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def machine() -> dict[str, Any]:
    import cupy

    from fastcoll.bench.results import machine as host

    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        **host(len(os.sched_getaffinity(0))),
        "gpu": properties["name"].decode(),
        "cupy": cupy.__version__,
        "cuda_driver": runtime.driverGetVersion(),
        "cuda_runtime": runtime.runtimeGetVersion(),
        "multiprocessors": properties["multiProcessorCount"],
    }


def seconds_on_gpu(does: Callable[[], Any]) -> float:
    """Return the median seconds of `does`, by events of the current stream."""
    import cupy

    times = []
    for number in range(REPEATS + 3):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        does()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return median(times)


def reduce() -> dict[str, Any]:
    """Measure the bandwidth of the reduce kernel and of a copy."""
    import cupy

    from fastcoll.core.reduce_op import ReduceOp
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    # The values are not random, because random values need cuRAND, which none of fastcoll's extras installs.
    a, b = (cupy.arange(REDUCE_BYTES // 4, dtype="f4") % prime for prime in (997, 1009))
    out = cupy.zeros_like(a)
    stream, sum_of = cupy.cuda.get_current_stream().ptr, cuda_reducer(ReduceOp.SUM, a.dtype)

    def copy() -> None:
        cupy.cuda.runtime.memcpyAsync(out.data.ptr, a.data.ptr, REDUCE_BYTES, 3, stream)

    copying = seconds_on_gpu(copy)
    assert (out == a).all()
    addresses = (a.data.ptr, b.data.ptr)
    reducing = seconds_on_gpu(lambda: sum_of.launch(out.data.ptr, addresses, a.size, stream))
    assert (out == a + b).all()
    rates = {"copy_gb_s": 2 * REDUCE_BYTES / copying / 1e9, "reduce_gb_s": 3 * REDUCE_BYTES / reducing / 1e9}
    return {**rates, "fraction": rates["reduce_gb_s"] / rates["copy_gb_s"]}


def launch() -> dict[str, Any]:
    """Measure the host time of one launch on an idle GPU."""
    import cupy

    from fastcoll.core.reduce_op import ReduceOp
    from fastcoll.kernels.cuda.reducers import cuda_reducer

    x, y = cupy.ones(4, "f4"), cupy.ones(4, "f4")
    stream, sum_of = cupy.cuda.get_current_stream(), cuda_reducer(ReduceOp.SUM, x.dtype)
    times = []
    for _ in range(200):
        stream.synchronize()
        begin = time.perf_counter()
        sum_of.launch(x.data.ptr, (x.data.ptr, y.data.ptr), 4, stream.ptr)
        times.append(time.perf_counter() - begin)
    assert (x == 201).all()
    return {"microseconds": 1e6 * median(times)}


def all_reduce() -> dict[str, Any]:
    """Measure two ranks in separate processes: with shared GPU memory, staged, and by NCCL."""
    found, tiny = {}, ["--tiny"] * (ALL_REDUCE_BYTES <= 1 << 20)
    for how in ("ipc", "staged", "nccl"):
        launch = [sys.executable, "-m", "fastcoll.launch", "--no_prefix", "-n", "2"]
        command = [*launch, __file__, *tiny, "--rank-of", how]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
            found[how] = max(float(line) for line in done.stdout.split())
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            if how != "nccl":
                raise
            print(f"nccl: {error}", flush=True)  # the other figures stand without it
            found[how] = math.nan
    milliseconds = {f"{how}_ms": 1e3 * seconds for how, seconds in found.items()}
    return {**milliseconds, "times_as_fast": found["staged"] / found["ipc"]}


def rank_of(how: str) -> int:
    """Run one of two ranks, which prints the median seconds of a call."""
    import cupy

    import fastcoll as dist
    from fastcoll.gpu import carriers
    from fastcoll.gpu.staged import StagedCarrier
    from fastcoll.job.groups import groups

    if how == "staged":
        carriers.carrier_for = lambda backend, group: StagedCarrier(group)
    if how == "nccl":
        os.environ["NCCL_HOSTID"] = f"rank-{os.environ['RANK']}"
    dist.init_process_group("nccl" if how == "nccl" else "shm", timeout=120)
    x = cupy.ones(ALL_REDUCE_BYTES // 4, "f4")
    times = []
    for number in range(REPEATS + 3):
        x.fill(1)
        cupy.cuda.get_current_stream().synchronize()
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(x)
        cupy.cuda.get_current_stream().synchronize()
        if number >= 3:
            times.append(time.perf_counter() - begin)
        assert (x == 2).all()
    carrier = carriers.carrier_name(groups.world)
    assert carrier == {"ipc": "IpcCarrier", "staged": "StagedCarrier", "nccl": "NcclCarrier"}[how], carrier
    print(median(times), flush=True)
    dist.destroy_process_group()
    return 0


def table(found: dict[str, Any]) -> list[str]:
    on, reduced, ipc = found["machine"], found["reduce"], found["ipc"]
    return [
        f"{on['gpu']}, driver {on['cuda_driver']}, CuPy {on['cupy']}, {on['cpu']}, fastcoll {on['fastcoll']}",
        "",
        "| what | measured | aim | |",
        "|---|--:|--:|---|",
        _row(
            "sum of two arrays of 256 MiB, of a copy's bandwidth "
            f"({reduced['reduce_gb_s']:.0f} of {reduced['copy_gb_s']:.0f} GB/s)",
            f"{100 * reduced['fraction']:.0f} %", ">= 85 %", reduced["fraction"] >= 0.85,
        ),
        _row(
            f"all_reduce of 64 MiB, 2 ranks on one GPU, against staging ({ipc['ipc_ms']:.2f} and "
            f"{ipc['staged_ms']:.2f} ms)",
            f"{ipc['times_as_fast']:.1f} times as fast", ">= 3", ipc["times_as_fast"] >= 3,
        ),
        f"| the same by NCCL's network | {ipc['nccl_ms']:.2f} ms | | |",
        _row(
            "from Python to a queued kernel",
            f"{found['launch']['microseconds']:.1f} us", "< 30 us", found["launch"]["microseconds"] < 30,
        ),
    ]  # fmt: skip


def _row(what: str, measured: str, aim: str, reached: bool) -> str:
    return f"| {what} | {measured} | {aim} | {'reached' if reached else 'missed'} |"


if __name__ == "__main__":
    sys.exit(main())
