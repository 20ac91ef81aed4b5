"""Answers that are sent when all requests of an HTTP request have ended: those with vectors and scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.types import Receive, Scope, Send

from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import exchange_of
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import PromptTokensDetails, Tally, usage
from pagewood.server.protocols.common.respond import error_response, json_response, until_disconnect
from pagewood.server.requests.live import LiveRequests
from pagewood.server.requests.live_group import LiveGroup


@dataclass(slots=True, kw_only=True)
class Collected:
    """The answer to one request."""

    tally: Tally = field(default_factory=Tally)
    vector: bytes = b""  # written by: add
    """float32, little-endian; empty if it did not ask for one."""
    tokens: list[wire.TokenEntry] = field(default_factory=list[wire.TokenEntry])  # written by: add
    """Entries of the tokens of the answer, if their log probabilities are known."""

    def add(self, answer: wire.Answer) -> None:
        """Take the answer of one step."""
        self.tally.add(answer)
        self.vector = answer.vector or self.vector
        if answer.logprobs is not None:
            self.tokens += answer.logprobs.tokens


class PromptUsage(msgspec.Struct, frozen=True):
    """Tokens of a request without output."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


Render = Callable[[Sequence[Collected], PromptUsage], bytes]
"""Returns the JSON of an answer, given the answers to its requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The content of an HTTP request."""

    requests: Sequence[wire.Generate]
    prompt_param: str
    """The client's name of the field with the prompts."""
    render: Render


def respond(live: LiveRequests, work: Work, *, names: frozenset[str]) -> CollectedResponse:
    """Submit an HTTP request, and return the response that will send the answer.

    Args:
        live: the requests that the server holds.
        work: the content of the request.
        names: by which the client may refer to the HTTP request.

    Raises:
        ApiError: the server holds too many requests.
    """
    group = live.submit(work.requests, prompt_param=work.prompt_param, names=names)
    return CollectedResponse(live=live, group=group, num_requests=len(work.requests), render=work.render)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedResponse:
    """An ASGI response that is sent when all requests of a group have ended. The group is closed even if it fails."""

    live: LiveRequests
    group: LiveGroup
    num_requests: int
    render: Render

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, unless the client leaves first."""
        found = [Collected() for _ in range(self.num_requests)]
        try:
            await until_disconnect(receive, self._respond(scope, receive, send, found))
        finally:
            exchange_of(scope).usage = usage([one.tally for one in found], is_speculating=False)
            self.live.close(self.group)

    async def _respond(self, scope: Scope, receive: Receive, send: Send, found: Sequence[Collected]) -> None:
        try:
            num_open = len(found)
            while num_open:
                index, answer = await self.group.next()
                found[index].add(answer)
                num_open -= answer.finish is not None
            response = json_response(self.render(found, _prompt_usage(found)))
        except ApiError as error:
            response = error_response(scope, error)
        await response(scope, receive, send)


def _prompt_usage(found: Sequence[Collected]) -> PromptUsage:
    num_prompt = sum(one.tally.num_prompt_tokens for one in found)
    return PromptUsage(num_prompt, num_prompt, PromptTokensDetails(sum(one.tally.num_cached_tokens for one in found)))
