"""NcclMail: messages between GPUs by NCCL's send and recv, matched by the mailbox of the group's CPU backend.

NCCL has neither tags nor "from any rank", and pairs what two ranks queue on a communicator in order, so that two ranks
which both send first wait for ever. Hence (letters are nccl_mail_letters.py's):

    sender                                          receiver
    an envelope on the user's tag           ->      matches it, like any message
                                                    compares sizes and dtypes
    takes the next answer                   <-      answers, on a tag of the library's own
    ncclSend of the message it names                ncclRecv

Only what is matched is queued, so tags, order and any source are the mailbox's. Each *direction*, from one rank to
another, has a communicator of two ranks, made with its first message, a stream and a thread of its own on both sides.

**Why both sides queue in one order.** The receiver's thread answers and then queues, message by message; the answers of
a rank, on one tag, arrive in order; the sender's thread takes one, queues what it names, and takes the next.

**Why nothing waits in a circle.** A direction's thread waits for its peer's thread of the same direction only: an
answer is on its way once an envelope was taken, and both make the communicator right after the first answer. On the GPU
a message waits for its other side, for those before it in its direction, and for what the arrays' streams held when it
was posted. Whoever makes a stream wait for a message (`wait()`) has waited on the host until it was queued; so what
comes behind that, on any rank, is queued later in every direction, and what is queued waits for earlier things only.
tests/gpu/test_nccl_mail_model.py explores it.

Messages go through the host where NCCL refuses the two GPUs (ranks that share one), decided message by message by the
receiver; empty ones end with the answer. To oneself they are copied on the GPU.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from ...core.work import Work, refuse_to_block
from ...errors import AbortedError, FastcollError, GroupError
from ...interop.arrays import Adopted, Array
from ...p2p.transfers import kind_of
from ..array import DeviceArray
from ..border import OnDevice
from ..staged_mail import StagedMail
from ..streams import StreamCarrier
from ..transit import Transit
from .library import Library
from .mail_direction import Direction
from .mail_jobs import Jobs, Posted
from .mail_letters import Letter, blank
from .mail_work import Message


class NcclMail:
    """The messages of one group; arguments, results and errors are those of the group's own hooks.

    Args:
        carrier: the group's; it fails the group, and knows its GPU.
    """

    def __init__(self, carrier: StreamCarrier, library: Library) -> None:
        self._group = carrier._group
        self._carrier, self._library = carrier, library
        self._transit = Transit(self._group)
        self._posted = Posted(self._transit)
        self._jobs = Jobs(carrier, library, self._posted, StagedMail(self._group, self._transit))
        self._numbers = itertools.count()
        self._directions: dict[tuple[int, bool], Direction] = {}
        self._lock = threading.RLock()
        self._closed = False

    # ---- the four operations -------------------------------------------------------------------------

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """As the group's."""
        message = self._new(x, f"send to {self._name(dst)}, tag {tag}", tag)
        with self._posting(message):
            work = self._group._isend(self._envelope(message), dst, tag)
            work.add_done_callback(partial(self._on_taken, message, dst))
        return message

    def irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        """As the group's."""
        source = "any rank" if src is None else self._name(src)
        message = self._new(x, f"recv from {source}, tag {tag}", tag)
        with self._posting(message):
            envelope = blank()
            work = self._group._irecv(Adopted(envelope), src, tag)
            work.add_done_callback(partial(self._on_matched, message, envelope))
        return message

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        """Returns once the message is matched and queued; to oneself, once a copy is queued."""
        if dst == self._group.rank:
            self._send_here(x, tag)
        else:
            refuse_to_block("send")
            self._await(self.isend(x, dst, tag))

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        """Returns once the message is matched and queued."""
        refuse_to_block("recv")
        return int(self._await(self.irecv(x, src, tag)))

    def _send_here(self, x: Adopted, tag: int) -> None:
        """A message to oneself, of a copy."""
        if x.array.nbytes:
            copies: list[DeviceArray] = []
            copying = self._new(x, "a copy for a send to oneself", tag)
            job = partial(self._jobs.buffer, copying.number, copies.append)
            self._submit(copying, self._group.rank, False, job)
            self._await(copying)
            x = OnDevice(copies[0])
        message = self._new(x, f"send to {self._name(self._group.rank)}, tag {tag}", tag)
        with self._posting(message):
            self._group._send(self._envelope(message), self._group.rank, tag)

    def _await(self, work: Work) -> Any:
        """Wait on the host until a message is queued, and on the stream until it is there; its result."""
        message = cast(Message, work)
        try:
            return message.result()
        except FastcollError:
            raise
        except BaseException as error:
            # The peer counts on it.
            if not message.has_begun:
                self._carrier._fail(self._carrier._failed(message._describe, error))
            raise

    # ---- posting, on the caller's thread -------------------------------------------------------------

    def _new(self, x: Adopted, describe: str, tag: int) -> Message:
        item = cast(OnDevice, x)
        own = self._carrier._own([item.array])
        marks = self._transit.mark([item.array])
        kind = kind_of(tag, item.array.dtype)
        message = Message(describe, own, item, kind, marks, next(self._numbers))
        self._posted.add(message)
        return message

    def _envelope(self, message: Message) -> Adopted:
        letter = Letter(message.number, message.kind, message.array.nbytes, self._jobs.seat())
        return Adopted(letter.to_array())

    @contextmanager
    def _posting(self, message: Message) -> Iterator[None]:
        """A message that cannot be posted is none; after half of it the group has failed."""
        try:
            with self._carrier._failing(message._describe):
                yield
        except BaseException as error:
            self._posted.end(message, error)
            raise

    def _name(self, rank: int) -> str:
        return self._group.monitor.name(rank)

    # ---- what the mailbox has done, on its thread ----------------------------------------------------

    def _on_taken(self, message: Message, dst: int, work: Work) -> None:
        """An envelope has found its receive, and an answer comes."""
        if (error := work.exception()) is not None:
            self._posted.end(message, error)
        elif dst != self._group.rank:
            self._submit(message, dst, True, partial(self._jobs.take_answer, dst))

    def _on_matched(self, message: Message, envelope: Array, work: Work) -> None:
        """A receive has found its envelope."""
        if (error := work.exception()) is not None:
            self._posted.end(message, error)
            return
        source = work.source_rank()
        job = self._jobs.copy if source == self._group.rank else self._jobs.answer
        letter = Letter.from_array(envelope)
        self._submit(message, source, False, partial(job, message.number, letter, source))

    def _submit(self, message: Message, peer: int, sending: bool, job: Callable[[Direction], None]) -> None:
        """Have a direction's thread go on with a message."""
        try:
            with self._lock:
                if self._closed:
                    raise self._destroyed()
                direction = self._direction(peer, sending)
                direction.queue.submit(message._describe, partial(self._run, direction, message, job))
        except BaseException as error:
            self._posted.end(message, error)
            if not self._closed:
                self._carrier._fail(self._carrier._failed(message._describe, error))

    def _direction(self, peer: int, sending: bool) -> Direction:
        key = (peer, sending)
        if key not in self._directions:
            own = self._carrier._lane
            assert own is not None
            self._directions[key] = Direction(
                self._carrier, self._library, peer, sending, own.device, self._transit.events
            )
        return self._directions[key]

    def _run(self, direction: Direction, message: Message, job: Callable[[Direction], None]) -> None:
        """A job, on its direction's thread."""
        try:
            with self._carrier._failing(message._describe):
                job(direction)
        except BaseException as error:
            self._posted.end_all(self._group.failure or error)

    # ---- ends ----------------------------------------------------------------------------------------

    def _destroyed(self) -> AbortedError:
        return AbortedError(f"the group {self._group.name} was destroyed before the message was complete")

    def break_off(self, error: GroupError) -> None:
        """The group has failed: end everything, from any thread, without waiting."""
        with self._lock:
            directions = list(self._directions.values())
        for direction in directions:
            direction.break_off(error)
        self._posted.end_all(error)

    def close(self) -> None:
        """Block until what is matched is done, end the rest, and give everything back."""
        with self._lock:
            self._closed = True
            directions = list(self._directions.values())
        for direction in directions:
            direction.finish()
        # All at once, as each waits for its peer, which may be busy with another.
        for work in [direction.queue.submit("the end", direction.disconnect) for direction in directions]:
            work._join()
        for direction in directions:
            direction.close()
        self._posted.end_all(self._group.failure or self._destroyed())
        self._transit.close()
