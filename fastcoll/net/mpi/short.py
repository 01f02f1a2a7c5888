"""The synchronous path of small plain arrays over MPI: one compiled call does all of it.

Only for calls that were seen before, so what was prepared for them is known to be right, and where MPI was initialised
for many threads; whatever does not fit takes the general way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...core.reduce_op import ReduceOp
from ...core.work import Work
from . import meet_kernels as words
from .calls import MpiCalls
from .kernels import DONE
from .meet import Said


class MpiShort(MpiCalls):
    """The public methods that have a short path."""

    def all_reduce(self, tensor: Any, op: ReduceOp = ReduceOp.SUM, async_op: bool = False) -> Any:
        """Reduce over all ranks, in place; the same bits on every rank."""
        if not async_op and _is_plain(tensor) and type(op) is ReduceOp:
            key = ("all_reduce", tensor.dtype, op, 0, (tensor.nbytes,), ())
            if self._run_at_once(key, tensor, tensor):
                return None
        return super().all_reduce(tensor, op, async_op)

    def broadcast(self, tensor: Any, root: int, async_op: bool = False) -> Any:
        """Copy the root's array into everybody's; same dtype and number of elements everywhere."""
        if not async_op and _is_plain(tensor) and type(root) is int:
            key = ("broadcast", tensor.dtype, None, root, (tensor.nbytes,), ())
            if self._run_at_once(key, tensor, tensor):
                return None
        return super().broadcast(tensor, root, async_op)

    def all_gather_single(self, output: Any, input: Any, async_op: bool = False) -> Work | None:
        """The arrays of all ranks, equal in size, one after the other in `output`."""
        if not async_op and self._is_whole(output, input):
            key = ("all_gather", input.dtype, None, 0, (input.nbytes,) * self.size, ())
            if self._run_at_once(key, output, input):
                return None
        return super().all_gather_single(output, input, async_op)

    def barrier(self, async_op: bool = False, timeout: float | None = None) -> Work | None:
        """Wait until every rank has called."""
        plain = not async_op and timeout is None
        if plain and self._run_at_once(("barrier", None, None, 0, (), ()), None, None):
            return None
        return super().barrier(async_op, timeout)

    def _is_whole(self, whole: Any, part: Any) -> bool:
        """Whether both are plain, and one has as much of the same for each rank."""
        return (
            _is_plain(whole)
            and _is_plain(part)
            and whole.dtype == part.dtype
            and whole.size == part.size * self.size
        )

    def _run_at_once(self, key: Any, out: Any, x: Any) -> bool:
        """As `_run` for a synchronous call with nothing before it; False: it takes the general way."""
        said = self._prepared.get(key)
        if said is None or not said.finishes or self._library.serial or not self.gate.is_clear():
            return False
        self.gate.in_turn(self._carry_out, said, out, x)
        return True

    def _carry_out(self, said: Said, out: Any, x: Any) -> None:
        """The call itself, by the thread that has the turn."""
        self.gate.check_usable()
        try:
            code = words.carry_out.call(self._meeting.address, said.address, out, x)
            if code != DONE:
                self._go_on(code, said, out, x)
        except BaseException as error:
            raise self._torn(error) from error.__cause__

    def _go_on(self, code: int, said: Said, out: Any, x: Any) -> None:
        """What follows when the compiled call comes back early."""
        meeting = self._meeting
        self._wait, self._limit, self._moving = None, self.timeout, False
        code = meeting.go_on(
            code,
            lambda: words.carry_out.call(meeting.address | words.RESUMED, said.address, out, x),
            self._look,
        )
        if code != DONE:
            raise self._mismatch(code, said)


def _is_plain(x: Any) -> bool:
    """Whether an array may be used as it lies: contiguous, aligned and writable."""
    return type(x) is np.ndarray and bool(x.flags.carray)
