"""Random programs of independent calls: each call matches the same call on the other rank, in program order.

Only the order distinguishes two all_reduces of one shape: if they are exchanged, so are their results. 12 random
programs of 25 calls run five times in each of the two ways to order calls. In each run and on each rank the arrays of
other calls are delayed. XLA runs such a program on several threads, and so in any order, if more than 8 of its parts
are ready at once, an array has 512 bytes or more, and the program has 1,000 floating-point operations (XLA's
`flop_count`). Without an order the results are wrong: the last test shows that these programs detect that.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

PROGRAMS, RUNS, CALLS = 12, 5, 25
LARGE = (40, 30)
SHAPES = ((), (3,), (2, 2), LARGE, LARGE)
NAMES = ("all_reduce", "all_reduce", "all_reduce", "scan", "broadcast", "all_gather", "sendrecv", "barrier")


def expected(name, arrays, rank):
    """Return NumPy's result for a rank of two."""
    if name in ("all_reduce", "scan"):
        return arrays[0] + arrays[1] if name == "all_reduce" or rank else arrays[0]
    return {"broadcast": arrays[1], "all_gather": np.stack(arrays), "sendrecv": arrays[1 - rank]}[name]


def inputs(calls, run, rank):
    return [np.full(shape, 1000.0 * run + 10 * k + rank, np.float32) for k, (_, shape) in enumerate(calls)]


def program(xs, delays, calls, rank, mode):
    import jax

    import fastcoll.jax as fj

    token = None if mode == "ordered" else fj.create_token()
    results = []
    for x, delay, (name, _) in zip(xs, delays, calls, strict=True):
        x = jax.lax.fori_loop(0, delay, lambda _, v: v + 1.0, x) - delay  # a delay
        how = {"broadcast": {"src": 1}, "sendrecv": {"like": x, "dst": 1 - rank, "src": 1 - rank}}
        arguments = () if name == "barrier" else (x,)
        if mode == "fresh tokens":
            token = fj.create_token()
        found = getattr(fj, name)(*arguments, token=token, **how.get(name, {}))
        if token is not None:
            found, token = (None, found) if name == "barrier" else found
        results.append(found)
    return results


def wrong_results(rank, calls, mode, seed, runs=RUNS):
    """Return the (run, call) whose results differ from NumPy's."""
    import jax

    both, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
    jitted = jax.jit(functools.partial(program, calls=calls, rank=rank, mode=mode))
    wrong, waiting = [], []
    for run in range(runs):
        delays = [int(delay) for delay in own.integers(0, 3, len(calls)) * 500]
        waiting.append((run, jitted(inputs(calls, run, rank), delays)))
        if both.integers(2) and run < runs - 1:
            continue  # start the next run before waiting for this one
        for of, results in waiting:
            of_all = [inputs(calls, of, r) for r in range(2)]
            for k, found in enumerate(results):
                if found is not None:
                    right = expected(calls[k][0], [of_all[0][k], of_all[1][k]], rank)
                    wrong += [(of, k)] * (not np.array_equal(found, right))
        waiting.clear()
    return wrong


@pytest.mark.long
@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize("mode", ["ordered", "with a token"])
def test_random_programs(rank, world_size, jax, mode):
    for seed in range(PROGRAMS):
        draw = np.random.default_rng(seed)
        calls = [(str(draw.choice(NAMES)), SHAPES[draw.integers(len(SHAPES))]) for _ in range(CALLS)]
        assert wrong_results(rank, calls, mode, seed) == [], f"program {seed}"


@pytest.mark.long
@pytest.mark.ranks(2, timeout=300)
def test_a_new_token_for_each_call_is_detected(rank, world_size, jax):
    """A planted fault: these calls have no order, and the results show it."""
    import fastcoll as dist

    calls = [("all_reduce", LARGE)] * CALLS
    for seed in range(100):  # most seeds detect it
        found = np.array([len(wrong_results(rank, calls, "fresh tokens", seed))])
        dist.all_reduce(found)
        if found[0]:
            return
    pytest.fail("the order of calls makes no difference in these programs")
