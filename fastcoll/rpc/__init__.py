"""Remote procedure calls between the processes of a job, with the API of torch.distributed.rpc.

Use it by `import fastcoll.rpc as rpc`. Each process that has called `init_rpc` is a worker with a name, and serves the
calls of all other workers until `shutdown`.
`autograd` and `DistributedOptimizer` need torch; they are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import functions
from .calls import get_rpc_timeout, get_worker_info, rpc_async, rpc_sync
from .futures import Future, collect_all, wait_all
from .rref import RRef, remote
from .start import BackendType, RpcBackendOptions, TensorPipeRpcBackendOptions, init_rpc, shutdown
from .worker_info import WorkerInfo

if TYPE_CHECKING:
    from . import autograd as autograd
    from .optimizer import DistributedOptimizer as DistributedOptimizer

__all__ = [
    "BackendType",
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "collect_all",
    "functions",
    "get_rpc_timeout",
    "get_worker_info",
    "init_rpc",
    "is_available",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]


def is_available() -> bool:
    """Return True: remote calls are always available."""
    return True


def __getattr__(name: str) -> Any:
    if name == "autograd":
        return import_module(f"{__name__}.autograd")
    if name == "DistributedOptimizer":
        return import_module(f"{__name__}.optimizer").DistributedOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
