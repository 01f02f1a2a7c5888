"""validate.py: which calls compiled code validates itself, and that calls prepared by Python have the same results."""

from __future__ import annotations

import itertools
import re
import sys
import threading

import numpy as np
import pytest
import rows

import fastcoll as dist
from fastcoll import ArrayError, ReduceOp, UsageError
from fastcoll.compiler.jit import entry
from fastcoll.kernels.primitives import address_of
from fastcoll.kernels.pyobjects import Index, PyObject, integer, object_at
from fastcoll.shm import context_layout as at
from fastcoll.shm.context import BUDGET, CallSpec, ShmContext
from fastcoll.shm.layout import PAGE, Layout
from fastcoll.shm.validate import MEMO_PROBES, memo_slot, spec_of

N = 6  # elements of a block
HEADER = np.zeros(PAGE // 8, np.int64)  # of a segment without sections


class Sub(np.ndarray):
    """A subclass, which compiled code must not accept."""


def in_larger(x, view):
    """Return a copy of an array in part of a larger one."""
    view = view.reshape(x.shape)
    view[...] = x
    return view


def read_only(x):
    x.flags.writeable = False
    return x


FORMS = {
    "plain": lambda x: x,
    "matrix of one row": lambda x: x.reshape(-1, 1),
    "subclass": lambda x: x.view(Sub),
    "strided": lambda x: in_larger(x, np.zeros((x.size, 2), x.dtype)[:, 0]),
    "backwards": lambda x: x[::-1].copy()[::-1],
    "unaligned": lambda x: in_larger(x, np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype)),
    "buffer": memoryview,
}
QUICK = ("plain", "matrix of one row")


@pytest.fixture
def planned(monkeypatch):
    """Entries of the calls that Python has prepared."""
    group, names = dist.GroupMember.WORLD, []
    plan = group.backend.calls.prepared

    def count(entry, *args, **options):
        names.append(entry.name)
        return plan(entry, *args, **options)

    monkeypatch.setattr(group.backend.calls, "prepared", count)
    return names


def copy_back(x, made):
    if isinstance(x, list):
        for pair in zip(x, made, strict=True):
            copy_back(*pair)
    elif isinstance(x, np.ndarray):
        x[...] = np.asarray(made).reshape(x.shape)


PREPARED = "scan exscan all_reduce_coalesced all_gather_coalesced".split()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_array_gives_the_same_result(rank, world_size, name, planned):
    """Python prepares only arrays that need it, and operations that always need it."""

    def change(operation, function):
        def call(*args, **options):
            if "input_split_sizes" in options and name == "matrix of one row":
                return function(*args, **options)  # split sizes count the rows
            del planned[:]
            given = [rows.mapped(lambda x: FORMS[name](x.copy()), x) for x in args]
            work = function(*given, **options)
            if options.get("async_op"):
                work.wait()
            elif operation not in PREPARED:
                assert bool(planned) == (name not in QUICK), operation
            copy_back([*args], given)
            return work

        return call

    rows.run(rank, world_size, N, lambda name, function: function)
    rows.run(rank, world_size, N, change)


INPUTS = {
    "all_gather": 1, "gather": 0, "scatter": 1, "reduce_scatter": 1, "all_to_all": 1, "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1, "all_to_all_single": 1,
}  # fmt: skip


@pytest.mark.ranks(2, 3)
def test_inputs_may_be_read_only_and_outputs_not(rank, world_size, planned):
    def change(name, function):
        def call(*args, **options):
            if name not in INPUTS:
                return function(*args, **options)
            del planned[:]
            frozen = [rows.mapped(lambda x: read_only(x.copy()), x) for x in args]
            which = INPUTS[name]
            function(*[frozen[k] if k == which else x for k, x in enumerate(args)], **options)
            assert not planned, name
            if name != "gather":  # there only the root has outputs
                with pytest.raises(ArrayError, match="read-only"):
                    function(*[x if k == which else frozen[k] for k, x in enumerate(args)], **options)
            dist.barrier()

        return call

    rows.run(rank, world_size, N, lambda name, function: function)
    rows.run(rank, world_size, N, change)


