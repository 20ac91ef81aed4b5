"""Grammars: microseconds of the masks along a text and along drafts by vocabulary, and milliseconds to compile.

A mask is computed once in each state of a matcher and then remembered, so texts are timed whole; `extra_info` of the
JSON output has the microseconds per token.
Run: pytest packages/engine/benchmarks/bench_grammar.py --benchmark-enable
"""

# pyright: basic
# pytest-benchmark and the bindings of `tokenizers` are typed in part only.

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from grammars.libraries import llguidance_for
from grammars.vocabularies import Vocabulary, trained
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend, Matcher, mask_words

VOCABULARIES = {"32k": (32_768, 5), "128k": (131_072, 40)}
VALUE = {"name": "Ada Lovelace", "age": 36, "tags": ["first", "programmer"], "address": {"city": "London", "zip": "W1"}}
TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": TEXT, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"city": TEXT, "zip": {"type": "string", "pattern": "^[A-Z0-9 ]+$"}},
        },
    },
    "required": ["name", "age", "tags", "address"],
    "additionalProperties": False,
}
GRAMMARS = {
    "schema": (Grammar(kind="json_schema", text=json.dumps(SCHEMA)), json.dumps(VALUE)),
    "any object": (Grammar(kind="json_schema", text='{"type": "object"}'), json.dumps(VALUE)),
    "regex": (
        Grammar(kind="regex", text=r"[a-z]+(, [a-z]+)*\."),
        "one, two, three, and then a few more.".replace(" a", ", a"),
    ),
    "choice": (Grammar(kind="choice", text=json.dumps([f"choice {i}" for i in range(1000)])), "choice 999"),
}


@pytest.fixture(scope="module", params=VOCABULARIES)
def vocabulary(request: Any) -> Vocabulary:
    return trained(*VOCABULARIES[request.param])


@pytest.fixture(scope="module")
def backend(vocabulary: Vocabulary) -> Backend:
    return llguidance_for(vocabulary)


def start(backend: Backend, vocabulary: Vocabulary, name: str) -> tuple[Matcher, list[int]]:
    """Return a matcher, and the tokens of the text that it allows."""
    grammar, text = GRAMMARS[name]
    matcher = backend.compile(grammar).matcher(frozenset(vocabulary.eos_token_ids))
    tokens = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    return matcher, tokens[: matcher.accepts(tokens)]


@pytest.mark.parametrize("name", GRAMMARS)
def test_text(benchmark: Any, backend: Backend, vocabulary: Vocabulary, name: str) -> None:
    """Fill a mask before each token of a text, and advance by it, as the engine does."""
    matcher, tokens = start(backend, vocabulary, name)
    row = np.empty(mask_words(vocabulary.vocab_size), np.int32)

    def text() -> None:
        follower = matcher.copy()
        for token in tokens:
            follower.fill(row)
            follower.advance((token,))

    benchmark(text)
    if benchmark.enabled:
        benchmark.extra_info["us_per_token"] = round(benchmark.stats.stats.median / len(tokens) * 1e6, 1)


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_fill_ahead(benchmark: Any, backend: Backend, vocabulary: Vocabulary, num_drafts: int) -> None:
    matcher, tokens = start(backend, vocabulary, "schema")
    drafts = tokens[:num_drafts]
    rows = np.empty((num_drafts + 1, mask_words(vocabulary.vocab_size)), np.int32)
    benchmark(lambda: matcher.fill_ahead(drafts, rows))


def test_copy(benchmark: Any, backend: Backend, vocabulary: Vocabulary) -> None:
    matcher, tokens = start(backend, vocabulary, "schema")
    assert matcher.advance(tokens)
    benchmark(matcher.copy)


@pytest.mark.parametrize("name", GRAMMARS)
def test_compile(benchmark: Any, backend: Backend, name: str) -> None:
    benchmark(lambda: backend.compile(GRAMMARS[name][0]))
