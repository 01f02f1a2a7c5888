"""NcclCarrier: operations on GPU arrays by NCCL, one GPU per rank.

The first collective call creates the communicator; for this, the ranks exchange an id over the group's CPU backend.
Calls are queued (streams.py), and the host does not wait. Operations that NCCL lacks are composed of those that it has
(blocks.py). The CPU backend matches messages, and separate communicators move them (messages.py).

NCCL does not compare the ranks' calls: calls that do not match hang, or end with wrong data. So fastcoll compares them.
In a comparison every rank waits on the host for all others; otherwise a call on GPUs does not wait on the host. So
ranks compare only the first call of each kind. A kind consists of operation, dtype, sizes, reduction and root. As long
as the ranks' calls match, a call is the first of its kind on all ranks or on none. In gather, scatter and all_to_all a
rank does not know the others' sizes, so for these operations a kind does not include sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ...core import signature
from ...core.group import ProcessGroup
from ...core.operation import Call, Operation
from ...core.operations import KINDS
from ...errors import AbortedError, GroupError, MismatchError
from ..device_array import DeviceArray
from ..own_stream import OwnStream
from ..streams import Compared, QueuedCall, StreamCarrier, StreamScope, sizes_of
from . import bindings
from .blocks import Kernels, Moves, Native, reductions
from .communicator import Backoff, Communicator, RankInfo, abort_all, check_ranks
from .messages import NcclMessages

_MOST_KINDS = 10_000


def _all_reduce(moves: Moves, o: Operation, how: Any) -> None:
    for x in o.outputs:
        how.all_reduce(moves, x)


def _all_gather(moves: Moves, o: Operation, how: Any) -> None:
    for k, x in enumerate(o.inputs):
        moves.all_gather(o.outputs[k * moves.size :][: moves.size], x)


_QUEUES: dict[str, Callable[[Moves, Operation, Any], None]] = {
    "all_reduce": _all_reduce,
    "reduce": lambda moves, o, how: how.reduce(moves, o.outputs[0], o.inputs[0], o.root),
    "scan": lambda moves, o, how: how.scan(moves, o.outputs[0], o.inputs[0], False),
    "exscan": lambda moves, o, how: how.scan(moves, o.outputs[0], o.inputs[0], True),
    "reduce_scatter": lambda moves, o, how: how.reduce_scatter(moves, o.outputs[0], o.inputs),
    "broadcast": lambda moves, o, how: moves.broadcast(o.outputs[0], o.root),
    "all_gather": _all_gather,
    "gather": lambda moves, o, how: moves.gather(o.outputs or None, o.inputs[0], o.root),
    "scatter": lambda moves, o, how: moves.scatter(o.outputs[0], o.inputs or None, o.root),
    "all_to_all": lambda moves, o, how: moves.all_to_all(o.outputs, o.inputs),
}
"""For each operation that is not coalesced, the function that queues it on flat arrays.

