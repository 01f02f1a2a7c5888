"""torch's Work, implemented by fastcoll's Works.

C++ (DDP, functional collectives) calls only `wait` and `get_future`. An error must reach a future by a callback that
raises the error. Future.set_exception would make DDP crash, and would make other C++ code take the failure for a
success.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work as TorchWork
from torch.autograd import Variable

from ..core.profiler import later_wait
from ..core.work import Work
from ..errors import CollectiveTimeoutError

_log = logging.getLogger("fastcoll")
_IDLE_SECONDS = 5.0
_NO_LIMIT = timedelta()  # means "no timeout" in C++, as do negative values

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"

Job = Callable[[], None]


class DoneWork(TorchWork):  # type: ignore[misc]
    """An operation that was complete when its call returned; its results are in `tensors`."""

    __slots__ = ("_tensors",)  # with the direct call of __init__ below, this saves a third of the 0.7 us

    _works: Sequence[Work] = ()
    _limit: float | None = None
    _future: Any = None

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        TorchWork.__init__(self)
        self._tensors = tensors

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until the operations are complete; the timeout is for all of them together.

        Raises:
            CollectiveTimeoutError: not complete within `timeout`; the operations continue.
            FastcollError: the error that ended an operation.
        """
        if not self._works:
            return True
        limit = timeout.total_seconds() if timeout and timeout > _NO_LIMIT else self._limit
        left, start = limit, time.monotonic()
        for work in self._works:
            try:
                work.wait(left)
            except CollectiveTimeoutError as error:
                if limit is None or len(self._works) == 1 or work.is_completed():
                    raise  # the operation itself timed out
                count = len(self._works)
                raise CollectiveTimeoutError(
                    f"{count} operations are not complete after {limit:g} s"
                ) from error
            if limit is not None:
                left = max(0.0, start + limit - time.monotonic())
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return list(self._tensors)

    def get_future(self) -> Any:
        """Return a future that gives the tensors, or raises the error of an operation."""
        base: Any = torch.futures.Future()
        if not self._works:
            base.set_result(list(self._tensors))
            return base
        if self._future is None:
            if self._works[0].profiled is not None:
                # At the end of backward() DDP's reducer, in C++, blocks for these futures, which no `wait` of Python
                # sees. A callback that is queued now runs just before that. The caller is the reducer, for which the
                # innermost frame of Python is backward()'s, or one of torch's hooks for it.
                caller = sys._getframe(1)
                is_reducer = caller.f_code.co_name == "_engine_run_backward"
                if is_reducer or caller.f_globals["__name__"].startswith(_HOOKS):
                    for work in self._works:
                        Variable._execution_engine.queue_callback(later_wait(work))
            # `outcome` does not use `self`, because a future that held this Work would keep itself alive.
            works, tensors = self._works, list(self._tensors)

            def outcome(_: Any) -> list[torch.Tensor]:
                for work in works:
                    work.wait()
                return tensors

            self._future = base.then(outcome)
            # Operations of one group end in the order in which they were started, so the earlier ones have ended when
            # the last one does.
            if self.is_completed():
                base.set_result(None)
            else:
                complete = partial(base.set_result, None)
                self._works[-1].add_done_callback(lambda _: completions.submit(complete))
        return self._future


class PendingWork(DoneWork):
    """One operation of torch that consists of fastcoll's operations `works`, in the order of their start.

    `wait` takes at most `limit` seconds; None: the group's timeout applies.
    """

    def __init__(
        self, works: Sequence[Work], tensors: Sequence[torch.Tensor], limit: float | None = None
    ) -> None:
        super().__init__(tensors)
        self._works, self._limit = tuple(works), limit

    def source_rank(self) -> int:
        """Wait for a receive, and return the sender's group rank."""
        return self._works[0].source_rank()

    _source_rank = source_rank


class Completions:
    """Threads that complete futures, one for each completion in progress; idle threads end after a while.

    A future's callbacks run on the thread that completes it, and may wait for other operations of the same group
    (PowerSGD's do). The progress thread carries these operations out, so a callback on that thread would wait for ever.
    So an idle thread of this class, or a new thread, completes the future.
    """

    def __init__(self) -> None:
        self.start_anew()

    def start_anew(self) -> None:
        """Set the initial state; also in a child of fork, which has none of the threads."""
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._idle = 0
        self._threads = 0

    def submit(self, job: Job) -> None:
        """Run `job` on another thread. Never blocks.

        If Python can start no more threads, for example at its exit, the calling thread runs the job. If this is a
        group's progress thread, a job that waits for an operation of the group gets an error.
        """
        with self._changed:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._changed.notify()
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="fastcoll-torch", daemon=True).start()
        except RuntimeError:
            with self._changed:
                here = self._jobs.pop() if self._jobs else None
            if here is not None:
                _do(here)
            with self._changed:
                self._threads -= 1
                self._changed.notify_all()

    def settle(self, timeout: float) -> bool:
        """Wait until no job is running, for at most `timeout` seconds; return whether that succeeded."""
        with self._changed:
            return self._changed.wait_for(self._is_settled, timeout)

    def _is_settled(self) -> bool:
        return not self._jobs and self._idle == self._threads

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                if self._is_settled():
                    self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs, _IDLE_SECONDS)
                self._idle -= 1
                if not self._jobs:
                    self._threads -= 1
                    return
                job = self._jobs.popleft()
            _do(job)
            del job


def _do(job: Job) -> None:
    try:
        job()
    except Exception:
        _log.exception("a future could not be completed")


completions = Completions()
