"""Every call from JAX against NumPy: eager, jitted, with a token; groups. (All reductions: test_conformance_jax.py.)"""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from oracle import assert_same, reduced, values

import fastcoll as dist
from fastcoll.core.point_to_point import PointToPoint
from fastcoll.record.recorder import own

MODES = ("eager", "jit", "token")
ARRAYS = [
    (5000, np.dtype("f4")),
    *((31, each) for each in (oracle.BOOL, *oracle.HALVES, *map(np.dtype, ("f8", "c16")))),
]


def do(jax, mode, function, *arrays, **how):
    """Return a call's result as a NumPy array; it is made twice, by Python and by the C entry point."""
    import fastcoll.jax as fj

    if mode == "token":

        def program(*xs):
            found = function(*xs, token=fj.create_token(), **how)
            return found[0] if isinstance(found, tuple) else found

    else:

        def program(*xs):
            return function(*xs, **how)

    program = program if mode == "eager" else jax.jit(program)
    results = [program(*map(jax.numpy.asarray, arrays)) for _ in range(2)]
    if results[0] is None:
        return None
    first, second = map(np.asarray, results)
    assert first.tobytes() == second.tobytes()
    return first


@pytest.mark.ranks(1, 3, timeout=120)
@pytest.mark.parametrize("mode", MODES)
def test_every_call(rank, world_size, jax, fj, mode):
    for count, dtype in ARRAYS if mode == "jit" else [(1, np.dtype("f4"))]:
        with jax.enable_x64(dtype.name in ("float64", "complex128")):
            every_call(rank, world_size, jax, fj, mode, count, dtype)


@pytest.mark.ranks(2, timeout=180, backend="tcp")
def test_every_call_over_tcp(rank, world_size, jax, fj):
    every_call(rank, 2, jax, fj, "jit", 300_007, np.dtype("f4"))


def every_call(rank, n, jax, fj, mode, count, dtype):
    right, left, last = (rank + 1) % n, (rank - 1) % n, n - 1
    inputs = [values(r, count, dtype, 1) for r in range(n)]
    wholes = [values(r, n * count, dtype, 2).reshape(n, count) for r in range(n)]
    mine = inputs[rank]
    assert_same(do(jax, mode, fj.all_reduce, mine), reduced(inputs, dist.ReduceOp.SUM), "all_reduce")
    found = do(jax, mode, fj.reduce, mine, dst=last)
    assert_same(found, reduced(inputs, dist.ReduceOp.SUM) if rank == last else mine, "reduce")
    assert_same(do(jax, mode, fj.scan, mine), reduced(inputs[: rank + 1], dist.ReduceOp.SUM), "scan")
    assert_same(do(jax, mode, fj.broadcast, mine, src=last), inputs[last], "broadcast")
    assert_same(do(jax, mode, fj.all_gather, mine), np.stack(inputs), "all_gather")
    assert_same(
        do(jax, mode, fj.gather, mine, dst=last), np.stack(inputs) if rank == last else mine, "gather"
    )
    given = wholes[last] if rank == last else np.zeros_like(mine)
    assert_same(do(jax, mode, fj.scatter, given, src=last), wholes[last][rank], "scatter")
    found = do(jax, mode, fj.reduce_scatter, wholes[rank])
    assert_same(found, reduced(wholes, dist.ReduceOp.SUM)[rank], "reduce_scatter")
    found = do(jax, mode, fj.all_to_all, wholes[rank])
    assert_same(found, np.stack([whole[rank] for whole in wholes]), "all_to_all")
    found = do(jax, mode, fj.sendrecv, mine, mine, dst=right, src=left, tag=3)
    assert_same(found, inputs[left], "sendrecv")
    if n > 1 and rank == 0:
        do(jax, mode, fj.send, mine, dst=1)
    elif rank == 1:
        assert_same(do(jax, mode, fj.recv, np.zeros_like(mine), src=0), inputs[0], "recv")
        do(jax, mode, fj.send, mine, dst=0, tag=7)
    if n > 1 and rank == 0:
        assert_same(do(jax, mode, fj.recv, np.zeros_like(mine), tag=7), inputs[1], "recv from any rank")
    do(jax, mode, fj.barrier)


