"""autotune.py: the choice of algorithms from made-up times, and that all ranks of a real group make the same."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from shm.groups import assert_same_everywhere, rows_of

import fastcoll as dist
from fastcoll.compiler.jit import entry
from fastcoll.core import signature
from fastcoll.kernels.primitives import address_of, load_word
from fastcoll.kernels.pyobjects import Index, integer
from fastcoll.shm import autotune, tuning_table
from fastcoll.shm import context_layout as at

LARGE = 1 << 20  # bytes, several rounds
ALL_REDUCE = signature.code_of("all_reduce")


@entry
def choose(t: Index, operation: Index, nbytes: Index, algorithms: Index) -> int:
    first = autotune.AHEAD
    autotune.choose(integer(t), integer(operation), integer(nbytes), integer(algorithms), first, 3)
    return 0


@entry
def choose_first(t: Index, first: Index) -> int:
    """Choose the algorithm of the first call of a row, of which CLOSE, AHEAD and DIRECT are allowed."""
    allowed = 1 << autotune.CLOSE | 1 << autotune.AHEAD | 1 << autotune.DIRECT
    autotune.choose(integer(t), ALL_REDUCE, LARGE, allowed, integer(first), 3)
    return int(load_word(integer(t), autotune.ALGORITHM))


@entry
def give_up(t: Index) -> int:
    autotune.give_up(integer(t))
    return 0


@entry
def learn(t: Index, took: Index) -> int:
    """Do what the tuner does when all ranks have begun the call."""
    autotune.learn(integer(t), integer(took))
    autotune.start_clock(integer(t))
    return 0


class Learner:
    """A rank that chooses algorithms for calls with made-up times; `known`: times from the cache (tuning_table.py)."""

    def __init__(self, known=None, left=1.0):
        self.table = np.zeros(autotune.table_words(len(tuning_table.COLLECTIVES)), np.int64)
        if known:
            algorithms = dict(zip(autotune.NAMES, known, strict=False))
            size = str(autotune.SMALLEST << 2 * autotune._class_of.py_func(LARGE))
            tuning_table.fill(self.table, {"all_reduce": {size: algorithms}}, left)
        self.took = 0

    def call(self, times, nbytes=LARGE, operation=ALL_REDUCE):
        """Make one call and return its algorithm. `times`: ticks a MiB of each algorithm."""
        at = address_of(self.table)
        choose.call(at, operation, nbytes, (1 << len(times)) - 1)
        learn.call(at, self.took)
        algorithm = int(self.table[autotune.ALGORITHM])
        self.took = times[algorithm] if self.table[autotune.ROW] else 0
        return algorithm

    def run(self, number, times, **options):
        return [self.call(times, **options) for _ in range(number)]

    @classmethod
    def of(cls, number, times, known=None):
        """Return a rank that has made some calls."""
        learner = cls(known)
        learner.run(number, times)
        return learner


def test_a_row_without_times_begins_with_the_given_algorithm_if_it_is_allowed():
    for first, chosen in (
        (autotune.DIRECT, autotune.DIRECT),
        (autotune.AHEAD, autotune.AHEAD),
        (autotune.PAST, autotune.AHEAD),
    ):
        assert choose_first.call(address_of(Learner().table), first) == chosen


def test_a_rank_whose_peers_cannot_call_directly_stops_to_begin_with_it():
    learner = Learner()
    at = address_of(learner.table)
    assert choose_first.call(at, autotune.DIRECT) == autotune.DIRECT
    give_up.call(at)
    assert [choose_first.call(at, autotune.DIRECT) for _ in range(5)] == [autotune.AHEAD] * 5


@pytest.mark.parametrize("algorithms", [2, 3, autotune.ALGORITHMS])
def test_every_algorithm_is_tried_at_the_beginning_and_the_fastest_is_found(algorithms):
    for fastest in range(algorithms):
        times = [1000 + 100 * algorithm for algorithm in range(algorithms)]
        times[fastest] = 500
        went = Learner().run(2 * autotune.LONG, times)
        early = went[: autotune.WARM + 2 * autotune.LOOK * (algorithms + 1)]
        assert set(early) == set(range(algorithms))
        # One try at a time, and the best algorithm in between.
        assert sum(algorithm != after for algorithm, after in pairwise(early)) <= 4 * algorithms
        after = went[autotune.WARM + 2 * autotune.LOOK * (algorithms + 1) :]
        assert after.count(fastest) > len(after) * 0.97
        assert set(after) == set(range(algorithms))  # the others are tried now and then


@pytest.mark.parametrize("times", [[900, 1000, 1300], [1000, 800, 900, 5000, 1100], [500, 2000, 600]])
def test_a_row_with_cached_times_uses_the_best_and_tries_nothing_during_the_back_off(times):
    went = Learner(times).run(60, times)
    assert set(went) == {times.index(min(times))}


@pytest.mark.parametrize("noise", [0, 0.05, 0.3])
@pytest.mark.parametrize(
    "times",
    [
        [1000, 1050, 1100],
        [1000, 1500, 1900, 1700, 1400],
        [1000, 3000, 1200, 9000, 50_000],
        [1000] * 3 + [1500, 1700, 1900],
        [1000] * 3 + [2500] * 3,
    ],
)
def test_tries_cost_at_most_a_fiftieth(times, noise):
    """Compared with always using the best algorithm, under the same disturbances."""
    random = np.random.default_rng(7)
    learner, spent, least = Learner(times), 0, 0
    for _ in range(20_000):
        # One call in a hundred loses its core for as long as ten calls take.
        factor = random.lognormal(0, noise) + (10 if noise and random.random() < 0.01 else 0)
        algorithm = learner.call([int(time * factor) for time in times])
        spent += times[algorithm] * factor
        least += min(times) * factor
    assert spent < least * 1.02


def test_the_first_time_of_an_algorithm_does_not_count():
    learner, seen = Learner(), set()
    for _ in range(100):
        algorithm = learner.call([1000, 800, 500])
        if algorithm not in seen:
            learner.took = 100_000
        seen.add(algorithm)
    assert learner.run(100, [1000, 800, 500]).count(2) > 95


def test_short_programs_also_try_others_at_the_same_share():
    random = np.random.default_rng(3)
    times = [1000, 1500, 1900, 1200]
    went = [algorithm for _ in range(500) for algorithm in Learner(times, random.random()).run(60, times)]
    assert set(went) == {0, 1, 2, 3}
    assert sum(times[algorithm] for algorithm in went) < len(went) * times[0] * 1.02


def test_an_algorithm_of_more_than_twice_the_best_time_backs_off_for_long():
    times = [1000, 2100, 30_000]
    assert set(Learner(times).run(autotune.LONG - 10, times)) == {0}
    # Without cached times it is tried, and tried again, because one bad time may have another cause.
    went = Learner().run(autotune.LONG, times)[autotune.WARM + autotune.LOOK * 6 :]
    assert went.count(1) <= 1
    assert went.count(2) <= 1


@pytest.mark.parametrize("times", [[800, 1000, 1000], [1000, 1600, 1000], [1000, 40_000, 1000]])
def test_an_algorithm_that_has_become_slow_is_replaced(times):
    assert Learner.of(500, [1000, 800, 1000]).run(300, times)[-50:].count(1) <= 2


@pytest.mark.parametrize("known", [None, [1000, 800, 900]])
def test_an_algorithm_that_has_become_fast_is_found(known):
    learner = Learner.of(500, [1000, 800, 900], known)
    assert learner.run(200, [1000, 800, 100])[-100:].count(2) > 90
    learner.run(500, [1000, 4000, 2500])
    # With more than twice the best time it is tried after LONG calls.
    assert learner.run(2 * autotune.LONG, [1000, 100, 2500])[-100:].count(1) > 95


def test_a_call_uses_the_best_of_its_possible_algorithms():
    learner = Learner.of(200, [1000, 900, 1000, 500])
    choose.call(address_of(learner.table), ALL_REDUCE, LARGE, 0b111)
    assert learner.table[autotune.ALGORITHM] == 1


def test_a_small_difference_changes_nothing():
    learner = Learner()
    first = learner.run(300, [1000, 990, 995])[-1]
    assert learner.run(100, [1000, 990, 995]).count(first) > 90


def test_sizes_and_operations_learn_by_themselves():
    learner = Learner()
    for _ in range(300):
        learner.call([500, 1000, 1000], nbytes=LARGE)
        learner.call([1000, 500, 1000], nbytes=16 * LARGE)
        learner.call([1000, 1000, 500], nbytes=LARGE, operation=ALL_REDUCE + 1)
    same = [1000, 1000, 1000]
    assert learner.call(same, nbytes=LARGE) == 0
    assert learner.call(same, nbytes=16 * LARGE) == 1
    assert learner.call(same, nbytes=LARGE, operation=ALL_REDUCE + 1) == 2


def test_classes_cover_all_sizes():
    found = [autotune._class_of.py_func(autotune.SMALLEST << k) for k in range(40)]
    assert found[0] == 0
    assert sorted(found) == found
    assert set(found) == set(range(autotune.CLASSES))


# ---- in real groups --------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
def test_all_ranks_have_the_same_rows(rank, world_size):
    group = dist.new_group()
    for turn in range(16):
        for count in (3, 3000, 30_000, 300_000 if turn % 4 == 0 else 10):
            x = np.ones(count, "f4")
            group.fast.all_reduce(x)
            group.fast.broadcast(x, turn % world_size)
            group.fast.all_gather([np.empty_like(x) for _ in range(world_size)], x)
            group.fast.reduce_scatter(x, [x.copy() for _ in range(world_size)])
    group.fast.barrier()
    mine = rows_of(group).copy()
    assert (mine[:, autotune.TIMES :] > 0).any()
    assert_same_everywhere(group, mine)
    group.close()


@pytest.mark.ranks(2)
def test_the_time_of_a_wait_for_a_late_rank_does_not_count(rank, world_size, tmp_path):
    """The clock is stopped during the wait, also if the entry returns to Python several times."""
    group, x, came_back, clock = dist.new_group(), np.ones(30_000, "f4"), tmp_path / "came back", []
    words = group.backend.context.words[at.CHOOSING :]

    def look(needed, doing):
        clock.append(int(words[autotune.STARTED]))
        if len(clock) == 3:
            came_back.touch()

    for _ in range(20):
        group.fast.all_reduce(x)
    group.fast.barrier()
    if rank == 0:
        group.monitor.decide = look
    while rank == 1 and not came_back.exists():
        time.sleep(1e-3)
    group.fast.all_reduce(x)
    # Later looks may be in waits that count, if the other rank loses its core during the call.
    assert rank == 1 or clock[:3] == [0, 0, 0]
    assert words[autotune.TOOK] > 0
    group.close()


@pytest.mark.ranks(2)
def test_a_mismatch_is_not_measured_and_rows_stay_the_same(rank, world_size):
    group, x = dist.new_group(), np.ones(300_000, "f4")
    words = group.backend.context.words[at.CHOOSING :]
    group.fast.all_reduce(x)
    for _ in range(5):
        group.fast.all_reduce(x)
        took = words[autotune.TOOK]
        with pytest.raises(dist.MismatchError):
            group.fast.all_reduce(x) if rank == 0 else group.fast.broadcast(x, 0)
        assert took == words[autotune.TOOK] > 0 == words[autotune.ROW] == words[autotune.STARTED]
    for _ in range(30):
        group.fast.all_reduce(x)
    group.fast.barrier()
    assert_same_everywhere(group, rows_of(group))
    group.close()


@pytest.mark.long
@pytest.mark.ranks(17)
def test_many_ranks_that_share_cores_begin_with_direct_calls_and_try_nothing_else(rank, world_size):
    group = dist.new_group()
    words = group.backend.context.words
    words[at.CROWDED] = 1  # also on a machine with more cores
    group.fast.barrier()
    x = np.ones(words[at.SLOT] // 2, "f4")  # twice the bytes of a slot
    blocks = [np.empty_like(x) for _ in range(world_size)]

    def used(call):
        call()
        return int(words[at.CHOOSING + autotune.ALGORITHM])

    calls = autotune.WARM + 2 * autotune.LOOK
    assert {used(lambda: group.fast.broadcast(x, 0)) for _ in range(calls)} == {autotune.DIRECT}
    # Each of its blocks has a slot of its own.
    assert used(lambda: group.fast.all_gather(blocks, x)) == autotune.AHEAD
    group.close()
