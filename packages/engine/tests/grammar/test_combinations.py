# pyright: basic
# jsonschema is not typed.
"""Keywords in random combinations: what is drawn from the masks is an instance, or the schema was refused.

This is how the combinations were found that a library does not keep, and it finds those of a new version. The judge is
the `jsonschema` package.
"""

from __future__ import annotations

import json
import random
from collections import Counter

import jsonschema
import pytest

from grammars.combinations import combination
from grammars.libraries import llguidance_for
from grammars.vocabularies import embedded
from grammars.walks import walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend

WALKS = 3
PER_TEST = 300


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def library(request: pytest.FixtureRequest) -> Backend:
    vocabulary = embedded()
    if request.param == "llguidance":
        return llguidance_for(vocabulary)
    pytest.importorskip("xgrammar")
    from pagewood.engine.grammar.xgrammar_backend import XGrammarBackend

    return XGrammarBackend(
        vocabulary.json, vocab_size=vocabulary.vocab_size, eos_token_ids=vocabulary.eos_token_ids, max_whitespace=8
    )


def check(library: Backend, seeds: range, *, is_plain: bool) -> Counter[str]:
    """Draw from the masks of the schemas of `seeds`, and return how many came to each outcome."""
    vocabulary = embedded()
    found: Counter[str] = Counter()
    for seed in seeds:
        schema = combination(random.Random(seed), is_plain=is_plain)
        try:
            prototype = library.compile(Grammar(kind="json_schema", text=json.dumps(schema)))
        except ValueError:
            found["refused"] += 1
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for number in range(WALKS):
            matcher = prototype.matcher(frozenset(vocabulary.eos_token_ids))
            said = walk(matcher, vocabulary, seed * WALKS + number, max_tokens=120, free_tokens=25)
            if said.is_complete and "Infinity" not in json.dumps(value := json.loads(said.text)):
                errors = [error.message for error in validator.iter_errors(value)]  # it cannot judge 1e999
                assert not errors, (seed, schema, said.text, errors)
            found["valid" if said.is_complete else "cut"] += 1
    return found


@pytest.mark.parametrize("is_plain", [False, True])
def test_combinations_are_kept_or_refused(library: Backend, is_plain: bool) -> None:
    found = check(library, range(PER_TEST), is_plain=is_plain)
    assert found["valid"] > (PER_TEST if is_plain else 15)
    assert found["cut"] < PER_TEST / 10


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("first", range(PER_TEST, 20_000, 1_970))
def test_more_combinations_are_kept_or_refused(library: Backend, first: int, is_plain: bool) -> None:
    check(library, range(first, first + 1_970), is_plain=is_plain)
