"""Grammar libraries for a vocabulary."""

from __future__ import annotations

from grammars.vocabularies import Vocabulary
from pagewood.engine.grammar.llguidance_backend import LLGuidanceBackend


def llguidance_for(vocabulary: Vocabulary, *, max_whitespace: int = 32) -> LLGuidanceBackend:
    return LLGuidanceBackend(
        vocabulary.json,
        vocab_size=vocabulary.vocab_size,
        eos_token_ids=vocabulary.eos_token_ids,
        max_whitespace=max_whitespace,
    )
