"""Message: the Work of one message between GPUs, from when it is posted.

    posted -> claimed by whoever carries it on -> queued on a GPU -> over
                                               -> over (an error, nothing to move, or moved through the host)

What is posted can be claimed once (nccl_mail.py), and only who has claimed it queues or ends it.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from ...core.work import ENDLESS, refuse_to_block
from ..array import DeviceArray
from ..border import OnDevice
from ..stream_work import Own, StreamWork
from ..transit import Marks


class Message(StreamWork):
    """A send or a receive. Until it is queued `wait()` blocks the host; then it orders streams, as any StreamWork's.

    Args:
        describe: as the mailbox's operations are described.
        own: a stream on the array's GPU.
        item: the array, adopted.
        kind: tag and dtype, as in messages/.
        marks: where its stream was when the message was posted.
        number: this rank's own.

    Attributes:
        item: the array, adopted; let go when it is over.
    """

    def __init__(self, describe: str, own: Own, item: OnDevice, kind: int, marks: Marks, number: int) -> None:
        super().__init__(describe, own, [item.array])
        self.item: Any = item
        self.kind, self.marks, self.number = kind, marks, number
        self._begun = threading.Event()

    @property
    def array(self) -> DeviceArray:
        """What is moved, until it is over."""
        array: DeviceArray = self.item.array
        return array

    @property
    def has_begun(self) -> bool:
        """Whether it is queued, or over."""
        return self._begun.is_set() or self._done.is_set()

    def comes_from(self, source: int) -> None:
        """Say whose message a receive gets; before it is queued or ends."""
        self._result = source

    def queued_on(self, own: Own, event: int, kept: Any, error: BaseException | None) -> None:
        """It is queued on a stream, or in part, which ends it with `error`; the rest as `StreamWork._queued`."""
        self._own, self.began = own, time.monotonic()
        self._queued(event, kept)
        if error is not None:
            self._settle(error)
        self._begun.set()

    def _order(self) -> None:
        if not self.has_begun:
            refuse_to_block(f"waiting for {self._describe}")
            self._begun.wait(ENDLESS)
        super()._order()

    def _is_past(self) -> bool:
        return self.has_begun and super()._is_past()

    def _settle(self, error: BaseException | None = None) -> None:
        super()._settle(error)
        self._begun.set()
        if self._event is None:
            self._let_go()

    def _let_go(self) -> None:
        super()._let_go()
        self.item = None
