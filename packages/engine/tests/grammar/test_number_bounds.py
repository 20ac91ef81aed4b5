# pyright: basic
# The bindings of `tokenizers` are not typed.
"""Bounds of numbers, inclusive and exclusive: texts at their borders, judged by decimal arithmetic."""

from __future__ import annotations

import itertools
import json
import random
from decimal import Decimal
from functools import cache
from typing import Any

import pytest

from grammars.libraries import llguidance_for
from grammars.vocabularies import embedded
from grammars.walks import walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Backend, Matcher
from scale import scaled

LOW, HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
STEPS = [Decimal(step) for step in ("0", "0.001", "-0.001", "0.01", "-0.01", "0.1", "-0.1", "1", "-1")]
WITHIN = ("0", "0.05", "0.5", "1", "2", "2.5", "2.55", "3", "10", "10.25", "99.9")
"""Bounds, of which many pairs are in one unit."""
EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
"""Which pairs of bounds are compiled."""


def compiled(schema: object, library: Backend | None = None) -> Matcher:
    library = library or llguidance_for(embedded())
    return library.compile(Grammar(kind="json_schema", text=json.dumps(schema))).matcher(frozenset({1}))


@cache
def tokens_of(text: str) -> list[int]:
    return [*embedded().tokenizer.encode(text, add_special_tokens=False).ids, 1]


def allows(matcher: Matcher, text: str) -> bool:
    tokens = tokens_of(text)
    return matcher.accepts(tokens) == len(tokens)


def is_inside(value: Decimal, bounds: dict[str, Any]) -> bool:
    return all(
        {
            "minimum": value >= (bound := Decimal(str(bounds[keyword]))),
            "exclusiveMinimum": value > bound,
            "maximum": value <= bound,
            "exclusiveMaximum": value < bound,
        }[keyword]
        for keyword in bounds
    )


def spellings(value: Decimal) -> list[str]:
    """Return texts of a number, some with zeros at the end."""
    shortest = format(value.normalize(), "f")
    fraction = shortest if "." in shortest else f"{shortest}."
    texts = [shortest, *(fraction + "0" * number for number in range(1, 4))]
    return texts + ([f"-{text}" for text in texts] if not value else [])


def check(matcher: Matcher, bounds: dict[str, Any]) -> None:
    """Check texts around the bounds: none outside is allowed, and one of each number inside is."""
    near = {Decimal(str(bound)) + step for bound in bounds.values() for step in STEPS}
    for value in near:
        allowed = [text for text in spellings(value) if allows(matcher, text)]
        assert bool(allowed) == is_inside(value, bounds), (bounds, value, allowed)


def pairs(bounds: tuple[str, ...], *, sign: int) -> list[tuple[Any, Any]]:
    values = sorted(sign * Decimal(bound) for bound in bounds)
    return [(json.loads(str(low)), json.loads(str(high))) for low, high in itertools.combinations(values, 2)]


@EVERY
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("low", LOW)
def test_bounds_of_numbers_are_exact(low: str, high: str, sign: int, every: int) -> None:
    for least, most in pairs(WITHIN, sign=sign)[::every]:
        bounds = {low: least, high: most}
        check(compiled({"type": "number", **bounds}), bounds)


@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("low", LOW)
def test_bounds_of_random_numbers_are_exact(low: str, high: str) -> None:
    draws = random.Random(f"{low} {high}")
    for _ in range(scaled(10)):
        first = draws.choice([1, -1]) * round(
            draws.choice([0, 1, 9, 10, 99, 1000]) + draws.random(), draws.randint(0, 3)
        )
        least, most = sorted((first, round(first + draws.choice([0.004, 0.3, 1, 20]), draws.randint(0, 3))))
        if least == most:
            continue
        bounds = {low: least, high: most}
        near = bounds | {"maximum": most, "minimum": least}
        if any(is_inside(Decimal(str(bound)) + step, bounds) for bound in near.values() for step in STEPS):
            check(compiled({"type": "number", **bounds}), bounds)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("unit", [0, 2, 10, 999, 1000, 2**33])
