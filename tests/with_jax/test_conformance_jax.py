"""The conformance suite through fastcoll.jax: its tests run with functions that call fastcoll.jax's, each jitted.

Results are copied into the suite's arrays, and JAX's errors are converted to fastcoll's by their texts. Calls have no
token in worlds of two, so that JAX orders them, and a token in worlds of three. fastcoll.jax has no exscan, no blocks
of different sizes, no coalesced calls, no posted messages, no `async_op`, and only JAX's dtypes: tests of these are
left out. JAX's arrays have no strides; `test_layouts_inside_programs` tests layouts.
"""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import ExitStack
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import oracle
import pytest
from conformance import test_moves, test_point_to_point, test_reductions, test_wrong_calls

import fastcoll as dist

jax = pytest.importorskip("jax", reason="pip install jax")
fj = pytest.importorskip("fastcoll.jax")

pytestmark = pytest.mark.long  # test_calls.py and test_failures.py call every function

SUM = dist.ReduceOp.SUM
# Compiling a program takes 14 ms for each dtype, operation and length. So there are few lengths, and one test has all
# dtypes.
COUNTS = (0, 31, 1009)
FEW = [np.dtype(name) for name in ("uint8", "bool", "float32", "complex128")]
SIZES = [oracle.BOOL, *oracle.HALVES, *map(np.dtype, ("int32", "float64", "complex128"))]


@cache
def program(name: str, with_token: bool, **how: Any) -> Any:
    """Return a jitted call from arrays to an array, a token or None; JAX compiles it once for each shape."""

    def run(*arrays: Any) -> Any:
        return getattr(fj, name)(*arrays, token=fj.create_token() if with_token else None, **how)

    return jax.jit(run)


def call(name: str, *arrays: Any, **how: Any) -> Any:
    """Make a call; return its result as a NumPy array, or raise fastcoll's error."""
    try:
        found = program(name, dist.get_world_size() == 3, **how)(*arrays)
        if found is None:  # from send and barrier without a token
            return jax.effects_barrier()
        return np.asarray(found[0] if isinstance(found, tuple) else found)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        reported = re.match(r"[A-Z_]+: fastcoll\.errors\.(\w+): (.*)", str(error), re.DOTALL)
        if not reported:
            raise
        fj.clear_errors()
        raise getattr(dist, reported[1])(reported[2]) from None


def in_place(name: str) -> Any:
    def written(x: Any, root: int | None = None, op: Any = SUM) -> None:
        at_root = {} if root is None else {"src" if name == "broadcast" else "dst": int(root)}
        x[...] = call(name, x, **at_root, **({} if name == "broadcast" else {"op": op}))

    if name in ("broadcast", "reduce"):
        return written
    return lambda x, op=SUM: written(x, None, op)


def stacked(out: Any, found: Any) -> None:
    out[...] = found.reshape(out.shape)


def all_gather(outs: Any, x: Any) -> None:
    for out, row in zip(outs, call("all_gather", x), strict=True):
        out[...] = row


def all_to_all(outs: Any, blocks: Any) -> None:
    for out, row in zip(outs, call("all_to_all", np.stack(blocks)), strict=True):
        out[...] = row


def gather_single(x: Any, out: Any = None, dst: int = 0) -> None:
    found = call("gather", x, dst=int(dst))
    if out is not None:
        stacked(out, found)


def scatter_single(out: Any, x: Any = None, src: int = 0) -> None:
    stacked(out, call("scatter", out if x is None else rows(x), src=int(src)))


def rows(x: Any) -> Any:
    return x.reshape(dist.get_world_size(), -1)


def send(x: Any, dst: int, tag: int = 0) -> None:
    call("send", x, dst=dst, tag=tag)


def recv(x: Any, src: int | None = None, tag: int = 0) -> int:
    x[...] = call("recv", x, src=src, tag=tag)
    return src


def sendrecv(posted: Any) -> list[Any]:
    """Do a `batch_isend_irecv` of two operations."""
    (_, x, dst), (_, out, src) = posted
    out[...] = call("sendrecv", x, out, dst=dst, src=src)
    return []


THROUGH_JAX = {
    **{name: in_place(name) for name in ("all_reduce", "reduce", "scan", "broadcast")},
    "reduce_scatter_single": lambda out, x, op=SUM: stacked(out, call("reduce_scatter", rows(x), op=op)),
    "all_gather": all_gather,
    "all_gather_into_tensor": lambda out, x: stacked(out, call("all_gather", x)),
    "all_to_all": all_to_all,
    "all_to_all_single": lambda out, x: stacked(out, call("all_to_all", rows(x))),
    "gather_single": gather_single,
    "scatter_single": scatter_single,
    "send": send,
    "recv": recv,
    "P2POp": lambda *posted: posted,
    "batch_isend_irecv": sendrecv,
    "barrier": lambda: call("barrier"),
}


