"""The compiler of grammars that a configuration describes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pagewood.engine.api import EngineConfig
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.grammar import GrammarCompiler, open_backend


def grammar_compiler(config: EngineConfig, folder: Path, info: EngineInfo) -> GrammarCompiler:
    """Return what compiles grammars for the model in a folder; it loads nothing before the first grammar."""
    backend = partial(
        open_backend,
        config.grammar_backend,
        folder,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
    )
    return GrammarCompiler(backend, deadline_s=config.grammar_timeout_s)
