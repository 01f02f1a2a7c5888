"""What happens when a rank refuses a collective call: the peers, whose calls then match nothing, are informed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import MismatchError
from .gate import Gate
from .operation import Call, Operation


class Preparing:
    """The block in which a call's arguments are checked. An exception there refuses the call.

    A class rather than a generator, which would cost 1 us more.
    """

    __slots__ = ("_gate", "_name", "_planned")

    def __init__(self, gate: Gate, planned: Callable[[Operation], Call], name: str) -> None:
        self._gate, self._planned, self._name = gate, planned, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            refuse(self._gate, self._planned, self._name, error)


def refuse(gate: Gate, planned: Callable[[Operation], Call], name: str, error: Exception) -> None:
    """Inform the peers that this rank has refused its collective call `name`; does not wait for them.

    The refusal is queued as a call that matches no other, so the peers' calls raise MismatchError with its text. If all
    ranks refuse, the refusals match one another. A call that a signal handler makes in the middle of another one is
    not announced, since it matches no call of the peers.
    """
    if gate.size == 1 or gate.failure is not None or gate.closed or gate.is_inside():
        return
    text = f"rank {gate.ranks[gate.rank]}'s {name} was refused: {type(error).__name__}: {error}"
    meeting = planned(Operation("refused"))

    def call() -> None:
        gate.refusal = text
        try:
            meeting()
        except MismatchError:
            pass  # the peers raise it; this rank has raised the refusal itself
        finally:
            gate.refusal = ""

    with suppress(RuntimeError):  # the group was closed meanwhile, or no thread can be started
        gate.submit(f"the refused {name}", partial(gate.in_turn, call), observed=True)
