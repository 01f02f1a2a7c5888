"""The interface of pipes, which move messages between one rank and its peers. A pipe moves bytes and decides nothing.

A message is a header and its bytes. The first `attached` bytes follow the header at once, the rest follows the
receiver's ack GO. An ack TAKEN or MISFIT ends the message. One thread at a time uses a pipe: the thread that has set
the pipe's word BUSY. It drives the pipe by calling `advance`, which moves the bytes of all messages under way and
returns an *event* when a decision is needed. The Exchange (exchange.py) decides, and calls the other methods.

A pipe may have *short cuts*: compiled calls that send or receive a message (`send`, `receive`, `post_send`,
`post_receive`). A short cut sets BUSY. If it completes the message, or returns LATER because it has done nothing, it
clears BUSY. Otherwise BUSY stays set, and the engine continues the message.
"""

from __future__ import annotations

import threading
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.status import LATER
from ..errors import GroupError
from ..kernels import shared_words
from ..kernels.primitives import address_of, cells_of
from .transfers import Held, Send, Transfer

ARMED = 16
"""The result of `post_receive` if `advance` will complete the receive; all its other results are statuses."""

# The events of `advance`, which returns peer * EVENTS + event, or NOTHING.
#   ENTERED    the bytes of a message, or its rest, have all entered the pipe
#   ACKED      an ack has arrived (`last_ack`)
#   HEADER     a header has arrived (`header`)
#   ARRIVED    the bytes that `accept` has placed have all arrived
#   ACK_SPACE  there is space for an ack again
#   REST       the bytes that follow a GO have begun to arrive (`rest`)
#   RECEIVED   the message for the armed receive has arrived and is acknowledged
#   BOTH       RECEIVED and ACKED
EVENTS = 16
NOTHING = -1
ENTERED, ACKED, HEADER, ARRIVED, ACK_SPACE, REST, RECEIVED, BOTH = range(2, 10)

NOT_MINE = -2
"""What `complete` returns if it could not take the pipe."""

QUIET, STILL, STUCK, FINISHED = range(4)
"""The results of `attend`."""

# The decisions of an ack. TAKEN: a receive has taken the message. MISFIT: the message does not fit the receive's array.
# GO: the receiver wants the rest of the message.
TAKEN, MISFIT, GO = 1, 2, 3

ANY = -(1 << 62)
"""The source of a receive from any rank."""

ENDLESS_BYTES = 1 << 62


class Header(NamedTuple):
    """The header of a message. `attached`: how many of its bytes follow the header at once."""

    kind: int
    nbytes: int
    number: int
    attached: int


class Ack(NamedTuple):
    """The ack of message `number`; `kind` and `nbytes` are those of the receiver's array."""

    number: int
    decision: int
    nbytes: int
    kind: int


class Begun(NamedTuple):
    """The state in which a short cut has left a receive.

    Attributes:
        peer: the sender.
        number: the message's number, from its header.
        arriving: whether bytes of the message are arriving in the array.
        whole: whether no bytes are missing except those that are arriving.
        asking: whether GO must still be sent.
    """

    peer: int
    number: int
    arriving: bool
    whole: bool
    asking: bool


class Posted(NamedTuple):
    """A request that was posted without the engine.

    Attributes:
        number: the request's number, by which the caller waits for it.
        work: the Work of a request of Python; None if a compiled caller has posted the request.
        sends: whether the request is a send.
        peer, kind: the message's peer, and its tag and dtype (`kind_of` in transfers.py).
        array: the bytes of the caller's array.
        message: for a send, its number among the messages to the peer.
        under_way: whether the message is entering the pipe, or arriving.
        ended: whether the request has ended without an error.
        refused: for a refused send, kind and bytes of the receiver's array; else None.
    """

    number: int
    work: Transfer | None
    sends: bool
    peer: int
    kind: int
    array: NDArray[np.uint8]
    message: int
    under_way: bool
    ended: bool
    refused: Held | None


