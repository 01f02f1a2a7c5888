"""When a wait for a word whose writer has an event yields, and when it sleeps at once.

The package's code runs as Python. A clock that the test controls says how long a yield takes.
"""

from __future__ import annotations

import pytest
from shm.explorer import load

TABLE, WORD, EVENT = 1 << 20, 2 << 20, 3 << 20
YIELDS = 50


class Wait:
    """A wait for a word that is there after some yields, or else after the first sleep."""

    def __init__(self, yield_nanoseconds: int) -> None:
        self.machine, made = load()
        self.machine.private, self.machine.pending = {}, {}
        self.waiting = made.waiting
        self.took, self.clock = yield_nanoseconds, 1
        self.machine.store_words(TABLE + 8 * self.waiting.YIELDS, [YIELDS, 0, 50_000_000])
        self.waiting.now, self.waiting.yield_core = lambda table: self.clock, self.yield_core
        self.waiting.announce = lambda event: 1
        self.waiting.sleep_on = lambda *_: self.machine.store(WORD, 1)

    def yield_core(self) -> None:
        self.yields, self.clock = self.yields + 1, self.clock + self.took
        if self.yields == self.comes:
            self.machine.store(WORD, 1)

    def count_yields(self, comes: int = 0, event: int = EVENT) -> int:
        """Return how often a wait yields if the word comes with this yield; 0: with the first sleep."""
        self.machine.store(WORD, 0)
        self.yields, self.comes = 0, comes
        assert self.waiting.wait_slowly(TABLE, WORD, 1, event)
        return self.yields


def test_yields_that_help_go_on() -> None:
    wait = Wait(1000)
    assert [wait.count_yields(3) for _ in range(10)] == [3] * 10


def test_after_a_sleep_some_waits_sleep_at_once() -> None:
    wait = Wait(300)
    assert [wait.count_yields() for _ in range(7)] == [YIELDS, 0, 0, 0, 0, YIELDS, 0]


@pytest.mark.parametrize("comes", [1, 0])
def test_after_a_long_yield_many_waits_sleep_at_once(comes: int) -> None:
    wait = Wait(3_000_000)
    assert wait.count_yields(comes) >= 1
    assert [wait.count_yields() for _ in range(100)] == [0] * 100
    assert wait.count_yields(comes) >= 1


def test_without_an_event_every_wait_yields() -> None:
    wait = Wait(600_000)
    wait.waiting.nap = lambda table: wait.machine.store(WORD, 1)
    assert all(wait.count_yields(event=0) == YIELDS for _ in range(3))
