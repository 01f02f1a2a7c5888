"""The pipe for messages between the ranks of a group over MPI.

For each message, the sender sends a *frame*: five words, and the message's data if it is short. Longer data follows the
frame at once, in MPI messages of its own; the receiver posts receives for these when it has an array for the data. The
receiver answers with an *ack* of five words. The engine (p2p/engine.py) matches tags, sources and sizes, as for every
backend. Of MPI's own matching, the pipe uses only this: MPI messages with the same tag arrive in order from each rank.

    frame   source, kind, nbytes, number, number of attached bytes; then the attached bytes
    ack     source, number, decision, nbytes, kind

Each word has 8 bytes.
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
from .execution import messages_of
from .library import MpiLibrary

_HEAD = 5 * 8
INLINE_BYTES = 1024 - _HEAD
"""The data of a message of at most this many bytes travels in its frame."""
# What the completion of a request means, if not an event of p2p/pipe.py. _NOBODY: nothing; _FRAME: a frame has arrived.
_NOBODY, _FRAME = -1, -2
_MOVING_SECONDS = 1.0  # if no data has arrived or left for this long, this rank sleeps while it waits


class _Posted(NamedTuple):
    """A pending request.

    `event` is what its completion means, and `keep` the memory that it reads or writes.
    """

    request: Any
    event: int
    peer: int
    keep: Any


class MpiPipe(Pipe):
    """The pipe to all ranks of a communicator.

    Peers are numbered by their ranks in the communicator.

    Args:
        tags: the MPI tags of frames, of acks, and of the data that follows frames.

    Attributes:
        current: returns a context manager in which MPI is called for messages; see MpiBackend.take_gpus.
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
        self._event_count = 0  # how many events `advance` has returned
        self._event = NOTHING
        self._posted: list[_Posted] = []
        self._listening = False
        self._begun = 0.0
        self._events: deque[tuple[int, int]] = deque()
        self._frames: list[deque[tuple[Header, bytes]]] = [deque() for _ in range(size)]
        self._current_frames = [(Header(0, 0, 0, 0), b"")] * size
        self._is_taking = [False] * size
        self._acks: list[deque[Ack]] = [deque() for _ in range(size)]
        self._last_acks = [Ack(0, 0, 0, 0)] * size
        self._sent = [0] * size

    # ---- which thread drives it ------------------------------------------------------------------------

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
        """Do nothing, because only short cuts need this, and this pipe has none."""

    # ---- peers -----------------------------------------------------------------------------------

    def garbled(self, peer: int) -> GroupError:
        return AbortedError(f"rank {peer} of the communicator sent an invalid message")

    def has_unread(self, peer: int) -> bool:
        return bool(self._frames[peer])

    def retire(self) -> None:
        """Cancel pending receives of frames and acks.

        Other pending requests, whose data peers may still read or send, are kept until MPI is finalized.
        """
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
            if not self._listening:  # post receives for frames and acks from any rank
                self._listening = True
                self._listen_for(_FRAME, self._frame_tag, _HEAD + INLINE_BYTES)
                self._listen_for(ACKED, self._ack_tag, _HEAD)
            while (event := self._next_event()) == NOTHING:
                if not self._progress(wait):
                    return NOTHING
        except self._library.MPI.Exception as error:
            raise AbortedError(f"moving messages was interrupted by {error!r}") from error
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
                self._current_frames[peer] = frames.popleft()
                self._is_taking[peer] = True
                return peer * EVENTS + HEADER
        return NOTHING

    def begin(self, peer: int, send: Send, attached: int) -> tuple[int, bool]:
        """Send a frame and, if the message is long, its data behind the frame."""
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
                self._comm.Isend(self._library.data(*message), peer, self._data_tag)
                for message in messages_of((address, nbytes - inline))
            ]
        self._posted += [_Posted(request, ENTERED, peer, (frame, send.array)) for request in posted]
        return self._sent[peer], True

    def last_ack(self, peer: int) -> Ack:
        return self._last_acks[peer]

    def header(self, peer: int) -> Header:
        return self._current_frames[peer][0]

    def accept(self, peer: int, address: int, nbytes: int, keep: object) -> None:
        if nbytes <= INLINE_BYTES:
            if address:
                ctypes.memmove(address, self._current_frames[peer][1], nbytes)
            self._events.append((ARRIVED, peer))
            return
        if not address:
            keep = dropped = np.empty(nbytes, np.uint8)
            address = address_of(dropped)
        self._begun = time.monotonic()
        with self.current(), self._library.lock:
            for message in messages_of((address, nbytes)):
                request = self._comm.Irecv(self._library.data(*message), peer, self._data_tag)
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
        """Wait until a request is complete, and handle it.

        Returns False if none completed within 50 ms, or if another thread rang the bell.
        """
        if not wait:
            self._requests.ring()
        self._requests.load(self._requests.handles([posted.request for posted in self._posted]))
        # MPI moves data only while it is called: call it without pause while data progresses.
        moving = time.monotonic() - self._begun < _MOVING_SECONDS
        moving = moving and any(posted.event in (ENTERED, ARRIVED) for posted in self._posted)
        with self.current():
            if not self._requests.poll(words.ANY | words.BUSY * moving):
                return False
        still = set(self._requests.open())
        # Handle the complete requests one by one: `_complete` reports an event when no pending request is left that
        # belongs to the event. Begin with the last one, so that removing a request does not shift those yet to be
        # handled; `_complete` appends new requests at the end.
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
            # A message with an ack has been sent completely, but MPI may complete its requests later. The event ENTERED
            # must come before ACKED, so report ACKED only when no such request is pending.
            if not self._is_pending(ENTERED, source):
                self._events.append((ACKED, source))
        elif posted.event in (ENTERED, ARRIVED):
            self._begun = time.monotonic()
            if not self._is_pending(posted.event, posted.peer):
                self._events.append((posted.event, posted.peer))
                if posted.event == ENTERED:  # queue the events of this peer's acks that waited for ENTERED
                    acked = (ACKED, posted.peer)
                    self._events.extend([acked] * (len(self._acks[posted.peer]) - self._events.count(acked)))

    def _is_pending(self, event: int, peer: int) -> bool:
        return any(posted.event == event and posted.peer == peer for posted in self._posted)
