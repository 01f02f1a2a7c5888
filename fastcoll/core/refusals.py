"""Refusals: if a rank refuses its collective call because of a wrong argument, its peers are informed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import MismatchError
from .gate import Gate
from .operation import Call, Operation


class Preparing:
    """The context manager in whose block a call's arguments are checked. An exception there refuses the call.

    It is a class, because a generator (contextlib.contextmanager) costs 1 us more.
    """

    __slots__ = ("_gate", "_name", "_planned")

    def __init__(self, gate: Gate, planned: Callable[[Operation], Call], name: str) -> None:
        self._gate, self._planned, self._name = gate, planned, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            refuse(self._gate, self._planned, self._name, error)

    def refuse_inside(self, error: Exception) -> None:
        """Inform the peers that this rank refuses the next collective of a call that has several. Wait for them.

        The function of the call, which the gate runs, calls this.
        """
        if self._gate.size > 1:
            _meet(self._gate, self._planned(Operation("refused")), _reason(self._gate, self._name, error))


def refuse(gate: Gate, planned: Callable[[Operation], Call], name: str, error: Exception) -> None:
    """Inform the peers that this rank has refused its collective call `name`, without waiting for them.

    The refusal is queued as a call of the kind "refused", which matches no other kind, so the peers' calls raise
    MismatchError with the refusal's text. If all ranks refuse, the refusals match one another. If a signal handler made
    the refused call in the middle of another call, the peers are not informed, since they make no corresponding call.
    """
    if gate.size == 1 or gate.failure is not None or gate.closed or gate.is_inside():
        return
    call = partial(_meet, gate, planned(Operation("refused")), _reason(gate, name, error))
    with suppress(RuntimeError):  # the group was closed meanwhile, or no thread can be started
        gate.submit(f"the refused {name}", partial(gate.run_exclusively, call), observed=True)


def _reason(gate: Gate, name: str, error: Exception) -> str:
    return f"rank {gate.ranks[gate.rank]}'s {name} was refused: {type(error).__name__}: {error}"


def _meet(gate: Gate, meeting: Call, reason: str) -> None:
    """Make the call `meeting` of the kind "refused"; it gives the peers the reason."""
    gate.refusal = reason
    try:
        meeting()
    except MismatchError:
        pass  # the peers raise it; this rank raises the refusal itself
    finally:
        gate.refusal = ""
