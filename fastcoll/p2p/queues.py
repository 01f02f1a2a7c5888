"""The match queues: which receive gets which message, by MPI's rules.

A receive matches the earliest message from its source (or from any rank) with its tag (or with any user's tag). A
message matches the earliest posted receive that accepts it. Receives and messages without a match are kept in the order
in which they were posted or arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from numpy.typing import NDArray

from ..core.operands import wildcard_of
from .transfers import Receive, Transfer, tag_of

_T = TypeVar("_T")


@dataclass(eq=False)
class IncomingMessage:
    """A message that has begun to arrive.

    Attributes:
        source: the sender's rank.
        tag, kind, nbytes: the fields of the header; `kind` encodes tag and dtype (transfers.py).
        number: the message's number among those of its source, for the ack.
        attached: how many of its bytes follow the header at once.
        address: the address of the buffer that holds its bytes until a receive takes them; 0 if there is no buffer,
            because the bytes go to the receive's array.
        keep: the array that owns this buffer.
        receive: the receive that has matched it.
        arrived: whether all attached bytes have arrived.
        complete: whether all bytes have arrived, or the last ones are arriving in the receive's array.
    """

    source: int
    kind: int
    nbytes: int
    number: int = 0
    attached: int = 0
    address: int = 0
    keep: NDArray[Any] | None = None
    receive: Receive | None = None
    arrived: bool = False
    complete: bool = False

    @property
    def tag(self) -> int:
        """The tag that its kind encodes."""
        return tag_of(self.kind)


class MatchQueues:
    """Posted receives without a message, and messages without a receive, each in their order.

    Attributes:
        stored: how many messages wait for a receive.
    """

    def __init__(self) -> None:
        self.stored = 0
        self._kept = 0  # receives and messages kept so far
        self._receives: dict[int, list[tuple[int, Receive]]] = {}
        self._messages: dict[int, list[tuple[int, IncomingMessage]]] = {}

    def keeps(self, transfer: Transfer) -> bool:
        """Whether a receive has not matched a message yet. Any thread may call this."""
        return any(receive is transfer for _, receive in self._receives.get(transfer.tag, ()))

    def post(self, receive: Receive) -> IncomingMessage | None:
        """Return the message that a new receive matches. If there is none, keep the receive and return None."""
        message = self.find(receive.peer, receive.tag)
        if message is None:
            self._keep(self._receives, receive.tag, receive)
        else:
            _drop(self._messages, message.tag, message)
            self.stored -= 1
        return message

    def find(self, peer: int | None, tag: int) -> IncomingMessage | None:
        """Return the earliest message from `peer` (None: any rank) with `tag`, or None. The message stays stored."""
        tags = (tag,) if tag >= 0 else tuple(other for other in self._messages if wildcard_of(other) == tag)
        found: tuple[int, IncomingMessage] | None = None
        for each in tags:
            for entry in self._messages.get(each, ()):
                if peer is None or entry[1].source == peer:
                    found = entry if found is None or entry[0] < found[0] else found
                    break
        return found and found[1]

    def arrive(self, message: IncomingMessage) -> Receive | None:
        """Return the receive that a new message matches. If there is none, keep the message and return None."""
        tag, found = message.tag, None
        for each in {tag, wildcard_of(tag)}:
            for entry in self._receives.get(each, ()):
                if entry[1].peer in (None, message.source):
                    found = entry if found is None or entry[0] < found[0] else found
                    break
        if found is None:
            self._keep(self._messages, tag, message)
            self.stored += 1
            return None
        _drop(self._receives, found[1].tag, found[1])
        return found[1]

    def _keep(self, kept: dict[int, list[tuple[int, _T]]], tag: int, one: _T) -> None:
        self._kept += 1
        kept.setdefault(tag, []).append((self._kept, one))


def _drop(kept: dict[int, list[tuple[int, _T]]], tag: int, one: _T) -> None:
    """Remove an entry. If it is the last entry of its tag, delete the list of that tag."""
    entries = kept[tag]
    del entries[next(index for index, entry in enumerate(entries) if entry[1] is one)]
    if not entries:
        del kept[tag]
