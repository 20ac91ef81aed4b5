"""Requests under way while processes are killed, and what their clients read."""

from __future__ import annotations

import re
import threading
from typing import Any

import httpx

from serving import LIMIT_S, MODEL, Server

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
