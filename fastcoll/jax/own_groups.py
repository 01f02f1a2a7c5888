"""The groups that JAX's calls go over: for messages the user's own, for collectives a copy of it.

JAX runs programs later than it is called, so its calls and those of Python come in no order that all ranks agree on.
Messages are matched by tag, so those of JAX have a range of tags of their own (`JAX_TAGS`), and involve no other rank
than the two. Collectives are matched by order, so they need a group of their own. The copy is made when its group is
first used while JAX traces, on the thread that asked for it; the world's is made anew for each world. A copy is left
with the group that it copies, and programs that are under way are waited for first, as asynchronous calls are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from weakref import WeakKeyDictionary, WeakSet

from jax._src import dispatch

from ..api.backends import load
from ..api.groups import Group, entered, groups
from ..api.leaving import ExitHook, close
from ..api.world import current_job, destroy_process_group
from ..core.group import ProcessGroup
from ..core.monitor import last_words
from ..errors import GroupError, UsageError

_copies: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_used: WeakSet[ProcessGroup] = WeakSet()  # groups that calls of programs go over
_making = threading.Lock()


def group_for(group: Group, is_message: bool) -> ProcessGroup:
    """The group that a call on this one goes over; for a collective collective at its first use, as `copy_of` says."""
    if not is_message:
        return copy_of(group)
    original = entered(group)
    if original not in _used:
        _used.add(original)
        original.before_leaving = original.before_leaving or settle
        _leave_at_exit()
    return original


def copy_of(group: Group) -> ProcessGroup:
    """The group of JAX's own with the ranks of this one; collective among them at its first use.

    Raises:
        UsageError: this process is not in the group, or it is a group without a world.
        NotInitializedError: there is no world, or the group was destroyed.
    """
    job, original = current_job(), entered(group)
    # Without the lock: whoever has it may wait for ranks that wait for a program that is here on its way to its call.
    if original in _copies:
        return _copies[original]
    with _making:
        if original in _copies:
            return _copies[original]
        if original in groups.standalone:
            raise UsageError(
                f"the group {original.name} was made by group_from_store; JAX's calls need a second group of the same "
                "ranks, which is made in the store of init_process_group: use that, and new_group"
            )
        choice, ranks = groups.backends[original], original.ranks
        doing = f"the first call of fastcoll.jax on the group {original.name}"
        with job.making(ranks, doing, counted=original is groups.world):
            place = f"jax/{original.name}"
            made = job.make_group(f"{original.name} (JAX)", place, ranks, original.timeout, load(choice))
        groups.add(made, choice)
        made.before_leaving = settle
        if original is not groups.world:
            original.before_leaving = partial(destroy_process_group, made)
        _copies[original] = made
        _used.add(made)
        _leave_at_exit()
        return made


_fences: list[Callable[[], None]] = []


def settle_by(fence: Callable[[], None]) -> None:
    """`fence`: runs a program, behind all that JAX was given before, and waits for it."""
    _fences[:] = [fence]


def wait_for_effects() -> None:
    """Wait for this thread's programs with effects. As `jax.effects_barrier`, but for all of them where one failed."""
    last = dispatch.runtime_tokens
    for token in (*last.current_tokens.values(), *last.output_runtime_tokens.values()):
        with suppress(Exception):
            token.block_until_ready()


def settle() -> None:
    """Wait for all programs that this process has given to JAX. Their errors are for who looks at the results."""
    wait_for_effects()
    for fence in _fences:
        with suppress(Exception):
            fence()


@cache
def _leave_at_exit() -> None:
    """Once a process: before JAX clears its backends, which is later since it was imported earlier."""

    def at_exit(error: BaseException | None) -> GroupError | None:
        if error is not None:  # nothing is waited for: the calls that are under way end with an error
            close(list(_used), last_words(error))
        settle()
        return None

    ExitHook(at_exit).set()
