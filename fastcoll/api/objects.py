"""Collectives of Python objects, by pickle.

Unpickling runs code of the sender's choice. Peers have proven that they belong to the job before this file reads a byte
from them: in shared memory because they have mapped a segment that only this user can open, over the network because
they know the job's secret. In a job without a secret (FASTCOLL_INSECURE=1), objects are exchanged through shared memory
only.

Every operation first exchanges the sizes of the pickles, then their bytes. Both have dtypes that no user's array has,
so they match no call on arrays. If an object cannot be pickled, a collective fails on all ranks before it exchanges
sizes; `send_object_list` sends the size `_FAILED` instead of the message, so that both sides raise. If a rank has no
memory for the bytes, the call fails in the same way after it has exchanged the sizes. In all cases the group stays
usable.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import config
from ..core.group import ProcessGroup
from ..core.signature import OBJECT_BYTES, OBJECT_SIZES
from ..errors import MismatchError, ResourceError, UnavailableError, UsageError
from ..job.groups import Group, group_rank, member_of

_FAILED = -1

Bytes = NDArray[Any]
Sizes = NDArray[np.int64]


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Gather the objects of all ranks on every rank: the object of rank r goes to `object_list[r]`.

    Args:
        object_list: a list of world_size items, which are replaced.
        obj: any object that can be pickled.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.

    Raises:
        UsageError: an object cannot be pickled, or an argument is not a list of the right length. Then the other ranks
            raise MismatchError with the reason; if the call is `send_object_list`, the receiver raises UsageError.
        ResourceError: there is no memory for the objects of another rank; the group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.

    Examples:
        >>> names = [None] * dist.get_world_size()
        >>> dist.all_gather_object(names, os.uname().nodename)
    """
    g = _member(group, "all_gather_object")
    if g is None:
        return
    with g.preparing("all_gather_object"):
        _check_list("object_list", object_list, size=g.size)
        own = _pack(obj)
    with g.gate.operation:
        sizes = _share_sizes(g, own)
        with g.preparing("all_gather_object"):
            parts = _rooms(sizes, g)
        g.fast.all_gather(parts, own)
    object_list[:] = map(_unpack, parts)


def gather_object(
    obj: Any,
    object_gather_list: list[Any] | None = None,
    dst: int | None = None,
    group: Group = None,
    group_dst: int | None = None,
) -> None:
    """Gather the objects of all ranks on rank `dst`, in `object_gather_list`.

    Args:
        obj: any object that can be pickled.
        object_gather_list: on `dst` a list of world_size items, which are replaced; None on other ranks.
        dst, group_dst: the root, as a global rank or as a rank in the group; default: global rank 0.
        group and errors: as for `all_gather_object`.
    """
    g = _member(group, "gather_object")
    if g is None:
        return
    with g.preparing("gather_object"):
        root = g.checked_rank("dst", group_rank(g, "dst", dst, group_dst, 0))
        if g.rank == root:
            _check_list("object_gather_list", object_gather_list, size=g.size)
        own = _pack(obj)
    with g.gate.operation:
        sizes = _share_sizes(g, own)
        with g.preparing("gather_object"):
            parts = _rooms(sizes, g) if g.rank == root else None
        g.fast.gather(own, parts, root)
    if parts is not None and object_gather_list is not None:
        object_gather_list[:] = map(_unpack, parts)


def broadcast_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
) -> None:
    """Copy the objects in the list of rank `src` to every rank.

    Args:
        object_list: has the same length on all ranks (else MismatchError); its items are replaced except on `src`.
        src, group_src: the root, as a global rank or as a rank in the group; default: global rank 0.
        group and errors: as for `all_gather_object`.
        device: None or "cpu".
    """
    g = _member(group, "broadcast_object_list")
    if g is None:
        return
    with g.preparing("broadcast_object_list"):
        _check_list("object_list", object_list, device=device)
        root = g.checked_rank("src", group_rank(g, "src", src, group_src, 0))
        parts = [_pack(obj) for obj in object_list] if g.rank == root else None
    with g.gate.operation:
        sizes = _announce_sizes(g, parts, len(object_list), root)
        with g.preparing("broadcast_object_list"):
            data = _room(sizes.sum(), g, root) if parts is None else _joined(parts)
        g.fast.broadcast(data, root)
    if parts is None:
        object_list[:] = map(_unpack, _cut(data, sizes))


