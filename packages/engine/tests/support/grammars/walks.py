# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Random walks along masks: what a model could say at temperature infinity."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from grammars.vocabularies import Vocabulary
from pagewood.engine.grammar import Mask, Matcher, mask_words

_CLOSING = '"]}0'


def new_row(vocabulary: Vocabulary) -> Mask:
    """Return a mask with every bit set, so that what is not written shows."""
    return np.full(mask_words(vocabulary.vocab_size), -1, np.int32)


def allowed(row: Mask) -> list[int]:
    """Return the tokens of a mask."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@dataclass
class Walk:
    """Where a walk has come: its tokens without the end, and whether the grammar ended it."""

    tokens: list[int]
    is_complete: bool
    text: str


def walk(matcher: Matcher, vocabulary: Vocabulary, seed: int, *, max_tokens: int = 400, free_tokens: int = 40) -> Walk:
    """Draw allowed tokens until the matcher is finished; after `free_tokens`, prefer those that close something."""
    draws = random.Random(seed)
    closing = [vocabulary.tokenizer.token_to_id(text) for text in _CLOSING]
    row = new_row(vocabulary)
    tokens: list[int] = []
    ends = set(vocabulary.eos_token_ids)
    is_complete = False
    while len(tokens) < max_tokens:
        matcher.fill(row)
        assert matcher.error is None, matcher.error
        choices = allowed(row)
        assert choices, "a matcher that is not finished allows a token"
        assert max(choices) < vocabulary.vocab_size
        assert ends.issubset(choices) == matcher.can_end
        texts = [token for token in choices if token not in ends]
        is_complete = matcher.can_end and (not texts or len(tokens) >= free_tokens or draws.random() < 0.3)
        if is_complete:
            assert matcher.advance([draws.choice(sorted(ends))])
            assert matcher.is_finished
            break
        near = [token for token in closing if token in texts] if len(tokens) > free_tokens else []
        token = draws.choice(near or texts)
        assert matcher.advance([token]), matcher.error
        tokens.append(token)
    return Walk(tokens, is_complete, vocabulary.tokenizer.decode(tokens, skip_special_tokens=False))
