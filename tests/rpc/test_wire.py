"""Messages as bytes: complete for every split of the bytes."""

from __future__ import annotations

import mmap
import random
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fastcoll.errors import RpcError, UsageError
from fastcoll.rpc import exceptions, pickling, wire
from fastcoll.rpc.agent import Agent, PendingCall
from fastcoll.rpc.futures import Future
from fastcoll.rpc.worker_info import WorkerInfo

TO = WorkerInfo("w1", 1)


def received(data: bytes, taken: list[memoryview], most: int, seed: int) -> list[wire.RpcMessage]:
    """Return the messages that an assembler makes of bytes received in random portions."""
    source, left = random.Random(seed), memoryview(data)
    assembler = wire.Assembler(lambda buffer: iter(buffer.__setitem__(slice(None), taken.pop(0)) or ()))
    found = []
    while left:
        n = min(source.randint(1, most), len(left), assembler.space.nbytes)
        assembler.space[:n] = left[:n]
        found += assembler.add(n)
        left = left[n:]
    return found


@pytest.mark.parametrize("by_ring", [False, True])
@pytest.mark.parametrize("most", [1, 100, 1 << 20])
def test_messages_are_complete_for_every_split_of_the_bytes(most: int, by_ring: bool) -> None:
    source = np.random.default_rng(0)
    sizes = (0, 1, 100) if most == 1 else (0, 1, 63, 64, wire.INLINE, wire.INLINE + 1, 300_000)
    values = [
        {"n": n, "x": source.random(n)[: n // 2 + 1], "y": np.arange(n, dtype=np.int8), "text": "t" * n}
        for n in sizes
    ]
    sent, behind = [], []
    for number, value in enumerate(values):
        pickled, buffers = pickling.dumps(value, TO)
        start, large = wire.encode(
            wire.RpcMessage(wire.MessageType.CALL, 7, number, pickled, buffers, b"c" * number), by_ring
        )
        sent += [start] if by_ring else [start, *large]
        behind += large
    for seed in range(3):
        messages = received(b"".join(sent), list(behind), most, seed)
        assert [message.call for message in messages] == list(range(len(values)))
        for message, value in zip(messages, values, strict=True):
            assert (message.type, message.kind) == (wire.MessageType.CALL, 7)
            assert message.context == b"c" * message.call
            with pickling.receiving(TO):
                got = pickling.loads(message)
            assert got["text"] == value["text"]
            for name in "xy":
                assert (got[name] == value[name]).all()
                assert got[name].flags.writeable


def test_a_message_is_consumed_before_the_next_one_is_parsed() -> None:
    """The large buffers of an answer are in memory that the message just before it has announced."""
    large = np.arange(wire.INLINE, dtype=np.int64)
    pickled, buffers = pickling.dumps(large, TO)
    start, behind = wire.encode(
        wire.RpcMessage(wire.MessageType.RESULT, 0, 1, pickled, buffers), by_ring=True
    )
    data = wire.encode(wire.RpcMessage(wire.MessageType.RING, 0, 1, b""))[0] + start
    memory = []
    assembler = wire.Assembler(lambda buffer: iter(buffer.__setitem__(slice(None), memory[0]) or ()))
    assembler.space[: len(data)] = data
    for message in assembler.add(len(data)):
        if message.type == wire.MessageType.RING:
            memory += behind
        else:
            assert (pickling.loads(message) == large).all()
    assert message.type == wire.MessageType.RESULT


CALL, GOODBYE = wire.MessageType.CALL, wire.MessageType.GOODBYE
# (body's length, call, pickle's length, context's length, buffers, type, kind, by ring), the body, the reason
WRONG = {
    "type": ((1, 1, 1, 0, 0, 99, 0, 0), b"x", "there is no message type 99"),
    "huge body": ((1 << 63, 1, 1 << 63, 0, 0, CALL, 1, 0), b"", "for which there is no memory"),
    "largest body": ((2**64 - 1, 1, 2**64 - 1, 0, 0, CALL, 1, 0), b"", "for which there is no memory"),
    "no pickle": ((0, 1, 0, 0, 0, CALL, 1, 0), b"", "a message of type CALL has no pickle"),
    "short pickle": ((2, 1, 1, 0, 0, CALL, 1, 0), b"xx", "a body of 2 bytes has a pickle of 1 bytes"),
    "long pickle": ((1, 1, 2, 0, 0, GOODBYE, 1, 0), b"x", "a body of 1 bytes has a pickle of 2 bytes"),
    "long context": ((2, 1, 1, 2, 0, CALL, 1, 0), b"xx", "a pickle of 1 bytes behind 2 others"),
    "many buffers": ((9, 1, 1, 0, 2**32 - 1, CALL, 1, 0), bytes(9), "behind 34359738360 others"),
    "short buffer": ((9, 1, 1, 0, 1, CALL, 1, 0), b"\1" + bytes(8), "a body of 9 bytes have 65 bytes"),
    "huge buffer": ((9, 1, 1, 0, 1, CALL, 1, 0), b"\xff" * 8 + b"x", "for which there is no memory"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_message_that_violates_the_format_is_refused(case: str) -> None:
    header, body, reason = WRONG[case]
    with pytest.raises(wire.MessageError, match=reason):
        received(wire.HEADER.pack(*header) + body, [], 1 << 16, 0)


def test_an_announced_length_costs_no_memory() -> None:
    """A body of 1 GiB of which no byte arrives."""
    assembler = wire.Assembler(lambda buffer: iter(()))
    header = wire.HEADER.pack(1 << 30, 1, 1 << 30, 0, 0, CALL, 1, 0)
    assembler.space[: len(header)] = header
    before = resident_bytes()
    assert list(assembler.add(len(header))) == []
    assert assembler.space.nbytes == 1 << 30
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_what_is_no_exception_is_refused() -> None:
    for packed in (None, (), (None, "name", "text", 1), "text"):
        with pytest.raises(RpcError, match=r"worker w1 \(rank 1\) answered with"):
            exceptions.unpack(TO, packed)  # type: ignore[arg-type]


@pytest.mark.parametrize("type", [wire.MessageType.RESULT, wire.MessageType.RAISED])
@pytest.mark.parametrize("pickled", [b"x", b"\0", b"N.", b"\x80\x05"])
def test_an_unreadable_answer_completes_its_call(type: wire.MessageType, pickled: bytes) -> None:
    future: Future[Any] = Future()
    call = PendingCall(future, 1, b"", 0.0, 1.0, "the test", [])
    Agent._answered(Mock(), call, TO, wire.RpcMessage(type, 0, 1, pickled))
    assert future.done()
    if (type, pickled) != (wire.MessageType.RESULT, b"N."):
        with pytest.raises(RpcError, match=r"w1 \(rank 1\)"):
            future.wait()


@pytest.mark.parametrize("by_ring", [False, True])
def test_nothing_refers_to_a_consumed_message(by_ring: bool) -> None:
    pickled, buffers = pickling.dumps(np.zeros(wire.INLINE), TO)
    start, behind = wire.encode(wire.RpcMessage(wire.MessageType.RESULT, 0, 1, pickled, buffers), by_ring)
    data = memoryview(start if by_ring else start + bytes(behind[0]))
    assembler, taken = wire.Assembler(lambda buffer: iter(())), list[weakref.ref[Any]]()
    while data:
        nbytes = min(len(data), assembler.space.nbytes)
        assembler.space[:nbytes] = data[:nbytes]
        data = data[nbytes:]
        taken += [weakref.ref(message.buffers[0]) for message in assembler.add(nbytes)]
    assert [each() for each in taken] == [None]


def test_a_value_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(UsageError, match=r"the message to w1 \(rank 1\) cannot be pickled: .*lambda"):
        pickling.dumps(lambda: None, TO)


class Base:
    """Pickled by a registered reducer."""


class Derived(Base):
    pass


def test_reducers_apply_to_subclasses_and_get_the_receiver() -> None:
    pickling.reduce_type(Base, lambda value, to: (str, (f"{type(value).__name__} for {to.name}",)))
    pickled, _ = pickling.dumps([Derived(), Base()], TO)
    message = wire.copied(wire.RpcMessage(wire.MessageType.CALL, 1, 1, pickled))
    assert pickling.loads(message) == ["Derived for w1", "Base for w1"]
