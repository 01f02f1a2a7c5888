"""A process group that carries nothing out and remembers how it was called."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastcoll.core.group import ProcessGroup
from fastcoll.core.work import Work

OPERATIONS = (
    "all_gather", "all_gather_coalesced", "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "exscan", "gather", "irecv", "isend", "monitored_barrier", "recv",
    "reduce", "reduce_scatter", "reduce_scatter_single", "scan", "scatter", "send",
)  # fmt: skip


def _record(name: str) -> Callable[..., Any]:
    def call(self: Recorder, *args: Any) -> Any:
        self.calls.append((name, *args))
        return self.answers.get(name)

    return call


def _absent(self: Any, *args: Any) -> Any:
    raise AssertionError("a Recorder plans nothing")


class Recorder(ProcessGroup):
    """A group that this process is in with group rank 1.

    Attributes:
        calls: (name, *args) of every operation.
        answers: what an operation returns, by name.
    """

    backend = "shm"

    def __init__(self, ranks: tuple[int, ...] = (0, 1, 2)) -> None:
        super().__init__("recorder", ranks, 1, 5.0)
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {"recv": 2}
        self.closed = 0
        self.monitor: Any = SimpleNamespace(farewell="")

    def refuse(self, name: str, error: Exception) -> None:
        """Nobody is there to be told."""

    for _name in OPERATIONS:
        vars()[_name] = _record(_name)
    for _name in ProcessGroup.__abstractmethods__:
        vars()[_name] = _absent

    def ready_isend(self, *args: Any) -> Callable[[], Any]:
        return partial(self.isend, *args)

    def ready_irecv(self, *args: Any) -> Callable[[], Any]:
        return partial(self.irecv, *args)

    def _close(self, reason: object) -> None:
        self.closed += 1


def finished(result: Any = None, error: BaseException | None = None) -> Work:
    """A Work that is complete."""
    work = Work("test")
    work._finish(result, error)
    return work
