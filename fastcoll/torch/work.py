"""torch's Work over fastcoll's.

C++ (DDP, functional collectives) calls `wait` and `get_future` alone. An error must reach a future by a callback that
raises: Future.set_exception makes DDP crash, and lets C++ take the failure for success.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import Work as TorchWork

from ..core.work import Work
from ..errors import CollectiveTimeoutError
from .completion import completions

_NO_LIMIT = timedelta()  # how C++ says "no timeout"; it also uses negative ones


class DoneWork(TorchWork):  # type: ignore[misc]
    """An operation that was complete when it was called.

    Args:
        tensors: where the results are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class PendingWork(DoneWork):
    """One or more operations of fastcoll that make up one of torch.

    Args:
        works: in the order in which they were started.
        tensors: where the results are.
        limit: seconds that `wait` takes at most; None leaves it to the group's timeout.
    """

    def __init__(
        self, works: Sequence[Work], tensors: Sequence[torch.Tensor], limit: float | None = None
    ) -> None:
        super().__init__(tensors)
        self._works = tuple(works)
        self._limit = limit
        self._future: Any = None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Block until complete.

        Raises:
            CollectiveTimeoutError: not complete within `timeout`; the operation goes on.
            FastcollError: whatever ended the operation.
        """
        limit = timeout.total_seconds() if timeout and timeout > _NO_LIMIT else self._limit
        if limit is None or len(self._works) == 1:
            for work in self._works:
                work.wait(limit)
        else:
            self._wait_for_all(limit)
        return True

    def _wait_for_all(self, limit: float) -> None:
        """Wait for several operations, which share the time."""
        end = time.monotonic() + limit
        for work in self._works:
            try:
                work.wait(max(0.0, end - time.monotonic()))
            except CollectiveTimeoutError as error:
                if work.is_completed():
                    raise  # the operation's own
                count = len(self._works)
                raise CollectiveTimeoutError(
                    f"{count} operations are not complete after {limit:g} s"
                ) from error

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next(filter(None, (work.exception() for work in self._works)), None)

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._tensors

    def get_future(self) -> Any:
        if self._future is None:
            self._future = _future_of(self._works, self._tensors)
        return self._future

    def source_rank(self) -> int:
        """The group rank that a receive got its message from; waits for it."""
        return self._works[0].source_rank()

    _source_rank = source_rank


def _future_of(works: Sequence[Work], tensors: list[torch.Tensor]) -> Any:
    """A future with the tensors, or with the error of one of the works."""
    base: Any = torch.futures.Future()

    def outcome(_: Any) -> list[torch.Tensor]:
        for work in works:
            work.wait()
        return tensors

    future = base.then(outcome)
    # Operations of one group end in the order in which they were started, so at the end of the last one there is
    # hardly anything to wait for.
    if all(work.is_completed() for work in works):
        base.set_result(None)
    else:
        works[-1].add_done_callback(lambda _: completions.submit(partial(base.set_result, None)))
    return future
