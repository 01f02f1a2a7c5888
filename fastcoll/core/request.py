"""Request: a message that is sent or received again and again, with the same arguments (MPI's persistent requests)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UsageError
from .work import Timeout, Work


class Request:
    """A send or a receive that `start` posts, as often as it is wanted.

    Each start posts one message. The next start may come once that is complete. The array belongs to the
    operation in between.

    Args:
        post: posts a message with the same arguments every time.
    """

    def __init__(self, post: Callable[[], Work]) -> None:
        self.post = post
        self.work: Work | None = None
        """The operation that was started last; None before the first start."""

    def __repr__(self) -> str:
        return f"<Request {'that was not started' if self.work is None else repr(self.work)}>"

    def start(self) -> None:
        """Post the message.

        Raises:
            UsageError: the one that was started last is not complete.
            GroupError: the group has failed.
        """
        self.check_startable()
        self.work = self.post()

    def check_startable(self) -> None:
        """Refuse a start while the last operation is under way."""
        if not self.is_completed():
            assert self.work is not None
            raise UsageError(
                f"{self.work.describe} was started and is not complete; wait() before the next start"
            )

    def wait(self, timeout: Timeout = None) -> bool:
        """As the `wait` of a Work, of the operation that was started last; True at once where there is none."""
        return self.work is None or self.work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether nothing is under way: MPI's test. Never blocks."""
        return self.work is None or self.work.is_completed()

    def result(self, timeout: Timeout = None) -> Any:
        """Wait, then give the sender's rank, of a receive; None of a send, and before the first start."""
        return None if self.work is None else self.work.result(timeout)


def start_all(requests: Sequence[Request]) -> None:
    """Start requests in their order; none, if one cannot be started."""
    for index, request in enumerate(requests):
        if not isinstance(request, Request):
            raise UsageError(
                f"requests[{index}] is of type {type(request).__name__}; give what send_init and recv_init return"
            )
        if any(request is other for other in requests[:index]):
            raise UsageError(f"requests[{index}] is in the list twice")
        request.check_startable()
    for request in requests:
        request.start()
