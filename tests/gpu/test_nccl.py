"""Every operation of the NCCL carrier on a fake NCCL, against the oracle; ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import pytest

from fastcoll import ReduceOp
from fastcoll.core.operation import Operation
from fastcoll.errors import ArrayError, UnavailableError
from fastcoll.gpu.nccl import blocks

from .nccl_world import Ranks, world

Array = np.ndarray[Any, Any]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SOME = [np.dtype(name) for name in ("f4", "i2", "c8", "?")] + [BFLOAT16]


@pytest.fixture(scope="module", params=[1, 2, 5])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with world(request.param) as made:
        yield made


def inputs(ranks: Ranks, count: int, dtype: np.dtype, salt: int = 0) -> list[Array]:
    return [oracle.values(rank, count, dtype, salt) for rank in range(ranks.size)]


def assert_reduced(got: Array, want: Array, op: ReduceOp, what: Any) -> None:
    """Compare bit by bit, except float16 and bfloat16, whose sums NCCL rounds, and float32, which it averages."""
    if got.dtype in oracle.HALVES or op.name in ("AVG", "PREMUL_SUM"):
        rtol = 0.05 if got.dtype.itemsize == 2 else 1e-5
        np.testing.assert_allclose(got.astype("c16"), want.astype("c16"), rtol, 0.06, err_msg=str(what))
    else:
        oracle.assert_same(got, want, what)


def test_all_reduce_of_every_operation_and_dtype(ranks: Ranks) -> None:
    cases = [(op, dtype) for dtype in oracle.DTYPES for op in oracle.ops_for(dtype)]
    if ranks.size > 4:  # the most arrays that the fake kernels average
        cases = [
            case for case in cases if case[0] is not ReduceOp.AVG or case[1].name not in ("int16", "uint16")
        ]
    hosts = [[x.copy() for x in inputs(ranks, 7, dtype)] for _, dtype in cases]

    def does(rank: int, group: Any) -> None:
        for (op, _), host in zip(cases, hosts, strict=True):
            group.all_reduce(ranks.array(rank, host[rank]), op)

    ranks.run(does)
    for (op, dtype), host in zip(cases, hosts, strict=True):
        want = oracle.reduced(inputs(ranks, 7, dtype), op)
        for got in host:
            assert_reduced(got, want, op, (op, dtype))


def test_min_and_max_propagate_nan(ranks: Ranks) -> None:
    hosts = [np.array([np.nan if rank == 0 else 1.0, rank], np.float32) for rank in range(ranks.size)]
    ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, hosts[rank]), ReduceOp.MAX))
    for host in hosts:
        assert np.isnan(host[0])
        assert host[1] == ranks.size - 1


def test_large_arrays_are_split_into_segments_and_blocks(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "SCRATCH", 4000)
    monkeypatch.setattr(blocks, "DIVIDED", 100)
    everybody = inputs(ranks, 3001, np.dtype("i2"))
    hosts = [x.copy() for x in everybody]
    ranks.run(lambda rank, group: group.all_reduce(ranks.array(rank, hosts[rank])))
    for host in hosts:
        oracle.assert_same(host, oracle.reduced(everybody, ReduceOp.SUM))


def test_a_users_function_in_rank_order(ranks: Ranks) -> None:
    first = ReduceOp.custom(lambda a, b: a, "first")
    for dtype in (np.dtype("f4"), np.dtype("i2")):
        hosts = [x.copy() for x in inputs(ranks, 5, dtype)]
        ranks.run(lambda rank, group, hosts=hosts: group.all_reduce(ranks.array(rank, hosts[rank]), first))
        for host in hosts:
            oracle.assert_same(host, inputs(ranks, 5, dtype)[0])


@pytest.mark.parametrize("name", ["f4", "f2", "f8", "c8", "complex factor"])
def test_premul_sum_multiplies_by_each_ranks_factor(ranks: Ranks, name: str) -> None:
    dtype = np.dtype("c8" if name == "complex factor" else name)
    factors = [(0.5 + rank) * (1j if name == "complex factor" else 1) for rank in range(ranks.size)]
    everybody = inputs(ranks, 6, dtype)
    wide = np.dtype("c16" if dtype.kind == "c" else "f8")
    want = sum(x.astype(wide) * factor for x, factor in zip(everybody, factors, strict=True)).astype(dtype)
    hosts = [x.copy() for x in everybody]
    scans = [x.copy() for x in everybody]

    def does(rank: int, group: Any) -> None:
        group.all_reduce(ranks.array(rank, hosts[rank]), ReduceOp.PREMUL_SUM(factors[rank]))
        group.scan(ranks.array(rank, scans[rank]), ReduceOp.PREMUL_SUM(factors[rank]))

    ranks.run(does)
    for host in (*hosts, scans[-1]):
        assert_reduced(host, want, ReduceOp.PREMUL_SUM(1), name)


@pytest.mark.parametrize("dtype", SOME, ids=str)
def test_reduce_scan_and_exscan(ranks: Ranks, dtype: np.dtype) -> None:
    everybody, root = inputs(ranks, 6, dtype), ranks.size - 1
    reduced, scans, exscans = ([x.copy() for x in everybody] for _ in range(3))

    def does(rank: int, group: Any) -> None:
        group.reduce(ranks.array(rank, reduced[rank]), root)
        group.scan(ranks.array(rank, scans[rank]))
        group.exscan(ranks.array(rank, exscans[rank]))

    ranks.run(does)
    for rank, mine in enumerate(everybody):
        total = oracle.reduced(everybody, ReduceOp.SUM)
        assert_reduced(reduced[rank], total if rank == root else mine, ReduceOp.SUM, rank)
        assert_reduced(scans[rank], oracle.reduced(everybody[: rank + 1], ReduceOp.SUM), ReduceOp.SUM, rank)
        want = oracle.reduced(everybody[:rank], ReduceOp.SUM) if rank else mine
        assert_reduced(exscans[rank], want, ReduceOp.SUM, rank)


@pytest.mark.parametrize("dtype", SOME, ids=str)
@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_reduce_scatter(ranks: Ranks, dtype: np.dtype, uneven: bool) -> None:
    sizes = [3 * (1 + uneven * rank) for rank in range(ranks.size)]
    given = [[oracle.values(r, n, dtype, p) for p, n in enumerate(sizes)] for r in range(ranks.size)]
    outs = [np.empty(n, dtype) for n in sizes]

    def does(rank: int, group: Any) -> None:
        group.reduce_scatter(ranks.array(rank, outs[rank]), [ranks.array(rank, x) for x in given[rank]])

    ranks.run(does)
    wants = [oracle.reduced([blocks[rank] for blocks in given], ReduceOp.SUM) for rank in range(ranks.size)]
    for rank, out in enumerate(outs):
        assert_reduced(out, wants[rank], ReduceOp.SUM, rank)
        out[:] = 0
    wholes = [np.concatenate(blocks) for blocks in given]
    ranks.run(
        lambda rank, group: group.reduce_scatter_single(
            ranks.array(rank, outs[rank]), ranks.array(rank, wholes[rank]), input_split_sizes=sizes
        )
    )
    for rank, out in enumerate(outs):
        assert_reduced(out, wants[rank], ReduceOp.SUM, rank)


@pytest.mark.parametrize("dtype", oracle.MOVABLE[-5:], ids=str)
def test_broadcast(ranks: Ranks, dtype: np.dtype) -> None:
    root = ranks.size // 2
    hosts = [x.copy() for x in inputs(ranks, 5, dtype)]
    ranks.run(lambda rank, group: group.broadcast(ranks.array(rank, hosts[rank]), root))
    for host in hosts:
        oracle.assert_same(host, inputs(ranks, 5, dtype)[root])


def test_all_gather_into_one_array(ranks: Ranks) -> None:
    given, outs = (
        inputs(ranks, 3, np.dtype("i4")),
        [np.zeros(3 * ranks.size, "i4") for _ in range(ranks.size)],
    )
    ranks.run(
        lambda rank, group: group.all_gather_single(
            ranks.array(rank, outs[rank]), ranks.array(rank, given[rank])
        )
    )
    for out in outs:
        oracle.assert_same(out, np.concatenate(given))


@pytest.mark.parametrize("uneven", [0, 1], ids=["even", "uneven"])
def test_gathers_scatter_and_all_to_all(ranks: Ranks, uneven: int) -> None:
    n, root, dtype = ranks.size, ranks.size - 1, np.dtype("c16")
    given = [oracle.values(rank, 2 + uneven * rank, dtype) for rank in range(n)]
    everything = [[np.zeros_like(x) for x in given] for _ in range(n)]
    gathered, scattered = ([np.zeros_like(x) for x in given] for _ in range(2))
    gives = [[oracle.values(r, 1 + uneven * (r + p), dtype, p) for p in range(n)] for r in range(n)]
    takes = [[np.zeros(1 + uneven * (r + p), dtype) for p in range(n)] for r in range(n)]

    def does(rank: int, group: Any) -> None:
        mine, at_root = ranks.array(rank, given[rank]), gathered if rank == root else []
        group.all_gather([ranks.array(rank, x) for x in everything[rank]], mine)
        group.gather(mine, [ranks.array(rank, x) for x in at_root] or None, root)
        group.scatter(
            ranks.array(rank, scattered[rank]), [ranks.array(rank, x) for x in at_root] or None, root
        )
        taken, blocks = ([ranks.array(rank, x) for x in side[rank]] for side in (takes, gives))
        group.all_to_all(taken, blocks)

    ranks.run(does)
    for rank, mine in enumerate(given):
        oracle.assert_same(np.concatenate(everything[rank]), np.concatenate(given))
        oracle.assert_same(gathered[rank], mine)
        oracle.assert_same(scattered[rank], mine)
        for peer, block in enumerate(takes[rank]):
            oracle.assert_same(block, gives[peer][rank])


def test_coalesced_calls(ranks: Ranks) -> None:
    sizes = [3, 1, 5]
    sums = [[oracle.values(r, n, np.dtype("f4"), n) for n in sizes] for r in range(ranks.size)]
    lists = [[[np.zeros(n, "f4") for _ in sums] for n in sizes] for _ in sums]
    given = [[x.copy() for x in xs] for xs in sums]

    def does(rank: int, group: Any) -> None:
        group.all_reduce_coalesced([ranks.array(rank, x) for x in sums[rank]])
        outs = [[ranks.array(rank, x) for x in each] for each in lists[rank]]
        group.all_gather_coalesced(outs, [ranks.array(rank, x) for x in given[rank]])

    ranks.run(does)
    for k in range(len(sizes)):
        want = oracle.reduced([xs[k] for xs in given], ReduceOp.SUM)
        for rank in range(ranks.size):
            oracle.assert_same(sums[rank][k], want)
            for r, out in enumerate(lists[rank][k]):
                oracle.assert_same(out, given[r][k])


def overlapping(base: Array, *starts: int, length: int = 4) -> Sequence[Array]:
    return [base[start : start + length] for start in starts]


def test_inputs_and_outputs_may_overlap(ranks: Ranks) -> None:
    n = ranks.size
    bases = {
        name: [oracle.values(r, 4 * n + 2, np.dtype("i4")) for r in range(n)]
        for name in ("gather", "all_gather", "scatter", "reduce_scatter", "all_to_all", "shorts")
    }
    before = {name: [x.copy() for x in xs] for name, xs in bases.items()}
    places = [4 * r for r in range(n)]

    def parts(name: str, rank: int, shift: int = 0) -> list[Any]:
        # Views of one base, which is on the GPU.
        base = bases[name][rank]
        ranks.array(rank, base)
        return [ranks.array(rank, view) for view in overlapping(base, *[p + shift for p in places])]

    def does(rank: int, group: Any) -> None:
        def single(name: str) -> Any:
            return ranks.array(rank, bases[name][rank][1:5])

        group.all_gather(parts("all_gather", rank), single("all_gather"))
        group.gather(single("gather"), parts("gather", rank) if rank == 0 else None, 0)
        group.scatter(single("scatter"), parts("scatter", rank) if rank == 0 else None, 0)
        group.reduce_scatter(single("reduce_scatter"), parts("reduce_scatter", rank))
        group.all_to_all(parts("all_to_all", rank, 1), parts("all_to_all", rank))

    ranks.run(does)
    blocks = {name: [[x[p : p + 4] for p in places] for x in xs] for name, xs in before.items()}
    inner = {name: [x[1:5] for x in xs] for name, xs in before.items()}
    for rank in range(n):
        oracle.assert_same(bases["all_gather"][rank][: 4 * n], np.concatenate(inner["all_gather"]))
        oracle.assert_same(bases["scatter"][rank][1:5], blocks["scatter"][0][rank])
        want = oracle.reduced([b[rank] for b in blocks["reduce_scatter"]], ReduceOp.SUM)
        oracle.assert_same(bases["reduce_scatter"][rank][1:5], want)
        want = np.concatenate([blocks["all_to_all"][p][rank] for p in range(n)])
        oracle.assert_same(bases["all_to_all"][rank][1 : 4 * n + 1], want)
    oracle.assert_same(bases["gather"][0][: 4 * n], np.concatenate(inner["gather"]))


@pytest.mark.parametrize("name", ["f4", "i2"])
def test_reduce_scatter_into_the_last_of_blocks_of_different_sizes(ranks: Ranks, name: str) -> None:
    sizes = [3 + rank for rank in range(ranks.size)]
    bases = inputs(ranks, sum(sizes) + 1, np.dtype(name))
    before = [np.split(x.copy()[:-1], np.cumsum(sizes)[:-1]) for x in bases]

    def does(rank: int, group: Any) -> None:
        ranks.array(rank, bases[rank])
        blocks = np.split(bases[rank][:-1], np.cumsum(sizes)[:-1])
        out = bases[rank][-sizes[rank] :]
        group.reduce_scatter(ranks.array(rank, out), [ranks.array(rank, x) for x in blocks])

    ranks.run(does)
    for rank, base in enumerate(bases):
        want = oracle.reduced([blocks[rank] for blocks in before], ReduceOp.SUM)
        oracle.assert_same(base[-sizes[rank] :], want)


@pytest.mark.parametrize("name", ["f4", "i2"])
def test_the_hooks_take_outputs_that_overlap_inputs(
    ranks: Ranks, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hooks allow more overlaps than the public calls; only the root's output is written."""
    monkeypatch.setattr(blocks, "SCRATCH", 4)  # in several segments
    bases = [[oracle.values(r, 14, np.dtype(name), k) for r in range(ranks.size)] for k in range(2)]
    before = [[x.copy() for x in xs] for xs in bases]

    def does(rank: int, group: Any) -> None:
        def taken(k: int, start: int) -> Any:
            ranks.array(rank, bases[k][rank])
            return group.import_array(
                ranks.array(rank, bases[k][rank][start : start + 12]), writable=True
            ).array

        plan = group.devices().plan
        plan(Operation("reduce", (taken(0, 1),), (taken(0, 0),), ReduceOp.SUM))()
        plan(Operation("scan", (taken(1, 1),), (taken(1, 0),), ReduceOp.SUM))()

    ranks.run(does)
    for rank in range(ranks.size):
        want = (
            oracle.reduced([x[:12] for x in before[0]], ReduceOp.SUM) if rank == 0 else before[0][rank][1:13]
        )
        oracle.assert_same(bases[0][rank][1:13], want, rank)
        oracle.assert_same(bases[0][rank][[0, 13]], before[0][rank][[0, 13]], rank)
        want = oracle.reduced([x[:12] for x in before[1][: rank + 1]], ReduceOp.SUM)
        oracle.assert_same(bases[1][rank][1:13], want, rank)


