"""`POST /v1/completions`: the fields of a request, its prompts, and the JSON of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from pydantic import BeforeValidator, Field

from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import WHOLE, parse
from pagewood.server.messages import wire
from pagewood.server.protocols.common import fields
from pagewood.server.protocols.common.fields import (
    INT32_MAX,
    MAX_ANSWERS,
    Extent,
    GenerationFields,
    NumTop,
    StreamOptions,
    false_as_null,
)
from pagewood.server.protocols.common.formats import EVENTS, AnswerMetadata, Choice, Usage, metadata_of
from pagewood.server.protocols.common.logprobs import (
    CompletionLogprobs,
    PromptLogprobs,
    completion_logprobs,
    prompt_logprobs,
)
from pagewood.server.protocols.common.prompts import MAX_PROMPTS, Prompts, Texts, TokenLists, parse_prompts, prompt_of
from pagewood.server.protocols.common.timings import Timings
from pagewood.server.protocols.openai.beams import check_beams
from pagewood.server.protocols.openai.stream import ChunkStream, ChunkUsage

DEFAULT_MAX_TOKENS = 16

NEUTRAL: dict[str, tuple[Any, ...]] = fields.NEUTRAL | {
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
    "prompt_embeds": (None,),
}
"""Fields that this endpoint does not support -> their neutral values, which have no effect and are accepted."""


class CompletionRequest(GenerationFields):
    """The body of a request."""

    prompt: Annotated[Any, BeforeValidator(parse_prompts, Prompts)]
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    """0, together with `echo`, shows the prompt alone: with `logprobs`, this scores a text."""
    logprobs: Annotated[NumTop, BeforeValidator(false_as_null, NumTop | Literal[False])] = None
    """OpenAI allows 5 at most."""
    best_of: Annotated[int, Field(ge=1, le=MAX_ANSWERS), WHOLE] | None = None


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(CompletionRequest, body, neutral=NEUTRAL, ignored=fields.IGNORED)
    num_prompts = len(request.prompt)
    if num_prompts > MAX_PROMPTS:
        raise ApiError(
            f"Invalid value for 'prompt': expected at most {MAX_PROMPTS} prompts, but got {num_prompts} instead.",
            param="prompt",
            code="invalid_value",
        )
    if request.max_tokens == 0 and not request.echo:
        raise ApiError(
            "Invalid value for 'max_tokens': expected a value >= 1, or 0 together with 'echo', but got 0 instead.",
            param="max_tokens",
            code="invalid_value",
        )
    num, best_of = request.n or 1, request.best_of
    if best_of is not None and (best_of < num or (best_of > num and request.stream)):
        rule = f"at least 'n' ({num})" if best_of < num else f"'n' ({num}) when 'stream' is enabled"
        raise ApiError(
            f"Invalid value for 'best_of': expected {rule}, but got {best_of} instead.",
            param="best_of",
            code="invalid_value",
        )
    check_beams(request)
    fields.check_token_ids(request)
    return request


def extent(request: CompletionRequest) -> Extent:
    """Return the amounts to compute and to show.

    Raises:
        ApiError: two fields contradict each other, or there would be too many answers.
    """
    num = request.n or 1
    num_answers = request.best_of or num
    logprobs, in_prompt = request.logprobs, fields.prompt_logprobs(request)
    if request.echo and logprobs is not None:
        in_prompt = max(logprobs, in_prompt or 0)
    if num_answers > num and logprobs is None:
        logprobs = 0  # the best are found by the log probabilities of their tokens
    # The engine generates at least one token. If no token is wanted, the detokenizer drops it.
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    found = Extent(
        max_tokens=max_tokens,
        num_answers=num_answers,
        num_choices=num,
        logprobs=logprobs,
        prompt_logprobs=in_prompt,
        echo=bool(request.echo),
        is_scoring=request.max_tokens == 0,
    )
    found.check(len(request.prompt), param="n" if request.best_of is None else "best_of")
    return found


def prompts(request: CompletionRequest, *, vocab_size: int) -> list[wire.TextPrompt | wire.TokenPrompt]:
    """Return the prompts of a request.

    Raises:
        ApiError: a token id is not in the vocabulary.
    """
    return [prompt_of(one, vocab_size=vocab_size) for one in cast("Texts | TokenLists", request.prompt)]


class _Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True):
    """The complete answer, or one event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: ChunkUsage = msgspec.UNSET
    metadata: AnswerMetadata | msgspec.UnsetType = msgspec.UNSET
    """What a whole answer says of its computation, once weights were updated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormat:
    """The answers to one completion request."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    options: StreamOptions
    logprobs: int | None = None
    """Alternatives for each token; None: choices have no log probabilities."""
    prompt_logprobs: int | None = None
    """Alternatives for each prompt token; None: choices have no such field."""
    echo: bool = False
    """Whether the tokens of the prompt are among those with log probabilities."""
    has_ids: bool = False
    """Whether choices have the ids of tokens."""
    names_ids: bool = False
    """Whether log probabilities have ids in the place of the texts of tokens."""

    media_type: ClassVar[str] = EVENTS

    def stream(self, usage: Callable[[], Usage]) -> ChunkStream:
        """Return a new stream."""
        return ChunkStream(self, self.options, usage)

    def begin(self, index: int, usage: ChunkUsage) -> None:
        """Return None: a completion has no roles."""

    def text(self, index: int, text: str, logprobs: wire.Logprobs | None, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text."""
        prompt, tokens = ((), ()) if logprobs is None else (logprobs.prompt or (), logprobs.tokens)
        return self._encode((_Choice(index, text, self._logprobs(prompt, tokens)),), usage)

    def part(self, index: int, part: wire.Part, usage: ChunkUsage) -> None:
        """Return None: a completion is plain text."""

    def end(self, index: int, reason: str, usage: ChunkUsage, timings: Timings | msgspec.UnsetType) -> bytes:
        """Return the chunk with the reason why the text ended."""
        return self._encode((_Choice(index, "", finish_reason=reason, timings=timings),), usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices."""
        return self._encode((), usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        shown = [
            _Choice(
                index,
                choice.text,
                self._logprobs(choice.prompt, choice.tokens),
                choice.finish,
                msgspec.UNSET
                if self.prompt_logprobs is None
                else prompt_logprobs(choice.prompt, num_top=self.prompt_logprobs),
                choice.shown_timings,
                choice.ids if self.has_ids else msgspec.UNSET,
                choice.prompt_ids if self.has_ids else msgspec.UNSET,
            )
            for index, choice in enumerate(choices)
        ]
        return self._encode(tuple(shown), usage, metadata_of(choices))

    def _logprobs(
        self, prompt: Sequence[wire.TokenEntry], tokens: Sequence[wire.TokenEntry]
    ) -> CompletionLogprobs | None:
        if self.logprobs is None:
            return None
        shown = [*(prompt if self.echo else ()), *tokens]
        return completion_logprobs(shown, num_top=self.logprobs, by_id=self.names_ids)

    def _encode(
        self,
        choices: tuple[_Choice, ...],
        usage: ChunkUsage,
        metadata: AnswerMetadata | msgspec.UnsetType = msgspec.UNSET,
    ) -> bytes:
        return msgspec.json.encode(
            Completion(self.id, "text_completion", self.created, self.model, choices, usage, metadata)
        )
