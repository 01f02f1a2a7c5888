"""Readers: threads that read an agent's links, its connections to other workers, and handle the messages.

All threads wait for the same epoll (polling.py). To *arm* a link is to make epoll report its next event. There are two
kinds of links, which are read in different ways:

1. A link that the other worker dialed carries that worker's calls. The thread that gets the link's event takes a
   *lease* on the link: the thread reads what has arrived and handles one call after the other. Meanwhile the link stays
   unarmed, so epoll reports none of its events, and calls in quick succession need no wake-up and no thread switch.
   After the last handler the thread polls the link for SPIN_SECONDS. If nothing arrives, the thread arms the link and
   waits with the other threads.
2. A link that this worker dialed carries the answers to its calls. A thread that waits for an answer reads the link
   itself (`read_answer`), so that no other thread is woken. If no thread waits, the readers' threads read the link,
   once it is armed (`rearm`). Arming costs a system call and wakes a thread. So `rearm_later` defers arming until the
   thread that made the call blocks or ends its task, or until a 1 ms timer fires.

No answer stays unread: a caller adds its call to `link.pending` before it checks whether a reader holds the lock
`link.reading`; a reader releases `reading` before it checks `pending` (`rearm`). So at least one of them sees the other
and arms the link. Only the next reader disarms it.

A handler may block, and so may a callback of a future. Before a thread waits for a future, its lease ends
(`before_blocking`): the link is armed, and other threads take the tasks that are left. The timer detects any other slow
handler. If a lease has handled nothing between two timer events, the thread that gets the second event ends the
lease. If no thread has begun a task between two timer events, other threads take the tasks that are left. A thread that
gets an event while no other thread waits starts a thread first, so any number of handlers may block.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from time import monotonic, perf_counter

from .link import LOOK_SECONDS, Link, Task
from .polling import HANG_UP, READ, Poller, Signal

_log = logging.getLogger("fastcoll")
# A wake-up takes 15 us, a poll of a link 0.6 us (virtual machine on an AMD EPYC of family 26).
SPIN_SECONDS = 50e-6
_LEASE_NANOSECONDS = 1_000_000


class Lease:
    """The right of one thread to read one link.

    `is_over`: whether other threads may read the link, too. Only the thread that holds `link.reading` sets it.
    """

    def __init__(self, link: Link) -> None:
        self.link = link
        # handled: how many steps (reads and calls) are done; seen: the value of `handled` when the timer last fired
        self.handled, self.seen = 0, -1
        self.is_over = False


class _Thread(threading.local):
    """This thread's state in a Readers."""

    readers: Readers | None = None  # the Readers that started this thread, or whose tasks it runs
    lease: Lease | None = None
    deferred_in: Readers | None = None  # the Readers in which this thread deferred arming a link


_this_thread = _Thread()


def before_blocking(reads: Link | None = None) -> None:
    """Prepare this thread for waiting: arm the deferred links, and end its lease or hand over its tasks.

    The link `reads` is not armed, because this thread will read it itself.
    """
    if (deferred_in := _this_thread.deferred_in) is not None:
        _this_thread.deferred_in = None
        deferred_in.rearm_deferred(reads)
    if (readers := _this_thread.readers) is not None:
        lease = _this_thread.lease
        if lease is None or lease.is_over:
            readers.hand_over()
        else:
            readers.end(lease)


