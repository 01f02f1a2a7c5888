"""Gradients across workers equal those of one process; recorded tensors, refusals, and the end of contexts."""

import operator
import time
from contextlib import suppress
from functools import partial

import pytest
import torch
from together import together

import fastcoll
from fastcoll import rpc
from fastcoll.errors import UsageError
from fastcoll.rpc import autograd
from rpc import autograd_programs as programs
from rpc import autograd_victims as victims


@pytest.fixture(autouse=True)
def workers():
    torch.set_num_threads(1)
    rpc.init_rpc(f"w{fastcoll.get_rank()}")
    yield
    rpc.shutdown(timeout=victims.LIMIT)


@pytest.fixture
def first():
    """Run the test on worker 0; the others serve it. All reset their weights, because processes are reused."""
    programs.forget()
    fastcoll.barrier()
    return fastcoll.get_rank() == 0


@pytest.mark.ranks(3, 4)
def test_gradients_are_those_of_one_process(first):
    if not first:
        return
    world = fastcoll.get_world_size()
    for name, roots in programs.PROGRAMS.items():
        assert programs.compare(partial(roots, world=world), world), name
    found = 0
    for seed in range(20):
        roots = partial(programs.random_roots, world=world, seed=seed)
        found += programs.compare(roots, world, retain_graph=seed % 2 == 0)
    assert found > 60


def doubled(x):
    return x * 2


def complain(gradient):
    raise KeyError("on purpose")


def fragile(x):
    return programs.Noted.apply(x, complain)


def through(to, function, x):
    return rpc.rpc_sync(to, function, args=(x,)) * 3


def through_sum(to, function, x):
    return through(to, function, x).sum()


def squared(x):
    return x * x


@rpc.functions.async_execution
def relayed(to, x):
    """Call again after the answer of the first call, on the thread that read the answer."""
    result = rpc.Future()

    def again(done):
        second = rpc.rpc_async(to, squared, args=(done.value(),))
        second.add_done_callback(lambda done: result.set_result(done.value() + x))

    rpc.rpc_async(to, doubled, args=(x,)).add_done_callback(again)
    return result


def needs_gradient(x):
    return x.requires_grad


def in_place(x):
    return x.mul_(3)


