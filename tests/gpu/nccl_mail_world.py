"""As nccl_world.py, with a CPU backend that also has messages: the mailboxes of a segment of shared memory.

with mail_world(3) as ranks:
    ranks.run(lambda rank, group: ...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from messages.worlds import Rank, RingWorld

from fastcoll.errors import AbortedError, GroupError
from fastcoll.gpu.nccl.backend import NcclCarrier
from fastcoll.gpu.nccl.messages import NcclMessages
from fastcoll.interop.arrays import Adopted

from .nccl_world import Meeting, Ranks, ThreadGroup, fakes


class MailGroup(ThreadGroup):
    """A group of threads with mailboxes; failing is told as a group in shared memory does."""

    def __init__(self, meeting: Meeting, rank: int, timeout: float, end: Rank) -> None:
        super().__init__(meeting, rank, timeout)
        self._mailbox, self.monitor = end.mailbox, end.vigil
        vigil: Any = end.vigil
        vigil._dead = lambda working: [member for member in working if member.rank in meeting.died]
        vigil.on_failure = self._stop

    def _stop(self) -> None:
        self.gate.failure = self.monitor.failure
        assert self.failure is not None
        self._meeting.fail(self.failure)

    def fail(self, error: GroupError) -> None:
        self.monitor.fail(error)
        self._mailbox.abort()

    def abort(self, reason: str = "abort() was called") -> None:
        self.fail(AbortedError(reason))

    def _close(self, reason: GroupError | None) -> None:
        self.monitor.leave()
        self._mailbox.close(reason)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Any:
        return self._mailbox.isend(x, dst, tag)

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Any:
        return self._mailbox.irecv(x, src, tag)

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self._mailbox.send(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        return self._mailbox.recv(x, src, tag)


class MailRanks(Ranks):
    """The ranks of a world with messages."""

    def __init__(self, gpu: Any, nccl: Any, size: int, timeout: float) -> None:
        super().__init__(gpu, nccl, size, timeout)
        self.posts = RingWorld(size, timeout=timeout)
        self.groups = [MailGroup(self.meeting, end.rank, timeout, end) for end in self.posts.ranks]
        for group in self.groups:
            group.serve_gpus(NcclCarrier)

    def mail(self, rank: int) -> NcclMessages:
        """A rank's messages."""
        carrier: Any = self.groups[rank].devices()
        mail: NcclMessages = carrier.messages
        return mail

    def close(self) -> None:
        super().close()
        self.posts._release()


@contextmanager
def mail_world(size: int, timeout: float = 20.0, devices: int | None = None) -> Iterator[MailRanks]:
    """Some ranks; at the end nothing may be left, and no rule of NCCL's broken."""
    with fakes(size if devices is None else devices) as (gpu, nccl):
        ranks = MailRanks(gpu, nccl, size, timeout)
        try:
            yield ranks
        finally:
            ranks.close()
