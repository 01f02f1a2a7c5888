"""A process group that runs no operation and records its calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastcoll.core.gate import Gate
from fastcoll.core.group import ProcessGroup
from fastcoll.core.operations import METHODS
from fastcoll.core.work import Work

OPERATIONS = (*METHODS, "send", "recv", "isend", "irecv")


def _record(name: str) -> Callable[..., Any]:
    def call(self: Recorder, *args: Any) -> Any:
        self.calls.append((name, *args))
        return self.answers.get(name)

    return call


class Recorder(ProcessGroup):
    """A group that this process is in with group rank 1.

    Attributes:
        calls: (name, *args) of every operation.
        answers: the results of operations, by name.
    """

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        def close(reason: object) -> None:
            self.closed += 1

        backend: Any = SimpleNamespace(
            name="shm",
            gate=Gate("recorder", ranks, 1, 5.0),
            monitor=SimpleNamespace(exit_reason="", record=None),
            messages=SimpleNamespace(
                is_entered=lambda: False, poll=lambda: None, take_over_pending=lambda: None
            ),
            fast=lambda group: {},
            close=close,
        )
        super().__init__(backend)
        self.p2p: Any = SimpleNamespace(
            ready_isend=lambda *args: partial(self.isend, *args),
            ready_irecv=lambda *args: partial(self.irecv, *args),
        )
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {"recv": 2}
        self.closed = 0

    def preparing(self, name: str) -> Any:
        """Inform no peers of a refusal, since there are none."""
        return nullcontext()

    for _name in OPERATIONS:
        vars()[_name] = _record(_name)


def finished(result: Any = None, error: BaseException | None = None) -> Work:
    """A Work that is complete."""
    work = Work("test")
    work.complete(result, error)
    return work
