"""The primitive of JAX behind all calls, and its rules for JAX's transformations.

Without a token a call has an *ordered effect*: JAX uses tokens of its own to run all calls of a thread's programs in
the order in which Python made them. With a token, which is an input and an output of the call, the data dependence
orders the calls. Such calls have no effect in JAX's sense, so JAX starts their programs by its fast path. They are
marked as calls with side effects for XLA, so XLA neither drops nor merges them.

Derivatives follow mpi4jax: the transpose of an all_reduce by SUM is the identity, and the transpose of this identity is
the all_reduce. This is right if all ranks compute the same loss from the sum. Then each rank gets the complete
derivative of the loss with respect to its own input. The transposes of all_to_all and sendrecv send the cotangents
back. The other linear calls have derivatives in forward mode only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import core, dispatch, effects
from jax._src.interpreters import partial_eval
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ..core.operands import ANY_TAG
from ..core.reduce_op import ReduceOp
from ..errors import UsageError
from ..kernels.call_frames import IN_PLACE
from . import xla_frames
from .own_groups import group_for
from .sites import Site, number_of


class Order(effects.Effect):  # type: ignore[misc]
    """The effect of calls without a token."""

    def __str__(self) -> str:
        return "fastcoll"

    def __eq__(self, other: object) -> bool:
        return type(other) is Order

    def __hash__(self) -> int:
        return hash(Order)


_ORDER = Order()
for _kinds in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _kinds.add_type(Order)

call_p = Primitive("fastcoll")
call_p.multiple_results = True
call_p.def_impl(partial(dispatch.apply_primitive, call_p))


def call(site: Site, *arrays: Any) -> list[Any]:
    """Trace a call, or run it at once outside of tracing."""
    xla_frames.ready()
    group_for(site.group, site.traits.is_message)
    results: list[Any] = call_p.bind(*arrays, site=site)
    return results


def _shapes(*ins: Any, site: Site) -> tuple[list[Any], set[Order]]:
    kind = site.traits
    outs = []
    if kind.shape:
        like = ins[-1 - site.token]  # for sendrecv its argument `like`, for other calls their only array
        outs = [core.ShapedArray(kind.shape(like.shape, site.size), like.dtype)]
    if site.token:
        outs.append(ins[-1])
    return outs, set() if site.token or site.tangent or site.transposed else {_ORDER}


call_p.def_effectful_abstract_eval(_shapes)


def _lower(ctx: Any, *ins: Any, site: Site) -> Sequence[Any]:
    if site.transposed:
        return ins
    if site.tangent:
        raise NotImplementedError(
            f"{site}: a call with a token has no derivative forward (jvp, jacfwd); leave the token out"
        )
    dtypes = tuple(np.dtype(aval.dtype) for aval in ctx.avals_in)
    number = np.int64(number_of(site, dtypes))
    aliases = {0: 0} if site.traits.form == IN_PLACE else {}
    if site.token:
        aliases[len(ins) - 1] = len(ctx.avals_out) - 1
        lowering = jax.ffi.ffi_lowering(
            xla_frames.TARGET, has_side_effect=True, operand_output_aliases=aliases
        )
        results: Sequence[Any] = lowering(ctx, *ins, site=number)
        return results
    lowering = jax.ffi.ffi_lowering(xla_frames.TARGET, has_side_effect=True, operand_output_aliases=aliases)
    avals_in, avals_out = ((*avals, core.abstract_token) for avals in (ctx.avals_in, ctx.avals_out))
    inner = ctx.replace(avals_in=avals_in, avals_out=avals_out)
    *results, after = lowering(inner, *ins, ctx.tokens_in.get(_ORDER), site=number)
    ctx.set_tokens_out(mlir.TokenSet({_ORDER: after}))
    return results


mlir.register_lowering(call_p, _lower, platform="cpu")


def _keep(used: list[bool], call: Any) -> tuple[list[bool], Any]:
    """Keep a call that has a token or an effect, even if its outputs are not used; JAX may drop any other call."""
    kept = call.params["site"].token or any(used) or bool(call.effects)
    return [kept] * len(call.invars), call if kept else None


partial_eval.dce_rules[call_p] = _keep


# ---- vmap ---------------------------------------------------------------------------------------------------


def _batch(ins: Sequence[Any], dims: Sequence[Any], *, site: Site) -> tuple[list[Any], list[int | None]]:
    """Make one call for the complete batch.

    The batch dimension of its arrays comes first, or second if the first dimension is the rank.
    """
    kind = site.traits
    batch_axis_in, batch_axis_out = map(int, kind.rows)
    arrays, sizes = list(ins), {x.shape[d] for x, d in zip(ins, dims, strict=True) if d is not None}
    if site.token and dims[-1] is not None:
        raise UsageError(
            f"{site}: the token is mapped by vmap; give one token for the whole batch (in_axes=None)"
        )
    for k in range(len(ins) - site.token):
        if dims[k] is None:  # an array of sendrecv, whose other array has the batch dimension
            arrays[k] = jnp.broadcast_to(ins[k], (*sizes, *ins[k].shape))
        else:
            arrays[k] = jnp.moveaxis(ins[k], dims[k], batch_axis_in)
    outs = call_p.bind(*arrays, site=site)
    return outs, [batch_axis_out] * bool(kind.shape) + [None] * site.token


batching.primitive_batchers[call_p] = _batch


# ---- derivatives --------------------------------------------------------------------------------------------


def _jvp(ins: Sequence[Any], tangents: Sequence[Any], *, site: Site) -> tuple[list[Any], list[Any]]:
    outs = call_p.bind(*ins, site=site)
    nothing = [ad.Zero(core.typeof(out).to_tangent_aval()) for out in outs]
    given = tangents[: len(ins) - site.token]
    if all(type(t) is ad.Zero for t in given):
        return outs, nothing
    averages = site.op == ReduceOp.AVG
    if not site.traits.linear or not (site.op in (None, ReduceOp.SUM) or averages):
        raise NotImplementedError(f"{site} has no derivative; of reductions SUM and AVG have one")
    if site.token and site.kind != "all_reduce":
        raise NotImplementedError(
            f"{site}: with a token only all_reduce has a derivative; leave the token out"
        )
    if averages:
        site = replace(site, op=ReduceOp.SUM)
    if site.token:  # only the transpose runs, which moves no data and needs no order
        site = replace(site, tangent=True, token=False)
    moved = call_p.bind(*map(ad.instantiate_zeros, given), site=site)
    if averages:
        moved = [t / site.size for t in moved]
    return outs, [*moved, *nothing[1:]]


def _transpose(cotangents: Sequence[Any], *ins: Any, site: Site) -> list[Any]:
    if site.kind == "all_reduce":
        back = replace(site, transposed=not site.transposed)
    elif site.kind == "sendrecv":
        assert site.src is not None, "it has one source"
        back = replace(site, dst=site.src, src=site.dst, status=None)
        if site.recv_tag != ANY_TAG:
            back = replace(back, tag=site.recv_tag, recv_tag=site.tag)
    elif site.kind == "all_to_all":
        back = site
    else:
        raise NotImplementedError(
            f"{site} has a derivative forward alone (jvp, jacfwd); in reverse there is none"
        )
    (ct,) = cotangents
    zeros = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in ins]
    if type(ct) is ad.Zero:
        return zeros
    if site.kind == "sendrecv":  # the second array only gives the shape and dtype of the message received
        like = ins[0].aval
        return [*call_p.bind(ct, jnp.zeros(like.shape, like.dtype), site=back), *zeros[1:]]
    results: list[Any] = call_p.bind(ct, site=back)
    return results


ad.primitive_jvps[call_p] = _jvp
ad.primitive_transposes[call_p] = _transpose
