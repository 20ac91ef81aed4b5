"""Requests that outlive the processes behind the server: each answer is that of a server in which nothing dies."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import pytest

from serving import LIMIT_S, MODEL, Server, until

PROCESSES = ("engine", "detokenizer", "tokenizer")
LONG_PROMPT = "A stone in the river. " * 50
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 90}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}
FUNCTION = {"name": "look", "parameters": {"type": "object", "properties": {"where": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Tell me about the moon."}]
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 11}
FREE: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "stream": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 2, **FREE, **DRAWN}),
    "penalties": (
        COMPLETIONS,
        {"prompt": "Once", "n": 2, "frequency_penalty": 1.5, "repetition_penalty": 1.2, **FREE, **DRAWN},
    ),
    "greedy": (COMPLETIONS, {"prompt": "The sea", "presence_penalty": 0.5, "temperature": 0, **FREE}),
    "stop": (COMPLETIONS, {"prompt": "Once", "stop": ["e e", "qq", "zebra stripes"], **FREE, **DRAWN}),
    "whole": (COMPLETIONS, {"prompt": "Once", "n": 2, "logprobs": 1, **FREE, **DRAWN, "stream": False}),
    "schema": (
        CHAT,
        {
            "messages": USER,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "max_tokens": 100,
            "stream": True,
            **DRAWN,
        },
    ),
    "tools": (
        CHAT,
        {"messages": USER, "tools": TOOLS, "tool_choice": "required", "max_tokens": 100, "stream": True, **DRAWN},
    ),
    "responses": ("/v1/responses", {"input": "The moon?", "max_output_tokens": 100, "stream": True, "temperature": 0}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 100, "stream": True, "temperature": 0}),
    "ollama": (
        "/api/generate",
        {"prompt": "Once", "stream": True, "options": {"num_predict": 100, "seed": 11, "temperature": 1.0}},
    ),
    "native": (
        "/generate",
        {
            "text": "Once",
            "stream": True,
            "sampling_params": {
                "max_new_tokens": 100, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 11, "min_new_tokens": 9
            },
        },
    ),
    "long": (COMPLETIONS, {"prompt": LONG_PROMPT, "echo": True, **FREE, **DRAWN, "max_tokens": 24}),
    "beams": (COMPLETIONS, {"prompt": "Once", "use_beam_search": True, "n": 2, "max_tokens": 16, "temperature": 0}),
}  # fmt: skip
TEXT_KEYS = {"text", "content", "arguments", "output_ids", "response", "delta", "partial_json", "token", "logprob"}
COUNTED_KEYS = {"finish_reason", "stop_reason", "completion_tokens", "output_tokens", "rank"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    """A server with small chunks, that may lose processes as often as a test likes."""
    options = ("--chunked-prefill-size", "64", "--max-running-requests", "16", "--max-total-tokens", "32768")
    server = Server(tmp_path_factory.mktemp("survival"), *options, "--max-restarts", "1000")
    yield server
    server.close()


class Client:
    """A client in a thread, which reads the answer to one request."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self._request = (f"{server.url}{path}", {"model": MODEL, **body})
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    @property
    def is_reading(self) -> bool:
        """Whether the answer has not ended."""
        return self._thread.is_alive()

    def _read(self) -> None:
        url, body = self._request
        try:
            with httpx.stream("POST", url, json=body, timeout=LIMIT_S) as response:
                for line in response.iter_lines():
                    self.lines.append(line)
        except httpx.HTTPError as error:
            self.lines.append(repr(error))

    def said(self) -> list[Any]:
        """Wait for the end, and return what the answer says, without ids, times and the borders of pieces."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the answer hangs"
        lines = [line.removeprefix("data: ") for line in self.lines if line and not line.startswith("event:")]
        found: dict[str, list[Any]] = {}
        for line in lines:
            if line == "[DONE]":
                found.setdefault("end", []).append(line)
            else:
                _collect(json.loads(line), "", found)
        return sorted((key, _joined(values)) for key, values in found.items())


def _collect(value: Any, path: str, found: dict[str, list[Any]]) -> None:
    """Note the texts and numbers of an answer that the model has decided, by their place."""
    if isinstance(value, dict):
        answer = cast("dict[str, Any]", value)
        assert not answer.get("error"), answer
        index = answer.get("index", answer.get("output_index", ""))
        for key, one in answer.items():
            _collect(one, f"{path}/{index}{key}", found)
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            _collect(one, path, found)
    elif path.rpartition("/")[2].lstrip("0123456789") in TEXT_KEYS | COUNTED_KEYS:
        found.setdefault(path, []).append(value)


def _joined(values: list[Any]) -> Any:
    """Return texts as one text, because steps may be cut elsewhere."""
    texts = [value for value in values if isinstance(value, str)]
    return "".join(texts) if texts else [value for value in values if value is not None]


@contextmanager
def queued(server: Server, requests: dict[str, tuple[str, dict[str, Any]]]) -> Generator[dict[str, Client]]:
    """Send requests, and let them all begin at the end of the block."""
    server.admin.post("/pause", json={}).raise_for_status()
    clients = {name: Client(server, *request) for name, request in requests.items()}
    until(lambda: server.ready()["requests"]["live"] >= len(requests))
    yield clients
    until(lambda: server.admin.post("/resume", json={}).is_success)  # a new engine may be starting


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, list[Any]]:
    """What the answers say if nothing dies."""
    with queued(server, REQUESTS) as clients:
        pass
    found = {name: client.said() for name, client in clients.items()}
    assert all(found.values())
    return found


def kill(server: Server, process: str) -> None:
    """Kill a process, and wait until another one has taken its place."""
    until(lambda: f"{process}_process" in server.children())
    server.lose(process)


def check(clients: dict[str, Client], expected: dict[str, list[Any]]) -> None:
    """Compare all answers."""
    for name, client in clients.items():
        assert client.said() == expected[name], name


def in_mid_answer(clients: dict[str, Client]) -> Callable[[], bool]:
    """Return whether most streams have begun and none but short ones can have ended."""
    return lambda: sum(len(client.lines) > 12 for client in clients.values()) >= 8


@pytest.mark.parametrize("process", PROCESSES)
def test_a_death_in_mid_answer_changes_no_answer(server: Server, expected: dict[str, list[Any]], process: str) -> None:
    with queued(server, REQUESTS) as clients:
        pass
    until(in_mid_answer(clients))
    kill(server, process)
    check(clients, expected)
    assert server.ready()["incidents"]["lost"] == 0
    server.until_idle()


def test_requests_move_to_the_next_engine(server: Server, expected: dict[str, list[Any]]) -> None:
    pid = server.children()["engine_process"]
    before = server.ready()["incidents"]["restarts"]
    with queued(server, REQUESTS) as clients:
        pass
    until(in_mid_answer(clients))
    replaced = server.admin.post("/restart_engine")
    assert replaced.status_code == 200, replaced.text
    check(clients, expected)
    until(lambda: server.children()["engine_process"] != pid)
    assert server.ready()["incidents"]["restarts"] == before  # it was no death
    server.until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("process", PROCESSES)
@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("stage", ["queued", "begins", "runs", "late", "unread end"])
def test_a_death_at_any_stage_of_a_request(
    server: Server, expected: dict[str, list[Any]], process: str, name: str, stage: str
) -> None:
    request = {name: REQUESTS[name]}
    until(lambda: server.http.get("/ready").status_code == 200)
    if stage == "queued":
        with queued(server, request) as clients:
            kill(server, process)
    else:
        if stage == "unread end":  # the last token and the end are in a process that dies
            os.kill(server.children()["detokenizer_process"], signal.SIGSTOP)
        clients = {name: Client(server, *REQUESTS[name])}
        if stage == "begins":  # its prompt is being tokenized or computed, or its grammar is being compiled
            until(lambda: server.ready()["requests"]["live"] or not clients[name].is_reading)
        elif stage in ("runs", "late"):
            num_lines = 3 if stage == "runs" else 100
            until(lambda: len(clients[name].lines) > num_lines or not clients[name].is_reading)
        else:
            time.sleep(1.0)
            kill(server, "detokenizer")
        kill(server, process)
    check(clients, expected)
    server.until_idle()


def test_a_draining_server_ends_what_it_has(server: Server) -> None:
    with queued(server, {"chat": REQUESTS["chat"]}) as clients:
        assert server.admin.post("/drain", json={}).json() == {"is_draining": True, "num_live": 1}
        refused = server.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert server.ready()["status"] == "draining"
    assert server.admin.post("/drain", json={"wait_s": LIMIT_S}).json()["num_live"] == 0
    assert clients["chat"].said()
    assert server.admin.post("/drain", json={"is_draining": False}).json()["is_draining"] is False
    assert server.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.http.post("/drain", json={}).status_code in (401, 403)
