"""`pagewood batch`: lines, results that are kept, servers that are busy or die, and a server of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from pagewood.server.cli import main
from pagewood.server.jobs.lines import Line, Result, keep_results, read_lines
from pagewood.server.jobs.sending import send_all

CHAT = "/v1/chat/completions"


def request(custom_id: str, url: str = CHAT, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}) + "\n"


def results(file: Path) -> dict[str, dict[str, Any]]:
    return {one["custom_id"]: one for one in map(json.loads, file.read_text().splitlines())}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: Input data was truncated"),
        (request("a") + request("b") + "\n" + request("a"), "line 4: custom_id must differ .* as in line 1"),
        (request("a", "/v1/files"), "line 1: Invalid enum value .*url"),
        (request("a", stream=True), r"line 1: body.stream must be absent or false"),
        ('{"custom_id": "a", "url": "/v1/completions"}', "missing required field `body`"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": []}', "line 1: Expected"),
        ("x\n" * 12, "line 10: .*(?s:.)*and 2 more"),
    ],
)
def test_wrong_lines_are_named_before_anything_is_sent(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_lines(tmp_path / "in")
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", "http://127.0.0.1:9"]) == 2
    assert not (tmp_path / "out").exists()


def nothing(_: object) -> None:
    """Answer at once."""


MAY_END = threading.Event()
"""Set when a job has been ended."""


def rest(_: object) -> None:
    """Answer half of a job, and no more before it has been ended."""
    if len(Flaky.seen) > 20:
        MAY_END.wait(60)
    time.sleep(0.01)


class Flaky(BaseHTTPRequestHandler):
    """Answers by the number of times that a request has come: those of `plan`, then 200."""

    protocol_version = "HTTP/1.1"
    plan: ClassVar[dict[str, list[int]]] = {}
    seen: ClassVar[list[str]] = []
    answer: Callable[[object], None] = nothing

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(body["name"])
        left = self.plan.get(body["name"], [])
        status = left.pop(0) if left else 200
        if status == 0:
            self.close_connection = True
            return
        type(self).answer(self)
        found = {"usage": {"prompt_tokens": 3, "completion_tokens": 2}, "echo": body["name"]}
        text = b"no JSON" if status == 500 else json.dumps(found, indent=1).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.send_header("x-request-id", f"id-{body['name']}")
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Generator[str]:
    Flaky.plan, Flaky.seen, Flaky.answer = {}, [], nothing
    server = ThreadingHTTPServer(("127.0.0.1", 0), Flaky)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_busy_servers_are_asked_again_and_results_are_kept(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Flaky.plan = {"b": [503, 429], "c": [0], "d": [400], "e": [500, 500]}
    (tmp_path / "in").write_text("".join(request(name, name=name) for name in "abcde"))
    command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", url, "--concurrency", "2"]
    assert main(command) == 1
    found = results(tmp_path / "out")
    assert {name: one["response"]["status_code"] for name, one in found.items()} == {
        "a": 200, "b": 200, "c": 200, "d": 400, "e": 500,
    }  # fmt: skip
    assert found["b"]["response"]["body"]["echo"] == "b"
    assert found["b"]["response"]["request_id"] == "id-b"
    assert found["e"]["response"]["body"] == "no JSON"
    shown = capsys.readouterr().err
    assert "5 of 5 requests, 2 failed" in shown
    assert "9 prompt and 6 output tokens" in shown
    assert "not answered: e: 500" in shown
    Flaky.seen.clear()
    assert main(command) == 1  # e alone is sent again, and fails again; d was refused
    assert Flaky.seen == ["e"]
    Flaky.seen.clear()
    capsys.readouterr()
    assert main([*command, "--quiet"]) == 1
    assert (Flaky.seen, results(tmp_path / "out")["e"]["response"]["status_code"]) == (["e"], 200)
    assert capsys.readouterr().err == ""
    assert len((tmp_path / "out").read_text().splitlines()) == 5


def test_a_server_that_stays_away(tmp_path: Path) -> None:
    (tmp_path / "in").write_text(request("a"))
    command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", "http://127.0.0.1:9", "--patience", "0"]
    assert main(command) == 1
    found = results(tmp_path / "out")["a"]
    assert found["response"] is None
    assert found["error"]["code"] == "connection_failed"
    assert keep_results(tmp_path / "out") == {}


def test_the_end_of_a_line_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    whole = '{"id":"x","custom_id":"a","response":{"status_code":200,"request_id":"","body":{}},"error":null}\n'
    out = tmp_path / "out"
    for cut in range(1, len(whole) - 1):
        out.write_text(whole + whole.replace('"a"', '"b"')[:cut])
        assert keep_results(out) == {"a": 200}
        assert out.read_text() == whole
    out.write_text(whole + "other\n")
    with pytest.raises(ValueError, match="out must be new or hold results of this job, line 2"):
        keep_results(out)
    assert out.read_text() == whole + "other\n"


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_a_job_that_was_ended_goes_on(url: str, ending: signal.Signals, tmp_path: Path) -> None:
    names = [f"n{number}" for number in range(40)]
    (tmp_path / "in").write_text("".join(request(name, name=name) for name in names))
    command = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", url, "--concurrency", "3"]
    MAY_END.clear()
    Flaky.answer = rest
    process = subprocess.Popen([sys.executable, "-m", "pagewood.server", *command], stderr=subprocess.PIPE, text=True)
    while len(Flaky.seen) < 12:
        time.sleep(0.01)
    process.send_signal(ending)
    _, shown = process.communicate(timeout=120)
    MAY_END.set()
    assert process.returncode == (130 if ending == signal.SIGINT else -ending)
    assert ("the same command goes on" in shown) == (ending == signal.SIGINT)
    before = results(tmp_path / "out")
    assert 5 < len(before) < 40
    Flaky.answer, Flaky.seen = nothing, []
    assert main(command) == 0
    assert sorted(Flaky.seen) == sorted(set(names) - before.keys())
    after = results(tmp_path / "out")
    assert after.keys() == set(names)
    assert all(after[name] == one for name, one in before.items())


@pytest.mark.anyio
async def test_no_more_requests_at_a_time_than_allowed() -> None:
    now, most = 0, 0

    async def answer(_: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return httpx.Response(200, json={})

    lines = [Line(custom_id=str(number), url=CHAT, body=b"{}") for number in range(50)]  # pyright: ignore[reportArgumentType]
    found: list[Result] = []
    async with httpx.AsyncClient(base_url="http://x", transport=httpx.MockTransport(answer)) as client:
        await send_all(client, lines, found.append, concurrency=7, patience_s=1)
    assert (most, len(found)) == (7, 50)


def test_a_server_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question: dict[str, Any] = {"model": "pagewood-demo", "temperature": 0}
    asked = [{"role": "user", "content": "What is 12 + 7?"}]
    (tmp_path / "in").write_text(
        request("chat", **question, messages=asked)
        + request("text", "/v1/completions", **question, prompt="hi", max_tokens=3)
        + request("vector", "/v1/embeddings", model="pagewood-demo", input="hi")
        + request("answer", "/v1/responses", **question, input="What is 12 + 7?")
    )
    options = ("--", "--max-total-tokens", "16384", "--threads", "1")
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), *options]) == 0
    found = {name: one["response"]["body"] for name, one in results(tmp_path / "out").items()}
    assert found["chat"]["choices"][0]["message"]["content"] == "12 + 7 = 19"
    assert found["answer"]["output"][0]["content"][0]["text"] == "12 + 7 = 19"
    assert len(found["vector"]["data"][0]["embedding"]) > 10
    assert found["text"]["usage"]["completion_tokens"] == 3
    capsys.readouterr()
    (tmp_path / "out").unlink()
    assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--model", "/nowhere"]) == 2
    assert "the server did not start" in capsys.readouterr().err
    for wrong in (["--url", "http://x", "--model", "m"], ["--concurrency", "0"]):
        assert main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), *wrong]) == 2
