"""RRef: a reference to a value that stays with the worker that made it; `remote`, which makes a value elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Generic, TypeVar

from ..core.future import anew
from ..core.work import Timeout
from ..errors import NotInitializedError, RpcTimeoutError, UsageError
from . import wire
from .agent import current_agent
from .calls import rpc_async, rpc_sync, run_user_function
from .counting import Id, Reference
from .functions import async_execution
from .futures import Future
from .references import References
from .worker_info import Worker, WorkerInfo

T = TypeVar("T")


def _references() -> References:
    current_agent()
    assert References.current is not None, "an agent has one"
    return References.current


class RRef(Generic[T]):
    """A reference to a value on this or another worker: its owner, who keeps it as long as there are RRefs to it.

    An RRef travels as an argument or result of a call, also inside of containers; the worker where it arrives has an
    RRef of its own. `RRef(value)` makes this worker the owner of a value, `remote` another one.

    Args:
        value: what it refers to.
        type_hint: of no effect.

    Example:
        >>> counter = rpc.remote("worker1", Counter, args=(5,))
        >>> counter.rpc_sync().add(3)
        8
        >>> counter.to_here().total
        8
    """

    __slots__ = ("__weakref__", "_made", "_methods", "_ref", "_references")
    _made: Future[None] | None  # the call that makes the value, if this RRef comes from `remote`
    _methods: tuple[str, ...]  # methods that the value is known to have
    _ref: Reference
    _references: References

    def __init__(self, value: T, type_hint: Any = None) -> None:
        references = _references()
        self._bind(references, references.own(value))

    def _bind(self, references: References, ref: Reference, made: Future[None] | None = None) -> RRef[T]:
        self._ref, self._made, self._methods = ref, made, ()
        self._references = references  # last: from now on __del__ releases it
        return self

    def to_here(self, timeout: Timeout = None) -> T:
        """A copy of the value; on its owner, the value itself. Waits until the value is there.

        Args:
            timeout: seconds or timedelta; 0: without limit; None: that of `init_rpc`, and on the owner no limit.

        Raises:
            RpcTimeoutError: it did not come in time, or the call of `remote` took longer than its timeout.
            PeerDiedError: the owner died.
            NotInitializedError: rpc was shut down, and all RRefs ended with it.

        What the function that makes the value raised, is raised here.
        """
        self._check("to_here")
        value: T = self._references.fetch(self._ref, timeout)
        if (
            not self.confirmed_by_owner() and self._made is not None
        ):  # the message that says so is behind the value
            self._references.confirm(self._ref)
        return value

    def local_value(self) -> T:
        """The value itself, on its owner. Waits until the value is there.

        Raises:
            UsageError: this worker is not the owner.
            NotInitializedError: rpc was shut down.

        What the function that makes the value raised, is raised here.
        """
        self._check("local_value")
        if not self.is_owner():
            raise UsageError(
                f"local_value() of {self} was called on {self._references.agent.me}; use to_here()"
            )
        value: T = self._references.value_of(self._ref.rref).wait()
        return value

    def owner(self) -> WorkerInfo:
        """The worker that has the value."""
        return self._references.agent.workers[self._ref.owner]

    def owner_name(self) -> str:
        """The name of the worker that has the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Whether this worker has the value."""
        return self._references.agent.me.id == self._ref.owner

    def confirmed_by_owner(self) -> bool:
        """Whether the owner knows this RRef. One made by `remote` is known when its arguments have come."""
        return self._references.is_known(self._ref)

    def rpc_sync(self, timeout: Timeout = None) -> Any:
        """An object whose methods are those of the value, called by `rpc_sync` on its owner.

        Example:
            >>> rref.rpc_sync().view(2, 2)
        """
        return _Proxy(self, rpc_sync, timeout)

    def rpc_async(self, timeout: Timeout = None) -> Any:
        """An object whose methods are those of the value, called by `rpc_async` on its owner; they return Futures."""
        return _Proxy(self, rpc_async, timeout)

    def remote(self, timeout: Timeout = None) -> Any:
        """An object whose methods are those of the value, called by `remote` on its owner; they return RRefs."""
        return _Proxy(self, remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Go backward from the value, a tensor of one element, on its owner; returns when the gradients are there.

        Args:
            dist_autograd_ctx_id: of the context of `rpc.autograd` that gets the gradients, on all workers; -1: the
                owner's leaves get them in `.grad`, where the graph is all on this worker.
            retain_graph: keep the graph for another backward pass.

        Raises:
            UsageError: -1 on another worker than the owner, no such context, or the value is no such tensor.

        And all that `rpc.autograd.backward` raises.

        Example:
            >>> with rpc.autograd.context() as context_id:
            ...     loss = rpc.remote("worker1", loss_of, args=(weight,))
            ...     loss.backward(context_id)
        """
        self._check("backward")
        if self.is_owner():
            backward(self, dist_autograd_ctx_id, retain_graph)
        elif dist_autograd_ctx_id == -1:
            raise UsageError(
                f"User RRefs require 'dist_autograd_ctx_id' to be specified: the value of {self} is on another worker"
            )
        else:
            rpc_sync(self.owner(), backward, args=(self, dist_autograd_ctx_id, retain_graph))

    def _check(self, doing: str) -> None:
        if self._references.is_closed:
            raise NotInitializedError(f"{doing}() of {self}: rpc was shut down, and all RRefs ended with it")
        if self._made is not None and self._made.done() and (error := self._made.exception()):
            if isinstance(error, RpcTimeoutError):
                raise RpcTimeoutError(
                    f"{doing}() of {self}: remote() timed out, and its value may never be there"
                )
            raise anew(error)

    def __repr__(self) -> str:
        (_, rref, fork), kind = self._ref, "Owner" if self.is_owner() else "User"
        return f"{kind}RRef({rref[0]}.{rref[1]}, fork {fork[0]}.{fork[1]}, of {self.owner_name()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"Can not pickle rref in python pickler: {self} travels as an argument or result of a remote call only"
        )

    def __del__(self) -> None:
        if (references := getattr(self, "_references", None)) is not None:
            references.todo.put(self._ref)