@pytest.mark.ranks(3, timeout=120)
def test_a_first_message_needs_no_other_rank(rank, world_size, jax, fj):
    """Rank 2 calls nothing of JAX before its own message, and the other ranks do not wait for rank 2."""
    x = np.float32([rank, 5])
    if rank == 0:
        do(jax, "jit", fj.send, x, dst=1)
    elif rank == 1:
        assert_same(do(jax, "jit", fj.recv, x, src=0), np.float32([0, 5]))
    dist.barrier()
    ring = {"dst": (rank + 1) % 3, "src": (rank - 1) % 3}
    assert_same(do(jax, "token", fj.sendrecv, x, x, **ring), np.float32([(rank - 1) % 3, 5]))


@pytest.mark.ranks(2, timeout=120)
def test_messages_of_python_and_of_jax_do_not_match(rank, world_size, jax, fj):
    x = np.float32([rank, 5])
    if rank == 0:
        work = dist.isend(x + 1, 1)
        do(jax, "jit", fj.send, x, dst=1)
        work.wait()
    else:  # Python's message arrives before JAX's
        assert_same(do(jax, "jit", fj.recv, x), np.float32([0, 5]))
        got = np.zeros(2, np.float32)
        assert dist.recv(got) == 0
        assert_same(got, np.float32([1, 6]))


@pytest.mark.ranks(2, timeout=120)
def test_messages_of_programs_run_without_python(rank, world_size, jax, fj, monkeypatch):
    python_calls = []
    for name in ("send_apart", "recv_apart"):
        method = getattr(PointToPoint, name)
        monkeypatch.setattr(
            PointToPoint,
            name,
            lambda *args, name=name, method=method: python_calls.append(name) or method(*args),
        )
    there = jax.jit(lambda x: fj.send(x, 1 - rank) or x)
    here = jax.jit(lambda x: fj.recv(x, 1 - rank))
    x = np.zeros(2, np.float32)
    for _ in range(100):
        for program in (there, here) if rank else (here, there):
            program(x).block_until_ready()
        jax.effects_barrier()
    # Python has the first call of each, and those beside other operations: on a busy machine some, but never all.
    assert {*python_calls} == {"send_apart", "recv_apart"}
    assert all(python_calls.count(name) < 100 for name in python_calls)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("mode", MODES)
def test_tags_and_the_status_of_a_message_of_any_tag(rank, world_size, jax, fj, mode):
    other, x, status = 1 - rank, np.float32([rank, 5]), dist.Status()
    if rank == 0:
        do(jax, mode, fj.send, x, dst=1, tag=7)
    else:
        found = do(jax, mode, fj.recv, np.float32([1, 2, 3]), tag=dist.ANY_TAG, status=status)
        assert_same(found, np.float32([0, 5, 3]))
        assert (status.source, status.tag, status.count, status.nbytes) == (0, 7, 2, 8)
    found = do(jax, mode, fj.sendrecv, x, x, dst=other, src=other, tag=rank, recv_tag=dist.ANY_TAG)
    assert_same(found, np.float32([other, 5]))
    found = do(jax, mode, fj.sendrecv, x, x, dst=other, src=other, tag=rank, recv_tag=other)
    assert_same(found, np.float32([other, 5]))

    def loss(x, recv_tag):
        return (fj.sendrecv(x, x, dst=other, src=other, tag=rank, recv_tag=recv_tag) * (rank + 1)).sum()

    for recv_tag in (other, dist.ANY_TAG) if mode == "jit" else ():
        gradient = jax.jit(jax.grad(loss), static_argnums=1)(x, recv_tag)
        assert_same(np.asarray(gradient), np.float32([other + 1] * 2), "grad")


