"""The program of a rank on a slow network: it prints its progress, a JSON object a line.

python slow_ranks.py all              each kind of call once or more, compared with NumPy
python slow_ranks.py calls FILE       all_reduce until FILE exists; prints the number of each call
python slow_ranks.py shrink VICTIM    that rank kills itself; the others shrink, and continue
"""

from __future__ import annotations

import json
import operator
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import fastcoll as dist

LIMIT = 180.0  # a call of 1 MiB took 28.7 s when twenty other processes used the cores
# Counts of float64: 8 B to 160 kB, which is more than a message carries with its header (64 KiB), and more than a
# connection's buffers take at first. With 1 MiB and lost packets, these ranks took 220 s on two busy cores.
COUNTS = (1, 1000, 20_000)


def tell(**said: Any) -> None:
    """Print a line."""
    print(json.dumps(said), flush=True)


def values(rank: int, count: int, seed: int = 0) -> np.ndarray:
    """Return integers, whose sums are exact, different on each rank."""
    return np.random.default_rng(1000 * seed + rank).integers(-1000, 1000, count).astype(np.float64)


def check(got: np.ndarray, expected: Any, what: object) -> None:
    """Raise with the name of the call if the result is wrong."""
    np.testing.assert_array_equal(got, expected, err_msg=str(what))


def collectives(rank: int, size: int) -> None:
    """Run a dozen collectives."""
    for seed, count in enumerate(COUNTS):
        everybody = [values(each, count, seed) for each in range(size)]
        x = everybody[rank].copy()
        dist.all_reduce(x)
        check(x, sum(everybody), ("all_reduce", count))
        x = everybody[rank].copy()
        dist.broadcast(x, seed % size)
        check(x, everybody[seed % size], ("broadcast", count))
    parts = [np.empty(5000) for _ in range(size)]
    dist.all_gather(parts, values(rank, 5000))
    check(np.array(parts), [values(each, 5000) for each in range(size)], "all_gather")
    mine = np.empty(3000)
    dist.reduce_scatter(mine, list(values(rank, 3000 * size).reshape(size, 3000)))
    check(mine, sum(values(each, 3000 * size) for each in range(size)).reshape(size, 3000)[rank], "scattered")
    given = np.arange(size * 4000.0) + rank
    taken = np.empty_like(given)
    dist.all_to_all_single(taken, given)
    expected = [np.arange(4000 * rank, 4000.0 * (rank + 1)) + each for each in range(size)]
    check(taken, np.concatenate(expected), "all_to_all")
    dist.barrier()


def messages(rank: int, size: int) -> None:
    """Send messages around a ring, small and large, blocking and posted."""
    right, left = (rank + 1) % size, (rank - 1) % size
    for count in (COUNTS[0], COUNTS[-1]):
        got = np.empty(count)
        sending = dist.isend(values(rank, count), right)
        dist.recv(got, left)
        sending.wait()
        check(got, values(left, count), ("recv", count))


def groups(rank: int, size: int) -> None:
    """Use groups that each rank leaves as soon as it has its result, while others may still receive theirs."""
    for count in (100, 101):
        group = dist.new_group()
        x = values(rank, count)
        dist.all_reduce(x, group=group)
        check(x, sum(values(each, count) for each in range(size)), "new_group")
        dist.destroy_process_group(group)


def calls(rank: int, size: int) -> None:
    """Make remote calls, small and large, to all ranks."""
    from fastcoll import rpc

    rpc.init_rpc(f"w{rank}")
    for to in range(size):
        for count in (3, COUNTS[-1]):
            check(rpc.rpc_sync(to, operator.neg, args=(values(rank, count),)), -values(rank, count), "rpc")
    rpc.shutdown(timeout=LIMIT)


def do_all() -> None:
    """See the top of the file; prints the seconds of each part."""
    for part in (collectives, messages, groups, calls):
        began = time.monotonic()
        part(dist.get_rank(), dist.get_world_size())
        tell(part=part.__name__, seconds=time.monotonic() - began)


def call_until(file: str) -> None:
    """See the top of the file. Rank 0 decides, and informs the others by the value that it adds."""
    x, number = np.ones(1000), 0
    while x[0] > 0:
        number += 1
        x[:] = 1.0 if dist.get_rank() or not os.path.exists(file) else -1000.0
        dist.all_reduce(x)
        assert x[0] in (dist.get_world_size(), dist.get_world_size() - 1001), x[0]
        tell(call=number)


def shrink(victim: str) -> None:
    """See the top of the file."""
    x = np.ones(1000)
    dist.all_reduce(x)
    if dist.get_rank() == int(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(x)
    except dist.PeerDiedError as error:
        tell(died=error.ranks)
    dist.shrink()
    tell(shrunk=dist.get_world_size())
    collectives(dist.get_rank(), dist.get_world_size())


def main(what: str, *words: str) -> None:
    """See the top of the file."""
    dist.init_process_group(timeout=LIMIT)
    {"all": do_all, "calls": call_until, "shrink": shrink}[what](*words)
    dist.destroy_process_group()
    tell(left=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