def _reduce(rref: RRef[Any], to: WorkerInfo) -> tuple[Any, ...]:
    return _arrived, tuple(rref._references.pass_on(rref._ref, to))


def _arrived(owner: int, rref: Id, fork: Id) -> RRef[Any]:
    references, ref = References.current, Reference(owner, rref, fork)
    if references is None:
        raise NotInitializedError("an RRef has come, but rpc was shut down")
    references.take_in(ref, wire.sender())
    return RRef.__new__(RRef)._bind(references, ref)


def _stays(reduced: tuple[Any, ...]) -> None:
    if References.current is not None:
        References.current.take_back(Reference(*reduced[1]))


wire.reduce_type(RRef, _reduce, _stays)


class _Proxy:
    """The methods of an RRef's value, called on its owner.

    The first `rpc_async` or `remote` call of a method asks the owner, and waits, whether the value has the method. So
    the call itself raises AttributeError, as in torch.
    """

    def __init__(self, rref: RRef[Any], call: Callable[..., Any], timeout: Timeout) -> None:
        self._rref, self._call, self._timeout = rref, call, timeout

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            if self._call is not rpc_sync and name not in self._rref._methods:
                rpc_sync(self._rref.owner(), find_method, (self._rref, name), timeout=self._timeout)
                self._rref._methods = (*self._rref._methods, name)
            return self._call(
                self._rref.owner(), call_method, (self._rref, name, args, kwargs), timeout=self._timeout
            )

        return method


def find_method(rref: RRef[Any], name: str) -> None:
    """Check that the value of an RRef owned here has an attribute; AttributeError: it has none."""
    getattr(rref.local_value(), name)


@async_execution
def call_method(rref: RRef[Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Future[Any]:
    """Call a method of the value of an RRef, on its owner."""
    result = run_user_function(getattr(rref.local_value(), name), args, kwargs)
    if isinstance(result, Future):
        return result
    done: Future[Any] = Future()
    done.complete(result, None)
    return done


def backward(rref: RRef[Any], context_id: int, retain_graph: bool) -> None:
    """Go backward from the value of an RRef, on its owner."""
    value = rref.local_value()
    if not hasattr(value, "backward"):
        raise UsageError(
            f"RRef should contain a tensor for .backward(): the value of {rref} is {value!r:.80}"
        )
    if context_id != -1:
        import_module("fastcoll.rpc.autograd").backward(context_id, [value], retain_graph)
    else:
        value.backward(retain_graph=retain_graph)


def remote(
    to: Worker,
    func: Callable[..., T],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = None,
) -> RRef[T]:
    """Call `func(*args, **kwargs)` on another worker (or this one), which keeps the result, and return an RRef to it.

    Returns at once. Arrays and tensors among the arguments must stay as they are until `confirmed_by_owner()`.

    Args:
        to: a worker's name, its id (rank), or its WorkerInfo.
        func: a function, or a class, that the other worker can import by its name.
        args, kwargs: its arguments; anything that can be pickled.
        timeout: seconds or timedelta that the call may take; after that `to_here` of this RRef raises RpcTimeoutError;
            0: without limit; None: that of `init_rpc`.

    Returns:
        An RRef to the result.

    Raises:
        UsageError: there is no such worker, or an argument that cannot be pickled.
        NotInitializedError: `init_rpc` was not called, or `shutdown` was.

    What the function raises is raised by `to_here` and `local_value` of all RRefs to its result.

    Example:
        >>> rpc.remote("worker1", operator.add, args=(np.ones(2), 1)).to_here()
        array([2., 2.])
    """
    references = _references()
    if not callable(func):
        raise UsageError(f"func is {func!r}; give the function itself, without calling it")
    call = func, tuple(args or ()), dict(kwargs or {})
    return RRef.__new__(RRef)._bind(references, *references.make(references.agent.find(to), call, timeout))
