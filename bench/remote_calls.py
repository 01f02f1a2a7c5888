"""Remote calls of fastcoll and of torch.distributed (TensorPipe): one worker calls another.

    python bench/remote_calls.py
    python bench/remote_calls.py --rounds 5 --seconds 1

The libraries run in turn, each in two processes of its own, because TensorPipe's threads poll all the time and would
take the cores from the other library. In a round, a time is the median over calls, and the CPU time is the mean per
call, of both workers together; the table has the medians over the rounds. The large payload is a NumPy array for
fastcoll, a tensor for torch.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from fastcoll import spawn
from fastcoll.bench.results import describe, machine

FLIGHT = 64


def nothing() -> None:
    """Do nothing: the function of an empty call."""


def back(x: Any) -> Any:
    """Return the payload, so that it is sent both ways."""
    return x


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of each library (default 3)")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each case and round (default 0.5)")
    parser.add_argument("--mib", type=float, default=16, help="of the payload each way (default 16)")
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    times: dict[str, list[Any]] = {"fastcoll": [], "torch": []}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(given.rounds):
            for library in times if turn % 2 else reversed(times):
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                file = Path(folder) / f"{library}{turn}"
                spawn(run, args=(library, port, given, str(file)), nprocs=2)
                times[library].append(np.loadtxt(file))
    medians = {library: np.median(rounds, axis=0) for library, rounds in times.items()}
    print("# Remote calls, two workers, beside torch\n")
    print(f"- Machine: {describe(machine(len(os.sched_getaffinity(0))))}")
    print(f"- Command: `python {' '.join(sys.argv)}`\n")
    print("| case | fastcoll, µs | torch, µs | torch / fastcoll | processor time: fastcoll, µs | torch, µs |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, ours, theirs in zip(CASES, medians["fastcoll"], medians["torch"], strict=True):
        wall = f"{ours[0]:.1f} | {theirs[0]:.1f} | {theirs[0] / ours[0]:.2f}"
        print(f"| {name.format(given.mib)} | {wall} | {ours[1]:.1f} | {theirs[1]:.1f} |")
    return 0


def run(rank: int, library: str, port: int, given: argparse.Namespace, file: str) -> None:
    """Run a worker; rank 0 calls, measures, and writes the times to the file."""
    payload: Any = np.ones(int(given.mib * 2**20) // 4, np.float32)
    if library == "fastcoll":
        import fastcoll.rpc as rpc
    else:
        import torch
        import torch.distributed.rpc as rpc  # type: ignore[no-redef]

        payload = torch.from_numpy(payload)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"tcp://127.0.0.1:{port}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        found = [measure(given.seconds, rpc, case(rpc, payload)) / count for case, count in CASES.values()]
        np.savetxt(file, 1e6 * np.array(found))
    rpc.shutdown()


def empty(rpc: Any, _: Any) -> Callable[[], object]:
    return lambda: rpc.rpc_sync("worker1", nothing)


def small_tensor(rpc: Any, _: Any) -> Callable[[], object]:
    import torch

    return there_and_back(rpc, torch.ones(1))


def remote_value(rpc: Any, _: Any) -> Callable[[], object]:
    return lambda: rpc.remote("worker1", nothing).to_here()


def there_and_back(rpc: Any, payload: Any) -> Callable[[], object]:
    assert bool((rpc.rpc_sync("worker1", back, args=(payload,)) == payload).all())
    return lambda: rpc.rpc_sync("worker1", back, args=(payload,))


def in_flight(rpc: Any, _: Any) -> Callable[[], object]:
    def call() -> None:
        futures = [rpc.rpc_async("worker1", nothing) for _ in range(FLIGHT)]
        for future in futures:
            future.wait()

    return call


CASES = {
    "an empty call": (empty, 1),
    "a tensor of one element each way": (small_tensor, 1),
    "`remote` and `to_here`": (remote_value, 1),
    "{:g} MiB each way": (there_and_back, 1),
    f"each of {FLIGHT} empty calls in flight": (in_flight, FLIGHT),
}


def measure(seconds: float, rpc: Any, call: Callable[[], object]) -> Any:
    """Return the seconds of the median call, and the CPU seconds of a call on both workers."""
    warm = perf_counter() + 0.2 * seconds
    while perf_counter() < warm:
        call()
    times = []
    used = process_time() + rpc.rpc_sync("worker1", process_time)
    end = perf_counter() + seconds
    while (began := perf_counter()) < end:
        call()
        times.append(perf_counter() - began)
    used = process_time() + rpc.rpc_sync("worker1", process_time) - used
    return np.array([np.median(times), used / len(times)])


if __name__ == "__main__":
    sys.exit(main())
