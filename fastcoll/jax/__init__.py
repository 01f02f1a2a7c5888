"""Collectives inside JAX programs on CPUs: under jit, grad, vmap, scan, cond and checkpoint, through XLA's FFI.

>>> import fastcoll, fastcoll.jax as fj
>>> fastcoll.init_process_group()
>>> y = jax.jit(lambda x: fj.all_reduce(x * 2))(x)

All ranks make the same calls in the same order, as everywhere in fastcoll. A call changes no array in place and returns
a new one. `all_reduce` explains the arguments that all functions share; docs/compiled.md has derivatives, errors and
tokens.
"""

from __future__ import annotations

from typing import Any

# isort: off
from . import tested  # noqa: F401 - refuses releases of JAX whose internals differ
import jax
import jax.numpy as jnp
from jax._src import dispatch

from ..job.groups import Group, NonMember, entered, group_rank
from ..core.message import Status
from ..core.operands import checked_receive_tag, checked_tag
from ..core.reduce_op import ReduceOp
from ..errors import ArrayError, UsageError
from .own_groups import wait_for_effects
from .primitive import call
from .sites import Site
# isort: on

__all__ = ["all_reduce", "reduce", "scan", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"]
__all__ += ["all_to_all", "send", "recv", "sendrecv", "barrier", "create_token", "clear_errors"]


def all_reduce(x: Any, op: ReduceOp = ReduceOp.SUM, *, group: Group = None, token: Any = None) -> Any:
    """Reduce an array over all ranks; every rank gets the result, with the same bits.

    Args:
        x: an array with the same dtype and number of elements on all ranks; bool, integers, floats or complex.
        op: a predefined ReduceOp, ReduceOp.PREMUL_SUM(factor) or ReduceOp.custom(function).
        group: from `new_group`; None: the default group at the time when the program runs. The first collective of this
            module on a group, traced or not, makes a second group for JAX, so all ranks of the group must take part.
        token: the token that `create_token` or the previous call returned; None: JAX runs all calls without a token in
            the order in which Python made them. Calls with tokens are faster, and only their tokens order them.

    Returns:
        A new array like `x`; with a token `(array, token)`.

    Raises:
        UsageError: a wrong argument; raised while JAX traces the call, because shapes are known then.
        NotInitializedError: there is no default group, or the group was destroyed.
        jax.errors.JaxRuntimeError: an error of the running program (calls that differ between ranks, a dead rank, a
            timeout), with the text of fastcoll's error. It is raised where the caller waits for the program's results.
            If JAX does not run the program asynchronously but at once, a ValueError is raised instead.

    Examples:
        >>> jax.jit(fj.all_reduce)(jnp.ones(3))  # two ranks: Array([2., 2., 2.])
    """
    return _called(_site("all_reduce", group, token, op=_checked(op)), [x], token)


def reduce(x: Any, dst: int, op: ReduceOp = ReduceOp.SUM, *, group: Group = None, token: Any = None) -> Any:
    """Reduce an array over all ranks to rank `dst`; the other ranks get their `x` back.

    Args:
        x, op, group, token, the result and the errors: as for `all_reduce`.
        dst: a global rank.
    """
    return _called(_site("reduce", group, token, op=_checked(op), dst=dst), [x], token)


def scan(x: Any, op: ReduceOp = ReduceOp.SUM, *, group: Group = None, token: Any = None) -> Any:
    """Compute the inclusive prefix reduction: rank r gets the reduction over ranks 0..r.

    Args:
        x, op, group, token, the result and the errors: as for `all_reduce`.
    """
    return _called(_site("scan", group, token, op=_checked(op)), [x], token)


def broadcast(x: Any, src: int, *, group: Group = None, token: Any = None) -> Any:
    """Return the array of rank `src` on every rank.

    Args:
        x: an array with the same dtype and number of elements on all ranks; its values are used on `src` only.
        src: a global rank.
        group, token, the result and the errors: as for `all_reduce`.
    """
    return _called(_site("broadcast", group, token, src=src), [x], token)


def all_gather(x: Any, *, group: Group = None, token: Any = None) -> Any:
    """Gather the arrays of all ranks on every rank, stacked: row r of the result is the array of rank r.

    Args:
        x: an array with the same dtype and shape on all ranks.
        group, token, the errors: as for `all_reduce`.

    Returns:
        An array of shape `(world_size, *x.shape)`; with a token `(array, token)`.
    """
    return _called(_site("all_gather", group, token), [x], token)


def gather(x: Any, dst: int, *, group: Group = None, token: Any = None) -> Any:
    """Gather the arrays of all ranks on rank `dst`, stacked: row r of the result is the array of rank r.

    The other ranks get their `x` back.

    Args:
        x: an array with the same dtype and shape on all ranks.
        dst: a global rank, the same on all ranks.
        group, token, the errors: as for `all_reduce`.

    Returns:
        An array of shape `(world_size, *x.shape)` on `dst`, of `x.shape` elsewhere; with a token `(array, token)`.
    """
    return _called(_site("gather", group, token, dst=dst), [x], token)


def scatter(x: Any, src: int, *, group: Group = None, token: Any = None) -> Any:
    """Scatter the rows of rank `src`: rank r gets `x[r]`.

    Args:
        x: on `src` of shape `(world_size, ...)`; on other ranks an array like the result, whose values are ignored.
        src: a global rank, the same on all ranks.
        group, token, the errors: as for `all_reduce`.

    Returns:
        An array of the shape and dtype of `x[r]`; with a token `(array, token)`.
    """
    site = _site("scatter", group, token, src=src)
    return _called(site, [x if site.off_root else _rows(x, group)], token)


def reduce_scatter(x: Any, op: ReduceOp = ReduceOp.SUM, *, group: Group = None, token: Any = None) -> Any:
    """Reduce an array over all ranks; rank r gets row r of the result.

    Args:
        x: an array of shape `(world_size, ...)`, the same on all ranks.
        op, group, token, the errors: as for `all_reduce`.

    Returns:
        An array of shape `x.shape[1:]`; with a token `(array, token)`.
    """
    return _called(_site("reduce_scatter", group, token, op=_checked(op)), [_rows(x, group)], token)


def all_to_all(x: Any, *, group: Group = None, token: Any = None) -> Any:
    """Send `x[p]` to rank p, and receive row r of the result from rank r.

    Args:
        x: an array of shape `(world_size, ...)`, the same on all ranks.
        group, token, the result and the errors: as for `all_reduce`.
    """
    return _called(_site("all_to_all", group, token), [_rows(x, group)], token)


def send(x: Any, dst: int, tag: int = 0, *, group: Group = None, token: Any = None) -> Any:
    """Send an array to rank `dst`, whose program receives it by `recv` of this module.

    Args:
        x: an array of any shape; the receiver's array has the same dtype and number of elements.
        dst: a global rank.
        tag: 0 to 2**31 - 1; only a receive with this tag, or with ANY_TAG, takes the message.
        group, token, the errors: as for `all_reduce`.

    Returns:
        None; with a token the token.
    """
    return _called(_site("send", group, token, dst=dst, tag=checked_tag(tag)), [x], token)


def recv(
    like: Any,
    src: int | None = None,
    tag: int = 0,
    *,
    group: Group = None,
    token: Any = None,
    status: Status | None = None,
) -> Any:
    """Receive an array from rank `src`, or from the rank whose message arrives first.

    Args:
        like: an array of the result's shape and dtype. If the message is shorter, the remaining elements of the result
            have the values of `like`.
        src: a global rank; None: any rank.
        tag: the message's tag, 0 to 2**31 - 1, or ANY_TAG.
        status: filled with sender, tag and count on each run of the program, before the result is ready. If given, the
            message may be shorter than the array.
        group, token, the result and the errors: as for `all_reduce`.
    """
    how = {"recv_tag": checked_receive_tag(tag), "status": status}
    return _called(_site("recv", group, token, src=src, **how), [like], token)


def sendrecv(
    x: Any,
    like: Any,
    dst: int,
    src: int,
    tag: int = 0,
    recv_tag: int | None = None,
    *,
    group: Group = None,
    token: Any = None,
    status: Status | None = None,
) -> Any:
    """Send `x` to rank `dst` and receive a message from rank `src`, at the same time; both may be this rank.

    Args:
        x, dst: as for `send`.
        like, status: as for `recv`.
        src: a global rank.
        tag: tag of the message that is sent.
        recv_tag: tag of the message that is received, or ANY_TAG; None: the same as `tag`.
        group, token, the result and the errors: as for `all_reduce`.
    """
    tags = {"tag": checked_tag(tag), "recv_tag": checked_receive_tag(tag if recv_tag is None else recv_tag)}
    site = _site("sendrecv", group, token, dst=dst, src=src, status=status, **tags)
    return _called(site, [x, like], token)


def barrier(*, group: Group = None, token: Any = None) -> Any:
    """Wait until the programs of all ranks have called this.

    Args:
        group, token, the errors: as for `all_reduce`.

    Returns:
        None; with a token the token.
    """
    return _called(_site("barrier", group, token), [], token)


def create_token() -> Any:
    """Return a token, which begins a chain of calls. Each call runs after the call that returned its token.

    A token is an array; programs and loops take and return it like any other array. If a program has several chains,
    their calls may run in different orders on different ranks. So begin one chain in a program, and give each call the
    token that the previous call returned.
    """
    return jnp.zeros((), jnp.uint32)


def clear_errors() -> None:
    """Wait for all calls of this thread without a token, then forget their errors.

    JAX orders these calls. After one of them has failed, JAX does not run the later calls; each raises the error of the
    failed call. A MismatchError leaves the group usable; then call this function on all ranks, between two programs.
    """
    wait_for_effects()
    dispatch.runtime_tokens.clear()


# ---- arguments ----------------------------------------------------------------------------------------------


def _site(kind: str, group: Group, token: Any, **ranks: Any) -> Site:
    if isinstance(group, NonMember):
        raise UsageError(f"{kind}: this process is not in the group; call it on the group's ranks alone")
    found = entered(group)
    for name in {"dst", "src"} & ranks.keys():
        if ranks[name] is not None or kind != "recv":
            ranks[name] = found.checked_rank(name, group_rank(found, name, ranks[name], None))
    root = {"gather": "dst", "scatter": "src"}.get(kind)
    if root is not None and ranks[root] != found.rank:
        ranks["off_root"] = True
    return Site(kind, group, found.size, token=token is not None, **ranks)


def _checked(op: Any) -> ReduceOp:
    if not isinstance(op, ReduceOp):
        raise UsageError(f"op is {op!r}; give one of fastcoll.ReduceOp, e.g. ReduceOp.SUM")
    return op


def _rows(x: Any, group: Group) -> Any:
    size, shape = entered(group).size, jnp.shape(x)
    if not shape or shape[0] != size:
        raise ArrayError(f"x is of shape {shape}; give one of shape ({size}, ...), an item for each rank")
    return x


def _called(site: Site, arrays: list[Any], token: Any) -> Any:
    """Make the call; return the result array, the token, both as a tuple, or None."""
    for x in arrays:
        parts = x if isinstance(x, list | tuple) else ()
        if x is None or isinstance(x, str | bytes | dict) or any(hasattr(part, "dtype") for part in parts):
            raise UsageError(
                f"{site.kind}: the array is of type {type(x).__name__}; give an array, or each leaf of a tree: "
                "jax.tree.map(fj.all_reduce, grads)"
            )
    arrays = [jnp.asarray(x) for x in arrays]
    for x in arrays:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            raise ArrayError(f"{site.kind}: the array is of {x.dtype}; give jax.random.key_data(x)")
        if x.dtype.name.endswith(("int2", "int4", "float4_e2m1fn")):
            raise ArrayError(
                f"{site.kind}: the array is of {x.dtype}, less than a byte; give x.astype('int8')"
            )
    if token is not None:
        token = jnp.asarray(token)
        if token.shape != () or token.dtype != jnp.uint32:
            raise UsageError(
                f"{site.kind}: token is an array of {token.dtype} and shape {token.shape}; give the token that "
                "create_token() or the previous call has returned"
            )
        arrays.append(token)
    results = call(site, *arrays)
    return tuple(results) if len(results) == 2 else results[0] if results else None
