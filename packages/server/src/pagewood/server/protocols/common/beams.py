"""Answers a request by beam search: each step is a group of requests of one token, one for each open sequence.

The search runs in the HTTP process, which knows ids from log probabilities only. So its first requests ask for the ids
of the prompts, and its last ones for the texts of the sequences that it has found. After the death of a process, the
open requests of the present step are sent again. The results of earlier steps are kept here, so no earlier step is
repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from starlette.types import Receive, Scope, Send

from pagewood.engine.api import FinishReason, Refusal, RequestOptions, SamplingParams
from pagewood.engine.beam_search import (
    NO_SEQUENCE,
    Alternatives,
    Beam,
    BeamSearch,
    BeamSearchParams,
    alternatives_of,
)
from pagewood.server.http.errors import ApiError
from pagewood.server.http.exchange import exchange_of
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import Choice, Format, Tally, Usage, usage
from pagewood.server.protocols.common.respond import error_response, json_response, until_disconnect
from pagewood.server.requests.live import LiveRequests, new_request_id
from pagewood.server.requests.live_group import LiveGroup

if TYPE_CHECKING:
    from pagewood.engine.text import Stops

_UNUSED_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
"""Parameters of a request whose token is not shown."""


@dataclass(slots=True, kw_only=True)
class _Reply:
    """The answer to one request of a step."""

    choice: Choice = field(default_factory=Choice)  # written by: _replies
    tally: Tally = field(default_factory=Tally)  # written by: _replies
    prompt: bytes = b""  # written by: _replies
    """Ids of the prompt, if they were asked for."""

    def alternatives(self, pieces: dict[int, bytes]) -> Alternatives:
        """Return the tokens that may follow, with their log probabilities; enter the bytes of each into `pieces`."""
        if not self.choice.tokens:
            return alternatives_of(None, FinishReason(self.choice.finish))
        top = self.choice.tokens[0].top
        pieces.update((one.token, one.data) for one in top)
        return alternatives_of([(one.token, one.logprob) for one in top], FinishReason(self.choice.finish))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """The search after one prompt, and the counts of the prompt."""

    prompt: bytes
    num_prompt_tokens: int
    num_cached_tokens: int
    search: BeamSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamResponse:
    """An ASGI response with the best sequences after each prompt. When it returns or fails, its requests have ended."""

    live: LiveRequests
    params: BeamSearchParams
    model: wire.Model
    prompts: Sequence[wire.Prompt]
    prompt_param: str
    """The client's name of the prompt field."""
    grammar_param: str | None
    """The client's name of the field with the grammar; None: it sent none."""
    bad_words: tuple[str, ...]
    """Texts that no sequence may hold."""
    names: frozenset[str]
    priority: int
    num_choices: int
    """Number of best sequences to send for each prompt."""
    format: Format
    is_speculating: bool
    """Whether the usage has draft tokens."""

    @property
    def _stop_ids(self) -> frozenset[int]:
        return self.params.stop_ids(self.model.eos_token_ids)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answers, unless the client leaves first."""
        await until_disconnect(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        group: LiveGroup | None = None
        try:
            group = self.live.submit(
                [self._step(prompt, reports_prompt=True) for prompt in self.prompts],
                prompt_param=self.prompt_param,
                grammar_param=self.grammar_param,
                names=self.names,
                room=len(self.prompts) * self.params.beam_width,
            )
            found = await self._search(group)
            used = exchange_of(scope).usage = self._usage(found)
            response = json_response(self.format.whole(await self._choices(group, found), used))
        except ApiError as error:
            response = error_response(scope, error)
        finally:
            if group is not None:
                self.live.close(group)
        await response(scope, receive, send)

    async def _search(self, group: LiveGroup) -> list[_Found]:
        """Return the finished searches after all prompts; their requests run together in each step."""
        replies = await _replies(group, len(self.prompts))
        pieces: dict[int, bytes] = {}
        text = _Text(self.params, pieces)
        found = [self._begin(reply, text) for reply in replies]
        while replies:
            answers = iter(replies)
            for one in found:
                if sequences := one.search.sequences:
                    one.search.take([next(answers).alternatives(pieces) for _ in sequences])
                if not one.search.sequences and not one.search.best:
                    raise ApiError(NO_SEQUENCE.message, code=NO_SEQUENCE.code)
            asked = [(one.prompt, tokens) for one in found for tokens in one.search.sequences]
            steps = [self._step(wire.TokenPrompt(tokens=prompt), tokens) for prompt, tokens in asked]
            self.live.extend(group, steps)
            replies = await _replies(group, len(steps))
        return found

    def _step(
        self, prompt: wire.Prompt, sequence: tuple[int, ...] = (), *, reports_prompt: bool = False
    ) -> wire.Generate:
        """Return the request for the tokens that may follow a sequence of the search after a prompt."""
        num_output, is_search = len(sequence), self.params.changes_logits or bool(self.bad_words)
        if sequence and not is_search and isinstance(prompt, wire.TokenPrompt):  # then its beginning is of no matter
            prompt = wire.TokenPrompt(tokens=prompt.tokens + _bytes(sequence))
        return wire.Generate(
            request_id=new_request_id("req"),
            prompt=prompt,
            options=RequestOptions(
                sampling=self.params.step_sampling(
                    self._stop_ids, num_output=num_output, has_bad_words=bool(self.bad_words)
                ),
                is_search=is_search,
                priority=self.priority,
                adapter=self.model.adapter,
            ),
            begun=(wire.Begun(output=_bytes(sequence)),) if sequence and is_search else (),
            bad_words=self.bad_words,
            reports_prompt=reports_prompt,
            max_length=self.model.max_length,
        )

    def _begin(self, reply: _Reply, text: _Text) -> _Found:
        """Return the search after a prompt, given its first reply.

        Raises:
            ApiError: the prompt leaves no room for the answer.
        """
        num_prompt = len(reply.prompt) // 4
        longest = self.params.longest(num_prompt=num_prompt, max_length=self.model.max_length)
        if isinstance(longest, Refusal):
            param = self.prompt_param if longest.param == "prompt" else longest.param
            raise ApiError(longest.message, param=param, code=longest.code)
        return _Found(
            prompt=reply.prompt,
            num_prompt_tokens=num_prompt,
            num_cached_tokens=reply.tally.num_cached_tokens,
            search=BeamSearch(self.params, stop_ids=self._stop_ids, max_tokens=longest, stops=text.stops),
        )

    async def _choices(self, group: LiveGroup, found: Sequence[_Found]) -> list[Choice]:
        """Return the answers to send, those to the first prompt first, the best first."""
        shown = [(one, beam) for one in found for beam in one.search.best[: self.num_choices]]
        self.live.extend(group, [self._text(one.prompt, beam) for one, beam in shown])
        replies = await _replies(group, len(shown))
        texts = [self._before_stop(reply.choice.text) for reply in replies]
        return [Choice(text=text, finish=beam.finish.value) for text, (_, beam) in zip(texts, shown, strict=True)]

    def _before_stop(self, text: str) -> str:
        """Return a text up to the first stop string or match of a stop expression."""
        if not self.params.stop and not self.params.stop_regex:
            return text
        stops = _stops(self.params)
        return stops.push(text) + stops.flush()

    def _text(self, prompt: bytes, beam: Beam) -> wire.Generate:
        """Return the request whose answer is the text of a sequence. The engine finds its prompt in the cache."""
        return wire.Generate(
            request_id=new_request_id("req"),
            prompt=wire.TokenPrompt(tokens=prompt),
            options=RequestOptions(sampling=_UNUSED_TOKEN, priority=self.priority, adapter=self.model.adapter),
            text=wire.TextOptions(is_scoring=True),
            prefix_tokens=_bytes(beam.tokens),
            max_length=self.model.max_length,
        )

    def _usage(self, found: Sequence[_Found]) -> Usage:
        """Return the tokens of the prompts, and of all sequences that were found."""
        width = self.params.beam_width
        tallies: list[Tally] = []
        for one in found:
            counts = [beam.num_output_tokens for beam in one.search.best]
            counts += [0] * (width - len(counts))  # a small vocabulary has fewer sequences
            tallies += [
                Tally(
                    num_prompt_tokens=one.num_prompt_tokens,
                    num_cached_tokens=one.num_cached_tokens,
                    num_output_tokens=count,
                )
                for count in counts
            ]
        return usage(tallies, num_answers=width, is_speculating=self.is_speculating)


class _Text:
    """The text of sequences, from the bytes of their tokens."""

    __slots__ = ("_params", "_pieces")

    def __init__(self, params: BeamSearchParams, pieces: dict[int, bytes]) -> None:
        self._params = params
        self._pieces = pieces

    @property
    def stops(self) -> Callable[[tuple[int, ...]], bool] | None:
        """Finds the end of a text; None: no stop string or expression was given."""
        return self._has_ended if self._params.stop or self._params.stop_regex else None

    def _has_ended(self, tokens: tuple[int, ...]) -> bool:
        stops = _stops(self._params)
        stops.push(b"".join([self._pieces[token] for token in tokens]).decode(errors="replace"))
        return stops.matched is not None


def _stops(params: BeamSearchParams) -> Stops:
    """Return a search for the ends of texts."""
    from pagewood.engine.text import stops_of  # imported when it is needed: it takes 0.1 s

    return stops_of(params.stop, params.stop_regex)


async def _replies(group: LiveGroup, num_requests: int) -> list[_Reply]:
    """Return the complete answers to the requests of a step, in their order.

    Raises:
        ApiError: a request was refused, or a process that held it died.
    """
    replies = [_Reply() for _ in range(num_requests)]
    num_open = num_requests
    while num_open:
        index, answer = await group.next()
        reply = replies[index]
        reply.choice.add(answer)
        reply.tally.add(answer)
        if answer.logprobs is not None and answer.logprobs.prompt_tokens:
            reply.prompt = answer.logprobs.prompt_tokens
        num_open -= answer.finish is not None
    return replies


def _bytes(tokens: Sequence[int]) -> bytes:
    return np.array(tokens, dtype="<i4").tobytes()
