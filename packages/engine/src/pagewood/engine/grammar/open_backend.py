"""Opens a grammar library for the model in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pagewood.engine.grammar.matcher import Backend
from pagewood.engine.grammar.vocabulary import within

BackendName = Literal["llguidance", "xgrammar"]

MAX_WHITESPACE = 32
"""Enough for a line break and the indentation of eight levels; it stops a model that repeats spaces."""


def open_backend(
    name: BackendName,
    folder: str | Path,
    *,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    max_whitespace: int = MAX_WHITESPACE,
) -> Backend:
    """Load a grammar library, and give it the vocabulary of a model. This takes up to a second or two.

    Args:
        name: llguidance knows all kinds of grammars; xgrammar needs `pagewood-engine[xgrammar]`.
        folder: of the model, with a `tokenizer.json`.
        vocab_size: number of logits; ids without a text in the tokenizer are never allowed; larger ids are left out.
        eos_token_ids: ids that are not text, because they end a sequence.
        max_whitespace: most characters of white space in one place of a JSON text; 0: none anywhere.

    Raises:
        ValueError: `name` is unknown, or the folder has no tokenizer that the library can read.
        ImportError: the library is not installed.
    """
    if max_whitespace < 0:
        raise ValueError(f"max_whitespace must be >= 0, got {max_whitespace}")
    if name not in ("llguidance", "xgrammar"):
        raise ValueError(f"grammar backend must be llguidance or xgrammar, got {name!r}")
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"model folder must hold a tokenizer.json, got {folder}")
    tokenizer = within(file.read_text(encoding="utf-8"), vocab_size)
    if name == "llguidance":
        from pagewood.engine.grammar.llguidance_backend import LLGuidanceBackend

        return LLGuidanceBackend(
            tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids, max_whitespace=max_whitespace
        )
    from pagewood.engine.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids, max_whitespace=max_whitespace)
