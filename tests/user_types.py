"""A user's program for type checkers: test_types.py checks it with mypy and pyright; it is never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from typing_extensions import assert_type

import fastcoll as dist
from fastcoll import Work, elastic

x = np.ones(4)
xs = [x, x]


def in_place(y: jax.Array, either: Any, wanted: bool) -> None:
    """The result is in the array itself, or, for JAX's immutable arrays, in a new one."""
    assert_type(dist.all_reduce(x), None)
    assert_type(dist.all_reduce(y), jax.Array)
    assert_type(dist.all_reduce(x, async_op=True), Work)
    assert_type(dist.all_reduce(y, dist.ReduceOp.MAX, None, True), Work)
    assert_type(dist.all_reduce(either, async_op=True).wait(), bool)
    dist.all_reduce(x, async_op=wanted)
    assert_type(dist.broadcast(x, 0), None)
    assert_type(dist.broadcast(y, src=0), jax.Array)
    assert_type(dist.broadcast(x, group_src=0, async_op=True), Work)
    assert_type(dist.reduce(x, 0), None)
    assert_type(dist.reduce(y, dst=0), jax.Array)
    assert_type(dist.reduce(x, group_dst=0, async_op=True), Work)
    assert_type(dist.scan(x), None)
    assert_type(dist.scan(y), jax.Array)
    assert_type(dist.scan(x, async_op=True), Work)
    assert_type(dist.exscan(x), None)
    assert_type(dist.exscan(y), jax.Array)
    assert_type(dist.exscan(x, async_op=True), Work)
    assert_type(dist.scatter(x, xs), None)
    assert_type(dist.scatter(y, xs), jax.Array)
    assert_type(dist.scatter(x, None, 1, async_op=True), Work)
    assert_type(dist.scatter_single(x, x), None)
    assert_type(dist.scatter_single(y, x), jax.Array)
    assert_type(dist.scatter_single(x, None, 1, async_op=True), Work)


def into_outputs(wanted: bool) -> None:
    """The result is in the arrays that are passed; without `async_op` it is None, and with True a Work."""
    assert_type(dist.all_gather(xs, x), None)
    assert_type(dist.all_gather(xs, x, None, True), Work)
    assert_type(dist.all_gather(xs, x, async_op=wanted), Work | None)
    assert_type(dist.all_gather_into_tensor(x, x), None)
    assert_type(dist.all_gather_single(x, x, async_op=True), Work)
    assert_type(dist.all_gather_into_tensor(x, x, async_op=wanted), Work | None)
    assert_type(dist.gather(x, xs), None)
    assert_type(dist.gather(x, group_dst=1, async_op=True), Work)
    assert_type(dist.gather(x, async_op=wanted), Work | None)
    assert_type(dist.gather_single(x, x), None)
    assert_type(dist.gather_into_tensor(x, group_dst=1, async_op=True), Work)
    assert_type(dist.gather_single(x, async_op=wanted), Work | None)
    assert_type(dist.reduce_scatter(x, xs), None)
    assert_type(dist.reduce_scatter(x, xs, async_op=wanted), Work | None)
    assert_type(dist.reduce_scatter_tensor(x, x, input_split_sizes=(2, 0)), None)
    assert_type(dist.reduce_scatter_single(x, x, async_op=True, input_split_sizes=[2]), Work)
    assert_type(dist.reduce_scatter_tensor(x, x, async_op=wanted), Work | None)
    assert_type(dist.all_to_all(xs, xs), None)
    assert_type(dist.all_to_all(xs, xs, async_op=wanted), Work | None)
    assert_type(dist.all_to_all_single(x, x), None)
    assert_type(dist.all_to_all_single(x, x, [2], [2], async_op=True), Work)
    assert_type(dist.all_reduce_coalesced(xs), None)
    assert_type(dist.all_reduce_coalesced(xs, async_op=wanted), Work | None)
    assert_type(dist.all_gather_coalesced([xs], xs), None)
    assert_type(dist.all_gather_coalesced([xs], xs, async_op=True), Work)
    assert_type(dist.barrier(), None)
    assert_type(dist.barrier(async_op=True).wait(), bool)
    assert_type(dist.barrier(async_op=wanted), Work | None)
    assert_type(dist.all_reduce_multigpu(xs), None)
    assert_type(dist.reduce_multigpu(xs, 0, async_op=True), Work)
    assert_type(dist.broadcast_multigpu(xs, 0, async_op=wanted), Work | None)
    assert_type(dist.all_gather_multigpu([xs], xs, async_op=wanted), Work | None)


def messages_and_groups() -> None:
    assert_type(dist.recv(x), int)
    dist.isend(x, 1).wait()
    assert_type(dist.irecv(x).source_rank(), int | Any)
    assert_type(dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)]), list[Work])
    pair = dist.new_group([0, 1])
    assert_type(dist.all_reduce(x, group=pair), None)
    assert_type(dist.get_rank(pair), int)
    start: Callable[..., None] = dist.init_process_group
    start(backend=dist.Backend.GLOO)


def elastic_jobs() -> None:
    @elastic.run(min_ranks=2)
    def train(state: elastic.State, rate: float) -> float:
        return rate * len(state.weights)

    assert_type(train(elastic.State(weights=x), 0.1), float)
    assert_type(elastic.run(train)(elastic.State()), float)
    elastic.State(step=0).commit()


def rooms() -> None:
    """Names of the package that need no separate import."""
    dist.elastic.State(step=0).commit()
    assert_type(dist.rpc.get_worker_info(), dist.rpc.WorkerInfo)
    from_jax: Callable[..., Any] = dist.jax.all_reduce
    from_jax(x)


def wrong() -> None:
    """Each line is an error, which mypy and pyright must report."""
    dist.all_reduce(x, operation=dist.ReduceOp.SUM)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    dist.all_reduce(x, op="sum", async_op=True)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    dist.barrier().wait()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
