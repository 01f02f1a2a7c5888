"""Inputs and expected results of operations, against operations done by hand."""

import numpy as np
import pytest
from versus.cells import Place, absmax, make_buffers, ping_pong, prepare, wrong
from versus.plan import DTYPES, LIMITS, SHAPES, UPDATES, Cell
from versus.sides.limit import _fold

RANKS = 4
COUNT = 4 * 7


def world(operation, ranks=RANKS, dtype="float32"):
    """Return the prepared places and buffers of all ranks."""
    cell = Cell(operation, COUNT, COUNT * 4, 1, 1)
    places = [Place(rank, ranks, np.dtype(dtype)) for rank in range(ranks)]
    buffers = [make_buffers(cell, place) for place in places]
    for place, mine in zip(places, buffers, strict=True):
        prepare(cell, mine, place)
    return cell, places, buffers


def parts(x):
    return x.reshape(RANKS, -1)


def by_hand(operation, buffers):
    """Carry out the operation on the arrays of all ranks at once."""
    xs = [mine.x.copy() for mine in buffers]
    reduces = ("all_reduce", "reduce", "reduce_scatter", *UPDATES)
    total = np.sum(xs, axis=0) if operation in reduces else None
    for rank, (x, out) in enumerate(buffers):
        if operation in ("all_reduce", "reduce", *UPDATES):
            out[:] = total
        elif operation == "reduce_scatter":
            out[:] = parts(total)[rank]
        elif operation == "custom":
            out[:] = absmax(absmax(absmax(xs[0], xs[1]), xs[2]), xs[3])
        elif operation == "broadcast":
            out[:] = xs[0]
        elif operation in ("all_gather", "gather"):
            out[:] = np.concatenate(xs)
        elif operation == "scatter":
            out[:] = parts(xs[0])[rank]
        elif operation == "all_to_all":
            out[:] = np.concatenate([parts(other)[rank] for other in xs])
        elif operation == "send_recv":
            out[:] = xs[rank ^ 1]
        elif operation == "fold":
            _fold(out, list(parts(x)))
        elif operation != "barrier":
            out[:] = x


@pytest.mark.parametrize("operation", [*SHAPES, *LIMITS])
def test_right_results_and_wrong_ones(operation):
    """A call that does nothing, the right result, and a result with one wrong element."""
    cell, places, buffers = world(operation)

    def errors():
        return [wrong(cell, mine, place) for mine, place in zip(buffers, places, strict=True)]

    assert (sum(errors()) > 0) == (operation not in ("barrier", "stream"))
    by_hand(operation, buffers)
    assert errors() == [0] * RANKS
    if operation in SHAPES and operation != "barrier":
        buffers[0].out[3] += 1
        assert errors() == [1] + [0] * (RANKS - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_numbers_fit_into_every_dtype(dtype):
    for operation in ("all_reduce", "custom", "all_to_all"):
        cell, places, buffers = world(operation, dtype=dtype)
        by_hand(operation, buffers)
        assert wrong(cell, buffers[3], places[3]) == 0


def test_ping_pong_is_between_neighbours_and_in_turn():
    def exchange(other):
        return lambda: calls.append(f"send {other}"), lambda: calls.append(f"recv {other}")

    calls = []
    for rank in range(3):
        ping_pong(rank, 3, exchange)()
    assert calls == ["send 1", "recv 1", "recv 0", "send 0"]
