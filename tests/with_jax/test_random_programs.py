"""Random programs of calls that do not depend on one another: each meets its own on the other rank, in program order.

Nothing but the order tells two all_reduces of one shape apart: where they change places, the results are those of other
calls. JAX runs a program of fewer than 1,000 floating-point operations (XLA's `flop_count`) on the thread that calls
it, and one part after the other where all arrays have less than 512 bytes: each program has a large one.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest

PROGRAMS, RUNS = 20, 25  # in each of the two ways: 1,000 in all
LARGE = (40, 30)
SHAPES = ((), (3,), (2, 2), LARGE)
NAMES = ("all_reduce", "all_reduce", "all_reduce", "scan", "broadcast", "all_gather", "sendrecv", "barrier")


def expected(name, arrays, rank):
    """The result on a rank of two, by NumPy."""
    if name in ("all_reduce", "scan"):
        return arrays[0] + arrays[1] if name == "all_reduce" or rank else arrays[0]
    return {"broadcast": arrays[1], "all_gather": np.stack(arrays), "sendrecv": arrays[1 - rank]}[name]


def inputs(calls, run, rank):
    return [np.full(shape, 1000.0 * run + 10 * k + rank, np.float32) for k, (_, shape) in enumerate(calls)]


@pytest.mark.long
@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("way", ["ordered", "with a token"])
def test_random_programs(rank, world_size, way):
    jax = pytest.importorskip("jax", reason="pip install jax")
    import fastcoll.jax as fj

    def program(xs, delays, calls):
        token = fj.create_token() if way == "with a token" else None
        results = []
        for x, delay, (name, _) in zip(xs, delays, calls, strict=True):
            x = (
                jax.lax.fori_loop(0, delay, lambda _, v: v + 1.0, x) - delay
            )  # it is there later than the others
            how = {"broadcast": {"src": 1}, "sendrecv": {"like": x, "dst": 1 - rank, "src": 1 - rank}}
            arguments = () if name == "barrier" else (x,)
            found = getattr(fj, name)(*arguments, token=token, **how.get(name, {}))
            if token is not None:
                found, token = (None, found) if name == "barrier" else found
            results.append(found)
        return results

    for seed in range(PROGRAMS):
        both, own = np.random.default_rng(seed), np.random.default_rng([seed, rank])
        calls = [(str(both.choice(NAMES)), SHAPES[both.integers(4)]) for _ in range(both.integers(1, 6))]
        calls.insert(both.integers(len(calls) + 1), ("all_reduce", LARGE))
        jitted, waiting = jax.jit(functools.partial(program, calls=calls)), []
        for run in range(RUNS):
            delays = [int(delay) for delay in own.integers(0, 3, len(calls)) * 500]
            waiting.append((run, jitted(inputs(calls, run, rank), delays)))
            if len(waiting) < 4 and both.integers(2) and run < RUNS - 1:
                continue  # JAX gets the next one before anybody has waited for this one
            for of, results in waiting:
                of_all = [inputs(calls, of, r) for r in range(2)]
                for k, found in enumerate(results):
                    if found is not None:
                        right = expected(calls[k][0], [of_all[0][k], of_all[1][k]], rank)
                        np.testing.assert_array_equal(found, right, f"program {seed}, run {of}, call {k}")
            waiting.clear()
