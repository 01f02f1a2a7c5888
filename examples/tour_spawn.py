"""The tour, first stop: four processes meet.

    python examples/tour_spawn.py

`spawn` starts the processes; MASTER_ADDR and MASTER_PORT say where they meet.
"""

import os

import fastcoll as dist


def main(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    print(f"Worker {rank} ready", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "23456")
    dist.spawn(main, args=(4,), nprocs=4, join=True)
