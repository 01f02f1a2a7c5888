"""A call in a traced program as data (`Site`), and how a group carries it out (`CallKind`).

JAX traces a call once and runs it often, so all of this is computed during tracing. A compiled program refers to the
call by a number and not by an address, because JAX may keep the program on disk, and run it in another process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.imported import ImportedArray
from ..core import operations
from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.operands import ANY_TAG, JAX_TAGS, wildcard_of
from ..core.reduce_op import ReduceOp
from ..errors import FastcollError
from ..kernels.call_frames import APART, GIVEN, IN_PLACE, NO_ARRAY, TAKEN

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Site:
    """The arguments of one call, except its arrays.

    Attributes:
        group: the user's group; None: the default group at the time of the run.
        size: how many ranks the group has.
        dst, src: group ranks; a `src` of None is any rank.
        off_root: marks a gather or scatter on a rank that is not its root.
        tag, recv_tag: a message is sent with `tag`, and received with `recv_tag`, which may be ANY_TAG.
        status: filled by a receive.
        token: whether the last input and the last output are tokens, which order the call; if False, a JAX effect
            orders it.
        tangent: marks a call that never runs; only its transpose runs.
        transposed: marks the transpose of an all_reduce, which returns its input.
    """

    kind: str
    group: ProcessGroup | None
    size: int
    op: ReduceOp | None = None
    dst: int = 0
    src: int | None = 0
    off_root: bool = False
    tag: int = 0
    recv_tag: int = 0
    status: Status | None = None
    token: bool = False
    tangent: bool = False
    transposed: bool = False

    @property
    def traits(self) -> CallKind:
        """The properties that this call shares with all calls of its kind."""
        return OFF_ROOT[self.kind] if self.off_root else KINDS[self.kind]

    def __repr__(self) -> str:
        what = f"{self.kind} {self.op.name}" if self.op else self.kind
        return f"{what} transposed" if self.transposed else what


class CallKind(NamedTuple):
    """The properties that all calls of one kind (`Site.kind`) share.

    Attributes:
        run: called with (group, site, inputs, output); carries the call out.
        shape: called with (input's shape, group's size); returns the output's shape. None: there is no output.
        rows: whether the first dimension of the input, and of the output, is the rank.
        form: which arrays the C entry point gets (kernels/call_frames.py); None: the handler calls Python instead.
        is_message: the call involves two ranks and uses the user's group; other calls use a copy of it (own_groups.py).
        linear: whether the output is a linear function of the input (reductions: with SUM or AVG only).
    """

    run: Callable[[ProcessGroup, Any, list[Array], Any], object]
    shape: Callable[[Shape, int], Shape] | None = lambda shape, size: shape
    rows: tuple[bool, bool] = (False, False)
    form: int | None = None
    is_message: bool = False
    linear: bool = False


def own_tag(tag: int) -> int:
    """Return the tag that JAX's messages use in place of a user's tag or ANY_TAG."""
    return wildcard_of(JAX_TAGS) if tag == ANY_TAG else JAX_TAGS + tag


def _recv(group: ProcessGroup, site: Site, ins: list[Array], out: Array) -> None:
    status = site.status
    if status is not None:
        np.copyto(out, ins[0])  # elements beyond a shorter message keep these values
    group.p2p.recv_apart(out, site.src, own_tag(site.recv_tag), status)
    if status is not None:
        source, tag = group.ranks[status.source], status.tag - JAX_TAGS
        status.fill(source, tag, status.count, status.nbytes)


def _sendrecv(group: ProcessGroup, site: Site, ins: list[Array], out: Array) -> None:
    group.gate.check_usable()
    sent = group.messages.isend(ImportedArray(ins[0]), site.dst, own_tag(site.tag))
    try:
        _recv(group, site, ins[1:], out)
    except BaseException:
        with suppress(FastcollError):  # the error of the receive is raised instead
            sent.wait()
        raise
    sent.wait()


def _collective(name: str, linear: bool = True) -> CallKind:
    """Return the properties of a collective; an array of blocks has a row for each rank."""
    kind = operations.KINDS[name]
    method = f"{name}_single" if kind.has_blocks else name
    rows = kind.gives_blocks, kind.takes_blocks

    def run(group: ProcessGroup, site: Site, ins: list[Array], out: Any) -> object:
        root = site.src if kind.root == "src" else site.dst
        return operations.call(group, method, out, ins[0] if ins else None, root, site.op)

    def shape(given: Shape, size: int) -> Shape:
        rest = given[1:] if rows[0] else given
        return (size, *rest) if rows[1] else rest

    return CallKind(run, shape, rows, APART if kind.has_blocks else IN_PLACE, linear=linear)


# fmt: off
KINDS = {
    "all_reduce": _collective("all_reduce"),
    "reduce": _collective("reduce", linear=False),
    **{name: _collective(name) for name in (
        "scan", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")},
    "send": CallKind(lambda g, s, ins, out: g.p2p.send_apart(ins[0], s.dst, own_tag(s.tag)), None,
                 form=GIVEN, is_message=True),
    "recv": CallKind(_recv, form=TAKEN, is_message=True),
    "sendrecv": CallKind(_sendrecv, is_message=True, linear=True),
    "barrier": CallKind(lambda g, s, ins, out: g.fast.barrier(), None, form=NO_ARRAY),
}
OFF_ROOT = {
    # On these ranks a gather returns its input, like `reduce`.
    "gather": CallKind(lambda g, s, ins, out: g.fast.gather_single(out, None, s.dst), form=IN_PLACE, linear=True),
    "scatter": CallKind(lambda g, s, ins, out: g.fast.scatter_single(out, None, s.src), form=APART, linear=True),
}
# fmt: on

_numbers: dict[tuple[Site, tuple[Any, ...]], int] = {}
_numbered: list[tuple[Site, tuple[Any, ...]]] = []
_numbering = threading.Lock()


def number_of(site: Site, dtypes: tuple[Any, ...]) -> int:
    """Return the number of a call on arrays of these dtypes; equal calls have one number in this process."""
    with _numbering:
        number = _numbers.setdefault((site, dtypes), len(_numbered))
        if number == len(_numbered):
            _numbered.append((site, dtypes))
        return number


def site_of(number: int) -> tuple[Site, tuple[Any, ...]]:
    """Return the call of a number, and the dtypes of its inputs."""
    return _numbered[number]
