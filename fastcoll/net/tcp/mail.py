"""Messages between ranks over TCP.

A blocking call tries the compiled one at once, which does nothing when others come first; then it goes the way of
Mailbox. That saves 1 of 1.5 us in Python a call.
"""

from __future__ import annotations

import threading
from functools import partial

import numpy as np

from ...core.monitor import Vigil
from ...core.status import DONE, LATER, UNMINDED
from ...errors import GroupError
from ...interop.arrays import Adopted
from ...kernels.primitives import address_of
from ...kernels.waiting import IDLE, PATIENCE_WORDS
from ...p2p.channels import ANY
from ...p2p.mailbox import Mailbox
from ...p2p.transfers import Array, Receive, kind_of
from . import mail_answers, mail_kernels
from . import mail_words as words
from .mail_channels import MailChannels, Mesh
from .mail_courier import MailCourier

_TRY = 1000  # ns that one fruitless try takes, about


class Mail(Mailbox):
    """Messages between the ranks of a group over connections; the contract is that of Mailbox.

    Close it before the mesh.

    Args:
        mesh: what dials and accepts connections, and owns them.
        vigil: the group's.
        timeout: seconds that an operation may take.
        patience: tries in vain, of about a microsecond each, before a waiting thread sleeps.

    Attributes:
        wire: the channels that are connections.
    """

    def __init__(self, mesh: Mesh, vigil: Vigil, timeout: float, patience: int) -> None:
        self.wire = wire = MailChannels(mesh, vigil, patience * _TRY)
        super().__init__(wire, MailCourier(wire, wire, mesh.rank), mesh.rank, vigil, timeout)
        self._minder: threading.Thread | None = None

    def _mind_answers(self) -> None:
        """Start the thread that sends answers which stay deferred, unless there is one."""
        with self._changed:
            if not self._closed and (self._minder is None or not self._minder.is_alive()):
                self._minder = threading.Thread(target=self._mind, name="fastcoll-answers", daemon=True)
                self._minder.start()

    def _mind(self) -> None:
        patience = np.zeros(PATIENCE_WORDS, np.int64)
        patience[IDLE] = 1 << 30  # long naps
        mail_answers.mind.call(self.wire.address, address_of(patience))

    def close(self, error: GroupError | None) -> None:
        super().close(error)
        self.wire.table[words.STOP] = 1
        if self._minder is not None:
            self._minder.join()

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        if not self.try_send(x.array, dst, tag):
            super().send(x, dst, tag)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        source = self.try_recv(x.array, src, tag, x)
        return super().recv(x, src, tag) if source is None else source

    def try_send(self, array: Array, dst: int, tag: int) -> bool:
        """Send a contiguous array to one of the ranks by one compiled call; False: it takes the general way."""
        arguments = (dst, array, array.nbytes, kind_of(tag, array.dtype))
        try:
            status = mail_kernels.send.call(self.wire.address, *arguments)
            if status == DONE:
                return True
            if status == UNMINDED:
                self._mind_answers()
                return True
            if status == LATER:
                return False
            again = partial(mail_kernels.send.call, self.wire.address | mail_kernels.RESUMED, *arguments)
            send = self._send_of(array, dst, tag)
            if self._go_on(again, status, send) is send:
                self._await(send)
        except BaseException as error:
            self.torn(error, "send")
            raise
        return True

    def try_recv(self, array: Array, src: int | None, tag: int, owner: Adopted | None = None) -> int | None:
        """Receive into a contiguous array, as `try_send`; None as False there.

        Args:
            owner: what to write the array back to, if it is a packed copy.
        """
        arguments = (ANY if src is None else src, array, array.nbytes, kind_of(tag, array.dtype))
        try:
            status = mail_kernels.receive.call(self.wire.address, *arguments)
            if status == LATER:
                return None
            if status > DONE:
                again = partial(
                    mail_kernels.receive.call, self.wire.address | mail_kernels.RESUMED, *arguments
                )
                receive = self._receive_of(owner or Adopted(array), src, tag)
                received = self._go_on(again, status, receive)
                if isinstance(received, Receive):
                    return int(self._await(received))
                status = received
            if owner is not None:
                owner.finish()
        except BaseException as error:
            self.torn(error, "recv")
            raise
        return -1 - status
