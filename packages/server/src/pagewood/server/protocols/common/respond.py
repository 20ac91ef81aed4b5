"""The two ways to send the answers of a group: as a stream of events, or as one JSON body."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewood.server.http.connections import BodyWriter, body_writer_of
from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import exchange_of
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import Choice, EventStream, Format, Tally, Usage, usage
from pagewood.server.requests.answer_queue import Take
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.live_group import LiveGroup
from pagewood.server.requests.prompt_sharing import PromptSharing

MAX_WRITTEN_AT_ONCE = 256
"""Most tokens with log probabilities that are written on the event loop: each takes up to 35 microseconds."""
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def json_response(
    answer: bytes | msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with a JSON body, which may be encoded already."""
    body = answer if isinstance(answer, bytes) else msgspec.json.encode(answer)
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_response(scope: Scope, error: ApiError) -> Response:
    """Return the response with an error in the form of the path's protocol, and note the error for the log."""
    exchange = exchange_of(scope)
    exchange.error_code = error.code
    status, body = exchange.error_form(error, exchange.request_id)
    return json_response(body, status=status, headers=error.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResponse:
    """An ASGI response with the answers of a group. The group is closed even if it fails."""

    live: LiveRequests
    group: LiveGroup
    num_prompts: int
    num_answers: int
    """Answers to compute for each prompt."""
    num_choices: int
    """Answers to send for each prompt: all, or the best."""
    shares_prompt: bool
    """Whether the answers share what is computed of their prompt."""
    has_rows: bool
    """Whether answers have experts or hidden states of positions, which take long to write."""
    format: Format
    stream: bool
    is_speculating: bool
    """Whether the usage has draft tokens."""
    is_read: bool = False
    """Whether the usage has tokens of reasoning."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers until they end or the client is gone."""
        tallies = [Tally() for _ in range(self.num_prompts * self.num_answers)]
        work = self._stream(scope, send, tallies) if self.stream else self._whole(scope, receive, send, tallies)
        try:
            await until_disconnect(receive, work)
        finally:
            exchange_of(scope).usage = self._usage(tallies)
            self.live.close(self.group)

    async def _whole(self, scope: Scope, receive: Receive, send: Send, tallies: list[Tally]) -> None:
        answers = [Choice(tally=tally) for tally in tallies]

        try:
            async for found in self._answers(tallies):
                for index, answer in found:
                    answers[index].add(answer)
            choices, counts = self._choices(answers), self._usage(tallies)
            num_reported = sum([len(choice.tokens) + len(choice.prompt) for choice in choices])
            if num_reported <= MAX_WRITTEN_AT_ONCE and not self.has_rows:
                body = self.format.whole(choices, counts)
            else:
                body = await asyncio.to_thread(self.format.whole, choices, counts)
            response = json_response(body)
        except ApiError as error:
            response = error_response(scope, error)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, send: Send, tallies: list[Tally]) -> None:
        stream = self.format.stream(lambda: self._usage(tallies))
        writer = body_writer_of(scope)
        take = None if writer is None or self.shares_prompt else partial(_write, writer, stream, tallies)
        started = False
        try:
            async for found in self._answers(tallies, take):
                if self.has_rows and any(answer.finish is not None for _, answer in found):
                    data = await asyncio.to_thread(_joined, stream, found)
                else:
                    data = _joined(stream, found)
                self.group.is_sending = True
                if not started:  # wait for the first answer: until then, an error can still be a status
                    started = True
                    headers = [(b"content-type", self.format.media_type.encode()), *_STREAM_HEADERS]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                self.group.is_sending = False
        except ApiError as error:
            response = error_response(scope, error)
            if started:
                await _send(send, stream.fail(error))
            else:
                start = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
                await send(start)
                await _send(send, bytes(response.body))
            return
        await _send(send, stream.end())

    def _choices(self, answers: list[Choice]) -> list[Choice]:
        """Return the answers to send, those to the first prompt first: all, or the best ones of each, best first."""
        if self.num_choices == self.num_answers:
            return answers
        groups = [answers[i : i + self.num_answers] for i in range(0, len(answers), self.num_answers)]
        ranked = [sorted(group, key=lambda answer: answer.score, reverse=True) for group in groups]
        return [choice for group in ranked for choice in group[: self.num_choices]]

    def _usage(self, tallies: list[Tally]) -> Usage:
        return usage(tallies, num_answers=self.num_answers, is_speculating=self.is_speculating, is_read=self.is_read)

    async def _answers(
        self, tallies: list[Tally], take: Take | None = None
    ) -> AsyncIterator[Sequence[tuple[int, wire.Answer]]]:
        """Yield the answers that `take` does not take; answers that become available together are yielded together."""
        sharing = PromptSharing(self.num_answers) if self.shares_prompt else None

        num_open = len(tallies)
        while num_open:
            index, answer = await self.group.next(take)
            tallies[index].add(answer)
            num_open -= answer.finish is not None
            yield [(index, answer)] if sharing is None else sharing.take(index, answer)


def _joined(stream: EventStream, found: Sequence[tuple[int, wire.Answer]]) -> bytes:
    """Return the additions of some answers to a body."""
    return b"".join([stream.take(index, answer) for index, answer in found])


def _write(writer: BodyWriter, stream: EventStream, tallies: list[Tally], index: int, answer: wire.Answer) -> bool:
    """Write the addition of an answer to a body, and return True.

    Return False and write nothing if the answer ends its request, the client is slow, or the body has not begun.
    """
    if answer.finish is not None or not writer.is_open:
        return False
    tallies[index].add(answer)
    if data := stream.take(index, answer):
        writer.write(data)
    return True


async def _send(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
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
