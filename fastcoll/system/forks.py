"""Actions around a fork of this process: one list, in the order in which the child runs them.

The child has only the thread that forked, and copies of all else: locks that no thread of the child will release,
connections that belong to the parent, the flight record of the parent's groups. Modules register actions that repair
this, when they are imported. If an action raises, the exception is printed and the next action runs. (Actions of
`os.register_at_fork` are treated in the same way.)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

ORDER = (
    "works",  # first, because later actions check whether a Work belongs to this process
    "processes",  # replaces a lock, and closes the pidfds of watched processes
    "record",  # before "groups", which writes to the groups' flight records: gives the child its own copies of these
    "dump",
    "profile",  # the parent's logs belong to the parent
    "groups",  # makes groups unusable
    "slots",
    "world",
    "servers",  # closes the listening sockets
    "tunnels",  # closes the copies of encrypted connections
    "metrics",
    "compiling",
    "arena",  # before the fork, the parent copies its arrays in shared memory for the child
    "requests",
    "remote calls",
    "group descriptors",  # after "groups", which they describe
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
