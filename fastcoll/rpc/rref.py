"""RRef: a reference to a value that stays on its owner; `remote`, which makes a value on another worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Generic, TypeVar

from ..core.future import anew
from ..core.work import Timeout
from ..errors import NotInitializedError, RpcTimeoutError, UsageError
from . import pickling
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
    """A reference to a value on this or another worker, which is the value's owner.

    The owner keeps the value as long as there are RRefs to it.
    An RRef can be an argument or result of a call, also inside containers; the receiver gets an RRef of its own.
    `RRef(value)` makes this worker the owner of a value, `remote` makes another worker the owner.

    Args:
        value: the value.
        type_hint: without effect.

    Examples:
        >>> counter = rpc.remote("worker1", Counter, args=(5,))
        >>> counter.rpc_sync().add(3)
        8
        >>> counter.to_here().total
        8
    """

    __slots__ = ("__weakref__", "_made", "_methods", "_ref", "_references")
    _made: Future[None] | None  # the call that makes the value, if `remote` made this RRef
    _methods: tuple[str, ...]  # methods that the value is known to have
    _ref: Reference
    _references: References

    def __init__(self, value: T, type_hint: Any = None) -> None:
        references = _references()
        self._bind(references, references.own(value))

    def _bind(self, references: References, ref: Reference, made: Future[None] | None = None) -> RRef[T]:
        self._ref, self._made, self._methods = ref, made, ()
        self._references = references  # set last: from now on __del__ releases `ref`
        return self

    def to_here(self, timeout: Timeout = None) -> T:
        """Return a copy of the value; on its owner, the value itself. Waits until the value exists.

        Args:
            timeout: seconds or timedelta; 0: without limit; None: the default of `init_rpc`, but no limit on the owner.

        Raises:
            RpcTimeoutError: the value did not arrive in time, or the call of `remote` timed out.
            PeerDiedError: the owner died.
            NotInitializedError: rpc was shut down, and all RRefs ended with it.

        An exception of the function that makes the value is raised here.
        """
        self._check("to_here")
        value: T = self._references.fetch(self._ref, timeout)
        # The owner's CONFIRMED may arrive later, but the answer already shows that the owner knows this RRef.
        if not self.confirmed_by_owner() and self._made is not None:
            self._references.confirm(self._ref)
        return value

    def local_value(self) -> T:
        """Return the value itself, on its owner. Waits until the value exists.

        Raises:
            UsageError: this worker is not the owner.
            NotInitializedError: rpc was shut down.

        An exception of the function that makes the value is raised here.
        """
        self._check("local_value")
        if not self.is_owner():
            raise UsageError(
                f"local_value() of {self} was called on {self._references.agent.me}; use to_here()"
            )
        value: T = self._references.value_of(self._ref.rref).wait()
        return value

    def owner(self) -> WorkerInfo:
        """Return the worker that has the value."""
        return self._references.agent.workers[self._ref.owner]

    def owner_name(self) -> str:
        """Return the name of the worker that has the value."""
        return self.owner().name

    def is_owner(self) -> bool:
        """Return whether this worker has the value."""
        return self._references.agent.me.id == self._ref.owner

    def confirmed_by_owner(self) -> bool:
        """Return whether the owner counts this RRef. It counts an RRef of `remote` once that call has arrived."""
        return self._references.is_known(self._ref)

    def rpc_sync(self, timeout: Timeout = None) -> Any:
        """Return an object whose methods call those of the value by `rpc_sync` on the owner.

        Examples:
            >>> rref.rpc_sync().view(2, 2)
        """
        return _Proxy(self, rpc_sync, timeout)

    def rpc_async(self, timeout: Timeout = None) -> Any:
        """Return an object whose methods call those of the value by `rpc_async` on the owner, and return Futures."""
        return _Proxy(self, rpc_async, timeout)

    def remote(self, timeout: Timeout = None) -> Any:
        """Return an object whose methods call those of the value by `remote` on the owner, and return RRefs."""
        return _Proxy(self, remote, timeout)

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Run a backward pass from the value, a tensor of one element, on its owner; return when it has finished.

        Args:
            dist_autograd_ctx_id: the context of `rpc.autograd` that collects the gradients on all workers. -1: add the
                gradients to the leaves' `.grad`; this works only on the owner, and only if it has the whole graph.
            retain_graph: keep the graph for another backward pass.

        Raises:
            UsageError: the id is -1 and this worker is not the owner, there is no such context, or the value is not a
                tensor of one element that needs a gradient.

        Also raises what `rpc.autograd.backward` raises.

        Examples:
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
            raise NotInitializedError(
                f"{doing}() of {self}: rpc was shut down, or this process was forked, and all RRefs ended with it"
            )
        if self._made is not None and self._made.done() and (error := self._made.exception()):
            if isinstance(error, RpcTimeoutError):
                raise RpcTimeoutError(
                    f"{doing}() of {self}: remote() timed out, and its value may never exist"
                )
            raise anew(error)

    def __repr__(self) -> str:
        (_, rref, fork), kind = self._ref, "Owner" if self.is_owner() else "User"
        return f"{kind}RRef({rref[0]}.{rref[1]}, fork {fork[0]}.{fork[1]}, of {self.owner_name()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            f"Can not pickle rref in python pickler: {self} can be sent only as an argument or result of a remote call"
        )

    def __del__(self) -> None:
        if (references := getattr(self, "_references", None)) is not None:
            references.todo.put(self._ref)


def _reduce(rref: RRef[Any], to: WorkerInfo) -> tuple[Any, ...]:
    return _rebuild, tuple(rref._references.pass_on(rref._ref, to))


def _rebuild(owner: int, rref: Id, fork: Id) -> RRef[Any]:
    references, ref = References.current, Reference(owner, rref, fork)
    if references is None:
        raise NotInitializedError("an RRef has arrived, but rpc was shut down")
    references.take_in(ref, pickling.sender())
    return RRef.__new__(RRef)._bind(references, ref)


def _take_back(reduced: tuple[Any, ...]) -> None:
    if References.current is not None:
        References.current.take_back(Reference(*reduced[1]))


pickling.reduce_type(RRef, _reduce, _take_back)


class _Proxy:
    """Calls the methods of an RRef's value on its owner.

    Before the first `rpc_async` or `remote` call of a method, the caller asks the owner whether the value has the
    method, and waits for the answer. So the call itself raises AttributeError, as in torch, instead of its future.
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
    """Raise AttributeError if the value of an RRef, which this worker owns, has no attribute `name`."""
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
    """Run a backward pass from the value of an RRef, on its owner."""
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
    """Call `func(*args, **kwargs)` on another worker (or this one), which keeps the result; return an RRef to it.

    Returns at once. Arrays and tensors among the arguments must not change until `confirmed_by_owner()` is True.

    Args:
        to: a worker's name, its id (rank), or its WorkerInfo.
        func: a function, or a class, that the other worker can import by its name.
        args, kwargs: the arguments; anything that can be pickled.
        timeout: seconds or timedelta that the call may take; after that `to_here` of this RRef raises RpcTimeoutError;
            0: without limit; None: the default of `init_rpc`.

    Returns:
        An RRef to the result.

    Raises:
        UsageError: there is no such worker, or an argument cannot be pickled.
        NotInitializedError: `init_rpc` was not called, or `shutdown` was.

    An exception of the function is raised by `to_here` and `local_value` of all RRefs to its result.

    Examples:
        >>> rpc.remote("worker1", operator.add, args=(np.ones(2), 1)).to_here()
        array([2., 2.])
    """
    references = _references()
    if not callable(func):
        raise UsageError(f"func is {func!r}; give the function itself, without calling it")
    call = func, tuple(args or ()), dict(kwargs or {})
    return RRef.__new__(RRef)._bind(references, *references.make(references.agent.find(to), call, timeout))