class Readers:
    """Threads that read links and handle their messages.

    Args:
        spare: how many idle threads are kept.
        spins: whether a thread may poll for SPIN_SECONDS before it waits.
    """

    def __init__(self, spare: int, spins: bool) -> None:
        self.poller = Poller(_LEASE_NANOSECONDS)
        self._spin_seconds = SPIN_SECONDS if spins else 0.0
        self._tasks: deque[Task] = deque()
        self._left: deque[Task] = deque()  # tasks that threads in `run_here` have not begun
        self._deferred: set[Link] = set()
        self._leases: set[Lease] = set()
        self._spare = max(spare, 2)
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._begun = self._seen = 0  # number of tasks begun; the value of `_begun` when the timer last fired
        self._is_closed = self._is_eager = self._has_warned = False
        for _ in range(2):
            self._start()

    # ---- tasks ---------------------------------------------------------------------------------------------

    def run(self, task: Task) -> None:
        """Have a thread run a task."""
        self._tasks.append(task)
        if not self._wake_one() or self._is_closed:  # after `close`, all remaining threads may be in handlers
            self._work_off(None)

    def run_here(self, tasks: Sequence[Task]) -> None:
        """Run tasks on the calling thread; when a task blocks, the readers' threads take the tasks that are left."""
        if len(tasks) == 1:
            tasks[0]()
            return
        before, _this_thread.readers = _this_thread.readers, self
        self._left.extend(tasks)
        self.poller.start_timer()
        try:
            while self._left:
                with suppress(IndexError):  # another thread has taken the last task
                    self._left.popleft()()
        finally:
            _this_thread.readers = before

    def hand_over(self) -> None:
        """Have other threads run the tasks that are left, concurrently."""
        while self._left:
            with suppress(IndexError):
                self._tasks.append(self._left.popleft())
        if self._tasks:
            self._is_eager = True
            self._wake_one()

    def _work_off(self, lease: Lease | None) -> None:
        """Run the queued tasks. After `hand_over`, each thread wakes another one before it runs a task."""
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                self._is_eager = False
                return
            if self._tasks:
                if self._is_eager:
                    self._wake_one()
                else:
                    self.poller.start_timer()
            self._begun += 1
            try:
                task()
            except Exception:
                _log.exception("a call could not be handled")
            if self._deferred:
                self.rearm_deferred()
            if lease is not None:
                lease.handled += 1

    # ---- links with answers --------------------------------------------------------------------------------

    def read_answer(self, link: Link, number: int, until: float) -> None:
        """Read a link until a call's answer has been received, or until the time `until`.

        Return early if another thread reads the link.
        """
        try:
            while monotonic() < until:
                held = list[bool]()
                try:
                    held.extend(map(link.reading.acquire, (False,)))  # one call, for Ctrl-C: see Link.send
                    if not held[0]:
                        return
                    self._deferred.discard(link)
                    if number not in link.pending:
                        return  # the thread that received the answer completes the call's future
                    if link.armed == READ:
                        self.poller.disarm(link)
                    tasks = link.receive(until) if self._await_data(link, until) else []
                finally:
                    if held == [True]:
                        link.reading.release()
                if tasks is None:
                    link.ended()
                    return
                if tasks:
                    if link.pending:
                        self.rearm_later(link)  # the tasks run callbacks of futures, which may block
                    self.run_here(tasks)
        finally:
            self.rearm(link)

    def _await_data(self, link: Link, until: float) -> bool:
        """Wait until there is something to read; return False after LOOK_SECONDS, or at the time `until`."""
        if self._spin_seconds > 0:
            end = perf_counter() + self._spin_seconds
            while perf_counter() < end:
                if link.poll():
                    return True
        return link.poll(1000 * min(LOOK_SECONDS, max(until - monotonic(), 0.0)))

    def rearm(self, link: Link) -> None:
        """If no thread reads the link, arm it: for READ if answers are expected, else for HANG_UP.

        If a buffer is arriving in shared memory, have a thread read the rest of it.
        """
        if link.is_filling() and not link.reading.locked():
            self.run(partial(self._read_answers, link))
            return
        events = READ if link.expects_answers() else HANG_UP
        if link.armed < events and not link.reading.locked():
            self.poller.arm(link, events)

    def rearm_later(self, link: Link) -> None:
        """Arm a link when this thread blocks or has ended its task, at the latest when the timer fires."""
        self._deferred.add(link)
        _this_thread.deferred_in = self
        self.poller.start_timer()

    def rearm_deferred(self, but: Link | None = None) -> None:
        """Arm all links that `rearm_later` has deferred, except `but`."""
        # Iterate over a copy: other threads may add links meanwhile, and start the timer for those.
        for link in list(self._deferred):
            if link is not but:
                self._deferred.discard(link)
                self.rearm(link)

    def _read_answers(self, link: Link) -> None:
        if not link.reading.acquire(blocking=False):
            return  # the thread that waits for an answer reads the link, and then rearms it
        try:
            tasks = link.receive()
        finally:
            link.reading.release()
        if tasks is None:
            link.ended()
            return
        self.rearm(link)
        self._tasks.extend(tasks)

    # ---- links with calls ----------------------------------------------------------------------------------

    def _read_calls(self, link: Link) -> None:
        """Take a lease on a link, and handle the link's calls until the lease ends."""
        lease = _this_thread.lease = Lease(link)
        self._leases.add(lease)
        self.poller.start_timer()
        try:
            while self._receive_calls(lease):
                self._work_off(lease)
        finally:
            self._leases.discard(lease)
            _this_thread.lease = None

    def _receive_calls(self, lease: Lease) -> bool:
        """Queue the calls that have arrived or that arrive within SPIN_SECONDS; return False if the lease is over."""
        link = lease.link
        if lease.is_over:
            return False
        link.reading.acquire()
        try:
            if lease.is_over or self._is_closed:
                return False
            until = perf_counter() + self._spin_seconds if lease.handled else 0.0
            while not link.poll():
                if perf_counter() >= until:
                    lease.is_over = True
                    self.poller.arm(link, READ)
                    return False
            tasks = link.receive()
            lease.handled += 1
        finally:
            link.reading.release()
        if tasks is None:
            link.ended()
            return False
        self._tasks.extend(tasks)
        return True

    def end(self, lease: Lease) -> None:
        """End a lease: let any thread read the link, and have other threads take the tasks that were read from it."""
        # If the lease's thread holds the lock, it is reading, so it is not stuck.
        if lease.link.reading.acquire(blocking=False):
            try:
                if lease.is_over:
                    return
                lease.is_over = True
                self._leases.discard(lease)  # else the timer would fire until the handler ends
                self.poller.arm(lease.link, READ)
            finally:
                lease.link.reading.release()
            self.hand_over()

    def _end_stuck(self) -> None:
        """Arm the deferred links, end stuck leases, and hand over waiting tasks; called when the timer fires.

        A lease is stuck if it has handled nothing since the timer last fired. Tasks are handed over if no thread has
        begun a task since then.
        """
        self.rearm_deferred()
        for lease in list(self._leases):
            if lease.seen == lease.handled:
                self.end(lease)
            lease.seen = lease.handled
        if self._seen == self._begun:
            self.hand_over()
        self._seen = self._begun
        if self._leases or self._tasks or self._left:
            self.poller.start_timer()

    # ---- the threads ---------------------------------------------------------------------------------------

    def _wake_one(self) -> bool:
        with self._lock:
            if self._threads:
                self.poller.wake()
            return bool(self._threads)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="fastcoll-rpc", daemon=True)
        with self._lock:
            if self._is_closed:
                return
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            self._threads.discard(thread)
            raise

    def _run(self) -> None:
        _this_thread.readers = self
        try:
            while not self._is_closed and self._wait():
                pass
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                is_last = self._is_closed and not self._threads
            if is_last:
                self.poller.close()
                self._work_off(None)  # tasks may have been queued meanwhile
            elif self._is_closed:
                self._wake_one()  # the thread that wakes up ends, too

    def _wait(self) -> bool:
        """Wait for an event and handle it; return False if enough other threads are waiting."""
        with self._lock:
            if self._idle >= self._spare:
                return False
            self._idle += 1
        try:
            event = self.poller.wait()
        finally:
            with self._lock:
                self._idle -= 1
                needed = not self._idle and not self._is_closed
        if needed:
            try:
                self._start()
            except RuntimeError as error:  # the limit of threads is reached; the next event tries again
                if not self._has_warned:
                    self._has_warned = True
                    _log.warning("calls of other workers wait until handlers end: %s", error)
        if event is Signal.TIMER:
            self._end_stuck()
        elif event is not None and event is not Signal.WAKE:
            event.armed = 0
            if event.dialed:
                self._read_answers(event)
            else:
                self._read_calls(event)
        self._work_off(None)
        return True

    def close(self, timeout: float) -> None:
        """End the threads after their current tasks; wait for them at most `timeout` seconds.

        The last thread closes the poller. A new thread runs the tasks that are left, because all others may be in
        handlers. `run` checks `_is_closed` after it queues a task, so a late task is run there or picked up here.
        """
        with self._lock:
            self._is_closed = True
        self._wake_one()
        until = time.monotonic() + timeout
        for thread in list(self._threads):
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(until - time.monotonic(), 0.0))
        if self._tasks:
            last = threading.Thread(target=self._work_off, args=(None,), name="fastcoll-rpc", daemon=True)
            try:
                last.start()
            except RuntimeError:  # the limit of threads is reached, or the program is at its end
                self._work_off(None)

    def close_inherited(self) -> None:
        """In a child process made by fork, where none of the threads exist: close the descriptors."""
        self.poller.close()
