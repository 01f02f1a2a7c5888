"""NcclMessages: messages between GPUs by ncclSend and ncclRecv.

The group's CPU backend matches sends and receives, because NCCL has neither tags nor "any source". On a communicator
NCCL pairs the operations of two ranks in the order in which they are queued: if both ranks queue a send first, they
wait forever. So the ranks first exchange control messages on the host:

    sender                                          receiver
    a header with the user's tag            ->      matches it, like any message
                                                    compares sizes and dtypes
    takes the next answer                   <-      answers, with a tag of the library's own
    ncclSend of the message named there             ncclRecv

Only matched messages are queued, so tags, order and "any source" work as in the CPU backend. A *direction* is a pair of
a sending and a receiving rank. Each direction has a communicator of these two ranks, which is created for the first
message. On both ranks it has a stream and a thread.

**Both sides queue in the same order.** The receiver's thread answers and then queues, message by message. The answers
of a rank have one tag, so they arrive in order. The sender's thread takes an answer, queues the message that it names,
and takes the next answer.

**No cycle of waits.** A direction's thread waits only for the peer's thread of the same direction: an answer is sent
once a header is matched, and both threads create the communicator right after the first answer. On the GPU a message
waits for its other side, for the earlier messages of its direction, and for the work that was queued on the arrays'
streams when it was posted. A thread that makes a stream wait for a message (`wait()`) first waits on the host until the
message is queued. So the work behind this wait is queued after the message, on every rank and in every direction. It
follows that queued work waits only for work that was queued earlier. tests/gpu/test_nccl_messages_model.py runs this
code under every schedule of small programs.

A message goes through the host if NCCL would reject the two ranks, because they share a GPU or have different versions
of NCCL. The receiver decides this for each message. An empty message is complete with its answer. A message of a rank
to itself is copied on the GPU.
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

from ...arrays.arrays import Array, ImportedArray
from ...core.message import Status
from ...core.operands import LARGEST_TAG
from ...core.work import Work, refuse_to_block
from ...errors import AbortedError, FastcollError, GroupError, UnavailableError
from ...p2p.transfers import CONTROL_MESSAGE, fits, kind_of, refused, tag_of, tag_text, unfit
from ..device_array import DeviceArray, OnDevice
from ..staged import StagedMessages
from ..staging import Staging
from ..streams import StreamCarrier
from .bindings import NcclLibrary
from .communicator import Communicator, RankInfo, check_ranks
from .direction import Direction, NcclMessage

ANSWER, DATA = LARGEST_TAG + 1, LARGEST_TAG + 2
"""Tags that no user can pass: ANSWER for answers, DATA for messages that are staged through the host."""

MISFIT, NOTHING, STAGED, NCCL = range(1, 5)
"""The receiver's decisions: sizes or dtypes differ; the message is empty; move it through the host; move it by NCCL."""

_HEAD = struct.Struct("<4q")


class ControlMessage(NamedTuple):
    """A control message between two ranks' hosts, about one message between their GPUs."""

    number: int  # number of the message at its sender
    kind: int  # tag and dtype of the array on this side, as in p2p/
    nbytes: int  # bytes of the array on this side
    info: RankInfo  # of this side; the first answer that decides for NCCL also has the communicator's id
    decision: int = 0  # the decision, in an answer

    def to_array(self) -> Array:
        """Return a host array that can be sent."""
        array = blank()
        head = _HEAD.pack(self.number, self.decision, self.kind, self.nbytes)
        packed = np.concatenate([np.frombuffer(head, np.uint8), self.info.to_array()])
        array.view(np.uint8)[: packed.size] = packed
        return array

    @classmethod
    def from_array(cls, array: Array) -> ControlMessage:
        flat = array.view(np.uint8)
        number, decision, kind, nbytes = _HEAD.unpack(flat[: _HEAD.size].tobytes())
        return cls(number, kind, nbytes, RankInfo.from_array(flat[_HEAD.size :]), decision)


def blank() -> Array:
    """Return an array that receives a control message."""
    return np.zeros(1, CONTROL_MESSAGE)


