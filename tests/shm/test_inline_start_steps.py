"""An inline start interrupted between any two of its steps by an exception, a signal handler or another thread.

A step is the shortest piece of the caller's code after which Python checks for signals. An entry that returns given
codes replaces the compiled entry, which no signal interrupts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from shm.stepping import Between

import fastcoll as dist
from fastcoll import AbortedError, UsageError
from fastcoll.core.status import AGAIN, DONE, LATER, WORKED
from fastcoll.shm import context, inline_start
from fastcoll.shm import context_layout as words
from fastcoll.shm.rounds import HELD, RESUMED

FILES = {module.__file__ for module in (context, inline_start)}
DEADLINE = 120


class Script:
    """An entry that takes the context as all entries do, and then returns these codes, one a call."""

    name = "all_reduce"

    def __init__(self, group: Any, *codes: int) -> None:
        self.words, self.codes = group.backend.context.words, list(codes)

    def call(self, handle: int, *_: Any) -> int:
        if handle & (RESUMED | HELD) == 0:
            if self.words[words.SHUT] or self.words[words.PENDING] or self.words[words.BUSY]:
                return LATER
            self.words[words.BUSY] = threading.get_ident()
            self.words[words.CALLS] += 1
        assert self.words[words.BUSY] == threading.get_ident()
        code = self.codes.pop(0)
        self.words[words.LATE] = -1 if code == DONE else 0
        if code == DONE:
            self.words[words.FINISHED] = self.words[words.CALLS]
            self.words[words.BUSY] = 0
        return code


def new_group() -> Any:
    group = dist.new_group()
    group.backend.inline_start._share = 1
    group.fast.all_reduce(np.ones(3))  # now the memo has its spec
    return group


def at_every_step(codes: list[int], act: Callable[[Any], None]) -> Iterator[tuple[Any, Script, Any]]:
    """Begin a call and wait for it, and run `act(group)` at its first step; again with the second step, and so on.

    Yields the group, the call's script, and its Work, or None if `act` has raised a KeyboardInterrupt. The number of
    steps is not always the same, since the group's watcher may have to be woken.
    """
    group = new_group()
    for step in count(1):
        script, made = Script(group, *codes), None
        with suppress(KeyboardInterrupt), Between(FILES, step, partial(act, group)) as between:
            made = group.backend.inline_start.begin(script, None)
            if made is not None:
                made.wait()
        if between.steps < step:
            break
        yield group, script, made
        if group.failure is not None:
            group.close()
            group = new_group()
    group.fast.all_reduce(np.ones(3))
    group.close()
    assert step > 30


@pytest.mark.ranks(1)
def test_an_exception_at_any_step_leaves_no_call_behind(rank: int, world_size: int) -> None:
    """The call is complete, or has not begun, or the group has failed."""

    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    for group, script, _ in at_every_step([WORKED, AGAIN, AGAIN, DONE], interrupt):
        if group.failure is None:
            group.fast.barrier()
            assert len(script.codes) in (0, 4)
        else:
            with pytest.raises(AbortedError):
                group.fast.barrier()
            assert group.backend.context[words.BUSY] == 0


@pytest.mark.ranks(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_signal_handlers_call_at_any_step_is_rejected_or_correct(
    rank: int, world_size: int, asynchronous: bool
) -> None:
    x, outcomes = np.ones(3), list[Any]()

    def handle(group: Any) -> None:
        try:
            outcomes.append(group.fast.reduce(x, 0, async_op=asynchronous))
        except UsageError:
            outcomes.append(None)

    for _, _, made in at_every_step([AGAIN, AGAIN, DONE], handle):
        assert len(outcomes) == 1
        for outcome in (made, outcomes.pop()):
            assert outcome is None or outcome.wait(DEADLINE)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("codes", [[WORKED, LATER], [AGAIN, LATER], [AGAIN, AGAIN, LATER]])
def test_changing_an_array_during_its_call_fails_the_group(
    rank: int, world_size: int, codes: list[int]
) -> None:
    group = new_group()
    with pytest.raises(AbortedError, match="changed meanwhile"):
        group.backend.inline_start.begin(Script(group, *codes), None).wait(DEADLINE)
    with pytest.raises(AbortedError, match="changed meanwhile"):
        group.fast.all_reduce(np.ones(3))
    group.gate.queue.close()
    assert group.backend.context[words.BUSY] == 0
    group.close()


@pytest.mark.ranks(1)
def test_a_tensor_lives_until_its_call_is_complete(rank: int, world_size: int) -> None:
    """The header that the entry gets owns no memory, and the caller may have dropped the tensor and the Work."""

    class Tensor:
        pass

    group, go_on = new_group(), threading.Event()
    script = Script(group, AGAIN, DONE)
    call = script.call

    def waits(handle: int, x: Any) -> int:
        assert x == "header"
        if handle & RESUMED:
            assert go_on.wait(DEADLINE)
        return call(handle)

    script.call = waits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inline_start, "plain_types", {Tensor})
        patch.setattr(inline_start, "header_of", lambda x: "header")
        x = Tensor()
        there = weakref.ref(x)
        made = group.backend.inline_start.begin(script, x)
    del x
    assert there() is not None
    go_on.set()
    assert made.wait(DEADLINE)
    del made
    group.close()
    assert there() is None
