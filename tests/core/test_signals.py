"""Signal handlers that use a group during a call of their thread: refused or right, never stuck."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest

import fastcoll as dist
from fastcoll import UsageError
from fastcoll.shm import context_layout as words
from fastcoll.shm import rings


@pytest.fixture
def alarm():
    """Have a signal handler on this thread call a function as soon as `once()` is true; then make a file."""
    main, over, senders = threading.get_ident(), threading.Event(), []

    def ring(function, once, then=None):
        results: list[object] = []

        def handle(*_):
            try:
                results.append(function())
            except dist.FastcollError as error:
                results.append(type(error))
            if then is not None:
                then.touch()

        def send():
            while not once():
                if over.wait(1e-3):
                    return
            signal.pthread_kill(main, signal.SIGALRM)

        signal.signal(signal.SIGALRM, handle)
        senders.append(threading.Thread(target=send))
        senders[-1].start()
        return results

    before = signal.getsignal(signal.SIGALRM)
    yield ring
    over.set()
    for sender in senders:
        sender.join()
    signal.signal(signal.SIGALRM, before)


def receives(group):
    """Whether a call that waits for a message is under way in the group."""
    return group.backend.pipe.table[rings.BUSY] != 0


CALLS = {
    "short": lambda x: dist.all_reduce(x),
    "first of its dtype": lambda x: dist.all_reduce(x.astype("i2")),
    "strided": lambda x: dist.all_reduce(np.ones(8)[::2]),
    "asynchronous": lambda x: dist.all_reduce(np.ones(3), async_op=True),
    "barrier with a timeout": lambda x: dist.monitored_barrier(timeout=5),
}


def wait_for_file(path):
    """Wait for the file that the other rank's handler makes at the end."""
    while not path.exists():
        time.sleep(5e-3)


@pytest.mark.long
@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["short", "strided"])
@pytest.mark.parametrize("inner", CALLS)
def test_a_handler_may_not_call_while_a_call_waits(rank, world_size, alarm, tmp_path, outer, inner):
    x = np.full(4, rank + 1.0)
    y = np.full(8, rank + 1.0)[:: 2 if outer == "strided" else 1]
    dist.all_reduce(x.copy())
    dist.all_reduce(y)  # compiles its kernels, so that the alarm finds the next call waiting
    y[:] = rank + 1.0
    results = []
    if rank == 0:
        results = alarm(lambda: CALLS[inner](x), dist.group.WORLD.gate.is_busy, tmp_path / "handled")
    else:
        wait_for_file(tmp_path / "handled")
    dist.all_reduce(y)
    assert results == [UsageError] * (1 - rank)
    assert (y == 3).all()
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", [1, 2])
@pytest.mark.parametrize("inner", [1, 2])
def test_a_handler_at_the_very_end_of_a_call(rank, world_size, alarm, outer, inner):
    """The signal arrives while compiled code waits; its handler runs when the call is complete.

    Both calls look the same to the other rank, since the signal may also arrive before the first.
    """
    dist.all_reduce(np.ones(4))
    for _ in range(10):
        first, second = (np.full(8 * step, rank + 1.0)[::step] for step in (outer, inner))
        results = [None]
        if rank == 0:
            due = time.monotonic() + 0.002
            results = alarm(
                lambda second=second: dist.all_reduce(second), lambda due=due: time.monotonic() > due
            )
        else:
            time.sleep(0.004)
        dist.all_reduce(first)
        while not results:
            time.sleep(1e-3)
        if rank == 1 or results != [None]:
            assert results in ([None], [UsageError])
            dist.all_reduce(second)
        assert (first == 3).all()
        assert (second == 3).all()


