# pyright: basic
# ruff: noqa: RUF001 (marks of models)
# The bindings of `tokenizers` carry no usable annotations.
"""Calls that a grammar allows, drawn at random, and calls as they are read."""

from __future__ import annotations

import json
import random

from grammars.vocabularies import Vocabulary
from grammars.walks import allowed, new_row
from pagewood.engine.grammar import Matcher
from pagewood.engine.text import Part

CLOSERS = {
    "qwen3_coder": "\n</parameter>\n",
    "minimax_m2": "</parameter>\n",
    "deepseek_v3_2": "</｜DSML｜parameter>\n",
    "glm_4": "</arg_value>\n",
    "gemma_4": '<|"|>',
}
"""What closes a string."""
ENDS = {"minimax_m2": ["</minimax:tool_call>"], "deepseek_v3_2": ["</｜DSML｜function_calls>"]}
"""What closes all calls of formats whose calls are long."""


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
    closing = [CLOSERS.get(name, '"'), *ENDS.get(name, []), *'"]}),\n']
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