@pytest.mark.ranks(2)
def test_recorded_tensors_and_refused_ones(first):
    if not first:
        return
    x, parameter = torch.ones(3, requires_grad=True), torch.nn.Parameter(torch.ones(3))
    seen = []
    with autograd.context() as context:
        # A hook runs once, on the sum of the gradients from all workers.
        y = x * 1
        y.register_hook(seen.append)
        parts = [rpc.rpc_sync("w1", doubled, args=(y,)), rpc.rpc_sync("w0", doubled, args=(y,)), y]
        autograd.backward(context, [sum(parts).sum(), rpc.rpc_sync("w1", in_place, args=(parameter,)).sum()])
        found = autograd.get_gradients(context)
        assert [each.tolist() for each in seen] == [[5.0] * 3]
        assert found[x].tolist() == [5.0] * 3
        assert found[parameter].tolist() == [3.0] * 3
        # A gradient that was returned does not change when more is added.
        autograd.backward(context, [rpc.rpc_sync("w1", doubled, args=(x,)).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [7.0] * 3
        assert found[x].tolist() == [5.0] * 3
        # Calls of callbacks.
        autograd.backward(context, [rpc.rpc_sync("w1", relayed, args=("w0", x)).sum()])
        assert autograd.get_gradients(context)[x].tolist() == [16.0] * 3
        # Without gradients, nothing is recorded.
        with torch.no_grad():
            assert not rpc.rpc_sync("w1", doubled, args=(x,)).requires_grad
        assert not rpc.rpc_sync("w1", needs_gradient, args=(x.detach(),))
        # A graph that was freed.
        used = rpc.rpc_sync("w1", squared, args=(x,)).sum()
        autograd.backward(context, [used])
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            autograd.backward(context, [used])
        # Refusals.
        old = rpc.rpc_sync("w1", doubled, args=(x,)).sum()
        with pytest.raises(UsageError, match="Already"), autograd.context():
            pass
        for roots in (x.sum(), None, [3]):
            with pytest.raises(TypeError, match=r"root|incompatible function arguments"):
                autograd.backward(context, roots)
        for roots, message in (
            ([], "No tensors provided"), ([x], "is not a scalar"), ([x.sum().detach()], "requires_grad not set on"),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=message):
                autograd.backward(context, roots)
        with pytest.raises(UsageError, match=r"call rpc\.autograd\.backward"):
            old.backward()
    assert rpc.rpc_sync("w1", needs_gradient, args=(x,))
    for call in (autograd.get_gradients, partial(autograd.backward, roots=[x.sum()])):
        with pytest.raises(UsageError, match="Could not find autograd context"):
            call(context)
    with autograd.context() as context, pytest.raises(UsageError, match="detach"):
        autograd.backward(context, [old])


@pytest.mark.ranks(3)
def test_contexts_end_on_all_workers_after_failures(first):
    if not first:
        return
    x = torch.ones(3, requires_grad=True)
    for _ in range(3):
        with autograd.context() as context:
            loss = rpc.rpc_sync("w1", through, args=("w2", fragile, x)).sum()
            with pytest.raises(RuntimeError, match=r"Error on Node 2: 'on purpose' \(KeyError\)") as raised:
                autograd.backward(context, [loss])
            assert isinstance(raised.value.__cause__, KeyError)
        with suppress(ZeroDivisionError), autograd.context():
            rpc.rpc_sync("w1", through, args=("w2", doubled, x))
            _ = 1 / 0
    with autograd.context() as context:
        late = rpc.rpc_async("w1", through, args=("w2", doubled, x))
    late.wait()
    victims.wait_until_none("w1")
    victims.wait_until_none("w2")
    assert victims.open_contexts() == 0

    def train(number):
        """Train in a thread and a context of its own."""
        mine = torch.full((3,), float(number), requires_grad=True)
        for _ in range(5):
            with autograd.context() as context:
                autograd.backward(context, [rpc.rpc_sync("w1", through, args=("w2", squared, mine)).sum()])
                found = autograd.get_gradients(context)
            assert list(found) == [mine]
            assert found[mine].tolist() == [6.0 * number] * 3
        return number

    assert together(*[partial(train, number) for number in range(8)]) == list(range(8))


@pytest.mark.ranks(1)
def test_an_unshared_gradient_is_stored_without_a_copy(first):
    def gradient_of(note, root):
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context:
            autograd.backward(context, [root(programs.Noted.apply(x, note))])
            return autograd.get_gradients(context)[x]

    addresses, kept = [], []
    taken = gradient_of(lambda gradient: addresses.append(gradient.data_ptr()), lambda y: y[1])
    assert taken.data_ptr() == addresses[0]
    copied = gradient_of(kept.append, lambda y: y[1])
    assert copied.data_ptr() != kept[0].data_ptr()
    spread = gradient_of(lambda gradient: None, torch.sum)
    assert spread.stride() == (1,)


@pytest.mark.ranks(2)
def test_backward_from_a_reference(first):
    if not first:
        return
    x, here = torch.ones(3, requires_grad=True), torch.full((2,), 4.0, requires_grad=True)
    with autograd.context() as context:
        far = rpc.remote("w1", through_sum, args=("w0", squared, x))
        far.backward(context, retain_graph=True)
        far.backward(context)
        assert autograd.get_gradients(context)[x].tolist() == [12.0] * 3
        near = rpc.RRef(rpc.rpc_sync("w1", doubled, args=(x,)).sum())
        near.backward(context)
        assert autograd.get_gradients(context)[x].tolist() == [14.0] * 3
        assert x.grad is None
        with pytest.raises(UsageError, match="require 'dist_autograd_ctx_id' to be specified"):
            far.backward()
        with pytest.raises(UsageError, match="should contain a tensor"):
            rpc.remote("w1", operator.neg, args=(3,)).backward(context)
    with pytest.raises(UsageError, match="Could not find autograd context"):
        far.backward(context)
    rpc.RRef((here * here).sum()).backward()
    assert here.grad.tolist() == [8.0] * 2
    with pytest.raises(UsageError, match="should contain a tensor"):
        rpc.RRef(3).backward()


def parameters(worker):
    return [rpc.RRef(weight) for weight in programs.weights(worker)]


def values(worker):
    assert all(weight.grad is None for weight in programs.weights(worker))
    return [weight.detach() for weight in programs.weights(worker)]


class Counts(torch.optim.Optimizer):
    """Adds 1 to parameters with a gradient, so slowly that concurrent steps would lose additions."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                before = param.detach().clone()
                time.sleep(0.001)
                param.data.copy_(before + 1)


@pytest.mark.long
@pytest.mark.ranks(3)
def test_references_and_optimizers(first):
    if not first:
        return
    programs_weights = [weight for worker in range(3) for weight in programs.weights(worker)]
    wanted = [weight.detach().clone().requires_grad_() for weight in programs_weights]
    rrefs = [rref for worker in range(3) for rref in rpc.rpc_sync(worker, parameters, args=(worker,))]
    given = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    optimizer = rpc.DistributedOptimizer(torch.optim.SGD, rrefs, **given)
    oracle = torch.optim.SGD(wanted, **given)
    for _ in range(3):
        with autograd.context() as context:
            autograd.backward(context, programs.rnn_roots("remotely", 3))
            optimizer.step(context)
        with programs.others(wanted):
            oracle.zero_grad()
            sum(programs.rnn_roots("here", 3)).backward()
        oracle.step()
    found = [value for worker in range(3) for value in rpc.rpc_sync(worker, values, args=(worker,))]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.detach())
    with pytest.raises(TypeError, match="nonsense"):
        rpc.DistributedOptimizer(torch.optim.SGD, rrefs, nonsense=3)
    with pytest.raises(UsageError, match="Could not find autograd context"):
        optimizer.step(context)

    # A value that a call in the context made, fetched twice, and steps of several threads.
    weight = rpc.remote("w1", torch.zeros, args=(3,), kwargs={"requires_grad": True})
    optimizers = [rpc.DistributedOptimizer(Counts, [weight]) for _ in range(2)]

    def train(optimizer):
        for _ in range(10):
            with autograd.context() as context:
                product = rpc.remote("w2", through, args=("w1", doubled, weight.to_here()))
                squares = product.to_here() * product.to_here()
                autograd.backward(context, [squares.sum() + product.to_here().sum()])
                optimizer.step(context)

    assert together(*[partial(train, each) for each in optimizers]) == [None, None]
    assert weight.to_here().tolist() == [20.0] * 3