@pytest.mark.ranks(2)
def test_shapes_without_length_and_elements_without_bytes(rank, world_size):
    for shape in ((), (0,), (0, 5), (3, 0), (1, 1, 1, 1)) * 2:
        x = np.full(shape, rank + 1.0)
        dist.all_reduce(x)
        dist.reduce(x, 1)
        dist.broadcast(x, 1)
        assert (x == 6).all()
        outs = [np.zeros(shape), np.zeros(shape)]
        dist.all_gather(outs, np.full(shape, float(rank)))
        dist.all_to_all(outs, [out.copy() for out in outs])
        assert all((out == rank).all() for out in outs)
        dist.scatter(outs[0], [np.full(shape, 5.0), np.full(shape, 6.0)] if rank == 0 else None, 0)
        assert (outs[0] == 5 + rank).all()
    for _ in range(2):
        x, *more = (np.empty(3, "V0") for _ in range(5))
        dist.broadcast(x, 0)
        dist.all_gather(more[:2], x)
        dist.all_to_all(more[:2], more[2:])
        dist.all_gather_into_tensor(np.empty(6, "V0"), x)
        (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    dist.barrier()


@pytest.mark.ranks(2, backend="shm")
def test_an_element_must_fit_into_a_slot(rank, world_size):
    huge = np.dtype([("x", "f8", 40_000)])
    with pytest.raises(ArrayError, match="320000 bytes"):
        dist.reduce_scatter(
            np.zeros(1, huge), [np.zeros(1, huge)] * 2, ReduceOp.custom(lambda a, b: a, "first")
        )
    dist.barrier()


@pytest.mark.ranks(2)
def test_a_dtype_that_is_equal_but_not_the_same(rank, world_size, planned):
    for _ in range(3):
        fresh = np.dtype([("a", "f4"), ("b", "i8")])
        x = np.zeros(4, fresh)
        x["b"] = rank
        dist.broadcast(x, 1)
        assert (x["b"] == 1).all()
        outs = [np.zeros(4, np.dtype([("a", "f4"), ("b", "i8")])) for _ in range(2)]
        dist.all_gather(outs, x)
        assert all((out["b"] == 1).all() for out in outs)
    assert planned


@pytest.mark.ranks(2)
def test_sequences_other_than_lists(rank, world_size):
    x = np.full(3, rank + 1.0)
    for kind in (tuple, list):
        outs = kind(np.zeros(3) for _ in range(2))
        dist.all_gather(outs, x)
        np.testing.assert_array_equal(outs, [[1] * 3, [2] * 3])
        dist.gather(x, outs if rank == 1 else kind(), 1)
        dist.all_to_all(outs, kind([x, x]))
        np.testing.assert_array_equal(outs, [[1] * 3, [2] * 3])
    for call, *arguments in (
        (dist.all_gather_into_tensor, (np.zeros(3), np.zeros(3)), x),
        (dist.reduce_scatter_tensor, x, (x, x)),
        (dist.all_to_all_single, x, (x, x)),
    ):
        with pytest.raises(ArrayError, match="tuple"):
            call(*arguments)
    for wrong in ([], (), [x], [x] * 3, [x, None], [None, None]):
        for call, *arguments in (
            (dist.all_gather, wrong, x),
            (dist.all_to_all, wrong, [x, x]),
            (dist.all_to_all, [x, x], wrong),
        ):
            with pytest.raises((UsageError, ArrayError)):
                call(*arguments)
    dist.barrier()


@pytest.mark.ranks(2)
def test_more_dtypes_and_operations_than_the_memo_holds(rank, world_size):
    """A dtype that the memo has no slot for goes through Python, with the same result."""
    kinds = [np.dtype((np.void, n)) for n in range(1, at.MEMO_ENTRIES + 40)]
    for _ in range(2):
        for dtype in kinds:
            x = np.full(dtype.itemsize, rank + 1, np.uint8).view(dtype)
            dist.broadcast(x, 1)
            assert x.tobytes() == b"\x02" * dtype.itemsize
        for dtype in ("i2", "i4", "f4", "f8"):
            for op, want in ((ReduceOp.SUM, 3), (ReduceOp.PRODUCT, 2), (ReduceOp.MAX, 2), (ReduceOp.MIN, 1)):
                x = np.full(3, rank + 1, dtype)
                dist.all_reduce(x, op)
                assert (x == want).all()


# ---- the memo itself -----------------------------------------------------------------------------------


@entry
def recall(handle: Index, operation: Index, x: PyObject, op: PyObject) -> int:
    """The spec that compiled code finds for a call."""
    c = integer(handle)
    return spec_of(c, c, integer(operation), object_at(x), object_at(op))


class Op:
    """Replaces a ReduceOp, of which the memo has only the address."""


@pytest.fixture
def context():
    return ShmContext(address_of(HEADER), Layout(2, 1024, 2048), 0, share=1)


def test_the_memo_finds_only_what_was_added(context):
    dtypes, ops, expected = [np.dtype((np.void, n)) for n in range(1, 30)], [Op(), Op()], {}
    for operation in (1, 2, 5):
        for n, dtype in enumerate(dtypes[::2]):
            expected[operation, dtype, ops[n % 2]] = what = CallSpec(n, dtype.itemsize)
            context.remember(operation, dtype, ops[n % 2], what)
    found = 0
    for operation, dtype, op in itertools.product((1, 2, 3, 5), dtypes, ops):
        x = np.zeros(1, dtype)
        address = recall.call(context.address, operation, x, op)
        known = expected.get((operation, x.dtype, op))
        assert address in (0, known.address if known else 0)
        found += address != 0
    assert found > len(expected) * 0.9  # all probed entries may be in use
    assert recall.call(context.address, 1, np.zeros(1, dtypes[0]).view(Sub), ops[0]) == 0
    assert recall.call(context.address, 1, [1], ops[0]) == 0


def test_entries_with_the_same_hash(context):
    dtype, ops = np.dtype("f8"), [Op() for _ in range(4000)]
    place = memo_slot.py_func(id(dtype), id(ops[0]), 1, 0)
    same = [op for op in ops if memo_slot.py_func(id(dtype), id(op), 1, 0) == place]
    assert len(same) > MEMO_PROBES
    whats = [CallSpec(n, 8) for n in range(len(same))]
    for op, what in zip(same, whats, strict=True):
        context.remember(1, dtype, op, what)
    found = [recall.call(context.address, 1, np.zeros(1), op) for op in same]
    assert found == [what.address for what in whats[:MEMO_PROBES]] + [0] * (len(same) - MEMO_PROBES)


@pytest.mark.ranks(2)
# NumPy 2.5 deprecates these assignments, and still carries them out. A view would be another array.
@pytest.mark.filterwarnings("ignore:Setting the (dtype|shape):DeprecationWarning")
@pytest.mark.parametrize("how", ["at once", "as a list", "prepared"])
def test_another_threads_assignment_takes_effect_before_or_after_the_call(rank, world_size, how):
    """A new dtype with the old shape would be eight times the bytes, beyond the array."""
    n, stop = 5, threading.Event()
    x, y = np.zeros(n), np.zeros(n)

    def call(x):
        if how == "as a list":
            dist.scatter(y.view(x.dtype), [x, y.view(x.dtype)] if rank == 0 else None, 0)
        elif how == "prepared":
            dist.broadcast(x, 0, async_op=True).wait()
        else:
            dist.broadcast(x, 0)

    def change():
        while not stop.is_set():
            x.dtype = np.int8
            x.shape = (2, 4 * n)
            x.shape = (8 * n,)
            x.dtype = np.float64

    call(x)
    call(x.view("i1"))
    thread, interval, seen = threading.Thread(target=change), sys.getswitchinterval(), set()
    context = dist.group.WORLD.backend.context
    context.words[at.FULL_WAIT + 2] = 10**12  # ns; a call that returns to Python checks the array again
    sys.setswitchinterval(1e-6)
    if rank == 0:
        thread.start()
    try:
        for _ in range(300):
            try:
                call(x)
            except (dist.MismatchError, UsageError, dist.AbortedError) as error:
                # The thread ran between two arguments, or two accesses to an array; the group stays usable.
                seen |= set(re.findall(r"\(\w+, \d+ elements", str(error)))
                dist.barrier()
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        context.words[at.FULL_WAIT + 2] = BUDGET
    if rank == 0:
        thread.join()
    assert seen <= {f"(float64, {n} elements", f"(int8, {8 * n} elements"}
