"""The trace context that is sent with remote calls (pickling.CallContext), as JSON of W3C's traceparent and tracestate.

The caller imports this module in its first call after OpenTelemetry was imported. A worker that receives a context
imports it then.
"""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .._version import __version__
from . import pickling
from .worker_info import WorkerInfo

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer, TracerProvider

_MODULE = "opentelemetry.trace"
this_thread = threading.local()
"""Has `carrier`, the W3C trace context of the call that this thread is sending, as a dictionary; or None."""


def tracer() -> Tracer | None:
    """Return the tracer of the provider that the program has set; None: it has set none."""
    trace = sys.modules.get(_MODULE)
    if trace is None:
        return None
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return _tracer_of(provider)


@functools.lru_cache(1)
def _tracer_of(provider: TracerProvider) -> Tracer:
    return provider.get_tracer("fastcoll", __version__)


class _TraceContext:
    def encode(self, to: WorkerInfo) -> bytes | None:
        """Return the context of the call that this thread is sending; None: the call has no span."""
        carrier = getattr(this_thread, "carrier", None)
        return json.dumps(carrier).encode() if carrier else None

    @contextmanager
    def enter(self, value: bytes, sender: WorkerInfo) -> Iterator[None]:
        """Make the caller's span the current one: the parent of the callee's span, and for the future's callbacks."""
        if tracer() is None:
            yield
            return
        from opentelemetry import context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        token = context.attach(TraceContextTextMapPropagator().extract(json.loads(value)))
        try:
            yield
        finally:
            context.detach(token)


pickling.contexts[__name__] = _TraceContext()
