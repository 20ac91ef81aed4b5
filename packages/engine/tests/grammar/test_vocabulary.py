# pyright: basic
# The bindings of `tokenizers` are not typed.
"""A tokenizer with more tokens than the model has logits gives masks over the logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from grammars.vocabularies import Vocabulary, embedded, trained
from grammars.walks import walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import BackendName, open_backend

NAMES: list[BackendName] = ["llguidance", "xgrammar"]


def with_surplus(kind: str) -> tuple[dict[str, Any], int, int]:
    """Return a tokenizer, a number of logits that is less than its tokens, and an end of sequence."""
    if kind == "added":
        value = json.loads(embedded().json)
        tokens = [{"id": 512 + i, "content": f"<|extra_{i}|>", "special": bool(i)} for i in range(3)]
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return {**value, "added_tokens": [*value["added_tokens"], *(token | flags for token in tokens)]}, 512, 1
    if kind == "merged":
        return json.loads(trained(32_768, 5).json), 20_000, 0
    tokenizer = tokenizers.Tokenizer(models.Unigram([(chr(code), -1.0) for code in range(32, 200)], 0, False))  # pyright: ignore
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(parts)  # pyright: ignore
    return json.loads(tokenizer.to_str()), 128, 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["added", "merged", "unigram"])
def test_surplus_tokens_are_left_out(tmp_path: Path, name: BackendName, kind: str) -> None:
    pytest.importorskip(name)
    value, vocab_size, eos = with_surplus(kind)
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    backend = open_backend(name, tmp_path, vocab_size=vocab_size, eos_token_ids=(eos,))
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]})
    vocabulary = Vocabulary(json.dumps(value), vocab_size, (eos,))
    for seed in range(5):
        matcher = backend.compile(Grammar(kind="json_schema", text=schema)).matcher(frozenset({eos}))
        said = walk(matcher, vocabulary, seed, max_tokens=100)
        assert said.tokens
        assert max(said.tokens) < vocab_size


def test_a_tokenizer_without_surplus_stays_as_it_is() -> None:
    from pagewood.engine.grammar.vocabulary import within

    text = embedded().json
    assert within(text, 512) is text
