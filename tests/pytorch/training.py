"""Training over fastcoll compared with Gloo, and torch's features that use collectives. Checks for two ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from fastcoll import profile
from fastcoll.core.group import ProcessGroup
from fastcoll.core.profiler import later_wait
from fastcoll.core.work import Work
from fastcoll.errors import UsageError
from fastcoll.net.tcp.backend import TcpBackend
from fastcoll.store.views import TorchStore
from fastcoll.torch import hooks
from fastcoll.torch.process_group import FastcollProcessGroup
from pytorch import pair
from pytorch.pair import data, equal, rank, size

Wrap = Callable[[nn.Module, Any], nn.Module]


class Net(nn.Module):
    """A model with a buffer, and a branch that may be skipped."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.side = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, side: bool = True) -> torch.Tensor:
        y = self.last(torch.relu(self.norm(self.first(x))))
        return y + self.side(x) if side else y


def train(
    group: Any,
    wrap: Wrap,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    net: Callable[[], nn.Module] = Net,
    batches: Sequence[tuple[torch.Tensor, Any]] = (),
    steps: int = 4,
    uneven: bool = False,
    **forward: Any,
) -> list[float]:
    """Return the losses of some steps; all ranks start with the same model and have different data."""
    torch.manual_seed(1)
    model = wrap(net(), group)
    opt = optimizer(model.parameters(), lr=0.1)
    torch.manual_seed(2 + rank())
    xs = [torch.randn(16, 8) for _ in range(steps)]
    losses = []
    with model.join() if uneven else nullcontext():
        for x, y in batches or [(x, x.sum(1, keepdim=True)) for x in xs]:
            opt.zero_grad()
            loss = (model(x, **forward) - y).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
    return losses


def agree(run: Callable[[Any], list[float]]) -> None:
    """Check that the losses over both groups are equal, and decrease."""
    ours, gloo = run(pair.OURS), run(pair.GLOO)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(gloo), rtol=1e-5, atol=0)
    assert ours[-1] < ours[0]


def ddp(model: nn.Module, group: Any, bucket_mb: float = 1e-4, **options: Any) -> DistributedDataParallel:
    """Wrap a model in DDP with buckets of some 100 bytes, so that the first are reduced during the backward pass."""
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb, **options)


def check_ddp_trains_as_over_gloo() -> None:
    agree(partial(train, wrap=ddp))
    agree(partial(train, wrap=partial(ddp, static_graph=True, gradient_as_bucket_view=True)))
    agree(partial(train, wrap=partial(ddp, find_unused_parameters=True), side=False))


def check_ddp_with_hooks() -> None:
    def halves(model: nn.Module, group: Any) -> nn.Module:
        wrapped = ddp(model, group)
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
        return wrapped

    def low_rank(model: nn.Module, group: Any) -> nn.Module:
        wrapped = ddp(model, group, bucket_mb=1)  # with several buckets this hook's order of calls differs
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    agree(partial(train, wrap=halves))
    agree(partial(train, wrap=low_rank, steps=6))


def check_ddp_with_gradients_that_travel_in_narrow_types() -> None:
    """The state is a group over TCP, because nothing is rounded in shared memory.

    The losses differ from those of float32 by at most 0.2 % of the first loss.
    """
    ours = pair.OURS.fastcoll
    store = TorchStore(dist.PrefixStore("travel", dist.distributed_c10d._get_default_store()))
    backend = TcpBackend.make(store, "travel", ours.monitor.members, ours.rank, 60.0)
    over_tcp = FastcollProcessGroup(ProcessGroup(backend), store)
    exact = torch.tensor(train(pair.OURS, ddp, steps=20))

    def losses(name: str, state: Any, **options: Any) -> torch.Tensor:
        def wrap(model: nn.Module, group: Any) -> nn.Module:
            wrapped = ddp(model, group, bucket_mb=1e-3)
            wrapped.register_comm_hook(state, hooks.travel(name, **options))
            return wrapped

        return torch.tensor(train(pair.OURS, wrap, steps=20))

    try:
        for name in ("bfloat16", "float16", "int8"):
            for feedback in (True, False):
                found = losses(name, over_tcp, feedback=feedback)
                assert not torch.equal(found, exact), f"{name}: gradients have travelled as float32"
                torch.testing.assert_close(found, exact, rtol=0, atol=0.002 * float(exact[0]))
        equal(losses("int8", pair.OURS), exact)
    finally:
        over_tcp.fastcoll.close()
    with pytest.raises(UsageError, match="group of the backend fastcoll"):
        hooks.travel("int8")(pair.GLOO, None)
    with pytest.raises(UsageError, match="travel is 'int4'"):
        hooks.travel("int4")


