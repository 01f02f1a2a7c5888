"""What carries messages: a pipe from one rank to its peers. It moves bytes and tells what is there; it never decides.

A message is a header and its bytes, of which the first `attached` follow at once; the rest follows when the receiver
says GO. An ack with TAKEN or MISFIT ends it. One thread at a time drives a pipe, it holds the word BUSY. `advance`
moves the bytes of everything under way and comes back with an *event* when a decision is needed; the engine
(engine.py) decides, and the other methods carry that out.

A pipe may have a compiled short cut for a blocking call (`send`, `receive`). It takes BUSY, and is over when it returns
DONE; otherwise it leaves BUSY taken, and the engine goes on with the message where it stands.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.status import LATER
from ..errors import GroupError
from ..kernels.primitives import address_of, cells_of
from .transfers import Held, Send

ARMED = 16
"""What `post_receive` returns, besides a status: `advance` completes the receive."""

# The events of `advance`, which returns peer * EVENTS + event, or NOTHING. REST: what follows on GO has begun to
# arrive. RECEIVED: the message for the armed receive has arrived and is acknowledged. BOTH: that, and ACKED.
EVENTS = 16
NOTHING = -1
ENTERED, ACKED, HEADER, ARRIVED, ACK_SPACE, REST, RECEIVED, BOTH = range(2, 10)

NOT_MINE = -2
"""What `complete` returns where it has not taken the pipe."""

# Verdicts of an ack. GO: the receiver wants the rest of the message.
TAKEN, MISFIT, GO = 1, 2, 3

ANY = -(1 << 62)
"""The source of a receive from any rank."""

ENDLESS_BYTES = 1 << 62


class Header(NamedTuple):
    """What a message says of itself. `attached`: how many of its bytes follow without being asked for."""

    kind: int
    nbytes: int
    number: int
    attached: int


class Ack(NamedTuple):
    """An answer to message `number`; kind and nbytes are those of the receiver's array."""

    number: int
    decision: int
    nbytes: int
    kind: int


class Begun(NamedTuple):
    """How far the short cut has got with a receive.

    Attributes:
        peer: whose message it is.
        number: as in its header.
        arriving: bytes of it are on their way into the array.
        whole: no more than these are missing.
        asking: GO is still to be said.
    """

    peer: int
    number: int
    arriving: bool
    whole: bool
    asking: bool


class Posted(NamedTuple):
    """A request that a compiled caller has posted and the engine does not know.

    Attributes:
        number: the request's number; the caller waits for it by that.
        sends: whether it is a send.
        peer, kind: of its message.
        array: the bytes of the caller's array.
        message: of a send, its number among the messages to the peer.
        under_way: whether its message is entering the pipe, or arriving.
        ended: whether it has ended without an error.
        refused: of a refused send, the kind and bytes of the receiver's array.
    """

    number: int
    sends: bool
    peer: int
    kind: int
    array: NDArray[np.uint8]
    message: int
    under_way: bool
    ended: bool
    refused: Held | None


