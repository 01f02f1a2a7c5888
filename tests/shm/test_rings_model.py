"""The protocol of fastcoll/shm/rings.py and ring_kernels.py: the package's code in every schedule of small programs.

Each of two ranks runs a program of "send", "isend", "recv" and "irecv", with a tag and a number of words. The blocking
calls run as the package calls them; a small engine that follows p2p/pipe.py does the rest. Rings have room for four
pieces of two words, and for two acks. Every receive checks its message.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from shm.explorer import FOUND, SHARED, Explorer, load

from fastcoll.core.monitor import FAILED
from fastcoll.core.status import AGAIN, DONE, LATER, OTHER, WORKED
from fastcoll.p2p import pipe
from fastcoll.p2p.transfers import DTYPE_BITS

MAILBOX, CHANNELS, CONTEXT, ARRAY, BUFFERS = (k << 20 for k in range(1, 6))
CONTROL = SHARED + (1 << 28)
DATA = SHARED + (1 << 29)
DATA_OF_BOTH = SHARED + (1 << 30)
ROOM = 1 << 10


class Engine(NamedTuple):
    """A rank's state between two entries: operations by their index in its program, messages by their number."""

    pc: int = 0
    begun: bool = False  # the blocking call at pc
    handled: int = 0
    queued: tuple[int, ...] = ()  # sends that have not begun
    entering: bool = False
    unacked: tuple[tuple[int, int], ...] = ()  # number, operation
    posted: tuple[int, ...] = ()
    arriving: int = -1  # the operation, or STORED
    stored: tuple[tuple[int, int], ...] = ()  # number, kind of messages without a receive
    owed: tuple[tuple[int, int], ...] = ()  # number, kind of messages whose acks wait for space
    done: tuple[int, ...] = ()


STORED = 1000


