"""What the directions' threads do with messages that were matched: agree with the other side, and carry on.

Which rule is for what is in nccl_mail.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ...core.group import ProcessGroup
from ...core.work import Work
from ...errors import AbortedError, FastcollError, UnavailableError
from ...interop.arrays import Adopted
from ...p2p.transfers import refused, unfit
from ..staged_mail import StagedMail
from ..streams import StreamCarrier
from ..transit import Marks, Transit
from .library import Library
from .mail_direction import Direction
from .mail_letters import ANSWER, DATA, MISFIT, NCCL, NOTHING, STAGED, Letter, blank
from .mail_work import Message
from .seats import Seat, check_seats


class Posted:
    """The messages of one group that nobody has claimed. Thread-safe."""

    def __init__(self, transit: Transit) -> None:
        self._transit = transit
        self._messages: dict[int, Message] = {}

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, message: Message) -> None:
        """Keep a message until it is claimed or ended."""
        self._messages[message.number] = message

    def claim(self, number: int) -> Message | None:
        """A message, once; None: somebody was first."""
        return self._messages.pop(number, None)

    def end(self, message: Message, error: BaseException) -> None:
        """End a message, unless it was claimed."""
        if self.claim(message.number) is not None:
            self.over(message, error)

    def end_all(self, error: BaseException) -> None:
        """End every message that was not claimed."""
        for message in list(self._messages.values()):
            self.end(message, error)

    def over(self, message: Message, error: BaseException | None = None) -> None:
        """End a claimed message for which nothing was queued."""
        marks, message.marks = message.marks, []
        for device, event in marks:
            self._transit.events.give(device, [event])
        message._settle(error)


class Jobs:
    """The jobs of one group; each is called on the thread of the direction that it gets.

    An error other than that of a message which does not fit fails the group.
    """

    def __init__(self, carrier: StreamCarrier, library: Library, posted: Posted, staged: StagedMail) -> None:
        self._carrier, self._library, self._posted, self._staged = carrier, library, posted, staged
        self._group: ProcessGroup = carrier._group
        self._seat: Seat | None = None

    def seat(self, identity: bytes = b"") -> Seat:
        """This rank's seat, with a communicator's id."""
        if self._seat is None or identity:
            assert self._carrier._lane is not None
            gpu = self._seat.gpu if self._seat else self._carrier._runtime.uuid(self._carrier._lane.device)
            seat = Seat.here(gpu, self._library.version, identity)
            if identity:
                return seat
            self._seat = seat
        return self._seat

    def take_answer(self, dst: int, direction: Direction) -> None:
        """Take the next answer of a peer, and send the message that it names."""
        array = blank()
        self._group._irecv(Adopted(array), dst, ANSWER)._join()
        answer = Letter.from_array(array)
        with self._claimed(answer.number) as message:
            error = self._refused(message, dst, answer) if answer.verdict == MISFIT else None
            staged = partial(self._staged.isend_after, message.item, dst, DATA)
            self._carry(message, direction, answer, staged, error)

    def answer(self, number: int, envelope: Letter, source: int, direction: Direction) -> None:
        """Tell the sender what comes next, and receive the message."""
        with self._claimed(number) as message:
            message.comes_from(source)
            verdict = self._verdict(message, envelope)
            first = verdict == NCCL and not direction.is_connected
            identity = self._library.unique_id() if first else b""
            answer = Letter(envelope.number, *_held(message), self.seat(identity), verdict)
            self._group._isend(Adopted(answer.to_array()), source, ANSWER)
            error = self._unfit(message, source, envelope) if verdict == MISFIT else None
            # Waits for the array's stream here: the mailbox's thread must not, as that may wait for messages.
            staged = partial(self._staged.irecv_after, message.item, source, DATA)
            self._carry(message, direction, answer, staged, error)

    def _carry(
        self,
        message: Message,
        direction: Direction,
        answer: Letter,
        staged: Callable[[Marks], Work],
        error: FastcollError | None,
    ) -> None:
        """Do on one side what the answer says; `error` if that is a misfit."""
        if answer.verdict == NCCL:
            direction.move(message, answer.seat.identity)
        elif answer.verdict == STAGED:
            marks, message.marks = message.marks, []
            staged(marks).add_done_callback(lambda work: message._settle(work.exception()))
        else:
            self._posted.over(message, error)

    def _verdict(self, message: Message, envelope: Letter) -> int:
        if (envelope.kind, envelope.nbytes) != _held(message):
            return MISFIT
        if not envelope.nbytes:
            return NOTHING
        try:
            check_seats([envelope.seat, self.seat()], [0, 1], self._group.name)
        except UnavailableError:
            return STAGED
        return NCCL

    # ---- to oneself ----------------------------------------------------------------------------------

    def copy(self, number: int, envelope: Letter, source: int, direction: Direction) -> None:
        """Carry a message to oneself out."""
        with self._claimed(envelope.number) as sent, self._claimed(number) as received:
            received.comes_from(source)
            verdict = self._verdict(received, envelope)
            if verdict == MISFIT:
                held = Letter(envelope.number, *_held(received), envelope.seat)
                errors = self._refused(sent, source, held), self._unfit(received, source, envelope)
                self._posted.over(sent, errors[0])
                self._posted.over(received, errors[1])
            elif verdict == NOTHING:
                self._posted.over(sent)
                self._posted.over(received)
            else:
                direction.copy(sent, received)

    def buffer(self, number: int, take: Callable[[Any], None], direction: Direction) -> None:
        """Copy what is sent to oneself and not received yet."""
        with self._claimed(number) as message:
            direction.buffer(message, take)

    # ---- errors --------------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, number: int) -> Iterator[Message]:
        """A message; whatever goes wrong ends it, and the group, as the peer counts on it."""
        message = self._posted.claim(number)
        if message is None:
            raise AbortedError(f"the group {self._group.name} has failed before the message was complete")
        try:
            with self._carrier._failing(message._describe):
                yield message
        except BaseException as error:
            message._settle(error)
            raise

    def _refused(self, message: Message, dst: int, answer: Letter) -> FastcollError:
        here, there = self._name(self._group.rank), self._name(dst)
        return refused(message._describe, here, _held(message), there, (answer.kind, answer.nbytes))

    def _unfit(self, message: Message, source: int, envelope: Letter) -> FastcollError:
        here, there = self._name(self._group.rank), self._name(source)
        return unfit(message._describe, here, _held(message), there, (envelope.kind, envelope.nbytes))

    def _name(self, rank: int) -> str:
        return self._group.monitor.name(rank)


def _held(message: Message) -> tuple[int, int]:
    return message.kind, message.array.nbytes
