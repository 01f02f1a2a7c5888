"""Two groups of the same ranks in one process, fastcoll's and Gloo's, and functions that compare them."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=150)  # reached only by a hang
OURS: Any = None
GLOO: Any = None


def make_groups() -> None:
    """Set OURS and GLOO; collective."""
    global OURS, GLOO
    OURS, GLOO = (dist.new_group(backend=name, timeout=TIMEOUT) for name in ("fastcoll", "gloo"))


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def shorten(group: Any, seconds: float) -> None:
    """Set the timeout of a fastcoll group after it was made, because making it may take longer than that."""
    group._get_backend(torch.device("cpu")).set_timeout(timedelta(seconds=seconds))


def data(dtype: torch.dtype, *shape: int, salt: int = 0, of: int | None = None) -> torch.Tensor:
    """Return integers from 1 to 5, exact in every dtype, that differ between ranks; `of`: those of another rank."""
    count = torch.Size(shape).numel()
    numbers = (torch.arange(count) * 7 + (rank() if of is None else of) * 3 + salt) % 5 + 1
    return numbers.to(dtype).reshape(shape)


def of_all(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return `data(dtype, *shape)` of all ranks, stacked."""
    return torch.stack([data(dtype, *shape, of=r) for r in range(size())])


def same(run: Callable[[Any], Any]) -> None:
    """Check that `run(group)` returns the same on both groups."""
    ours, gloo = run(OURS), run(GLOO)
    equal(ours, gloo)


def equal(ours: Any, expected: Any) -> None:
    """Check for the same dtype, shape and bits; lists are compared item by item."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
    elif isinstance(expected, list | tuple):
        assert len(ours) == len(expected)
        for mine, theirs in zip(ours, expected, strict=True):
            equal(mine, theirs)
    else:
        assert ours == expected, f"{ours!r} is not {expected!r}"


def reduced(x: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Any:
    """Return a function for `same` that all_reduces a copy of x."""

    def run(group: Any) -> torch.Tensor:
        copy = x.clone()
        dist.all_reduce(copy, op, group)
        return copy

    return run


def run_checks(modules: Sequence[ModuleType], results: Path) -> None:
    """Run each function check_* of the modules; write its error, or "", into `results`-<rank>.json."""
    outcome: dict[str, str] = {}
    file = Path(f"{results}-{rank()}.json")
    for name, check in [each for module in modules for each in vars(module).items()]:
        if not name.startswith("check_"):
            continue
        try:
            check()
            outcome[name] = ""
        except Exception:
            outcome[name] = traceback.format_exc()
        file.write_text(json.dumps(outcome))
