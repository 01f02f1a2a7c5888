"""The groups of JAX's calls: the user's own group for messages, a copy of that group for collectives.

JAX runs a program some time after Python has called it, so the order of the program's calls relative to Python's calls
differs between ranks. This does not matter for messages, because they match by tag, and JAX's messages have their own
range of tags (`JAX_TAGS`). Collectives match by order, so they need a group of their own. The calling thread makes the
copy when JAX first traces a collective on the group; each new default group gets a new copy. A rank that leaves the
group also leaves the copy. It first waits for running programs, in the same way as for asynchronous calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from weakref import WeakKeyDictionary, WeakSet

from jax._src import dispatch

from ..core.group import ProcessGroup
from ..core.monitor import describe_exit
from ..errors import GroupError, UsageError
from ..job.groups import Group, entered, groups
from ..job.leaving import ExitHook, close
from ..job.world import current_job, destroy_process_group

_copies: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()
_used: WeakSet[ProcessGroup] = WeakSet()  # groups that programs use
# A lock for each group, because its holder waits for other ranks, on which another thread may make another copy first.
_making: WeakKeyDictionary[ProcessGroup, threading.Lock] = WeakKeyDictionary()


def group_for(group: Group, is_message: bool) -> ProcessGroup:
    """Return the group that a call on this group uses: the group itself for messages, else `copy_of`."""
    if not is_message:
        return copy_of(group)
    original = entered(group)
    if original not in _used:
        _used.add(original)
        original.before_leaving = original.before_leaving or settle
        _exit_hook.set_once()
    return original


def copy_of(group: Group) -> ProcessGroup:
    """Return the copy of a group for JAX's collectives; the first call for a group is collective among its ranks.

    Raises:
        UsageError: this process is not in the group, or `group_from_store` made the group.
        NotInitializedError: there is no default group, or the group was destroyed.
    """
    job, original = current_job(), entered(group)
    # Look without the lock, because its holder waits for other ranks, which may wait for this thread's program.
    if original in _copies:
        return _copies[original]
    with _making.setdefault(original, threading.Lock()):
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
            prefix = f"jax/{original.name}"
            made = job.make_group(f"{original.name} (JAX)", prefix, ranks, original.timeout, choice)
        groups.add(made, choice)
        made.before_leaving = settle
        if original is not groups.world:
            original.before_leaving = partial(destroy_process_group, made)
        _copies[original] = made
        _used.add(made)
        _exit_hook.set_once()
        return made


_fences: list[Callable[[], None]] = []


def settle_by(fence: Callable[[], None]) -> None:
    """Set the function that `settle` calls. It must start a program after all earlier ones, and wait for its end."""
    _fences[:] = [fence]


def wait_for_effects() -> None:
    """Wait for this thread's programs with effects: for all of them, even if one fails.

    `jax.effects_barrier` would stop at the first failure.
    """
    last = dispatch.runtime_tokens
    for token in (*last.current_tokens.values(), *last.output_runtime_tokens.values()):
        with suppress(Exception):
            token.block_until_ready()


def settle() -> None:
    """Wait for all programs that this process has given to JAX; ignore errors, which the results raise."""
    wait_for_effects()
    for fence in _fences:
        with suppress(Exception):
            fence()


def _leave_at_exit(error: BaseException | None) -> GroupError | None:
    """End this process's programs.

    This hook runs before JAX's own, which clears the backends: exit hooks run in reverse order, and JAX was imported
    earlier.
    """
    if error is not None:  # do not wait for running calls: end them with an error
        close(list(_used), describe_exit(error))
    settle()
    return None


_exit_hook = ExitHook(_leave_at_exit)