def scatter_object_list(
    scatter_object_output_list: list[Any],
    scatter_object_input_list: Sequence[Any] | None = None,
    src: int | None = None,
    group: Group = None,
    group_src: int | None = None,
) -> None:
    """Send object r in the list of rank `src` to rank r, for each rank.

    Args:
        scatter_object_output_list: a list of at least one item; the first is replaced.
        scatter_object_input_list: on `src` one object for each rank; None on other ranks.
        src, group_src: the root, as a global rank or as a rank in the group; default: global rank 0.
        group and errors: as for `all_gather_object`.
    """
    g = _member(group, "scatter_object_list")
    if g is None:
        return
    with g.preparing("scatter_object_list"):
        _check_list("scatter_object_output_list", scatter_object_output_list)
        if not scatter_object_output_list:
            raise UsageError("scatter_object_output_list is empty; give a list of one item")
        root = g.checked_rank("src", group_rank(g, "src", src, group_src, 0))
        parts = None
        if g.rank == root:
            given = [] if scatter_object_input_list is None else scatter_object_input_list
            _check_list("scatter_object_input_list", given, Sequence, g.size)
            parts = [_pack(obj) for obj in given]
    with g.gate.operation:
        sizes = _announce_sizes(g, parts, g.size, root)
        with g.preparing("scatter_object_list"):
            own = _room(sizes[g.rank], g, root)
        g.fast.scatter(own, parts, root)
    scatter_object_output_list[0] = _unpack(own)


def send_object_list(
    object_list: Sequence[Any],
    dst: int | None = None,
    group: Group = None,
    device: Any = None,
    group_dst: int | None = None,
    use_batch: bool = False,
) -> None:
    """Send objects to rank `dst`, which calls `recv_object_list` with a list of the same length.

    Args:
        object_list: any objects that can be pickled.
        dst, group_dst: the receiver, as a global rank or as a rank in the group; give one.
        group and errors: as for `all_gather_object`.
        device: None or "cpu".
        use_batch: has no effect; torch has it for backends that open a connection for each message.
    """
    g = _member(group, "send_object_list")
    if g is None:
        return
    _check_list("object_list", object_list, Sequence, device=device)
    peer = group_rank(g, "dst", dst, group_dst)
    try:
        parts = [_pack(obj) for obj in object_list]
        data = _joined(parts)
    except (UsageError, MemoryError):
        g.p2p.send_objects(np.full(len(object_list), _FAILED, np.int64), peer)
        raise
    g.p2p.send_objects(_sizes_of(parts), peer)
    g.p2p.send_objects(data.view(np.uint8), peer)


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: Group = None,
    device: Any = None,
    group_src: int | None = None,
    use_batch: bool = False,
) -> int:
    """Receive objects into the list from rank `src`, or from the rank whose message arrives first.

    Args:
        object_list: a list of the same length as the sender's (else UsageError); its items are replaced.
        src, group_src: the sender, as a global rank or a group rank; default: the rank whose message arrives first.
        group and errors: as for `all_gather_object`.
        device: None or "cpu".
        use_batch: has no effect, as for `send_object_list`.

    Returns:
        The sender's global rank; -1 outside the group.
    """
    g = _member(group, "recv_object_list")
    if g is None:
        return -1
    _check_list("object_list", object_list, device=device)
    peer = None if src is None and group_src is None else group_rank(g, "src", src, group_src)
    sizes = np.empty(len(object_list), np.int64)
    sender = g.p2p.recv_objects(sizes, peer)
    if (sizes == _FAILED).any():
        raise UsageError(
            f"rank {g.ranks[sender]} could not send its objects; the error on that rank says why"
        )
    try:
        data = _room(sizes.sum(), g, sender)
    except ResourceError:
        with suppress(MismatchError):  # this drops the message, and the sender raises MismatchError
            g.p2p.recv_objects(np.empty(0, np.uint8), sender)
        raise
    g.p2p.recv_objects(data.view(np.uint8), sender)
    object_list[:] = map(_unpack, _cut(data, sizes))
    return g.ranks[sender]


