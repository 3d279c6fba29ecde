"""A span per request: its content, its parent, and the behaviour without the packages or an address."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("opentelemetry.sdk", reason="pip install 'trtspec[otel]'")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.serve.server import running, scripted
from tests.serve.test_engine_client import SCRIPT
from trtspec.errors import ConfigError, DependencyError
from trtspec.outputs import SpeculationStats
from trtspec.serve.http.api_errors import ApiError
from trtspec.serve.http.protocol import CompletionRequest
from trtspec.serve.http.request_log import Record
from trtspec.serve.http.service import HTTPGeneration, Tally
from trtspec.serve.http.tracing import ADDRESSES, Tracing, from_environment

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "def secret():"


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.clear()


def traced(exporter: InMemorySpanExporter, record: Record) -> ReadableSpan:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record.finish()
    Tracing(provider)(record)
    (span,) = exporter.get_finished_spans()
    return span


def generated(**more: Any) -> HTTPGeneration:
    request = CompletionRequest(prompt=SECRET, max_tokens=8, temperature=0.5, n=2, stop=[SECRET])
    tallies = [
        Tally("a b", [1, 2, 3], 1, SpeculationStats({(2, 4): 1, (1, 0): 1}), "stop", None),
        Tally("a b c", [1, 2, 3, 4], 2, SpeculationStats({(2, 2): 2}), "length", None),
    ]
    started = time.perf_counter()
    service: Any = SimpleNamespace(name="coder")
    stream: Any = None
    return HTTPGeneration(service, stream, 5, 9.0, started, tallies, request, first_token=0.25, **more)


def test_a_span_says_what_was_asked_and_given(spans: InMemorySpanExporter) -> None:
    record = Record("r1", "POST", "/v1/completions", {"traceparent": TRACEPARENT}, status=200)
    record.generation = generated()
    span = traced(spans, record)
    assert (span.name, span.kind) == ("text_completion coder", SpanKind.SERVER)
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, PARENT)
    assert span.parent.is_remote
    assert span.attributes is not None
    assert dict(span.attributes) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "trtspec.request.id": "r1",
        "trtspec.speculation.drafted_tokens": 8,
        "trtspec.speculation.accepted_tokens": 3,
        "trtspec.speculation.num_drafts": 3,
        "trtspec.speculation.steps": 4,
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "trtspec",
        "gen_ai.request.model": "coder",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.model": "coder",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 7,
    }
    (event,) = span.events
    assert event.name == "first token"
    assert span.start_time == record.began
    assert 0.25e9 <= event.timestamp - record.began < 1e9
    assert span.end_time == record.ended
    assert span.status.status_code is StatusCode.UNSET
    assert SECRET not in span.to_json()


@pytest.mark.parametrize("traceparent", ["", "00-xyz-1-01", f"00-{'0' * 32}-{PARENT}-01", "\r\nforged"])
def test_a_parent_that_is_none_is_left_alone(spans: InMemorySpanExporter, traceparent: str) -> None:
    span = traced(spans, Record("r2", "GET", "/v1/models", {"traceparent": traceparent}, status=200))
    assert span.parent is None
    assert span.name == "GET /v1/models"


def test_errors_are_told_apart(spans: InMemorySpanExporter) -> None:
    late = generated(failed=ApiError(504, "late", code="timeout"))
    span = traced(spans, Record("r3", "POST", "/v1/completions", {}, status=200, generation=late))
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "timeout")
    spans.clear()
    span = traced(spans, Record("r4", "BREW", "/v1/completions", {}, status=401, error="invalid_api_key"))
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.UNSET, "invalid_api_key")
    assert span.name == "_OTHER /v1/completions"


def test_what_operators_ask_for_is_no_span(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="unpack"):
        traced(spans, Record("r5", "GET", "/health", {}, status=200))


# -- where tracing is switched on -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ADDRESSES, "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


def test_without_an_address_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() is None
    monkeypatch.setenv(ADDRESSES[0], "")
    assert from_environment() is None
    monkeypatch.setenv(ADDRESSES[0], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert from_environment() is None
    code = (
        "import sys, trtspec.serve.server as s; assert s; print([m for m in sys.modules if 'opentelemetry.sdk' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_packages_and_other_protocols_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES[1], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"'grpc'.*http/protobuf"):
        from_environment()
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(DependencyError, match=rf"{ADDRESSES[1]} is set.*pip install 'trtspec\[otel\]'"):
        from_environment()


class _Collector(BaseHTTPRequestHandler):
    """A collector that keeps what an OTLP exporter sends."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            raise AssertionError("not asked for")
        self.server.got.append((self.path, ExportTraceServiceRequest.FromString(body)))  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *ignored: Any) -> None:
        """Log nothing."""


ENGINE = (
    SCRIPT
    + """
say(ready=FACTS)
for line in lines:
    request = json.loads(line).get("submit")
    ends = [None] * 11 + ["length"]
    for end in ends if request is not None else []:
        say(deltas=[[request, 0, "x", [1], [], 0, False, end]], load={})
        time.sleep(0.002)
"""
)


def test_a_server_sends_its_spans(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server sends the span of a request, here of one to a script in place of the engine."""
    (tmp_path / "engine.py").write_text(ENGINE)
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    collector.got = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=collector.serve_forever)
    thread.start()
    try:
        monkeypatch.setenv(ADDRESSES[0], f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=mine,deployment.environment.name=test")
        with running(model, tmp_path / "log", program=scripted(tmp_path / "engine.py")) as server:
            headers = {"traceparent": TRACEPARENT, "X-Request-Id": "sent-1"}
            body = {"prompt": SECRET, "max_tokens": 12, "ignore_eos": True, "stream": True}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200
            assert server.get("/health")
        assert server.process.returncode == 0  # unsent spans are sent before it ends
    finally:
        collector.shutdown()
        collector.server_close()
        thread.join()
    ((path, sent),) = collector.got  # type: ignore[attr-defined]
    assert path == "/v1/traces"
    (resource,) = sent.resource_spans
    assert {one.key: one.value.string_value for one in resource.resource.attributes}["service.name"] == "mine"
    (span,) = resource.scope_spans[0].spans
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    values = {one.key: one.value for one in span.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == 12
    assert values["trtspec.request.id"].string_value == "sent-1"
    assert [event.name for event in span.events] == ["first token"]
    assert span.start_time_unix_nano < span.events[0].time_unix_nano < span.end_time_unix_nano
    assert b"secret" not in sent.SerializeToString()


@pytest.mark.long
def test_a_collector_that_is_gone_holds_up_nobody(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES[0], "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with running(model, tmp_path / "log") as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2}, timeout=30)
        assert answer.status_code == 200
    assert server.process.returncode == 0  # `running` kills a server that takes more than 20 s
