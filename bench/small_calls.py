"""Measure the processor time of small collectives between hosts, which are network namespaces of this machine.

    python bench/small_calls.py                              # 4 hosts, 8 ranks on each
    python bench/small_calls.py --hosts 2 --library gloo     # with torch

Needs root and iproute2 (tests/hosts/network.py).
"""

from __future__ import annotations

import argparse
import importlib
import os
import secrets
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROUNDS, CALLS = 5, 20


def run_rank(library: str) -> None:
    """Run one rank; rank 0 prints the median over the rounds."""
    dist = importlib.import_module("torch.distributed" if library == "gloo" else "fastcoll")
    array: Any = importlib.import_module("torch").from_numpy if library == "gloo" else np.asarray
    dist.init_process_group("gloo" if library == "gloo" else "auto")
    rank, size = dist.get_rank(), dist.get_world_size()
    x = array(np.ones(1))
    blocks = [array(np.ones(1)) for _ in range(size)]
    of_root = blocks if rank == 0 else None
    for name, *arguments in (
        ("barrier",),
        ("all_reduce", x),
        ("reduce", x, 0),
        ("broadcast", x, 0),
        ("all_gather", blocks, x),
        ("reduce_scatter", x, blocks),
        ("gather", x, of_root, 0),
        ("scatter", x, of_root, 0),
    ):
        rounds = []
        for _ in range(ROUNDS + 1):  # the first one makes connections
            dist.barrier()
            spent, began = time.process_time(), time.perf_counter()
            for _ in range(CALLS):
                getattr(dist, name)(*arguments)
            dist.barrier()
            took, total = time.perf_counter() - began, array(np.array([time.process_time() - spent]))
            dist.all_reduce(total)
            rounds.append((1e3 * float(total[0]) / CALLS, 1e3 * took / CALLS))
        if rank == 0:
            spent, took = (median(each) for each in zip(*rounds[1:], strict=True))
            print(f"| {name} | {library} | {spent:.2f} | {took:.2f} |", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--library", choices=["fastcoll", "gloo"], default="fastcoll")
    parser.add_argument("--hosts", type=int, default=4, help="default: 4")
    parser.add_argument("-n", "--ranks", type=int, default=8, help="on each host (default: 8)")
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.library)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from hosts.network import Network
    from hosts.nodes import finish, launched, output_of

    env = {"FASTCOLL_SECRET": secrets.token_hex(32), "GLOO_SOCKET_IFNAME": "eth0"}
    print(
        "| operation, 8 B | library | processor time of all ranks, ms a call | time, ms a call |\n|---|---|--:|--:|"
    )
    words = [__file__, "--library", options.library]
    with Network(options.hosts) as network, launched(network, options.ranks, words, env) as nodes:
        finish(nodes)
        if any(node.code for node in nodes):
            raise SystemExit(output_of(nodes))
        print(nodes[0].out.replace("[0] ", ""), end="")


if __name__ == "__main__":
    main()
