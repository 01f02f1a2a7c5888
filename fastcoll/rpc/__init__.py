"""Remote procedure calls between the processes of a job, as torch.distributed.rpc: `import fastcoll.rpc as rpc`.

Each process that has called `init_rpc` is a worker with a name, and serves calls of all others until `shutdown`.
"""

from __future__ import annotations

from . import functions
from .agent import WorkerInfo
from .calls import get_worker_info, rpc_async, rpc_sync
from .futures import Future, collect_all, wait_all
from .rref import RRef, remote
from .start import RpcBackendOptions, TensorPipeRpcBackendOptions, init_rpc, shutdown

__all__ = [
    "Future",
    "RRef",
    "RpcBackendOptions",
    "TensorPipeRpcBackendOptions",
    "WorkerInfo",
    "collect_all",
    "functions",
    "get_worker_info",
    "init_rpc",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]