@pytest.mark.ranks(3, timeout=120)
def test_batches_and_derivatives_of_gather_and_scatter(rank, world_size, jax, fj):
    x, root = np.arange(6, dtype=np.float32).reshape(2, 3) + 10 * rank, 1
    alls = [x + 10 * (r - rank) for r in range(3)]
    found = jax.vmap(lambda row: fj.gather(row, root))(x)
    assert_same(np.asarray(found), np.stack(alls, 1) if rank == root else x, "gather")
    given = np.stack(alls, 1) if rank == root else np.zeros_like(x)
    found = jax.vmap(lambda rows: fj.scatter(rows, root))(given)
    assert_same(np.asarray(found), x, "scatter")
    _, tangent = jax.jvp(lambda x: fj.gather(x, root) * 2, (x,), (np.full_like(x, rank),))
    ranks = np.stack([np.full_like(x, 2 * r) for r in range(3)])
    assert_same(np.asarray(tangent), ranks if rank == root else ranks[rank], "jvp")
    with pytest.raises(NotImplementedError, match="gather has a derivative forward alone"):
        jax.grad(lambda x: fj.gather(x, root).sum())(x)


@pytest.mark.ranks(2, timeout=120)
def test_reductions_with_functions_and_factors_and_all_shapes(rank, world_size, jax, fj):
    larger = dist.ReduceOp.custom(lambda a, b: a if abs(a) >= abs(b) else b, "larger")
    x = np.float32([-3, 2]) if rank else np.float32([1, -4])
    assert_same(do(jax, "jit", fj.all_reduce, x, op=larger), np.float32([-3, -4]), "custom")
    scaled = do(jax, "jit", fj.all_reduce, np.float32([1, 2]), op=dist.ReduceOp.PREMUL_SUM(0.5))
    assert_same(scaled, np.float32([1, 2]), "PREMUL_SUM")
    for shape in ((), (0,), (2, 0), (2, 3, 4)):
        assert do(jax, "jit", fj.all_reduce, np.ones(shape, np.float32)).shape == shape
        assert do(jax, "jit", fj.all_gather, np.ones(shape, np.float32)).shape == (2, *shape)


@pytest.mark.ranks(3, timeout=120)
def test_groups_and_ranks_outside_them(rank, world_size, jax, fj):
    group = dist.new_group([0, 2])
    if rank == 1:
        with pytest.raises(dist.UsageError, match="this process is not in the group"):
            fj.all_reduce(np.ones(2), group=group)
    else:
        x = np.float32([rank, 5])
        assert_same(do(jax, "jit", fj.all_reduce, x, group=group), np.float32([2, 10]), "all_reduce")
        assert_same(do(jax, "token", fj.broadcast, x, src=2, group=group), np.float32([2, 5]), "broadcast")
        with pytest.raises(dist.UsageError, match="global rank 1 is not in the group"):
            fj.broadcast(x, src=1, group=group)
        jitted = jax.jit(lambda x: fj.all_reduce(x, group=group))
        jitted(x)
        dist.destroy_process_group(group)
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="was destroyed"):
            jitted(x).block_until_ready()


@pytest.mark.ranks(1, timeout=120)
def test_a_call_with_a_token_runs_even_if_its_result_is_unused(rank, world_size, jax, fj):
    def calls():
        return next(group.calls for group in own().groups if "JAX" in group.name)

    def loss(x):
        fj.barrier(token=fj.create_token())
        return (x * x).sum()

    fj.barrier()
    before = calls()
    jax.jit(jax.grad(jax.checkpoint(loss)))(np.ones(3, np.float32)).block_until_ready()
    assert calls() > before


@pytest.mark.ranks(2, timeout=120)
def test_calls_of_python_may_overtake(rank, world_size, jax, fj):
    slow = jax.jit(
        lambda x: fj.all_reduce(
            jax.lax.fori_loop(0, 100_000, lambda _, v: v + 1.0, x), token=fj.create_token()
        )[0]
    )
    y = slow(np.float32(rank))
    dist.barrier()
    z = np.ones(1, np.float32)
    dist.all_reduce(z)
    assert float(y) == 200_001.0
    assert z[0] == 2


