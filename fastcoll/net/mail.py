"""Messages between ranks over TCP.

A blocking call tries the compiled one at once, which does nothing when others come first; then it goes the way of
Mailbox. That saves 1 of 1.5 us in Python a call.
"""

from __future__ import annotations

from functools import partial

from ..arrays import Adopted
from ..messages.channels import ANY, DONE, LATER
from ..messages.mailbox import Mailbox
from ..messages.transfers import Receive, kind_of
from ..watch import Vigil
from . import mail_kernels
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
    """

    def __init__(self, mesh: Mesh, vigil: Vigil, timeout: float, patience: int) -> None:
        channels = MailChannels(mesh, vigil, patience * _TRY)
        super().__init__(channels, MailCourier(channels, mesh.rank), mesh.rank, vigil, timeout)
        self._address = channels.address

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        array = x.array
        arguments = (dst, array, array.nbytes, kind_of(tag, array.dtype))
        try:
            status = mail_kernels.send.call(self._address, *arguments)
            if status == DONE:
                return
            if status != LATER:
                again = partial(mail_kernels.send.call, self._address | mail_kernels.RESUMED, *arguments)
                send = self._send_of(array, dst, tag)
                if self._go_on(again, status, send) is send:
                    self._await(send)
                return
        except BaseException as error:
            self.torn(error, "send")
            raise
        super().send(x, dst, tag)

    def recv(self, x: Adopted, src: int | None, tag: int) -> int:
        array = x.array
        arguments = (ANY if src is None else src, array, array.nbytes, kind_of(tag, array.dtype))
        try:
            status = mail_kernels.receive.call(self._address, *arguments)
            if status > DONE and status != LATER:
                again = partial(mail_kernels.receive.call, self._address | mail_kernels.RESUMED, *arguments)
                received = self._go_on(again, status, self._receive_of(x, src, tag))
                if isinstance(received, Receive):
                    return int(self._await(received))
                status = received
            if status < DONE:
                x.finish()
                return -1 - status
        except BaseException as error:
            self.torn(error, "recv")
            raise
        return super().recv(x, src, tag)
