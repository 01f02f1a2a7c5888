"""Gradients across workers: the same as in one process. Also what is recorded, and what is left of it."""

import pytest
import torch

import fastcoll
from fastcoll import rpc
from fastcoll.rpc import autograd


@pytest.fixture(autouse=True)
def workers():
    rank = fastcoll.get_rank()
    torch.set_num_threads(1)
    rpc.init_rpc(f"w{rank}")
    yield
    rpc.shutdown(timeout=30)


def rand(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def add(a, b):
    return a + b


def there_and_back(to, x, y):
    """A -> B -> A."""
    return rpc.rpc_sync(to, torch.mul, args=(x, y)) + x


@pytest.mark.ranks(1, 2)
def test_a_call_is_a_part_of_the_graph():
    if fastcoll.get_rank():
        return
    x, y = rand(3), rand(3, seed=1)
    to = fastcoll.get_world_size() - 1
    with autograd.context() as context:
        loss = rpc.rpc_sync(to, add, args=(x, y * 2)).sum() + x.sum()
        autograd.backward(context, [loss])
        found = autograd.get_gradients(context)
    assert set(found) == {x, y}
    assert torch.equal(found[x], torch.full((3,), 2.0))
    assert torch.equal(found[y], torch.full((3,), 2.0))
    assert x.grad is None


@pytest.mark.ranks(2)
def test_calls_back_to_the_caller():
    if fastcoll.get_rank():
        return
    x, y = rand(3), rand(3, seed=1)
    with autograd.context() as context:
        here = x
        for _ in range(20):
            here = rpc.rpc_sync("w1", there_and_back, args=("w0", here, y)).sin() + here
        autograd.backward(context, [here.sum()])
        found = autograd.get_gradients(context)
    here = x
    for _ in range(20):
        here = (here * y + here).sin() + here
    gx, gy = torch.autograd.grad(here.sum(), [x, y])
    torch.testing.assert_close(found[x], gx)
    torch.testing.assert_close(found[y], gy)