class Pipe(Protocol):
    """A rank's pipe to all peers that it reaches in one way; peers are numbers from 0.

    Attributes:
        eager: bytes of a message that are attached.
        window: bytes that may be attached to messages which no receive has asked for yet.
        most_unacked: messages to one peer without an ack; later ones wait.
    """

    eager: int = ENDLESS_BYTES
    window: int = ENDLESS_BYTES
    most_unacked: int = 1 << 16  # each costs the receiver 0.3 KiB

    # ---- whose turn it is ------------------------------------------------------------------------

    def seize(self) -> bool:
        """Take the pipe for driving it, unless somebody has it. Never blocks."""

    def let_go(self) -> None:
        """The pipe is free for whoever wants to drive it next."""

    def is_mine(self) -> bool:
        """Whether the calling thread has taken it."""

    def ring_bell(self) -> None:
        """Have the compiled code that drives the pipe come back at once. From any thread."""

    def silence_bell(self) -> None:
        """Answer the bell; look at what it may have rung for afterwards, never before."""

    def set_behind(self, behind: bool) -> None:
        """Whether short cuts must not be taken, since other operations come first."""

    # ---- peers -----------------------------------------------------------------------------------

    def is_ready(self, peer: int) -> bool:
        """Whether messages to a peer can begin without `prepare`. Any thread."""
        return True

    def prepare(self, peer: int) -> None:
        """Reach a peer; blocks. Any thread, the pipe need not be taken.

        Raises:
            GroupError: the peer died, or could not be reached in time.
        """
        return None

    def check(self, peer: int | None) -> None:
        """Look after the way to a peer (None: all).

        Raises:
            GroupError: it is broken, and nobody says why.
        """
        return None

    def garbled(self, peer: int) -> GroupError:
        """The error for a peer that sent what no rank sends."""

    def has_unread(self, peer: int) -> bool:
        """Whether a message of a peer has come that no receive has taken yet. Never blocks."""

    def retire(self) -> None:
        """Nobody drives the pipe any more; release what it has. Called once, by whoever has taken it."""

    # ---- short cuts ------------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int) -> int:
        """Send a contiguous array and wait until it is taken: DONE, AGAIN, WORKED, OTHER, REFUSED or LATER."""
        return LATER

    def receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        """Receive the next message of a rank or of ANY: -1 - rank, AGAIN, WORKED, OTHER or LATER."""
        return LATER

    def post_send(self, array: NDArray[Any], peer: int, kind: int) -> tuple[int, bool] | None:
        """As `begin`, of a small message as a whole, behind none; then BUSY stays taken. Or None."""
        return None

    def post_receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        """Receive a small message of a peer that is there: DONE. Or have `advance` do it: ARMED, BUSY stays taken.

        Or LATER.
        """
        return LATER

    def complete(self, handled: int, peer: int, number: int) -> int:
        """Take the pipe and `advance`, first of all what short cuts have posted to or from a peer.

        NOT_MINE: another thread has the pipe, or had it and has told of other events than `handled` counts.

        Args:
            number: of the send that the caller waits for; 0: it waits for the armed receive.
        """
        return NOT_MINE

    def leave_send(self, peer: int) -> tuple[int, bool, bool]:
        """Leave a send that has begun to the engine: its number, whether it enters, and whether that is its rest."""
        raise AssertionError("this pipe has none")

    def leave_receive(self, source: int) -> Begun | None:
        """Leave a receive from a peer or ANY to the engine; None: it has not begun."""
        raise AssertionError("this pipe has none")

    # ---- requests of compiled callers --------------------------------------------------------------

    def has_posted(self) -> bool:
        """Whether `take_posted` would return requests. Any thread may call this."""
        return False

    def take_posted(self, ended: bool) -> list[Posted]:
        """Return the requests of compiled callers, in order, and remove them from the pipe.

        Args:
            ended: also those that have ended without an error.
        """
        return []

    def touched(self) -> int:
        """Return a counter that grows whenever compiled callers work on their requests."""
        return 0

    def stay_awake(self) -> None:
        """From now on the engine's thread checks `has_posted` and `touched` every millisecond."""
        return None

    def may_sleep(self) -> bool:
        """Whether the engine's thread may sleep.

        True if no request is pending; compiled callers then post no request that needs the thread.
        """
        return True

    # ---- steps -----------------------------------------------------------------------------------

    def advance(self, handled: int, wait: bool) -> int:
        """Move what is under way: the next event; NOTHING after 50 ms without one, or when the bell rang.

        An interrupt may come when this returns and lose what it says. So it says the same event again until `handled`,
        how many events the caller has dealt with, counts that one.

        Args:
            wait: whether to wait for an event.
        """

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        """Let a message with its first `attached` bytes enter the pipe, in which none enters: its number, and whether
        ENTERED is still to come."""

    def begin_rest(self, peer: int, send: Send, number: int, attached: int) -> None:
        """Let all but the first `attached` bytes of a message enter the pipe."""
        raise AssertionError("this pipe has none")

    def taken(self, peer: int) -> int:
        """The number of the message that ACKED was about, if the answer was TAKEN; else 0."""
        ack = self.last_ack(peer)
        return ack.number if ack.decision == TAKEN else 0

    def last_ack(self, peer: int) -> Ack:
        """The answer that ACKED was about."""

    def header(self, peer: int) -> Header:
        """The message of a peer that HEADER was about."""

    def rest(self, peer: int) -> tuple[int, int]:
        """Number and bytes of the rest that REST was about."""
        raise AssertionError("this pipe has none")

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        """Let the bytes that follow the header arrive at `address` (0: drop them); then comes ARRIVED.

        `keep` has that memory; whoever drops the pipe before must let it live for as long as it may be written to.
        """

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        """Answer a message of a peer. False: no space; after ACK_SPACE call again with the same."""

    def watch(self, peer: int, count: int) -> None:
        """How many receives a message of a peer could match. While there are none, headers need not be read."""

    def expect(self, peer: int, count: int) -> None:
        """How many rests a peer was asked for."""
        return None

    def note_owed(self, peer: int, count: int) -> None:
        """How many answers to a peer wait for space."""
        return None

    def note_stored(self, count: int) -> None:
        """How many messages wait for a receive. Only while there are none a short cut may arm one."""
        return None

    def is_armed(self, peer: int) -> bool:
        """Whether `advance` has not yet begun to complete the receive that is armed for a peer. Any thread may ask."""
        return False

    def disarm(self, peer: int) -> None:
        """The receive that a short cut has armed for a peer is matched here."""
        return None


