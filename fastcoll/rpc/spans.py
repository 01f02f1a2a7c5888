"""Spans of OpenTelemetry for remote calls, in a program that has set a tracer provider.

The caller's span ends when the call's future is done. The callee's span is around the function; its parent is the
caller's span, whose context is sent with the call (span_context.py). This package imports OpenTelemetry only in
processes that have imported it already, as a program does to set a provider. In others a call costs one look into
`sys.modules` (`is_possible`) more.

Attributes follow OpenTelemetry's semantic conventions for RPC 1.40: rpc.system.name, rpc.method, server.address (the
callee's worker name), and error.type.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import message_of
from .futures import Future

if TYPE_CHECKING:
    from opentelemetry.trace import Span


def is_possible() -> bool:
    """Return whether the program may have set a tracer provider."""
    return "opentelemetry.trace" in sys.modules


def method_of(func: Callable[..., Any], args: Sequence[Any]) -> str:
    """Return the name of a function for rpc.method, as MODULE/NAME; for a method of an RRef's value, RRef/NAME."""
    name = getattr(func, "__qualname__", type(func).__qualname__)
    module = getattr(func, "__module__", None) or type(func).__module__
    if (module, name) == (f"{__package__}.rref", "call_method"):
        return f"RRef/{args[1]}"
    return f"{module}/{name}"


def calling(
    to: str, func: Callable[..., Any], args: Sequence[Any], call: Callable[[], Future[Any]]
) -> Future[Any]:
    """Make a call of `func` to the worker `to` by `call`, in a client span if the program has a provider."""
    from . import span_context  # calls carry its context from now on

    span = _start("CLIENT", to, func, args)
    if span is None:
        return call()
    from opentelemetry.trace import set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    before, carrier = getattr(span_context.this_thread, "carrier", None), dict[str, str]()
    TraceContextTextMapPropagator().inject(carrier, set_span_in_context(span))
    span_context.this_thread.carrier = carrier
    try:
        future = call()
    except BaseException as error:
        _end(span, error)
        raise
    finally:
        span_context.this_thread.carrier = before
    future.add_done_callback(partial(_end_with, span))
    return future


def serving(to: str, func: Callable[..., Any], args: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run `func` by `run` on this worker, which is `to`, in a server span if the program has a provider.

    If the result is a Future, the span ends when it is done.
    """
    span = _start("SERVER", to, func, args)
    if span is None:
        return run()
    from opentelemetry.trace import use_span

    try:
        with use_span(span, record_exception=False, set_status_on_exception=False):
            result = run()
    except BaseException as error:
        _end(span, error)
        raise
    if isinstance(result, Future):
        result.add_done_callback(partial(_end_with, span))
    else:
        span.end()
    return result


def _start(kind: str, to: str, func: Callable[..., Any], args: Sequence[Any]) -> Span | None:
    """Start a span of a SpanKind for a call of `func` at the worker `to`; None: the program has no provider."""
    from .span_context import tracer

    found = tracer()
    if found is None:
        return None
    from opentelemetry.trace import SpanKind

    method = method_of(func, args)
    about = {"rpc.system.name": "fastcoll", "rpc.method": method, "server.address": to}
    return found.start_span(method, kind=SpanKind[kind], attributes=about)


def _end_with(span: Span, done: Future[Any]) -> None:
    _end(span, done.exception())


def _end(span: Span, error: BaseException | None) -> None:
    """End a span, and record the error with which its call has failed."""
    if error is not None:
        from opentelemetry.trace import Status, StatusCode

        kind, text = f"{type(error).__module__}.{type(error).__qualname__}", message_of(error)
        try:
            span.record_exception(error)
        except Exception:  # that of the error's own `__str__`
            span.add_event("exception", {"exception.type": kind, "exception.message": text})
        span.set_status(Status(StatusCode.ERROR, text))
        span.set_attribute("error.type", kind)
    span.end()