The function's last argument does the reduction. The functions of all_reduce and all_gather also queue the coalesced
operations, array by array.
"""


class NcclCarrier(StreamCarrier):
    """The carrier that the module docstring describes.

    Raises:
        UnavailableError: there is no NCCL, or no GPU.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._library = bindings.library()
        super().__init__(group)
        self._comm: Communicator | None = None
        self.messages: NcclMessages = NcclMessages(self, self._library)
        self._hows: dict[Any, Native | Kernels] = {}
        self._kinds: set[tuple[int, ...]] = set()
        self._calls = 0

    # ---- collectives ---------------------------------------------------------------------------------

    def plan(self, operation: Operation, timeout: float | None = None) -> Call:
        outs, ins = (tuple(x.reshape(-1) for x in arrays) for arrays in (operation.outputs, operation.inputs))
        return _NcclCall(self, operation._replace(outputs=outs, inputs=ins), self._how(operation))

    def _how(self, operation: Operation) -> Native | Kernels | None:
        """Return the object that does an operation's reduction; None for an operation without one."""
        op = operation.op
        if op is None:
            return None
        dtype, scans = operation.outputs[0].dtype, operation.kind in ("scan", "exscan")
        make = Kernels if scans else reductions
        if op.factor is not None:  # not kept, because each call may have another factor
            return make(op, dtype, self.group.size)
        key = (op, dtype, scans)
        if key not in self._hows:
            self._hows[key] = make(op, dtype, self.group.size)
        return self._hows[key]

    def compare(self, operation: Operation, compared: Compared) -> None:
        """Compare the ranks' calls, and block until this is done, if this call is the first of its kind.

        Raises:
            MismatchError: on all ranks, if the calls differ.
        """
        self._calls += 1
        kind = KINDS[operation.kind]
        all_know_sizes = kind.made_of or (kind.takes_blocks and not kind.is_by_pair)
        seen = (compared.call, compared.shape, *(sizes_of(operation.outputs) if all_know_sizes else ()))
        if seen in self._kinds:
            return
        group = self.group
        balance = signature.balance(group.rank, compared.gives, compared.takes)
        rows = self._exchanged(np.array([self._calls, compared.call, compared.shape, balance], np.int64))
        heads = signature.comparable([(int(call), int(shape)) for call, shape in rows[:, 1:3]])
        counts = rows[:, 0].tolist()

        def tables() -> list[signature.Sizes]:
            each = self._exchanged(np.array([compared.gives, compared.takes], np.int64))
            return [(gives.tolist(), takes.tolist()) for gives, takes in each]

        if len(set(heads)) > 1:
            raise self._mismatch(signature.describe_mismatch(heads, group.ranks, tables))
        if len(set(counts)) > 1:
            text = ", ".join(f"rank {r} its call {n}" for r, n in zip(group.ranks, counts, strict=True))
            raise self._mismatch(
                f"{signature.describe(*heads[0], group.ranks)} is {text}: a rank has skipped an earlier call"
            )
        if rows[:, 3].sum():
            raise self._mismatch(signature.describe_mismatch(heads, group.ranks, tables))
        if len(self._kinds) < _MOST_KINDS:  # the number of kinds is the same on all ranks
            self._kinds.add(seen)

    def _mismatch(self, text: str) -> MismatchError:
        return signature.mismatch(text, self._calls, f"{self.group.name} on GPUs")

    # ---- the communicator ----------------------------------------------------------------------------

    def communicator(self, arrays: Sequence[DeviceArray]) -> Communicator:
        """Return the group's communicator.

        The first collective call creates it, on the arrays' GPU, and blocks.
        """
        if self._comm is None:
            group, library, device = self.group, self._library, self.own(arrays).device
            identity = library.unique_id() if group.rank == 0 else b""
            info = RankInfo.here(self.runtime.board(device), library.version, identity)
            infos = [RankInfo.from_array(row) for row in self._exchanged(info.to_array())]
            check_ranks(infos, group.ranks, group.name)
            with self.runtime.on(device):
                backoff = Backoff(group, self.look)
                self._comm = Communicator.make(library, group.size, group.rank, infos[0].identity, backoff)
        return self._comm

    def _exchanged(self, row: np.ndarray) -> np.ndarray:
        """Return every rank's `row`, in rank order, over the CPU backend."""
        if self.group.gate.is_inside():  # this call runs inside another call of the group
            return self.group.rows_of_all(row)
        everybody = np.empty((self.group.size, *row.shape), row.dtype)
        self.group.fast.all_gather(list(everybody), row)
        return everybody

    @property
    def splits(self) -> bool:
        return self._comm is not None and not self.broken

    def split(self, group: ProcessGroup | None) -> NcclCarrier | None:
        assert self._comm is not None
        assert self.own_stream is not None
        with self.run_exclusively("new_group"), self.failing("new_group"):
            self.watcher.drain()  # NCCL may deadlock if work is outstanding
            with self.runtime.on(self.own_stream.device):
                comm = self._comm.split(None if group is None else group.rank)
        if group is None or comm is None:
            return None
        made = NcclCarrier(group)
        comm.ask(Backoff(group, made.look))
        made._comm, made.own_stream = comm, OwnStream(self.runtime, self.own_stream.device)
        return made

    def trouble(self) -> GroupError | None:
        found = None if self._comm is None else self._comm.trouble()
        return None if found is None else AbortedError(str(found))

    def break_off(self) -> None:
        error, own = self.why_broken(), [] if self._comm is None else [self._comm]
        self.messages.break_off(error)  # before the aborts and after them, as in StreamCarrier.abort
        abort_all([*own, *self.messages.communicators()])
        self.messages.break_off(error)

    def release(self) -> None:
        self.messages.close()
        if self._comm is not None:
            self._comm.close()


class _NcclCall(QueuedCall):
    """A call of an operation on flat arrays."""

    def __init__(self, carrier: NcclCarrier, operation: Operation, how: Native | Kernels | None) -> None:
        outs, ins = operation.outputs, operation.inputs
        super().__init__(carrier, (*ins, *outs) if len(ins) == 1 else (*outs, *ins))
        self._nccl, self._operation, self._how = carrier, operation, how
        self._compared = Compared.of(operation, carrier.group.size)

    def prepare(self, name: str) -> None:
        carrier = self.carrier
        with carrier.failing(name):
            self._nccl.compare(self._operation, self._compared)
            self._nccl.communicator(self.arrays)
            if isinstance(self._how, Kernels):
                with carrier.runtime.on(carrier.own(self.arrays).device):
                    self._how.prepare(self._operation.kind, carrier.group.rank, carrier.group.size)

    def work(self, scope: StreamScope) -> None:
        group = self.carrier.group
        doing = _doing(self._compared.call, self._compared.shape, group.ranks, group.name)
        moves = Moves(self._nccl.communicator(self.arrays), scope, group.rank, group.size, doing)
        _QUEUES[KINDS[self._operation.kind].made_of or self._operation.kind](
            moves, self._operation, self._how
        )


@lru_cache(maxsize=1024)
def _doing(word: int, shape: int, ranks: tuple[int, ...], group: str) -> str:
    return f"{signature.describe(word, shape, ranks)} in group {group!r} on a GPU"
