"""fastcoll: the API of torch.distributed for arrays, without torch. This module has the public names only.

>>> import fastcoll as dist
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# isort: off
# fmt: off
from . import supported, symmetric, traced  # noqa: F401 - `supported` raises on platforms and versions that are not supported
from ._version import __version__
from .job.backends import (
    Backend, BackendConfig, is_available, is_backend_available, is_gloo_available, is_mpi_available,
    is_nccl_available,
)
from .api.collectives import (
    all_gather, all_gather_coalesced, all_gather_into_tensor, all_gather_single, all_reduce,
    all_reduce_coalesced, all_to_all, all_to_all_single, barrier, broadcast, exscan, gather,
    gather_into_tensor, gather_single, monitored_barrier, reduce, reduce_scatter, reduce_scatter_single,
    reduce_scatter_tensor, scan, scatter, scatter_single,
)
from .job.groups import (
    GroupMember, get_backend, get_backend_config, get_global_rank, get_group_rank, get_process_group_ranks,
    get_rank, get_world_size, group, is_initialized,
)
from .api.multigpu import all_gather_multigpu, all_reduce_multigpu, broadcast_multigpu, reduce_multigpu
from .api.objects import (
    all_gather_object, broadcast_object_list, gather_object, recv_object_list, scatter_object_list,
    send_object_list,
)
from .api.p2p import (
    P2POp, batch_isend_irecv, iprobe, irecv, isend, probe, recv, recv_init, send, send_init, sendrecv,
    startall, waitall, waitany,
)
from .job.shared_arrays import shared_arrays
from .job.standalone import group_from_store
from .job.subgroups import new_group, new_subgroups, new_subgroups_by_enumeration, split_group
from .job.world import destroy_process_group, get_node_local_rank, init_process_group, world
from .record.dump import dump
from .core.group import ProcessGroup
from .core.message import Status
from .core.operands import ANY_TAG
from .core.reduce_op import ReduceOp, reduce_op
from .core.request import Request
from .core.work import Work
from .errors import (
    AbortedError, ArgumentTypeError, ArrayError, CollectiveTimeoutError, DistBackendError, DistError, DistNetworkError,
    DistStoreError, FastcollError, GroupError, MismatchError, NotInitializedError, PeerDiedError,
    QueueEmptyError, RemoteError, RendezvousError, ResourceError, RpcError, RpcTimeoutError, StoreError,
    StoreTimeoutError, UnavailableError, UsageError,
)
from .store import FileStore, HashStore, PrefixStore, Store
from .rendezvous import register_rendezvous_handler
# fmt: on
# isort: on

if TYPE_CHECKING:
    from . import elastic as elastic
    from . import jax as jax
    from . import rpc as rpc
    from .api.gradients import GradientReducer
    from .job.recovery import abort, shrink
    from .launch.run import run
    from .launch.spawn import spawn
    from .profiling.block import profile
    from .store import TCPStore

__all__ = ["init_process_group", "destroy_process_group", "world", "is_initialized", "get_rank"]
__all__ += ["get_world_size", "get_node_local_rank", "abort", "shrink"]
__all__ += ["new_group", "new_subgroups", "new_subgroups_by_enumeration", "split_group", "group"]
__all__ += ["group_from_store"]
__all__ += ["GroupMember", "ProcessGroup", "get_backend", "get_backend_config", "get_global_rank"]
__all__ += ["get_group_rank", "get_process_group_ranks"]
__all__ += ["Backend", "BackendConfig", "is_available", "is_backend_available", "is_gloo_available"]
__all__ += ["is_mpi_available", "is_nccl_available"]
__all__ += ["all_reduce", "all_reduce_coalesced", "reduce", "scan", "exscan", "reduce_scatter"]
__all__ += ["reduce_scatter_single", "reduce_scatter_tensor", "broadcast", "all_gather"]
__all__ += ["all_gather_coalesced", "all_gather_into_tensor", "all_gather_single", "gather", "scatter"]
__all__ += ["gather_single", "gather_into_tensor", "scatter_single"]
__all__ += ["all_to_all", "all_to_all_single", "barrier", "monitored_barrier", "ReduceOp", "reduce_op"]
__all__ += ["Work", "GradientReducer"]
__all__ += ["send", "recv", "isend", "irecv", "sendrecv", "waitall", "waitany", "P2POp", "batch_isend_irecv"]
__all__ += ["symmetric"]
__all__ += ["ANY_TAG", "Status", "probe", "iprobe", "Request", "send_init", "recv_init", "startall"]
__all__ += ["shared_arrays"]
__all__ += ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"]
__all__ += ["send_object_list", "recv_object_list"]
__all__ += ["all_gather_multigpu", "all_reduce_multigpu", "broadcast_multigpu", "reduce_multigpu"]
__all__ += ["Store", "FileStore", "HashStore", "PrefixStore", "TCPStore", "register_rendezvous_handler"]
__all__ += ["run", "spawn", "dump", "profile", "__version__"]
__all__ += [
    "FastcollError",
    "UsageError",
    "ArgumentTypeError",
    "ArrayError",
    "MismatchError",
    "NotInitializedError",
]
__all__ += ["UnavailableError", "RendezvousError", "StoreError", "StoreTimeoutError", "QueueEmptyError"]
__all__ += ["ResourceError", "GroupError", "PeerDiedError", "CollectiveTimeoutError", "AbortedError"]
__all__ += ["RpcError", "RpcTimeoutError", "RemoteError"]
__all__ += ["DistError", "DistBackendError", "DistNetworkError", "DistStoreError"]

traced.mark(globals())


def __dir__() -> list[str]:
    """Return the public names, including those that `__getattr__` imports, but not the modules that define them."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import, on its first use, a name whose module imports multiprocessing, sockets or JAX."""
    if name in ("elastic", "jax", "rpc"):
        return import_module(f".{name}", __name__)
    places = {"run": ".launch.run", "spawn": ".launch.spawn", "TCPStore": ".store"}
    places |= {"profile": ".profiling.block"}
    places |= {"abort": ".job.recovery", "shrink": ".job.recovery", "GradientReducer": ".api.gradients"}
    if name in places:
        return getattr(import_module(places[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
