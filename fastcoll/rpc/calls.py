"""Calls of users' functions: `rpc_sync` and `rpc_async`, how functions are run, and how their errors return.

`contexts` holds objects that send a value with each call of a user's function (pickling.CallContext). The calling
thread runs each object's `encode(to)`. If `encode` returns bytes, they are sent with the call; if it returns None,
nothing is sent. `enter(value, sender)` returns a context manager. On the callee this encloses the unpickling of the
arguments, the function, and the pickling of the result; on the caller it encloses the unpickling of the result.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..core.work import Timeout
from ..errors import UsageError
from . import spans
from .agent import Agent, current_agent
from .functions import ASYNC
from .futures import Future, as_future
from .pickling import contexts
from .worker_info import Worker, WorkerInfo

__all__ = [
    "USER_CALL", "contexts", "get_rpc_timeout", "get_worker_info", "rpc_async", "rpc_sync", "run_user_function",
    "serve",
]  # fmt: skip

USER_CALL = 1
_PACKAGE = __name__.partition(".")[0] + "."
_log = logging.getLogger("fastcoll")


def rpc_async(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = None,
) -> Future[Any]:
    """Call `func(*args, **kwargs)` on another worker (or this one) and return at once.

    Arrays and tensors among the arguments must not change until the future is done.

    Args:
        to: a worker's name, its id (rank), or its WorkerInfo.
        func: a function that the other worker can import by its name.
        args, kwargs: the arguments; anything that can be pickled.
        timeout: seconds or timedelta until the future raises RpcTimeoutError; 0: without limit; None: the default of
            `init_rpc`.

    Returns:
        A Future of the result.

    Raises:
        UsageError: there is no such worker, or an argument cannot be pickled.
        NotInitializedError: `init_rpc` was not called, or `shutdown` was.

    The future raises what the function raises, PeerDiedError if the worker dies, AbortedError if it leaves, and
    RpcTimeoutError.
    """
    return _call(to, func, args, kwargs, timeout, False)


def _call(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
    timeout: Timeout,
    waits: bool,
) -> Future[Any]:
    if not callable(func):
        raise UsageError(f"func is {func!r}; give the function itself, without calling it")
    payload, agent = (func, tuple(args or ()), dict(kwargs or {})), current_agent()
    if not spans.is_possible():
        return agent.call(to, USER_CALL, payload, timeout, func, waits)
    call = partial(agent.call, to, USER_CALL, payload, timeout, func, waits)
    return spans.calling(str(to), func, payload[1], call)


def rpc_sync(
    to: Worker,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: Timeout = None,
) -> Any:
    """Call `func(*args, **kwargs)` on another worker (or this one) and wait for the result.

    Args:
        to, func, args, kwargs, timeout: as for `rpc_async`.

    Raises:
        RpcTimeoutError: the result did not arrive in time.
        PeerDiedError: the worker's process died.
        AbortedError: that worker or this one left.

    An exception of the function is raised here, with the traceback of the other worker as its cause.

    Examples:
        >>> rpc.rpc_sync("worker1", operator.add, args=(np.ones(2), 1))
        array([2., 2.])
    """
    return _call(to, func, args, kwargs, timeout, True).wait()


def get_rpc_timeout() -> float:
    """Return the default timeout of calls in seconds; 0: no limit.

    Raises:
        NotInitializedError: `init_rpc` was not called.
    """
    return current_agent().timeout


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and id of a worker; without a name, of this worker.

    Raises:
        UsageError: there is no worker of that name.
        NotInitializedError: `init_rpc` was not called.
    """
    agent = current_agent()
    return agent.me if worker_name is None else agent.find(worker_name)


def run_user_function(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a user's function here; return its result, or a Future of it if `async_execution` marks the function."""
    try:
        result = func(*args, **kwargs)
    except Exception:
        # Log no errors of this package's functions: they are meant for the caller.
        if not (getattr(func, "__module__", None) or "").startswith(_PACKAGE):
            # Log the traceback as text: a log handler may keep the record, and a traceback would keep the arguments.
            name = getattr(func, "__qualname__", func)
            _log.error("%s raised an exception, which its caller gets:\n%s", name, traceback.format_exc())
        raise
    is_future = hasattr(result, "add_done_callback")
    if getattr(func, ASYNC, False):
        if not is_future:
            raise UsageError(
                "Functions decorated with @rpc.async_function must return a torch.futures.Future object, or one of "
                f"rpc.Future; {func!r} returned {result!r:.80}"
            )
        return as_future(result)
    if is_future:
        raise UsageError(
            f"Can not pickle torch.futures.Future or a Future of rpc, which {func!r} returns; mark it by "
            "rpc.functions.async_execution"
        )
    return result


def serve(agent: Agent) -> None:
    """Have an agent run users' functions."""

    def run(_: WorkerInfo, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Any:
        if not spans.is_possible():
            return run_user_function(*call)
        return spans.serving(agent.me.name, call[0], call[1], partial(run_user_function, *call))

    agent.on(USER_CALL, run, with_contexts=True)
