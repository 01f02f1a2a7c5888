"""Registration with torch: the backend's name, the function that makes its groups, and what torch.compile skips."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_work, _resolve_process_group
from torch.distributed.distributed_c10d import BackendConfig

from .. import config
from ..errors import UnavailableError
from ..rendezvous.detect import MPI_SOURCES, SLURM, TORCH
from .jobs import make_group, refuse_options
from .process_group import FastcollProcessGroup
from .work import PendingWork

_log = logging.getLogger("fastcoll")
_kept: list[Any] = []  # objects that must live as long as the registration


@functools.cache
def register() -> None:
    """Register the backend `fastcoll` with torch.distributed; further calls do nothing.

    `import torch` registers the name (fastcoll_autoload.py). From 2.14 on torch finds this function by the entry point
    `torch.distributed.backends`.

    Raises:
        UnavailableError: this torch was built without torch.distributed.
    """
    if not dist.is_available():
        raise UnavailableError("this torch was built without torch.distributed; install another build of it")
    if not hasattr(dist, "gather_single"):  # releases with gather_single call our method themselves
        _kept.append(torch.library.Library("_c10d_functional", "IMPL", "CPU"))
        _kept[0].impl("all_gather_into_tensor_out", _all_gather_into_tensor_out)
    # torch 2.15 attaches its flight recorder, which needs groups in C++, to all backends except those in this set;
    # fastcoll has its own recorder.
    record_themselves: set[str] = getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    record_themselves.add("fastcoll")
    classes = {*FastcollProcessGroup.__mro__, *PendingWork.__mro__}
    ours = [each for each in classes if each.__module__.startswith(__package__)]
    run_uncompiled(method for each in ours for method in vars(each).values())
    # A list, because torch 2.13 reads a string as a list of one-letter devices.
    dist.Backend.register_backend("fastcoll", create, extended_api=True, devices=["cpu"])
    if default := config.get("FASTCOLL_TORCH_DEFAULT"):
        _be_default(default == "gloo")
        if is_alone_under_accelerate(os.environ):
            _log.warning(
                "accelerate launch has started this process alone, though it was asked for several; without GPUs use "
                "ACCELERATE_USE_CPU=1 torchrun --nproc-per-node N script.py"
            )


def is_alone_under_accelerate(environ: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` was asked for several processes but started only one, which trains alone.

    Accelerate sets MASTER_ADDR only if it was asked for several processes, and does not set their ranks. If it starts
    the processes with mpirun, mpirun sets the ranks.
    """
    ranks = ("RANK", *(source.rank for source in (*MPI_SOURCES, SLURM)))
    is_asked = "ACCELERATE_MIXED_PRECISION" in environ and "MASTER_ADDR" in environ
    return is_asked and environ.keys().isdisjoint(ranks)


def says_more_ranks(environ: Mapping[str, str]) -> str:
    """Return the variable in which an MPI launcher has set a size of more than one, or "".

    Under torchrun the result is "": an MPI launcher may have started torchrun's agents, and then torchrun sets the
    ranks.
    """
    if TORCH.local_size in environ:
        return ""
    sizes = (source.size for source in MPI_SOURCES if source.rank in environ)
    return next((size for size in sizes if environ.get(size, "").isdecimal() and int(environ[size]) > 1), "")


def _be_default(for_gloo: bool) -> None:
    """Make fastcoll the default for CPU tensors or, if `for_gloo`, the replacement of gloo in groups of gloo only.

    A group with NCCL and Gloo keeps both, because a process group written in Python replaces all backends of its group.
    """
    if for_gloo:
        ask = BackendConfig.get_device_backend_map

        def answer(self: Any) -> dict[str, Any]:
            asked: dict[str, Any] = ask(self)
            ours = set(asked.values()) == {"gloo"}
            return dict.fromkeys(asked, dist.Backend("fastcoll")) if ours else asked

        BackendConfig.get_device_backend_map = answer
    else:
        dist.Backend.default_device_backend_map["cpu"] = "fastcoll"
    _log.info(
        "fastcoll serves CPU tensors of torch.distributed where %s",
        "gloo is asked for" if for_gloo else "no backend is named",
    )


def create(options: Any, pg_options: Any) -> FastcollProcessGroup:
    """Make a group for torch, which calls this function; collective."""
    refuse_options(pg_options)
    world = dist.group.WORLD
    if world is None and options.group_size == 1 and (variable := says_more_ranks(os.environ)):
        _log.warning(
            "this world has one rank, but %s=%s: each process that the launcher has started trains alone; unset "
            "WORLD_SIZE and RANK, and give init_process_group neither",
            variable,
            os.environ[variable],
        )
    group = make_group(
        options.store,
        str(options.group_id),
        options.group_rank,
        options.group_size,
        options.timeout.total_seconds(),
        options.global_ranks_in_group,
        options.group_size if world is None else world.size(),
        world.fastcoll if isinstance(world, FastcollProcessGroup) else None,
    )
    return FastcollProcessGroup(group, options.store)


def _all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: Any, *, out: torch.Tensor
) -> torch.Tensor:
    """Replace torch's own function, which up to torch 2.13 calls a method that C++ does not look up in Python."""
    group = group_name if isinstance(group_name, dist.ProcessGroup) else _resolve_process_group(group_name)
    _register_work(out, group.all_gather_single(out, input))
    return out


def run_uncompiled(methods: Iterable[object]) -> None:
    """Make Dynamo skip these functions, and all functions that they call.

    Otherwise Dynamo compiles them too when a call breaks the graph, and fails on the attributes of a process group.
    Dynamo is not imported here, because that takes seconds. If torch has no such switch, this function does nothing.
    """
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        skip_all = eval_frame._FrameExecStrategy(skip, skip)
        set_strategy = eval_frame.set_code_exec_strategy
    except (ImportError, AttributeError):  # torch up to 2.6, or one that has changed this
        return
    for method in methods:
        if isinstance(method, FunctionType):
            set_strategy(method.__code__, skip_all)