class Pipe(Protocol):
    """A rank's pipe to all peers that one transport reaches; peers are numbered from 0.

    Attributes:
        eager: the most bytes of a message that are attached.
        window: the most attached bytes, of all messages to one peer, that may be without an ack.
        attends: whether the pipe has requests of Python, and `attend`, `address` and `waits`.
        address: the address of the pipe's table.
        waits: the entry that waits for a request of Python. It takes `address` and the request's number, and returns
            LATER if the engine must continue the request.
        most_unacked: the most messages to one peer that may be without an ack; later messages wait.
    """

    eager: int = ENDLESS_BYTES
    window: int = ENDLESS_BYTES
    attends: bool = False
    address: int = 0
    waits: Any = None
    most_unacked: int = 1 << 16  # each costs the receiver 0.3 KiB

    # ---- BUSY and BEHIND -------------------------------------------------------------------------

    def seize(self) -> bool:
        """Take the pipe unless another thread holds it; return whether it was taken. Never blocks."""

    def let_go(self) -> None:
        """Release the pipe."""

    def is_mine(self) -> bool:
        """Whether the calling thread holds the pipe."""

    def ring_bell(self) -> None:
        """Have compiled code that drives the pipe return at once. Any thread may call this."""

    def silence_bell(self) -> None:
        """Reset the bell that `ring_bell` rings. The caller must do this before it checks for new work, not after."""

    def set_behind(self, behind: bool) -> None:
        """Set the word BEHIND: if true, short cuts return LATER, because earlier operations come first."""

    # ---- peers -----------------------------------------------------------------------------------

    def is_ready(self, peer: int) -> bool:
        """Whether messages to a peer can begin without `prepare`. Any thread may call this."""
        return True

    def prepare(self, peer: int) -> None:
        """Connect to a peer; blocks. Any thread may call this, even if it does not hold the pipe.

        Raises:
            GroupError: the peer died, or could not be reached in time.
        """
        return None

    def check(self, peer: int | None) -> None:
        """Check the connection to a peer (None: to all).

        Raises:
            GroupError: the connection is broken, and no rank has published a reason.
        """
        return None

    def garbled(self, peer: int) -> GroupError:
        """Return the error for a peer whose bytes violate the protocol."""

    def has_unread(self, peer: int) -> bool:
        """Whether a message of a peer has arrived that no receive has taken yet. Never blocks."""

    def retire(self) -> None:
        """Release the pipe's resources; no thread drives it afterwards. Called once, by the thread that holds it."""

    # ---- short cuts ------------------------------------------------------------------------------

    def send(self, array: NDArray[Any], peer: int, kind: int) -> int:
        """Send a contiguous array, and block until a receive has taken it.

        Returns:
            DONE: the message is complete. LATER: nothing has begun. AGAIN, WORKED or OTHER: the message has begun, and
            BUSY stays set. REFUSED: the receiver's array does not fit (`last_ack`), and BUSY stays set.
        """
        return LATER

    def receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        """Receive the next message of a peer or of ANY, and block until it has arrived.

        Returns:
            -1 - peer: the message is complete. LATER: nothing has begun. AGAIN, WORKED or OTHER: the engine must
            continue, and BUSY stays set.
        """
        return LATER

    def post_send(self, array: NDArray[Any], peer: int, kind: int) -> tuple[int, bool] | None:
        """Begin a small message with all its bytes attached, if no other message to the peer is waiting.

        Returns:
            What `begin` returns, and BUSY stays set; None if the message has not begun.
        """
        return None

    def post_receive(self, array: NDArray[Any], source: int, kind: int) -> int:
        """Receive a small message of a peer, now or in a later `advance`.

        Returns:
            DONE: the message had arrived, and the receive is complete. ARMED: `advance` will complete the receive, and
            BUSY stays set. LATER: nothing has begun.
        """
        return LATER

    def complete(self, handled: int, peer: int, number: int) -> int:
        """Take the pipe and advance it; begin with the operations that short cuts have posted with `peer`.

        Args:
            handled: as for `advance`.
            number: the message number of the send that the caller waits for; 0 if it waits for the armed receive.

        Returns:
            What `advance` returns; NOT_MINE: another thread holds the pipe, or has driven it since `handled` was read.
        """
        return NOT_MINE

    def leave_send(self, peer: int) -> tuple[int, bool, bool]:
        """Hand over to the engine a send that a short cut has begun.

        Returns:
            The message's number; whether the message or its rest is entering the pipe; and whether GO has arrived, so
            that only the rest is still to be sent.
        """
        raise AssertionError("this pipe has none")

    def leave_receive(self, source: int) -> Begun | None:
        """Hand over to the engine a receive from a peer or ANY; return None if its message has not begun to arrive."""
        raise AssertionError("this pipe has none")

    # ---- requests ---------------------------------------------------------------------------------

    def request(self, transfer: Transfer, peer: int) -> bool:
        """Post an operation, and store its request's number in it. Never blocks.

        Compiled code completes the request, unless `take_posted` removes it. Returns False if the engine must carry
        the operation out.
        """
        return False

    def test_request(self, number: int) -> bool | None:
        """Return whether a request of Python has ended; None if the engine must continue it."""
        return None

    def has_posted(self) -> bool:
        """Whether `take_posted` would return requests. Any thread may call this."""
        return False

    def take_posted(self, ended: bool) -> list[Posted]:
        """Return the requests, in order, and remove them from the pipe.

        Args:
            ended: whether to include requests that have ended without an error.
        """
        return []

    def take_ended(self) -> list[Transfer]:
        """Return the Works of Python's requests that have ended and were not waited for; remove them from the pipe."""
        return []

    def touched(self) -> int:
        """Return a counter that grows whenever a thread works on requests."""
        return 0

    def stay_awake(self) -> None:
        """Record that the calling thread, the progress thread, checks `has_posted` and `touched` every millisecond."""
        return None

    def attend(self) -> int:
        """Progress the requests for a millisecond, whenever no other thread has done so for 0.1 ms.

        Returns:
            STUCK: the engine must take over the requests. STILL: nothing has moved. FINISHED: `take_ended` has Works.
        """
        return QUIET

    def recall(self) -> None:
        """Have `attend` return at once. Any thread may call this."""
        return None

    def may_sleep(self) -> bool:
        """Whether the progress thread may sleep.

        If it returns True, no request is pending, and until the next `stay_awake` compiled callers post no request that
        needs the thread.
        """
        return True

    # ---- steps -----------------------------------------------------------------------------------

    def advance(self, handled: int, wait: bool) -> int:
        """Move bytes, and return the next event; NOTHING after 50 ms without an event, or when the bell was rung.

        A signal handler may raise when `advance` returns, and then the caller never sees the event. So the pipe returns
        the same event again until `handled` counts it.

        Args:
            handled: how many events of this pipe the caller has handled.
            wait: whether to wait for an event.
        """

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        """Let a header and the first `attached` bytes of its message enter the pipe.

        No other message to the peer may be entering the pipe.

        Returns:
            The message's number, and whether the event ENTERED will follow, because not all bytes have entered yet.
        """

    def begin_rest(self, peer: int, send: Send, number: int, attached: int) -> None:
        """Let all but the first `attached` bytes of a message enter the pipe."""
        raise AssertionError("this pipe has none")

    def taken(self, peer: int) -> int:
        """Return the message number of the ack that the event ACKED reported if the ack is TAKEN; else 0."""
        ack = self.last_ack(peer)
        return ack.number if ack.decision == TAKEN else 0

    def last_ack(self, peer: int) -> Ack:
        """Return the ack that the event ACKED reported."""

    def header(self, peer: int) -> Header:
        """Return the header that the event HEADER reported."""

    def rest(self, peer: int) -> tuple[int, int]:
        """Return the message number and size of the rest that the event REST reported."""
        raise AssertionError("this pipe has none")

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        """Let the bytes that follow the header arrive at `address` (0: drop them); the event ARRIVED follows.

        `keep` owns the memory at `address`. A pipe that may write there after `retire` (MPI's) keeps a reference to
        `keep`.
        """

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        """Send an ack to a peer. If there is no space, return False; call again after the event ACK_SPACE."""

    def watch(self, peer: int, count: int) -> None:
        """Set how many receives a message of a peer could match. If none, the pipe need not read headers."""

    def expect(self, peer: int, count: int) -> None:
        """Set how many rests this rank has asked a peer for and not yet received."""
        return None

    def note_owed(self, peer: int, count: int) -> None:
        """Set how many acks to a peer wait for space."""
        return None

    def note_stored(self, count: int) -> None:
        """Set how many messages wait for a receive. Short cuts arm receives only while there are none."""
        return None

    def is_armed(self, peer: int) -> bool:
        """Whether a receive is armed for a peer and `advance` has not begun to complete it. Any thread may ask."""
        return False

    def disarm(self, peer: int) -> None:
        """Disarm the receive that a short cut has armed for a peer, because the Exchange has matched it."""
        return None


class WordPipe(Pipe):
    """A pipe whose kernels keep their state in int64 words: a table of the pipe, and a row for each peer.

    Args:
        words: the module with the indices of words. In the table: BUSY and BEHIND. In a peer's row: WATCHED, OWED
            and, from ACK_NUMBER on, the four words of an ack.

    Attributes:
        address: the address of the table, which is the first argument of the kernels.
        words: the words of the table.
        cells: the words of all rows.
    """

    def __init__(self, words: ModuleType, table_words: int, row_words: int, size: int) -> None:
        self.table = np.zeros(table_words, np.int64)
        self.rows = np.zeros((size, row_words), np.int64)
        self.address = address_of(self.table)
        self.words = cells_of(self.table)
        self.cells = cells_of(self.rows)
        self._width = row_words
        self._at = words

    def word(self, peer: int, index: int) -> int:
        """Return a word of a peer's row."""
        return self.cells[peer * self._width + index]

    def put(self, peer: int, index: int, value: int) -> None:
        """Set a word of a peer's row."""
        self.cells[peer * self._width + index] = value

    def let_go(self) -> None:
        shared_words.publish.call(self.address + 8 * self._at.BUSY, 0)

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
