"""The two ways to send the answers of a group: as they come, or when all are there. Both end with their client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewood.server import wire
from pagewood.server.errors import ApiError
from pagewood.server.formats import Format, Tally, usage
from pagewood.server.live import LiveGroup, LiveRequests

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def json_response(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a JSON body that is already encoded."""
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """Return a response with OpenAI's error envelope."""
    return json_response(error.body(), status=error.status, headers=error.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResponse:
    """An ASGI response with the answers of a group. Whatever happens to it, the group is closed."""

    live: LiveRequests
    group: LiveGroup
    num_prompts: int
    format: Format
    stream: bool
    include_usage: bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers, until they end or the client is gone."""
        try:
            await _until_disconnect(receive, self._stream(send) if self.stream else self._whole(scope, receive, send))
        finally:
            self.live.close(self.group)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        texts: list[list[str]] = [[] for _ in range(self.num_prompts)]
        reasons = [""] * self.num_prompts
        tallies = [Tally() for _ in range(self.num_prompts)]
        try:
            async for index, answer in self._answers(tallies):
                texts[index].append(answer.text)
                if answer.finish is not None:
                    reasons[index] = answer.finish.value
            body = self.format.whole(["".join(parts) for parts in texts], reasons, usage(tallies))
            response = json_response(body)
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        tallies = [Tally() for _ in range(self.num_prompts)]
        begun: set[int] = set()
        started = False
        try:
            async for index, answer in self._answers(tallies):
                if not started:  # not before the first answer: until then, an error can still be a status
                    started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
                begin = None if index in begun else self.format.begin(index)
                begun.add(index)
                await _send(send, _events(begin, *self._chunks(index, answer)))
        except ApiError as error:
            await self._stream_error(send, error, started=started)
            return
        last = self.format.usage(usage(tallies)) if self.include_usage else None
        await _send(send, _events(last) + b"data: [DONE]\n\n", more=False)

    def _chunks(self, index: int, answer: wire.Answer) -> list[bytes | None]:
        # A step that shows no text yet (half a character) is a chunk all the same: clients count chunks.
        text = self.format.text(index, answer.text) if answer.text or answer.finish is None else None
        return [text, None if answer.finish is None else self.format.end(index, answer.finish.value)]

    async def _answers(self, tallies: list[Tally]) -> AsyncIterator[tuple[int, wire.Answer]]:
        num_open = self.num_prompts
        while num_open:
            index, answer = await self.group.next()
            tallies[index].add(answer)
            num_open -= answer.finish is not None
            yield index, answer

    async def _stream_error(self, send: Send, error: ApiError, *, started: bool) -> None:
        if started:
            await _send(send, _events(error.body()), more=False)
            return
        response = error_response(error)
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        await _send(send, bytes(response.body), more=False)


def _events(*payloads: bytes | None) -> bytes:
    return b"".join([b"data: " + payload + b"\n\n" for payload in payloads if payload is not None])


async def _send(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`, and cancel it when the client closes its connection."""
    working = asyncio.create_task(work)
    listening = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((working, listening), return_when=asyncio.FIRST_COMPLETED)
    finally:
        listening.cancel()
        if not working.done():
            working.cancel()
        results = await asyncio.gather(working, listening, return_exceptions=True)
    if isinstance(results[0], Exception):
        raise results[0]


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
