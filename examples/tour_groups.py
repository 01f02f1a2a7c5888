"""The tour, last stop: a collective among some of the ranks only.

    python -m fastcoll.launch -n 4 examples/tour_groups.py

All ranks make the group; only its members take part in its calls.
"""

import numpy as np

import fastcoll as dist


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    pair = dist.new_group(ranks=[0, 1])

    array = np.full((4, 4), float(rank + 1))
    if pair is not dist.GroupMember.NON_GROUP_MEMBER:
        dist.all_reduce(array, op=dist.ReduceOp.SUM, group=pair)
    print(f"Rank {rank}: {array.sum():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
