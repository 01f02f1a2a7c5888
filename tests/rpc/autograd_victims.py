"""What workers do in the tests of autograd in which one dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import torch

from fastcoll import AbortedError, rpc
from fastcoll.rpc import autograd
from fastcoll.rpc.autograd.participant import participant

_over = threading.Event()


class Dies(torch.autograd.Function):
    """Kills its process in the backward pass."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        os.kill(os.getpid(), signal.SIGKILL)


def deadly(x):
    return Dies.apply(x)


def through(to, x):
    """The tensor that leaves from here waits for a gradient that never comes."""
    return rpc.rpc_sync(to, deadly, args=(x * 2,)) * 3


def deadly_through(to, x):
    return Dies.apply(rpc.rpc_sync(to, passed, args=(x,)))


def passed(x):
    return x * 2


def finish():
    _over.set()


def open_contexts():
    return len(participant().contexts)


def wait_until_none(worker):
    """Contexts end by calls that nobody waits for."""
    until = time.monotonic() + 30
    while rpc.rpc_sync(worker, open_contexts):
        assert time.monotonic() < until, f"{worker} has contexts left"


def _join(rank, n, url):
    torch.set_num_threads(1)
    rpc.init_rpc(
        f"w{rank}", rank=rank, world_size=n, rpc_backend_options=rpc.RpcBackendOptions(init_method=url)
    )


def one_dies_in_backward(rank, n, url, victim):
    """w1 or w2 dies in a pass of w0; w1 is between. Returns the error, how long it took, and that all goes on."""
    other = {"w1": "w2", "w2": "w1"}[victim]
    _join(rank, n, url)
    if rank:
        assert _over.wait(30)
        rpc.shutdown(graceful=False)
        return None
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("w1", {"w1": deadly_through, "w2": through}[victim], args=("w2", x)).sum()
        begin = time.monotonic()
        try:
            autograd.backward(context, [loss])
        except Exception as error:
            said, took = f"{type(error).__name__}: {error}", time.monotonic() - begin
    wait_until_none(other)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(other, passed, args=(x,)).sum()])
        again = autograd.get_gradients(context)[x].tolist()
    wait_until_none(other)
    with suppress(AbortedError):  # it may have left before it answers
        rpc.rpc_sync(other, finish)
    rpc.shutdown(graceful=False)
    return {"said": said, "took": took, "again": again}


_had = []


def noted(x):
    """How many contexts are here, for later."""
    _had.append(open_contexts())
    _over.set()
    return x * 2


def the_maker_dies(rank, n, url):
    """w0 dies with a context; w1 has it no more then."""
    _join(rank, n, url)
    if rank == 0:
        context = autograd.context()
        context.__enter__()
        rpc.rpc_sync("w1", noted, args=(torch.ones(2, requires_grad=True),))
        os.kill(os.getpid(), signal.SIGKILL)
    assert _over.wait(30)
    wait_until_none("w1")
    rpc.shutdown(graceful=False)
    return _had
