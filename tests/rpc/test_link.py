"""Links: one end of a connection, while the other end acts at chosen moments."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
from programs import until
from together import together

from fastcoll.rpc.link import Link
from fastcoll.rpc.polling import HANG_UP, READ
from fastcoll.rpc.readers import Readers, before_blocking
from fastcoll.rpc.slots import Ring
from fastcoll.rpc.wire import HEADER, Assembler, MessageError, MessageType, RpcMessage, encode
from fastcoll.rpc.worker_info import WorkerInfo
from rpc.victims import LIMIT


@pytest.fixture
def ends() -> Iterator[tuple[Link, socket.socket, list[Any], Readers]]:
    """A link on which calls are made, the other end of its connection, the answers that were completed, the readers."""
    near, far = socket.socketpair()
    near.setblocking(False)
    far.settimeout(LIMIT)
    readers, answered = Readers(2, False), list[Any]()
    link = Link(
        near,
        WorkerInfo("w1", 1),
        True,
        lambda link, message: lambda: answered.append(link.pending.pop(message.call)),
        lambda link: None,
        readers.run,
    )
    yield link, far, answered, readers
    readers.close(LIMIT)
    link.close()
    far.close()


def test_a_thread_does_not_read_for_an_answer_that_another_one_received(ends: Any) -> None:
    link, _, _, readers = ends
    link.pending[1] = "first"
    began = time.monotonic()
    readers.read_answer(link, 2, began + LIMIT)
    assert time.monotonic() < began + LIMIT
    assert not link.reading.locked()


def test_a_thread_that_reads_its_answer_wakes_no_other_thread(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, far, answered, readers = ends
    monkeypatch.setattr(readers.poller, "start_timer", lambda: None)
    readers.poller.watch(link, HANG_UP)
    link.pending |= {1: "first", 2: "second"}
    readers.rearm_later(link)
    before_blocking(link)
    assert link.armed == HANG_UP
    far.send(encode(RpcMessage(MessageType.RESULT, 0, 1, b"x"))[0])
    readers.read_answer(link, 1, time.monotonic() + LIMIT)
    assert answered == ["first"]
    assert link.armed == READ, "nobody reads the second answer"
    readers.poller.forget(link)


def test_an_interrupt_right_after_the_lock_was_taken_releases_it(ends: Any) -> None:
    link, far, answered, readers = ends
    link.pending[1] = "first"

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        """Raise where Python calls the handlers of signals: after a call of C code has returned."""
        if event == "c_return" and frame.f_code.co_name == "read_answer" and link.reading.locked():
            sys.setprofile(None)
            raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            readers.read_answer(link, 1, time.monotonic() + LIMIT)
    finally:
        sys.setprofile(before)
    assert not link.reading.locked()
    far.send(encode(RpcMessage(MessageType.RESULT, 0, 1, b"x"))[0])
    readers.read_answer(link, 1, time.monotonic() + LIMIT)
    assert answered == ["first"]


def test_messages_before_an_unreadable_one_are_not_lost(ends: Any) -> None:
    link, far, answered, _ = ends
    link.pending[1] = "first"
    far.send(encode(RpcMessage(MessageType.RESULT, 0, 1, b"x"))[0] + HEADER.pack(0, 2, 0, 0, 0, 99, 0, 0))
    with link.reading:
        (task,) = link.receive()
        task()
        assert answered == ["first"]
        assert link.receive() is None


def test_both_ends_learn_that_a_message_is_unreadable(ends: Any, caplog: pytest.LogCaptureFixture) -> None:
    link, far, *_ = ends
    far.send(HEADER.pack(0, 2, 0, 0, 0, 99, 0, 0))
    with link.reading:
        assert link.receive() is None
    assert (
        link.fault
        == "sent a message that cannot be read: there is no message type 99; the connection is closed"
    )
    (record,) = caplog.records
    assert record.exc_info is None
    assert "a message from w1 (rank 1) cannot be read: there is no message type 99" in record.message
    (goodbye,) = messages_in(far.recv(1 << 10))
    assert goodbye.type == MessageType.GOODBYE
    assert (
        bytes(goodbye.pickled)
        == b"could not read a message and closed the connection: there is no message type 99"
    )
    assert not far.recv(1)


def messages_in(data: bytes) -> list[RpcMessage]:
    assembler = Assembler(lambda buffer: iter(()))
    assembler.space[: len(data)] = data
    return list(assembler.add(len(data)))


def test_memory_is_offered_and_accepted_once(ends: Any) -> None:
    link, *_ = ends
    with pytest.raises(MessageError, match="accepted that was not offered"):
        link.offer_answered(True)
    link.ring = Mock()
    with pytest.raises(MessageError, match="offered a second time"):
        link.answer_offer(os.getpid(), bytes(20))
    with pytest.raises(MessageError, match="accepted that was not offered"):
        link.offer_answered(True)


def test_a_buffer_in_memory_that_was_not_offered_is_refused(ends: Any) -> None:
    link, far, *_ = ends
    far.send(
        encode(RpcMessage(MessageType.RESULT, 0, 1, b"x", [memoryview(bytes(1 << 15))]), by_ring=True)[0]
    )
    with link.reading:
        assert link.receive() is None
    assert "through shared memory" in link.fault


def test_a_call_times_out_while_its_answer_is_in_the_middle_of_shared_memory(ends: Any) -> None:
    """The peer stops after it has announced a buffer; later it goes on, and another thread reads the answer."""
    link, far, answered, readers = ends
    link.ring, offer = Ring.offer()
    theirs, link.pending[1] = Ring.accept(os.getpid(), offer), "late"
    buffer = memoryview(bytes(1 << 20))
    far.send(encode(RpcMessage(MessageType.RESULT, 0, 1, b"x", [buffer]), by_ring=True)[0])
    readers.poller.watch(link, HANG_UP)
    (error,) = together(lambda: readers.read_answer(link, 1, time.monotonic() + 0.1), deadline=LIMIT)
    assert error is None
    assert not answered
    for _ in theirs.put(buffer):
        pass
    until(lambda: answered == ["late"])
    readers.poller.forget(link)
    theirs.close()


def test_a_sender_on_a_full_connection_notices_the_peers_end(ends: Any) -> None:
    link, far, *_ = ends
    far.shutdown(socket.SHUT_WR)  # the peer ends, and unread data fills the connection
    (error,) = together(partial(link.send, RpcMessage(MessageType.CALL, 1, 1, bytes(16 << 20))))
    assert isinstance(error, ConnectionError)
    assert "the connection was closed" in str(error)


class Interrupted:
    """A socket after whose `send` a signal handler raises an error."""

    def __init__(self, near: socket.socket, error: BaseException) -> None:
        self._near, self._error = near, error

    def send(self, data: bytes) -> int:
        self._near.send(data)
        raise self._error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._near, name)


def test_an_interrupt_in_the_middle_of_a_message_closes_the_connection(ends: Any) -> None:
    link, far, *_ = ends
    link._socket = Interrupted(link._socket, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        link.send(RpcMessage(MessageType.CALL, 1, 1, b"x", [memoryview(bytes(1 << 20))]))
    assert far.recv(1 << 10)
    assert not far.recv(1), "it is open, and the rest never comes"
    assert not link._sending.locked()
    assert link.fault == "is no longer connected, because KeyboardInterrupt interrupted a message here"


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, ValueError])
def test_an_interrupt_of_the_reading_thread_is_the_reason_at_both_ends(
    ends: Any, error: type[BaseException]
) -> None:
    link, far, *_ = ends
    link._received = Mock(side_effect=error("the alarm"))
    far.send(encode(RpcMessage(MessageType.RESULT, 0, 1, b"x"))[0])
    with link.reading, pytest.raises(error):
        link.receive()
    name = error.__name__
    assert link.fault == f"is no longer connected, because {name} interrupted a message here"
    (goodbye,) = messages_in(far.recv(1 << 10))
    assert goodbye.type == MessageType.GOODBYE
    assert bytes(goodbye.pickled).decode() == f"closed the connection, because {name} interrupted a message"
    assert not far.recv(1)


def test_a_link_closes_although_an_interrupt_left_its_lock_locked(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastcoll.rpc.link._CLOSE_SECONDS", 0.05)
    link = ends[0]
    with link.reading:
        assert together(link.close) == [None]


def test_goodbye_waits_for_a_slow_sender(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lock is free at the fourth try."""
    monkeypatch.setattr("fastcoll.rpc.link._CLOSE_SECONDS", LIMIT)
    link, far, *_ = ends
    monkeypatch.setattr(link, "_sending", Mock(acquire=Mock(side_effect=[False, False, False, True])))
    link.send_goodbye("left")
    assert far.recv(1 << 10).endswith(b"left")
    link._sending.release.assert_called_once()


def test_shared_memory_closes_while_a_traceback_refers_to_a_message() -> None:
    ring, _ = Ring.offer()
    stuck = ring.put(memoryview(bytes(4 << 20)))
    next(stuck)
    ring.close()
    ring.close()


def test_shared_memory_of_another_process_with_the_same_pid_is_refused() -> None:
    ring, offer = Ring.offer()
    with pytest.raises(OSError, match="that pid is another process here"):
        Ring.accept(os.getpid(), offer[:4] + bytes(16))
    Ring.accept(os.getpid(), offer).close()
    ring.close()
