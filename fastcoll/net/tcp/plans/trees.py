"""Binomial trees for rooted operations: log2 n steps, for data that is small.

Ranks are counted from the root. In step k of gathering, a rank whose number is an odd multiple of 2**k hands what it
has gathered, of the 2**k ranks from itself on, to the rank 2**k before it; handing out goes the other way round.
"""

from __future__ import annotations

from .shape import Shape, array
from .table import SCRATCH, Plan, Rows


def _steps(size: int) -> int:
    return (size - 1).bit_length()


def broadcast(shape: Shape) -> Plan:
    """The whole array in each step."""
    rows, x, number = Rows(), (array(0), 0), (shape.rank - shape.root) % shape.size
    for step in range(_steps(shape.size)):
        other = number ^ 1 << step
        peer = (other + shape.root) % shape.size
        if number < 1 << step and other < shape.size:
            rows.send(step, peer, x, shape.total)
        elif number >> step == 1:
            rows.recv(step, peer, x, shape.total)
    return rows.plan("tree")


def reduce(shape: Shape) -> Plan:
    """The whole array in each step. Adjacent ranks are combined, in the order from the root around.

    In an ordered call they are combined in rank order, by rank 0, which sends the root the result.
    """
    rows, x, total = Rows(), (array(1), 0), shape.total
    head = 0 if shape.ordered else shape.root
    number, steps = (shape.rank - head) % shape.size, _steps(shape.size)
    result = (array(0), 0) if shape.rank == head == shape.root else (SCRATCH, 2 * total)
    current = x
    for step in range(steps):
        other = number ^ 1 << step
        peer, landing = (other + head) % shape.size, (SCRATCH, step % 2 * total)
        if number >> step & 1:
            rows.send(step, peer, current, total)
            break
        if other < shape.size:
            rows.recv(step, peer, landing, total)
            rows.fold(step + 1, result, total, [current, landing])
            current = result
    if head != shape.root and shape.rank == head:
        rows.send(steps, shape.root, current, total)
    elif head != shape.root and shape.is_root:
        rows.recv(steps, head, (array(0), 0), total)
    return rows.plan("tree", 3 * total)


def gather(shape: Shape) -> Plan:
    """Parts of equal size, handed on through scratch at most log2 n times."""
    rows, own = Rows(), shape.nbytes[0]
    number, steps = (shape.rank - shape.root) % shape.size, _steps(shape.size)
    x = (array(shape.size if shape.is_root else 0), 0)
    rows.copy(0, (SCRATCH, 0), x, own)
    for step in range(steps):
        other = number ^ 1 << step
        peer, count = (other + shape.root) % shape.size, _handed(shape, max(number, other), step)
        if number >> step & 1:
            rows.send(step, peer, (SCRATCH, 0), count * own)
            break
        rows.recv(step, peer, (SCRATCH, own << step), count * own)
    if shape.is_root:
        for place in range(shape.size):
            rows.copy(steps, (array((place + shape.root) % shape.size), 0), (SCRATCH, place * own), own)
    return rows.plan("tree", _held(shape) * own)


def scatter(shape: Shape) -> Plan:
    """Blocks of equal size, handed on through scratch at most log2 n times."""
    rows, own = Rows(), shape.nbytes[0]
    number, steps = (shape.rank - shape.root) % shape.size, _steps(shape.size)
    if shape.is_root:
        for place in range(shape.size):
            rows.copy(0, (SCRATCH, place * own), (array(1 + (place + shape.root) % shape.size), 0), own)
    for step in range(steps):
        other, phase = number ^ 1 << step, steps - 1 - step
        peer, count = (other + shape.root) % shape.size, _handed(shape, max(number, other), step)
        if number >> step & 1:
            rows.recv(phase, peer, (SCRATCH, 0), count * own)
            break
        rows.send(phase, peer, (SCRATCH, own << step), count * own)
    rows.copy(steps, (array(0), 0), (SCRATCH, 0), own)
    return rows.plan("tree", _held(shape) * own)


def _handed(shape: Shape, number: int, step: int) -> int:
    """How many ranks' arrays the one that is `number` from the root is handed, or hands over, in a step."""
    return max(min(1 << step, shape.size - number), 0)


def _held(shape: Shape) -> int:
    """How many ranks' arrays a rank has at most: its own and those below it in the tree."""
    number = (shape.rank - shape.root) % shape.size
    return min(number & -number or shape.size, shape.size - number)
