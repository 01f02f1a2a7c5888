"""A group's private context, the table of words that entries (compiled functions) use, and reports about calls.

Reports read the call lines, which do not change until every rank has compared them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core import signature
from ..core.gate import Gate
from ..core.operands import Array
from ..core.operations import OPERATIONS
from ..errors import AbortedError, MismatchError
from ..kernels import shared_words, waiting
from ..kernels.allocator import TABLE_WORDS
from ..kernels.primitives import address_of
from . import arena, autotune, layout
from . import context_layout as at
from .layout import ALGORITHMS, COMBINED, ONE_SHOT_LIMIT, Layout
from .reach import MAPS, READS
from .segment import Segment
from .validate import BY_CALL, MEMO_PROBES, memo_slot

BUDGET = 50_000_000  # ns that a kernel may wait before Python checks signals, deadlines and peers

_BRIEF_BUDGET = 100_000  # ns that a run of an entry with the tag BRIEF may work


class BackoffCounts(NamedTuple):
    """How often a thread that waits for peers polls and yields before it sleeps.

    Attributes:
        spins: the polls before the first yield.
        yields: the yields of a progress thread.
        caller_yields: the yields of any other thread.
    """

    spins: int
    yields: int
    caller_yields: int


# If every rank has a core of its own, it polls for 20 to 50 us, longer than any peer's lag in a tight loop (Zen 5: 15
# ns a pause). With fewer cores, a polling rank keeps its peer from running: 4 ranks on 2 cores take 3.4 us if they
# yield at once and 25 us if they yield after 1000 polls.
#
# A rank that sleeps returns 0.1 ms after its peer has come. A caller with a core of its own has nothing else to do, so
# it first yields for about 1 ms, which covers the usual lags of ranks that compute. On the progress thread that would
# take the core from its owner's computation.
_DEDICATED = BackoffCounts(2000, 200, 3000)

# A rank without a core of its own yields until its peers have probably had the core, if yields reach them (waiting.py),
# and then sleeps: in a collective until a peer wakes it. An all_reduce of 8 bytes on 8 ranks and 2 cores, beside a busy
# process, takes 690 us if it sleeps after 1000 yields, and 35 us after 50.
_OVERSUBSCRIBED = BackoffCounts(0, 50, 50)


def backoff(share: int) -> BackoffCounts:
    """Return how to wait, in collectives and messages, if there are `share` cores for each rank (0: less than one)."""
    return _DEDICATED if share else _OVERSUBSCRIBED


_NO_ARENA = np.zeros(TABLE_WORDS, np.int64)


class CallSpec:
    """The values of a call that depend only on its operation, dtype and reduce operation.

    Entries read them from `address`, which is valid as long as this object exists.
    """

    def __init__(self, call: int, itemsize: int, reducer: Sequence[int] = (0, 0)) -> None:
        self._words = np.array([call, *reducer, itemsize], np.int64)
        self.address = address_of(self._words)
        self.itemsize = itemsize


def changed(name: str) -> AbortedError:
    """Return the error of a call during which another thread has changed an array."""
    return AbortedError(f"{name}: an array was changed meanwhile")


def pinned(name: str, args: tuple[Any, ...], itemsize: int) -> tuple[Any, ...]:
    """Replace arrays by views, which no other thread can reshape, and check their itemsize."""

    def keep(x: Any) -> Any:
        if type(x) is tuple:
            return tuple(map(keep, x))
        if type(x) is not np.ndarray:
            return x
        view = x.view()
        if view.dtype.itemsize != itemsize:
            raise changed(name)
        return view

    return tuple(map(keep, args))


def words_for(size: int) -> int:
    """Number of words of the context of a group of `size` ranks."""
    return at.TABLES + at.TABLES_A_RANK * size


class ShmContext:
    """The context of one rank, with access to the words that Python needs.

    Args:
        share: number of cores for each rank (meeting.py).
        words: memory for the context, all zeros.
    """

    def __init__(self, base: int, layout: Layout, rank: int, share: int, words: Array | None = None) -> None:
        words = self.words = np.zeros(words_for(layout.size), np.int64) if words is None else words
        self.address, self._base = address_of(words), base
        words[at.RANK], words[at.SIZE] = rank, layout.size
        words[at.SECTIONS], words[at.STRIDE] = base + layout.section(0), layout.stride
        words[at.SLOT], words[at.LATE] = layout.slot, -1
        words[at.COMBINED] = base + COMBINED if layout.groups else 0
        words[at.ONE_SHOT] = ctypes.c_int64.from_address(base + 8 * ONE_SHOT_LIMIT).value
        algorithms = ctypes.c_int64.from_address(base + 8 * ALGORITHMS).value
        words[at.ALGORITHMS], words[at.DIRECT_FROM] = algorithms & ~(1 << autotune.DIRECT), autotune.NEVER
        words[at.NDARRAY], words[at.TUPLE], words[at.NONE] = id(np.ndarray), id(tuple), id(None)
        spins, yields, caller_yields = counts = backoff(share)
        words[at.BACKOFF + waiting.SPINS], words[at.BACKOFF + waiting.YIELDS] = spins, yields
        words[at.BACKOFF + waiting.BUDGET] = BUDGET
        words[at.CROWDED] = counts is _OVERSUBSCRIBED
        words[at.PENDING_WAIT : at.PENDING_WAIT + at.WAIT_WORDS] = spins, yields, BUDGET
        words[at.FULL_WAIT : at.FULL_WAIT + at.WAIT_WORDS] = spins, caller_yields, BUDGET
        self.wait_briefly(spins, waiting.NEVER)
        words[at.ARENA] = address_of(_NO_ARENA)
        self._alive: list[Any] = []
        self._memo_lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def table(self, which: int) -> list[int]:
        """Return a table with one word for each rank."""
        start = at.TABLES + which * self[at.SIZE]
        return [int(word) for word in self.words[start : start + self[at.SIZE]]]

    def go_one_shot(self, limit: int) -> None:
        """Set the one-shot limit in bytes (tuning_cache.py); collective: between the same two calls on all ranks."""
        self.words[at.ONE_SHOT] = limit

    def go_direct(self, pids: Sequence[int], reach: int) -> int:
        """Allow direct calls between the ranks, whose processes are `pids`; return all allowed algorithms as bits.

        Args:
            reach: how every rank can access every other's memory (reach.py).
        """
        algorithms = ctypes.c_int64.from_address(self._base + 8 * ALGORITHMS).value
        # A direct call publishes up to one address for each rank, and one more; a slot must have room for them.
        if reach & (READS | MAPS) and len(pids) > 1 and 8 * (len(pids) + 1) <= self[at.SLOT]:
            self.words[at.DIRECT_FROM] = autotune.direct_from(algorithms)
        self.words[at.ONLY_SHARED] = 0 if reach & READS else 1
        if reach & MAPS:
            self.words[at.ARENA] = arena.STATE_ADDRESS
        start = at.TABLES + at.PIDS * len(pids)
        self.words[start : start + len(pids)] = pids
        return algorithms

    def note_arena(self, peer: int, base: int, nbytes: int, here: int) -> None:
        """Record that a peer's arena, of nbytes at `base` in the peer, is mapped at `here`."""
        for which, word in ((at.ARENA_BYTES, nbytes), (at.ARENA_SHIFTS, here - base), (at.ARENA_BASES, base)):
            self.words[at.TABLES + which * self[at.SIZE] + peer] = word

    def wait_briefly(self, spins: int, yields: int, budget: int = _BRIEF_BUDGET) -> None:
        """Set how often a run of an entry with the tag BRIEF may poll and yield, and how many ns it may sleep or work.

        By default such a run does not yield or sleep.
        """
        self.words[at.BRIEF_WAIT : at.BRIEF_WAIT + at.WAIT_WORDS] = spins, yields, budget

    def is_mine(self) -> bool:
        """Whether a call of this thread owns the context."""
        return self[at.BUSY] == threading.get_ident()

    def let_go(self) -> None:
        """Release the context, if a call of this thread owns it."""
        if self.is_mine():
            shared_words.publish.call(self.address + 8 * at.BUSY, 0)

    def remember(self, operation: int, dtype: np.dtype[Any], op: Any, spec: CallSpec) -> None:
        """Add a spec to the memo, where entries find it, unless the memo is full; `op` None: the call moves data.

        The memo compares addresses of objects, so it keeps the objects alive.
        """
        self._alive.append((dtype, op))
        self._remember((id(dtype), 0 if op is None else id(op), operation), spec)

    def remember_call(self, operation: int, call: int, spec: CallSpec) -> None:
        """Add a spec to the memo by a call word, for compiled callers."""
        self._remember((call, BY_CALL, operation), spec)

    def _remember(self, key: tuple[int, int, int], spec: CallSpec) -> None:
        with self._memo_lock:
            self._alive.append(spec)
            for probe in range(MEMO_PROBES):
                start = at.MEMO + at.MEMO_WORDS * memo_slot.py_func(*key, probe)
                entry = self.words[start : start + at.MEMO_WORDS]
                if entry[3] == 0:
                    entry[1], entry[2], entry[3] = key[1], key[2], spec.address
                    shared_words.publish.call(self.address + 8 * start, key[0])
                    return


