"""The prompts of a request that are texts or token ids, as OpenAI's completions take them."""

from __future__ import annotations

from typing import Annotated, Any, cast

import numpy as np
from pydantic import Field

from pagewood.server.http.validation import integers, kind
from pagewood.server.messages import wire
from pagewood.server.protocols.common.fields import TokenId, check_tokens

MAX_PROMPTS = 128
Texts = list[str]
TokenLists = list[list[int]]


def parse_prompts(value: Any) -> Texts | TokenLists:
    """Return the prompts of a text, a list of texts, a list of ids, or a list of lists of ids."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a string, or a non-empty array of strings or token ids{_got(value)}")
    items = cast("list[Any]", value)
    if all(isinstance(item, str) for item in items):
        return items
    one = integers(items)
    if one is not None:
        return [one]
    many = [found for item in items if (found := integers(item)) is not None]
    if len(many) == len(items):
        return many
    raise ValueError("expected an array of strings, of token ids, or of arrays of token ids")


def _got(value: Any) -> str:
    return "" if isinstance(value, list) else f", but got {kind(value)} instead"


_Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompts = str | _Ids | Annotated[list[str] | list[_Ids], Field(min_length=1, max_length=MAX_PROMPTS)]
"""The accepted types, for the schema of the body."""


def prompt_of(prompt: str | list[int], *, vocab_size: int, param: str = "prompt") -> wire.TextPrompt | wire.TokenPrompt:
    """Return the prompt that a text or token ids stand for.

    Raises:
        ApiError: a token id is not in the vocabulary; `param` is the client's name of the field.
    """
    if isinstance(prompt, str):
        return wire.TextPrompt(text=prompt)
    check_tokens(prompt, param=param, vocab_size=vocab_size)
    return wire.TokenPrompt(tokens=np.array(prompt, dtype="<i4").tobytes())
