"""A group's private context: the table of words that its entries read and keep their state in; and what it tells.

Everything that is said of the call under way is read from the call lines, which stay as they are until every rank has
compared them.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core import signature
from ..core.gate import Gate
from ..core.operands import Array
from ..core.operations import OPERATIONS
from ..errors import AbortedError, MismatchError
from ..kernels import waiting
from ..kernels.allocator import TABLE_WORDS
from ..kernels.primitives import address_of
from . import arena, autotune, layout
from . import context_layout as at
from .layout import ALGORITHMS, COMBINED, ONE_SHOT_LIMIT, Layout
from .reach import MAPS, READS
from .segment import Segment
from .validate import BY_CALL, MEMO_PROBES, memo_slot

BUDGET = 50_000_000  # ns that a kernel may wait before Python looks at signals, deadlines and peers

# Polls before yielding when every rank has a core of its own: 20 to 50 us, longer than any peer's lag
# in a tight loop (Zen 5: 15 ns a pause). Oversubscribed, a spinning rank steals the very core that its
# peer needs: 4 ranks on 2 cores take 3.4 us yielding at once and 25 us after 1000 spins.
_DEDICATED = (2000, 200)
_OVERSUBSCRIBED = (0, 1000)

HANDED_OVER = -1  # in BUSY, no thread's number: the progress thread will go on with the call


def backoff(ranks: int, cores: int) -> tuple[int, int]:
    """Spins and yields before sleeping, for so many ranks on so many cores."""
    return _DEDICATED if ranks <= cores else _OVERSUBSCRIBED


_NO_ARENA = np.zeros(TABLE_WORDS, np.int64)


class CallSpec:
    """The description of a call that depends on its operation, dtype and reduce operation only.

    Its `address` is of the words that entries read, and valid while this object lives.
    """

    def __init__(self, call: int, itemsize: int, reducer: Sequence[int] = (0, 0)) -> None:
        self._words = np.array([call, *reducer, itemsize], np.int64)
        self.address = address_of(self._words)
        self.itemsize = itemsize


def changed(name: str) -> AbortedError:
    """The error of a call whose array another thread has changed in the middle of it."""
    return AbortedError(f"{name}: an array was changed meanwhile")


def pinned(name: str, args: tuple[Any, ...], itemsize: int) -> tuple[Any, ...]:
    """Arguments that no other thread can change: the arrays' bytes are as many as the call's description says."""

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
    """How many words the context has in a group of so many ranks."""
    return at.TABLES + at.TABLES_A_RANK * size


class ShmContext:
    """The context of one rank, and typed access to the words that Python needs; zeros in `words`, if it is given."""

    def __init__(self, base: int, layout: Layout, rank: int, cores: int, words: Array | None = None) -> None:
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
        words[at.BACKOFF + waiting.SPINS], words[at.BACKOFF + waiting.YIELDS] = backoff(layout.size, cores)
        words[at.BACKOFF + waiting.BUDGET] = BUDGET
        words[at.ARENA] = address_of(_NO_ARENA)
        self._alive: list[Any] = []
        self._memo_lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def table(self, which: int) -> list[int]:
        """A table of a word a rank."""
        start = at.TABLES + which * self[at.SIZE]
        return [int(word) for word in self.words[start : start + self[at.SIZE]]]

    def go_one_shot(self, limit: int) -> None:
        """Let reductions of up to `limit` bytes go one-shot from now on; on all ranks between the same two calls."""
        self.words[at.ONE_SHOT] = limit

    def go_direct(self, pids: Sequence[int], reach: int) -> int:
        """Let calls go direct from now on: all ranks, which are these processes, reach one another so (reach.py).

        Returns the ways of autotune.py that calls may go, as bits.
        """
        algorithms = ctypes.c_int64.from_address(self._base + 8 * ALGORITHMS).value
        # A call tells an address a rank and one more, in a slot at most.
        if reach & (READS | MAPS) and len(pids) > 1 and 8 * (len(pids) + 1) <= self[at.SLOT]:
            self.words[at.DIRECT_FROM] = autotune.direct_from(algorithms)
        self.words[at.ONLY_SHARED] = 0 if reach & READS else 1
        if reach & MAPS:
            self.words[at.ARENA] = arena.STATE_ADDRESS
        start = at.TABLES + at.PIDS * len(pids)
        self.words[start : start + len(pids)] = pids
        return algorithms

    def note_arena(self, peer: int, base: int, nbytes: int, here: int) -> None:
        """A peer's arena, of nbytes from `base` on there, is mapped `here`."""
        for which, word in ((at.ARENA_BYTES, nbytes), (at.ARENA_SHIFTS, here - base), (at.ARENA_BASES, base)):
            self.words[at.TABLES + which * self[at.SIZE] + peer] = word

    def wait_no_longer_than(self, nanoseconds: int = BUDGET) -> None:
        """Have entries come back after so long a wait; another thread's call then does too, without harm."""
        self.words[at.BACKOFF + waiting.BUDGET] = nanoseconds

    def is_mine(self) -> bool:
        """Whether a call of this very thread is under way."""
        return self[at.BUSY] == threading.get_ident()

    def let_go(self, whose: int | None = None) -> None:
        """End the call of this thread, or that which is HANDED_OVER and nobody will go on with, if there is one."""
        if self[at.BUSY] == (threading.get_ident() if whose is None else whose):
            self.words[at.BUSY] = 0

    def remember(self, operation: int, dtype: np.dtype[Any], op: Any, spec: CallSpec) -> None:
        """Let entries find a description by themselves, unless the memo is full; None for `op`: a moving operation.

        The memo goes by identity, so it keeps the objects alive.
        """
        self._alive.append((dtype, op))
        self._remember((id(dtype), 0 if op is None else id(op), operation), spec)

    def remember_call(self, operation: int, call: int, spec: CallSpec) -> None:
        """The same by a word that doors are given, for ever."""
        self._remember((call, BY_CALL, operation), spec)

    def _remember(self, key: tuple[int, int, int], spec: CallSpec) -> None:
        with self._memo_lock:
            self._alive.append(spec)
            for probe in range(MEMO_PROBES):
                start = at.MEMO + at.MEMO_WORDS * memo_slot.py_func(*key, probe)
                entry = self.words[start : start + at.MEMO_WORDS]
                if entry[3] == 0:
                    entry[3] = spec.address
                    entry[1], entry[2], entry[0] = key[1], key[2], key[0]
                    return


