"""The backend "fastcoll" of ray.util.collective, for arrays and CPU tensors. Importing this module registers it.

>>> import fastcoll.ray
>>> ray.util.collective.init_collective_group(2, rank, "fastcoll", "gradients")

The driver and every actor must import this module. Torch is not needed. The ranks meet in a store that rank 0 serves
until all ranks have joined. Until then, Ray's key-value store holds the address of rank 0's store.
"""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from . import config
from .core.group import ProcessGroup
from .core.reduce_op import ReduceOp
from .errors import NotInitializedError, StoreTimeoutError, UnavailableError, install
from .job.standalone import group_from_store
from .job.world import destroy_process_group
from .store import HashStore
from .store.tcp_store import TCPStore
from .store.waiting import LateWarning

if find_spec("ray") is None:
    raise UnavailableError(f"fastcoll.ray needs Ray, which is not installed: {install('ray')}")

import ray
from ray.experimental import internal_kv
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

_POLL_SECONDS = 0.01
# Seconds to try an address before it is read again, because it may be the address of an earlier rank 0, which was
# killed before it removed the address.
_CONNECT_SECONDS = 5.0


@functools.cache
def register() -> None:
    """Register the backend with Ray. Importing this module calls this; further calls do nothing.

    With `worker_process_setup_hook="fastcoll.ray.register"` in Ray's runtime environment, every worker calls this.
    """
    register_collective_backend("fastcoll", FastcollGroup)


class FastcollGroup(BaseGroup):  # type: ignore[misc]
    """A group of ray.util.collective over a group of fastcoll, whose errors it raises; all calls block.

    Ray passes each array, and each list of arrays, inside a list of length 1. Only a process with several GPUs passes
    longer lists, which need an NCCL group. Making the group is collective and takes at most FASTCOLL_TIMEOUT seconds.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self.fastcoll = _meet(world_size, rank, group_name)

    @classmethod
    def backend(cls) -> str:
        return "FASTCOLL"

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def destroy_group(self) -> None:
        """Leave the group; a second call does nothing."""
        with suppress(NotInitializedError):
            destroy_process_group(self.fastcoll)

    def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
        self.fastcoll.fast.all_reduce(_only("allreduce", tensor), _op(allreduce_options))

    def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
        root = getattr(reduce_options, "root_rank", 0)
        self.fastcoll.fast.reduce(_only("reduce", tensor), root, _op(reduce_options))

    def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
        self.fastcoll.fast.broadcast(_only("broadcast", tensor), getattr(broadcast_options, "root_rank", 0))

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
        self.fastcoll.fast.all_gather(_only("allgather", tensor_list), _only("allgather", tensor))

    def reducescatter(self, tensor: Any, tensor_list: Any, reducescatter_options: Any = None) -> None:
        out, blocks = _only("reducescatter", tensor), _only("reducescatter", tensor_list)
        self.fastcoll.fast.reduce_scatter(out, blocks, _op(reducescatter_options))

    def barrier(self, barrier_options: Any = None) -> None:
        self.fastcoll.fast.barrier()

    def send(self, tensor: Any, send_options: Any) -> None:
        _refuse_gpu_indices("send", send_options)
        self.fastcoll.fast.send(_only("send", tensor), send_options.dst_rank)

    def recv(self, tensor: Any, recv_options: Any) -> None:
        _refuse_gpu_indices("recv", recv_options)
        self.fastcoll.fast.recv(_only("recv", tensor), recv_options.src_rank)


def _only(name: str, given: Any) -> Any:
    if len(given) != 1:
        raise UnavailableError(
            f"{name}_multigpu: a process has {len(given)} arrays, and a group of fastcoll takes one; make a group with "
            "the backend 'nccl', or give each GPU an actor"
        )
    return given[0]


def _op(options: Any) -> ReduceOp:
    """Return fastcoll's operation of the same name."""
    return ReduceOp.SUM if options is None else getattr(ReduceOp, options.reduceOp.name)


def _refuse_gpu_indices(name: str, options: Any) -> None:
    """Refuse the arguments that only send_multigpu and recv_multigpu have."""
    if any(getattr(options, each, 0) for each in ("dst_gpu_index", "src_gpu_index", "n_elements")):
        raise UnavailableError(
            f"{name}_multigpu: a group of fastcoll takes neither GPU indices nor n_elements; give a part of the "
            f"array to {name}"
        )


def _meet(size: int, rank: int, name: str) -> ProcessGroup:
    """Make the group over a store that rank 0 serves; blocks until all ranks have joined."""
    timeout = config.get("FASTCOLL_TIMEOUT")
    if size == 1:
        return group_from_store(HashStore(), 0, 1, timeout, name)
    key = f"fastcoll_collective_group_{name}"
    if rank:
        with _store_at(key, rank, size, timeout) as store:
            return group_from_store(store, rank, size, timeout, name)
    host = ray.util.get_node_ip_address()
    with TCPStore(host, 0, is_master=True, timeout=timeout) as store:
        try:
            internal_kv._internal_kv_put(key, f"{host} {store.port}", overwrite=True)
            group = group_from_store(store, rank, size, timeout, name)
        finally:
            internal_kv._internal_kv_del(key)
        store.close(linger=timeout)
        return group


def _store_at(key: str, rank: int, size: int, timeout: float) -> TCPStore:
    """Wait until Ray's key-value store has the address of rank 0's store under `key`, and connect to it."""
    end, late = time.monotonic() + timeout, LateWarning()
    while (left := end - time.monotonic()) > 0:
        if found := internal_kv._internal_kv_get(key):
            host, port = found.decode().split()
            with suppress(StoreTimeoutError):
                store = TCPStore(host, int(port), timeout=min(left, _CONNECT_SECONDS))
                store.set_timeout(left)
                return store
        late.look(f"joining as rank {rank} of {size}", lambda: "rank 0")
        time.sleep(_POLL_SECONDS)
    raise StoreTimeoutError(f"joining as rank {rank} of {size}: rank 0 did not come within {timeout:.3g} s")


register()
