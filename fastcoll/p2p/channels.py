"""What carries messages: a channel to each peer, driven by compiled code. The contract for shm/ and net/.

One thread at a time drives the channels; it holds the word BUSY. What it does is a blocking call from begin to end
(`send`, `receive`), or a step of the courier: `advance` moves the bytes of everything under way and comes back
with an *event* when a decision is needed, which the other methods carry out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from numpy.typing import NDArray

from .transfers import Send

# A blocking call returns a number of core/status.py, or one below DONE: received from rank -1 - status.

# The events that `advance` returns. REST: what follows on GO.
ENTERED, ACKED, HEADER, ARRIVED, ACK_SPACE, REST = range(2, 8)

# Verdicts of an ack. GO: the receiver wants the rest of the message.
TAKEN, MISFIT, GO = 1, 2, 3

# The source of a receive from any rank.
ANY = -(1 << 62)


class Header(NamedTuple):
    """What a message says of itself. `attached`: how many of its bytes follow without being asked for."""

    kind: int
    nbytes: int
    number: int
    attached: int


class Ack(NamedTuple):
    """An answer to message `number`; kind and nbytes are those of the receiver's array."""

    number: int
    verdict: int
    nbytes: int
    kind: int


class Channels(ABC):
    """The channels of one rank to all its peers.

    Attributes:
        size: how many ranks there are.
    """

    size: int

    # ---- whose turn it is ------------------------------------------------------------------------

    @abstractmethod
    def ring_bell(self) -> None:
        """Have the compiled code that drives the channels come back at once. From any thread."""

    @abstractmethod
    def silence_bell(self) -> None:
        """Answer the bell; look at what it may have rung for afterwards, never before."""

    @abstractmethod
    def set_behind(self, behind: bool) -> None:
        """Whether blocking operations must go the way of posted ones."""

    @abstractmethod
    def seize(self) -> bool:
        """Take the channels for driving them, unless a call has them."""

    @abstractmethod
    def let_go(self) -> None:
        """The channels are free for whoever wants to drive them next."""

    @abstractmethod
    def is_mine(self) -> bool:
        """Whether the calling thread has taken them."""

    @abstractmethod
    def is_ready(self, peer: int) -> bool:
        """Whether messages to a peer can begin without `prepare`. Any thread."""

    @abstractmethod
    def prepare(self, peer: int) -> None:
        """Make the channel to a peer ready; blocks. Any thread, the channels need not be taken.

        Raises:
            GroupError: the peer died, or could not be reached in time.
        """

    @abstractmethod
    def check(self, peer: int | None) -> None:
        """Look after the channel to a peer (None: all).

        Raises:
            GroupError: it is broken, and nobody says why.
        """

    @abstractmethod
    def has_unread(self, peer: int) -> bool:
        """Whether a message of a peer has come that no receive has taken yet. Never blocks."""

    @abstractmethod
    def retire(self) -> None:
        """Nobody drives the channels any more; release them. Called once, by whoever has them."""

    # ---- a blocking call -------------------------------------------------------------------------

    @abstractmethod
    def send(self, array: NDArray[Any], peer: int, kind: int, resumed: bool) -> int:
        """Send a contiguous array and wait until it is taken, at most 0.1 s: DONE, AGAIN, WORKED, REFUSED or LATER."""

    @abstractmethod
    def receive(self, array: NDArray[Any], source: int, kind: int, resumed: bool) -> int:
        """Receive the next message of a rank or of ANY: -1 - rank, AGAIN, WORKED, OTHER or LATER."""

    @abstractmethod
    def adopt_send(self, send: Send) -> bool:
        """Leave a blocking send that has begun to the courier; whether it is still entering its channel."""

    @abstractmethod
    def adopt_receive(self, peer: int | None) -> int | None:
        """Leave a blocking receive to the courier; the rank whose message is arriving, if it had begun."""

    # ---- the courier's steps ---------------------------------------------------------------------

    @abstractmethod
    def advance(self) -> tuple[int, int] | None:
        """Move what is under way: the next event and its peer; None after 50 ms without one, or when the bell rang."""

    @abstractmethod
    def begin(self, send: Send, attached: int) -> None:
        """Make the first `attached` bytes of a message what enters the channel to its peer. None may be entering."""

    @abstractmethod
    def last_sent(self, peer: int) -> int:
        """The number of the message to a peer that was begun last."""

    @abstractmethod
    def last_ack(self, peer: int) -> Ack:
        """The answer that ACKED was about."""

    @abstractmethod
    def header(self, peer: int) -> Header:
        """The message of a peer whose header was read last."""

    @abstractmethod
    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        """Let the bytes that follow the header arrive at `address` (0: drop them); then comes ARRIVED.

        `keep` has that memory; whoever drops the channels before must let it live for as long as it may be written to.
        """

    @abstractmethod
    def acknowledge(self, peer: int, ack: Ack) -> bool:
        """Answer a message of a peer. False: no space; after ACK_SPACE call again with the same."""

    @abstractmethod
    def watch(self, interest: NDArray[Any]) -> None:
        """How many messages of each rank are waited for; headers of the others need not be read."""

    @abstractmethod
    def note_unacked(self, peer: int, count: int) -> None:
        """How many messages to a peer wait for an answer."""

    @abstractmethod
    def note_owed(self, peer: int, count: int) -> None:
        """How many answers to a peer wait for space."""
