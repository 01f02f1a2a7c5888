"""Match queues, which receive gets which message: MPI's rules, as a data structure without any memory or clock.

A receive matches the earliest message with its tag from its source, a message the earliest posted receive
that wants it. What finds no partner is kept, in order: receives as *posted*, messages as *stored*.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from .transfers import Receive, Send, Transfer, tag_of


@dataclass(eq=False)
class Message:
    """A message that has begun to arrive here.

    Attributes:
        source, tag, kind, nbytes: what its header says, and whose it is.
        number: its place among the source's messages, for the ack.
        attached: how many of its bytes come without being asked for.
        address: where its bytes are kept until a receive takes them, 0 when they go to the receive's array.
        keep: what keeps that memory alive.
        sender: the send to oneself that it belongs to.
        receive: the receive that has matched it.
        arrived: all that was attached is here.
        complete: all of it is here, or on its way into the array.
    """

    source: int
    kind: int
    nbytes: int
    number: int = 0
    attached: int = 0
    address: int = 0
    keep: NDArray[Any] | None = None
    sender: Send | None = None
    receive: Receive | None = None
    arrived: bool = False
    complete: bool = False

    @property
    def tag(self) -> int:
        """The tag in its kind."""
        return tag_of(self.kind)


class MatchQueues:
    """Receives without a message and messages without a receive.

    Attributes:
        stored: how many messages wait for a receive.
    """

    def __init__(self) -> None:
        self.stored = 0
        self._receives: dict[int, list[Receive]] = {}
        self._messages: dict[int, list[Message]] = {}

    def keeps(self, transfer: Transfer) -> bool:
        """Whether a receive, or the message of a send to oneself, has no partner yet. Any thread may ask."""
        if isinstance(transfer, Receive):
            return transfer in self._receives.get(transfer.tag, ())
        return any(message.sender is transfer for message in self._messages.get(transfer.tag, ()))

    def post(self, receive: Receive) -> Message | None:
        """The message for a new receive; None: the receive is kept."""
        waiting = self._messages.get(receive.tag, [])
        for index, message in enumerate(waiting):
            if receive.peer in (None, message.source):
                del waiting[index]
                if not waiting:
                    del self._messages[receive.tag]
                self.stored -= 1
                return message
        self._receives.setdefault(receive.tag, []).append(receive)
        return None

    def arrive(self, message: Message) -> Receive | None:
        """The receive for a new message; None: the message is kept."""
        posted = self._receives.get(message.tag, [])
        for index, receive in enumerate(posted):
            if receive.peer in (None, message.source):
                del posted[index]
                if not posted:
                    del self._receives[message.tag]
                return receive
        self._messages.setdefault(message.tag, []).append(message)
        self.stored += 1
        return None
