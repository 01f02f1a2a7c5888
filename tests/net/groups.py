"""Several groups over TCP in one process; each rank is a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from together import together

from fastcoll.core.group import ProcessGroup
from fastcoll.net.tcp.backend import TcpBackend
from fastcoll.store import HashStore
from net.meshes import crew


@contextlib.contextmanager
def groups(
    n: int, store: Any = None, timeout: float = 60.0, first_rank: int = 0
) -> Iterator[list[ProcessGroup]]:
    """Make the groups of n ranks, and close them at the end. The first one is `first_rank` of the job."""
    shared = HashStore() if store is None else store
    known = [replace(each, rank=first_rank + each.rank) for each in crew(n)]
    made = together(
        *(lambda r=r: ProcessGroup(TcpBackend.make(shared, "WORLD", known, r, timeout)) for r in range(n))
    )
    errors = [each for each in made if isinstance(each, BaseException)]
    try:
        if errors:
            raise errors[0]
        yield made
    finally:
        together(*(each.close for each in made if isinstance(each, ProcessGroup)))


def everybody(
    made: list[ProcessGroup], call: Callable[[ProcessGroup], Any], *others: Callable[[], Any]
) -> list[Any]:
    """Run a call on all ranks, and others beside it; return what each returns or raises."""
    return together(*(lambda group=group: call(group) for group in made), *others)
