"""Real processes under hostile input, kill -9, and a terminal that is gone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.keys.run_key import FOLDER_VARIABLE
from serving import admin_headers

MODEL = "pagewood-demo"
LIMIT_S = 150.0


def until(holds: Callable[[], bool]) -> None:
    """Wait until `holds`."""
    deadline_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Server:
    """A server process with one tokenizer; nothing reads its standard output."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        port = free_port()
        self._stderr = (folder / "stderr").open("w+")
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pagewood.server", "serve", "--port", str(port)),
                *("--max-total-tokens", "65536", *arguments),
            ],
            stdout=write_end,
            stderr=self._stderr,
            env={**os.environ, "TMPDIR": str(folder), FOLDER_VARIABLE: str(folder / "runtime")},
        )
        os.close(write_end)
        os.close(read_end)  # the welcome text meets a broken pipe
        url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S)
        until(self.is_ready)
        self.admin = httpx.Client(base_url=url, timeout=LIMIT_S, headers=admin_headers(folder, url))

    def num_restarts(self) -> int:
        return self.http.get("/ready").json()["incidents"]["restarts"]

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.stderr()
        try:
            return self.http.get("/ready").status_code == 200
        except httpx.ConnectError:
            return False

    def stderr(self) -> str:
        return Path(self._stderr.name).read_text()

    def child(self, module: str) -> int | None:
        """Return the process id of a child, None if there is none now."""
        for entry in Path("/proc").iterdir():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_text().split("\0")
            except (OSError, ValueError, IndexError):
                continue
            if parent == self.process.pid and f"pagewood.server.processes.{module}" in words:
                return int(entry.name)
        return None

    def kill(self, module: str, *, after: int | None = None) -> int:
        """Kill a child that is another process than `after`, and return its id."""
        until(lambda: self.child(module) not in (None, after))
        pid = self.child(module)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return pid

    def close(self) -> None:
        self.http.close()
        self.admin.close()
        self.process.terminate()
        assert self.process.wait(LIMIT_S) == 0
        self._stderr.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("processes"))
    yield server
    server.close()


class Stream:
    """A client in a thread that reads one stream to its end."""

    def __init__(self, server: Server, *, max_tokens: int = 1500) -> None:
        self.num_chunks = 0
        self._body = {
            "model": MODEL,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": "What can you do?"}],
        }
        self.num_tokens = 0
        self.last: str | None = None
        self._server = server
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        url = self._server.http.base_url.join("/v1/chat/completions")
        with httpx.stream("POST", url, json=self._body, timeout=LIMIT_S) as response:
            for line in response.iter_lines():
                if line:
                    self.num_chunks += 1
                    self.last = line.removeprefix("data: ")
                if '"completion_tokens":' in line:
                    self.num_tokens = json.loads(self.last or "")["usage"]["completion_tokens"]

    def end(self) -> str:
        """Wait for the end, and return the code of its error, or `whole`."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the stream hangs"
        assert self.last is not None
        if self.last == "[DONE]":
            return "whole"
        return json.loads(self.last)["error"]["code"]


def complete(server: Server, prompt: str, **options: Any) -> httpx.Response:
    return server.http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 3, **options})


def test_a_broken_pipe_does_not_stop_the_answers(server: Server) -> None:
    assert complete(server, "Hello").status_code == 200


@pytest.mark.parametrize(
    ("engine_is_new", "deaths"),  # of two, the second process dies before it has passed on anything
    [(False, (1, 2)), (True, (1,)), pytest.param(True, (1, 2), marks=pytest.mark.slow)],  # each restart waits longer
)
def test_streams_go_on_when_the_detokenizer_dies(server: Server, engine_is_new: bool, deaths: tuple[int, ...]) -> None:
    if engine_is_new:
        num_restarts = server.num_restarts()
        server.kill("engine_process")
        until(lambda: server.num_restarts() > num_restarts)
        until(server.is_ready)
    killed: int | None = None
    for num_deaths in deaths:
        server.admin.post("/pause", json={}).raise_for_status()  # so that no stream ends before the others have begun
        streams = [Stream(server) for _ in range(3)]
        until(lambda: server.http.get("/ready").json()["engine"]["num_waiting"] == 3)
        server.admin.post("/resume", json={}).raise_for_status()
        until(lambda streams=streams: all(stream.num_chunks > 2 for stream in streams))
        for _ in range(num_deaths):
            killed = server.kill("detokenizer_process", after=killed)
        late = Stream(server)
        assert [stream.end() for stream in streams] == ["whole"] * 3
        assert late.end() == "whole"  # it waits
        try:
            until(server.is_ready)
        except AssertionError:
            raise AssertionError(server.stderr()) from None
        fresh = Stream(server, max_tokens=100)
        assert fresh.end() == "whole"
        assert fresh.num_tokens == 100  # pieces for a client that reads slowly are merged


def test_a_prompt_that_is_too_long_by_its_bytes_is_refused(server: Server) -> None:
    long = complete(server, "word and another " * 500_000)
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert "at least" in long.json()["error"]["message"]


@pytest.mark.slow
def test_abandoned_huge_prompts_hold_up_no_short_one_and_no_memory(tmp_path: Path) -> None:
    """With a tokenizer that may remove text, no prompt is refused by its bytes."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder(None), folder)
    file = folder / "tokenizer.json"
    spec = json.loads(file.read_text())
    spec["normalizer"] = {"type": "Replace", "pattern": {"Regex": " {3,}"}, "content": " "}
    file.write_text(json.dumps(spec))
    server = Server(tmp_path, "--model", str(folder), "--served-model-name", MODEL)
    try:
        tokenizer = server.child("tokenizer_process")
        assert tokenizer is not None
        assert complete(server, "Hello").status_code == 200
        before_mb = resident_mb(tokenizer)
        for _ in range(20):
            for _ in range(3):
                _abandon(server, "stone river cloud " * 60_000)
            assert complete(server, "Hello").status_code == 200
            if server.http.get("/ready").json()["requests"]["ending"] > 0:  # otherwise they had ended before it came
                break
        else:
            raise AssertionError("it has not overtaken the huge prompts")
        until(lambda: not any(server.http.get("/ready").json()["requests"].values()))
        until(lambda: resident_mb(tokenizer) < before_mb + 60)  # while it is encoded, a prompt takes several hundred
        _abandon(server, "stone river cloud " * 230_000)
        assert complete(server, "Hello").status_code == 200
    finally:
        server.close()
    assert "Traceback" not in server.stderr()


def resident_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _abandon(server: Server, prompt: str) -> None:
    url = server.http.base_url
    body = json.dumps({"model": MODEL, "prompt": prompt}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((url.host, url.port or 80)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


@pytest.mark.parametrize(
    "prompt", [rb"\ud800", rb"a\udfffb", rb"\ud83d x", b"\xed\xa0\x80", rb"\u0000", rb"\uffff\ufdd0"]
)
def test_hostile_text_is_answered(server: Server, prompt: bytes) -> None:
    for field in (b'"prompt": "%s"', b'"messages": [{"role": "user", "content": "%s"}]'):
        path = "/v1/completions" if b"prompt" in field else "/v1/chat/completions"
        body = b'{"model": "%s", "max_tokens": 2, ' % MODEL.encode() + field % prompt + b"}"
        response = server.http.post(path, content=body, headers={"content-type": "application/json"})
        is_text = prompt in (rb"\u0000", rb"\uffff\ufdd0")
        assert response.status_code == (200 if is_text else 400), response.text
        assert is_text or response.json()["error"]["type"] == "invalid_request_error"
    assert "Traceback" not in server.stderr()
