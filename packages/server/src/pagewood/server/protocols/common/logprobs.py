"""The JSON of log probabilities: OpenAI's for chats, OpenAI's older one for completions, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import msgspec

from pagewood.server.messages import wire

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class _Token(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenWithTop(msgspec.Struct, frozen=True):
    """A token of a message, and the most probable tokens in its place."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[_Token]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice of a chat completion."""

    content: list[TokenWithTop]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """`logprobs` of a choice of a completion: one entry for each token in each list."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptToken(msgspec.Struct, frozen=True):
    """A token in the place of a prompt's token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptToken] | None]
"""`prompt_logprobs`: one for each token of the prompt, by token id; null for the first."""


def chat_logprobs(tokens: Sequence[wire.TokenEntry], *, by_id: bool = False) -> ChatLogprobs:
    """Return the log probabilities of the tokens of a message; `by_id`: with ids in the place of their texts."""
    return ChatLogprobs([_with_top(entry, by_id=by_id) for entry in tokens])


def completion_logprobs(entries: Sequence[wire.TokenEntry], *, num_top: int, by_id: bool = False) -> CompletionLogprobs:
    """Return the log probabilities of the tokens of a text; `by_id`: with ids in the place of their texts.

    `top_logprobs` has the `num_top` most probable tokens and the token of the text, which may be one of them. Of tokens
    with the same text (parts of characters), the most probable is shown.
    """
    return CompletionLogprobs(
        [_name(entry.chosen, by_id=by_id) for entry in entries],
        [number_of(entry.chosen) if entry.rank else None for entry in entries],
        [_by_name(entry, num_top, by_id=by_id) if entry.rank else None for entry in entries],
        [entry.offset for entry in entries],
    )


def prompt_logprobs(entries: Sequence[wire.TokenEntry], *, num_top: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt's tokens, each with the `num_top` most probable ones in its place."""
    return [_by_id(entry, num_top) if entry.rank else None for entry in entries]


def _with_top(entry: wire.TokenEntry, *, by_id: bool) -> TokenWithTop:
    top = [_Token(_name(one, by_id=by_id), number_of(one), _spelled(one.data)[1]) for one in entry.top]
    name = _name(entry.chosen, by_id=by_id)
    return TokenWithTop(name, number_of(entry.chosen), _spelled(entry.chosen.data)[1], top)


def _by_name(entry: wire.TokenEntry, num_top: int, *, by_id: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in (*entry.top[:num_top], entry.chosen):
        text = _name(one, by_id=by_id)
        found[text] = max(found.get(text, LOWEST), number_of(one))
    return found


def _by_id(entry: wire.TokenEntry, num_top: int) -> dict[int, PromptToken]:
    found = {entry.chosen.token: PromptToken(number_of(entry.chosen), entry.rank, _text(entry.chosen))}
    rank, last = 0, None
    for place, one in enumerate(entry.top[:num_top], start=1):
        if one.logprob != last:  # equally probable tokens share a rank
            rank, last = place, one.logprob
        found.setdefault(one.token, PromptToken(number_of(one), rank, _text(one)))
    return found


def _name(one: wire.ScoredToken, *, by_id: bool) -> str:
    return f"token_id:{one.token}" if by_id else _text(one)


def _text(one: wire.ScoredToken) -> str:
    return _spelled(one.data)[0]


@lru_cache(maxsize=4096)
def _spelled(data: bytes) -> tuple[str, list[int]]:
    """Return the text of a token, and its bytes as JSON shows them; the caller does not change the list."""
    return data.decode(errors="replace"), list(data)


def number_of(one: wire.ScoredToken) -> float:
    """Return a log probability as JSON can have it."""
    logprob = one.logprob
    return logprob if logprob > LOWEST else LOWEST
