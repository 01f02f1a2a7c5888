"""Spans of OpenTelemetry for remote calls: parents, attributes and errors, in workers with and without a provider."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, format_span_id, format_trace_id
from programs import python, until

import fastcoll
from fastcoll import rpc
from fastcoll.launch.nodes import free_port
from rpc.victims import LIMIT

_exporter = InMemorySpanExporter()


@pytest.fixture
def worker(rank: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Make this rank a worker with a provider; the rank that is the fixture's parameter has none."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(_exporter))
    # `set_tracer_provider` works once in a process, and a rank runs several tests.
    without = rank == getattr(request, "param", None)
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None if without else provider)
    _exporter.clear()
    rpc.init_rpc(f"w{rank}")
    yield rank
    rpc.shutdown(timeout=LIMIT)


def spans() -> Sequence[ReadableSpan]:
    """Return the ended spans of this worker."""
    return _exporter.get_finished_spans()


def spans_of(kind: str, count: int) -> list[tuple[Any, ...]]:
    """Return the ended spans of a kind as plain data, once there are so many: name, trace, span, parent, and more."""
    found = until(
        lambda: (ended := [each for each in spans() if each.kind.name == kind])[count - 1 :] and ended
    )
    return [
        (
            each.name,
            format_trace_id(each.context.trace_id),
            format_span_id(each.context.span_id),
            each.parent and format_span_id(each.parent.span_id),
            dict(each.attributes or {}),
            each.status.status_code.name,
            [dict(event.attributes or {})["exception.type"] for event in each.events],
        )
        for each in found
    ]


def current() -> str:
    """Return the current span on the callee."""
    return format_span_id(trace.get_current_span().get_span_context().span_id)


def fail() -> None:
    raise KeyError("absent")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise AttributeError("no text")


def fail_without_text() -> None:
    raise UnprintableError


@rpc.functions.async_execution
def later(to: str) -> rpc.Future[int]:
    return rpc.rpc_async(to, operator.add, args=(1, 2))


class Counter:
    def add(self, many: int) -> int:
        return many + 1


@pytest.mark.ranks(1, 2)
def test_the_callees_span_has_the_callers_span_as_its_parent(worker: int, world_size: int) -> None:
    to = f"w{world_size - 1}"
    if worker == 0:
        with trace.get_tracer("test").start_as_current_span("mine") as mine:
            inside = rpc.rpc_sync(to, current)
        ((name, traced, client, parent, attributes, status, _),) = spans_of("CLIENT", 1)
        assert parent == format_span_id(mine.get_span_context().span_id)
        assert name == attributes["rpc.method"] == f"{__name__}/current"
        assert attributes == {"rpc.system.name": "fastcoll", "rpc.method": name, "server.address": to}
        ended = rpc.rpc_sync(to, spans_of, args=("SERVER", 1))
        assert ended[0] == (name, traced, inside, client, attributes, "UNSET", [])
        assert status == "UNSET"


@pytest.mark.ranks(2)
def test_exceptions_are_recorded_in_both_spans(worker: int) -> None:
    if worker == 0:
        with pytest.raises(KeyError, match="absent"):
            rpc.rpc_sync("w1", fail)
        (client,) = spans_of("CLIENT", 1)
        server = rpc.rpc_sync("w1", spans_of, args=("SERVER", 1))[0]
        for each in (client, server):
            assert each[4]["error.type"] == "builtins.KeyError"
            assert each[5:] == (StatusCode.ERROR.name, ["KeyError"])
        with pytest.raises(UnprintableError):
            rpc.rpc_sync("w1", fail_without_text)
        assert spans_of("CLIENT", 3)[-1][6] == [f"{__name__}.UnprintableError"]
        with pytest.raises(fastcoll.UsageError, match="there is no worker"):
            rpc.rpc_sync("nobody", fail)
        assert spans_of("CLIENT", 4)[-1][6] == ["fastcoll.errors.UsageError"]


@pytest.mark.ranks(2)
def test_the_span_of_an_async_function_ends_with_its_future_and_nested_calls_are_its_children(
    worker: int,
) -> None:
    if worker == 0:
        assert rpc.rpc_async("w1", later, args=("w0",)).wait() == 3
        ((_, traced, client, *_),) = spans_of("CLIENT", 1)
        outer = next(each for each in rpc.rpc_sync("w1", spans_of, args=("SERVER", 1)) if "later" in each[0])
        inner = rpc.rpc_sync("w1", spans_of, args=("CLIENT", 1))[0]
        assert (outer[1], outer[3]) == (traced, client)
        assert (inner[0], inner[1], inner[3]) == ("_operator/add", traced, outer[2])
        assert spans_of("SERVER", 1)[0][3] == inner[2]


@pytest.mark.ranks(2)
def test_remote_and_the_methods_of_its_value_have_spans(worker: int) -> None:
    if worker == 0:
        rref = rpc.remote("w1", Counter)
        assert rref.rpc_sync().add(1) == 2
        names = [each[0] for each in spans_of("CLIENT", 2)]
        assert names == [f"{__name__}/Counter", "RRef/add"]
        served = rpc.rpc_sync("w1", spans_of, args=("SERVER", 2))
        assert {each[0]: each[3] for each in served[:2]} == {
            each[0]: each[2] for each in spans_of("CLIENT", 2)[:2]
        }
        rref = rpc.remote("w1", fail)
        with pytest.raises(KeyError):
            rref.to_here()
        failed = [
            each for each in rpc.rpc_sync("w1", spans_of, args=("SERVER", 4)) if each[0].endswith("/fail")
        ]
        assert failed[0][5:] == ("ERROR", ["KeyError"])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("worker", [0, 1], indirect=True)
def test_workers_without_a_provider_call_and_are_called(worker: int, request: pytest.FixtureRequest) -> None:
    without = request.node.callspec.params["worker"]
    if worker == 0:
        for _ in range(3):
            assert rpc.rpc_sync("w1", operator.add, args=(1, 2)) == 3
        if without == 1:
            assert [each[3] for each in spans_of("CLIENT", 3)] == [None] * 3
            assert rpc.rpc_sync("w1", spans) == ()
        else:
            assert spans() == ()
            assert all(each[3] is None for each in rpc.rpc_sync("w1", spans_of, args=("SERVER", 3)))


def test_without_a_provider_nothing_of_opentelemetry_is_imported() -> None:
    code = (
        "import operator, sys\nfrom fastcoll import rpc\nrpc.init_rpc('w', rank=0, world_size=1)\n"
        "print(rpc.rpc_sync('w', operator.add, args=(1, 2)), rpc.remote('w', dict).to_here())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\nrpc.shutdown()"
    )
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    done = python("-c", code, environ=environ)
    assert done.stdout == "3 {}\n[]\n", done.stderr
