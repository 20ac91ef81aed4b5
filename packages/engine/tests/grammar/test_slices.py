"""Slices change how fast masks are found, and no mask: they are those of llguidance without any slice."""

# pyright: basic
# The bindings of llguidance are typed in part only.

from __future__ import annotations

import llguidance
import numpy as np
import pytest

from grammars.vocabularies import Vocabulary
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend, mask_words

EXPRESSIONS = (
    "[a-z]{1,500}", "[A-Za-z0-9_-]{2,40}", r"\w{1,30}", "[ -~]{1,35}",
    '[^"]{1,25}', "[a-z0-9 ]{3,9}x",
)  # fmt: skip


def tokens_of(mask: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_masks_are_those_without_slices(expression: str, vocabulary: Vocabulary, backend: Backend) -> None:
    size, eos = vocabulary.vocab_size, frozenset(vocabulary.eos_token_ids)
    matcher = backend.compile(Grammar.regex(expression)).matcher(eos)
    tokenizer = llguidance.LLTokenizer(vocabulary.tokenizer.to_str(), n_vocab=size, eos_token=sorted(eos), slices=[])
    oracle = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(expression), log_level=0)
    rng, mine, theirs = (
        np.random.default_rng(3),
        np.empty(mask_words(size), np.int32),
        np.empty(mask_words(size), np.int32),
    )
    for _ in range(14):
        matcher.fill(mine)
        oracle.unsafe_compute_mask_ptr(theirs.ctypes.data, theirs.nbytes)
        allowed = [
            np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:size]) for row in (mine, theirs)
        ]
        text, expected = (row[~np.isin(row, list(eos))] for row in allowed)
        np.testing.assert_array_equal(text, expected)
        if not len(text):
            break
        token = int(rng.choice(text))
        assert matcher.advance([token])
        oracle.consume_token(token)
