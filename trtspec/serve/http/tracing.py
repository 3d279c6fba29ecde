"""OpenTelemetry traces: one span per request.

Only this module imports OpenTelemetry's packages, and only if an endpoint is set.

Attributes follow the semantic conventions for HTTP servers and for generative AI (gen_ai.*, in development:
https://opentelemetry.io/docs/specs/semconv/gen-ai/). Attributes without a name there are under trtspec.*. A span
contains no prompt, no answer and no stop string.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import trtspec
from trtspec.errors import ConfigError, DependencyError
from trtspec.serve.http.request_log import ENDPOINTS, Record

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

ADDRESSES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TIMEOUT", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT")
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
_METHODS = {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"}
_ASKED = {  # field of a request -> attribute, for fields that it has
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "num_speculative_tokens": "trtspec.request.num_speculative_tokens",
}


class Tracing:
    """A listener of RequestLog that makes each request to /v1 a span, a child of the caller's given a traceparent."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("trtspec.serve", trtspec.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, record: Record) -> None:
        """Create the span of a request that is over, with the times of its record."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if record.endpoint not in ENDPOINTS:
            return
        span = self._tracer.start_span(
            _name(record),
            context=self._propagator.extract(record.trace),
            kind=SpanKind.SERVER,
            attributes=_attributes(record),
            start_time=record.began,
        )
        if record.first_token_at is not None:
            span.add_event("first token", timestamp=record.first_token_at)
        failed = record.generation is not None and record.generation.failed is not None
        if record.status >= 400 or failed:
            span.set_attribute("error.type", record.reason)
        if record.status >= 500 or failed:
            span.set_status(Status(StatusCode.ERROR, record.reason))
        span.end(record.ended)

    def close(self) -> None:
        """Send the spans that have not been sent, and wait until that is done."""
        self._provider.shutdown()


def from_environment() -> Tracing | None:
    """Tracing as OpenTelemetry's environment variables configure it; None unless one of ADDRESSES is set.

    Raises DependencyError if the packages are missing, ConfigError for a protocol other than http/protobuf.
    """
    if not any(map(os.environ.get, ADDRESSES)) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if os.environ.get(name, "http/protobuf") != "http/protobuf":
            raise ConfigError(f"{name} = {os.environ[name]!r}; traces are sent by http/protobuf (port 4318), set that")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        which = next(name for name in ADDRESSES if os.environ.get(name))
        raise DependencyError(f"{which} is set, and {error.name} missing; pip install 'trtspec[otel]'") from error
    ours = Resource({"service.name": "trtspec", "service.version": trtspec.__version__})
    provider = TracerProvider(resource=Resource.create().merge(ours).merge(OTELResourceDetector().detect()))
    # time limit for sending a batch; when the server stops, it waits for the last batches
    timeout = None if any(map(os.environ.get, _TIMEOUTS)) else 5.0
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout)))
    return Tracing(provider)


def _name(record: Record) -> str:
    if record.generation is None:
        return f"{_method(record)} {record.endpoint}"
    return f"{_OPERATIONS[record.endpoint]} {record.generation.service.name}"


def _method(record: Record) -> str:
    return record.method if record.method in _METHODS else "_OTHER"


def _attributes(record: Record) -> dict[str, Any]:
    attributes = {
        "http.request.method": _method(record),
        "http.route": record.endpoint,
        "http.response.status_code": record.status,
        "trtspec.request.id": record.id,
    }
    generation = record.generation
    if generation is None:
        return attributes
    usage, request = generation.usage(), generation.request
    asked = {name: getattr(request, name) for name in sorted(request.model_fields_set & set(_ASKED))}
    ended = [tally.finish_reason for tally in generation.tallies if tally.finish_reason is not None]
    return {
        **attributes,
        **{_ASKED[name]: value for name, value in asked.items() if value is not None},
        **{f"trtspec.speculation.{name}": value for name, value in usage["speculation"].items()},
        "gen_ai.operation.name": _OPERATIONS[record.endpoint],
        "gen_ai.provider.name": "trtspec",
        "gen_ai.request.model": generation.service.name,
        "gen_ai.response.model": generation.service.name,
        "gen_ai.response.finish_reasons": ended,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
    }
