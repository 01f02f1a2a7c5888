"""Messages between ranks over TCP."""

from __future__ import annotations

from ..messages.mailbox import Mailbox
from ..watch import Vigil
from .mail_channels import MailChannels, Mesh
from .mail_courier import MailCourier

_SWEEP = 1000  # ns that one fruitless try takes, about


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
        channels = MailChannels(mesh, vigil, patience * _SWEEP)
        super().__init__(channels, MailCourier(channels, mesh.rank), mesh.rank, vigil, timeout)
