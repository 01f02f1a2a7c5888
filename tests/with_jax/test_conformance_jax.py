"""Reductions of every dtype, layouts inside programs, and calls with a dead rank, through jitted calls of fastcoll.jax.

test_calls.py has the other calls, with a dtype of each size, and test_failures.py wrong calls.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import numpy as np
import oracle
import pytest
from oracle import assert_same, reduced, values

import fastcoll as dist

jax = pytest.importorskip("jax", reason="pip install jax")
fj = pytest.importorskip("fastcoll.jax")

pytestmark = pytest.mark.long  # test_calls.py and test_failures.py call every function

SUM = dist.ReduceOp.SUM
COUNTS = (0, 31, 1009)
FEW = [np.dtype(name) for name in ("uint8", "bool", "float32", "complex128")]  # a compilation takes 14 ms


@cache
def program(name: str, with_token: bool, **how: Any) -> Any:
    """Return a jitted call from arrays to an array, a token or None; JAX compiles it once for each shape."""

    def run(*arrays: Any) -> Any:
        return getattr(fj, name)(*arrays, token=fj.create_token() if with_token else None, **how)

    return jax.jit(run)


def call(name: str, *arrays: Any, with_token: bool = True, **how: Any) -> Any:
    """Make a call; return its result as a NumPy array."""
    found = program(name, with_token, **how)(*arrays)
    if found is None:  # from barrier without a token
        return jax.effects_barrier()
    return np.asarray(found[0] if isinstance(found, tuple) else found)


@pytest.mark.ranks(2, 3, timeout=180)
def test_reductions_of_every_dtype(rank, world_size):
    """In a world of three they have tokens; in one of two JAX orders them, and all_reduce has all dtypes."""
    n, with_token = world_size, world_size == 3
    cases = [(dtype, op) for dtype in (FEW if with_token else oracle.DTYPES) for op in oracle.ops_for(dtype)]
    with jax.enable_x64(True):
        for number, (dtype, op) in enumerate(cases):
            root, count = number % n, COUNTS[number % len(COUNTS)]
            inputs = [values(r, n * count, dtype).reshape(n, count) for r in range(n)]
            total = reduced(inputs, op)
            for name, how, want in (
                ("all_reduce", {}, total),
                ("reduce", {"dst": root}, total if rank == root else inputs[rank]),
                ("scan", {}, reduced(inputs[: rank + 1], op)),
                ("reduce_scatter", {}, total[rank]),
            )[: 4 if dtype in FEW else 1]:
                found = call(name, inputs[rank], with_token=with_token, op=op, **how)
                assert_same(found, want, (name, dtype, op, count))


@pytest.mark.ranks(2, 3, timeout=180)
def test_a_barrier_orders_what_ranks_do(rank, world_size, tmp_path):
    for turn in range(20):
        (tmp_path / f"{turn}-{rank}").touch()
        call("barrier", with_token=world_size == 3)
        assert all((tmp_path / f"{turn}-{r}").exists() for r in range(world_size))


@pytest.mark.ranks(2, timeout=180)
def test_layouts_inside_programs(rank, world_size):
    """XLA chooses the layouts of arrays; a call gets row-major arrays."""
    base = np.arange(24, dtype=np.float32).reshape(4, 6) + 100 * rank
    views = (
        lambda x: x.T,
        lambda x: x[:, ::3],
        lambda x: x[::-1],
        lambda x: x[1:3, 1:4],
        lambda x: jax.numpy.broadcast_to(x[0], (5, 6)),
        lambda x: jax.numpy.swapaxes(x.reshape(2, 2, 6), 0, 2),
    )
    for token in (None, fj.create_token()):
        gather = jax.jit(lambda x: [fj.all_gather(view(x), token=token) for view in views])  # noqa: B023
        for view, found in zip(views, gather(base), strict=True):
            both = [np.asarray(view(base + 100 * (r - rank))) for r in range(2)]
            assert_same(np.asarray(found if token is None else found[0]), np.stack(both))


CALLS: dict[str, dict[str, Any]] = {
    **{name: {"op": SUM} for name in ("all_reduce", "scan", "reduce_scatter")},
    "reduce": {"op": SUM, "dst": 0},
    "broadcast": {"src": 2},
    "gather": {"dst": 0},
    "scatter": {"src": 2},
    **{name: {} for name in ("all_gather", "all_to_all", "barrier")},
    "send": {"dst": 2},
    "recv": {"src": 2},
    "sendrecv": {"dst": 2, "src": 2},
}


@pytest.mark.ranks(3, timeout=180, fresh=True, may_die=(2,))
def test_a_dead_rank_is_named_by_every_call(rank, world_size):
    """Each call has its own group, which all ranks have used before rank 2 dies."""
    x = np.ones((3, 2), np.float32)
    arrays = {"barrier": (), "sendrecv": (x, x), "scatter": (x if rank == 2 else x[0],)}
    groups = {name: dist.new_group(timeout=60) for name in CALLS}
    for name, group in groups.items():
        how = {"dst": rank, "src": rank} if name == "sendrecv" else CALLS[name]
        call("barrier", group=group)
        if name not in ("send", "recv"):
            for _ in range(2):  # first by Python, then by the C entry point
                call(name, *arrays.get(name, (x,)), group=group, **how)
    others = dist.new_group([0, 1])
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    died = pytest.raises(
        (jax.errors.JaxRuntimeError, ValueError),
        match=r"UNAVAILABLE: fastcoll.errors.PeerDiedError: .*rank 2 \(pid",
    )
    for _ in range(2):
        for name, group in groups.items():
            with died:
                call(name, *arrays.get(name, (x,)), group=group, **CALLS[name])
            fj.clear_errors()
    assert call("all_reduce", np.float32([rank]), group=others, op=SUM) == 1


def test_every_function_has_been_called():
    assert {*CALLS, "create_token", "clear_errors"} == {*fj.__all__}
