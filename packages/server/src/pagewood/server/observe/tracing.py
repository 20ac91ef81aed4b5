"""Traces by OpenTelemetry: a span for each request that generates, and below it one for each stage.

Needs the extra `pagewood-server[otel]`. Attributes are those of OpenTelemetry's conventions for generative AI; none has
text of prompts or answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from pagewood.server.http.current import current_exchange
from pagewood.server.http.exchange import CLIENT_LEFT, Exchange
from pagewood.server.messages import wire
from pagewood.server.metrics.requests import Timing

PROVIDER = "pagewood"
TRACES_PATH = "/v1/traces"
_EVENT_STREAMS = ("text/event-stream", "application/x-ndjson")
_TIMEOUT_S = 5.0
_FAILED = 500


@dataclass(slots=True, eq=False)
class Trace:
    """One HTTP request. Its span begins when it generates."""

    headers: Mapping[str, str]
    span: Span | None = None  # written by: Tracing
    context: Context | None = None
    """The context of its stages."""  # written by: Tracing
    reasons: list[str] = field(default_factory=list[str])
    """Finish reasons of its answers."""  # written by: Tracing
    first_s: float = 0.0
    """Time when the first of its answers began, on the clock of `time.monotonic`; 0: no answer has begun."""
    # written by: Tracing


class Tracing:
    """Makes spans, and exports them from a thread of its own. Invariant: a span ends with its HTTP request.

    Args:
        endpoint: URL of an OTLP receiver over HTTP, such as `http://localhost:4318`; without a path, that of OTLP.
        model_name: in the name of every span.
        version: of the server.
        exporter: gets the spans instead of the endpoint.
    """

    def __init__(
        self, endpoint: str, *, model_name: str, version: str = "", exporter: SpanExporter | None = None
    ) -> None:
        # The library reads OTEL_RESOURCE_ATTRIBUTES and OTEL_TRACES_SAMPLER itself.
        name = os.environ.get("OTEL_SERVICE_NAME") or PROVIDER
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=traces_url(endpoint), timeout=_TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagewood.server", version)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def open(self, headers: Mapping[str, str]) -> Trace:
        """Return the trace of an HTTP request with these headers; it costs nothing unless the request generates."""
        return Trace(headers)

    def begin(self, message: wire.Generate) -> Trace | None:
        """Return the trace of a request that is being submitted; None: its trace is not recorded."""
        exchange = current_exchange.get()
        if exchange is None or not isinstance(exchange.span, Trace):
            return None
        trace = exchange.span
        if trace.span is None:
            parent = self._propagator.extract(trace.headers)
            operation = _operation(message)
            trace.span = self._tracer.start_span(
                f"{operation} {self._model_name}",
                context=parent,
                kind=SpanKind.SERVER,
                start_time=self._unix_ns(exchange.started_s),
                attributes={
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": PROVIDER,
                    "gen_ai.request.model": self._model_name,
                    "gen_ai.response.id": message.request_id,
                    "http.request.method": exchange.method,
                    "url.path": exchange.path,
                    "pagewood.http.request_id": exchange.request_id,
                    **_asked(message),
                },
            )
            trace.context = set_span_in_context(trace.span)
        return trace if trace.span.is_recording() else None

    def end(self, timing: Timing, *, reason: str, now_s: float) -> None:
        """Add the stages of a request that has ended."""
        trace = timing.context
        assert isinstance(trace, Trace)
        trace.reasons.append(reason)
        if timing.first_s and (not trace.first_s or timing.first_s < trace.first_s):
            trace.first_s = timing.first_s
        found = timing.explanation
        if found is None:
            stages = [("wait", timing.submitted_s, timing.first_s or now_s)]
        else:
            stages = [
                ("tokenize", timing.submitted_s, found.arrived_s),
                ("queue", found.arrived_s, found.admitted_s),
                ("prefill", found.admitted_s, timing.first_s),
            ]
        if timing.first_s:
            stages.append(("decode", timing.first_s, timing.last_s))
        for name, start_s, end_s in stages:
            attributes: dict[str, AttributeValue] = {"pagewood.request_id": timing.request_id}
            if name == "prefill" and found is not None:
                attributes["pagewood.cached_tokens"] = timing.num_cached
                attributes["pagewood.cache.cause"] = found.prefix.cause
            elif name == "decode":
                attributes["gen_ai.usage.output_tokens"] = timing.num_output
            span = self._tracer.start_span(
                name, context=trace.context, start_time=self._unix_ns(start_s), attributes=attributes
            )
            span.end(self._unix_ns(max(start_s, end_s)))

    def close(self, exchange: Exchange, now_s: float) -> None:
        """End the span of an HTTP request, if it has one."""
        trace = exchange.span
        if not isinstance(trace, Trace) or trace.span is None:
            return
        span, usage = trace.span, exchange.usage
        if span.is_recording():
            span.set_attribute("http.response.status_code", exchange.status)
            span.set_attribute("gen_ai.response.model", self._model_name)
            span.set_attribute("gen_ai.response.finish_reasons", trace.reasons)
            span.set_attribute("gen_ai.request.stream", exchange.media_type.startswith(_EVENT_STREAMS))
            if usage is not None:
                span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
                span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
                num_cached = usage.prompt_tokens_details.cached_tokens
                span.set_attribute("gen_ai.usage.cache_read.input_tokens", num_cached)
                if usage.num_reasoning_tokens:
                    span.set_attribute("gen_ai.usage.reasoning.output_tokens", usage.num_reasoning_tokens)
            if trace.first_s:
                span.set_attribute("gen_ai.response.time_to_first_chunk", trace.first_s - exchange.started_s)
            error = exchange.error_code
            if error is None and exchange.status >= CLIENT_LEFT:
                error = "client_left" if exchange.status == CLIENT_LEFT else str(exchange.status)
            if error is not None:
                span.set_attribute("error.type", error)
            if exchange.status >= _FAILED or "error" in trace.reasons:
                span.set_status(Status(StatusCode.ERROR))
        span.end(self._unix_ns(now_s))

    def stop(self) -> None:
        """Export the remaining spans, in a bounded time, and end the thread."""
        self._provider.force_flush(int(_TIMEOUT_S * 1000))
        self._provider.shutdown()

    def _unix_ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


def traces_url(endpoint: str) -> str:
    """Return the URL that spans are sent to: `endpoint`, or OTLP's path below it if it has none."""
    scheme, _, rest = endpoint.partition("://")
    host, _, path = rest.partition("/")
    return endpoint if path else f"{scheme}://{host}{TRACES_PATH}"


def _operation(message: wire.Generate) -> str:
    if message.options.pooling is not None:
        return "embeddings"
    return "chat" if isinstance(message.prompt, wire.ChatPrompt) else "text_completion"


def _asked(message: wire.Generate) -> dict[str, AttributeValue]:
    """Return the attributes of a request."""
    sampling = message.options.sampling
    found: dict[str, AttributeValue | None] = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": len(wire.ids_of(message)),
    }
    return {name: value for name, value in found.items() if value is not None}
