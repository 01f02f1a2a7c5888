"""Point-to-point messages as functions, named and called as in torch.distributed.

Messages between two ranks with the same tag arrive in the order in which they are sent. Sender and receiver must pass
arrays of the same dtype and number of elements, or both raise. For `group`, `src` and `dst` see job/groups.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from typing import Any

from ..core.group import ProcessGroup
from ..core.message import Status
from ..core.operands import ANY_TAG, is_message
from ..core.request import Request, start_all
from ..core.work import ENDLESS, Timeout, Work, refuse_to_block
from ..errors import UsageError
from ..job.groups import Group, group_rank, groups, member_of


def send(
    tensor: Any, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Send an array to rank `dst`; return when it has been received. A message to this rank itself is only buffered.

    Args:
        tensor: an array of any fixed-size dtype; the receiver's array has the same dtype and number of elements.
        dst, group_dst: the receiver, as a global rank or as a rank in the group; give one.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        tag: 0 to 2**31 - 1; only a receive with the same tag, or with ANY_TAG, takes the message.

    Raises:
        UsageError: an argument is wrong, or the array cannot hold the message (MismatchError); the group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.
        ResourceError: /dev/shm has no room for the first message to `dst`; the group has failed.
    """
    g = groups.world if group is None else member_of(group, "send")
    if g is None:
        return
    if group_dst is not None or dst is None or g is not groups.world:
        dst = group_rank(g, "dst", dst, group_dst)
    g.fast.send(tensor, dst, tag)


def recv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    status: Status | None = None,
) -> int:
    """Receive an array from rank `src`; without `src` and `group_src`, from the rank whose message arrives first.

    Args:
        tensor: has the dtype and number of elements of the message; with `status` it may have more elements.
        src, group_src: the sender, as a global rank or a group rank; default: the rank whose message arrives first.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        tag: the message's tag, 0 to 2**31 - 1, or ANY_TAG.
        status: filled with the message's sender, tag and size. If it is given, the message may be shorter than
            `tensor`; the remaining elements keep their values.

    Returns:
        The sender's global rank; -1 outside the group.

    Raises:
        UsageError: an argument is wrong, or the array cannot hold the message (MismatchError); the group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.

    Examples:
        >>> if dist.get_rank() == 0:
        ...     dist.send(np.arange(3), dst=1)
        ... else:
        ...     dist.recv(x, src=0)
    """
    if group is None and group_src is None and status is None:
        return groups.world.fast.recv(tensor, src, tag)
    g = groups.world if group is None else member_of(group, "recv")
    if g is None:
        return -1
    source = g.fast.recv(tensor, _sender(g, src, group_src), tag, _worldwide(status, g))
    return g.ranks[source]


