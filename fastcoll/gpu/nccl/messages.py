"""NcclMessages: messages between GPUs by NCCL's send and recv, matched by the messages of the group's CPU backend.

NCCL has neither tags nor "from any rank", and pairs what two ranks queue on a communicator in order, so that two ranks
which both send first wait for ever. Hence, in letters:

    sender                                          receiver
    an envelope on the user's tag           ->      matches it, like any message
                                                    compares sizes and dtypes
    takes the next answer                   <-      answers, on a tag of the library's own
    ncclSend of the message it names                ncclRecv

Only what is matched is queued, so tags, order and any source are the CPU backend's. Each *direction*, from one rank to
another, has a communicator of two ranks, made with its first message, a stream and a thread of its own on both sides.

**Why both sides queue in one order.** The receiver's thread answers and then queues, message by message; the answers of
a rank, on one tag, arrive in order; the sender's thread takes one, queues what it names, and takes the next.

**Why nothing waits in a circle.** A direction's thread waits for its peer's thread of the same direction only: an
answer is on its way once an envelope was taken, and both make the communicator right after the first answer. On the GPU
a message waits for its other side, for those before it in its direction, and for what the arrays' streams held when it
was posted. Whoever makes a stream wait for a message (`wait()`) has waited on the host until it was queued; so what
comes behind that, on any rank, is queued later in every direction, and what is queued waits for earlier things only.
tests/gpu/test_nccl_messages_model.py runs this code under every schedule of small programs.

Messages go through the host where NCCL refuses the two GPUs (ranks that share one), decided message by message by the
receiver; empty ones end with the answer. To oneself they are copied on the GPU.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np

from ...arrays.arrays import Adopted, Array
from ...core.message import Status
from ...core.operands import LARGEST_TAG
from ...core.work import Work, refuse_to_block
from ...errors import AbortedError, FastcollError, GroupError, UnavailableError
from ...p2p.transfers import LETTER, fits, kind_of, refused, tag_of, tag_text, unfit
from ..device_array import DeviceArray, OnDevice
from ..staged import StagedMessages
from ..streams import StreamCarrier
from ..transit import Transit
from .bindings import Library
from .communicator import Seat, check_seats
from .direction import Direction, Message

ANSWER, DATA = LARGEST_TAG + 1, LARGEST_TAG + 2
"""Tags that no user has: of answers, and of messages that go through the host all the same."""

MISFIT, NOTHING, STAGED, NCCL = range(1, 5)
"""Verdicts: another size or dtype; both arrays are empty; through the host; by NCCL."""

_HEAD = struct.Struct("<4q")


class Letter(NamedTuple):
    """What two ranks tell each other on the host about one message between their GPUs."""

    number: int  # of the message, the sender's own
    kind: int  # tag and dtype of the array on this side, as in p2p/
    nbytes: int  # of the array on this side
    seat: Seat  # this side's; in the first answer that says NCCL with the communicator's id
    verdict: int = 0  # of an answer

    def to_array(self) -> Array:
        """As a host array that can be sent."""
        array = blank()
        head = _HEAD.pack(self.number, self.verdict, self.kind, self.nbytes)
        packed = np.concatenate([np.frombuffer(head, np.uint8), self.seat.to_row()])
        array.view(np.uint8)[: packed.size] = packed
        return array

    @classmethod
    def from_array(cls, array: Array) -> Letter:
        flat = array.view(np.uint8)
        number, verdict, kind, nbytes = _HEAD.unpack(flat[: _HEAD.size].tobytes())
        return cls(number, kind, nbytes, Seat.from_row(flat[_HEAD.size :]), verdict)


def blank() -> Array:
    """An array to receive a letter into."""
    return np.zeros(1, LETTER)


class NcclMessages:
    """The messages of one group; arguments, results and errors are those of the CPU backend's."""

    def __init__(self, carrier: StreamCarrier, library: Library) -> None:
        self._group = carrier.group
        self._carrier, self._library = carrier, library
        self._transit = Transit(self._group)
        self._staged = StagedMessages(self._group, self._transit)
        self._numbers = itertools.count()
        self._posted: dict[int, Message] = {}  # what nobody has claimed
        self._directions: dict[tuple[int, bool], Direction] = {}
        self._seat: Seat | None = None
        self._lock = threading.RLock()
        self._closed = False

    # ---- the four operations -------------------------------------------------------------------------

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        message = self._new(x, f"send to {self._name(dst)}, tag {tag}", tag)

        def on_taken(work: Work) -> None:  # on the CPU backend's thread, as what follows
            if (error := work.exception()) is not None:
                self._end(message, error)
            elif dst != self._group.rank:  # an envelope has found its receive, and an answer comes
                self._submit(message, dst, True, partial(self._take_answer, dst))

        with self._posting(message):
            self._group.post_send(self._envelope(message), dst, tag).add_done_callback(on_taken)
        return message

    def irecv(self, x: Adopted, src: int | None, tag: int, status: Status | None = None) -> Work:
        source = "any rank" if src is None else self._name(src)
        message, envelope = self._new(x, f"recv from {source}, {tag_text(tag)}", tag), blank()
        message.status = status

        def on_matched(work: Work) -> None:
            if (error := work.exception()) is not None:
                self._end(message, error)
                return
            source = work.source_rank()
            job = self._copy if source == self._group.rank else self._answer
            letter = Letter.from_array(envelope)
            self._submit(message, source, False, partial(job, message.number, letter, source))

        with self._posting(message):
            self._group.post_receive(Adopted(envelope), src, tag).add_done_callback(on_matched)
        return message

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        """Returns once the message is matched and queued; to oneself, once a copy is queued."""
        if dst != self._group.rank:
            refuse_to_block("send")
            self._await(self.isend(x, dst, tag))
            return
        if x.array.nbytes:
            copies: list[DeviceArray] = []
            copying = self._new(x, "a copy for a send to oneself", tag)

            def copy(direction: Direction) -> None:
                with self._claimed(copying.number):
                    direction.buffer(copying, copies.append)

            self._submit(copying, dst, False, copy)
            self._await(copying)
            x = OnDevice(copies[0])
        message = self._new(x, f"send to {self._name(dst)}, tag {tag}", tag)
        with self._posting(message):
            self._group.messages.send(self._envelope(message), dst, tag)

    def recv(self, x: Adopted, src: int | None, tag: int, status: Status | None = None) -> int:
        """Returns once the message is matched and queued."""
        refuse_to_block("recv")
        return int(self._await(self.irecv(x, src, tag, status)))

    def _await(self, work: Work) -> Any:
        """Wait on the host until a message is queued, and on the stream until it is there; its result."""
        message = cast(Message, work)
        try:
            return message.result()
        except FastcollError:
            raise
        except BaseException as error:
            if not message.has_begun:  # the peer counts on it
                self._carrier.fail_with(message.describe, error)
            raise

    # ---- posting, on the caller's thread -------------------------------------------------------------

    def _new(self, x: Adopted, describe: str, tag: int) -> Message:
        item = cast(OnDevice, x)
        own = self._carrier.own([item.array])
        marks = self._transit.mark([item.array])
        message = Message(describe, own, item, kind_of(tag, item.array.dtype), marks, next(self._numbers))
        self._posted[message.number] = message
        return message

    def _envelope(self, message: Message) -> Adopted:
        return Adopted(Letter(message.number, *message.held, self._here()).to_array())

    @contextmanager
    def _posting(self, message: Message) -> Iterator[None]:
        """A message that cannot be posted is none; after half of it the group has failed."""
        try:
            with self._carrier.failing(message.describe):
                yield
        except BaseException as error:
            self._end(message, error)
            raise

    def _name(self, rank: int) -> str:
        return self._group.monitor.name(rank)

    def _here(self, identity: bytes = b"") -> Seat:
        """This rank's seat, with a communicator's id."""
        if self._seat is None:
            assert self._carrier.lane is not None
            gpu = self._carrier.runtime.uuid(self._carrier.lane.device)
            self._seat = Seat.here(gpu, self._library.version, b"")
        return self._seat._replace(identity=identity)

    def _submit(self, message: Message, peer: int, sending: bool, job: Callable[[Direction], None]) -> None:
        """Have a direction's thread go on with a message."""
        try:
            with self._lock:
                if self._closed:
                    raise self._destroyed()
                direction = self._directions.get((peer, sending))
                if direction is None:
                    events = self._transit.events
                    direction = Direction(self._carrier, self._library, peer, sending, events)
                    self._directions[peer, sending] = direction
                direction.submit(message, partial(self._run, direction, message.describe, job))
        except BaseException as error:
            self._end(message, error)
            if not self._closed:
                self._carrier.fail_with(message.describe, error)

    # ---- jobs, on a direction's thread ---------------------------------------------------------------
    # An error other than that of a message which does not fit fails the group.

    def _run(self, direction: Direction, describe: str, job: Callable[[Direction], None]) -> None:
        try:
            with self._carrier.failing(describe):
                job(direction)
        except BaseException as error:
            self._end_all(self._group.failure or error)

    def _take_answer(self, dst: int, direction: Direction) -> None:
        """Take the next answer of a peer, and send the message that it names."""
        array = blank()
        self._group.post_receive(Adopted(array), dst, ANSWER).join()
        answer = Letter.from_array(array)
        with self._claimed(answer.number) as message:
            if answer.verdict == NCCL:
                direction.move(message, answer.seat.identity)
            elif answer.verdict == STAGED:
                self._go_staged(message, self._staged.isend, dst)
            else:
                self._over(message, answer.verdict, refused, dst, answer)

    def _answer(self, number: int, envelope: Letter, source: int, direction: Direction) -> None:
        """Tell the sender what comes next, and receive the message."""
        with self._claimed(number) as message:
            verdict = self._verdict(message, envelope, source)
            first = verdict == NCCL and not direction.is_connected
            identity = self._library.unique_id() if first else b""
            answer = Letter(envelope.number, *message.held, self._here(identity), verdict)
            self._group.post_send(Adopted(answer.to_array()), source, ANSWER)
            if verdict == NCCL:
                direction.move(message, identity)
            elif verdict == STAGED:
                # Waits for the array's stream here: the CPU backend's thread must not, as that may wait for messages.
                status = message.status and Status()
                self._go_staged(message, partial(self._staged.irecv, status=status), source)
            else:
                self._over(message, verdict, unfit, source, envelope)

    def _verdict(self, message: Message, envelope: Letter, source: int) -> int:
        if not fits(message.held, (envelope.kind, envelope.nbytes), message.status is not None):
            return MISFIT
        message.comes_from(source, tag_of(envelope.kind), envelope.nbytes)
        if not envelope.nbytes:
            return NOTHING
        try:
            check_seats([envelope.seat, self._here()], [0, 1], self._group.name)
        except UnavailableError:
            return STAGED
        return NCCL

    def _go_staged(self, message: Message, move: Callable[..., Work], peer: int) -> None:
        """Through the host."""
        marks, message.marks = message.marks, []
        work = move(message.item, peer, DATA, marks=marks)
        work.add_done_callback(lambda work: message.settle(work.exception()))

    def _copy(self, number: int, envelope: Letter, source: int, direction: Direction) -> None:
        """Carry a message to oneself out."""
        with self._claimed(envelope.number) as sent, self._claimed(number) as received:
            verdict = self._verdict(received, envelope, source)
            if verdict in (MISFIT, NOTHING):
                held = Letter(envelope.number, *received.held, envelope.seat)
                self._over(sent, verdict, refused, source, held)
                self._over(received, verdict, unfit, source, envelope)
            else:
                direction.copy(sent, received)

    # ---- ends ----------------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, number: int) -> Iterator[Message]:
        """A message, for one caller; whatever goes wrong ends it, and the group, as the peer counts on it."""
        message = self._posted.pop(number, None)
        if message is None:
            raise AbortedError(f"the group {self._group.name} has failed before the message was complete")
        try:
            with self._carrier.failing(message.describe):
                yield message
        except BaseException as error:
            message.settle(error)
            raise

    def _over(
        self, message: Message, verdict: int, misfit: Callable[..., FastcollError], peer: int, letter: Letter
    ) -> None:
        """End a claimed message with a verdict for which nothing is queued; `letter` is the peer's."""
        error = None
        if verdict == MISFIT:
            here, there = self._name(self._group.rank), self._name(peer)
            error = misfit(message.describe, here, message.held, there, (letter.kind, letter.nbytes))
        self._settle(message, error)

    def _settle(self, message: Message, error: BaseException | None) -> None:
        marks, message.marks = message.marks, []
        for device, event in marks:
            self._transit.events.give(device, [event])
        message.settle(error)

    def _end(self, message: Message, error: BaseException) -> None:
        """End a message, unless it was claimed."""
        if self._posted.pop(message.number, None) is not None:
            self._settle(message, error)

    def _end_all(self, error: BaseException) -> None:
        for message in list(self._posted.values()):
            self._end(message, error)

    def _destroyed(self) -> AbortedError:
        return AbortedError(f"the group {self._group.name} was destroyed before the message was complete")

    def break_off(self, error: GroupError) -> None:
        """The group has failed: end everything, from any thread, without waiting."""
        with self._lock:
            directions = list(self._directions.values())
        for direction in directions:
            direction.break_off(error)
        self._end_all(error)

    def close(self) -> None:
        """Block until what is matched is done, end the rest, and give everything back."""
        with self._lock:
            self._closed = True
            directions = list(self._directions.values())
        for direction in directions:
            direction.finish()
        # All at once, as each waits for its peer, which may be busy with another.
        for direction in directions:
            direction.disconnect()
        for direction in directions:
            direction.close()
        self._end_all(self._group.failure or self._destroyed())
        self._transit.close()
