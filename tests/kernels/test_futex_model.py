"""Events: threads that sleep until they are woken, however long it takes, in every schedule, with store buffers."""

from __future__ import annotations

import pytest
from shm.explorer import ALL, FOUND, SHARED, Explorer, load

TABLE = 1 << 20
WORD, EVENT = SHARED, SHARED + 64
WRITER = 0


class World:
    """A thread that writes the numbers up to `last` to a word, and threads that wait for each of them."""

    def __init__(self, last: int, plant: str = "") -> None:
        self.machine, self.made = load(plant)
        self.last = last

    def begin(self, thread: int) -> tuple[int, dict[int, int]]:
        # The clock stands still, so the budget is never used up.
        return 1, {TABLE + 8 * self.made.waiting.BUDGET: 1}

    def go_on(self, thread: int, number: int) -> int | None:
        if thread == WRITER:
            self.machine.store_release(WORD, number)
            self.made.futex.wake(EVENT)
        else:
            assert self.made.waiting.wait_slowly(TABLE, WORD, number, EVENT)
            assert self.machine.load_acquire(WORD) >= number, "the wait has ended with a smaller number"
        return number + 1 if number < self.last else None


@pytest.mark.parametrize(("threads", "last"), [(2, 3), (3, 1)])
def test_every_sleeper_is_woken(threads: int, last: int) -> None:
    assert Explorer(World(last), threads, weak=ALL).explore() > 100


PLANTS = [
    "kernels.futex: full_fence()\n    seen => seen",
    "kernels.futex: wake_all(event) => pass",
    "kernels.waiting: seen = announce(event)\n => seen = load_acquire(event)\n",
    "kernels.waiting: if load_acquire(word) < want:\n => if True:\n",
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_thread_that_sleeps_for_ever_is_found(plant: str) -> None:
    with pytest.raises(AssertionError, match=FOUND):
        Explorer(World(2, plant), 2, weak=ALL).explore()