@pytest.mark.long
@pytest.mark.ranks(2, timeout=120)
def test_derivatives_and_batches(rank, world_size, jax, fj):
    x = np.float32([1, 2]) + rank
    total = np.float32([3, 5])

    def loss(x):
        return (fj.all_reduce(x) ** 3).sum()

    def with_token(x):
        return (fj.all_reduce(x, token=fj.create_token())[0] ** 3).sum()

    def looped(x):
        return jax.lax.scan(lambda c, _: (fj.all_reduce(c) / 2, None), x, length=3)[0].sum()

    for what, function, gradient in (
        ("all_reduce", loss, 3 * total**2),
        ("with a token", with_token, 3 * total**2),
        ("checkpoint", jax.checkpoint(loss), 3 * total**2),
        ("AVG", lambda x: (fj.all_reduce(x, dist.ReduceOp.AVG) ** 2).sum(), total / 2),
        ("scan", looped, [0.125, 0.125]),
        ("sendrecv", lambda x: ((rank + 1) * fj.sendrecv(x, x, 1 - rank, 1 - rank)).sum(), [2.0 - rank] * 2),
        ("all_to_all", lambda x: ((rank + 1) * fj.all_to_all(x)).sum(), [1, 2]),
    ):
        for grad in (jax.grad(function), jax.jit(jax.grad(function))):
            assert_same(np.asarray(grad(x)), np.float32(gradient), what)
    y, t = jax.jit(lambda x: jax.jvp(fj.all_reduce, (x,), (x,)))(x)
    assert_same(np.asarray(y), total, "jvp")
    assert_same(np.asarray(t), total, "jvp")
    assert_same(np.asarray(jax.jacfwd(fj.all_reduce)(x)), 2 * np.eye(2, dtype=np.float32), "jacfwd")
    assert_same(np.asarray(jax.jacrev(fj.all_reduce)(x)), np.eye(2, dtype=np.float32), "jacrev")
    (back,) = jax.linear_transpose(fj.all_reduce, x)(x)
    assert_same(np.asarray(back), x, "transpose")
    (again,) = jax.linear_transpose(lambda c: jax.linear_transpose(fj.all_reduce, x)(c)[0], x)(x)
    assert_same(np.asarray(again), total, "transpose of the transpose")
    for function, text in (
        (lambda x: fj.all_reduce(x, dist.ReduceOp.MAX).sum(), "of reductions SUM and AVG"),
        (lambda x: fj.all_gather(x).sum(), "has a derivative forward alone"),
        (lambda x: fj.scan(x, token=fj.create_token())[0].sum(), "leave the token out"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            jax.grad(function)(x)
    with pytest.raises(NotImplementedError, match="no derivative forward"):
        jax.jacfwd(with_token)(x)

    batch = np.arange(12, dtype=np.float32).reshape(2, 2, 3) + rank
    for axis in range(3):
        moved = np.moveaxis(batch, axis, 0)
        alike = jax.jit(jax.vmap(fj.all_reduce, axis))(batch)
        assert_same(np.asarray(alike), 2 * moved + 1 - 2 * rank, "vmap of all_reduce")
        both = np.stack([moved - rank, moved - rank + 1])
        found = jax.vmap(fj.all_gather, axis)(batch)
        assert_same(np.asarray(found), np.moveaxis(both, 0, 1), "vmap of all_gather")
    rows = np.moveaxis(batch, 2, 0)
    found = jax.vmap(fj.reduce_scatter, 2)(batch)
    assert_same(np.asarray(found), (2 * rows + 1 - 2 * rank)[:, rank], "vmap of reduce_scatter")
    found = jax.vmap(fj.all_to_all, 2)(batch)
    sent = np.stack([rows[:, rank] - rank + r for r in range(2)], 1)
    assert_same(np.asarray(found), sent, "vmap of all_to_all")
    chosen = jax.jit(lambda x: jax.lax.cond(x[0] > -1, fj.all_reduce, lambda x: x, x))(x)
    assert_same(np.asarray(chosen), total, "cond")
