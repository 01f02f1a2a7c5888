"""Decorators of functions that are called remotely."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

ASYNC = "returns_future_of_its_result"


def async_execution(fn: F) -> F:
    """Mark a function that returns a Future: its caller gets the future's result.

    The callee blocks no thread until the future is done. Put `@staticmethod` or `@classmethod` above this decorator.

    Examples:
        >>> @rpc.functions.async_execution
        ... def add_chained(to, x, y, z):
        ...     return rpc.rpc_async(to, operator.add, args=(x, y)).then(lambda sum: sum.value() + z)
    """

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    setattr(wrapper, ASYNC, True)
    return wrapper  # type: ignore[return-value]
