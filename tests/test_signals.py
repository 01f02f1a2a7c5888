"""Signal handlers that use a group while a call of their thread is under way: refused or right, never stuck."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import UsageError


@pytest.fixture
def alarm():
    """Have a function called by a signal handler on this thread, `delay` seconds from now; then a file is made."""

    def ring(function, delay=0.1, then=None):
        heard: list[object] = []

        def handle(*_):
            try:
                heard.append(function())
            except dist.FastcollError as error:
                heard.append(type(error))
            if then is not None:
                then.touch()

        signal.signal(signal.SIGALRM, handle)
        signal.setitimer(signal.ITIMER_REAL, delay)
        return heard

    before = signal.getsignal(signal.SIGALRM)
    yield ring
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


CALLS = {
    "short": lambda x: dist.all_reduce(x),
    "first of its dtype": lambda x: dist.all_reduce(x.astype("i2")),
    "strided": lambda x: dist.all_reduce(np.ones(8)[::2]),
    "asynchronous": lambda x: dist.all_reduce(np.ones(3), async_op=True),
    "barrier with a timeout": lambda x: dist.monitored_barrier(timeout=5),
}


def until_there(path):
    """Wait for what the other rank's handler does at the end."""
    while not path.exists():
        time.sleep(5e-3)


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("outer", ["short", "strided"])
@pytest.mark.parametrize("inner", CALLS)
def test_a_handler_may_not_call_while_a_call_waits(rank, world_size, alarm, tmp_path, outer, inner):
    x = np.full(4, rank + 1.0)
    dist.all_reduce(x.copy())
    heard = []
    if rank == 0:
        heard = alarm(lambda: CALLS[inner](x), then=tmp_path / "heard")
    else:
        until_there(tmp_path / "heard")
    y = np.full(8, rank + 1.0)[:: 2 if outer == "strided" else 1]
    dist.all_reduce(y)
    assert heard == [UsageError] * (1 - rank)
    assert (y == 3).all()
    dist.barrier()


@pytest.mark.ranks(2, timeout=15)
@pytest.mark.parametrize("outer", ["short", "strided"])
@pytest.mark.parametrize("inner", ["short", "strided"])
def test_a_handler_at_the_very_end_of_a_call(rank, world_size, alarm, outer, inner):
    """The signal comes while compiled code waits, its handler runs once the call is complete."""
    dist.all_reduce(np.ones(4))
    for _ in range(10):
        first = np.full(8, rank + 1.0)[:: 2 if outer == "strided" else 1]
        second = np.full(8, rank + 1.0)[:: 2 if inner == "strided" else 1]
        heard = [None]
        if rank == 0:
            heard = alarm(lambda second=second: dist.all_reduce(second), delay=0.002)
        else:
            time.sleep(0.004)
        dist.all_reduce(first)
        while not heard:
            time.sleep(1e-3)
        if rank == 1 or heard != [None]:
            assert heard in ([None], [UsageError])
            dist.all_reduce(second)
        assert (first == 3).all()
        assert (second == 3).all()


@pytest.mark.ranks(2, timeout=30)
def test_a_handler_while_a_call_waits_for_another_threads(rank, world_size, alarm, tmp_path):
    """This thread's call has not begun: another thread's is under way."""
    first, second = np.full(4, rank + 1.0), np.full(8, rank + 1.0)
    dist.all_reduce(first.copy())
    if rank == 1:
        until_there(tmp_path / "heard")
        dist.all_reduce(first)
        dist.all_reduce(second[::2])
        dist.barrier()
        return
    thread = threading.Thread(target=dist.all_reduce, args=(first,))
    thread.start()
    while not dist.group.WORLD._is_busy():
        time.sleep(1e-3)
    heard = alarm(lambda: dist.all_reduce(np.ones(3)), then=tmp_path / "heard")
    dist.all_reduce(second[::2])
    thread.join()
    assert heard == [UsageError]
    assert (first == 3).all()
    assert (second[::2] == 3).all()
    dist.barrier()


@pytest.mark.ranks(2, timeout=30)
@pytest.mark.parametrize("kind", ["f8", "i2"])
@pytest.mark.parametrize("inner", ["send", "recv"])
def test_a_handler_may_not_wait_for_messages_while_a_receive_waits(
    rank, world_size, alarm, tmp_path, kind, inner
):
    x = np.zeros(4, kind)
    dist.barrier()
    heard = []
    if rank == 0:
        heard = alarm(lambda: getattr(dist, inner)(np.ones(2), 1, tag=5), then=tmp_path / "heard")
        dist.recv(x, 1)
    else:
        until_there(tmp_path / "heard")
        dist.send(np.full(4, 7, kind), 0)
    assert heard == [UsageError] * (1 - rank)
    assert rank == 1 or (x == 7).all()
    dist.barrier()


@pytest.mark.ranks(2, timeout=10)
def test_what_a_handler_raises_comes_out_whatever_it_is(rank, world_size):
    """Also a TypeError, which is what compiled code raises when an argument is no integer."""

    def careless(*_):
        raise TypeError("of the handler's own")

    dist.all_reduce(np.ones(4))
    group, x = dist.new_group(), np.full(4, rank + 1.0)
    group.all_reduce(x.copy())
    if rank == 1:
        time.sleep(0.03)
        group.all_reduce(x)
        group.barrier()
        return
    before = signal.signal(signal.SIGALRM, careless)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    with pytest.raises(TypeError, match="handler's own"):
        group.all_reduce(x)
    signal.signal(signal.SIGALRM, before)
    assert (x == 3).all()
    group.barrier()


@pytest.mark.ranks(2, timeout=20)
@pytest.mark.parametrize("outer", ["short", "strided", "recv"])
def test_a_handler_may_close_the_group(rank, world_size, alarm, outer):
    """As handlers of SIGTERM do: the call under way ends with an error, and soon."""
    dist.all_reduce(np.ones(4))
    group = dist.new_group()
    group.all_reduce(np.ones(4))
    if rank == 0:
        alarm(group.close, 0.1)
        x = np.ones(8)[:: 2 if outer == "strided" else 1]
        with pytest.raises((dist.AbortedError, dist.NotInitializedError)):
            group.recv(x, 1) if outer == "recv" else group.all_reduce(x)
    dist.barrier()
