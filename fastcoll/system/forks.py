"""What is done around a fork of this process: one list, whose order is that of the child.

A child has the thread that forked alone, and copies of all else: locks that no thread of it releases, connections that
are its parent's, a record of groups that are not its own. Modules register here what makes that good, as they are
imported. An action that raises is reported, and the others follow, as with `os.register_at_fork`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

ORDER = (
    "works",  # before all that asks whether a Work is of this process
    "processes",  # a lock, and descriptors of watched processes
    "record",  # this process's own memory for the blocks that groups write, before groups change them
    "dump",
    "groups",  # makes them unusable
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
    """Do this around every fork from now on, at the place that `name` has in ORDER; `before` in the reverse order."""
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
