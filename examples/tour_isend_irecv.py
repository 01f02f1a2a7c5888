"""The tour, third stop: work goes on while an array is on its way.

    python -m fastcoll.launch -n 2 examples/tour_isend_irecv.py

Between isend or irecv and wait() the array belongs to the transfer: do not touch it.
"""

import numpy as np

import fastcoll as dist


def main():
    dist.init_process_group()
    rank = dist.get_rank()
    if rank == 0:
        array = np.arange(16.0).reshape(4, 4)
        request = dist.isend(array, dst=1)
    else:
        array = np.zeros((4, 4))
        request = dist.irecv(array, src=0)

    other_work = sum(number * number for number in range(100_000))

    request.wait()
    if rank == 1:
        print("Received array:", array, sep="\n")
    print(f"Rank {rank} also found {other_work}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
