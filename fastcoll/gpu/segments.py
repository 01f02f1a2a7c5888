"""Segments: a large array goes through the host in parts, so that copies and the CPU backend work at the same time.

    down   segment k+1 to the host, on one stream
    CPU    segment k, by the group's CPU backend
    up     segment k-1 to the GPU, on another stream

Three buffers take turns. A segment's buffer is filled again when its copy up is past: the GPU waits for that, or the
host, where nothing comes down. Before the first segment all ranks tell each other what they call, since a rank with
an array of another size would go through other segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..core import signature
from ..core.group import ProcessGroup
from ..core.operation import Call
from ..core.reduce_op import ReduceOp
from ..errors import MismatchError
from ..interop.arrays import Array
from .array import DeviceArray
from .runtime import runtime
from .transit import Transit

SEGMENT = 4 << 20
"""Bytes of a segment; smaller arrays go in one piece. The copy of 4 MiB over PCIe takes some 0.2 ms, many times what
starting it takes; not measured on hardware."""
_BUFFERS = 3


def code_of(
    operation: str,
    dtype: np.dtype[Any],
    op: ReduceOp | None = None,
    root: int = 0,
    parts: Sequence[int] = (),
) -> int:
    """The word that stands for a call in `agree`."""
    return signature.encode(operation, dtype, op=op, parts=parts) | root << signature.ROOT_SHIFT


class Segments:
    """The segmented calls of one group."""

    def __init__(self, group: ProcessGroup, transit: Transit) -> None:
        self._group = group
        self._transit = transit

    def agree(self, said: int, nbytes: int) -> None:
        """Compare the ranks' calls.

        Raises:
            MismatchError: they differ; on all ranks.
        """
        group = self._group
        rows = group.rows_of_all(np.array([said, nbytes], np.int64))
        everybody = [(call, shape) for call, shape in rows.tolist()]
        if len(set(everybody)) > 1:
            raise MismatchError(
                f"the ranks' calls with arrays on GPUs do not match in group {group.name!r}: "
                f"{signature.describe_differences(everybody, group.ranks)}; all ranks must make the same calls in the "
                "same order"
            )

    def run(
        self,
        name: str,
        inputs: Sequence[DeviceArray],
        outputs: Sequence[DeviceArray],
        each: Callable[[Array], Call],
    ) -> None:
        """Carry a call out whose arrays are ready.

        Args:
            inputs: what comes down, one array after the other as one; none: nothing does.
            outputs: what goes up, likewise.
            each: the CPU backend's call on a segment, in place.
        """
        whole = inputs or outputs
        dtype, size = whole[0].dtype, sum(x.size for x in whole)
        length = max(1, SEGMENT // dtype.itemsize)
        ends = [min(start + length, size) for start in range(0, size, length)]
        with self._transit.pool.lent(_BUFFERS * length * dtype.itemsize) as buffer:
            slots = [
                np.frombuffer(buffer, dtype, length, k * length * dtype.itemsize) for k in range(_BUFFERS)
            ]
            device = next(x.device for x in whole if x.size)
            pipeline = _Pipeline(self._transit, device, slots, name)
            try:
                start = 0
                pipeline.down(0, inputs, 0, ends[0])
                for k, end in enumerate(ends):
                    if k + 1 < len(ends):
                        pipeline.down(k + 1, inputs, end, ends[k + 1])
                    each(pipeline.ready(k, bool(inputs))[: end - start])()
                    pipeline.up(k, outputs, start, end)
                    start = end
            finally:
                try:
                    self._transit.settle()
                finally:
                    pipeline.close()


class _Pipeline:
    """The copies of one call: for each buffer, events behind its last copies down and up."""

    def __init__(self, transit: Transit, device: int, slots: list[Array], name: str) -> None:
        self._transit, self._device, self._slots, self._name = transit, device, slots, name
        self._down, self._up = transit.stream(device, "down"), transit.stream(device, "up")
        self._downs = [transit.events.take(device) for _ in slots]
        self._ups = [transit.events.take(device) for _ in slots]

    def down(self, k: int, inputs: Sequence[DeviceArray], start: int, end: int) -> None:
        """Queue the copy of elements to the buffer of segment k."""
        slot = k % _BUFFERS
        if inputs:
            if k >= _BUFFERS:
                runtime().order(self._down, self._ups[slot])
            for address, host in _pieces(inputs, start, end, self._slots[slot]):
                runtime().to_host(host, address, self._down)
            self._record(self._downs[slot], self._down)

    def ready(self, k: int, comes_down: bool) -> Array:
        """The buffer of segment k, once the CPU may use it."""
        slot = k % _BUFFERS
        if comes_down:
            self._transit.until(self._downs[slot], self._name)
        elif k >= _BUFFERS:
            self._transit.until(self._ups[slot], self._name)
        return self._slots[slot]

    def up(self, k: int, outputs: Sequence[DeviceArray], start: int, end: int) -> None:
        """Queue the copy of segment k's buffer to elements."""
        slot = k % _BUFFERS
        for address, host in _pieces(outputs, start, end, self._slots[slot]):
            runtime().to_device(address, host, self._up)
        self._record(self._ups[slot], self._up)

    def _record(self, event: int, stream: int) -> None:
        with runtime().on(self._device):
            runtime().record(event, stream)

    def close(self) -> None:
        """Give the events back."""
        self._transit.events.give(self._device, [*self._downs, *self._ups])


def _pieces(arrays: Sequence[DeviceArray], start: int, end: int, slot: Array) -> Iterator[tuple[int, Array]]:
    """Where elements start..end of arrays, one after the other, lie: addresses, and their places in a buffer."""
    begin = 0
    for x in arrays:
        first, last = max(start - begin, 0), min(end - begin, x.size)
        if first < last:
            at = begin + first - start
            yield x.address + first * x.dtype.itemsize, slot[at : at + last - first]
        begin += x.size
