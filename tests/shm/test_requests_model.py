"""Explore the protocol of fastcoll/shm/requests.py: its own code, under every schedule of small programs.

The threads of a rank share its mailbox. Each runs a program of the calls that compiled callers and Python make. "send"
and "recv" post a request with a label, a tag and a number of words, to rank 0 or 1 unless a rank is given. "wait",
"test" and "any" complete requests by their labels; "join" is Python's wait. Several threads may complete one request.
"again" waits for a request that was waited for. "attend" progresses requests as the engine's thread does, until the one
with this label has ended. "claim" takes over requests that have ended, as the engine does. AWAKE is set, so no post
needs the engine. A call that the protocol leaves to Python is repeated.
"""

from __future__ import annotations

from typing import Any

import pytest
from shm.explorer import FOUND, SHARED, Explorer, load

from fastcoll.core.status import DONE, LATER
from fastcoll.p2p.transfers import DTYPE_BITS
from fastcoll.shm.layout import LINE

MAILBOXES, RINGS, ARRAYS, LABELS, OWNERS = (SHARED + (k << 20) for k in range(1, 6))
CONTEXT, GIVEN = 1 << 20, 2 << 20
PER_RANK, PER_PEER, ROOM, CHANNELS, HEADER = 1 << 16, 1 << 12, 1 << 8, 1 << 14, 1 << 10
RANKS = 3