def _member(group: Group, name: str) -> ProcessGroup | None:
    """Return the result of `member_of`; raise on all ranks if the other members may not belong to the job."""
    g = member_of(group, name)
    if g is not None and g.size > 1 and g.backend.name != "shm" and config.get("FASTCOLL_INSECURE"):
        from ..store.secret import check_unpickling

        check_unpickling(f"{name} unpickles data of the other ranks of {g!r}")
    return g


def _pack(obj: Any) -> Bytes:
    try:
        return np.frombuffer(pickle.dumps(obj, 5), OBJECT_BYTES)
    except Exception as error:  # __reduce__ and __getstate__ may raise anything
        raise UsageError(f"the object cannot be pickled: {type(error).__name__}: {error}") from error


def _room(size: int, g: ProcessGroup, sender: int) -> Bytes:
    """Return room for the `size` bytes of objects of group rank `sender`; ResourceError: there is no memory."""
    try:
        return np.empty(size, OBJECT_BYTES)
    except (MemoryError, ValueError) as error:
        raise ResourceError(
            f"rank {g.ranks[sender]} announced {size} bytes of objects, for which there is no memory"
        ) from error


def _rooms(sizes: Sizes, g: ProcessGroup) -> list[Bytes]:
    """Return room for the bytes of each rank; ResourceError: there is no memory."""
    return [_room(size, g, rank) for rank, size in enumerate(sizes)]


def _sizes_of(parts: Sequence[Bytes]) -> Sizes:
    return np.array([part.size for part in parts], np.int64)


def _joined(parts: Sequence[Bytes]) -> Bytes:
    """Concatenate all parts."""
    return np.concatenate([np.empty(0, OBJECT_BYTES), *parts])


def _share_sizes(g: ProcessGroup, own: Bytes) -> Sizes:
    """Return the sizes of all ranks' parts. Collective."""
    sizes = np.empty(g.size, np.int64)
    g.fast.all_gather_single(sizes.view(OBJECT_SIZES), _sizes_of([own]).view(OBJECT_SIZES))
    return sizes


def _announce_sizes(g: ProcessGroup, parts: Sequence[Bytes] | None, count: int, root: int) -> Sizes:
    """Send the sizes of the root's `count` parts to all ranks, and return them."""
    sizes = np.empty(count, np.int64) if parts is None else _sizes_of(parts)
    g.fast.broadcast(sizes.view(OBJECT_SIZES), root)
    return sizes


def _check_list(
    name: str, items: Any, kind: type[Any] = list, size: int | None = None, device: Any = None
) -> None:
    """Raise before data moves if an argument is not a list. Without this, a tuple would fail after the exchange."""
    if device is not None and str(device) != "cpu":
        raise UnavailableError(f"device is {device!r}; objects are sent as CPU arrays, so leave it out")
    if isinstance(items, kind) and size in (None, len(items)):
        return
    given = "None" if items is None else f"a {type(items).__name__}"
    if size is None:
        raise UsageError(f"{name} is {given}; give a list of objects")
    if isinstance(items, kind):
        given = f"a list of {len(items)}"
    raise UsageError(f"{name} is {given}; give a list of {size} items, one for each rank of the group")


def _cut(data: Bytes, sizes: Sizes) -> list[Bytes]:
    return np.split(data, np.cumsum(sizes)[:-1]) if sizes.size else []


def _unpack(data: Bytes) -> Any:
    return pickle.loads(data.view(np.uint8).data)
