"""Every collective against the oracle, for any carrier: a test file imports these and has the fixture `ranks`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest

from fastcoll import ReduceOp
from fastcoll.errors import ArrayError

from .thread_ranks import Array, Ranks

F4 = np.dtype("f4")
SUM = ReduceOp.SUM


def inputs(ranks: Ranks, count: int, dtype: Any = F4) -> list[Array]:
    return ranks.each(lambda rank: oracle.values(rank, count, np.dtype(dtype)))


def copies(arrays: list[Array]) -> list[Array]:
    return [x.copy() for x in arrays]


def test_all_reduce_of_every_operation_and_dtype(ranks: Ranks) -> None:
    cases = ranks.reductions()
    hosts = [inputs(ranks, 21, dtype) for _, dtype in cases]

    def does(rank: int, group: Any) -> None:
        for (op, _), host in zip(cases, hosts, strict=True):
            group.all_reduce(ranks.array(rank, host[rank]), op)

    ranks.run(does)
    for (op, dtype), host in zip(cases, hosts, strict=True):
        for got in host:
            ranks.assert_reduced(got, oracle.reduced(inputs(ranks, 21, dtype), op), op, (op, dtype))


def test_reduce_scan_and_exscan(ranks: Ranks) -> None:
    root = ranks.size - 1
    for dtype in ranks.dtypes:
        given = inputs(ranks, 300, dtype)
        reduced, scans, exscans = copies(given), copies(given), copies(given)

        def does(rank: int, group: Any, arrays: Any = (reduced, scans, exscans)) -> None:
            reduced, scanned, before = (ranks.array(rank, xs[rank]) for xs in arrays)
            group.reduce(reduced, root)
            group.scan(scanned)
            group.exscan(before)

        ranks.run(does)
        for rank, mine in enumerate(given):
            ranks.assert_reduced(reduced[rank], oracle.reduced(given, SUM) if rank == root else mine)
            ranks.assert_reduced(scans[rank], oracle.reduced(given[: rank + 1], SUM))
            ranks.assert_reduced(exscans[rank], oracle.reduced(given[:rank], SUM) if rank else mine)


@pytest.mark.parametrize("uneven", [0, 1], ids=["even", "uneven"])
def test_reduce_scatter(ranks: Ranks, uneven: int) -> None:
    sizes = [30 * (1 + uneven * rank) for rank in range(ranks.size)]
    for dtype in ranks.dtypes:
        given = [[oracle.values(r, n, dtype, p) for p, n in enumerate(sizes)] for r in range(ranks.size)]
        outs, others = ([np.zeros(n, dtype) for n in sizes] for _ in range(2))

        def does(rank: int, group: Any, given: Any = given, outs: Any = outs, others: Any = others) -> None:
            blocks, whole = given[rank], np.concatenate(given[rank])
            group.reduce_scatter(ranks.array(rank, outs[rank]), ranks.arrays(rank, blocks))
            out, x = ranks.array(rank, others[rank]), ranks.array(rank, whole)
            group.reduce_scatter_single(out, x, input_split_sizes=sizes)

        ranks.run(does)
        for rank in range(ranks.size):
            want = oracle.reduced([blocks[rank] for blocks in given], SUM)
            ranks.assert_reduced(outs[rank], want, what=rank)
            ranks.assert_reduced(others[rank], want, what=rank)


@pytest.mark.parametrize("uneven", [0, 1], ids=["even", "uneven"])
def test_moves(ranks: Ranks, uneven: int) -> None:
    """Blocks have the same size, or different sizes; one dtype has a size that is no power of two."""
    n, root, dtype = ranks.size, ranks.size - 1, oracle.RECORD if uneven else np.dtype("i2")
    given = [oracle.values(rank, 2 + uneven * 60 * rank, dtype) for rank in range(n)]
    sent = [
        np.concatenate(given) if rank == root else np.zeros_like(np.concatenate(given)) for rank in range(n)
    ]
    everything = [[np.zeros_like(x) for x in given] for _ in range(n)]
    gathered, scattered = ([np.zeros_like(x) for x in given] for _ in range(2))
    single = [np.zeros(3 * n, "i4") for _ in range(n)]
    gives = [[oracle.values(r, 1 + uneven * 9 * (r + p), dtype, p) for p in range(n)] for r in range(n)]
    takes = [[np.zeros(1 + uneven * 9 * (r + p), dtype) for p in range(n)] for r in range(n)]

    def does(rank: int, group: Any) -> None:
        on_gpu = partial(ranks.arrays, rank)
        mine, at_root = ranks.array(rank, given[rank]), on_gpu(gathered) if rank == root else None
        group.broadcast(ranks.array(rank, sent[rank]), root)
        group.all_gather(on_gpu(everything[rank]), mine)
        group.all_gather_single(*on_gpu([single[rank], oracle.values(rank, 3, np.dtype("i4"))]))
        group.gather(mine, at_root, root)
        group.scatter(ranks.array(rank, scattered[rank]), at_root, root)
        group.all_to_all(on_gpu(takes[rank]), on_gpu(gives[rank]))

    ranks.run(does)
    for rank, mine in enumerate(given):
        oracle.assert_same(sent[rank], np.concatenate(given))
        oracle.assert_same(np.concatenate(everything[rank]), np.concatenate(given))
        oracle.assert_same(single[rank], np.concatenate(inputs(ranks, 3, "i4")))
        oracle.assert_same(gathered[rank], mine)
        oracle.assert_same(scattered[rank], mine)
        for peer, block in enumerate(takes[rank]):
            oracle.assert_same(block, gives[peer][rank])


def test_coalesced_calls(ranks: Ranks) -> None:
    sizes = [30, 1, 59]
    given = [[oracle.values(r, n, F4, n) for n in sizes] for r in range(ranks.size)]
    sums = [copies(xs) for xs in given]
    lists = [[[np.zeros(n, "f4") for _ in sums] for n in sizes] for _ in sums]

    def does(rank: int, group: Any) -> None:
        group.all_reduce_coalesced(ranks.arrays(rank, sums[rank]))
        outs = [ranks.arrays(rank, each) for each in lists[rank]]
        group.all_gather_coalesced(outs, ranks.arrays(rank, given[rank]))

    ranks.run(does)
    for k in range(len(sizes)):
        for rank in range(ranks.size):
            oracle.assert_same(sums[rank][k], oracle.reduced([xs[k] for xs in given], SUM))
            for r, out in enumerate(lists[rank][k]):
                oracle.assert_same(out, given[r][k])


def test_a_users_function_in_rank_order(ranks: Ranks) -> None:
    first = ReduceOp.custom(lambda a, b: a if a else b, "first")
    for dtype in ranks.dtypes[:2]:
        given = [
            (x * (np.arange(40) % ranks.size <= r)).astype(dtype)
            for r, x in enumerate(inputs(ranks, 40, dtype))
        ]
        hosts = copies(given)
        ranks.run(lambda rank, group, hosts=hosts: group.all_reduce(ranks.array(rank, hosts[rank]), first))
        want = [next((v for v in column if v), 0) for column in zip(*given, strict=True)]
        for host in hosts:
            oracle.assert_same(host, np.array(want, dtype))


@pytest.mark.parametrize("name", ["f4", "f2", "f8", "c8", "complex factor"])
def test_premul_sum_multiplies_by_each_ranks_factor(ranks: Ranks, name: str) -> None:
    dtype = np.dtype("c8" if name == "complex factor" else name)
    factors = [(0.5 + rank) * (1j if name == "complex factor" else 1) for rank in range(ranks.size)]
    given = inputs(ranks, 6, dtype)
    wide = np.dtype("c16" if dtype.kind == "c" else "f8")
    want = sum(x.astype(wide) * factor for x, factor in zip(given, factors, strict=True)).astype(dtype)
    hosts, scans, lists = copies(given), copies(given), copies(given)

    def does(rank: int, group: Any) -> None:
        op = ReduceOp.PREMUL_SUM(factors[rank])
        group.all_reduce(ranks.array(rank, hosts[rank]), op)
        group.scan(ranks.array(rank, scans[rank]), op)
        group.all_reduce_coalesced([ranks.array(rank, lists[rank])], op)

    ranks.run(does)
    for host in (*hosts, *lists, scans[-1]):
        tolerance = 0.05 if dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(host.astype("c16"), want.astype("c16"), tolerance, 0.06, err_msg=name)


def test_inputs_and_outputs_may_overlap(ranks: Ranks) -> None:
    n = ranks.size
    names = ("gather", "all_gather", "all_gather_single", "scatter", "reduce_scatter", "all_to_all")
    bases = {name: inputs(ranks, 4 * n + 2, "i4") for name in names}
    before = {name: copies(xs) for name, xs in bases.items()}
    places = [4 * r for r in range(n)]

    def does(rank: int, group: Any) -> None:
        def view(name: str, start: int, end: int) -> Any:
            ranks.array(rank, bases[name][rank])  # the base, which is on the GPU
            return ranks.array(rank, bases[name][rank][start:end])

        def parts(name: str, shift: int = 0) -> list[Any]:
            return [view(name, p + shift, p + shift + 4) for p in places]

        group.all_gather(parts("all_gather"), view("all_gather", 1, 5))
        group.all_gather_single(view("all_gather_single", 2, 4 * n + 2), view("all_gather_single", 0, 4))
        group.gather(view("gather", 1, 5), parts("gather") if rank == 0 else None, 0)
        group.scatter(view("scatter", 1, 5), parts("scatter") if rank == 0 else None, 0)
        group.reduce_scatter(view("reduce_scatter", 1, 5), parts("reduce_scatter"))
        group.all_to_all(parts("all_to_all", 1), parts("all_to_all"))

    ranks.run(does)
    blocks = {name: [[x[p : p + 4] for p in places] for x in xs] for name, xs in before.items()}
    inner = {name: np.concatenate([x[1:5] for x in xs]) for name, xs in before.items()}
    oracle.assert_same(bases["gather"][0][: 4 * n], inner["gather"])
    for rank in range(n):
        got = {name: xs[rank] for name, xs in bases.items()}
        oracle.assert_same(got["all_gather"][: 4 * n], inner["all_gather"])
        oracle.assert_same(
            got["all_gather_single"][2:], np.concatenate([x[:4] for x in before["all_gather"]])
        )
        oracle.assert_same(got["scatter"][1:5], blocks["scatter"][0][rank])
        want = oracle.reduced([b[rank] for b in blocks["reduce_scatter"]], SUM)
        oracle.assert_same(got["reduce_scatter"][1:5], want)
        want = np.concatenate([blocks["all_to_all"][p][rank] for p in range(n)])
        oracle.assert_same(got["all_to_all"][1 : 4 * n + 1], want)


def test_strided_arrays_are_packed_and_unpacked(ranks: Ranks) -> None:
    bases = [x.reshape(4, 3) for x in inputs(ranks, 12)]
    before, turned = copies(bases), copies(bases)

    def does(rank: int, group: Any) -> None:
        assert group.all_reduce(ranks.array(rank, bases[rank][:, 1]), async_op=True).wait(timeout=60)
        group.all_reduce(ranks.array(rank, turned[rank].T))

    ranks.run(does)
    for rank, base in enumerate(bases):
        oracle.assert_same(turned[rank], oracle.reduced(before, SUM))
        oracle.assert_same(base[:, 1].copy(), oracle.reduced([x[:, 1] for x in before], SUM))
        oracle.assert_same(base[:, ::2].copy(), before[rank][:, ::2].copy())


def test_empty_arrays(ranks: Ranks) -> None:
    """Rank 0's block is empty, or all are."""
    n = ranks.size
    given, outs = (
        [oracle.values(r, r, np.dtype("i2")) for r in range(n)],
        [[np.zeros(r, "i2") for r in range(n)] for _ in range(n)],
    )

    def does(rank: int, group: Any) -> None:
        empty, mine = ranks.array(rank, np.zeros(0, "i2")), ranks.array(rank, given[rank])
        takes = ranks.arrays(rank, outs[rank])
        group.all_reduce(empty)
        group.broadcast(ranks.array(rank, np.zeros((0, 3), "f4")), 0)
        group.reduce_scatter(empty, [empty] * n)
        group.all_gather([empty] * n, empty)
        group.scan(empty)
        group.all_gather(takes, mine)
        group.gather(mine, takes if rank == n - 1 else None, n - 1)
        group.scatter(mine, takes if rank == n - 1 else None, n - 1)
        blocks = [ranks.array(rank, np.full(r, rank, "i2")) for r in range(n)]
        group.all_to_all([ranks.array(rank, np.zeros(rank, "i2")) for _ in range(n)], blocks)

    ranks.run(does)
    for mine in outs:
        oracle.assert_same(np.concatenate(mine), np.concatenate(given))


def test_undefined_operations_are_refused_and_the_group_stays_usable(ranks: Ranks) -> None:
    def does(rank: int, group: Any) -> None:
        for op, dtype, message in (
            (ReduceOp.PREMUL_SUM(2), "i4", "PREMUL_SUM takes"),
            (ReduceOp.BAND, "f4", "not defined for dtype"),
        ):
            with pytest.raises(ArrayError, match=message):
                group.all_reduce(ranks.array(rank, np.ones(3, dtype)), op)
        group.all_reduce(ranks.array(rank, np.ones(3, "i4")))

    ranks.run(does)
