"""Several: the arrays that one rank gives to a call on many, and how such a call is carried out.

What a rank does alone comes before and after one ordinary call of its group. On the host both are part of the call. On
GPUs the first part is queued on the first array's stream, when the call is made; the last one on the carrier's stream,
or on one that the host waits for, if that is how the carrier works.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.carrier import Carrier, StreamCall
from ..core.group import ProcessGroup
from ..core.operands import scaled
from ..core.operation import Call
from ..core.reduce_op import ReduceOp
from ..core.work import Work
from ..errors import ArrayError, UsageError
from ..interop.arrays import Adopted
from .array import DeviceArray
from .border import OnDevice
from .movers import Mover, OnHost, OnStream, scratch
from .runtime import runtime

Part = Callable[[Mover], None]


class Several:
    """The arrays that one rank gives to a call.

    Args:
        group: the call's.
        items: the arrays, adopted; one at least.
        what: the argument's name, for messages.

    Attributes:
        arrays: adopted.
        on_host: whether they lie in host memory.
    """

    def __init__(self, group: ProcessGroup, items: Sequence[Adopted], what: str) -> None:
        self.items = list(items)
        self.arrays: list[Any] = [item.array for item in items]
        self._group = group
        self.on_host = type(self.arrays[0]) is np.ndarray
        check_alike(what, items, self.arrays[0], f"{what}[0]")

    @property
    def carrier(self) -> Carrier[Any]:
        """What carries calls on the arrays out."""
        return self._group if self.on_host else self._group.devices()

    def left_of(self, op: ReduceOp) -> ReduceOp:
        """What the group's call does after `Mover.fold`, which has scaled what lies on the host."""
        return scaled(np.empty(0, self.arrays[0].dtype), op)[1] if self.on_host else op

    def room(self, size: int) -> Any:
        """Memory of the call's own where the first array is."""
        x = self.arrays[0]
        if self.on_host:
            return np.empty(size, x.dtype)
        return scratch(size, x.dtype, x.device, x.stream, x.owner)

    def run(
        self,
        name: str,
        before: Part,
        plan: Callable[[], Call],
        after: Part,
        outputs: Sequence[Adopted],
        async_op: bool,
    ) -> Work | None:
        """Carry a call out.

        Args:
            before: this rank's own part, which writes nothing of the caller's.
            plan: returns the group's call.
            after: this rank's own part that writes `outputs`.
        """
        if self.on_host:
            inner = plan()

            def call() -> None:
                before(OnHost())
                inner()
                after(OnHost())

            return self._group.run(name, call, outputs, async_op)
        targets: list[Any] = list(outputs)
        first: DeviceArray = self.arrays[0]
        with runtime().on(first.device):
            _follow(first.device, first.stream, [*self.arrays, *(target.array for target in targets)])
            before(OnStream(first.device, first.stream))
        ends = _Ends(first, after, targets)
        inner = plan()
        if isinstance(inner, StreamCall):
            return self._group.run(name, _Streamed(inner, ends), (), async_op)

        def staged() -> None:
            inner()
            ends.now()

        return self._group.run(name, staged, outputs, async_op)


def check_alike(what: str, items: Sequence[Adopted], y: Any, other: str) -> None:
    """Arrays that stand for the same data must be in one kind of memory, of one dtype and size."""
    for index, item in enumerate(items):
        x: Any = item.array
        if type(x) is not type(y):
            raise ArrayError(f"{what}[{index}] and {other} must both be on GPUs, or both in host memory")
        if x.dtype != y.dtype or x.size != y.size:
            raise UsageError(
                f"{what}[{index}] ({x.dtype}, shape {x.shape}) and {other} ({y.dtype}, shape {y.shape}) must have "
                "the same dtype and number of elements"
            )


class _Ends(OnDevice):
    """A rank's last part, in the place of an output that a carrier unpacks on its stream."""

    __slots__ = ("_after", "_targets")

    def __init__(self, first: DeviceArray, after: Part, targets: Sequence[OnDevice]) -> None:
        super().__init__(first)
        self._after, self._targets = after, targets

    def unpack(self, stream: int) -> None:
        device = self.array.device
        with runtime().on(device):
            self._after(OnStream(device, stream))
        event = runtime().new_event(device)
        with runtime().on(device):
            runtime().record(event, stream)
        for target in self._targets:
            x = target.array
            with runtime().on(x.device):
                runtime().order(x.stream, event)
            target.unpack(x.stream)
        runtime().end_event(event)

    def now(self) -> None:
        """On a stream that the host waits for; what is packed stays so."""
        device = self.array.device
        with runtime().on(device):
            stream = runtime().new_stream(device)
            try:
                self._after(OnStream(device, stream))
                runtime().wait_stream(stream)
            finally:
                runtime().end_stream(stream)


class _Streamed(StreamCall):
    def __init__(self, call: StreamCall, ends: _Ends) -> None:
        self._call, self._ends = call, ends

    def start(self, name: str, owners: Sequence[Adopted]) -> Work:
        return self._call.start(name, [self._ends])


def _follow(device: int, stream: int, arrays: Sequence[DeviceArray]) -> None:
    """What is queued on a stream from here on waits for what the arrays' streams hold now."""
    for there, other in dict.fromkeys((x.device, x.stream) for x in arrays):
        if (there, other) == (device, stream):
            continue
        event = runtime().new_event(there)
        with runtime().on(there):
            runtime().record(event, other)
        with runtime().on(device):
            runtime().order(stream, event)
        runtime().end_event(event)
