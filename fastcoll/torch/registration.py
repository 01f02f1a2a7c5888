"""How torch learns of the backend, and makes a group of it."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist

from ..core.group import ProcessGroup
from ..errors import UnavailableError
from .dispatch import run_uncompiled, serve_functional_collectives
from .groups import make_group
from .process_group import FastcollProcessGroup
from .work import PendingWork

NAME = "fastcoll"
_kept: list[Any] = []  # what must live as long as the registration


@functools.cache
def register() -> None:
    """Register the backend `fastcoll` with torch.distributed; once is enough.

    From 2.14 on torch finds this function by the entry point `torch.distributed.backends`.

    Raises:
        UnavailableError: this torch was built without torch.distributed.
    """
    if not dist.is_available():
        raise UnavailableError("this torch was built without torch.distributed; install another build of it")
    _kept.append(serve_functional_collectives())
    run_uncompiled(FastcollProcessGroup, PendingWork)

    def create(options: Any, pg_options: Any) -> FastcollProcessGroup:
        return FastcollProcessGroup(_make(options, pg_options))

    # A list: torch 2.13 takes a text for a list of one-letter devices.
    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])


def _make(options: Any, pg_options: Any) -> ProcessGroup:
    """The group that torch's `options` describe; collective."""
    if pg_options is not None:
        raise UnavailableError(f"pg_options is {pg_options!r}, but this backend has no options; leave it out")
    return make_group(
        options.store,
        str(options.group_id),
        options.group_rank,
        options.group_size,
        options.timeout.total_seconds(),
        options.global_ranks_in_group,
        dist.get_world_size() if dist.is_initialized() else options.group_size,
    )
