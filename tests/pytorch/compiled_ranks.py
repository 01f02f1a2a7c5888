"""Two ranks that call fastcoll's own functions in compiled functions, compared with the same calls outside."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves

import fastcoll as dist
from fastcoll import ReduceOp
from fastcoll.errors import MismatchError, UsageError

SIZE = 2
RANK = 0  # set by main


def compiled(function: Callable[..., Any]) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def every_function(x: torch.Tensor, group: Any) -> Any:
    """Call every function, with and without a group, by position and by name, with different arguments."""
    y = x * 2
    dist.all_reduce(y)
    dist.all_reduce(y, ReduceOp.MAX, group=group)
    dist.all_reduce(y.t(), op=ReduceOp.AVG)
    dist.barrier(group)
    mine = x + dist.get_rank()
    dist.broadcast(mine, 1)
    dist.broadcast(y, group_src=0, group=group)
    dist.reduce(mine, 0)
    dist.scan(y)
    dist.exscan(y, ReduceOp.PRODUCT, group)
    outs = [torch.zeros_like(y) for _ in range(dist.get_world_size(group))]
    dist.all_gather(outs, y)
    stacked = torch.empty(SIZE, *y.shape)
    dist.all_gather_single(stacked, y + mine)
    dist.gather(y, outs if RANK == 0 else None)
    at_1 = torch.zeros_like(stacked)
    dist.gather_single(y, at_1 if RANK == 1 else None, dst=1, group=group)
    dist.scatter(mine, outs if RANK == 0 else None)
    dist.scatter_single(y, stacked if RANK == 1 else None, src=1)
    part = torch.empty_like(y)
    dist.reduce_scatter(part, [y, mine])
    dist.reduce_scatter_tensor(part, stacked + part, ReduceOp.AVG)
    dist.all_to_all(outs, [part, y])
    swapped = torch.empty_like(stacked)
    dist.all_to_all_single(swapped, stacked)
    dist.all_to_all_single(swapped, swapped * 2, [], [])
    rows = torch.arange(6.0) + RANK
    mixed, split = torch.empty(6), [[2, 4], [4, 2]][RANK]
    dist.all_to_all_single(mixed, rows, split, split, group=group)
    third = torch.empty([2, 4][RANK])
    dist.reduce_scatter_tensor(third, rows, group=group, input_split_sizes=[2, 4])
    received = torch.empty(3)
    if RANK == 0:
        dist.send(mixed[::2], 1)
        sender = dist.recv(received, group=group, group_src=1, tag=7)
    else:
        sender = dist.recv(received, src=0)
        dist.send(received + 1, group_dst=0, group=group, tag=7)
    tree = {"b": torch.ones(2) * RANK, "a": [torch.ones(1, dtype=torch.float64)], 1: (y * 1,)}
    dist.all_reduce(tree)
    dist.all_reduce({"empty": [], (0, None): {}})
    dist.broadcast([rows, tree["b"]], 1)
    dist.all_reduce_coalesced([part, at_1])
    return y, mine, outs, stacked, at_1, part, swapped, mixed, third, received, sender, rows, tree


def check_values(group: Any) -> None:
    x = torch.arange(9.0).view(3, 3) + RANK
    traced = compiled(every_function)
    for _ in range(2):
        expected = every_function(x.clone(), group)
        assert_close(tree_leaves(traced(x, group)), tree_leaves(expected), rtol=0, atol=0)


def check_inputs_that_are_written() -> None:
    """Write into arguments of the compiled function, of several dtypes and layouts."""

    @compiled
    def reduce(x: torch.Tensor) -> None:
        dist.all_reduce(x)

    for dtype in (torch.bfloat16, torch.int64, torch.complex64):
        x = torch.ones(4, 6, dtype=dtype)
        reduce(x.t()[1:5:2])
        changed = torch.ones(4, 6, dtype=dtype)
        changed.t()[1:5:2] = SIZE
        assert_close(x, changed)


def check_that_inductor_writes_in_place_if_old_content_is_not_read() -> None:
    """Tensors that are read later, or are views, are copied; the others are written in place, as outside."""

    def call(x: torch.Tensor) -> Any:
        y, z, part, twice = x * 2, x * 3, x * 4, x * 5
        dist.all_reduce({"y": y, "z": z}, ReduceOp.AVG)
        dist.all_reduce(x)
        dist.all_reduce(part[1:])
        seen = twice.view(-1)
        dist.all_reduce(twice)
        dist.broadcast(z, 1)
        return y, z, part, seen, x + 1

    if shutil.which("g++") is None:
        return
    mine, expected = (torch.arange(6.0).view(2, 3) + RANK for _ in range(2))
    found, code = run_and_get_code(torch.compile(call, fullgraph=True), mine)
    assert_close((*found, mine), (*call(expected), expected), rtol=0, atol=0)
    text = "".join(code)
    assert re.findall(r"fastcoll\.(\w+)\.default\(\[buf\d+, buf\d+\]", text) == ["all_reduce_"], text


def weights(rank: int, n: int) -> torch.Tensor:
    return torch.arange(n) + 1.0 + rank


def derivative(call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the derivative of the sum of all ranks' weighted results."""

    def loss(x: torch.Tensor) -> torch.Tensor:
        y = call(x * 1)
        return (y * weights(RANK, y.numel()).view(y.shape)).sum()

    torch.compiler.reset()  # Dynamo compiles a function at most 8 times, and each `call` is one
    x = (torch.arange(4.0) + RANK).requires_grad_()
    compiled(loss)(x).backward()
    assert x.grad is not None
    return x.grad