def run(module: Any, test: str, dtypes: Any, *args: Any) -> None:
    """Run a test of the suite, for some dtypes."""
    names = {each: getattr(dist, each) for each in dist.__all__}
    with ExitStack() as patched:
        for place in {oracle, module}:
            if hasattr(place, "counts"):
                patched.enter_context(patch.object(place, "counts", lambda world_size: COUNTS))
        patched.enter_context(patch.object(module, "dist", SimpleNamespace(**{**names, **THROUGH_JAX})))
        patched.enter_context(patch.object(oracle, "DTYPES", dtypes))
        patched.enter_context(patch.object(oracle, "MOVABLE", dtypes))
        patched.enter_context(jax.enable_x64(True))
        getattr(module, test)(*args)


REDUCTIONS = {
    "test_all_reduce": oracle.DTYPES,
    "test_reduce": FEW,
    "test_scan_and_exscan": FEW,
    "test_reduce_scatter_single": FEW,
}


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.ranks(2, 3, timeout=180)
def test_reductions_as_outside(rank, world_size, name):
    run(test_reductions, name, REDUCTIONS[name] if world_size == 2 else FEW, rank, world_size)


@pytest.mark.parametrize(
    "name", ["test_broadcast", "test_all_gather", "test_gather_and_scatter_of_one_array"]
)
@pytest.mark.ranks(2, 3, timeout=180)
def test_moves_as_outside(rank, world_size, name):
    run(test_moves, name, SIZES, rank, world_size)


@pytest.mark.ranks(2, 3, timeout=180)
def test_all_to_all_as_outside(rank, world_size):
    run(test_moves, "test_all_to_all", SIZES, rank, world_size, 0)


@pytest.mark.ranks(2, 3, timeout=180)
def test_barrier_as_outside(rank, world_size, tmp_path):
    run(test_moves, "test_barrier_orders_what_ranks_do", SIZES, rank, world_size, tmp_path)


@pytest.mark.ranks(2, 3, timeout=180)
@pytest.mark.parametrize("name", ["test_ring_of_every_dtype", "test_blocking_calls_of_every_length"])
def test_messages_as_outside(rank, world_size, name):
    run(test_point_to_point, name, SIZES, rank, world_size)


@pytest.mark.ranks(2, timeout=180)
def test_messages_that_do_not_fit_as_outside(rank, world_size):
    name = "test_a_message_that_does_not_fit_is_an_error_on_both_sides"
    run(test_point_to_point, name, SIZES, rank, world_size, 9)


WRONG = (
    "operation",
    "dtype",
    "count",
    "large count",
    "root",
    "reduce op",
    "custom",
    "broadcast size",
    "reduce",
)


@pytest.mark.ranks(2, 3, timeout=180)
def test_wrong_calls_as_outside(rank, world_size):
    for name in WRONG:
        run(test_wrong_calls, "test_both_calls_are_named_on_every_rank", SIZES, rank, world_size, name)


@pytest.mark.ranks(2, timeout=180, backend="tcp")
def test_over_tcp_as_outside(rank, world_size):
    for name in ("test_all_reduce", "test_scan_and_exscan"):
        run(test_reductions, name, FEW[2:3], rank, world_size)
    for name in ("test_broadcast", "test_all_gather"):
        run(test_moves, name, FEW[2:3], rank, world_size)
    run(test_point_to_point, "test_blocking_calls_of_every_length", SIZES, rank, world_size)
    run(test_wrong_calls, "test_both_calls_are_named_on_every_rank", SIZES, rank, world_size, "count")


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
        for view, found in zip(
            views, gather(base) if token is None else [y for y, _ in gather(base)], strict=True
        ):
            both = [np.asarray(view(base + 100 * (r - rank))) for r in range(2)]
            oracle.assert_same(np.asarray(found), np.stack(both))


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
def test_a_dead_rank_is_named_by_every_call(rank, world_size, tmp_path):
    """Each call has its own group, which all ranks have used; rank 2 dies while rank 0 waits for it."""
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
    waits = tmp_path / "waits"
    if rank == 2:
        while not waits.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    waits.touch()
    for _ in range(2):
        for name, group in groups.items():
            with pytest.raises(dist.PeerDiedError, match=r"rank 2 \(pid \d+ on .*\) died"):
                call(name, *arrays.get(name, (x,)), group=group, **CALLS[name])
    found = call("all_reduce", np.float32([rank]), group=others, op=SUM)
    assert found == 1


def test_every_function_has_been_called():
    assert {*CALLS, "create_token", "clear_errors"} == {*fj.__all__}
