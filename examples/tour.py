"""The tour of docs/tour.md as one program.

python -m fastcoll.launch -n 2 examples/tour.py
"""

import asyncio

import numpy as np

import fastcoll as dist

dist.init_process_group()  # returns when all ranks have joined
rank, size = dist.get_rank(), dist.get_world_size()
print(f"I am rank {rank} of {size}, on the backend {dist.get_backend()}")


x = np.full(3, rank + 1.0)
dist.all_reduce(x)  # x is the sum over all ranks, on every rank
assert (x == size * (size + 1) / 2).all()

y = np.arange(3.0) if rank == 0 else np.empty(3)
dist.broadcast(y, src=0)  # y is rank 0's array, on every rank
assert y.tolist() == [0, 1, 2]

highest = np.array([rank])
dist.all_reduce(highest, op=dist.ReduceOp.MAX)
assert highest[0] == size - 1

gradients = {"weight": np.full((2, 3), rank + 1.0), "bias": [np.full(3, rank + 1.0, np.float32)]}
dist.all_reduce(gradients, op=dist.ReduceOp.AVG)
assert gradients["bias"][0][0] == (size + 1) / 2

gathered = dist.all_gather(np.full(rank + 1, float(rank)))
assert [part.tolist() for part in gathered] == [[r] * (r + 1) for r in range(size)]

parts = [np.empty(r + 1) for r in range(size)]
dist.all_gather(parts, np.full(rank + 1, float(rank)))
assert [part.tolist() for part in parts] == [[r] * (r + 1) for r in range(size)]

table = np.empty((size, 2))  # or one array, for equal sizes
dist.all_gather_into_tensor(table, np.full(2, float(rank)))
assert table[:, 0].tolist() == list(range(size))


if rank == 0:
    dist.send(np.arange(16.0).reshape(4, 4), dst=1)
elif rank == 1:
    grid = np.empty((4, 4))
    sender = dist.recv(grid, src=0)  # without src: from the rank whose message arrives first
    assert sender == 0
    assert grid[3, 3] == 15


right, left = (rank + 1) % size, (rank - 1) % size
out, arrived = np.array([rank]), np.empty(1, int)
ops = [dist.P2POp(dist.isend, out, right), dist.P2POp(dist.irecv, arrived, left)]
for work in dist.batch_isend_irecv(ops):
    work.wait()
assert arrived[0] == left


gradient = np.full(100_000, rank + 1.0)
work = dist.all_reduce(gradient, op=dist.ReduceOp.AVG, async_op=True)
# ... compute something else ...
work.wait()  # raises if the call has failed
assert (gradient == (size + 1) / 2).all()


async def main():
    await dist.all_reduce(gradient, async_op=True)  # a Work can be awaited


asyncio.run(main())


even = dist.new_group(range(0, size, 2))  # on other ranks: GroupMember.NON_GROUP_MEMBER
if even is not dist.GroupMember.NON_GROUP_MEMBER:
    count = np.ones(1)
    dist.all_reduce(count, group=even)
    assert count[0] == dist.get_world_size(even)


hosts = [None] * size
dist.all_gather_object(hosts, {"rank": rank, "host": "here"})
assert hosts[size - 1]["rank"] == size - 1


dist.destroy_process_group()
