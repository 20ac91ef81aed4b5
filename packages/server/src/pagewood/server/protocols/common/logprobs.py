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


def chat_logprobs(tokens: Sequence[wire.TokenEntry]) -> ChatLogprobs:
    """Return the log probabilities of the tokens of a message."""
    return ChatLogprobs([_with_top(entry) for entry in tokens])


def completion_logprobs(entries: Sequence[wire.TokenEntry], *, num_top: int) -> CompletionLogprobs:
    """Return the log probabilities of the tokens of a text.

    `top_logprobs` has the `num_top` most probable tokens and the token of the text, which may be one of them. Of tokens
    with the same text (parts of characters), the most probable is shown.
    """
    return CompletionLogprobs(
        [_text(entry.chosen) for entry in entries],
        [_number(entry.chosen) if entry.rank else None for entry in entries],
        [_by_text(entry, num_top) if entry.rank else None for entry in entries],
        [entry.offset for entry in entries],
    )


def prompt_logprobs(entries: Sequence[wire.TokenEntry], *, num_top: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt's tokens, each with the `num_top` most probable ones in its place."""
    return [_by_id(entry, num_top) if entry.rank else None for entry in entries]


def _with_top(entry: wire.TokenEntry) -> TokenWithTop:
    text, data = _spelled(entry.chosen.data)
    top: list[_Token] = []
    for one in entry.top:
        top_text, top_data = _spelled(one.data)
        top.append(_Token(top_text, _number(one), top_data))
    return TokenWithTop(text, _number(entry.chosen), data, top)


def _by_text(entry: wire.TokenEntry, num_top: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in (*entry.top[:num_top], entry.chosen):
        text = _text(one)
        found[text] = max(found.get(text, LOWEST), _number(one))
    return found


def _by_id(entry: wire.TokenEntry, num_top: int) -> dict[int, PromptToken]:
    found = {entry.chosen.token: PromptToken(_number(entry.chosen), entry.rank, _text(entry.chosen))}
    rank, last = 0, None
    for place, one in enumerate(entry.top[:num_top], start=1):
        if one.logprob != last:  # equally probable tokens share a rank
            rank, last = place, one.logprob
        found.setdefault(one.token, PromptToken(_number(one), rank, _text(one)))
    return found


def _text(one: wire.ScoredToken) -> str:
    return _spelled(one.data)[0]


@lru_cache(maxsize=4096)
def _spelled(data: bytes) -> tuple[str, list[int]]:
    """Return the text of a token, and its bytes as JSON shows them; the caller does not change the list."""
    return data.decode(errors="replace"), list(data)


def _number(one: wire.ScoredToken) -> float:
    logprob = one.logprob
    return logprob if logprob > LOWEST else LOWEST
