"""Signal handlers that use a group during a call of their thread: refused or right, never stuck."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest
from net.meshes import until

import fastcoll as dist
from fastcoll import UsageError
from fastcoll.shm import context_layout as words
from fastcoll.shm import rings


@pytest.fixture
def alarm():
    """Have a signal handler on this thread call a function as soon as `once()` is true.

    The file `path` is made when the function has returned or, if `at_once`, when the signal has been sent.
    """
    main, over, senders = threading.get_ident(), threading.Event(), []

    def ring(function, once, path=None, at_once=False):
        results: list[object] = []
        begun = threading.Event()

        def handle(*_):
            if begun.is_set():
                return
            begun.set()
            try:
                results.append(function())
            except dist.FastcollError as error:
                results.append(type(error))
            if path is not None:
                path.touch()

        def send():
            while not once():
                if over.wait(1e-3):
                    return
            signal.pthread_kill(main, signal.SIGALRM)
            if at_once:
                path.touch()
                return
            # A signal that comes just before the thread sleeps in a lock does not end the sleep, so send it again.
            while not begun.wait(0.1) and not over.is_set():
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
    "short": lambda group: group.all_reduce(np.ones(4)),
    "first of its dtype": lambda group: group.all_reduce(np.ones(4, "i2")),
    "strided": lambda group: group.all_reduce(np.ones(8)[::2]),
    "asynchronous": lambda group: group.all_reduce(np.ones(3), async_op=True),
    "barrier with a timeout": lambda group: group.monitored_barrier(timeout=5),
}


def new_group(at_end):
    """Make a group. With `at_end` its waits do not return to Python, so a handler runs when the call is complete."""
    group = dist.new_group()
    group.all_reduce(np.ones(4))
    group.all_reduce(np.ones(8)[::2])  # compiles its kernels, so that the alarm finds the next call waiting
    if at_end:
        group.backend.context.words[words.FULL_WAIT + 2] = 50 * 10**9
    return group


@pytest.mark.ranks(2)
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("outer", [1, 2], ids=["short", "strided"])
@pytest.mark.parametrize("inner", CALLS)
def test_a_handler_may_not_call_during_a_call(rank, world_size, alarm, tmp_path, inner, outer, at_end):
    """Not even at its very end, before the call has returned."""
    group, path, x = new_group(at_end), tmp_path / "path", np.full(8, rank + 1.0)[::outer]
    results = []
    if rank == 0:
        results = alarm(lambda: CALLS[inner](group), group.gate.is_busy, path, at_end)
    else:
        until(path.exists)
    group.all_reduce(x)
    assert results == [UsageError] * (1 - rank)
    assert (x == 3).all()
    group.barrier()


@pytest.mark.ranks(2)
def test_a_handler_while_a_call_waits_for_another_threads_call(rank, world_size, alarm, tmp_path):
    """This thread's call has not begun, because another thread's is under way."""
    group, path = new_group(False), tmp_path / "handled"
    first, second = np.full(4, rank + 1.0), np.full(8, rank + 1.0)[::2]
    main, thread = threading.get_ident(), threading.Thread(target=group.all_reduce, args=(first,))
    if rank == 0:
        thread.start()
        until(group.gate.is_busy)
        results = alarm(lambda: group.all_reduce(np.ones(3)), lambda: main in group.gate._inside, path)
        group.all_reduce(second)
        assert results == [UsageError]
    else:
        until(path.exists)
        thread.start()
        thread.join()
        group.all_reduce(second)
    thread.join()
    assert (first == 3).all()
    assert (second == 3).all()
    group.barrier()


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
    world, call = dist.group.WORLD, getattr(dist, inner)
    if rank == 0:
        results = alarm(lambda: call(np.ones(2), 1, tag=5), lambda: receives(world), tmp_path / "handled")
        dist.recv(x, 1)
        assert results == [UsageError]
        assert (x == 7).all()
    else:
        until((tmp_path / "handled").exists)
        dist.send(np.full(4, 7, kind), 0)
    dist.barrier()


@pytest.mark.ranks(2)
def test_any_exception_of_a_handler_is_raised(rank, world_size, alarm, tmp_path):
    """Also a TypeError, which compiled code raises as well, if an argument is no integer."""
    group, path, x = new_group(True), tmp_path / "sent", np.full(4, rank + 1.0)

    def careless():
        raise TypeError("of the handler's own")

    if rank == 0:
        alarm(careless, group.gate.is_busy, path, True)
        with pytest.raises(TypeError, match="handler's own"):
            group.all_reduce(x)
    else:
        until(path.exists)
        group.all_reduce(x)
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