class World:
    """Two ranks that exchange messages.

    Args:
        batch: acks that the sender reads before it publishes that.
        direct: whether messages are direct.
    """

    def __init__(self, *programs: str, batch: int = 1, direct: bool = False, plant: str = "") -> None:
        sizes = {"FRAME_UNIT": 32 if direct else 16, "ACK_SLOTS": 2, "ACK_BATCH": batch, "_READ_AT_ONCE": 16}
        self.machine, self.made = load(plant, rings=sizes)
        self.machine.check = self.is_allocated
        parsed = [[op.split() for op in program.split(", ") if op] for program in programs]
        self.programs = [[(op, int(tag), int(words)) for op, tag, words in program] for program in parsed]
        self.direct = direct

    def is_allocated(self, address: int) -> None:
        """Check that a receiver accesses a ring only after it has seen a message there."""
        places = (place + (self.peer << 16) for place in (CONTROL, DATA))
        if any(place <= address < place + (1 << 16) for place in places):
            assert self.of_channel("IN_HEAD") > 0, "a ring that is accessed is not allocated"

    def begin(self, rank: int) -> tuple[Any, dict[int, Any]]:
        r, peer = self.made.rings, 1 - rank
        mailbox = {
            r.CHANNELS: CHANNELS, r.SIZE: 2, r.RANK: rank, r.RING: 128, r.CONTEXT: CONTEXT,
            r.DIRECT_FROM: 0 if self.direct else 1 << 60, r.ALGORITHMS: 1,
        }  # fmt: skip
        channel = {
            r.OUT_HEAD_AT: SHARED + (rank << 16), r.IN_HEAD_AT: SHARED + (peer << 16),
            r.OUT: CONTROL + (rank << 16), r.IN: CONTROL + (peer << 16),
            r.OUT_DATA: DATA + (rank << 16), r.IN_DATA: DATA + (peer << 16), r.OUT_READY: 1,
            r.IN_STATE: SHARED + (1 << 20) + (peer << 16),
        }  # fmt: skip
        words = {MAILBOX + 8 * word: value for word, value in mailbox.items()}
        channels = CHANNELS + 8 * peer * r.CHANNEL_WORDS
        return Engine(), words | {channels + 8 * word: value for word, value in channel.items()}

    def go_on(self, rank: int, e: Engine) -> Engine | None:
        m, r = self.machine, self.made.rings
        self.rank, self.peer, self.program = rank, 1 - rank, self.programs[rank]
        self.channel = CHANNELS + 8 * self.peer * r.CHANNEL_WORDS
        if self.direct and m.load_acquire(self.of_channel("IN_STATE")) == FAILED:
            return None
        if e.pc < len(self.program) and not e.begun:
            if self.program[e.pc][0] == "fail":  # and the caller may change the arrays
                m.store_release(SHARED + (1 << 20) + (rank << 16), FAILED)
                for word in range(self.program[0][2]):
                    m.store_release(self.array(0) + 8 * word, -1)
                return None
            e = self.call(e)
        elif e.pc < len(self.program) or e.queued or e.unacked or e.posted or e.arriving >= 0 or e.owed:
            event = self.progress(e)
            if event != pipe.NOTHING:
                e = self.handle(e._replace(handled=e.handled + 1), event % pipe.EVENTS)
        else:
            return None
        if e.begun and e.pc in e.done:
            e = e._replace(begun=False, pc=e.pc + 1)
        if e.queued and not e.entering:
            index, *rest = e.queued
            self.made.ring_kernels.begin(MAILBOX, self.peer, self.array(index), *self.size_and_kind(index))
            e = self.sent(e._replace(queued=tuple(rest)), index)
        # The engine publishes its remaining work to the kernels.
        busy = bool(e.queued or e.unacked or e.posted or e.arriving >= 0 or e.owed)
        self.set(MAILBOX, BEHIND=int(busy), BUSY=0)
        self.set(self.channel, WATCHED=len(e.posted), OWED=len(e.owed))
        return e

    def progress(self, e: Engine) -> int:
        """Return the next event."""
        self.set(MAILBOX, BUSY=1)
        return int(self.made.ring_kernels.advance(MAILBOX, e.handled, 1))

    def set(self, table: int, **words: int) -> None:
        for name, value in words.items():
            self.machine.store(table + 8 * getattr(self.made.rings, name), value)

    def of_channel(self, name: str) -> int:
        return self.machine.load(self.channel + 8 * getattr(self.made.rings, name))

    def array(self, index: int) -> int:
        """Address of an operation's array."""
        sends = index < STORED and self.program[index][0].endswith("send")
        return (DATA_OF_BOTH + (self.rank << 20) if sends and self.direct else BUFFERS) + ROOM * index

    def size_and_kind(self, index: int) -> tuple[int, int]:
        _, tag, words = self.program[index]
        return 8 * words, tag << DTYPE_BITS | 1

    def content(self, rank: int, index: int) -> list[int]:
        return [1000 * rank + 100 * (index + 1) + k for k in range(self.programs[rank][index][2])]

    def expected(self, index: int) -> list[int]:
        """Expected message of a receive: for each tag, the n-th receive posted gets the n-th message sent."""
        tag = self.program[index][1]
        before = sum(op.endswith("recv") and t == tag for op, t, _ in self.program[:index])
        sent = [
            k for k, (op, t, _) in enumerate(self.programs[self.peer]) if op.endswith("send") and t == tag
        ]
        return self.content(self.peer, sent[before])

    def call(self, e: Engine) -> Engine:
        """Make the call at `pc`."""
        k, m, index = self.made.ring_kernels, self.machine, e.pc
        op, (size, kind) = self.program[index][0], self.size_and_kind(index)
        m.store(ARRAY + self.made.pyobjects.DATA, self.array(index))
        arguments = MAILBOX, self.peer, ARRAY, kind, size
        if op.endswith("send"):
            m.store_words(self.array(index), self.content(self.rank, index))
            if op == "send":
                code = k.send(*arguments)
                if code in (AGAIN, WORKED):
                    e = self.sent(e, index)
            else:
                code = LATER
            assert code in (DONE, AGAIN, WORKED, LATER), f"{op} has ended with {code}"
            if code == DONE:
                self.end_send(index)
            elif code == LATER:
                e = e._replace(queued=(*e.queued, index))
        else:
            found = [each for each in e.stored if each[1] == kind]
            if found:
                m.copy(self.array(index), self.array(STORED + found[0][0]), size)
                e = e._replace(stored=tuple(each for each in e.stored if each != found[0]))
                e, code = self.answer(e, *found[0]), DONE
            else:
                code = k.receive(*arguments) if op == "recv" else LATER
                code = DONE if code < DONE else code
            if code == DONE:
                self.check(index)
            elif code in (AGAIN, WORKED) and self.of_channel("IN_TAIL") < self.of_channel("IN_END"):
                e = e._replace(arriving=index)
            else:
                assert code in (AGAIN, WORKED, OTHER, LATER), f"{op} has ended with {code}"
                e = e._replace(posted=(*e.posted, index))
        if code == DONE:
            e = e._replace(done=(*e.done, index))
        return e._replace(begun=True) if op in ("send", "recv") else e._replace(pc=index + 1)

    def sent(self, e: Engine, index: int) -> Engine:
        """A send has begun."""
        entering = self.of_channel("OUT_HEAD") < self.of_channel("OUT_END")
        return e._replace(entering=entering, unacked=(*e.unacked, (self.of_channel("SENT"), index)))

    def end_send(self, index: int) -> None:
        """End a send; the caller may then change the array."""
        self.machine.store_words(self.array(index), [-1] * self.program[index][2])

    def check(self, index: int) -> None:
        found = self.machine.load_words(self.array(index), self.program[index][2])
        assert found == self.expected(index), f"a message gave {found} and not {self.expected(index)}"

    def answer(self, e: Engine, number: int, kind: int) -> Engine:
        code = self.made.ring_kernels.acknowledge(MAILBOX, self.peer, number, pipe.TAKEN, 8, kind)
        return e if code == DONE else e._replace(owed=(*e.owed, (number, kind)))

    def handle(self, e: Engine, event: int) -> Engine:
        """Handle an event of `advance`."""
        kind, number = self.of_channel("IN_KIND"), self.of_channel("RECEIVED")
        if event == pipe.ENTERED:
            return e._replace(entering=False)
        if event == pipe.ACKED:
            acked, decision = self.of_channel("ACK_NUMBER"), self.of_channel("ACK_DECISION")
            assert acked in dict(e.unacked), f"the ack gave number {acked}, and {e.unacked} are not acked"
            assert decision == pipe.TAKEN
            index = dict(e.unacked)[acked]
            self.end_send(index)
            left = tuple(each for each in e.unacked if each[0] != acked)
            return e._replace(unacked=left, done=(*e.done, index))
        if event == pipe.HEADER:
            fitting = [index for index in e.posted if self.size_and_kind(index)[1] == kind]
            index = fitting[0] if fitting else STORED + number + 1
            self.made.ring_kernels.accept(MAILBOX, self.peer, self.array(index))
            left = tuple(each for each in e.posted if each != index)
            return e._replace(arriving=min(index, STORED), posted=left)
        if event == pipe.ARRIVED:
            index = e.arriving
            e = e._replace(arriving=-1)
            if index == STORED:
                return e._replace(stored=(*e.stored, (number, kind)))
            self.check(index)
            return self.answer(e, number, kind)._replace(done=(*e.done, index))
        assert event == pipe.ACK_SPACE
        (number, kind), *rest = e.owed
        return self.answer(e._replace(owed=tuple(rest)), number, kind)