class CallReport:
    """Reports of one rank about its group's current call. Only `mismatch` blocks."""

    def __init__(self, segment: Segment, context: ShmContext, gate: Gate) -> None:
        self._segment, self._context, self._gate = segment, context, gate

    def doing(self, entry: str) -> str:
        """Describe the current call, for messages; `entry`: its name, used until the call is published."""
        number = self._context[at.CALLS]
        line = self._line(self._gate.rank)
        published = line[layout.SEQUENCE] == number
        head = int(line[layout.CALL]), int(line[layout.SHAPE])
        return self._gate.name_of(signature.describe(*head, self._gate.ranks) if published else entry, number)

    def late(self) -> list[int]:
        """Return the group ranks that have not begun the call; if all have, the rank for which the kernel waits."""
        number = self._context[at.CALLS]
        late = [rank for rank in range(self._gate.size) if self._line(rank)[layout.SEQUENCE] < number]
        waits_for = late or [self._context[at.LATE]]
        return [rank for rank in waits_for if rank != self._gate.rank]

    def mismatch(self, gather: Callable[[Array, Array], None]) -> MismatchError:
        """Make the error that lists each rank's call. All ranks find a mismatch, so they can `gather` more values."""
        number = self._context[at.CALLS]
        sizes = self._context.table(at.GIVES + 1), self._context.table(at.TAKES + 1)
        lines = map(self._line, range(self._gate.size))
        heads = [(int(line[layout.CALL]), int(line[layout.SHAPE])) for line in lines]
        in_symmetric = OPERATIONS[heads[0][0] & 0xFF].startswith("symmetric:")
        describe = describe_symmetric if in_symmetric else signature.describe_sizes
        return signature.difference(heads, self._gate, number, gather, sizes, describe)

    def _line(self, rank: int) -> Array:
        """Words of a rank's line of the current call."""
        start = self._segment.word(rank, layout.LINE * (self._context[at.CALLS] % 2))
        return self._segment.words[start : start + layout.PAYLOAD]


def describe_symmetric(tables: Sequence[signature.Sizes], ranks: Sequence[int]) -> str:
    """Describe each rank's position in symmetric memory, which its tables have instead of sizes (symmetric.py)."""
    positions = [(gives[0], gives[1]) for gives, _ in tables]
    arrays = dict.fromkeys(memory for memory, _ in positions)
    names = {memory: f"array {number}" for number, memory in enumerate(arrays)}
    lines = [
        f"rank {rank} passed the slice at byte {offset} of symmetric {names[memory]}"
        for rank, (memory, offset) in zip(ranks, positions, strict=True)
    ]
    return "; ".join([*lines[:8], "pass the same slice of the same symmetric array on all ranks"])
