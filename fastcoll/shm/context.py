"""A group's private context: the table of words that its entries read and keep their state in."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import AbortedError
from ..kernels import waiting
from ..kernels.primitives import address_of
from . import words
from .border import MEMO_PROBES, WHAT_WORDS, memo_place
from .layout import ONE_SHOT_LIMIT, Layout

BUDGET = 50_000_000  # ns that a kernel may wait before Python looks at signals, deadlines and peers

# Polls before yielding when every rank has a core of its own: 20 to 50 us, longer than any peer's lag
# in a tight loop (Zen 5: 15 ns a pause). Oversubscribed, a spinning rank steals the very core that its
# peer needs: 4 ranks on 2 cores take 3.4 us yielding at once and 25 us after 1000 spins.
_DEDICATED = (2000, 200)
_OVERSUBSCRIBED = (0, 1000)

_BUDGET = words.PATIENCE + waiting.BUDGET
_HANDED_OVER = -1  # in BUSY, no thread's number: the progress thread will go on with the call


def patience(ranks: int, cores: int) -> tuple[int, int]:
    """Spins and yields before sleeping, for so many ranks on so many cores."""
    return _DEDICATED if ranks <= cores else _OVERSUBSCRIBED


class What:
    """The description of a call that depends on its operation, dtype and reduce operation only.

    Attributes:
        address: of the words that entries read; valid while this object lives.
    """

    def __init__(self, call: int, itemsize: int, reducer: Sequence[int] = (0, 0)) -> None:
        values = np.array([call, *reducer, itemsize], np.int64)
        assert values.size == WHAT_WORDS
        self.address = address_of(values)
        self.itemsize = itemsize
        self._values = values


def kept(name: str, args: tuple[Any, ...], itemsize: int) -> tuple[Any, ...]:
    """Arguments that no other thread can change: the arrays' bytes are as many as the call's description says."""

    def keep(x: Any) -> Any:
        if type(x) is tuple:
            return tuple(map(keep, x))
        if type(x) is not np.ndarray:
            return x
        view = x.view()
        if view.dtype.itemsize != itemsize:
            raise AbortedError(f"{name}: an array was changed meanwhile")
        return view

    return tuple(map(keep, args))


class Context:
    """The context of one rank, and typed access to the words that Python needs."""

    def __init__(self, base: int, layout: Layout, rank: int, cores: int) -> None:
        values = np.zeros(words.TABLES + words.TABLES_A_RANK * layout.size, np.int64)
        values[words.RANK] = rank
        values[words.SIZE] = layout.size
        values[words.SECTIONS] = base + layout.section(0)
        values[words.STRIDE] = layout.stride
        values[words.SLOTS_AT] = layout.slots_at
        values[words.SLOT] = layout.slot
        values[words.LATE] = -1
        values[words.LANES] = 1
        values[words.ONE_SHOT] = ctypes.c_int64.from_address(base + 8 * ONE_SHOT_LIMIT).value
        values[words.NDARRAY], values[words.TUPLE], values[words.NONE] = id(np.ndarray), id(tuple), id(None)
        spins, yields = patience(layout.size, cores)
        values[words.PATIENCE + waiting.SPINS] = spins
        values[words.PATIENCE + waiting.YIELDS] = yields
        values[_BUDGET] = BUDGET
        self.words = values
        self.address = address_of(values)
        self._kept: list[Any] = []
        self._memo_lock = threading.Lock()

    def __getitem__(self, index: int) -> int:
        return int(self.words[index])

    def table(self, which: int) -> list[int]:
        """A table of a word a rank."""
        size = self[words.SIZE]
        start = words.TABLES + which * size
        found: list[int] = self.words[start : start + size].tolist()
        return found

    def go_one_shot(self, limit: int) -> None:
        """Let reductions of up to `limit` bytes go one-shot from now on; on all ranks between the same two calls."""
        self.words[words.ONE_SHOT] = limit

    def wait_no_longer_than(self, nanoseconds: int) -> None:
        """Have entries come back after so long a wait; another thread's call then does too, without harm."""
        self.words[_BUDGET] = nanoseconds

    def wait_as_usual(self) -> None:
        """Undo `wait_no_longer_than`."""
        self.words[_BUDGET] = BUDGET

    def hand_over(self) -> None:
        """This thread's call goes on on another one."""
        self.words[words.BUSY] = _HANDED_OVER

    def take_over(self) -> None:
        """Go on with a call that was handed over."""
        self.words[words.BUSY] = threading.get_ident()

    def take_back(self) -> None:
        """End a call that was handed over and that nobody will go on with, if there is one."""
        if self[words.BUSY] == _HANDED_OVER:
            self.words[words.BUSY] = 0

    def let_go(self) -> None:
        """End the call of this thread, if there is one."""
        if self.is_mine():
            self.words[words.BUSY] = 0

    def is_mine(self) -> bool:
        """Whether a call of this very thread is under way."""
        return self[words.BUSY] == threading.get_ident()

    def remember(self, operation: int, dtype: np.dtype[Any], op: Any, what: What) -> None:
        """Let entries find a description by themselves, unless the memo is full; None for `op`: a moving operation.

        The memo goes by identity, so it keeps the objects alive.
        """
        with self._memo_lock:
            self._kept.append((dtype, op, what))
            key = (id(dtype), 0 if op is None else id(op), operation)
            for probe in range(MEMO_PROBES):
                start = words.MEMO + words.MEMO_WORDS * memo_place.py_func(*key, probe)
                entry = self.words[start : start + words.MEMO_WORDS]
                if entry[3] == 0:
                    entry[3] = what.address
                    entry[1], entry[2], entry[0] = key[1], key[2], key[0]
                    return
