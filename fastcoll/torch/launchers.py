"""torch's env:// under mpiexec and srun, whose variables torch itself does not read.

The ranks meet by fastcoll's own rendezvous. Rank 0 serves torch's store, and publishes the store's address through that
rendezvous.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from ..rendezvous.detect import detect
from ..rendezvous.methods import meet_by_environment
from ..store.store import DEFAULT_TIMEOUT, Rendezvous

_STORE_KEY = "torch/store"


def meet(
    url: str, otherwise: Callable[..., Iterator[Any]], timeout: timedelta = DEFAULT_TIMEOUT, **named: Any
) -> Iterator[tuple[Any, int, int]]:
    """Handle env:// for torch; `otherwise` is torch's handler, for processes that no launcher has started."""
    query = {name: int(number) for name, number in parse_qsl(urlsplit(url).query)}
    rank, size = query.get("rank"), query.get("world_size")
    if detect(os.environ, rank, size).rank is None:
        yield from otherwise(url, timeout=timeout, **named)
        return
    found = meet_by_environment(rank, size, timeout.total_seconds())
    try:
        yield _torch_store(found, timeout), found.rank, found.world_size
    finally:
        found.close()  # torch ends this generator when all ranks have met


def _torch_store(found: Rendezvous, timeout: timedelta) -> Any:
    if found.world_size == 1:
        return dist.HashStore()
    if found.rank > 0:
        host, _, port = found.store.get(_STORE_KEY).decode().rpartition(" ")
        return dist.TCPStore(host, int(port), found.world_size, False, timeout)
    store = dist.TCPStore(found.host, 0, found.world_size, True, timeout, wait_for_workers=False)
    found.store.set(_STORE_KEY, f"{found.host} {store.port}".encode())
    return store
