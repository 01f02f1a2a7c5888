"""Messages as bytes: complete for every split of the bytes."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest

from fastcoll.errors import UsageError
from fastcoll.rpc import pickling, wire
from fastcoll.rpc.worker_info import WorkerInfo

TO = WorkerInfo("w1", 1)


def received(data: bytes, taken: list[memoryview], most: int, seed: int) -> list[wire.RpcMessage]:
    """Return the messages that an assembler makes of bytes received in random portions."""
    source, left = random.Random(seed), memoryview(data)
    assembler = wire.Assembler(lambda buffer: buffer.__setitem__(slice(None), taken.pop(0)))
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
    assembler = wire.Assembler(lambda buffer: buffer.__setitem__(slice(None), memory[0]))
    assembler.space[: len(data)] = data
    for message in assembler.add(len(data)):
        if message.type == wire.MessageType.RING:
            memory += behind
        else:
            assert (pickling.loads(message) == large).all()
    assert message.type == wire.MessageType.RESULT


@pytest.mark.parametrize("by_ring", [False, True])
def test_nothing_refers_to_a_consumed_message(by_ring: bool) -> None:
    pickled, buffers = pickling.dumps(np.zeros(wire.INLINE), TO)
    start, behind = wire.encode(wire.RpcMessage(wire.MessageType.RESULT, 0, 1, pickled, buffers), by_ring)
    data = memoryview(start if by_ring else start + bytes(behind[0]))
    assembler, taken = wire.Assembler(lambda buffer: None), list[weakref.ref[Any]]()
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
