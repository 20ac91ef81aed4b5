"""`POST /inference/v1/generate`: tokens in and out, in the words of vLLM, as trainers use them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from pagewood.engine.api import MAX_LOGPROBS, Rows
from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import MAX_ID_LENGTH, Salt
from pagewood.server.http.validation import WHOLE, parse
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import ids_of
from pagewood.server.protocols.common.fields import (
    INT32_MAX,
    Extent,
    SamplingFields,
    StreamOptions,
    TokenId,
    not_in_streams,
)
from pagewood.server.protocols.common.formats import EVENTS, Choice, InnerRows, Tally, Usage, event, kept_of
from pagewood.server.protocols.common.logprobs import PromptLogprobs, number_of, prompt_logprobs
from pagewood.server.protocols.openai.stream import ChunkUsage

DEFAULT_MAX_TOKENS = 16
MAX_MASK_TOKENS = 1 << 20
"""Most ids of a `sampling_mask`, which are JSON."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "features": (None,),
    "content_parts": (None,),
    "output_mode": (None, "tokens"),
    "return_token_ids": (None, True),
    "kv_transfer_params": (None, {}),
}
"""Fields that are not supported -> their neutral values, which have no effect and are accepted."""

_NumTop = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), WHOLE] | None


class TokenSampling(SamplingFields):
    """`sampling_params`."""

    logprobs: _NumTop = None
    """Most probable tokens that are reported in the place of each; null: no log probabilities."""
    prompt_logprobs: _NumTop = None
    skip_special_tokens: bool | None = None
    """Without effect, as the others below: there is no text."""
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None
    output_kind: Annotated[int, Field(ge=0, le=2)] | None = None


class TokensRequest(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    token_ids: Annotated[list[TokenId], Field(min_length=1)]
    """The prompt."""
    sampling_params: TokenSampling = Field(default_factory=TokenSampling)
    model: str | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_LENGTH)] | None = None
    cache_salt: Salt | None = None
    return_routed_experts: bool | None = None
    """Whether choices have the experts of all tokens but the last; vLLM decides that when it starts."""
    return_sampling_mask: bool | None = None
    """Whether choices have, for each token, those that the filters have left."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Field(ge=-INT32_MAX, le=INT32_MAX), WHOLE] | None = None


def parse_tokens(body: bytes) -> TokensRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    found = parse(TokensRequest, body, neutral=NEUTRAL, ignored=frozenset())
    if found.stream and found.sampling_params.prompt_logprobs is not None:
        raise not_in_streams("sampling_params.prompt_logprobs")
    return found


def extent(chosen: TokenSampling) -> Extent:
    """Return the amounts to compute and to show.

    Raises:
        ApiError: there would be too many answers.
    """
    found = Extent(
        max_tokens=chosen.max_tokens or DEFAULT_MAX_TOKENS,
        num_answers=chosen.n or 1,
        num_choices=chosen.n or 1,
        logprobs=chosen.logprobs,
        prompt_logprobs=chosen.prompt_logprobs,
    )
    found.check(1, param="sampling_params.n")
    return found


class _Token(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float


class _TokenWithTop(msgspec.Struct, frozen=True):
    token: str
    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[_Token]


class _Logprobs(msgspec.Struct, frozen=True):
    content: list[_TokenWithTop]


class _Span(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice; in a stream, its new part."""

    index: int
    finish_reason: str | None
    """null: it goes on."""
    token_ids: list[int]
    """With the token that ended it."""
    logprobs: _Logprobs | None
    weight_versions: list[_Span] | None
    """Which weights have computed which of its tokens, once it has ended."""
    sampling_mask: list[list[int]] | None = None
    """For each token, those that the filters have left, ascending; null: they are not asked for, or too many."""
    routed_experts: str | None = None
    """Base64 of a file of numpy (.npy): int32 `[tokens - 1, layers, experts of a token]`, prompt included; once it has
    ended."""


class GeneratedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer."""

    request_id: str
    choices: list[_Choice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class _Chunk(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    choices: list[_Choice]
    usage: ChunkUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensFormat:
    """The answers to one request."""

    id: str
    logprobs: int | None
    """Alternatives for each token; None: choices have no log probabilities."""
    prompt_logprobs: int | None
    """Alternatives for each prompt token; None: the answer has none."""
    options: StreamOptions
    has_mask: bool
    """Whether choices have what the filters have left."""

    media_type: ClassVar[str] = EVENTS

    def stream(self, usage: Callable[[], Usage]) -> TokensStream:
        """Return a new stream."""
        return TokensStream(self, usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        return msgspec.json.encode(
            GeneratedTokens(
                request_id=self.id,
                choices=[
                    self.choice(index, choice.ids, choice.tokens, (choice.finish, choice.tally, choice.rows))
                    for index, choice in enumerate(choices)
                ],
                usage=usage,
                prompt_logprobs=None
                if self.prompt_logprobs is None
                else prompt_logprobs(choices[0].prompt, num_top=self.prompt_logprobs),
            )
        )

    def choice(
        self,
        index: int,
        ids: list[int],
        tokens: Sequence[wire.TokenEntry],
        ended: tuple[str, Tally, InnerRows] | None,
    ) -> _Choice:
        """Return a choice or its new part, with new tokens.

        Args:
            index: its number.
            ids: of the tokens.
            tokens: their entries, if they have any.
            ended: why it ended, its counts, and what was computed at its positions; None: it goes on.
        """
        num_top = self.logprobs
        kept = kept_of(tokens) if self.has_mask else None
        finish, tally, rows = (None, None, None) if ended is None else ended
        return _Choice(
            index=index,
            finish_reason=finish,
            token_ids=ids,
            logprobs=None if num_top is None else _Logprobs([_with_top(entry, num_top) for entry in tokens]),
            weight_versions=None if tally is None else [_Span(*span) for span in tally.weight_versions],
            sampling_mask=None if kept is None else [ids_of(one) for one in kept],
            routed_experts=None if rows is None else _file_of(rows.experts),
        )


class TokensStream:
    """The server-sent events of one request: each has the new tokens of one choice.

    Args:
        format: of the answers.
        usage: returns the tokens of the request so far.
    """

    __slots__ = ("_format", "_parts", "_usage")

    def __init__(self, format: TokensFormat, usage: Callable[[], Usage]) -> None:
        self._format = format
        self._usage = usage
        self._parts: dict[int, tuple[Tally, InnerRows]] = {}  # written by: take

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the event of one message."""
        tally, rows = self._parts.setdefault(index, (Tally(), InnerRows()))
        tally.add(answer)
        rows.add(answer)
        finish = answer.finish
        entries = () if answer.logprobs is None else answer.logprobs.tokens
        ended = None if finish is None else (finish.value, tally, rows)
        choice = self._format.choice(index, ids_of(answer.tokens), entries, ended)
        return self._event([choice], self._usage() if self._format.options.continuous_usage_stats else msgspec.UNSET)

    def end(self) -> bytes:
        """Return the usage, if it is wanted, and the last event."""
        last = self._event([], self._usage()) if self._format.options.include_usage else b""
        return last + event(b"[DONE]")

    def fail(self, error: ApiError) -> bytes:
        """Return the event with an error."""
        return event(error.body())

    def _event(self, choices: list[_Choice], usage: ChunkUsage) -> bytes:
        return event(msgspec.json.encode(_Chunk(request_id=self._format.id, choices=choices, usage=usage)))


def _file_of(rows: Rows | None) -> str | None:
    if rows is None:
        return None
    file = BytesIO()
    np.save(file, np.frombuffer(rows.data, "<i4").reshape(rows.shape), allow_pickle=False)
    return b64encode(file.getvalue()).decode()


def _with_top(entry: wire.TokenEntry, num_top: int) -> _TokenWithTop:
    chosen = _named(entry.chosen)
    top = [_named(one) for one in entry.top[:num_top]]
    return _TokenWithTop(chosen.token, chosen.token_id, chosen.logprob, entry.rank, top)


def _named(one: wire.ScoredToken) -> _Token:
    return _Token(f"token_id:{one.token}", one.token, number_of(one))