def check_derivatives() -> None:
    def of_all(n: int) -> torch.Tensor:
        return torch.stack([weights(rank, n) for rank in range(SIZE)])

    def in_place(call: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
        def called(y: torch.Tensor) -> torch.Tensor:
            call(y)
            return y

        return called

    def into(call: Callable[..., Any], n: int, *more: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def called(y: torch.Tensor) -> torch.Tensor:
            out = torch.empty(n)
            call(out, y, *more)
            return out

        return called

    def listed(y: torch.Tensor) -> torch.Tensor:
        outs = [torch.empty(4), torch.empty(4)]
        dist.all_gather(outs, y)
        return torch.cat(outs)

    ours = slice(4 * RANK, 4 * RANK + 4)
    swapped = of_all(4).view(SIZE, SIZE, 2).transpose(0, 1).reshape(SIZE, 4)
    parts = into(lambda out, y: dist.reduce_scatter_tensor(out, y, input_split_sizes=[1, 3]), [1, 3][RANK])
    for call, expected in (
        (in_place(dist.all_reduce), of_all(4).sum(0)),
        (in_place(lambda y: dist.all_reduce(y, ReduceOp.AVG)), of_all(4).sum(0) / SIZE),
        (in_place(lambda y: dist.broadcast(y, 1)), of_all(4).sum(0) * RANK),
        (into(dist.all_gather_single, 8), of_all(8).sum(0)[ours]),
        (listed, of_all(8).sum(0)[ours]),
        (into(dist.reduce_scatter_tensor, 2, ReduceOp.AVG), of_all(2).flatten() / SIZE),
        (parts, torch.cat([weights(0, 1), weights(1, 3)])),
        (into(dist.all_to_all_single, 4), swapped[RANK]),
    ):
        assert_close(derivative(call), expected)
    with pytest.raises(Exception, match=r"all_reduce \(op=MAX\) has no derivative"):
        derivative(in_place(lambda y: dist.all_reduce(y, ReduceOp.MAX)))


def check_unused_results_and_outsiders(alone: Any) -> None:
    """Rank 0's call is compiled and its result unused; rank 1's is not compiled. Rank 1 is outside of `alone`."""

    def call(x: torch.Tensor) -> torch.Tensor:
        unused = x + 1
        dist.all_reduce(unused)
        dist.barrier()
        return x * 2

    (compiled(call) if RANK == 0 else call)(torch.ones(3))
    x = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @compiled
        def reduce(x: torch.Tensor) -> None:
            dist.all_reduce(x, group=alone)
            dist.broadcast(x, 0, group=alone)

        reduce(x)
    assert x.tolist() == [1, 1]


def check_that_trees_match_as_outside() -> None:
    """Compare the trees of ranks whose calls are compiled with each other, and with those that are not compiled."""

    def call(x: torch.Tensor, with_mismatch: bool) -> Any:
        one, tree = {"one": x * 1}, {2: x * 1, 10: x * 2, "a": [x * 3, (x * 4,)]}
        dist.all_reduce(one)
        dist.all_reduce(tree)
        dist.broadcast({"x": one["one"]}, 1)
        dist.broadcast([[tree[2]], (tree["a"][0],)], 0)
        if with_mismatch:
            dist.all_reduce({"b": x * 1, "c": x * 2} if RANK == 0 else {"b": x * 1, "a": x * 2})
        return one, tree

    expected = call(torch.ones(2), False)
    found = (compiled(call) if RANK == 0 else call)(torch.ones(2), False)
    assert_close(tree_leaves(found), tree_leaves(expected), rtol=0, atol=0)
    with pytest.raises(MismatchError, match=r"This rank gave \{'[ab]'"):
        compiled(call)(torch.ones(2), True)


def check_what_cannot_be_in_a_graph() -> None:
    largest = ReduceOp.custom(max)

    def later(x: torch.Tensor) -> None:
        dist.all_reduce(x, async_op=True).wait()

    def custom(x: torch.Tensor) -> None:
        dist.all_reduce(x, largest)

    def narrow(x: torch.Tensor) -> None:
        x += 1 / 3
        dist.all_reduce(x, travel="float16")

    def key(x: torch.Tensor) -> None:
        dist.all_reduce({torch.float32: x})

    def objects(x: torch.Tensor) -> None:
        found: list[Any] = [None, None]
        dist.all_gather_object(found, RANK)
        x += found[1]

    for call, text in (
        (later, "which has no Work"),
        (custom, "PREMUL_SUM"),
        (narrow, "travel or lost"),
        (key, "whose keys are"),
        (objects, "outside of the compiled"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Unsupported, match=text):
            compiled(call)(torch.ones(3))
        torch._dynamo.reset()
        mine, expected = torch.ones(3) + RANK, torch.ones(3) + RANK
        torch.compile(call, backend="aot_eager")(mine)
        call(expected)
        assert_close(mine, expected)


def main() -> None:
    global RANK
    torch.set_num_threads(1)
    dist.init_process_group(timeout=60)
    RANK = dist.get_rank()
    group, alone = dist.new_group([0, 1]), dist.new_group([0])
    check_values(group)
    check_inputs_that_are_written()
    check_that_inductor_writes_in_place_if_old_content_is_not_read()
    check_derivatives()
    check_unused_results_and_outsiders(alone)
    check_that_trees_match_as_outside()
    check_what_cannot_be_in_a_graph()

    @compiled
    def reduce(x: torch.Tensor) -> None:
        dist.all_reduce(x, group=group)

    reduce(torch.ones(1))
    dist.destroy_process_group(group)
    with pytest.raises(UsageError, match="0 groups here have that name"):
        reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