def check_ddp_with_uneven_inputs() -> None:
    batches = [(torch.full((2, 4), 0.1 * step + rank()), 1) for step in range(3 + 2 * rank())]
    for unused in (False, True):
        wrap = partial(ddp, find_unused_parameters=unused)
        agree(partial(train, wrap=wrap, net=partial(nn.Linear, 4, 1), batches=batches, uneven=True))


def check_ddp_with_sparse_gradients() -> None:
    batches = [(torch.tensor([rank(), step % 2, 7]), 1) for step in range(4)]

    def net() -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))

    agree(partial(train, wrap=ddp, net=net, batches=batches))


def check_zero_trains_as_over_gloo() -> None:
    zero = partial(ZeroRedundancyOptimizer, optimizer_class=torch.optim.Adam)
    agree(lambda group: train(group, ddp, partial(zero, process_group=group)))


def check_fsdp_trains_as_over_gloo() -> None:
    def sharded(model: nn.Module, group: Any) -> nn.Module:
        mesh = DeviceMesh.from_group(group, "cpu")
        fully_shard(model.first, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    agree(partial(train, wrap=sharded))


def check_functional_collectives_on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (size(),), mesh_dim_names=("all",))
    ours = mesh.get_group()
    assert dist.get_backend(ours) == "fastcoll"
    x = data(torch.float32, size() * 2)

    def results(group: Any) -> list[torch.Tensor]:
        return [
            functional.all_reduce(x, "sum", group) + 0,
            functional.all_gather_single(x, 0, group) + 0,
            functional.reduce_scatter_single(x, "sum", 0, group) + 0,
            functional.all_to_all_single(x, None, None, group) + 0,
            functional.broadcast(x, 1, group) + 0,
            *(out + 0 for out in functional.all_reduce_coalesced([x, x + 1], "sum", group)),
        ]

    equal(results(ours), results(pair.GLOO))

    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", ours) + 1

    equal(torch.compile(step, backend="aot_eager", fullgraph=True)(x), step(x))


def check_compiled_functions_around_collectives() -> None:
    """Calls that torch.compile cannot put into its graph run between two graphs."""

    def step(x: torch.Tensor, group: Any) -> torch.Tensor:
        y = x + 1
        dist.broadcast(y, 0, group)
        dist.all_reduce(y, group=group, async_op=True).wait()
        other = torch.empty_like(y)
        if rank() == 0:
            dist.send(y * 2, 1, group)
            dist.recv(other, 1, group)
        else:
            dist.recv(other, 0, group)
            dist.send(y * 3, 0, group)
        return other + 1

    x = data(torch.float32, 5)
    equal(torch.compile(step, backend="eager")(x, pair.OURS), step(x, pair.GLOO))

    def compiled(model: nn.Module, group: Any) -> nn.Module:
        return torch.compile(ddp(model, group, bucket_mb=1), backend="eager")

    assert train(pair.OURS, compiled, steps=2) == pytest.approx(train(pair.GLOO, ddp, steps=2), rel=1e-5)


def check_a_profile_has_every_call_and_the_waits_of_ddp() -> None:
    """Rank 1 begins backward() when the wait of rank 0 for the all_reduce of the gradients has begun."""
    group, store, x = pair.OURS, dist.distributed_c10d._get_default_store(), torch.ones(64)
    model = ddp(nn.Linear(4, 4), group)
    begun = f"begun-{group.group_name}"

    def announced(work: Work) -> Callable[[], None]:
        begin = later_wait(work)

        def begin_and_announce() -> None:
            begin()
            store.set(begun, "1")

        return begin_and_announce

    loss = model(torch.ones(1, 4)).sum()
    dist.barrier(group)
    with profile() as run:
        for _ in range(5):
            dist.all_reduce(x, group=group)
        functional.wait_tensor(functional.all_gather_tensor(x, 0, group))
        for _ in range(6):
            dist.send(x, 1, group) if rank() == 0 else dist.recv(x, 0, group)
        dist.barrier(group)
        if rank() == 1:
            store.wait([begun], pair.TIMEOUT)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("fastcoll.torch.work.later_wait", announced)
            loss.backward()
    merged = run.merged().as_dict()
    assert [each["rank"] for each in merged["ranks"]] == [0, 1]
    calls = {(each["operation"], each["most_bytes"]): each for each in merged["entries"]}
    both = {0: 6, 1: 6}
    assert calls["all_reduce", 256]["calls"] == {0: 5, 1: 5}
    assert calls["all_gather (beside)", 256]["nbytes"] == {0: 256, 1: 256}
    assert calls["isend", 256]["calls"] | calls["irecv", 256]["calls"] == both
    assert calls["wait for isend or irecv", 256]["calls"] == both
    waits = [each["seconds"] for each in merged["entries"] if each["operation"] == "wait for all_reduce"]
    assert sum(seconds.get(0, 0.0) for seconds in waits) > 0
    sizes = {size for name, size in calls if name == "wait for all_gather"}
    assert sizes <= {256}  # there is no row if the call was complete at once
