"""A `RemoteBackend` over real sockets, with a server that answers as it is asked to: also wrongly."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import pagewood.engine
from pagewood.engine.api import Grammar
from pagewood.engine.program import (
    DeadlineExceededError,
    RemoteBackend,
    RemoteError,
    State,
    ToolCall,
    Usage,
    VariableError,
    program,
)
from pagewood.engine.text import Tokenizer


class Answering(BaseHTTPRequestHandler):
    """Answers with `reply`, and keeps what was asked."""

    reply: tuple[int, bytes] = (200, b"")
    asked: tuple[str, dict[str, str], dict[str, Any]]
    held: threading.Event | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Answering.asked = (self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        status, data = self.reply
        self.send_response(status)
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        if self.held is not None:
            self.held.wait(30)

    def log_message(self, *_: object) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Answering.held = None
    yield f"http://127.0.0.1:{server.server_port}"
    if Answering.held is not None:
        Answering.held.set()
    server.shutdown()
    thread.join()
    server.server_close()


@program
def one(s: State, **options: Any) -> None:
    s.add("Once")
    s.gen("x", **options)


@program
def choosing(s: State) -> None:
    s.add("Once")
    s.select("x", ["a", "b c"])


def whole(text: str, **more: Any) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}], **more}).encode()


def test_only_what_is_given_is_sent(url: str) -> None:
    Answering.reply = whole("!", usage={"prompt_tokens": 5, "completion_tokens": 1})
    with RemoteBackend(url + "/sub/v1", model="m", api_key="key") as backend:
        result = one.run(on=backend)
    path, headers, body = Answering.asked
    assert (path, headers["authorization"]) == ("/sub/v1/completions", "Bearer key")
    assert body == {"model": "m", "prompt": "Once", "max_tokens": 128}
    assert (result["x"], result.usage) == ("!", Usage(num_prompt_tokens=5, num_output_tokens=1))


def test_options_have_the_names_of_the_api(url: str) -> None:
    Answering.reply = whole("!")
    options: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3}
    with RemoteBackend(url, model="m") as backend:
        one(**options, max_tokens=9, stop="x", stop_regex="y").run(on=backend, priority=-2)
        expected = {**options, "max_tokens": 9, "stop": ["x"], "stop_regex": ["y"], "priority": -2}
        assert Answering.asked[2] == {"model": "m", "prompt": "Once", **expected}
        for asked, sent in (
            ({"regex": "a"}, {"regex": "a"}),
            ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
            ({"json_schema": {"type": "null"}}, {"json": '{"type":"null"}'}),
            ({"grammar": Grammar.lark("start: /a/")}, {"grammar": "start: /a/"}),
            ({"grammar": Grammar.structural_tag("{}")}, {"structural_tag": "{}"}),
        ):
            one(**asked).run(on=backend)
            assert Answering.asked[2]["structured_outputs"] == sent
        with pytest.raises(VariableError, match=r"grammar\.after must be empty for a server"):
            one(grammar=Grammar(kind="regex", text="a", after=("x",))).run(on=backend)


def test_choices_are_scored_from_the_first_token_that_differs(url: str) -> None:
    def entries(tokens: list[str], logprobs: list[float | None]) -> dict[str, Any]:
        return {"tokens": tokens, "token_logprobs": logprobs}

    choices = [
        {"index": 2, "logprobs": entries(["On", "ce", "b", " c"], [None, -9.0, -2.0, -1.0])},
        {"index": 0, "logprobs": entries(["On", "ce"], [None, -9.0])},
        {"index": 1, "logprobs": entries(["On", "ce", "a"], [None, -9.0, -1.75])},
    ]
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    Answering.reply = 200, json.dumps({"choices": choices, "usage": usage}).encode()
    with RemoteBackend(url, model="m") as backend:
        answer = choosing.run(on=backend).answer("x")
    body = Answering.asked[2]
    assert (body["prompt"], body["echo"], body["max_tokens"]) == (["Once", "Oncea", "Onceb c"], True, 0)
    assert (answer.text, answer.scores) == ("b c", {"a": -1.75, "b c": -1.5})
    assert answer.usage == Usage(num_prompt_tokens=9, num_cached_tokens=4)


@pytest.mark.parametrize(
    ("reply", "match"),
    [
        ((500, b"oh no"), "the server answered 500: oh no"),
        ((429, b'{"error": {"message": "slower"}}'), "the server answered 429: slower"),
        ((200, b"<html>"), "must answer with a JSON object, got <html>"),
        ((200, b"[1]"), "must answer with a JSON object"),
        ((200, b"{}"), "must answer with 1 choices, got 0"),
    ],
)
def test_wrong_answers_are_errors(reply: tuple[int, bytes], match: str, url: str) -> None:
    Answering.reply = reply
    with RemoteBackend(url, model="m") as backend:
        with pytest.raises(VariableError, match=match) as caught:
            one.run(on=backend)
        assert isinstance(caught.value.__cause__, RemoteError)


def test_a_server_without_log_probabilities_cannot_select(url: str) -> None:
    Answering.reply = 200, json.dumps({"choices": [{"text": "x"}] * 3}).encode()
    with RemoteBackend(url, model="m") as backend, pytest.raises(VariableError, match="log probabilities"):
        choosing.run(on=backend)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


PIECE, END = event(choices=[{"text": "ab"}]), event(choices=[{"text": "c", "finish_reason": "length"}])
USAGE = event(choices=[], usage={"prompt_tokens": 2, "completion_tokens": 3})


def test_a_stream_is_read_in_pieces(url: str) -> None:
    Answering.reply = 200, b": comment\n\n" + PIECE + END + USAGE + b"data: [DONE]\n\n"
    with RemoteBackend(url, model="m") as backend:
        result = one().start(on=backend)
        assert "".join(result.stream("x")) == "abc"
        assert Answering.asked[2]["stream_options"] == {"include_usage": True}
        assert (result.answer("x").finish, result.usage) == ("length", Usage(num_prompt_tokens=2, num_output_tokens=3))
        Answering.reply = 200, PIECE
        with pytest.raises(VariableError, match="before the answer was complete"):
            one().start(on=backend).wait()
        Answering.reply = 200, PIECE + event(error={"message": "died"})
        with pytest.raises(VariableError, match="ended the stream with an error: died"):
            one().start(on=backend).wait()


def test_cancelling_ends_requests_that_run_and_that_wait(url: str) -> None:
    Answering.reply, Answering.held = (200, PIECE), threading.Event()
    with RemoteBackend(url, model="m", max_connections=1) as backend:
        running = one().start(on=backend)
        assert next(running.stream("x")) == "ab"
        waiting = one().start(on=backend)
        for result in (waiting, running):
            result.cancel()
            with pytest.raises(RuntimeError, match="the program was cancelled"):
                result.wait()


def test_a_server_that_is_not_there_is_named() -> None:
    backend = RemoteBackend("http://127.0.0.1:9", model="m", timeout_s=5)
    with pytest.raises(VariableError, match=r"the request to http://127.0.0.1:9 failed: .*refused"):
        one.run(on=backend)
    backend.close()
    with pytest.raises(VariableError, match="shutdown"):
        one.run(on=backend)


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="url must be http://host or https://host, got 'localhost:8000'"):
        RemoteBackend("localhost:8000", model="m")
    with pytest.raises(ValueError, match="timeout_s must be > 0, got 0"):
        RemoteBackend("http://x", model="m", timeout_s=0)
    with pytest.raises(ValueError, match="max_connections must be >= 1, got 0"):
        RemoteBackend("http://x", model="m", max_connections=0)


def test_a_deadline_ends_the_request_at_the_server(url: str) -> None:
    Answering.reply, Answering.held = (200, b"{"), threading.Event()
    with RemoteBackend(url, model="m") as backend:
        with pytest.raises(DeadlineExceededError, match=r"not complete at its deadline, after 0.3 s"):
            one.run(on=backend, deadline_s=0.3)
        Answering.held.set()  # so that it sees that the connection is closed


REASONED = "<think>END of thoughts</think>Look:\n"
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "END"}}\n</tool_call>'


@pytest.fixture(scope="module")
def reasoning(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of the embedded model, with a template that knows reasoning."""
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(Path(pagewood.engine.__file__).parent / "demo", folder, dirs_exist_ok=True)
    hermes = Path(pagewood.engine.__file__).parent / "text" / "response" / "templates" / "hermes.json"
    (folder / "response_template.json").write_text(hermes.read_text())
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "calls"),
    [
        (REASONED + CALL, "END", REASONED + CALL, [ToolCall("look", {"at": "END"})]),
        (REASONED + CALL + "\nEND.", "END", REASONED + CALL + "\n", [ToolCall("look", {"at": "END"})]),
        (REASONED + "The END.", "END", REASONED + "The ", []),
        (CALL, "\n", CALL, [ToolCall("look", {"at": "END"})]),
        (REASONED + "There.", "\n", REASONED.strip(), []),
    ],
)
def test_with_tools_stop_strings_act_on_content(
    url: str, reasoning: Tokenizer, text: str, stop: str, expected: str, calls: list[ToolCall], is_streamed: bool
) -> None:
    @program
    def asking(s: State) -> None:
        s.user("?")
        s.gen("x", tools=[{"name": "look", "parameters": {"type": "object"}}], stop=stop)

    chunks: list[dict[str, Any]] = [
        {
            "choices": [{"index": 0, "text": text[at : at + 3]}],
            "usage": {"prompt_tokens": 5, "completion_tokens": at + 1},
        }
        for at in range(0, len(text), 3)
    ]
    chunks.append({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
    Answering.reply = 200, "".join(f"data: {json.dumps(one)}\n\n" for one in [*chunks]).encode() + b"data: [DONE]\n\n"
    with RemoteBackend(url, model="m", tokenizer=reasoning) as backend:
        result = asking().start(on=backend) if is_streamed else asking.run(on=backend)
        pieces = "".join(result.stream("x"))
        answer = result.answer("x")
    body = Answering.asked[2]
    assert "stop" not in body
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert (pieces, answer.text, list(answer.calls), answer.finish) == (expected, expected, calls, "stop")
    assert 0 < answer.usage.num_output_tokens <= len(text)