def isend(
    tensor: Any, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Work | Any:  # None outside the group; `Any` saves members the check for None
    """Start a `send` and return its Work at once; do not use the array until `work.wait()` has returned.

    A message to this rank is buffered, and its Work is complete at once.

    Args:
        tensor: an array of any fixed-size dtype; the receiver's array has the same dtype and number of elements.
        dst, group_dst: the receiver, as a global rank or as a rank in the group; give one.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        tag: 0 to 2**31 - 1; only a receive with the same tag, or with ANY_TAG, takes the message.

    Raises:
        UsageError: an argument is wrong, or the array cannot hold the message (MismatchError); the group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.
        ResourceError: /dev/shm has no room for the first message to `dst`; the group has failed.
    """
    if group is None and group_dst is None and dst is not None:
        return groups.world.fast.isend(tensor, dst, tag)
    g = groups.world if group is None else member_of(group, "isend")
    return None if g is None else g.fast.isend(tensor, group_rank(g, "dst", dst, group_dst), tag)


def irecv(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    status: Status | None = None,
) -> Work | Any:  # as for isend
    """Start a `recv` and return its Work at once; `work.result()` is the sender's global rank.

    Args:
        tensor: has the dtype and number of elements of the message; do not use it until `work.wait()` has returned.
        src, group_src: the sender, as a global rank or a group rank; default: the rank whose message arrives first.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        tag: the message's tag, 0 to 2**31 - 1, or ANY_TAG.
        status: filled with the message's sender, tag and size. If it is given, the message may be shorter than
            `tensor`; the remaining elements keep their values.

    Raises:
        UsageError: an argument is wrong, or the array cannot hold the message (MismatchError); the group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.
    """
    if group is None and group_src is None and status is None:
        return groups.world.fast.irecv(tensor, src, tag)
    g = groups.world if group is None else member_of(group, "irecv")
    if g is None:
        return None
    filled = _worldwide(status, g)
    work = g.fast.irecv(tensor, _sender(g, src, group_src), tag, filled)
    return work if g is groups.world else _Received(work, g.ranks)


def send_init(
    tensor: Any, dst: int | None = None, group: Group = None, tag: int = 0, group_dst: int | None = None
) -> Request | Any:  # as for isend
    """Make an `isend` that can be started repeatedly; each `start` of the Request sends a message.

    Args:
        tensor: an array of any fixed-size dtype; each message has the values at the time of its start.
        dst, group_dst: the receiver, as a global rank or as a rank in the group; give one.
        group: from `new_group`; None: the default group. On a rank outside it the call warns and returns None.
        tag: 0 to 2**31 - 1; only a receive with the same tag, or with ANY_TAG, takes the message.

    Raises:
        UsageError: an argument is wrong; the group stays usable.
        GroupError: the group has failed.

    Examples:
        >>> request = dist.send_init(x, dst=1)
        >>> for _ in range(10):
        ...     request.start()
        ...     request.wait()
    """
    g = groups.world if group is None else member_of(group, "send_init")
    return None if g is None else g.send_init(tensor, group_rank(g, "dst", dst, group_dst), tag)


def recv_init(
    tensor: Any,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    status: Status | None = None,
) -> Request | Any:  # as for isend
    """Make an `irecv` that can be started repeatedly; the Request's `result()` is the sender's global rank.

    Args:
        tensor: as for `irecv`.
        src, group_src: the sender, as a global rank or a group rank; default: the rank whose message arrives first.
        group: from `new_group`; None: the default group. On a rank outside it the call warns and returns None.
        tag: the message's tag, 0 to 2**31 - 1, or ANY_TAG.
        status: as for `recv`; every message overwrites it.

    Raises:
        UsageError: an argument is wrong; the group stays usable.
        GroupError: the group has failed.
    """
    g = groups.world if group is None else member_of(group, "recv_init")
    if g is None:
        return None
    request = g.recv_init(tensor, _sender(g, src, group_src), tag, _worldwide(status, g))
    return request if g is groups.world else Request(lambda: _Received(request.post(), g.ranks))


def startall(requests: Sequence[Request]) -> None:
    """Start several Requests in the given order.

    Args:
        requests: from `send_init` and `recv_init`. The previous start of each must be complete.

    Raises:
        UsageError: a Request cannot be started; then none is started.
        GroupError: the group has failed.
    """
    start_all(requests)


def probe(
    src: int | None = None, group: Group = None, tag: int = ANY_TAG, group_src: int | None = None
) -> Status:
    """Wait for a message that no receive has taken, without receiving it: the next matching `recv` takes it.

    Args:
        src, group_src: the sender, as a global rank or as a rank in the group; default: any rank.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        tag: the message's tag, 0 to 2**31 - 1, or ANY_TAG.

    Returns:
        The message's Status, with the sender's global rank. Outside the group, a Status whose fields are all -1.

    Raises:
        UsageError: an argument is wrong; the group stays usable.
        GroupError: a rank died (PeerDiedError), or did not call in time (CollectiveTimeoutError); the group has failed.

    Examples:
        >>> status = dist.probe()
        >>> x = np.empty(status.count)
        >>> dist.recv(x, status.source, tag=status.tag)
    """
    g = groups.world if group is None else member_of(group, "probe")
    status = Status() if g is None else g.probe(_sender(g, src, group_src), tag)
    if g is not None:
        status.source = g.ranks[status.source]
    return status


def iprobe(
    src: int | None = None, group: Group = None, tag: int = ANY_TAG, group_src: int | None = None
) -> Status | None:
    """Return the Status that `probe` would return, or None if no such message has arrived yet.

    Args:
        src, group_src: the sender, as a global rank or as a rank in the group; default: any rank.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        tag: the message's tag, 0 to 2**31 - 1, or ANY_TAG.

    Raises:
        UsageError: an argument is wrong; the group stays usable.
        GroupError: a rank died (PeerDiedError), or the group has failed. That the sender has left is no error.
    """
    g = groups.world if group is None else member_of(group, "iprobe")
    status = None if g is None else g.iprobe(_sender(g, src, group_src), tag)
    if g is not None and status is not None:
        status.source = g.ranks[status.source]
    return status


def _worldwide(status: Status | None, g: ProcessGroup) -> Status | None:
    """Wrap a caller's Status so that it is filled with a global rank.

    An object of another type is returned as it is; the group then raises an error for it.
    """
    return _Worldwide(status, g.ranks) if isinstance(status, Status) else status


class _Worldwide(Status):
    """Fills a caller's Status with the sender's global rank in place of the group rank."""

    __slots__ = ("_of", "_ranks")

    def __init__(self, of: Status, ranks: Sequence[int]) -> None:
        self._of, self._ranks = of, ranks

    def fill(self, source: int, tag: int, count: int, nbytes: int) -> None:
        self._of.fill(self._ranks[source], tag, count, nbytes)


def sendrecv(
    input: Any,
    dst: int,
    output: Any,
    src: int | None = None,
    group: Group = None,
    send_tag: int = 0,
    recv_tag: int = 0,
) -> int:
    """Send one array and receive another at the same time; return when both have finished.

    Args:
        input: the array to send to rank `dst`.
        output: the array into which the message of rank `src` is received.
        dst, src: global ranks; a `src` of None is any rank.
        group: from `new_group`; None: the default group. On a rank outside the group the call only warns.
        send_tag: 0 to 2**31 - 1.
        recv_tag: tag of the received message, 0 to 2**31 - 1, or ANY_TAG.

    Returns:
        The sender's global rank; -1 outside the group.

    Raises:
        UsageError: an argument is wrong, or the array cannot hold the message (MismatchError); the group stays usable.
        GroupError: a peer died, left or did not call in time.
    """
    g = groups.world if group is None else member_of(group, "sendrecv")
    if g is None:
        return -1
    sender = _sender(g, src, None)
    if not is_message(output, sender, recv_tag, g.size):
        # A wrong argument raises before the message is sent.
        g.p2p.recv_init(output, sender, recv_tag, None)
    sent = isend(input, dst, group, send_tag)
    received = irecv(output, src, group, recv_tag)
    try:
        source: int = received.result()
    except UsageError:  # the group stays usable, so the caller may use `input` again
        with suppress(UsageError):  # the error of the receive is raised instead
            sent.wait()
        raise
    sent.wait()
    return source


def waitall(works: Sequence[Work]) -> None:
    """Wait for several operations.

    Args:
        works: from `isend`, `irecv` and calls with async_op=True.

    Raises:
        UsageError: an operation has failed. The first such operation in the list determines the error; this function
            does not wait for the operations after it.
        GroupError: the same.
    """
    for work in works:
        work.wait()


def waitany(works: Sequence[Work]) -> int:
    """Wait until one of several operations has ended; return its index.

    Args:
        works: from `isend`, `irecv` and calls with async_op=True.

    Raises:
        UsageError: `works` is empty, a Work's callback calls this function, or the operation that ended has failed.
        GroupError: the operation that ended has failed; AbortedError: none has ended, and one is under way in the
            process from which this one was forked.
    """
    if not works:
        raise UsageError("waitany: there is no operation; give at least one Work")
    refuse_to_block("waitany")
    ended = [index for index, work in enumerate(works) if work.is_completed()]
    if not ended:
        for work in works:
            work.refuse_in_child()
        done, _ = wait(works, ENDLESS, FIRST_COMPLETED)
        ended = [index for index, work in enumerate(works) if work in done]
    works[ended[0]].wait()
    return ended[0]


class P2POp:
    """One send or receive for `batch_isend_irecv`.

    Args:
        op: `fastcoll.isend` or `fastcoll.irecv`.
        tensor: the array to send or to receive into.
        peer: global rank of the other side.
        group: from `new_group`; None: the default group.
        tag: as for `isend`.
        group_peer: the other side's rank in the group, instead of `peer`.

    Raises:
        UsageError: `op` is another function, or both or neither of `peer` and `group_peer` are given.
    """

    def __init__(
        self,
        op: Callable[..., Work | None],
        tensor: Any,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        if op is not isend and op is not irecv:
            raise UsageError(f"op is {op!r}; give fastcoll.isend or fastcoll.irecv")
        if (peer is None) == (group_peer is None):
            raise UsageError(f"peer is {peer} and group_peer is {group_peer}; give one of them")
        self.op = op
        self.tensor = tensor
        self.peer = peer
        self.group = group
        self.tag = tag
        self.group_peer = group_peer

    def __repr__(self) -> str:
        other = f"peer={self.peer}" if self.group_peer is None else f"group_peer={self.group_peer}"
        return f"P2POp({self.op.__name__}, {other}, tag={self.tag})"

    def _ready(self, g: ProcessGroup) -> tuple[Callable[..., Work], tuple[Any, ...]]:
        """Check an operation; return the function that posts it, and its arguments."""
        x, tag, sends = self.tensor, self.tag, self.op is isend
        rank: Any = self.peer
        if g is not groups.world or self.group_peer is not None:
            rank = group_rank(g, "peer", rank, self.group_peer)
        post: Callable[..., Work]
        arguments: tuple[Any, ...]
        if is_message(x, rank, tag, g.size):
            post = g.fast.isend if sends else g.fast.irecv  # these check the arguments once more
            arguments = x, rank, tag
        else:
            ready = g.p2p.ready_isend if sends else g.p2p.ready_irecv
            post, arguments = ready(x, g.checked_rank("peer", rank), tag), ()
        if sends or g is groups.world:
            return post, arguments
        return lambda: _Received(post(*arguments), g.ranks), ()


def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Work]:
    """Post several sends and receives at once, so that their order on different ranks cannot cause a deadlock.

    Args:
        p2p_op_list: operations on one group.

    Returns:
        One Work for each operation, in order; wait for all of them. Empty outside the group.

    Raises:
        UsageError: an operation is wrong, the list is empty, or the groups differ; nothing was posted.
        GroupError: the group has failed. `wait` of the Works raises later failures.

    Examples:
        >>> right, left = (rank + 1) % size, (rank - 1) % size
        >>> ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, y, left)]
        >>> for work in dist.batch_isend_irecv(ops):
        ...     work.wait()
    """
    many = type(p2p_op_list) is list or isinstance(p2p_op_list, Sequence)  # isinstance takes 0.6 us
    group: Group = None
    for index, op in enumerate(p2p_op_list if many and p2p_op_list else [None]):
        if not isinstance(op, P2POp):
            raise UsageError(f"p2p_op_list is {p2p_op_list!r}; give a list of at least one P2POp")
        own = groups.world if op.group is None else op.group
        group = own if index == 0 else group
        if own is not group:
            raise UsageError(
                "the operations of one batch_isend_irecv must be on one group; make a batch for each"
            )
    g = groups.world if group is groups.world else member_of(group, "batch_isend_irecv")
    if g is None:
        return []
    g.gate.check_usable()
    ready = [op._ready(g) for op in p2p_op_list]
    return [post(*arguments) for post, arguments in ready]


def _sender(g: Any, src: int | None, group_src: int | None) -> int | None:
    return None if src is None and group_src is None else group_rank(g, "src", src, group_src)


class _Received(Work):
    """The Work of a receive on a group. The result is the sender's global rank instead of its group rank."""

    def __init__(self, work: Work, ranks: Sequence[int]) -> None:
        super().__init__(work.describe)
        self._work = work
        self._ranks = ranks
        # Use `work.error`: `work.exception()` would count as a check by the program (UnobservedWorks, core/work.py).
        work.add_done_callback(lambda _: self.complete(error=work.error))

    def wait(self, timeout: Timeout = None) -> bool:
        return self._work.wait(timeout)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._work.exception()

    def result(self, timeout: Timeout = None) -> int:
        self.wait(timeout)
        return self._ranks[self._work.source_rank()]

    def refuse_in_child(self) -> None:
        self._work.refuse_in_child()
