"""Structured output: the allowed output of a request, as masks over the vocabulary.

A `Matcher` is the state of one request in its grammar. A `GrammarCompiler` makes matchers in threads of its own,
through a `Backend`, which `open_backend` makes for a model's folder. Importing this package loads no grammar library;
the first grammar does. Nothing here knows the engine's core, torch or a model.
"""

from pagewood.engine.grammar.compiler import GrammarCompiler, Pending
from pagewood.engine.grammar.entry import TokenTexts
from pagewood.engine.grammar.mask import Mask, mask_words
from pagewood.engine.grammar.matcher import Backend, Matcher, Prototype
from pagewood.engine.grammar.open_backend import BackendName, open_backend

__all__ = [
    "Backend",
    "BackendName",
    "GrammarCompiler",
    "Mask",
    "Matcher",
    "Pending",
    "Prototype",
    "TokenTexts",
    "mask_words",
    "open_backend",
]
