"""Requests that do not fit the model's longest text: they are refused, capped or cut.

The tokenizer stage decides this, because the length of a prompt is first known there.
"""

from __future__ import annotations

import dataclasses

from pagewood.engine.api import Overflow, Refusal, SamplingParams
from pagewood.engine.text import Tokenizer
from pagewood.server.messages import wire
from pagewood.server.stages.text_limit import TooManyTokens, check_text


def overlong(tokenizer: Tokenizer, message: wire.Generate, text: str) -> Refusal | None:
    """Return the refusal of a prompt that is certainly too long before it is encoded; None: it must be encoded.

    Raises:
        TextTooLong: it is too long to be encoded, but not certainly longer than the model's longest text, or it is to
            be cut.
    """
    limit = None if message.cuts_prompt else message.max_length
    max_tokens = None if message.fills_window else message.options.sampling.max_tokens
    room = max_tokens or 1
    if message.options.pooling is not None:
        max_tokens, room = None, 0
    if limit is not None and len(text) + room > limit:  # a token covers a character, or many
        num_tokens = tokenizer.fewest_tokens(text)
        if num_tokens + room > limit:
            return Overflow(num_prompt=num_tokens, max_length=limit, max_tokens=max_tokens, is_counted=False).refusal()
    try:
        check_text(tokenizer, text, max_length=message.max_length)
    except TooManyTokens:  # nearly twice the longest text, or more
        if limit is None:
            raise
        return Overflow(num_prompt=limit + 1, max_length=limit, max_tokens=max_tokens, is_counted=False).refusal()
    return None


def capped(sampling: SamplingParams, message: wire.Generate, *, num_prompt: int) -> SamplingParams:
    """Return the sampling parameters without a `max_tokens` for which the prompt leaves no room, if `message` fills the
    window: the engine then generates as many tokens as fit."""
    if not message.fills_window or message.max_length is None or sampling.max_tokens is None:
        return sampling
    if num_prompt + sampling.max_tokens <= message.max_length:
        return sampling
    return dataclasses.replace(sampling, max_tokens=None)
