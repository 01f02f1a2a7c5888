"""The tour, second stop: send an array from rank 0 to rank 1.

    python -m fastcoll.launch -n 2 examples/tour_send_recv.py

Both calls return when the array has arrived.
"""

import numpy as np

import fastcoll as dist


def main():
    dist.init_process_group()
    if dist.get_rank() == 0:
        array = np.arange(16.0).reshape(4, 4)
        dist.send(array, dst=1)
    elif dist.get_rank() == 1:
        array = np.zeros((4, 4))  # a place for it: the shape and dtype have to match
        dist.recv(array, src=0)
        print("Received array:", array, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
