# pyright: basic
# jsonschema is not typed.
"""Whatever is drawn from the masks of a JSON schema is an instance of it, and instances of it are allowed.

The judge is the `jsonschema` package, which shares nothing with the grammar library; the instances come from the
generator of the schemas, which knows no grammar.
"""

from __future__ import annotations

import json

import jsonschema
import pytest

from grammars.libraries import llguidance_for
from grammars.schemas import case
from grammars.vocabularies import Vocabulary, embedded, trained
from grammars.walks import walk
from pagewood.engine.api import Grammar

MAX_TOKENS = 250
PER_TEST = 100
LEAST_COMPLETE = 0.8
"""Share of walks that must come to an end, since only those are judged as a whole."""
FORMATS = jsonschema.FormatChecker(formats=["ipv4", "uuid", "email"])
"""Without dates: RFC 3339 has a year 0, and Python's dates have none."""


def check_cases(vocabulary: Vocabulary, seeds: range) -> int:
    """Check the cases of `seeds`, and return how many of their walks came to an end."""
    library = llguidance_for(vocabulary)
    num_complete = 0
    for seed in seeds:
        one = case(seed)
        validator = jsonschema.Draft202012Validator(one.schema, format_checker=FORMATS)
        prototype = library.compile(Grammar(kind="json_schema", text=json.dumps(one.schema)))
        matcher = prototype.matcher(frozenset(vocabulary.eos_token_ids))
        start = matcher.copy()
        said = walk(matcher, vocabulary, seed, max_tokens=MAX_TOKENS)
        assert start.accepts(said.tokens) == len(said.tokens), (seed, one.schema, said.text)
        if said.is_complete:
            num_complete += 1
            errors = [error.message for error in validator.iter_errors(json.loads(said.text))]
            assert not errors, (seed, one.schema, said.text, errors)
        for indent in (None, 2):
            instance = one.instance()
            assert validator.is_valid(instance), (seed, one.schema, instance)
            text = json.dumps(instance, indent=indent, ensure_ascii=False)
            tokens = [*vocabulary.tokenizer.encode(text, add_special_tokens=False).ids, vocabulary.eos_token_ids[-1]]
            num_allowed = start.accepts(tokens)
            assert num_allowed == len(tokens), (
                seed,
                one.schema,
                text,
                vocabulary.tokenizer.decode(tokens[:num_allowed]),
            )
    return num_complete


@pytest.mark.parametrize(
    "first",
    [*range(0, 300, PER_TEST), *(pytest.param(one, marks=pytest.mark.slow) for one in range(300, 1000, PER_TEST))],
)
def test_masks_and_schemas_agree(first: int) -> None:
    assert check_cases(embedded(), range(first, first + PER_TEST)) >= LEAST_COMPLETE * PER_TEST


@pytest.mark.parametrize(
    "first", [1000, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1000 + PER_TEST, 1300, PER_TEST))]
)
def test_masks_and_schemas_agree_with_a_large_vocabulary(first: int) -> None:
    assert check_cases(trained(32_768, 5), range(first, first + PER_TEST)) >= LEAST_COMPLETE * PER_TEST


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1300, 5000, PER_TEST))
def test_masks_and_more_schemas_agree(first: int) -> None:
    vocabulary = trained(32_768, 5) if first // PER_TEST % 2 else embedded()
    assert check_cases(vocabulary, range(first, first + PER_TEST)) >= LEAST_COMPLETE * PER_TEST
