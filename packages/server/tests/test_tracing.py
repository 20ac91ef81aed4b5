"""Traces: a span for each request that generates, with the context of its client, and one for each stage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.sdk.trace")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from memory_server import MemoryServer
from pagewood.engine.text import Tokenizer
from pagewood.server.observe.tracing import Tracing, traces_url

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Traced:
    """A server whose spans are kept."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracing = Tracing("http://unused:1", model_name="echo", exporter=self._exporter)
        self.server = MemoryServer(folder, tokenizer, limit=64, tracing=self.tracing)

    def spans(self) -> dict[str, ReadableSpan]:
        """Return the spans since the last call by name; each name is there once."""
        self.tracing._provider.force_flush()  # pyright: ignore[reportPrivateUsage]
        spans = self._exporter.get_finished_spans()
        self._exporter.clear()
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


@pytest.fixture
async def traced(model_folder: Path, tokenizer: Tokenizer) -> AsyncGenerator[Traced]:
    """A server that traces."""
    found = Traced(model_folder, tokenizer)
    await found.server.start()
    yield found
    await found.server.until_idle()
    await found.server.stop()
    found.tracing.stop()


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_a_span_with_its_stages(traced: Traced, stream: bool) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": "geheim " * 10}],
        "max_tokens": 7, "seed": 3, "temperature": 0.5, "ignore_eos": True, "stream": stream, "stop": ["geheim"],
    }  # fmt: skip
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "x-request-id": "mine"}
    response = await traced.server.client.post(CHAT, json={"model": "echo", **body}, headers=headers)
    assert response.status_code == 200
    await traced.server.until_idle()
    spans = traced.spans()
    assert set(spans) == {"chat echo", "tokenize", "queue", "prefill", "decode"}
    span = spans["chat echo"]
    found = attributes(span)
    assert span.kind is SpanKind.SERVER
    assert span.context is not None
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "pagewood", "gen_ai.request.model": "echo",
        "gen_ai.response.model": "echo", "gen_ai.request.max_tokens": 7, "gen_ai.request.seed": 3,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.choice.count": 1, "gen_ai.request.stream": stream,
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 0, "http.response.status_code": 200, "url.path": CHAT,
        "pagewood.http.request_id": "mine",
    }  # fmt: skip
    assert expected.items() <= found.items()
    assert found["gen_ai.usage.input_tokens"] > 70
    assert 0 < found["gen_ai.response.time_to_first_chunk"] < 60
    assert "error.type" not in found
    times: list[int] = [span.start_time or 0]
    for name in ("tokenize", "queue", "prefill", "decode"):
        stage = spans[name]
        assert stage.parent is not None
        assert stage.parent.span_id == span.context.span_id
        times += [stage.start_time or 0, stage.end_time or 0]
    assert [*times, span.end_time or 0] == sorted([*times, span.end_time or 0])
    assert times[2] == times[3]
    assert times[4] == times[5]
    assert attributes(spans["prefill"])["pagewood.cache.cause"] == "never_seen"
    shown = "".join(one.to_json() for one in spans.values())
    assert "geheim" not in shown


async def test_what_is_not_sampled_is_not_recorded(traced: Traced) -> None:
    body = {"model": "echo", "prompt": "x", "max_tokens": 3}
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
    await traced.server.client.post("/v1/completions", json=body, headers=headers)
    await traced.server.client.get("/health")
    await traced.server.until_idle()
    assert traced.spans() == {}
    await traced.server.client.post("/v1/completions", json=body, headers={"traceparent": "nonsense"})
    await traced.server.until_idle()
    assert "text_completion echo" in traced.spans()


async def test_errors_and_clients_that_leave_are_marked(traced: Traced) -> None:
    response = await traced.server.post("/v1/completions", {"prompt": "x" * 500})
    assert response.status_code == 400
    span = traced.spans()["text_completion echo"]
    assert attributes(span)["error.type"] == "context_length_exceeded"
    assert span.status.status_code is StatusCode.UNSET
    traced.server.gate.close()
    task = asyncio.create_task(traced.server.post("/v1/completions", {"prompt": "hi", "max_tokens": 9}))
    await traced.server.until(lambda: traced.server.service.live.num_live == 1)
    task.cancel()
    await traced.server.until(lambda: traced.server.service.live.num_live == 0)
    traced.server.gate.open()
    await asyncio.sleep(0)
    spans = traced.spans()
    assert attributes(spans["text_completion echo"])["error.type"] == "client_left"
    assert attributes(spans["text_completion echo"])["gen_ai.response.finish_reasons"] == ("abort",)


def test_the_url_of_traces_is_that_of_otlp() -> None:
    assert traces_url("http://localhost:4318") == "http://localhost:4318/v1/traces"
    assert traces_url("http://localhost:4318/") == "http://localhost:4318/v1/traces"
    assert traces_url("https://collector/own/path") == "https://collector/own/path"
