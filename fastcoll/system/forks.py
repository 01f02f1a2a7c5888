"""Actions around a fork of this process: one list, in the order in which the child runs them.

The child has only the thread that forked, and copies of everything else: locks that none of its threads releases,
connections that belong to the parent, a flight record of groups that are not its own. Modules register the actions that
repair this when they are imported. An action that raises is reported, and the others follow, as with
`os.register_at_fork`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

ORDER = (
    "works",  # before all actions that ask whether a Work belongs to this process
    "processes",  # a lock, and descriptors of watched processes
    "record",  # the child gets memory of its own for the blocks that groups write, before groups change them
    "dump",
    "groups",  # makes groups unusable
    "world",
    "servers",  # closes the listening sockets
    "compiling",
    "arena",  # around the fork: the parent copies the arrays for the child
    "requests",
    "remote calls",
    "group descriptors",  # after the groups that they describe
    "torch's threads",
)


class _Actions(NamedTuple):
    before: Callable[[], None] | None
    in_parent: Callable[[], None] | None
    in_child: Callable[[], None]


_registered: dict[str, _Actions] = {}


def at_fork(
    name: str,
    in_child: Callable[[], None],
    *,
    before: Callable[[], None] | None = None,
    in_parent: Callable[[], None] | None = None,
) -> None:
    """Run actions around every fork from now on, at the position of `name` in ORDER.

    `before` actions run in the reverse order.
    """
    assert name in ORDER, name
    _registered[name] = _Actions(before, in_parent, in_child)


def _do(actions: Iterable[Callable[[], None] | None]) -> None:
    for action in actions:
        try:
            if action is not None:
                action()
        except BaseException:
            sys.excepthook(*sys.exc_info())


def _in_order() -> list[_Actions]:
    return [_registered[name] for name in ORDER if name in _registered]


os.register_at_fork(
    before=lambda: _do(each.before for each in reversed(_in_order())),
    after_in_parent=lambda: _do(each.in_parent for each in _in_order()),
    after_in_child=lambda: _do(each.in_child for each in _in_order()),
)