def test_strided_arrays_are_packed_and_unpacked(ranks: Ranks) -> None:
    bases = [oracle.values(rank, 12, np.dtype("f4")).reshape(4, 3) for rank in range(ranks.size)]
    before, turned = ([x.copy() for x in bases] for _ in range(2))

    def does(rank: int, group: Any) -> None:
        group.all_reduce(ranks.array(rank, bases[rank][:, 1]), async_op=True).wait()
        group.all_reduce(ranks.array(rank, turned[rank].T))

    ranks.run(does)
    for rank, base in enumerate(bases):
        oracle.assert_same(turned[rank], oracle.reduced(before, ReduceOp.SUM))
        oracle.assert_same(base[:, 1].copy(), oracle.reduced([x[:, 1] for x in before], ReduceOp.SUM))
        oracle.assert_same(base[:, ::2].copy(), before[rank][:, ::2].copy())


def test_empty_arrays_and_ranks_that_may_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    given = [oracle.values(rank, rank, np.dtype("i2")) for rank in range(3)]
    outs = [[np.zeros(n, "i2") for n in range(3)] for _ in given]
    with world(3, devices=1, version=23000) as ranks:

        def does(rank: int, group: Any) -> None:
            empty, mine = ranks.array(rank, np.zeros(0, "i2")), ranks.array(rank, given[rank])
            takes = [ranks.array(rank, x) for x in outs[rank]]
            group.all_reduce(empty)
            group.reduce_scatter(empty, [empty] * 3)
            group.all_gather([empty] * 3, empty)
            group.scan(empty)
            group.all_gather(takes, mine)
            group.gather(mine, takes if rank == 2 else None, 2)
            group.scatter(mine, takes if rank == 2 else None, 2)
            blocks = [ranks.array(rank, np.full(r, rank, "i2")) for r in range(3)]
            group.all_to_all([ranks.array(rank, np.zeros(rank, "i2")) for _ in range(3)], blocks)

        ranks.run(does)
    for rank in range(3):
        oracle.assert_same(np.concatenate(outs[rank]), np.concatenate(given))


def test_an_average_of_more_ranks_than_our_kernels_take_is_refused() -> None:
    def does(rank: int, group: Any) -> None:
        x = ranks.array(rank, hosts[rank])
        with pytest.raises(UnavailableError, match="up to 4 ranks, this one has 8; use SUM"):
            group.all_reduce(x, ReduceOp.AVG)
        group.all_reduce(x)  # three kernels, one after the other

    hosts = [np.full(3, 1 << rank, "i2") for rank in range(8)]
    with world(8) as ranks:
        ranks.run(does)
    assert all((host == 255).all() for host in hosts)


def test_undefined_operations_are_refused_and_the_group_stays_usable(ranks: Ranks) -> None:
    def does(rank: int, group: Any) -> None:
        x = ranks.array(rank, np.ones(3, "i4"))
        for op in (ReduceOp.PREMUL_SUM(2), ReduceOp.BAND):
            wrong = ranks.array(rank, np.ones(3, "f4")) if op is ReduceOp.BAND else x
            with pytest.raises(ArrayError, match=r"PREMUL_SUM takes|not defined for dtype"):
                group.all_reduce(wrong, op)
        group.all_reduce(x)

    ranks.run(does)
