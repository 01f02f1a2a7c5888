"""Workers of the tests of autograd in which one of them dies."""

from __future__ import annotations

import time

import torch

from fastcoll import rpc
from fastcoll.rpc import autograd
from fastcoll.rpc.autograd.participant import participant
from rpc.autograd_programs import Noted
from rpc.victims import LIMIT, die, end, join, let_end, over, until, wait_for_the_end


def deadly(x):
    return Noted.apply(x, die_of)


def die_of(gradient):
    die()


def through(to, x):
    """Return a tensor: it leaves this worker, and its gradient never arrives."""
    return rpc.rpc_sync(to, deadly, args=(x * 2,)) * 3


def deadly_through(to, x):
    return deadly(rpc.rpc_sync(to, passed, args=(x,)))


def passed(x):
    return x * 2


def open_contexts():
    return len(participant().contexts)


def wait_until_none(worker):
    """Wait until all contexts have ended: no thread waits for the calls that end them."""
    until(lambda: not rpc.rpc_sync(worker, open_contexts), f"{worker} has contexts left")


def one_dies_in_backward(rank, n, url, victim):
    """w1 or w2 dies in a pass of w0; w1 is between them. Return the error, its time, and whether later passes work."""
    other = {"w1": "w2", "w2": "w1"}[victim]
    torch.set_num_threads(1)
    join(rank, n, url)
    if rank:
        return wait_for_the_end()
    x = torch.ones(2, requires_grad=True)
    with autograd.context() as context:
        loss = rpc.rpc_sync("w1", {"w1": deadly_through, "w2": through}[victim], args=("w2", x)).sum()
        begin = time.monotonic()
        try:
            autograd.backward(context, [loss])
        except Exception as error:
            error_text, took = f"{type(error).__name__}: {error}", time.monotonic() - begin
    wait_until_none(other)
    with autograd.context() as context:
        autograd.backward(context, [rpc.rpc_sync(other, passed, args=(x,)).sum()])
        again = autograd.get_gradients(context)[x].tolist()
    wait_until_none(other)
    let_end(other)
    rpc.shutdown(graceful=False)
    return {"error": error_text, "took": took, "again": again}


_had = []


def noted(x):
    """Keep the number of contexts of this worker."""
    _had.append(open_contexts())
    end()
    return x * 2


def the_maker_dies(rank, n, url):
    """w0 dies with a context, which ends on w1."""
    torch.set_num_threads(1)
    join(rank, n, url)
    if rank == 0:
        context = autograd.context()
        context.__enter__()
        rpc.rpc_sync("w1", noted, args=(torch.ones(2, requires_grad=True),))
        die()
    assert over.wait(LIMIT)
    wait_until_none("w1")
    rpc.shutdown(graceful=False)
    return _had