class World:
    """Some threads that post requests and wait for them.

    Args:
        threads: the rank of each, ": ", and its program.
        plant: see `load`.
    """

    def __init__(self, *threads: str, plant: str = "") -> None:
        sizes = {"FRAME_UNIT": 16, "ACK_SLOTS": 2, "ACK_BATCH": 1, "RECORDS_AT_MOST": 2}
        steps = {
            "_TRIES": 0,
            "_CLOSELY": 2,
            "_LOOKS": 1,
            "_GAP": 0,
            "_LONG_NAPS": 1,
            "nap": lambda table: None,
        }
        self.machine, self.made = load(plant, rings=sizes, requests=steps)
        self.made.requests._release = self.release
        pairs = [thread.split(": ") for thread in threads]
        self.threads = [(int(rank), program.split(", ")) for rank, program in pairs]
        r = self.made.rings
        words = {
            r.SIZE: RANKS,
            r.RING: 128,
            r.CONTEXT: CONTEXT,
            r.DIRECT_FROM: 1 << 60,
            r.REQUESTS + r.AWAKE: 1,
        }
        self.shared: dict[int, int] = {}
        for rank in range(RANKS):
            m, channels = self.mailbox(rank), self.mailbox(rank) + CHANNELS
            mine = words | {r.RANK: rank, r.CHANNELS: channels}
            self.shared |= {m + 8 * word: value for word, value in mine.items()}
            for peer in set(range(RANKS)) - {rank}:
                out, arriving = self.ring(rank, peer), self.ring(peer, rank)
                channel = {
                    r.OUT_HEAD_AT: out, r.OUT: out + LINE, r.OUT_DATA: out + HEADER, r.OUT_READY: 1,
                    r.IN_HEAD_AT: arriving, r.IN: arriving + LINE, r.IN_DATA: arriving + HEADER,
                }  # fmt: skip
                at = channels + 8 * peer * r.CHANNEL_WORDS
                self.shared |= {at + 8 * word: value for word, value in channel.items()}

    def mailbox(self, rank: int) -> int:
        return MAILBOXES + rank * PER_RANK

    def ring(self, sender: int, receiver: int) -> int:
        return RINGS + sender * PER_RANK + receiver * PER_PEER

    def begin(self, thread: int) -> tuple[int, dict[int, Any]]:
        return 0, {}

    def go_on(self, thread: int, pc: int) -> int | None:
        """Make the call at `pc` and return the next value of pc: the same one if the call was left to Python."""
        self.rank, program = self.threads[thread]
        if pc == len(program):
            return None
        op, *words = program[pc].split()
        self.m, m = self.mailbox(self.rank), self.machine
        if op in ("send", "recv"):
            found = self.post(op, *words)
        elif op == "claim":
            found = self.claim()
        elif op == "attend":
            found = self.attend(words[0])
        else:
            if op == "again":
                m.wait_for(0, self.label(words[0]) + 8, 1)
            numbers = [self.number(label) for label in words]
            found = getattr(self, "wait" if op == "again" else op)(numbers, words)
        if found:
            return pc + 1
        busy = self.m + 8 * self.made.rings.BUSY
        if m.load_acquire(busy) != 0:
            m.rest(0, 0)
        return pc

    def label(self, label: str) -> int:
        """Return the address of a request's words: its number, whether it was waited for, whether it was claimed."""
        return LABELS + self.rank * PER_RANK + ROOM * (ord(label) - ord("a"))

    def array(self, label: str) -> int:
        return ARRAYS + self.rank * PER_RANK + ROOM * (ord(label) - ord("a"))

    def number(self, label: str) -> int:
        self.machine.wait_for(0, self.label(label), 1)
        return int(self.machine.load_acquire(self.label(label)))

    def release(self, function: int, owner: int) -> None:
        assert self.machine.load_acquire(owner) == 0, f"a wait gave owner {owner - OWNERS:#x} back twice"
        self.machine.store_release(owner, 1)

    def request(self, label: str) -> list[str]:
        """Return the words of the call that posts a request."""
        (words,) = [
            op.split() for rank, program in self.threads for op in program
            if rank == self.rank and op.split()[0] in ("send", "recv") and op.split()[1] == label
        ]  # fmt: skip
        return words

    def peer(self, label: str) -> int:
        """Return the other rank of a request."""
        return int((*self.request(label), 1 - self.rank)[4])

    def post(self, op: str, label: str, tag: str, count: str, *_: str) -> bool:
        m, made, kind, nbytes = self.machine, self.made.requests, int(tag) << DTYPE_BITS | 1, 8 * int(count)
        if op == "send":
            for k in range(int(count)):
                m.store_release(self.array(label) + 8 * k, self.content(label, k))
        owner = OWNERS + self.rank * PER_RANK + ROOM * (ord(label) - ord("a"))
        call = made.post_send_call if op == "send" else made.post_receive_call
        code = call(self.m, self.array(label), owner, nbytes, kind, self.peer(label))
        if code == LATER:
            return False
        m.store_release(self.label(label), -1 - code)
        return True

    def content(self, label: str, k: int) -> int:
        return 100 * ord(label) + k + 1

    def check(self, label: str) -> None:
        """Check the message of a receive that has ended."""
        op, _, _, words, *_ = self.request(label)
        count = int(words) if op == "recv" else 0
        found = self.machine.load_words(self.array(label), count)
        expected = [self.content(label, k) for k in range(count)]
        assert found == expected, f"a message gave {found} and not {expected}"
        self.machine.store_release(self.label(label) + 8, 1)

    def wait(self, numbers: list[int], labels: list[str]) -> bool:
        code = self.made.requests.wait_call(self.m, numbers[0], 0, 0, 0, 0)
        return self.ended(code, labels[0])

    def ended(self, code: int, label: str) -> bool:
        if code == LATER:
            return self.was_claimed(label)
        assert code == -1 - self.peer(label), f"the wait gave {code} for {label}"
        self.check(label)
        return True

    def test(self, numbers: list[int], labels: list[str]) -> bool:
        code = self.made.requests.test_call(self.m, numbers[0], 0, 0, 0, 0)
        if code == -1:
            self.machine.rest(0, 0)
            return False
        return self.ended(code if code == LATER else -1 - self.peer(labels[0]), labels[0])

    def any(self, numbers: list[int], labels: list[str]) -> bool:
        self.machine.store_words(GIVEN, numbers)
        code = self.made.requests.wait_any_call(self.m, GIVEN, 0, len(numbers), 0, 0)
        if code != LATER:
            self.check(labels[-1 - code])
        return code != LATER

    def join(self, numbers: list[int], labels: list[str]) -> bool:
        return self.ended(self.made.requests.wait(self.m, numbers[0]), labels[0])

    def attend(self, label: str) -> bool:
        r, m = self.made.rings, self.machine
        number = self.number(label)
        self.made.requests.attend(self.m)
        record = self.m + 8 * (r.REQUESTS + r.RECORDS + number % 32 * r.RECORD_WORDS)
        is_pending = m.load_acquire(record + 8 * r.NUMBER) == number
        return not is_pending or m.load_acquire(record + 8 * r.STATE) == r.ENDED

    def was_claimed(self, label: str) -> bool:
        return bool(self.machine.load_acquire(self.label(label) + 16) != 0)

    def claim(self) -> bool:
        """Check what holds while BUSY is held, and claim requests as `take_posted` of shm/pipe.py does."""
        r, m = self.made.rings, self.machine
        if not m.swap_if_equal(self.m + 8 * r.BUSY, 0, 1):
            return False
        pending = m.load_acquire(self.m + 8 * (r.REQUESTS + r.PENDING))
        m.store_release(self.m + 8 * r.BEHIND, 1)
        records = [self.m + 8 * (r.REQUESTS + r.RECORDS + index * r.RECORD_WORDS) for index in range(2)]
        numbers = [m.load_acquire(record + 8 * r.NUMBER) for record in records]
        states = [m.load_acquire(record + 8 * r.STATE) for record in records]
        posted = [n > 0 and state != r.ENDED for n, state in zip(numbers, states, strict=True)]
        assert pending == sum(posted), f"{sum(posted)} posted requests gave PENDING {pending}"
        for index, record in enumerate(records):
            if numbers[index] > 0 and states[index] == r.ENDED:
                owner = m.load_acquire(record + 8 * r.OWNER)
                if self.made.ring_kernels.claim(self.m, index, numbers[index]) == DONE:
                    self.release(0, owner)
                    label = chr((owner - OWNERS) % PER_RANK // ROOM + ord("a"))
                    m.store_release(self.label(label) + 16, 1)
        m.store_release(self.m + 8 * r.BEHIND, 0)
        m.store_release(self.m + 8 * r.BUSY, 0)
        return True


def explore(*threads: str, plant: str = "", weak: int = 0) -> int:
    return Explorer(World(*threads, plant=plant), len(threads), weak=weak).explore()


PROGRAMS = {
    "one after the other": ("0: send a 0 1, wait a, send b 0 1, wait b", "1: recv a 0 1, wait a, recv b 0 1, wait b"),
    "longer than the ring": ("0: send a 0 17, wait a", "1: recv a 0 17, wait a"),
    "one tag": (
        "0: send a 0 1, wait a, send b 0 1, wait b", "1: recv a 0 1, recv b 0 1, wait b, wait a"
    ),
    "reversed tags": (
        "0: send a 0 1, wait a, send b 1 1, wait b", "1: recv b 1 1, recv a 0 1, wait b, wait a"
    ),
    "tested": ("0: send a 0 1, test a", "1: recv a 0 1, test a"),
    "any": ("0: recv a 0 1, recv b 1 1, any a b", "1: send b 1 1, wait b, send a 0 1"),
    "two wait for one": ("0: send a 0 1, wait a", "0: wait a", "1: recv a 0 1, wait a"),
    "waited for again, in the record of another peer": (
        "0: send a 0 1, wait a, send b 0 1 2", "0: again a", "1: recv a 0 1, wait a"
    ),
    "attended": ("0: send a 0 1, join a", "1: recv a 0 1", "1: attend a"),
    "attended and waited for": ("0: send a 0 1", "1: recv a 0 1, join a", "1: attend a"),
    "taken over": ("0: send a 0 1, wait a", "0: claim", "1: recv a 0 1, wait a"),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_schedule(name: str) -> None:
    assert explore(*PROGRAMS[name]) > 20


ONE, TAG, LONG = PROGRAMS["one after the other"], PROGRAMS["one tag"], PROGRAMS["longer than the ring"]
TWO, TAKEN_OVER = PROGRAMS["two wait for one"], PROGRAMS["taken over"]
ATTENDED = PROGRAMS["attended and waited for"]
AGAIN = PROGRAMS["waited for again, in the record of another peer"]

PLANTS = [
    # Two threads hold a record, or the rings.
    (TWO, "if swap_if_equal(record + 8 * r.NUMBER, number, -number): => if True:"),
    (TAKEN_OVER, "if swap_if_equal(record + 8 * r.NUMBER, number, -number): => if True:"),
    (TWO, "while not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()): => while False:"),
    (TAKEN_OVER, "while not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()): => while False:"),
    # The words of another request.
    (AGAIN, "store_release(record + 8 * r.NUMBER, 0) => 0"),
    (AGAIN, "if _is_over(m, number):\n        return -1 - peer => if _is_over(m, number):\n"
            "        return -1 - load_acquire(_record(m, number & (_FIRST - 1)) + 8 * r.PEER)"),
    (TAG, "number < load_word(found, r.NUMBER) => number > load_word(found, r.NUMBER)"),
    (PROGRAMS["reversed tags"], "wanted >> DTYPE_BITS == kind >> DTYPE_BITS or => True or"),
    (ONE, "fits = load_word(record, r.MESSAGE) == message => fits = False"),
    # A request ends too early, or never.
    (LONG, "if load_word(channel, r.IN_TAIL) == load_word(channel, r.IN_END):\n        nbytes => "
           "if True:\n        nbytes"),
    (LONG, "if load_word(channel, r.OUT_HEAD) < load_word(channel, r.OUT_END) and r.push(m, channel): => if False:"),
    (ONE, "r.write_ack(channel, load_word(channel, r.RECEIVED), TAKEN, nbytes, load_word(channel, r.IN_KIND)) => 0"),
    # Blocking calls overtake requests, or no thread ever takes the rings.
    (TAKEN_OVER, "store_word(t, r.PENDING, load_word(t, r.PENDING) + 1) => 0"),
    (TAKEN_OVER, "store_word(_table(m), r.PENDING, load_word(_table(m), r.PENDING) - 1) => 0"),
    # The engine's thread drives the rings beside another thread, or keeps them.
    (ATTENDED, "if not swap_if_equal(m + 8 * r.BUSY, 0, this_thread()):\n        return QUIET => "
               "if False:\n        return QUIET"),
    (ATTENDED, "return let_go(m, found) => return found"),
]  # fmt: skip


@pytest.mark.parametrize(("programs", "plant"), PLANTS)
def test_a_planted_fault_is_found(programs: tuple[str, ...], plant: str) -> None:
    with pytest.raises(AssertionError, match=FOUND):
        explore(*programs, plant=f"shm.requests: {plant}")
