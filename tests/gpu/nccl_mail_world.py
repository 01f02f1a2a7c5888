"""A world like that of nccl_world.py, with messages: mailboxes in a segment of shared memory.

with mail_world(3) as ranks:
    ranks.run(lambda rank, group: ...)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from messages.worlds import Rank, RingWorld

from fastcoll.core.backend import Backend
from fastcoll.core.group import ProcessGroup
from fastcoll.errors import GroupError
from fastcoll.gpu.nccl.backend import NcclCarrier
from fastcoll.gpu.nccl.messages import NcclMessages

from .nccl_world import Meeting, Ranks, ThreadBackend, fakes


class MailBackend(ThreadBackend):
    """A backend with mailboxes; a failure is published as in a group in shared memory."""

    def __init__(self, meeting: Meeting, rank: int, timeout: float, end: Rank) -> None:
        super().__init__(meeting, rank, timeout)
        self.messages, self.monitor = end.mailbox, end.monitor
        monitor: Any = end.monitor
        monitor._dead = lambda working: [member for member in working if member.rank in meeting.died]

    def stop(self) -> None:
        assert self.gate.failure is not None
        self.meeting.fail(self.gate.failure)

    def fail(self, error: GroupError) -> None:
        Backend.fail(self, error)

    def limit(self, seconds: float) -> None:
        Backend.limit(self, seconds)

    def close(self, reason: GroupError | None) -> None:
        self.monitor.leave()
        self.messages.close(reason)


class MailRanks(Ranks):
    """The ranks of a world with messages."""

    def __init__(self, gpu: Any, nccl: Any, size: int, timeout: float) -> None:
        super().__init__(gpu, nccl, size, timeout)
        self.posts = RingWorld(size, timeout=timeout)
        self.groups = [
            ProcessGroup(MailBackend(self.meeting, end.rank, timeout, end)) for end in self.posts.ranks
        ]
        for group in self.groups:
            group.gpus.serve(NcclCarrier)

    def mail(self, rank: int) -> NcclMessages:
        """Return a rank's messages."""
        carrier: Any = self.groups[rank].devices()
        mail: NcclMessages = carrier.messages
        return mail

    def close(self) -> None:
        super().close()
        self.posts._release()


@contextmanager
def mail_world(size: int, timeout: float = 60.0, devices: int | None = None) -> Iterator[MailRanks]:
    """Make some ranks; at the end nothing may be left, and no rule of NCCL broken."""
    with fakes(size if devices is None else devices) as (gpu, nccl):
        ranks = MailRanks(gpu, nccl, size, timeout)
        try:
            yield ranks
        finally:
            ranks.close()
