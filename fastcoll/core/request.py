"""Request: a send or receive that is started repeatedly with the same arguments (MPI's persistent requests)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UsageError
from .work import Timeout, Work


class Request:
    """A send or a receive that can be started any number of times.

    Each `start` posts it once, and it must be complete before the next start. Do not use the array between a start and
    the completion.

    Args:
        post: a function that posts the send or receive, with the same arguments every time.
    """

    def __init__(self, post: Callable[[], Work]) -> None:
        self.post = post
        self.work: Work | None = None
        """The operation of the last start; None before the first."""

    def __repr__(self) -> str:
        return f"<Request {'that was not started' if self.work is None else repr(self.work)}>"

    def start(self) -> None:
        """Post the send or receive.

        Raises:
            UsageError: the send or receive of the previous start is not complete.
            GroupError: the group has failed.
        """
        self.check_startable()
        self.work = self.post()

    def check_startable(self) -> None:
        """Raise UsageError if the operation of the last start is pending."""
        if not self.is_completed():
            assert self.work is not None
            raise UsageError(
                f"{self.work.describe} was started and is not complete; wait() before the next start"
            )

    def wait(self, timeout: Timeout = None) -> bool:
        """Wait for the operation of the last start; return True at once if there is none."""
        return self.work is None or self.work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the operation of the last start is complete, or there is none (MPI_Test). Never blocks."""
        return self.work is None or self.work.is_completed()

    def result(self, timeout: Timeout = None) -> Any:
        """Wait, then return the sender's rank. Return None for a send, and before the first start."""
        return None if self.work is None else self.work.result(timeout)


def start_all(requests: Sequence[Request]) -> None:
    """Start requests in order; if one of them cannot be started, start none."""
    for index, request in enumerate(requests):
        if not isinstance(request, Request):
            raise UsageError(
                f"requests[{index}] is of type {type(request).__name__}; give the Requests of send_init and recv_init"
            )
        if any(request is other for other in requests[:index]):
            raise UsageError(f"requests[{index}] is in the list twice")
        request.check_startable()
    for request in requests:
        request.start()
