"""Messages over the rings of a segment; small ones by the short path, which comes here when it can't go on."""

from __future__ import annotations

import operator

from ..core.monitor import Vigil
from ..core.status import DONE
from ..interop.arrays import Adopted
from ..p2p.channels import ANY
from ..p2p.courier import Courier
from ..p2p.mailbox import Mailbox as _Mailbox
from ..p2p.transfers import Array
from . import ring_kernels
from .layout import Layout
from .ring_channels import RingChannels
from .rounds import RESUMED


class Mailbox(_Mailbox):
    """Messages between the ranks of a segment.

    Args:
        segment_address: where the segment is mapped.
        layout: the segment's.
        rank: this process's group rank.
        vigil: the group's.
        timeout: seconds that an operation may take.
        patience: polls, then yields, before a waiting kernel sleeps.
        context: address of the group's context.

    Attributes:
        address: what entries take for this mailbox.
    """

    def __init__(
        self,
        segment_address: int,
        layout: Layout,
        rank: int,
        vigil: Vigil,
        timeout: float,
        patience: tuple[int, int],
        context: int,
    ) -> None:
        rings = RingChannels(segment_address, layout, rank, patience, context)
        super().__init__(rings, Courier(rings, rank), rank, vigil, timeout)
        self.address = rings.address

    def resume_send(self, status: int, array: Array, dst: int, tag: int) -> None:
        """Go on with a send on the short path that came back early."""
        send = self._send_of(array, operator.index(dst), operator.index(tag))

        def again() -> int:
            return ring_kernels.send.call(self.address | RESUMED, dst, array, tag)

        if self._go_on(again, status, send) is send:
            self._await(send)

    def resume_receive(self, status: int, array: Array, src: int | None, tag: int) -> int:
        """Go on with a receive on the short path that came back early; the sender."""
        source = None if src is None else operator.index(src)
        receive = self._receive_of(Adopted(array), source, operator.index(tag))

        def again() -> int:
            return ring_kernels.receive.call(self.address | RESUMED, ANY if src is None else src, array, tag)

        done = self._go_on(again, status, receive)
        return -1 - done if isinstance(done, int) and done < DONE else int(self._await(receive))
