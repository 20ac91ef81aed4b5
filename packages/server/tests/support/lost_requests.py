"""Requests under way while processes are killed, and what their clients read."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

from pagewood.server.metrics.rank_processes import rank_processes
from serving import LIMIT_S, MODEL, Server, is_alive, until

LONG: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
SHORT: dict[str, Any] = {"model": MODEL, "prompt": "The answer is", "max_tokens": 8, "temperature": 0}


class Reader:
    """A client in a thread: reads the lines of one answer to their end."""

    def __init__(self, server: Server, body: dict[str, Any], *, request_id: str | None = None) -> None:
        self.lines: list[str] = []
        self.status = 0
        self._url = f"{server.url}/v1/completions"
        self._body = body
        self._headers = {} if request_id is None else {"x-client-request-id": request_id}
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, headers=self._headers, timeout=LIMIT_S) as response:
                self.status = response.status_code
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
        except httpx.HTTPError as error:
            self.lines.append(type(error).__name__)

    def end(self) -> str:
        """Wait for the end of the answer, and return its last line."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), "the answer hangs"
        return self.lines[-1]


def text_of(line: str) -> str:
    """Return the text of an answer in one body."""
    found = re.search(r'"text":"((?:[^"\\]|\\.)*)"', line)
    assert found is not None, line
    return found[1]


def processes_of(server: Server) -> dict[str, int]:
    """Return the processes of a server by their names, with those of its ranks."""
    children = server.children()
    return children | rank_processes(children.get("engine_process"))


def server_until_all_end(folder: Path, *options: str) -> Generator[Server]:
    """Give a server, and check that its processes end with it."""
    server = Server(folder, *options)
    yield server
    pids = processes_of(server)
    server.close()
    until(lambda: not any(map(is_alive, pids.values())))


def check_requests_go_on(server: Server, rank: str, name: str, number: signal.Signals) -> None:
    """Send the process `name` a signal while requests run and wait; `rank` is that of the engine's other rank."""
    expected = text_of(server.http.post("/v1/completions", json=SHORT).text)
    server.admin.post("/pause", json={}).raise_for_status()
    streams = [Reader(server, LONG) for _ in range(4)]  # all rows
    until(lambda: server.ready()["engine"]["num_waiting"] == 4)
    waiting = [Reader(server, SHORT) for _ in range(4)]
    until(lambda: server.ready()["engine"]["num_waiting"] == 8)
    server.admin.post("/resume", json={}).raise_for_status()
    until(lambda: all(len(stream.lines) > 3 for stream in streams))
    pids = processes_of(server)
    both = pids["engine_process"], pids[rank]
    os.kill(pids[name], number)
    for stream in streams:
        assert stream.end() == "data: [DONE]"
    for one in waiting:
        assert (text_of(one.end()), one.status) == (expected, 200)
    until(lambda: not any(map(is_alive, both)))
    assert server.http.get("/health/generate").json()["status"] == "ok"
    counters = server.until_idle()
    assert counters["num_free_pages"] + counters["num_cached_pages"] == counters["num_pages"]
