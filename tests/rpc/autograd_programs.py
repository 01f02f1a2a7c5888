"""Forward passes over several workers. The same passes in one process are the oracle of their gradients.

A program calls `there(worker, function, *args)` to run a function on a worker with that worker's weights.
"""

from __future__ import annotations

import random
from contextlib import contextmanager

import torch

from fastcoll import rpc
from fastcoll.rpc import autograd

WIDTH = 4
_weights = {}


def weights(worker):
    """Return the weights of a worker, equal in every process: the oracle uses all, each worker its own."""
    if worker not in _weights:
        generator = torch.Generator().manual_seed(worker)
        _weights[worker] = [
            (0.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()
            for shape in [(WIDTH, WIDTH)] * 6 + [(WIDTH,)] * 2
        ]
    return _weights[worker]


def forget():
    """Reset to the initial weights."""
    _weights.clear()


@contextmanager
def others(weights_of_all):
    """Replace the weights of the workers, in the order of the workers."""
    before = dict(_weights)
    each = iter(weights_of_all)
    _weights.update({worker: [next(each) for _ in before[worker]] for worker in sorted(before)})
    yield
    _weights.update(before)


def there(how, worker, function, *args):
    """Call a function on a worker, or in this process."""
    if how == "here":
        return function(how, *args)
    return rpc.rpc_sync(worker, function, args=(how, *args))


class Noted(torch.autograd.Function):
    """The identity, which calls a function with its gradient in the backward pass."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note(gradient)
        return gradient, None


# ---- random graphs -------------------------------------------------------------------------------------------------


def mixed(how, worker, world, seed, depth, tensors):
    """Return, on `worker`, a random expression of tensors, its weights, and results of other workers."""
    chance = random.Random(seed)
    values = list(tensors)
    for step in range(chance.randint(2, 5)):
        kind = chance.choice(["call", "call", "nest", "weight", "add", "product", "inplace", "view", "drop"])
        one, other = chance.choice(values), chance.choice(values)
        if kind in ("call", "nest") and depth:
            to = chance.randrange(world)
            some = [chance.choice(values) for _ in range(chance.randint(1, 3))]
            below = there(how, to, mixed, to, world, chance.random(), depth - 1, some)
            values += below["values"] if kind == "nest" else below["values"][-1:]
        elif kind == "weight":
            values.append(torch.tanh(one @ chance.choice(weights(worker)[:6])))
        elif kind == "product":
            values.append(one * other * 0.5)
        elif kind == "inplace":
            values.append((one + 0).mul_(1.5).add_(other, alpha=0.1))
        elif kind == "view":
            values.append(one.flip(0).contiguous().view(2, -1).reshape(WIDTH))
        elif kind == "drop":
            values.append(one.detach() * other)
        else:
            values.append(one + chance.choice(weights(worker)[6:]) + step)
    return {"values": values[-3:], "more": (values[0], "text", 3)}


def random_roots(how, world, seed):
    x = [torch.full((WIDTH,), 0.1 * number, dtype=torch.float64) for number in range(2)]
    found = mixed(how, 0, world, seed, 3, [*x, weights(0)[6]])
    more = there(how, world - 1, mixed, world - 1, world, seed + 1, 2, found["values"])
    roots = [each.sum() for each in (*found["values"], *more["values"])]
    return [root for root in roots if root.requires_grad]


# ---- models that are split -----------------------------------------------------------------------------------------


def embedded(how, worker, steps):
    return [torch.sin(weights(worker)[step % 6][step % WIDTH]) for step in range(steps)]


def cell(how, worker, x, state):
    h, c = state
    w = weights(worker)
    gate = torch.sigmoid(x @ w[0] + h @ w[1] + w[6])
    c = gate * c + (1 - gate) * torch.tanh(x @ w[2] + h @ w[3] + w[7])
    return torch.tanh(c), c


def decoded(how, worker, outputs):
    return torch.stack(outputs) @ weights(worker)[4]


def rnn_roots(how, world):
    """Run the embedding on one worker, each step of the cell on another, and the decoder on the first."""
    first, second = 1 % world, 2 % world
    state, outputs = (torch.zeros(WIDTH).double(), torch.zeros(WIDTH).double()), []
    for x in there(how, first, embedded, first, 12):
        state = there(how, second, cell, second, x, state)
        outputs.append(state[0])
    return [there(how, first, decoded, first, outputs).square().mean()]


def pulled(how, worker):
    """Return a parameter server's parameters."""
    return {"weights": weights(worker), "names": list("abcdefgh")}


def server_roots(how, world):
    """Use parameters of the server on this worker and on the others."""
    found = there(how, world - 1, pulled, world - 1)["weights"]
    x = torch.linspace(0, 1, WIDTH).double()
    for number, weight in enumerate(found[:4]):
        x = torch.tanh(there(how, number % world, applied, x, weight) + found[6])
    return [x.sum()]


def applied(how, x, weight):
    return x @ weight


PROGRAMS = {"rnn": rnn_roots, "server": server_roots}


# ---- gradients -----------------------------------------------------------------------------------------------------


def gradients_of(worker, context):
    """Return the gradients of a worker's weights, None for none."""
    found = autograd.get_gradients(context)
    return [found.get(weight) for weight in weights(worker)]


def compare(roots, world, retain_graph=False):
    """Compare the gradients of `roots(how)` over the workers with those in one process."""
    with autograd.context() as context:
        distributed = roots("remotely")
        if retain_graph:
            autograd.backward(context, [distributed.pop(0)], retain_graph=True)
        if distributed:
            autograd.backward(context, distributed)
        # A worker that has not taken part does not have the context yet: this call sends it.
        found = [each for to in range(world) for each in rpc.rpc_sync(to, gradients_of, args=(to, context))]
    every = [weight for worker in range(world) for weight in weights(worker)]
    assert all(weight.grad is None for weight in every)
    expected = torch.autograd.grad(sum(roots("here")), every, allow_unused=True)
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None), "a gradient is missing, or is there where none is due"
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
    return sum(each is not None for each in expected)
