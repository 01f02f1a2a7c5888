"""Mailing: the part of a group whose messages are an Engine's, and which fails as its monitor and that engine do."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.group import ProcessGroup
from ..core.work import Work
from ..errors import AbortedError, GroupError
from ..interop.arrays import Adopted
from .engine import Engine


class Mailing(ProcessGroup):
    """Point-to-point through `messages`, and failing; for groups to inherit from."""

    messages: Engine

    def learn(self, dtype: np.dtype[Any]) -> None:
        """Let short cuts know a dtype, where these have a memory."""

    def _send(self, x: Adopted, dst: int, tag: int) -> None:
        self.learn(x.array.dtype)
        self.messages.send(x, dst, tag)

    def _recv(self, x: Adopted, src: int | None, tag: int) -> int:
        self.learn(x.array.dtype)
        return self.messages.recv(x, src, tag)

    def _isend(self, x: Adopted, dst: int, tag: int) -> Work:
        self.learn(x.array.dtype)
        return self.gate.unheard.note(self.messages.isend(x, dst, tag))

    def _irecv(self, x: Adopted, src: int | None, tag: int) -> Work:
        self.learn(x.array.dtype)
        return self.gate.unheard.note(self.messages.irecv(x, src, tag))

    def may_wait(self) -> bool:
        return super().may_wait() and not self.messages.is_entered()

    def is_in_vain(self, work: Work) -> bool:
        return self.messages.is_in_vain(work)

    def abort(self, reason: str = "abort() was called") -> None:
        """Fail the group now, from any thread: calls under way and pending Works raise on all ranks."""
        if not self.gate.closed:
            here = self.monitor.name(self.rank)
            self.fail(AbortedError(f"{here} aborted the group {self.name}: {reason}"))

    def fail(self, error: GroupError) -> None:
        self.monitor.fail(error)
        self.messages.abort()