@pytest.mark.ranks(2)
def test_a_handler_while_a_call_waits_for_another_threads_call(rank, world_size, alarm, tmp_path):
    """This thread's call has not begun, because another thread's is under way."""
    first, second = np.full(4, rank + 1.0), np.full(8, rank + 1.0)
    dist.all_reduce(first.copy())
    dist.all_reduce(np.ones(8)[::2])
    if rank == 1:
        wait_for_file(tmp_path / "handled")
        dist.all_reduce(first)
        dist.all_reduce(second[::2])
        dist.barrier()
        return
    thread = threading.Thread(target=dist.all_reduce, args=(first,))
    thread.start()
    while not dist.group.WORLD.gate.is_busy():
        time.sleep(1e-3)
    main, gate = threading.get_ident(), dist.group.WORLD.gate
    results = alarm(lambda: dist.all_reduce(np.ones(3)), lambda: main in gate._inside, tmp_path / "handled")
    dist.all_reduce(second[::2])
    thread.join()
    assert results == [UsageError]
    assert (first == 3).all()
    assert (second[::2] == 3).all()
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["f8", "i2"])
@pytest.mark.parametrize("inner", ["send", "recv"])
def test_a_handler_may_not_wait_for_messages_while_a_receive_waits(
    rank, world_size, alarm, tmp_path, kind, inner
):
    x = np.zeros(4, kind)
    for _ in range(2):  # what receives need is compiled by now, and the alarm finds the next one waiting
        (dist.recv if rank == 0 else dist.send)(np.zeros(1, "u1"), 1 - rank)
    dist.barrier()
    results = []
    if rank == 0:
        world = dist.group.WORLD
        call = lambda: getattr(dist, inner)(np.ones(2), 1, tag=5)  # noqa: E731
        results = alarm(call, lambda: receives(world), tmp_path / "handled")
        dist.recv(x, 1)
    else:
        wait_for_file(tmp_path / "handled")
        dist.send(np.full(4, 7, kind), 0)
    assert results == [UsageError] * (1 - rank)
    assert rank == 1 or (x == 7).all()
    dist.barrier()


@pytest.mark.ranks(2)
def test_any_exception_of_a_handler_is_raised(rank, world_size, tmp_path):
    """Also a TypeError, which compiled code raises as well, if an argument is no integer."""

    def careless(*_):
        raise TypeError("of the handler's own")

    def send_when_it_waits():
        while not group.gate.is_busy():
            time.sleep(1e-3)
        os.kill(os.getpid(), signal.SIGALRM)
        (tmp_path / "sent").touch()

    dist.all_reduce(np.ones(4))
    group, x = dist.new_group(), np.full(4, rank + 1.0)
    group.all_reduce(x.copy())
    if rank == 1:
        wait_for_file(tmp_path / "sent")
        group.all_reduce(x)
        group.barrier()
        return
    # So that the handler runs when the call is complete.
    group.backend.context.words[words.FULL_WAIT + 2] = 50 * 10**9
    before = signal.signal(signal.SIGALRM, careless)
    thread = threading.Thread(target=send_when_it_waits)
    thread.start()
    with pytest.raises(TypeError, match="handler's own"):
        group.all_reduce(x)
    thread.join()
    signal.signal(signal.SIGALRM, before)
    assert (x == 3).all()
    group.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["all_reduce", "recv"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_handler_may_close_the_group(rank, world_size, alarm, monkeypatch, outer, step):
    """As a handler of SIGTERM does: the call under way ends with an error, and `close` does not wait for it."""
    monkeypatch.setattr("fastcoll.p2p.progress._CLOSE_SECONDS", 600)
    group = dist.new_group()
    group.all_reduce(np.ones(4))
    for _ in range(2):
        (group.recv if rank == 0 else group.send)(np.zeros(1), 1 - rank)
    if rank == 0:
        results = alarm(group.close, lambda: receives(group) if outer == "recv" else group.gate.is_busy())
        x = np.ones(8)[::step]
        with pytest.raises(dist.AbortedError):
            group.recv(x, 1) if outer == "recv" else group.all_reduce(x)
        assert results == [None]
    dist.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_a_storm_of_signals_breaks_no_call(rank: int, world_size: int, backend: str) -> None:
    """A signal every millisecond: interrupted system calls are repeated, and results are right."""
    group, caught = dist.new_group(backend=backend), []
    before = signal.signal(signal.SIGALRM, lambda *_: caught.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for turn in range(1 << 30):
            x = np.full((3, 200_000)[turn % 2], float(rank + turn))
            dist.all_reduce(x, group=group)
            assert (x == 2 * turn + 1).all()
            y = np.full_like(x, turn)
            dist.send(y, 1, group=group) if rank == 0 else dist.recv(y, 0, group=group)
            assert (y == turn).all()
            goes_on = np.array([float(turn < 60 or len(caught) < 50)])
            dist.all_reduce(goes_on, dist.ReduceOp.MAX, group=group)
            if not goes_on[0]:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(caught) >= 50
