"""One request of a load test: its body, its stream of events, and its times."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from pagewood.server.bench.http_client import HttpClient, HttpError
from pagewood.server.bench.records import Record
from pagewood.server.bench.workloads import History

Endpoint = Literal["chat", "completions"]
PATHS: Mapping[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    tool_calls: Any = None

    @property
    def has_content(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


MAX_SHOWN = 500
"""Bytes of an error that are kept."""
_DECODER = msgspec.json.Decoder(_Chunk)


class _Stream:
    """Reads the events of one answer into its record."""

    __slots__ = ("_keeps_text", "_record", "_rest", "_texts", "is_ended")

    def __init__(self, record: Record, *, keeps_text: bool) -> None:
        self._record = record
        self._keeps_text = keeps_text
        self._rest = b""  # written by: take
        self._texts: list[str] = []  # written by: take
        self.is_ended = False  # written by: take
        """Whether `[DONE]` has come."""

    def take(self, data: bytes) -> None:
        """Read the next part of the body."""
        now_s = time.perf_counter()
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now_s)

    @property
    def rest(self) -> bytes:
        """The bytes after the last complete line of the body."""
        return self._rest

    def end(self) -> None:
        """Note the text."""
        if self._keeps_text and self._texts:
            self._record.text = "".join(self._texts)

    def _event(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.is_ended = True
            return
        try:
            chunk = _DECODER.decode(data)
        except msgspec.DecodeError:
            self._record.error = "bad event"
            return
        if chunk.error is not None:
            self._record.error = "error in stream"
        if chunk.usage is not None:
            usage, details = chunk.usage, chunk.usage.prompt_tokens_details
            self._record.num_prompt, self._record.num_output = usage.prompt_tokens, usage.completion_tokens
            self._record.num_cached = (details.cached_tokens or 0) if details is not None else 0
        if chunk.choices:
            choice = chunk.choices[0]
            if choice.delta is None or choice.delta.has_content:
                self._note(choice, now_s)

    def _note(self, choice: _Choice, now_s: float) -> None:
        if choice.delta is None and not choice.text and self._record.chunks_s:
            return  # the end of a completion
        self._record.chunks_s.append(now_s)
        if self._keeps_text:
            self._texts.append((choice.text if choice.delta is None else choice.delta.content) or "")


class Sender:
    """Sends requests of one form.

    Args:
        client: connections.
        endpoint: chat completions or completions.
        model: name; None: the field is left out.
        fields: further fields of every body.
        limit_s: longest time for an answer.
    """

    def __init__(
        self,
        client: HttpClient,
        *,
        endpoint: Endpoint,
        model: str | None,
        fields: Mapping[str, Any],
        limit_s: float,
    ) -> None:
        self._client = client
        self._path = PATHS[endpoint]
        self._is_chat = endpoint == "chat"
        self._fields = {"stream": True, "stream_options": {"include_usage": True}, **fields}
        if model is not None:
            self._fields = {"model": model, **self._fields}
        self._limit_s = limit_s

    async def send(self, history: History, max_tokens: int, record: Record, *, keeps_text: bool = False) -> None:
        """Send one request and fill in its record; errors are noted in it."""
        asked = {"messages": history.messages} if self._is_chat else {"prompt": history.text}
        body = msgspec.json.encode({**asked, "max_tokens": max_tokens, **self._fields})
        stream = _Stream(record, keeps_text=keeps_text)
        record.sent_s = time.perf_counter()
        try:
            status = await self._client.send("POST", self._path, body, stream.take, limit_s=self._limit_s)
        except HttpError as error:
            record.error = error.kind
        else:
            if status != 200:
                record.error = str(status)
                record.text = stream.rest[:MAX_SHOWN].decode(errors="replace")
            elif record.error is None and not stream.is_ended:
                record.error = "cut off"
        record.ended_s = time.perf_counter()
        stream.end()
        if not record.num_output:
            record.num_output = len(record.chunks_s)
