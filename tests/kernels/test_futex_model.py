"""Events: threads that sleep until they are woken, however long it takes, in every schedule, with store buffers."""

from __future__ import annotations

import pytest
from shm.explorer import ALL, FOUND, SHARED, Explorer, load

TABLE = 1 << 20
WORD, EVENT = SHARED, SHARED + 64
WRITER, LAST = 0, 2


class World:
    """A thread that writes the numbers up to LAST to a word, and threads that wait for each of them."""

    def __init__(self, plant: str = "") -> None:
        self.machine, self.made = load(plant)

    def begin(self, thread: int) -> tuple[int, dict[int, int]]:
        return 1, {
            TABLE + 8 * self.made.waiting.BUDGET: 1
        }  # the clock stands still, so the budget is never used up

    def go_on(self, thread: int, number: int) -> int | None:
        if thread == WRITER:
            self.machine.store_release(WORD, number)
            self.made.futex.wake(EVENT)
        else:
            assert self.made.waiting.wait_slowly(TABLE, WORD, number, EVENT)
            assert self.machine.load_acquire(WORD) >= number, "the wait has ended with a smaller number"
        return number + 1 if number < LAST else None


@pytest.mark.parametrize(("threads", "weak"), [(2, ALL), (3, 0)])
def test_every_sleeper_is_woken(threads: int, weak: int) -> None:
    assert Explorer(World(), threads, weak=weak).explore() > 100


PLANTS = [
    "kernels.futex: full_fence()\n    seen => seen",
    "kernels.futex: wake_all(event) => pass",
    "kernels.waiting: seen = announce(event)\n => seen = load_acquire(event)\n",
    "kernels.waiting: if load_acquire(word) < want:\n => if True:\n",
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_thread_that_sleeps_for_ever_is_found(plant: str) -> None:
    with pytest.raises(AssertionError, match=FOUND):
        Explorer(World(plant), 2, weak=ALL).explore()