class NcclMessages:
    """Messages of GPU arrays; arguments, results and errors are as for host arrays (core/backend.py)."""

    def __init__(self, carrier: StreamCarrier, library: NcclLibrary) -> None:
        self._group = carrier.group
        self._carrier, self._library = carrier, library
        self._staging = Staging(self._group)
        self._staged = StagedMessages(self._group, self._staging)
        self._numbers = itertools.count()
        self._posted: dict[int, NcclMessage] = {}  # by number, the messages that are not claimed
        self._directions: dict[tuple[int, bool], Direction] = {}
        self._info: RankInfo | None = None
        self._lock = threading.RLock()
        self._closed = False

    # ---- the four operations -------------------------------------------------------------------------

    def isend(self, x: ImportedArray, dst: int, tag: int) -> Work:
        message = self._new(x, f"send to {self._name(dst)}, tag {tag}", tag)

        def on_taken(work: Work) -> None:  # runs on the CPU backend's thread, as `on_matched` does
            if (error := work.exception()) is not None:
                self._end(message, error)
            elif dst != self._group.rank:  # the header is matched, so the peer will answer
                self._submit(message, dst, True, partial(self._take_answer, dst))

        with self._posting(message):
            self._group.p2p.post_send(self._header(message), dst, tag).add_done_callback(on_taken)
        return message

    def irecv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> Work:
        source = "any rank" if src is None else self._name(src)
        message, header = self._new(x, f"recv from {source}, {tag_text(tag)}", tag), blank()
        message.status = status

        def on_matched(work: Work) -> None:
            if (error := work.exception()) is not None:
                self._end(message, error)
                return
            source = work.source_rank()
            job = self._copy if source == self._group.rank else self._answer
            control = ControlMessage.from_array(header)
            self._submit(message, source, False, partial(job, message.number, control, source))

        with self._posting(message):
            self._group.p2p.post_receive(ImportedArray(header), src, tag).add_done_callback(on_matched)
        return message

    def send(self, x: ImportedArray, dst: int, tag: int) -> None:
        """Return once the message is matched and queued; if this rank is `dst`, once a copy is queued."""
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
            self._group.messages.send(self._header(message), dst, tag)

    def recv(self, x: ImportedArray, src: int | None, tag: int, status: Status | None = None) -> int:
        """Return once the message is matched and queued."""
        refuse_to_block("recv")
        return int(self._await(self.irecv(x, src, tag, status)))

    def _await(self, work: Work) -> Any:
        """Wait on the host until a message is queued, and make the library's stream wait for it.

        Returns:
            the message's result.
        """
        message = cast(NcclMessage, work)
        try:
            return message.result()
        except FastcollError:
            raise
        except BaseException as error:
            if not message.has_begun:  # the group must fail, because the peer waits for this message
                self._carrier.fail_with(message.describe, error)
            raise

    # ---- posting, on the caller's thread -------------------------------------------------------------

    def _new(self, x: ImportedArray, describe: str, tag: int) -> NcclMessage:
        item = cast(OnDevice, x)
        own = self._carrier.own([item.array])
        marks = self._staging.mark([item.array])
        message = NcclMessage(describe, own, item, kind_of(tag, item.array.dtype), marks, next(self._numbers))
        self._posted[message.number] = message
        return message

    def _header(self, message: NcclMessage) -> ImportedArray:
        return ImportedArray(ControlMessage(message.number, *message.held, self._here()).to_array())

    @contextmanager
    def _posting(self, message: NcclMessage) -> Iterator[None]:
        """End a message if posting it raises an error; any error but a UsageError fails the group."""
        try:
            with self._carrier.failing(message.describe):
                yield
        except BaseException as error:
            self._end(message, error)
            raise

    def _name(self, rank: int) -> str:
        return self._group.monitor.name(rank)

    def _here(self, identity: bytes = b"") -> RankInfo:
        """Return this rank's RankInfo, with `identity` as the communicator's id."""
        if self._info is None:
            assert self._carrier.own_stream is not None
            gpu = self._carrier.runtime.board(self._carrier.own_stream.device)
            self._info = RankInfo.here(gpu, self._library.version, b"")
        return self._info._replace(identity=identity)

    def _submit(
        self, message: NcclMessage, peer: int, sending: bool, job: Callable[[Direction], None]
    ) -> None:
        """Run a job for a message on the thread of a direction."""
        try:
            with self._lock:
                if self._closed:
                    raise self._destroyed()
                direction = self._directions.get((peer, sending))
                if direction is None:
                    events = self._staging.events
                    direction = Direction(self._carrier, self._library, peer, sending, events)
                    self._directions[peer, sending] = direction
                direction.submit(message, partial(self._run, direction, message.describe, job))
        except BaseException as error:
            self._end(message, error)
            if not self._closed:
                self._carrier.fail_with(message.describe, error)

    # ---- jobs, on a direction's thread ---------------------------------------------------------------
    # Any error fails the group, except a mismatch of a single message.

    def _run(self, direction: Direction, describe: str, job: Callable[[Direction], None]) -> None:
        try:
            with self._carrier.failing(describe):
                job(direction)
        except BaseException as error:
            self._end_all(self._group.failure or error)

    def _take_answer(self, dst: int, direction: Direction) -> None:
        """Receive the next answer of a peer, and send the message that it names."""
        array = blank()
        self._group.p2p.post_receive(ImportedArray(array), dst, ANSWER).join()
        answer = ControlMessage.from_array(array)
        with self._claimed(answer.number) as message:
            if answer.decision == NCCL:
                direction.move(message, answer.info.identity)
            elif answer.decision == STAGED:
                self._go_staged(message, self._staged.isend, dst)
            else:
                self._over(message, answer.decision, refused, dst, answer)

    def _answer(self, number: int, header: ControlMessage, source: int, direction: Direction) -> None:
        """Send the sender an answer that says how the message is moved, and receive the message."""
        with self._claimed(number) as message:
            decision = self._decision(message, header, source)
            first = decision == NCCL and not direction.is_connected
            identity = self._library.unique_id() if first else b""
            answer = ControlMessage(header.number, *message.held, self._here(identity), decision)
            self._group.p2p.post_send(ImportedArray(answer.to_array()), source, ANSWER)
            if decision == NCCL:
                direction.move(message, identity)
            elif decision == STAGED:
                # Staging waits for the array's stream. It waits on this thread, not on the CPU backend's, because the
                # stream may wait for other messages.
                status = message.status and Status()
                self._go_staged(message, partial(self._staged.irecv, status=status), source)
            else:
                self._over(message, decision, unfit, source, header)

    def _decision(self, message: NcclMessage, header: ControlMessage, source: int) -> int:
        if not fits(message.held, (header.kind, header.nbytes), message.status is not None):
            return MISFIT
        message.set_source(source, tag_of(header.kind), header.nbytes)
        if not header.nbytes:
            return NOTHING
        try:
            check_ranks([header.info, self._here()], [0, 1], self._group.name)
        except UnavailableError:
            return STAGED
        return NCCL

    def _go_staged(self, message: NcclMessage, move: Callable[..., Work], peer: int) -> None:
        """Move a message through the host."""
        marks, message.marks = message.marks, []
        work = move(message.item, peer, DATA, marks=marks)
        work.add_done_callback(lambda work: message.settle(work.exception()))

    def _copy(self, number: int, header: ControlMessage, source: int, direction: Direction) -> None:
        """Execute a message of this rank to itself."""
        with self._claimed(header.number) as sent, self._claimed(number) as received:
            decision = self._decision(received, header, source)
            if decision in (MISFIT, NOTHING):
                held = ControlMessage(header.number, *received.held, header.info)
                self._over(sent, decision, refused, source, held)
                self._over(received, decision, unfit, source, header)
            else:
                direction.copy(sent, received)

    # ---- ends ----------------------------------------------------------------------------------------

    @contextmanager
    def _claimed(self, number: int) -> Iterator[NcclMessage]:
        """Claim a message for a `with` block.

        An error in the block ends the message and fails the group, because the peer waits for the message.
        """
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
        self,
        message: NcclMessage,
        decision: int,
        misfit: Callable[..., FastcollError],
        peer: int,
        control: ControlMessage,
    ) -> None:
        """End a claimed message that moves no data; `control` is the peer's control message."""
        error = None
        if decision == MISFIT:
            here, there = self._name(self._group.rank), self._name(peer)
            error = misfit(message.describe, here, message.held, there, (control.kind, control.nbytes))
        self._settle(message, error)

    def _settle(self, message: NcclMessage, error: BaseException | None) -> None:
        marks, message.marks = message.marks, []
        for device, event in marks:
            self._staging.events.give(device, [event])
        message.settle(error)

    def _end(self, message: NcclMessage, error: BaseException) -> None:
        """End a message if it has not been claimed yet."""
        if self._posted.pop(message.number, None) is not None:
            self._settle(message, error)

    def _end_all(self, error: BaseException) -> None:
        for message in list(self._posted.values()):
            self._end(message, error)

    def _destroyed(self) -> AbortedError:
        return AbortedError(f"the group {self._group.name} was destroyed before the message was complete")

    def communicators(self) -> list[Communicator]:
        """Return the communicators of all directions."""
        return [each.communicator for each in self._all_directions() if each.communicator is not None]

    def _all_directions(self) -> list[Direction]:
        with self._lock:
            return list(self._directions.values())

    def break_off(self, error: GroupError) -> None:
        """End all messages after the group has failed, from any thread, without waiting."""
        for direction in self._all_directions():
            direction.break_off(error)
        self._end_all(error)

    def close(self) -> None:
        """Block until the matched messages are done, end the others, and free everything."""
        with self._lock:
            self._closed = True
            directions = list(self._directions.values())
        for direction in directions:
            direction.finish()
        # All directions disconnect at once: each waits for its peer, which may be busy with another direction.
        for direction in directions:
            direction.disconnect()
        for direction in directions:
            direction.close()
        self._end_all(self._group.failure or self._destroyed())
        self._staging.close()