def test_bounds_that_come_together_are_exact(unit: int, sign: int) -> None:
    """From two parts of a schema, and beside other keywords."""
    (_, near), (far, _) = (LOW, HIGH) if sign > 0 else (HIGH, LOW)
    first, second = {near: sign * unit}, {far: sign * (unit + 0.5)}
    bounds = first | second
    shapes: list[Any] = [
        {"allOf": [{"type": "number", **first}, second]},
        {"allOf": [{"type": "number", **second}, first]},
        {"$ref": "#/$defs/x", **second, "$defs": {"x": {"type": "number", **first}}},
        {"type": "number", "anyOf": [second], **first},
        {"type": ["number", "null"], **bounds},
        {"type": "number", **bounds, near.removeprefix("exclusive").lower(): sign * (unit - 1)},
        {"type": "number", **bounds, near.removeprefix("exclusive").lower(): sign * unit},
        {"type": "number", near: sign * float(unit), **second},
    ]
    for shape in shapes:
        check(compiled(shape), bounds)
    inner = compiled({"type": "object", "properties": {"a": {"type": "number", **bounds}}, "required": ["a"]})
    assert allows(inner, f'{{"a":{sign * (unit + 0.25)}}}')
    assert not allows(inner, f'{{"a":{sign * unit}}}')
    several = compiled({"type": "number", **bounds, "multipleOf": 0.25})
    assert allows(several, str(sign * (unit + 0.25)))
    assert not allows(several, str(sign * unit))


def test_what_is_drawn_lies_inside() -> None:
    for least, most in [*pairs(WITHIN, sign=1), *pairs(WITHIN, sign=-1)][::7]:
        bounds = {"exclusiveMinimum": least, "exclusiveMaximum": most}
        matcher = compiled({"type": "number", **bounds})
        for seed in range(3):
            said = walk(matcher.copy(), embedded(), seed, max_tokens=60, free_tokens=10)
            assert not said.is_complete or is_inside(Decimal(said.text), bounds), (bounds, said.text)


@pytest.mark.parametrize("unit", [0, 1, 2, 10, 999, 1000, 123_456_789, 10**14 - 1])
def test_numbers_behind_an_excluded_integer_have_many_digits(unit: int) -> None:
    """20 decimals behind 0, and 15 digits behind others."""
    matcher = compiled({"type": "number", "exclusiveMinimum": unit, "maximum": unit + 0.5})
    zeros = "0" * (19 if not unit else 14 - len(str(unit)))
    assert allows(matcher, f"{unit}.{zeros}1")
    assert not allows(matcher, f"{unit}.{zeros}0")


@pytest.mark.parametrize(("keyword", "other", "sign"), [(LOW[1], HIGH[0], 1), (HIGH[1], LOW[0], -1)])
def test_an_excluded_integer_of_too_many_digits_is_refused_by_name(keyword: str, other: str, sign: int) -> None:
    bounds = {keyword: sign * 10**14, other: sign * (10**14 + 0.5)}
    with pytest.raises(ValueError, match=f"schema {keyword} must be a number .* exactly, got .* at #/items/{keyword}"):
        compiled({"type": "array", "items": {"type": "number", **bounds}})
    compiled({"type": "array", "items": {"type": "number", keyword: sign * 10**14}})


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("high", HIGH)
@pytest.mark.parametrize("low", LOW)
@EVERY
def test_bounds_of_small_integers_are_exact(name: str, low: str, high: str, every: int) -> None:
    library: Backend | None = None
    if name == "xgrammar":
        pytest.importorskip("xgrammar")
        from pagewood.engine.grammar.xgrammar_backend import XGrammarBackend

        vocabulary = embedded()
        library = XGrammarBackend(
            vocabulary.json, vocab_size=vocabulary.vocab_size, eos_token_ids=vocabulary.eos_token_ids, max_whitespace=8
        )
    for least, most in [*itertools.product((-101, -10, -9, -2, -1, 0, 1, 2, 9, 10, 99, 100), repeat=2)][::every]:
        bounds = {low: least, high: most}
        allowed = [value for value in range(-105, 106) if is_inside(Decimal(value), bounds)]
        if not allowed:
            continue
        matcher = compiled({"type": "integer", **bounds}, library)
        near = {bound + step for bound in (least, most, 0) for step in (-1, 0, 1)}
        assert [value for value in sorted(near) if allows(matcher, str(value)) != (value in allowed)] == [], bounds
