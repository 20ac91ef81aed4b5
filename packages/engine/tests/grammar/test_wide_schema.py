# pyright: basic
# jsonschema is not typed.
"""Objects, arrays and alternatives around integers that need rules: their texts are those of the library's schemas."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from grammars.libraries import llguidance_for
from grammars.vocabularies import embedded
from grammars.walks import walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Matcher
from scale import scaled

INT64: dict[str, Any] = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1, "format": "int64"}
NEARLY: dict[str, Any] = {"type": "integer", "minimum": -(2**53), "maximum": 2**53}
"""The same in small, which the library keeps."""
TEXT = {"type": "string", "pattern": "^[ab]{0,2}$"}
SHAPES: dict[str, Any] = {
    "optional": {"type": "object", "properties": {"a": 0, "b": TEXT, "é": {}}},
    "required": {"type": "object", "properties": {"b": TEXT, "a": 0, 'q"': True}, "required": ["a"]},
    "closed": {"type": "object", "properties": {"a": 0, "b": TEXT}, "required": ["b"], "additionalProperties": False},
    "empty": {"type": "object", "properties": {"a": 0}, "additionalProperties": False},
    "others": {"type": "object", "properties": {"b": TEXT}, "additionalProperties": 0},
    "required others": {"type": "object", "required": ["x", "a"], "additionalProperties": 0},
    "never": {"type": "object", "properties": {"a": 0, "b": False}},
    "array": {"type": "array", "items": 0},
    "some": {"type": "array", "items": 0, "minItems": 1, "maxItems": 3},
    "two": {"type": "array", "items": {"type": "array", "items": 0, "maxItems": 1}, "minItems": 2, "maxItems": 2},
    "names of keywords": {
        "type": "object",
        "properties": {"default": {"type": "object", "properties": {"enum": 0}, "required": ["enum"]}, "$defs": 0},
        "required": ["default", "$defs"],
        "$defs": {"unused": 0},
    },
    "whole": {"type": "object", "properties": {"a": 0, "b": {"$ref": "#"}}, "additionalProperties": False},
    "none": {"type": "array", "items": 0, "maxItems": 0},
    "any of": {"type": "object", "properties": {"a": {"anyOf": [0, {"type": "null"}]}}, "required": ["a"]},
    "one of": {"oneOf": [0, {"type": "null"}, TEXT]},
    "types": {"type": ["object", "null", "array"], "properties": {"a": 0}, "items": TEXT},
    "no type": {"properties": {"a": 0}},
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"a": 0, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"$ref": "#/$defs/b"}]}},
                "required": ["a"],
                "additionalProperties": False,
            },
            "b": TEXT,
        },
    },
}
VALUES = ("0", "-7", "9007199254740992", "null", "true", '""', '"ab"', '"c"', "[]", "[1]", "{}", '{"a":1}', "1.5", "")
NAMES = ('"a"', '"b"', '"é"', '"x"', r'"q\""', '"next"', r'"\u0061"', '"a b"', '"ab"', '""')


def with_integer(shape: Any, integer: dict[str, Any]) -> Any:
    """Return a shape with a schema for each 0 outside its numbers of items."""
    if isinstance(shape, dict):
        return {
            key: part if key in ("minItems", "maxItems") else with_integer(part, integer) for key, part in shape.items()
        }
    if isinstance(shape, list):
        return [with_integer(part, integer) for part in shape]
    return integer if shape == 0 and not isinstance(shape, bool) else shape


def start(schema: object, *, kind: Any = "json_schema", max_whitespace: int = 2) -> Matcher:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    library = llguidance_for(embedded(), max_whitespace=max_whitespace)
    return library.compile(Grammar(kind=kind, text=text)).matcher(frozenset({1}))


def allows(matcher: Matcher, text: str) -> bool:
    tokens = [*embedded().tokenizer.encode(text, add_special_tokens=False).ids, 1]
    return matcher.accepts(tokens) == len(tokens)


def texts(draws: random.Random, number: int) -> Iterator[str]:
    """Yield texts that are JSON or nearly, with too much white space in some."""

    def space() -> str:
        return " " * draws.choice((0, 0, 0, 0, 1, 2, 3))

    def value(depth: int) -> str:
        if depth == 0 or draws.random() < 0.4:
            return draws.choice(VALUES)
        parts = [value(depth - 1) for _ in range(draws.randint(0, 3))]
        left, right = draws.choice(("[]", "{}"))
        if left == "{":
            parts = [f"{draws.choice(NAMES)}{space()}:{space()}{part}" for part in parts]
        if draws.random() < 0.05:
            parts.append("")
        return left + space() + f"{space()},{space()}".join(parts) + space() + right

    yield from (value(3) for _ in range(number))


@pytest.mark.parametrize("name", SHAPES)
def test_texts_are_those_of_the_library(name: str) -> None:
    """The same texts are allowed as with a smaller range, which the library keeps; but it writes 0 as -0 too."""
    draws = random.Random(name)
    wide, kept = start(with_integer(SHAPES[name], INT64)), start(with_integer(SHAPES[name], NEARLY))
    drawn = [walk(kept.copy(), embedded(), seed).text for seed in range(20)]
    for text in [*texts(draws, scaled(50)), *(text for text in drawn if not re.search(r"-0\b", text))]:
        assert allows(wide, text) == allows(kept, text), text


@pytest.mark.parametrize("name", SHAPES)
def test_texts_that_are_drawn_are_instances(name: str) -> None:
    schema = with_integer(SHAPES[name], INT64)
    matcher, validator = start(schema), jsonschema.Draft202012Validator(schema)
    said = [walk(matcher.copy(), embedded(), seed, max_tokens=120, free_tokens=25) for seed in range(40)]
    complete = [one.text for one in said if one.is_complete]
    assert complete
    for text in complete:
        validator.validate(json.loads(text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optional", '{"a":N,"b":"a"}'),
        ("required", '{"b":"a","a":N}'),
        ("closed", '{"a":N,"b":""}'),
        ("others", '{"b":"a","x":1,"y":N}'),
        ("required others", '{"x":N,"a":N,"z":N}'),
        ("some", "[1,N]"),
        ("two", "[[],[N]]"),
        ("any of", '{"a":N}'),
        ("one of", "N"),
        ("names of keywords", '{"default":{"enum":N},"$defs":1}'),
        ("whole", '{"b":{"a":1,"b":{"a":N}}}'),
        ("types", '{"a":N}'),
        ("tree", '{"a":1,"next":{"a":N,"next":"ab"}}'),
    ],
)
def test_bounds_are_exact_in_every_shape(name: str, text: str) -> None:
    matcher = start(with_integer(SHAPES[name], INT64))
    for number, is_inside in ((-(2**63), True), (2**63 - 1, True), (-(2**63) - 1, False), (2**63, False)):
        assert allows(matcher, text.replace("N", str(number))) == is_inside


@pytest.mark.parametrize("max_whitespace", [0, 1, 4])
def test_white_space_is_bounded(max_whitespace: int) -> None:
    schema = with_integer(SHAPES["optional"], INT64)
    matcher = start(schema, max_whitespace=max_whitespace)
    for number in range(7):
        space = " " * number
        for text in ('{_"a":1}', '{"a"_:1}', '{"a":_1}', '{"a":1_,"b":"a"}', '{"a":1,_"b":"a"}', '{"a":1_}', "{_}"):
            assert allows(matcher, text.replace("_", space)) == (number <= max_whitespace), text
        for text in ('_{"a":1}', '{"a":1}_', '{"a":-_1}'):
            assert allows(matcher, text.replace("_", space)) == (number == 0), text


def test_lark_and_structural_tags() -> None:
    schema = json.dumps(with_integer(SHAPES["required"], INT64))
    number = f"start: %json {json.dumps(INT64)}"
    parts = [{"type": "json_schema", "json_schema": json.loads(schema)}, {"type": "grammar", "grammar": number}]
    tag = json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": parts}})
    for matcher, form in (
        (start(f'start: "a" %json {schema} "b" %json {schema}', kind="lark"), 'a{{"a":{n}}}b{{"a":1}}'),
        (start(tag, kind="structural_tag"), '{{"a":1}}{n}'),
    ):
        assert allows(matcher, form.format(n=-(2**63)))
        assert not allows(matcher, form.format(n=-(2**63) - 1))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "object", "patternProperties": {"a": INT64}}, "with patternProperties, got -9223372036854775808 at"),
        (
            {"type": "object", "properties": {"a": INT64}, "minProperties": 1},
            "with minProperties, .*#/properties/a/mini",
        ),
        ({"allOf": [INT64, {"multipleOf": 3}]}, "with allOf, .* at #/allOf/0/minimum"),
        ({"anyOf": [INT64, {"type": "null"}], "type": "integer"}, "anyOf beside type, .* at #/anyOf/0/minimum"),
        ({"oneOf": [INT64, {"type": "number"}]}, "oneOf of parts that are not of different types, .* at #/oneOf/0"),
        ({"type": "array", "prefixItems": [INT64]}, "with prefixItems, .* at #/prefixItems/0/minimum"),
        ({"type": "array", "items": INT64, "uniqueItems": True}, "with uniqueItems, .* at #/items/minimum"),
        ({"type": "array", "items": [INT64]}, "with items that are a list, .* at #/items/0/minimum"),
        ({"properties": {"a": INT64, "b": {"$ref": "#/properties/c"}, "c": {}}}, r"with \$ref to #/properties/c, .*"),
        ({"$ref": "#/$defs/x", "type": "integer", "$defs": {"x": INT64}}, r"\$ref beside type, .* at #/\$defs/x"),
        (INT64 | {"multipleOf": 3}, "beside multipleOf, got -9223372036854775808 at #/minimum"),
        ({"const": [2**53 + 1]}, "schema const must have integers .* got 9007199254740993 at #"),
        ({"type": "integer", "minimum": 2**64, "maximum": 1}, "minimum must be at most the maximum, got .* and 1 at #"),
        ({"properties": {"a": INT64, "b": {"not": {}}}}, r'^Unimplemented keys: \["not"\]$'),
        ({"properties": {"a": INT64, "b": False}, "required": ["b"]}, "required, got false for 'b'"),
    ],
)
def test_what_rules_cannot_express_is_refused_by_name(schema: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(schema)


def test_as_many_properties_as_are_allowed() -> None:
    names = [f"p{index}" for index in range(301)]
    matcher = start({"type": "object", "properties": dict.fromkeys(names[:-1], INT64)})
    assert allows(matcher, '{"p0":1,"p298":2,"p299":3,"x":[]}')
    assert not allows(matcher, '{"p0":1,"p299":2,"p298":3}')
    with pytest.raises(ValueError, match="with more than 300 properties, got -9223372036854775808 at"):
        start({"type": "object", "properties": dict.fromkeys(names, INT64)})


def test_options_of_its_own_are_refused_beside_a_large_integer() -> None:
    schema = json.dumps(INT64 | {"x-guidance": {"whitespace_flexible": False}})
    with pytest.raises(ValueError, match="x-guidance must not be in a schema with integers"):
        start(f"start: %json {schema}", kind="lark")
