"""A real server that shows all it can: metrics of every process, traces at a receiver, a log in JSON, a profile."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

from prometheus_client.parser import text_string_to_metric_families

from otlp import OtlpReceiver, attributes_of
from serving import MODEL, Server, until

SECRET = "Wintermorgen"
PROCESSES = {"http", "engine", "detokenizer", "tokenizer-0"}


@pytest.fixture(scope="module")
def receiver() -> Generator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver) -> Generator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        server = Server(
            tmp_path_factory.mktemp("observed"),
            *("--otlp-endpoint", receiver.url, "--log-format", "json", "--log-level", "debug"),
            *("--metrics-compat", "vllm", "--metrics-compat", "sglang", "--max-total-tokens", "16384"),
        )
    yield server
    server.close()


def ask(server: Server, *, max_tokens: int = 20, headers: dict[str, str] | None = None) -> dict[str, Any]:
    body = {
        "model": MODEL, "max_tokens": max_tokens, "ignore_eos": True, "seed": 5,
        "messages": [{"role": "user", "content": f"Was ist ein {SECRET}?"}],
    }  # fmt: skip
    return server.http.post("/v1/chat/completions", json=body, headers=headers).json()


def samples(server: Server) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_all_processes_are_measured(server: Server) -> None:
    usage = ask(server)["usage"]
    server.until_idle()
    found = samples(server)
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_threads"):
        values = {one.labels["process"]: one.value for one in found[f"pagewood_{name}"]}
        assert set(values) == PROCESSES
        assert all(value > 0 for value in values.values())
    for prefix in ("pagewood_", "vllm:", "sglang:"):
        assert sum(one.value for one in found[f"{prefix}prompt_tokens_total"]) == usage["prompt_tokens"]
        assert sum(one.value for one in found[f"{prefix}generation_tokens_total"]) == 20
    stages = {one.labels["stage"]: one.value for one in found["pagewood_engine_stage_seconds_total"]}
    assert all(stages[stage] > 0 for stage in ("plan", "build", "launch", "wait", "retire"))
    (steps,) = found["pagewood_step_seconds_sum"]
    assert 0 < sum(stages.values()) <= 1.5 * steps.value + 1
    assert SECRET not in server.http.get("/metrics").text


def test_a_request_reaches_the_receiver_with_its_stages(server: Server, receiver: OtlpReceiver) -> None:
    trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    answer = ask(server, headers={"traceparent": f"00-{trace_id}-{parent_id}-01"})

    def own() -> dict[str, Any]:
        return {span.name: span for span in receiver.spans[:] if span.trace_id.hex() == trace_id}

    until(lambda: len(own()) == 5)
    spans = own()
    assert set(spans) == {f"chat {MODEL}", "tokenize", "queue", "prefill", "decode"}
    root = spans[f"chat {MODEL}"]
    assert root.parent_span_id.hex() == parent_id
    assert {span.parent_span_id for span in spans.values() if span is not root} == {root.span_id}
    found = attributes_of(root)
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == 20
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    ordered = [spans[name] for name in ("tokenize", "queue", "prefill", "decode")]
    times = [moment for span in ordered for moment in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times)
    assert root.start_time_unix_nano <= times[0]
    assert times[-1] <= root.end_time_unix_nano
    assert set(receiver.paths) == {"/v1/traces"}
    assert receiver.resources[0]["service.name"] == "pagewood"
    assert all(SECRET not in str(span) for span in receiver.spans)


def test_a_profile_has_every_instruction_and_changes_no_answer(server: Server) -> None:
    expected = ask(server, max_tokens=60)["choices"]
    answers: list[dict[str, Any]] = []
    stopping = threading.Event()

    def load() -> None:
        while not stopping.is_set():
            answers.append(ask(server, max_tokens=60))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        response = server.admin.post("/profile", json={"seconds": 0.5})
    finally:
        stopping.set()
        thread.join()
    assert response.status_code == 200, response.text
    assert answers
    assert all(answer["choices"] == expected for answer in answers)
    trace = response.json()
    assert 0.5 <= trace["otherData"]["seconds"] < 30
    spans = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    tracks = {one["tid"]: one["args"]["name"] for one in trace["traceEvents"] if one["name"] == "thread_name"}
    engine = [one for one in spans if tracks[one["tid"]] == "engine"]
    device = [one for one in spans if tracks[one["tid"]] == "device"]
    assert {"plan", "build", "launch", "wait", "retire"} <= {one["name"] for one in engine}
    steps = [one for one in device if one["name"] == "step"]
    inner = [one for one in device if one["name"] != "step"]
    assert len(steps) > 3
    assert {"add_norm", "attend", "draw"} <= {one["name"] for one in inner}
    for one in inner:  # each lies in a step, on the same clock
        assert any(
            step["ts"] - 1 <= one["ts"] and one["ts"] + one["dur"] <= step["ts"] + step["dur"] + 1 for step in steps
        )
    assert sum(one["dur"] for one in inner) <= sum(step["dur"] for step in steps) + len(inner)
    (totals,) = [one["count"] for one in trace["otherData"]["summary"] if one["name"] == "step"]
    assert totals == len(steps) + (0 if not trace["otherData"]["dropped_spans"] else totals - len(steps))
    assert ask(server, max_tokens=60)["choices"] == expected


def test_profiles_are_refused_while_one_is_taken_or_if_they_are_too_long(server: Server) -> None:
    for body in ({"seconds": 0}, {"seconds": 1000}, {"minutes": 1}):
        assert server.admin.post("/profile", json=body).status_code == 400
    statuses: list[int] = []
    threads = [
        threading.Thread(
            target=lambda: statuses.append(server.admin.post("/profile", json={"seconds": 0.4}).status_code)
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 400]
    assert not list(server.folder.glob("pagewood-*/*.trace.json"))


def test_every_line_of_the_log_is_json_and_those_of_requests_have_their_id(server: Server) -> None:
    ask(server, headers={"x-request-id": "of-this-test"})
    server.http.get("/nowhere", headers={"x-request-id": "lost"})
    until(lambda: '"lost"' in server.stderr())
    lines = [json.loads(line) for line in server.stderr().splitlines()]
    assert {"http", "engine"} <= {line.get("process") for line in lines}
    assert all({"time", "level", "process", "logger", "message"} <= set(line) for line in lines)
    (own,) = [line for line in lines if line.get("request_id") == "of-this-test"]
    assert (own["method"], own["path"], own["status"], own["tokens_out"]) == ("POST", "/v1/chat/completions", 200, 20)
    assert own["engine_ids"][0].startswith("req-")
    (lost,) = [line for line in lines if line.get("request_id") == "lost"]
    assert lost["error"] == "unknown_path"
    told = {(line["process"], line["subject"]): line["settings"] for line in lines if "subject" in line}
    assert told["http", "logs and metrics"]["metrics_compat"] == ["vllm", "sglang"]
    assert told["http", "network"]["port"] == 0
    assert "scheduling" in {subject for process, subject in told if process == "engine"}
    assert SECRET not in server.stderr()
