"""Mailing: the part of a group whose messages are a Mailbox's, and which fails as its vigil and its mailbox do."""

from __future__ import annotations

from ..core.group import ProcessGroup
from ..core.work import Work
from ..errors import AbortedError, GroupError
from ..interop.arrays import Adopted
from .mailbox import Mailbox


class Mailing(ProcessGroup):
    """Point-to-point through `_mail`, and failing; for groups to inherit from."""

    _mail: Mailbox

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._mail.send(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._mail.recv(x, src, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        return self.gate.unheard.note(self._mail.isend(x, dst, tag))

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        return self.gate.unheard.note(self._mail.irecv(x, src, tag))

    def may_wait(self) -> bool:
        return super().may_wait() and not self._mail.is_entered()

    def is_in_vain(self, work: Work) -> bool:
        return self._mail.is_in_vain(work)

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""
        if not self.gate.closed:
            here = self.monitor.name(self.rank)
            self.fail(AbortedError(f"{here} aborted the group {self.name}: {reason}"))

    def fail(self, error: GroupError) -> None:
        self.monitor.fail(error)
        self._mail.abort()