class CallReport:
    """What one rank can say about its group's current call. Nothing here blocks but `mismatch`."""

    def __init__(self, segment: Segment, context: ShmContext, gate: Gate) -> None:
        self._segment, self._context, self._gate = segment, context, gate

    def doing(self, entry: str) -> str:
        """The call under way, for messages; `entry` is its name while it has not been published."""
        number = self._context[at.CALLS]
        line = self._line(self._gate.rank)
        published = line[layout.SEQUENCE] == number
        call = signature.describe(int(line[layout.CALL]), int(line[layout.SHAPE])) if published else entry
        return self._gate.name_of(call, number)

    def late(self) -> list[int]:
        """The group ranks that have not arrived at the call under way, or else whom the kernel waits for."""
        number = self._context[at.CALLS]
        late = [rank for rank in range(self._gate.size) if self._line(rank)[layout.SEQUENCE] < number]
        waits_for = late or [self._context[at.LATE]]
        return [rank for rank in waits_for if rank != self._gate.rank]

    def mismatch(self, gather: Callable[[Array, Array], None]) -> MismatchError:
        """What each rank called. Every rank of a mismatch is here, so they can `gather` more from one another."""
        number = self._context[at.CALLS]
        sizes = self._context.table(at.GIVES + 1), self._context.table(at.TAKES + 1)
        lines = map(self._line, range(self._gate.size))
        heads = [(int(line[layout.CALL]), int(line[layout.SHAPE])) for line in lines]
        in_symmetric = OPERATIONS[heads[0][0] & 0xFF].startswith("symmetric:")
        describe = describe_symmetric if in_symmetric else signature.describe_sizes
        return signature.difference(heads, self._gate, number, gather, sizes, describe)

    def _line(self, rank: int) -> Array:
        """The words of a rank's line of the current call."""
        start = self._segment.word(rank, layout.LINE * (self._context[at.CALLS] % 2))
        return self._segment.words[start : start + layout.PAYLOAD]


def describe_symmetric(tables: Sequence[signature.Sizes], ranks: Sequence[int]) -> str:
    """Where in symmetric memory each rank's array lies, which it says instead of sizes (symmetric.py)."""
    places = [(gives[0], gives[1]) for gives, _ in tables]
    names = {memory: f"array {number}" for number, memory in enumerate(dict.fromkeys(m for m, _ in places))}
    said = [
        f"rank {rank} gave what begins {offset} bytes into symmetric {names[memory]}"
        for rank, (memory, offset) in zip(ranks, places, strict=True)
    ]
    return "; ".join([*said[:8], "give the same slice of the same symmetric array on all ranks"])
