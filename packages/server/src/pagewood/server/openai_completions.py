"""`POST /v1/completions`: the fields of a request, its prompts, and the JSON of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import msgspec
import numpy as np
from pydantic import BeforeValidator

from pagewood.server import openai_fields, wire
from pagewood.server.errors import ApiError
from pagewood.server.formats import ChunkUsage, Usage
from pagewood.server.openai_fields import GenerationFields, check_tokens
from pagewood.server.validation import kind, parse

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128

NEUTRAL: dict[str, tuple[Any, ...]] = openai_fields.NEUTRAL | {
    "best_of": (None, 1),
    "logprobs": (None, False),
    "suffix": (None, ""),
    "add_special_tokens": (None, True),
    "prompt_embeds": (None,),
}
"""Fields that this endpoint does not support -> the values that ask for nothing, which are accepted."""

Texts = list[str]
TokenLists = list[list[int]]


def _prompts(value: Any) -> Texts | TokenLists:
    """Return the prompts of a text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a string, or a non-empty array of strings or token ids{_got(value)}")
    items = cast("list[Any]", value)
    if all(isinstance(item, str) for item in items):
        return items
    if _is_ids(items):
        return [items]
    if all(isinstance(item, list) and _is_ids(cast("list[Any]", item)) for item in items):
        return items
    raise ValueError("expected an array of strings, of token ids, or of arrays of token ids")


def _got(value: Any) -> str:
    return "" if isinstance(value, list) else f", but got {kind(value)} instead"


def _is_ids(items: list[Any]) -> bool:
    return set(map(type, items)) <= {int}  # a boolean is not an id


class CompletionRequest(GenerationFields):
    """The body of a request."""

    prompt: Annotated[Any, BeforeValidator(_prompts)]
    echo: bool | None = None


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(CompletionRequest, body, neutral=NEUTRAL, ignored=openai_fields.IGNORED)
    num_prompts = len(request.prompt)
    if num_prompts > MAX_PROMPTS:
        raise ApiError(
            f"Invalid value for 'prompt': expected at most {MAX_PROMPTS} prompts, but got {num_prompts} instead.",
            param="prompt",
            code="invalid_value",
        )
    return request


def prompts(request: CompletionRequest, *, vocab_size: int) -> list[wire.TextPrompt | wire.TokenPrompt]:
    """Return the prompts of a request.

    Raises:
        ApiError: a token id is not in the vocabulary.
    """
    return [_prompt(one, vocab_size=vocab_size) for one in cast("Texts | TokenLists", request.prompt)]


def _prompt(prompt: str | list[int], *, vocab_size: int) -> wire.TextPrompt | wire.TokenPrompt:
    if isinstance(prompt, str):
        return wire.TextPrompt(text=prompt)
    check_tokens(prompt, param="prompt", vocab_size=vocab_size)
    return wire.TokenPrompt(tokens=np.array(prompt, dtype="<i4").tobytes())


class _Choice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: ChunkUsage = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionFormat:
    """The answers to one completion request."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str

    def begin(self, index: int, usage: ChunkUsage) -> None:
        """Return None: a completion has no roles."""

    def text(self, index: int, text: str, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text."""
        return self._encode((_Choice(index, text),), usage)

    def end(self, index: int, reason: str, usage: ChunkUsage) -> bytes:
        """Return the chunk with the reason why the text ended."""
        return self._encode((_Choice(index, "", finish_reason=reason),), usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices."""
        return self._encode((), usage)

    def whole(self, texts: Sequence[str], reasons: Sequence[str], usage: Usage) -> bytes:
        """Return the complete answer."""
        choices = [
            _Choice(index, text, finish_reason=reason)
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return self._encode(tuple(choices), usage)

    def _encode(self, choices: tuple[_Choice, ...], usage: ChunkUsage) -> bytes:
        return msgspec.json.encode(_Completion(self.id, "text_completion", self.created, self.model, choices, usage))
