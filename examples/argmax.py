"""A reduction of one's own: the largest value of all ranks together with where it is.

    python -m fastcoll.launch -n 4 examples/argmax.py

Every element is a pair (value, index). `larger` is ordinary Python; it is compiled into the same loops
as the built-in reductions.
"""

import numpy as np

import fastcoll as dist

PAIR = np.dtype([("value", np.float64), ("index", np.int64)])


def larger(a, b):
    """Of two pairs the one with the larger value; of equal ones the first, that of the lower rank."""
    return b if b["value"] > a["value"] else a


ARGMAX = dist.ReduceOp.custom(larger, "argmax")


def main():
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    table = np.random.default_rng(7).normal(size=(1000, 5)).round(1)
    mine = np.array_split(np.arange(len(table)), size)[rank]  # this rank's rows

    best = np.empty(5, PAIR)
    best["value"] = table[mine].max(axis=0)
    best["index"] = mine[table[mine].argmax(axis=0)]
    dist.all_reduce(best, ARGMAX)

    if rank == 0:
        for column, (value, index) in enumerate(best):
            print(f"column {column}: largest is {value:.1f}, first in row {index}")
        assert np.array_equal(best["index"], table.argmax(axis=0))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
