"""Ray actors with collectives over fastcoll, and Ray Train over fastcoll. The only argument is its folder."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.util import collective
from ray.util.collective.types import ReduceOp

SUMS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


@ray.remote(num_cpus=1)
class Actor:
    def pid(self) -> int:
        return os.getpid()

    def all_of_them(self, rank: int, kind: str) -> None:
        """Run every operation, on arrays and tensors, in consecutive groups of the same name."""
        full = torch.full if kind == "tensor" else np.full
        for _ in range(2):
            collective.init_collective_group(2, rank, "fastcoll", kind)
            for op, expected in zip(SUMS, (5, 6, 2, 3), strict=True):
                x = full((3,), rank + 2.0)
                collective.allreduce(x, kind, op)
                assert (x == expected).all(), (op, x)
            collective.broadcast(x := full((3,), rank + 2.0), 1, kind)
            assert (x == 3).all()
            collective.reduce(x := full((3,), rank + 2.0), 1, kind, ReduceOp.PRODUCT)
            assert (x == (2, 6)[rank]).all()
            collective.allgather(outs := [full((2,), 0.0) for _ in range(2)], full((2,), rank + 1.0), kind)
            assert [float(out[1]) for out in outs] == [1, 2]
            collective.reducescatter(out := full((2,), 0.0), [full((2,), rank + 1.0), full((2,), 5.0)], kind)
            assert (out == (3, 10)[rank]).all()
            collective.barrier(kind)
            if rank:
                collective.recv(out, 0, kind)
                assert (out == 7).all()
            else:
                collective.send(full((2,), 7.0), 1, kind)
            group = collective.get_group_handle(kind)
            with pytest.raises(RuntimeError, match="allreduce_multigpu: a process has 2 arrays"):
                group.allreduce([out, out])
            collective.destroy_collective_group(kind)
            group.destroy_group()

    def declared(self, rank: int, times: int) -> float:
        """Make a call in a group that the driver has declared."""
        for _ in range(times):
            x = np.full(3, rank + 1.0)
            collective.allreduce(x, "declared")
        return float(x[0])


def actors() -> None:
    ranks = [Actor.remote() for _ in range(2)]
    for kind in ("array", "tensor"):
        ray.get([actor.all_of_them.remote(rank, kind) for rank, actor in enumerate(ranks)])
    collective.create_collective_group(ranks, 2, [0, 1], "fastcoll", "declared")
    assert ray.get([actor.declared.remote(rank, 1) for rank, actor in enumerate(ranks)]) == [3, 3]
    pid = ray.get(ranks[1].pid.remote())
    waits = ranks[0].declared.remote(0, 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=f"PeerDiedError: rank 1 .pid {pid} .* died"):
        ray.get(waits)
    ray.kill(ranks[0])


def train(config: dict[str, Any]) -> None:
    """Train by DDP in Ray's worker; write the last loss to a file."""
    import ray.train.torch

    torch.manual_seed(0)
    net = ray.train.torch.prepare_model(torch.nn.Linear(8, 1))
    step = torch.optim.SGD(net.parameters(), 0.1)
    rank = torch.distributed.get_rank()
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(rank))
    for _ in range(5):
        step.zero_grad()
        loss = torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True))
        loss.backward()
        step.step()
    kind = type(torch.distributed.group.WORLD).__name__
    Path(config["folder"], f"rank-{rank}").write_text(f"{kind} {loss.item()}")


def losses() -> list[float]:
    """Train as both ranks together, with the mean of their gradients; return the last loss of each rank."""
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    step = torch.optim.SGD(net.parameters(), 0.1)
    both = [torch.randn(32, 8, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    for _ in range(5):
        step.zero_grad()
        found = [torch.nn.functional.mse_loss(net(x), x.sum(1, keepdim=True)) for x in both]
        (sum(found) / 2).backward()
        step.step()
    return [loss.item() for loss in found]


def trainers(folder: str) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=f"{folder}/storage",
            worker_runtime_env={"env_vars": {"FASTCOLL_TORCH_DEFAULT": "gloo"}},
        ),
    ).fit()
    for rank, expected in enumerate(losses()):
        kind, loss = Path(folder, f"rank-{rank}").read_text().split()
        assert kind == "FastcollProcessGroup"
        assert float(loss) == pytest.approx(expected, rel=1e-5)


if __name__ == "__main__":
    ray.init(
        num_cpus=4,  # one is for Train's controller
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": "fastcoll.ray.register"},
    )
    import fastcoll.ray  # noqa: F401 - Ray looks for the backend in the driver, too

    actors()
    sys.stdout.write("actors did it\n")
    trainers(sys.argv[1])
    sys.stdout.write("trainers did it\n")
