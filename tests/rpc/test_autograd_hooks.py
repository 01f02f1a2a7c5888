"""DistributedDataParallel with autograd across workers: its reducer gets the gradients, `.grad` does not change."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastcoll.torch  # noqa: F401
from fastcoll import rpc
from fastcoll.rpc import autograd

pytestmark = [pytest.mark.long, pytest.mark.ranks(1, init=False)]


@pytest.fixture(autouse=True)
def alone():
    """A group of torch and a worker."""
    dist.init_process_group("fastcoll", store=dist.HashStore(), rank=0, world_size=1)
    rpc.init_rpc("alone", rank=0, world_size=1)
    yield
    rpc.shutdown(timeout=100)
    dist.destroy_process_group()


@pytest.mark.parametrize("bucket_view", [False, True])
def test_ddp_sees_the_gradients_of_a_context(bucket_view):
    layer = torch.nn.Linear(3, 2)
    ddp = DistributedDataParallel(layer, gradient_as_bucket_view=bucket_view)
    ddp.register_comm_hook(None, doubled)
    ran = []
    layer.bias.register_hook(ran.append)
    layer.bias.grad = kept = torch.ones(2)
    found = []
    for scale in (1.0, 2.0):
        with autograd.context() as context:
            autograd.backward(context, [scale * ddp(torch.ones(4, 3)).sum()])
            found.append(autograd.get_gradients(context))
    assert [each[layer.weight].tolist() for each in found] == [[[8.0] * 3] * 2, [[16.0] * 3] * 2]
    assert [each[layer.bias].tolist() for each in found] == [[8.0] * 2, [16.0] * 2]
    assert len(ran) == 2  # once in each pass
    if not bucket_view:  # with bucket views DDP itself makes `.grad` a view of a bucket
        assert layer.bias.grad is kept
        assert layer.weight.grad is None


def test_a_sparse_gradient_passes_in_a_process_that_has_a_group():
    table = torch.nn.Embedding(5, 2, sparse=True)
    with autograd.context() as context:
        autograd.backward(context, [table(torch.tensor([3, 3])).sum()])
        gradient = autograd.get_gradients(context)[table.weight]
    assert gradient.is_sparse
    assert gradient.to_dense().tolist() == [[0.0, 0.0]] * 3 + [[2.0, 2.0], [0.0, 0.0]]
    assert table.weight.grad is None


def doubled(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future
