"""fastcoll's functions in graphs of torch.compile: operators of torch, and the functions that Dynamo traces.

Dynamo traces the functions at the end of this file instead of the public ones (traced.py). Each operator takes the
tensors that its call writes, and those that it only reads. It returns new tensors, and `_put` copies them to the
tensors that the call writes. So torch's functionalization and Inductor see every read and write. If the old content of
a written tensor is not read later, Inductor replaces the operator by its in-place variant, which writes into the
tensor. All operators have the same ordered effect (torch's _EffectType.ORDERED). So no pass removes an operator or
reorders two operators; otherwise ranks whose graphs differ could deadlock.

Derivatives are those of torch's functional collectives: the derivative of a sum over ranks is the sum of the ranks'
derivatives. For reductions, torch has derivatives of SUM only; these operators have those of SUM and AVG.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._inductor.fx_passes.reinplace import InplaceableOp, inplaceable_ops

from ..api import collectives, multigpu, objects, p2p
from ..core.group import ProcessGroup
from ..core.operations import IN_PLACE, KINDS, LIST_IN_PLACE, METHODS, ONE_TO_ONE
from ..core.operations import call as call_method
from ..core.reduce_op import ReduceOp
from ..core.trees import outline, rebuilt
from ..core.work import Work
from ..errors import UnavailableError, UsageError
from ..job.groups import NonMember, group_rank, groups
from .registration import run_uncompiled

Tensors: TypeAlias = list[torch.Tensor]
_TENSOR = "0"  # the nesting of one tensor
_Call: TypeAlias = Callable[[ProcessGroup, Any, Any, Any, Any, str], object]


def _splits(n: Sequence[int]) -> Sequence[Any]:
    half = len(n) // 2
    return (n[:half], n[half:]) if n else (None, None)


def _collective(method: str) -> _Call:
    """Return the function of a collective's operator; on other ranks it passes None for the root's tensors."""
    kind, is_list = KINDS[METHODS[method]], not method.endswith("_single")

    def call(g: ProcessGroup, outs: Any, given: Any, op: Any, n: Any, nesting: str) -> object:
        if kind.has_blocks:
            out = (outs or None) if is_list and kind.takes_blocks else (outs or [None])[0]
            x = (given or None) if is_list and kind.gives_blocks else (given or [None])[0]
        else:
            out, x = rebuilt(_parsed(nesting), iter(outs or given)), None
        return call_method(g, method, out, x, n[0] if kind.root else None, op)

    return call


# For each operator, the function that makes the call. Its arguments are the group, the tensors that the call writes,
# those that it reads, a ReduceOp, a list of numbers (a root, a peer and a tag, or the sizes of parts), and the nesting
# of the tensors that the public function was given: a literal of Python with 0 for each tensor. Functions that take no
# trees ignore the nesting.
_CALLS: dict[str, _Call] = {
    method: _collective(method)
    for method in METHODS
    if method not in ("all_gather_coalesced", "monitored_barrier")  # which break the graph
} | {
    "all_to_all_single": lambda g, outs, given, op, n, _: g.fast.all_to_all_single(
        outs[0], given[0], *_splits(n)
    ),
    "reduce_scatter_single": lambda g, outs, given, op, n, _: g.fast.reduce_scatter_single(
        outs[0], given[0], op, False, n or None
    ),
    "send": lambda g, outs, given, op, n, _: g.fast.send(given[0], n[0], n[1]),
    "recv": lambda g, outs, given, op, n, _: g.fast.recv(outs[0], n[0], n[1]),
}
_IN_PLACE = frozenset(
    method for method, kind in METHODS.items() if KINDS[kind].form in (IN_PLACE, LIST_IN_PLACE, ONE_TO_ONE)
)
_SCHEMA = "(Tensor[] outs, Tensor[] given, str op, SymInt[] n, str group, str nesting) -> Tensor[]"

_SCHEMA_IN_PLACE = _SCHEMA.replace("Tensor[] outs", "Tensor(a!)[] outs").replace("-> Tensor[]", "-> ()")


@functools.cache
def _parsed(nesting: str) -> Any:
    return ast.literal_eval(nesting)


def _operator(kind: str) -> Any:
    return getattr(torch.ops.fastcoll, kind)


def _group(name: str) -> ProcessGroup:
    """Find a group by its name, because graphs outlive groups and are kept in files; "" means the current world."""
    if not name:
        return groups.world
    found = [group for group in (*groups.backends, *groups.standalone) if group.name == name]
    if len(found) != 1:
        raise UsageError(
            f"a compiled function uses the group {name!r}, and {len(found)} groups here have that name; give "
            + ("each a name of its own" if found else "it a group that is not destroyed")
        )
    return found[0]


def _define(library: torch.library.Library, kind: str, call: _Call) -> None:
    name, in_place, contiguous = f"fastcoll::{kind}", kind in _IN_PLACE, torch.contiguous_format

    def run(outs: Tensors, given: Tensors, op: str, n: Sequence[int], group: str, nesting: str) -> Tensors:
        found = _group(group)
        empty, clone = torch.empty_like, torch.clone
        results = [(clone if in_place else empty)(out, memory_format=contiguous) for out in outs]
        call(found, results, given, getattr(ReduceOp, op), n, nesting)
        return results

    def fake(outs: Tensors, given: Tensors, op: str, n: Sequence[int], group: str, nesting: str) -> Tensors:
        return [torch.empty_like(out, memory_format=contiguous) for out in outs]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        outs, given, ctx.op, ctx.n, ctx.group, ctx.nesting = inputs
        ctx.outs, ctx.given = len(outs), [x.shape for x in given]

    def derive(ctx: Any, grads: Tensors) -> tuple[Any, ...]:
        grads = [grad.contiguous() for grad in grads]
        of_outs: Sequence[Any] = [None] * ctx.outs
        of_given: Sequence[Any] = [grads[0].new_empty(shape) for shape in ctx.given] if grads else []
        if in_place:
            of_outs = _derive_in_place(kind, grads, ctx.op, ctx.n, ctx.group, ctx.nesting)
        else:
            of_given = _derive_moved(kind, of_given, grads, ctx.op, ctx.n, ctx.group)
        return of_outs, of_given, None, None if ctx.n else [], None, None  # for an empty list, torch wants []

    library.define(kind + _SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(kind, run, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    torch.library.register_autograd(name, derive, setup_context=keep, lib=library)
    _register_effectful_op(_operator(kind).default, _EffectType.ORDERED)


def _derive_in_place(
    kind: str, grads: Tensors, op: str, n: Sequence[int], group: str, nesting: str
) -> Tensors:
    if kind.startswith("all_reduce") and op in ("SUM", "AVG"):
        reduced: Tensors = _operator(kind)(grads, [], op, [], group, nesting)
        return reduced
    if kind == "broadcast" and len(grads) == 1:
        if _group(group).rank == n[0]:
            return list(_operator("reduce")(grads, [], "SUM", n, group, _TENSOR))
        _operator("reduce")([], grads, "SUM", n, group, _TENSOR)
        return [torch.zeros_like(grad) for grad in grads]
    _refuse(kind, op)


def _derive_moved(
    kind: str, like: Sequence[Any], grads: Tensors, op: str, n: Sequence[int], group: str
) -> Sequence[Any]:
    if kind in ("all_gather", "all_gather_single"):
        found = _operator(kind.replace("all_gather", "reduce_scatter"))(
            like, grads, "SUM", [], group, _TENSOR
        )
    elif kind in ("reduce_scatter", "reduce_scatter_single") and op in ("SUM", "AVG"):
        if n:  # the rows of each part
            parts = [*like[0].split(list(n))]
            found = [torch.cat(_operator("all_gather")(parts, grads, "SUM", [], group, _TENSOR))]
        else:
            found = _operator(kind.replace("reduce_scatter", "all_gather"))(
                like, grads, "SUM", [], group, _TENSOR
            )
        if op == "AVG":
            found = [grad / _group(group).size for grad in found]
    elif kind in ("all_to_all", "all_to_all_single"):
        half = len(n) // 2
        found = _operator(kind)(like, grads, "SUM", [*n[half:], *n[:half]], group, _TENSOR)
    else:
        _refuse(kind, op)
    return list(found)


def _refuse(kind: str, op: str) -> NoReturn:
    raise UnavailableError(
        f"fastcoll.{kind} (op={op}) has no derivative in a compiled function; call it on x.detach(), or under "
        "torch.no_grad()"
    )


def _define_in_place(library: torch.library.Library, kind: str, call: _Call) -> None:
    """Define the variant that writes into `outs`, and let Inductor's reinplacing pass replace the operator by it."""

    def run(outs: Tensors, given: Tensors, op: str, n: Sequence[int], group: str, nesting: str) -> None:
        call(_group(group), outs, given, getattr(ReduceOp, op), n, nesting)

    library.define(f"{kind}_{_SCHEMA_IN_PLACE}", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(f"{kind}_", run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"fastcoll::{kind}_", lambda outs, given, op, n, group, nesting: None, lib=library
    )
    in_place = _operator(f"{kind}_").default
    _register_effectful_op(in_place, _EffectType.ORDERED)
    inplaceable_ops[_operator(kind).default] = InplaceableOp(in_place, 0)


_library = torch.library.Library("fastcoll", "DEF")
for _kind, _call in _CALLS.items():
    _define(_library, _kind, _call)
    if _kind in _IN_PLACE:
        _define_in_place(_library, _kind, _call)


# ---- functions that Dynamo traces ----------------------------------------------------------------------------


def _graph_break(reason: str) -> Callable[..., NoReturn]:
    """Return a function that breaks the graph for this reason; fastcoll's call is then made outside of the graph."""

    def break_graph(*args: Any) -> NoReturn:
        raise UnavailableError(reason)

    vars(break_graph).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
    return break_graph


_no_operator = _graph_break(
    "this call of fastcoll cannot be in a graph; make it outside of the compiled function"
)
_no_work = _graph_break(
    "a call of fastcoll with async_op=True cannot be in a graph, which has no Work; leave async_op out"
)
_no_function = _graph_break(
    "fastcoll's ReduceOp.custom and PREMUL_SUM cannot be in a graph; multiply first and use SUM, or make the call "
    "outside of the compiled function"
)
_no_narrow_type = _graph_break(
    "fastcoll's all_reduce with travel or lost cannot be in a graph; make the call outside of the compiled function"
)
_no_shape = _graph_break(
    "only other ranks know what fastcoll would return; give all_gather a list of tensors, and recv a src"
)
_no_key = _graph_break(
    "fastcoll's graphs contain dicts whose keys are str, int, bool, bytes, None or tuples of these; use such keys, or "
    "make the call outside of the compiled function"
)
_no_timeout = _graph_break(
    "a barrier of fastcoll with a timeout or device_ids cannot be in a graph; leave them out"
)


def _put(
    kind: str, outs: Any, given: Any, arguments: dict[str, Any], n: Any = (), nesting: str = _TENSOR
) -> Any:
    """Call an operator, and copy its results back; `arguments` are those of the public function."""
    group, op = arguments["group"], arguments.get("op")
    if arguments.get("async_op"):
        return _no_work()
    if op is not None and (op.function is not None or op.factor is not None):
        return _no_function()
    if isinstance(group, NonMember):
        return None
    name = "" if group is None else group.name
    results = _operator(kind)(
        list(outs), list(given), "SUM" if op is None else op.name, list(n), name, nesting
    )
    for out, result in zip(outs, results, strict=True):
        out.copy_(result)
    return None


def _root(arguments: dict[str, Any], what: str, default: int | None = None) -> list[int]:
    group = arguments["group"]
    if isinstance(group, NonMember):
        return [0]
    return [group_rank(_group_of(arguments), what, arguments[what], arguments["group_" + what], default)]


def _group_of(arguments: dict[str, Any]) -> Any:
    return groups.world if arguments["group"] is None else arguments["group"]


def _blocks(x: Any) -> Any:
    """Return as a list what only the root gives: one tensor or a list. The other ranks give None."""
    return [x] if isinstance(x, torch.Tensor) else x or []


def _put_tree(kind: str, tree: Any, arguments: dict[str, Any], n: Any = ()) -> Any:
    """Call an operator with the tensors of a tree and the tree's nesting, which ranks compare as outside of graphs."""
    if not _has_literal_keys(tree):
        return _no_key()
    outs: list[Any] = []

    def listed(x: Any, name: str) -> str:
        outs.append(x)
        return _TENSOR

    nesting = outline(tree, listed)
    return _put(kind, outs, () if outs else [torch.empty(0)], arguments, n, nesting)  # see `_barrier`


def _has_literal_keys(tree: Any) -> bool:
    if isinstance(tree, dict):
        return all(_is_literal(key) for key in tree) and all(_has_literal_keys(x) for x in tree.values())
    return not isinstance(tree, list | tuple) or all(_has_literal_keys(x) for x in tree)


def _is_literal(key: Any) -> bool:
    if type(key) is tuple:
        return all(_is_literal(part) for part in key)
    return key is None or type(key) in (str, int, bool, bytes)


def _reduce(arguments: dict[str, Any]) -> Any:
    root, x = _root(arguments, "dst"), [arguments["tensor"]]
    outs, given = (x, []) if _group_of(arguments).rank == root[0] else ([], x)
    return _put("reduce", outs, given, arguments, root)


def _all_gather(arguments: dict[str, Any]) -> Any:
    if arguments["tensor"] is None:
        return _no_shape()
    return _put("all_gather", arguments["tensor_list"], [arguments["tensor"]], arguments)


def _all_to_all_single(arguments: dict[str, Any]) -> Any:
    out, x = arguments["output"], arguments["input"]
    outs, ins = arguments["output_split_sizes"], arguments["input_split_sizes"]
    n: list[int] = []
    if outs or ins:
        parts = len(outs or ins)
        n = [*(outs or [out.shape[0] // parts] * parts), *(ins or [x.shape[0] // parts] * parts)]
    return _put("all_to_all_single", [out], [x], arguments, n)


def _barrier(arguments: dict[str, Any]) -> Any:
    if arguments["device_ids"] is not None or arguments["timeout"] is not None:
        return _no_timeout()
    return _put("barrier", (), [torch.empty(0)], arguments)  # Inductor needs a tensor to find a call's device


def _recv(arguments: dict[str, Any]) -> Any:
    if arguments["status"] is not None:
        return _no_operator()
    if arguments["src"] is None and arguments["group_src"] is None:
        return _no_shape()
    root = _root(arguments, "src")
    _put("recv", [arguments["tensor"]], (), arguments, [*root, arguments["tag"] or 0])
    return -1 if isinstance(arguments["group"], NonMember) else _group_of(arguments).ranks[root[0]]


_TRACED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "all_reduce": lambda a: (
        _put_tree("all_reduce", a["tensor"], a) if a["travel"] is a["lost"] is None else _no_narrow_type()
    ),
    "all_reduce_coalesced": lambda a: _put_tree("all_reduce_coalesced", a["tensors"], a),
    "broadcast": lambda a: _put_tree("broadcast", a["tensor"], a, _root(a, "src")),
    "reduce": _reduce,
    "scan": lambda a: _put("scan", [a["tensor"]], (), a),
    "exscan": lambda a: _put("exscan", [a["tensor"]], (), a),
    "all_gather": _all_gather,
    "all_gather_into_tensor": lambda a: _put(
        "all_gather_single", [a["output_tensor"]], [a["input_tensor"]], a
    ),
    "gather": lambda a: _put("gather", _blocks(a["gather_list"]), [a["tensor"]], a, _root(a, "dst", 0)),
    "gather_single": lambda a: _put(
        "gather_single", _blocks(a["gather_tensor"]), [a["tensor"]], a, _root(a, "dst", 0)
    ),
    "scatter": lambda a: _put("scatter", [a["tensor"]], _blocks(a["scatter_list"]), a, _root(a, "src", 0)),
    "scatter_single": lambda a: _put(
        "scatter_single", [a["tensor"]], _blocks(a["scatter_tensor"]), a, _root(a, "src", 0)
    ),
    "reduce_scatter": lambda a: _put("reduce_scatter", [a["output"]], a["input_list"], a),
    "reduce_scatter_tensor": lambda a: _put(
        "reduce_scatter_single", [a["output"]], [a["input"]], a, a["input_split_sizes"] or ()
    ),
    "all_to_all": lambda a: _put("all_to_all", a["output_tensor_list"], a["input_tensor_list"], a),
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "send": lambda a: _put("send", (), [a["tensor"]], a, [*_root(a, "dst"), a["tag"] or 0]),
    "recv": _recv,
}
_MODULES = (collectives, multigpu, objects, p2p, ProcessGroup, Work)
_NAMES: dict[str, tuple[str, ...]] = {}
"""The names of the arguments of each public function that is traced."""

for _module in _MODULES:
    run_uncompiled(vars(_module).values())  # for calls that break the graph
    for _name in _TRACED.keys() & vars(_module).keys() if _module in (collectives, p2p) else ():
        _code = vars(_module)[_name].__code__
        _NAMES[_name] = _code.co_varnames[: _code.co_argcount]


def trace(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Trace a call of the public function `name`."""
    names = _NAMES.get(name, ())
    if name not in _TRACED or len(args) > len(names) or any(each not in names for each in named):
        return _no_operator()
    arguments = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | named
    return _TRACED[name](arguments)
