"""Readers: the timer that ends the lease of a thread whose handler blocks, and races at the end of a lease."""

import select
import socket
import threading
import time
from contextlib import contextmanager

from fastcoll.rpc.polling import HANG_UP, READ
from fastcoll.rpc.readers import Readers
from rpc.victims import LIMIT


class Pair:
    """A link of one-byte messages, each a call for `handle`."""

    def __init__(self, handle, dialed=False):
        self.dialed = dialed
        self.near, self._far = socket.socketpair()
        self._far.setblocking(False)
        self.reading, self.armed, self._handle = threading.Lock(), 0, handle

    def fileno(self):
        return self._far.fileno()

    def poll(self, milliseconds=0):
        return bool(select.select([self._far], [], [], milliseconds / 1000)[0])

    def is_filling(self):
        return False

    def receive(self, until=0):
        return [lambda: self._handle(message)] if (message := self._far.recv(1)) else None

    def expects_answers(self):
        return False

    def ended(self):
        pass

    def close(self):
        self.near.close()
        self._far.close()


@contextmanager
def watched(readers, source):
    """Have the readers read a link, and close them afterwards."""
    readers.poller.watch(source, READ)
    try:
        yield
    finally:
        readers.poller.forget(source)
        readers.close(LIMIT)
        source.close()


def test_a_timer_started_while_its_event_is_handled_is_not_lost():
    came, free, over = threading.Event(), threading.Event(), threading.Event()

    def handle(message):
        if message == b"w":
            came.set()
            free.wait(LIMIT)
        else:
            free.set()
            over.set()

    readers, is_slow = Readers(2, False), [True]
    poller = readers.poller
    clear = poller.clear

    def clear_slowly(descriptor):
        """The timer is started again and fires between two steps of the thread that handles its event."""
        if descriptor == poller._timer and is_slow:
            is_slow.clear()
            poller.start_timer()
            select.select([descriptor], [], [], LIMIT)
        clear(descriptor)

    poller.clear = clear_slowly
    source = Pair(handle)
    with watched(readers, source):
        source.near.send(b"w")
        assert came.wait(LIMIT)
        source.near.send(b"r")  # another thread reads it after the timer has ended the first lease
        assert over.wait(LIMIT)


def test_the_timer_stops_while_a_long_handler_runs():
    came, free, stopped = threading.Event(), threading.Event(), threading.Event()

    def handle(message):
        came.set()
        free.wait(LIMIT)

    readers, source = Readers(2, False), Pair(handle)
    end_stuck = readers._end_stuck

    def note():
        end_stuck()
        if came.is_set() and not readers.poller._timer_runs:
            stopped.set()

    readers._end_stuck = note
    with watched(readers, source):
        source.near.send(b"w")
        assert stopped.wait(LIMIT)
        assert not readers._leases
        free.set()


def test_a_call_made_while_the_link_is_rearmed_is_answered():
    over = threading.Event()

    readers = Readers(2, False)
    arm = readers.poller.arm

    def arm_late(source, events):
        """Another thread makes a call just before this thread rearms the link."""
        if events == HANG_UP:
            arm(source, READ)
        arm(source, events)

    readers.poller.arm = arm_late
    source = Pair(lambda message: over.set() if message == b"2" else source.near.send(b"2"), dialed=True)
    with watched(readers, source):
        source.near.send(b"1")
        assert over.wait(LIMIT)


def test_tasks_run_when_all_threads_are_in_handlers():
    free, done, late, first = threading.Event(), threading.Event(), threading.Event(), threading.Lock()

    class Busy(Readers):
        """One thread is in a handler, and the other one notices the end before the last task."""

        def _wait(self):
            if first.acquire(blocking=False):
                free.wait(LIMIT)
            return not time.sleep(0.001)

    readers = Busy(2, False)
    try:
        readers.run(done.set)
        readers.close(0.2)
        assert done.wait(LIMIT)
        readers.run(late.set)
        assert late.is_set()
    finally:
        free.set()
        readers.close(LIMIT)


def test_calls_are_handled_while_no_thread_can_be_started(monkeypatch, caplog):
    free, handled, last = threading.Event(), threading.Semaphore(0), threading.Event()

    def handle(message):
        if message == b"w":
            free.wait(LIMIT)
        handled.release()

    def refuse(_):
        raise RuntimeError("can't start new thread")

    readers, source = Readers(2, False), Pair(handle)
    with watched(readers, source):
        monkeypatch.setattr(threading.Thread, "start", refuse)
        source.near.send(b"w")  # one of the two threads is in a handler until the end
        for _ in range(3):
            source.near.send(b"1")
            assert handled.acquire(timeout=LIMIT)
        assert [record.getMessage() for record in caplog.records] == [
            "calls of other workers wait until handlers end: can't start new thread"
        ]
        monkeypatch.setattr(readers, "_wake_one", lambda: None)
        readers._tasks.append(last.set)
        readers.close(0.0)
        assert last.is_set()
        monkeypatch.undo()
        free.set()


def test_a_removed_link_does_not_affect_a_link_that_reuses_its_descriptor():
    over = threading.Event()
    readers, gone, source = Readers(2, False), Pair(None), Pair(lambda message: over.set())
    here, gone._far = gone._far, source._far  # the kernel reuses a descriptor
    readers.poller.watch(gone, READ)
    readers.poller.forget(gone)
    with watched(readers, source):
        gone.armed = 0
        readers.poller.arm(gone, HANG_UP)
        readers.poller.forget(gone)
        source.near.send(b"1")
        assert over.wait(LIMIT)
    gone._far = here
    gone.close()
