"""Messages between the ranks of a group over MPI: the pipe.

Each message is a *letter*, five words and the message itself where that is short; a longer one follows in messages
of MPI of its own once the receiver has chosen where to. The receiver answers with an *ack* of five words. MPI delivers
what one rank sends another with one tag in order, so no other matching is left to it: matching tags, sources and sizes
is the engine's, the same as for every backend.

    letter  source, kind, nbytes, number, attached bytes that are inside the letter; then those bytes
    ack     source, number, verdict, nbytes, kind: each word has 8 bytes
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np

from ...errors import AbortedError, GroupError
from ...kernels.primitives import address_of
from ...p2p.pipe import ACKED, ARRIVED, ENTERED, EVENTS, HEADER, NOTHING, Ack, Header, Pipe
from ...p2p.transfers import Send
from . import compiled as words
from .agreement import Requests, abandon
from .execution import pieces
from .library import MpiLibrary

_HEAD = 5 * 8
INLINE_BYTES = 1024 - _HEAD
"""Bytes of a message that travel inside its letter."""
_NOBODY, _FRAME = -1, -2  # what a request is for, besides events
_MOVING_SECONDS = 1.0  # a message that does not get on for so long waits for the other side


class _Posted(NamedTuple):
    """A request under way; `keep` is what it reads or writes."""

    request: Any
    event: int
    peer: int
    keep: Any


class MpiPipe(Pipe):
    """To all ranks of a communicator; their numbers are their ranks there.

    Args:
        tags: of letters, acks and what follows letters.

    Attributes:
        current: a context for everything that MPI does with messages; see MpiBackend.take_gpus.
    """

    def __init__(self, library: MpiLibrary, comm: Any, tags: Sequence[int], dedicated: bool) -> None:
        size, self._rank = comm.size, comm.rank
        self.current: Callable[[], AbstractContextManager[None]] = nullcontext
        self._library = library
        self._comm = comm
        self._frame_tag, self._ack_tag, self._data_tag = tags
        self._requests = Requests(library, dedicated)
        self._free = threading.Lock()
        self._owner = 0
        self._interest = [0] * size
        self._event_count = 0  # events
        self._event = NOTHING
        self._posted: list[_Posted] = []
        self._listening = False
        self._begun = 0.0
        self._events: deque[tuple[int, int]] = deque()
        self._frames: list[deque[tuple[Header, bytes]]] = [deque() for _ in range(size)]
        self._taken = [(Header(0, 0, 0, 0), b"")] * size
        self._is_taking = [False] * size
        self._acks: list[deque[Ack]] = [deque() for _ in range(size)]
        self._last_acks = [Ack(0, 0, 0, 0)] * size
        self._sent = [0] * size

    # ---- whose turn it is ------------------------------------------------------------------------

    def seize(self) -> bool:
        if not self._free.acquire(blocking=False):
            return False
        self._owner = threading.get_ident()
        return True

    def let_go(self) -> None:
        self._owner = 0
        self._free.release()

    def is_mine(self) -> bool:
        return self._owner == threading.get_ident()

    def ring_bell(self) -> None:
        self._requests.ring()

    def silence_bell(self) -> None:
        self._requests.silence()

    def set_behind(self, behind: bool) -> None:
        """Nothing: there are no short cuts."""

    # ---- peers -----------------------------------------------------------------------------------

    def garbled(self, peer: int) -> GroupError:
        return AbortedError(f"rank {peer} of the communicator sent what is no message of fastcoll")

    def has_unread(self, peer: int) -> bool:
        return bool(self._frames[peer])

    def retire(self) -> None:
        """Take back what others may still send; give up what they may still read."""
        left = []
        with self._library.lock:
            for posted in self._posted:
                if posted.event in (_FRAME, ACKED):
                    posted.request.Cancel()
                    posted.request.Wait()
                    self._listening = False
                else:
                    left.append(posted)
        if left:
            abandon([posted.request for posted in left], [posted.keep for posted in left])

    # ---- steps -----------------------------------------------------------------------------------

    def advance(self, handled: int, wait: bool) -> int:
        if self._event_count > handled:
            return self._event
        try:
            if not self._listening:  # be ready for letters and acks from anybody
                self._listening = True
                self._listen_for(_FRAME, self._frame_tag, _HEAD + INLINE_BYTES)
                self._listen_for(ACKED, self._ack_tag, _HEAD)
            while (event := self._next_event()) == NOTHING:
                if not self._progress(wait):
                    return NOTHING
        except self._library.MPI.Exception as error:
            raise AbortedError(f"carrying messages was interrupted by {error!r}") from error
        self._event = event
        self._event_count += 1
        return event

    def _next_event(self) -> int:
        if self._events:
            event, peer = self._events.popleft()
            if event == ACKED:
                self._last_acks[peer] = self._acks[peer].popleft()
            elif event == ARRIVED:
                self._is_taking[peer] = False
            return peer * EVENTS + event
        for peer, frames in enumerate(self._frames):
            if frames and self._interest[peer] and not self._is_taking[peer]:
                self._taken[peer] = frames.popleft()
                self._is_taking[peer] = True
                return peer * EVENTS + HEADER
        return NOTHING

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        """Send a letter, and the message behind it if it is long."""
        nbytes, address = send.nbytes, send.address
        inline = nbytes if nbytes <= INLINE_BYTES else 0
        frame = np.empty(_HEAD + inline, np.uint8)
        self._sent[peer] += 1
        frame[:_HEAD].view(np.int64)[:] = (self._rank, send.kind, nbytes, self._sent[peer], inline)
        ctypes.memmove(address_of(frame) + _HEAD, address, inline)
        MPI = self._library.MPI
        self._begun = time.monotonic()
        with self.current(), self._library.lock:
            posted = [self._comm.Isend([frame, MPI.BYTE], peer, self._frame_tag)]
            posted += [
                self._comm.Isend(self._library.data(*piece), peer, self._data_tag)
                for piece in pieces((address, nbytes - inline))
            ]
        self._posted += [_Posted(request, ENTERED, peer, (frame, send.array)) for request in posted]
        return self._sent[peer], True

    def last_ack(self, peer: int) -> Ack:
        return self._last_acks[peer]

    def header(self, peer: int) -> Header:
        return self._taken[peer][0]

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        if nbytes <= INLINE_BYTES:
            if address:
                ctypes.memmove(address, self._taken[peer][1], nbytes)
            self._events.append((ARRIVED, peer))
            return
        if not address:
            keep = dropped = np.empty(nbytes, np.uint8)
            address = address_of(dropped)
        self._begun = time.monotonic()
        with self.current(), self._library.lock:
            for piece in pieces((address, nbytes)):
                request = self._comm.Irecv(self._library.data(*piece), peer, self._data_tag)
                self._posted.append(_Posted(request, ARRIVED, peer, keep))

    def acknowledge(self, peer: int, ack: Ack) -> bool:
        data = np.array([self._rank, *ack], np.int64)
        with self._library.lock:
            request = self._comm.Isend([data, self._library.MPI.BYTE], peer, self._ack_tag)
        self._posted.append(_Posted(request, _NOBODY, peer, data))
        return True

    def watch(self, peer: int, count: int) -> None:
        self._interest[peer] = count

    # ---- requests --------------------------------------------------------------------------------

    def _listen_for(self, event: int, tag: int, nbytes: int) -> None:
        MPI = self._library.MPI
        data = np.zeros(nbytes // 8, np.int64)
        with self._library.lock:
            request = self._comm.Irecv([data, MPI.BYTE], MPI.ANY_SOURCE, tag)
        self._posted.append(_Posted(request, event, -1, data))

    def _progress(self, wait: bool) -> bool:
        """Wait until a request is complete, and deal with it; False after 50 ms without one, or when the bell rang."""
        if not wait:
            self._requests.ring()
        self._requests.load(self._requests.handles([posted.request for posted in self._posted]))
        # MPI moves data in calls only: it is called as often as can be while data gets on.
        moving = time.monotonic() - self._begun < _MOVING_SECONDS
        moving = moving and any(posted.event in (ENTERED, ARRIVED) for posted in self._posted)
        with self.current():
            if not self._requests.poll(words.ANY | words.BUSY * moving):
                return False
        still = set(self._requests.open())
        # One by one, as what is left tells whether an event is complete; new requests come behind all of these.
        for slot in sorted(set(range(len(self._posted))) - still, reverse=True):
            self._complete(self._posted.pop(slot))
        return True

    def _complete(self, posted: _Posted) -> None:
        if posted.event == _FRAME:
            self._listen_for(_FRAME, self._frame_tag, _HEAD + INLINE_BYTES)
            source, kind, nbytes, number, inline = posted.keep[:5].tolist()
            text = posted.keep.view(np.uint8)[_HEAD : _HEAD + inline].tobytes()
            self._frames[source].append((Header(kind, nbytes, number, nbytes), text))
        elif posted.event == ACKED:
            self._listen_for(ACKED, self._ack_tag, _HEAD)
            source, *ack = posted.keep.tolist()
            self._acks[source].append(Ack(*ack))
            # What is acknowledged has entered, though MPI may tell so later.
            if not self._is_pending(ENTERED, source):
                self._events.append((ACKED, source))
        elif posted.event in (ENTERED, ARRIVED):
            self._begun = time.monotonic()
            if not self._is_pending(posted.event, posted.peer):
                self._events.append((posted.event, posted.peer))
                if posted.event == ENTERED:  # the acks of this peer that have no event yet have one now
                    acked = (ACKED, posted.peer)
                    self._events.extend([acked] * (len(self._acks[posted.peer]) - self._events.count(acked)))

    def _is_pending(self, event: int, peer: int) -> bool:
        return any(posted.event == event and posted.peer == peer for posted in self._posted)