class WordPipe(Pipe):
    """A pipe whose kernels keep what they know in words: a table of the pipe's, and a row for each peer.

    Args:
        words: where the table's and a row's words are: BUSY, BEHIND and STORED; WATCHED, OWED, ARMED_KIND and the
            four of an ack, from ACK_NUMBER on.

    Attributes:
        address: of the table, what the kernels take first.
        words, cells: those of the table, and those of all rows.
    """

    def __init__(self, words: ModuleType, table_words: int, row_words: int, size: int) -> None:
        self.table = np.zeros(table_words, np.int64)
        self.rows = np.zeros((size, row_words), np.int64)
        self.rows[:, words.ARMED_KIND] = -1
        self.address = address_of(self.table)
        self.words = cells_of(self.table)
        self.cells = cells_of(self.rows)
        self._width = row_words
        self._at = words

    def word(self, peer: int, index: int) -> int:
        """A word of the row of `peer`."""
        return self.cells[peer * self._width + index]

    def put(self, peer: int, index: int, value: int) -> None:
        """Set a word of the row of `peer`."""
        self.cells[peer * self._width + index] = value

    def let_go(self) -> None:
        self.words[self._at.BUSY] = 0

    def is_mine(self) -> bool:
        return bool(self.words[self._at.BUSY] == threading.get_ident())

    def set_behind(self, behind: bool) -> None:
        self.words[self._at.BEHIND] = behind

    def taken(self, peer: int) -> int:
        at = peer * self._width + self._at.ACK_NUMBER
        return self.cells[at] if self.cells[at + 1] == TAKEN else 0

    def last_ack(self, peer: int) -> Ack:
        at = peer * self._width + self._at.ACK_NUMBER
        return Ack(*self.cells[at : at + 4])

    def watch(self, peer: int, count: int) -> None:
        self.put(peer, self._at.WATCHED, count)

    def note_owed(self, peer: int, count: int) -> None:
        self.put(peer, self._at.OWED, count)

    def note_stored(self, count: int) -> None:
        self.words[self._at.STORED] = count

    def is_armed(self, peer: int) -> bool:
        return self.word(peer, self._at.ARMED_KIND) >= 0

    def disarm(self, peer: int) -> None:
        self.put(peer, self._at.ARMED_KIND, -1)
