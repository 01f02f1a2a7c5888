"""The heat equation on a plate: each rank has some of its rows, and all of a step, messages included, is compiled code.

    python examples/compiled/heat.py
    python -m fastcoll.launch -n 4 examples/compiled/heat.py --save plate.npy

The plate's upper edge is hot, the others are cold. In a step each inner point becomes the mean of its four neighbours,
until no point changes by more than the tolerance (Jacobi's method). The result has the same bits with any number of
ranks.
"""

from __future__ import annotations

import argparse

import numba
import numpy as np

import fastcoll as dist


@numba.njit(cache=True)
def exchange(u, rank, size):
    """Get the neighbours' rows that touch this rank's. Even ranks send first, so nobody waits in a circle."""
    above, below = rank - 1, rank + 1
    if rank % 2 == 0:
        if below < size:
            dist.send(u[-2], below)
            dist.recv(u[-1], below)
        if above >= 0:
            dist.send(u[1], above)
            dist.recv(u[0], above)
    else:
        dist.recv(u[0], above)
        dist.send(u[1], above)
        if below < size:
            dist.recv(u[-1], below)
            dist.send(u[-2], below)


@numba.njit(cache=True)
def relax(u, v):
    """Do one step from u to v; return the largest change of a point."""
    change = 0.0
    for i in range(1, u.shape[0] - 1):
        for j in range(1, u.shape[1] - 1):
            v[i, j] = 0.25 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])
            change = max(change, abs(v[i, j] - u[i, j]))
    return change


@numba.njit(cache=True)
def solve(u, tolerance, most, every):
    """Relax u, which has an extra row above and below; return the number of steps."""
    rank, size = dist.get_rank(), dist.get_world_size()
    v, change = u.copy(), np.empty(1)
    for step in range(1, most + 1):
        exchange(u, rank, size)
        change[0] = relax(u, v)
        u, v = v, u
        if step % every == 0:
            dist.all_reduce(change, dist.ReduceOp.MAX)
            if change[0] < tolerance:
                break
    if step % 2:  # the result is in the other array
        v[:] = u
    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=128, help="of a side of the plate")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="the largest change in the last step")
    parser.add_argument("--steps", type=int, default=20_000, help="at most")
    parser.add_argument("--save", help="a file for the plate")
    given = parser.parse_args()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    edges = [given.points * r // size for r in range(size + 1)]
    mine = np.zeros((edges[rank + 1] - edges[rank] + 2, given.points + 2))
    if rank == 0:
        mine[0] = 1.0
    steps = solve(mine, given.tolerance, given.steps, 10)

    rows = [np.empty((edges[r + 1] - edges[r], given.points + 2)) for r in range(size)]
    dist.gather(mine[1:-1], rows if rank == 0 else None, 0)
    if rank == 0:
        plate = np.concatenate(rows)
        print(f"{size} ranks, {steps} steps, mean temperature {plate.mean():.6f}")
        if given.save:
            np.save(given.save, plate)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
