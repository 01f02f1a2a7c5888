"""Small data of a group over several nodes: the first rank of each node passes on the data of all ranks of its node.

The ranks have met by nodes (node_meeting.py), so all make the same call. Each rank has *relay memory*, which all ranks
of its node map: `Limits.relayed` bytes for what it gives and, behind them, as many for a result. Only that of the first
rank is used for a result.

    1. Each rank copies what it gives to its relay memory, and signals that in a line (kernels/lines.py).
    2. The node's first rank waits for the lines of all, and reduces or collects their data.
    3. The first ranks of all nodes make the same call among themselves, by a plan as that of any group over TCP. Its
       blocks are those of all ranks of a node.
    4. Each first rank has the result in its relay memory, and signals that in one more line. The others wait for this
       line, and copy what they take.

In a broadcast or scatter, only the root gives data, and the ranks of its node read them from its relay memory.

One copy of each rank's relay memory suffices. A rank writes to its relay memory after the meeting of a call, to which
each rank of the node has come, so each has finished the call before, and no longer reads.

The blocks of all ranks are stored in the order of the nodes, and those of a node in the order of its ranks. Data are
reduced first in each node, in the order of its ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, chain

import numpy as np

from ....core.operations import KINDS
from ....core.partition import Span
from .plan import BUFFER, COPY, FOLD, KIND, NBYTES, OFFSET, RECV, REDUCE, SCRATCH, Location, Plan, Rows, Table
from .shape import CallShape, array, relay

RELAYED = 256 << 10
"""The `Limits.relayed` of a group whose ranks meet by nodes."""
_FOLDED = 4
"""A first rank reduces at most this many times `Limits.relayed`: larger data are divided among the ranks of the node.
With two simulated nodes of four ranks (two cores of an AMD EPYC for all), an all_reduce of 256 KiB takes 0.28 ms if it
is relayed, and 0.66 ms by the internal groups. It has not been measured where each rank has a core."""

Piece = tuple[Location, Location, int]
"""Where data go, where they are, and how many bytes they are."""


class Relaying:
    """One rank's place among the nodes, and the rows of its plan.

    Attributes:
        node, place: number of this rank's node, and of the rank in its node.
        ranks: of this node.
        firsts: the first rank of each node.
        at: by rank, where its block begins if the blocks of all ranks are stored in the order of the nodes.
        sizes: by rank, the bytes of its block.
        spans: by node, the blocks of its ranks.
    """

    def __init__(self, shape: CallShape, inner: Callable[[CallShape], Plan]) -> None:
        self.shape, self._inner, self.rows = shape, inner, Rows()
        self.node, self.place = self.home_of(shape.rank)
        self.ranks, self.firsts = shape.nodes[self.node], [node[0] for node in shape.nodes]
        self.is_first = self.place == 0
        has_all_sizes = KINDS[shape.operation].has_blocks and shape.operation not in _ONE_SIZE
        self.sizes = shape.nbytes if has_all_sizes else shape.nbytes[:1] * shape.size
        order = [*chain(*shape.nodes)]
        begins = accumulate((self.sizes[rank] for rank in order), initial=0)
        self.at = dict(zip(order, begins, strict=False))
        self.spans = [Span(self.at[node[0]], sum(self.sizes[rank] for rank in node)) for node in shape.nodes]
        self.mine, self.scratch = self.spans[self.node], 0

    @property
    def block(self) -> Span:
        """This rank's block in the blocks of its node."""
        rank = self.shape.rank
        return Span(self.at[rank] - self.mine.offset, self.sizes[rank])

    @property
    def total(self) -> int:
        """Bytes of the blocks of all ranks."""
        return sum(self.sizes)

    def home_of(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's node, and its place there."""
        nodes = enumerate(self.shape.nodes)
        return next((number, node.index(rank)) for number, node in nodes if rank in node)

    # ---- locations -----------------------------------------------------------------------------------

    def given(self, place: int, offset: int = 0) -> Location:
        """Return where the rank with this place in the node gives its data."""
        return relay(self.shape.size, place), offset

    def result(self, offset: int = 0) -> Location:
        return relay(self.shape.size, 0), self.shape.limits.relayed + offset

    def take_scratch(self, nbytes: int) -> Location:
        self.scratch += nbytes
        return SCRATCH, self.scratch - nbytes

    def from_blocks(self, target: Callable[[int], Location], first: int) -> list[Piece]:
        """Return the pieces that copy a block for each rank, from array number `first` on."""
        return [(target(self.at[rank]), (array(first + rank), 0), n) for rank, n in enumerate(self.sizes)]

    def to_blocks(self, source: Callable[[int], Location]) -> list[Piece]:
        """Return the pieces that copy a block of each rank to the arrays with these numbers."""
        return [((array(rank), 0), source(self.at[rank]), n) for rank, n in enumerate(self.sizes)]

    # ---- rows ----------------------------------------------------------------------------------------

    def copy(self, phase: int, pieces: Iterable[Piece]) -> None:
        for target, source, nbytes in pieces:
            self.rows.copy(phase, target, source, nbytes)

    def give(self, pieces: Iterable[Piece]) -> None:
        """Copy what this rank gives to its relay memory, and signal that."""
        self.copy(0, pieces)
        self.rows.signal(0, len(self.ranks) + 1 + self.place)

    def wait_for(self, place: int) -> None:
        self.rows.wait(0, len(self.ranks) + 1 + place)

    def give_and_take(self, give: Iterable[Piece], take: Iterable[Piece]) -> Plan:
        """Plan a rank that is not the first of its node; `take` may be empty."""
        self.give(give)
        return self.take(take)

    def take(self, pieces: Iterable[Piece]) -> Plan:
        """Plan to copy from the result of the first rank."""
        if pieces := [*pieces]:
            self.rows.wait(0, 2 * len(self.ranks) + 1)
            self.copy(1, pieces)
        return self.rows.plan()

    def wait_for_all(self) -> None:
        for place in range(1, len(self.ranks)):
            self.wait_for(place)

    def exchange(
        self, nbytes: tuple[int, ...], arrays: list[Location], take: Iterable[Piece], root: int = 0
    ) -> Plan:
        """Plan the call among the first ranks, and then the signal that the result is there; then copy `take`.

        Args:
            nbytes, root: those of the CallShape of the call among the first ranks.
            arrays: where its arrays are.
        """
        shape = self.shape
        limits = shape.limits._replace(payload=0, carried=0, relayed=0)
        call = CallShape(
            shape.operation, len(self.firsts), self.node, nbytes, limits, shape.itemsize, root, shape.ordered
        )
        plan = self._inner(call)
        end = self.rows.include(plan, 1, self.firsts, arrays, self.scratch)
        self.rows.signal(end, 2 * len(self.ranks) + 1)
        self.copy(end, take)
        return self.rows.plan(self.scratch + plan.scratch)


def _all_reduce(r: Relaying) -> Plan:
    nbytes, x = r.shape.total, (array(0), 0)
    if not r.is_first:
        return r.give_and_take([(r.given(r.place), x, nbytes)], [(x, r.result(), nbytes)])
    _reduce_node(r, x)
    return r.exchange((nbytes,), [r.result()], [(x, r.result(), nbytes)])


def _reduce_node(r: Relaying, x: Location) -> None:
    """Reduce the arrays of the node into the result; `x` is that of this rank, the first."""
    r.wait_for_all()
    operands = [x, *(r.given(place) for place in range(1, len(r.ranks)))]
    r.rows.fold(1, r.result(), r.shape.total, operands)


def _reduce(r: Relaying) -> Plan:
    nbytes, out, x = r.shape.total, (array(0), 0), (array(1), 0)
    take = [(out, r.result(), nbytes)] if r.shape.is_root else []
    if not r.is_first:
        return r.give_and_take([(r.given(r.place), x, nbytes)], take)
    _reduce_node(r, x)
    return r.exchange((nbytes,), [r.result()] * 2, take, r.home_of(r.shape.root)[0])


def _broadcast(r: Relaying) -> Plan:
    nbytes, x = r.shape.total, (array(0), 0)
    home, place = r.home_of(r.shape.root)
    data = r.given(place) if r.node == home else r.result()
    take = [] if r.shape.is_root else [(x, data, nbytes)]
    return _from_root(r, [(data, x, nbytes)], take, (nbytes,), [data])


def _scatter(r: Relaying) -> Plan:
    home, place = r.home_of(r.shape.root)
    give = r.from_blocks(lambda offset: r.given(place, offset), 1) if r.shape.is_root else []
    data = [r.result()]
    if r.node == home:
        blocks = [r.given(place, span.offset) for span in r.spans]
        data = [blocks[home], *blocks]
    buffer, offset = data[0]
    take = [((array(0), 0), (buffer, offset + r.block.offset), r.block.nbytes)]
    nbytes = tuple(span.nbytes for span in r.spans) if r.node == home else (r.mine.nbytes,)
    return _from_root(r, give, take, nbytes, data)


def _from_root(
    r: Relaying, give: list[Piece], take: list[Piece], nbytes: tuple[int, ...], data: list[Location]
) -> Plan:
    """Plan a broadcast or scatter: in the root's node, all ranks take from the root's relay memory."""
    home, place = r.home_of(r.shape.root)
    if r.shape.is_root:
        r.give(give)
    elif r.node == home:
        r.wait_for(place)
    if r.is_first:
        return r.exchange(nbytes, data, take, home)
    if r.node != home:
        return r.take(take)
    r.copy(1, take)
    return r.rows.plan()


def _all_gather(r: Relaying) -> Plan:
    x = (array(r.shape.size), 0)
    if not r.is_first:
        return r.give_and_take([(r.given(r.place), x, r.block.nbytes)], r.to_blocks(r.result))
    _collect(r, x)
    outs = [r.result(span.offset) for span in r.spans]
    return r.exchange(tuple(span.nbytes for span in r.spans), [*outs, outs[r.node]], r.to_blocks(r.result))


def _collect(r: Relaying, x: Location) -> None:
    """Copy the data of all ranks of the node to the result; those of this rank, the first, are at `x`."""
    r.wait_for_all()
    for place, rank in enumerate(r.ranks):
        r.rows.copy(1, r.result(r.at[rank]), r.given(place) if place else x, r.sizes[rank])


def _gather(r: Relaying) -> Plan:
    home, _ = r.home_of(r.shape.root)
    x = (array(r.shape.size if r.shape.is_root else 0), 0)
    take = r.to_blocks(r.result) if r.shape.is_root else []
    if not r.is_first:
        return r.give_and_take([(r.given(r.place), x, r.block.nbytes)], take)
    _collect(r, x)
    outs = [r.result(span.offset) for span in r.spans]
    if r.node != home:
        return r.exchange((r.mine.nbytes,), [outs[r.node]], take, home)
    return r.exchange(tuple(span.nbytes for span in r.spans), [*outs, outs[home]], take, home)


def _reduce_scatter(r: Relaying) -> Plan:
    give = r.from_blocks(lambda offset: r.given(r.place, offset), 1)
    take = [((array(0), 0), r.result(r.block.offset), r.block.nbytes)]
    if not r.is_first:
        return r.give_and_take(give, take)
    r.copy(0, give)
    r.wait_for_all()
    buffer, begin = r.take_scratch(r.total)
    r.rows.fold(1, (buffer, begin), r.total, [r.given(place) for place in range(len(r.ranks))])
    blocks = [(buffer, begin + span.offset) for span in r.spans]
    return r.exchange(tuple(span.nbytes for span in r.spans), [r.result(), *blocks], take)


def _all_to_all(r: Relaying) -> Plan:
    """Blocks from a node are in the order of their givers, and those of a giver in the order of their takers."""
    size, nodes = r.shape.size, r.shape.nodes
    give = r.from_blocks(lambda offset: r.given(r.place, offset), size)
    lengths = [len(node) * r.mine.nbytes for node in nodes]
    begins = [*accumulate(lengths, initial=0)]
    take = [
        ((array(giver), 0), r.result(begin + place * r.mine.nbytes + r.block.offset), r.block.nbytes)
        for begin, node in zip(begins, nodes, strict=False)
        for place, giver in enumerate(node)
    ]
    if not r.is_first:
        return r.give_and_take(give, take)
    r.copy(0, give)
    r.wait_for_all()
    blocks = []
    for span in r.spans:
        parts = [r.take_scratch(span.nbytes) for _ in r.ranks]
        r.copy(1, [(part, r.given(place, span.offset), span.nbytes) for place, part in enumerate(parts)])
        blocks.append(parts[0])
    sent = (len(r.ranks) * span.nbytes for span in r.spans)
    return r.exchange((*lengths, *sent), [*map(r.result, begins[:-1]), *blocks], take)


_PLANS: dict[str, Callable[[Relaying], Plan]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
_ONE_SIZE = frozenset(name for name in _PLANS if KINDS[name].is_by_pair)
"""Kinds whose blocks must have one size: no rank knows the sizes of all blocks."""


def is_relayed(shape: CallShape) -> bool:
    """Return whether the data of a call are relayed; if only some ranks know all sizes, provided that all are equal.

    Reductions in rank order are relayed only if the ranks are numbered node by node.
    """
    if shape.operation not in _PLANS or not shape.limits.relayed or not any(shape.nbytes):
        return False
    if shape.ordered and [*chain(*shape.nodes)] != [*range(shape.size)]:
        return False
    most, largest = shape.limits.relayed, max(map(len, shape.nodes))
    if KINDS[shape.operation].reduces:
        return shape.total <= min(most, _FOLDED * most // largest)
    if shape.operation not in _ONE_SIZE:
        return shape.total <= most
    takers = largest if shape.operation == "all_to_all" else 1
    return len({*shape.nbytes}) == 1 and shape.nbytes[0] * shape.size * takers <= most


def relayed(shape: CallShape, inner: Callable[[CallShape], Plan]) -> Plan:
    """Plan a call whose data are relayed; `inner` plans the call among the first ranks of the nodes."""
    return _PLANS[shape.operation](Relaying(shape, inner))


def parts_written(shape: CallShape, table: Table) -> list[Span]:
    """Return the parts of this rank's relay memory to which a plan writes: of what it gives, and of the result."""
    own = relay(shape.size, next((node.index(shape.rank) for node in shape.nodes if shape.rank in node), 0))
    rows = table[(table[:, BUFFER] == own) & np.isin(table[:, KIND], (COPY, FOLD, RECV, REDUCE))]
    half = shape.limits.relayed
    parts = [rows[rows[:, OFFSET] < half], rows[rows[:, OFFSET] >= half]]
    ends = [int((part[:, OFFSET] + part[:, NBYTES]).max(initial=0)) for part in parts]
    return [Span(begin, end - begin) for begin, end in zip((0, half), ends, strict=True) if end > 0]
