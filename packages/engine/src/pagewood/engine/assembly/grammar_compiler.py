"""The compiler of grammars that a configuration describes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.grammar import GrammarCompiler, TokenTexts, open_backend
from pagewood.engine.text import Tokenizer


def grammar_compiler(config: EngineConfig, folder: Path, info: EngineInfo) -> GrammarCompiler:
    """Return the compiler of grammars for the model in a folder; it loads nothing before the first grammar."""
    backend = partial(
        open_backend,
        config.grammar_backend,
        folder,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )
    token_texts = partial(_token_texts, folder, info.vocab_size)
    return GrammarCompiler(backend, token_texts=token_texts, deadline_s=config.grammar_timeout_s)


def _token_texts(folder: Path, vocab_size: int) -> TokenTexts:
    """Return the bytes of the tokens of the model in a folder."""
    tokenizer = Tokenizer.from_folder(folder)
    of_token = tokenizer.bytes_of_tokens()
    return TokenTexts(
        texts=[of_token(token) for token in range(vocab_size)],
        vocab_size=vocab_size,
        special=frozenset(token for token in tokenizer.special_tokens.values() if token < vocab_size),
    )
