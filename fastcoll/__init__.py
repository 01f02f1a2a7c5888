"""fastcoll: the API of torch.distributed for arrays, without torch. Here are the public names alone.

>>> import fastcoll as dist
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import supported, symmetric  # noqa: F401 - the first refuses what the others cannot run on
from ._version import __version__
from .api.backends import (
    Backend,
    BackendConfig,
    is_available,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
)
from .api.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_single,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    exscan,
    gather,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_single,
    reduce_scatter_tensor,
    scan,
    scatter,
)
from .api.groups import (
    GroupMember,
    get_backend,
    get_backend_config,
    get_global_rank,
    get_group_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
    group,
    is_initialized,
)
from .api.multigpu import all_gather_multigpu, all_reduce_multigpu, broadcast_multigpu, reduce_multigpu
from .api.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from .api.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from .api.subgroups import new_group, new_subgroups, new_subgroups_by_enumeration, split_group
from .api.world import destroy_process_group, get_node_local_rank, init_process_group, world
from .core.group import ProcessGroup
from .core.reduce_op import ReduceOp, reduce_op
from .core.work import Work
from .errors import (
    AbortedError,
    ArrayError,
    CollectiveTimeoutError,
    DistBackendError,
    DistError,
    DistNetworkError,
    DistStoreError,
    FastcollError,
    GroupError,
    MismatchError,
    NotInitializedError,
    PeerDiedError,
    QueueEmptyError,
    RendezvousError,
    ResourceError,
    StoreError,
    StoreTimeoutError,
    UnavailableError,
    UsageError,
)
from .rendezvous import FileStore, HashStore, PrefixStore, Store, register_rendezvous_handler

if TYPE_CHECKING:
    from .launch.run import run
    from .launch.spawn import spawn
    from .rendezvous import TCPStore

__all__ = [
    "__version__",
    "AbortedError",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_multigpu",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_multigpu",
    "all_to_all",
    "all_to_all_single",
    "ArrayError",
    "Backend",
    "BackendConfig",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_multigpu",
    "broadcast_object_list",
    "CollectiveTimeoutError",
    "destroy_process_group",
    "DistBackendError",
    "DistError",
    "DistNetworkError",
    "DistStoreError",
    "exscan",
    "FastcollError",
    "FileStore",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "GroupError",
    "GroupMember",
    "HashStore",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "isend",
    "MismatchError",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "NotInitializedError",
    "P2POp",
    "PeerDiedError",
    "PrefixStore",
    "ProcessGroup",
    "QueueEmptyError",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_multigpu",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "ReduceOp",
    "register_rendezvous_handler",
    "RendezvousError",
    "ResourceError",
    "run",
    "scan",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "spawn",
    "split_group",
    "Store",
    "StoreError",
    "StoreTimeoutError",
    "symmetric",
    "TCPStore",
    "UnavailableError",
    "UsageError",
    "Work",
    "world",
]


def __dir__() -> list[str]:
    """The public names, those that `__getattr__` brings among them, without the modules that they come from."""
    return __all__


def __getattr__(name: str) -> Any:
    """The names that bring modules which most programs do not need: multiprocessing, sockets."""
    if name == "run":
        from .launch.run import run

        return run
    if name == "spawn":
        from .launch.spawn import spawn

        return spawn
    if name == "TCPStore":
        from .rendezvous import TCPStore

        return TCPStore
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
