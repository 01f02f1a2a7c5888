"""Time all_reduce of float32 in each narrow type, in a group of two or more ranks on one host.

python -m fastcoll.launch -n 2 bench/travel.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import fastcoll as dist
from fastcoll.core.travel import TRAVELS


def seconds(x: np.ndarray, travel: str | None, turns: int) -> list[float]:
    """Return the times of some calls on this rank."""
    found = []
    for _ in range(turns + 2):  # the first two prepare the call
        x[:] = 1
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(x, travel=travel)
        found.append(time.perf_counter() - began)
    return found[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="tcp")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group(args.backend)
    x = np.ones(args.mib << 18, np.float32)
    times: dict[str | None, list[float]] = {travel: [] for travel in (None, *TRAVELS)}
    for _ in range(3):  # the types take turns, so that all see the same noise
        for travel, found in times.items():
            found += seconds(x, travel, args.turns)
    if dist.get_rank() == 0:
        for travel, found in times.items():
            name, median = travel or "float32", 1e3 * statistics.median(found)
            print(f"{name:9} {median:7.1f} ms (best {1e3 * min(found):.1f})", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
