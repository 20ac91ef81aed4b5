# pyright: basic
# The bindings of `tokenizers` carry no usable annotations.
"""Calls that a grammar allows, drawn at random, and calls as they are read."""

from __future__ import annotations

import json
import random

from grammars.vocabularies import Vocabulary
from grammars.walks import allowed, new_row
from pagewood.engine.grammar import Matcher
from pagewood.engine.text import Part
from responses.formats import FORMATS


def calls_of(parts: list[Part]) -> list[tuple[str, dict]]:
    calls: list[list[str]] = []
    for part in parts:
        if part.kind == "tool_call":
            calls.append([part.text, ""])
        elif part.kind == "arguments":
            calls[part.index][1] += part.text
    return [(name, json.loads(arguments)) for name, arguments in calls]


def say(name: str, matcher: Matcher, vocabulary: Vocabulary, seed: int) -> str:
    """Draw allowed tokens until the text is complete; what is open is closed soon."""
    draws = random.Random(seed)
    row = new_row(vocabulary)
    ends = set(vocabulary.eos_token_ids)
    closing = [*FORMATS[name].closers, *'"]}),\n']
    closers = [vocabulary.tokenizer.encode(text, add_special_tokens=False).ids for text in closing]
    tokens: list[int] = []
    while len(tokens) < 1000:
        matcher.fill(row)
        assert matcher.error is None, matcher.error
        choices = [token for token in allowed(row) if token not in ends]
        if matcher.can_end and (not choices or len(tokens) > 40 or draws.random() < 0.3):
            return vocabulary.tokenizer.decode(tokens, skip_special_tokens=False)
        step = [draws.choice(choices)]
        if draws.random() < (0.2 if len(tokens) < 40 else 0.8):
            step = draws.choice([ids for ids in closers if matcher.accepts(ids) == len(ids)] or [step])
        assert matcher.advance(step), matcher.error
        tokens += step
    raise AssertionError(f"the walk does not end: {vocabulary.tokenizer.decode(tokens)[:2000]}")