def explore(*programs: str, weak: int = 0, **how: Any) -> int:
    return Explorer(World(*programs, **how), 2, weak=weak).explore()


PROGRAMS = {
    "longer than the ring": ("send 0 20", "recv 0 20"),
    "pieces wrap unevenly": ("isend 0 3, isend 0 10", "irecv 0 3, irecv 0 10"),
    "reversed tags": ("isend 0 1, isend 1 1, isend 2 1", "recv 2 1, recv 1 1, recv 0 1"),
    "reversed tags, longer than the ring": ("isend 0 9, isend 1 9", "recv 1 9, recv 0 9"),
    "one tag": ("send 0 1, send 0 2, send 0 1", "irecv 0 1, irecv 0 2, irecv 0 1"),
    "more acks than slots": ("isend 0 1, isend 1 1, isend 2 1", "irecv 2 1, irecv 0 1, irecv 1 1"),
    "both ways": ("isend 0 2, recv 0 2, send 1 4", "isend 0 2, recv 0 2, irecv 1 4"),
    "both wait": ("isend 0 1, irecv 0 1, irecv 1 1, isend 1 1", "irecv 0 1, isend 0 1, isend 1 1, irecv 1 1"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule(name: str) -> None:
    assert explore(*PROGRAMS[name]) > 50


FOUR_SENDS = "isend 0 1, isend 0 1, isend 0 1, isend 0 1"
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    (FOUR_SENDS, FOUR_SENDS.replace("send", "recv"), {"batch": 2}),  # acks that are published in batches
    ("isend 0 4, isend 1 3", "recv 0 4, irecv 1 3", {"direct": True}),
    ("isend 0 4, fail 0 0", "recv 0 4, irecv 1 3", {"direct": True}),
]


@pytest.mark.parametrize(("first", "second", "how"), OTHERS)
def test_other_ways_every_schedule(first: str, second: str, how: dict[str, Any]) -> None:
    assert explore(first, second, **how) > 30


LONG = PROGRAMS["longer than the ring"]
WRAP = PROGRAMS["pieces wrap unevenly"]
TAGS = PROGRAMS["more acks than slots"]
FOUR = (FOUR_SENDS, "recv 0 1, recv 0 1, recv 0 1, irecv 0 1")
DIRECT = ("isend 0 4, isend 1 3", "recv 0 4, irecv 1 3")

PLANTS = [
    # Unread data is overwritten.
    (LONG, "+ nbytes - load_word(m, RING) => + nbytes - load_word(m, RING) - FRAME_UNIT"),
    (LONG, "data = load_word(channel, IN_DATA)\n => data = load_word(channel, IN_DATA); _take(channel, tail + part)\n"),
    (FOUR, "load_word(channel, ACKS_GIVEN) - ACK_SLOTS + 1 => load_word(channel, ACKS_GIVEN) - ACK_SLOTS"),
    (FOUR, "store_release(ring + ACKS_TAKEN, taken + 1) => store_release(ring + ACKS_TAKEN, taken + 2)"),
    (FOUR, "kernels: if r.has_ack_space(channel) and r.sees_header => if r.sees_header"),
    # Data is read before it is written.
    (LONG, "if head < body: => store_release(load_word(channel, OUT_HEAD_AT), head + part)\n    if head < body:"),
    (LONG, "has_arrived(channel, tail + 1) => has_arrived(channel, tail)"),
    (TAGS, "store_word(ack, 1, number) => store_release(ack, given + 1), store_word(ack, 1, number)"),
    (FOUR, "if load_acquire(ack) != taken + 1: => if load_acquire(ack) == 0:"),
    (WRAP, "copy_or_stream(past, data, source + first, nbytes - first) => 0"),
    (WRAP, "copy_or_stream(past, target + first, data, nbytes - first) => 0"),
    # A ring without messages is accessed.
    (FOUR, "if load_word(channel, seen) >= least:\n        return True => 0"),
    # The wrong message or ack.
    (PROGRAMS["reversed tags"], "kernels: load_word(channel, r.IN_KIND) != kind or => False or"),
    (LONG, "kernels: load_word(channel, r.RECEIVED), TAKEN, nbytes, kind) => 0, TAKEN, nbytes, kind)"),
    # Deadlocks.
    (LONG, "store_release(load_word(channel, OUT_HEAD_AT), head + part) => 0"),
    (FOUR, "(taken + 1) % ACK_BATCH == 0 => (taken + 1) % 3 == 0"),
    (FOUR, "store_word(channel, ACKS_READ, taken + 1) => 0"),
    # Direct messages.
    (DIRECT, "if did + moved < nbytes: => if False:"),
    (DIRECT, "store_word(channel, IN_DID, 0) => 0"),
    (("isend 0 4, fail 0 0", "recv 0 4"), "if state in (FAILED, LEFT): => if False:"),
]  # fmt: skip


@pytest.mark.parametrize(("programs", "plant"), PLANTS)
def test_a_planted_fault_is_found(programs: tuple[str, str], plant: str) -> None:
    file, change = ("ring_kernels", plant[9:]) if plant.startswith("kernels: ") else ("rings", plant)
    with pytest.raises(AssertionError, match=FOUND):
        explore(*programs, direct=programs[1].startswith("recv 0 4"), plant=f"shm.{file}: {change}")
