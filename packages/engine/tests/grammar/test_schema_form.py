# pyright: basic
# The bindings of `tokenizers` are not typed.
"""Schemas that the library alone does not keep: escapes, large integers, unknown formats, properties without names."""

from __future__ import annotations

import json

import pytest

from grammars.libraries import llguidance_for
from grammars.vocabularies import embedded
from grammars.walks import walk
from pagewood.engine.api import Grammar
from pagewood.engine.grammar import Matcher

DEAD_END = {
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
    "patternProperties": {"^a$": True},
}
CONTROL = [chr(code) for code in (*range(32), 0x7F)]


def start(schema: object, *, kind: str = "json_schema") -> Matcher:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    grammar = Grammar(kind=kind, text=text)  # pyright: ignore[reportArgumentType]
    return llguidance_for(embedded()).compile(grammar).matcher(frozenset({1}))


def allows(matcher: Matcher, text: str) -> bool:
    tokens = [*embedded().tokenizer.encode(text, add_special_tokens=False).ids, 1]
    return matcher.accepts(tokens) == len(tokens)


@pytest.mark.parametrize(
    "schema",
    [{"type": "string"}, {"type": "string", "pattern": "^[^x]*$"}, {"type": "string", "minLength": 1}, {}],
)
def test_no_unicode_escape_is_begun(schema: object) -> None:
    matcher = start(schema)
    for escape in (r"\u00e9", r"\u0001", r"\u000a", r"\u007f"):
        assert not allows(matcher, f'"{escape}"')
        assert matcher.accepts(embedded().tokenizer.encode(f'"{escape}', add_special_tokens=False).ids) <= 2
    for escape in (r"\n", r"\t", r"\r", r"\b", r"\f", r"\"", r"\\"):
        assert allows(matcher, f'"{escape}"')


def test_what_strings_lose_without_unicode_escapes() -> None:
    """Only the 28 control characters that JSON has no letter for; all others can be written."""
    matcher = start({"type": "string"})
    others = [chr(code) for code in (*range(32, 127), *range(128, 0xD800, 97), *range(0xE000, 0x110000, 997))]
    lost = [one for one in [*CONTROL, *others] if not allows(matcher, json.dumps(one, ensure_ascii=False))]
    assert lost == [one for one in CONTROL if one not in "\b\t\n\f\r"]
    assert len(lost) == 28


def test_an_escaped_name_is_no_way_around_a_property() -> None:
    matcher = start({"properties": {"a": {"type": "boolean"}}})
    assert not allows(matcher, r'{"\u0061":5}')
    assert not allows(matcher, '{"a":5}')
    assert allows(matcher, '{"b":5}')


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"x": {"const": "a\x01"}}}, r"const .* U\+0001 at #/properties/x"),
        ({"enum": ["a", ["\x7f"]]}, r"enum .* U\+007F at #"),
        ({"type": "string", "pattern": r"^\x01?b$"}, "pattern .* at #/pattern"),
        ({"type": "string", "pattern": r"^[\x01]b$"}, "pattern .* at #/pattern"),
        ({"patternProperties": {r"^\u0001": {}}}, "pattern .* at #/patternProperties"),
    ],
)
def test_characters_that_cannot_be_written_are_refused(schema: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(schema)


@pytest.mark.parametrize("pattern", [r"^[^\x00-\x1f]+$", r"^\\x01$", r"^.+$", r"^[\x20-\x7e]*$", r"^\u00e9$"])
def test_patterns_that_only_mention_control_characters_are_kept(pattern: str) -> None:
    start({"type": "string", "pattern": pattern})


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        ({"minimum": 2**53 - 1}, [2**53 - 1, 2**53 + 1], [2**53 - 2]),
        ({"maximum": 2**53}, [2**53], [2**53 + 1]),
        ({"exclusiveMinimum": 2**53 - 1}, [2**53], [2**53 - 1]),
        ({"exclusiveMaximum": 2**53 + 1}, [2**53], [2**53 + 1]),
        ({"exclusiveMinimum": 2**53 + 1}, [2**53 + 2], [2**53 + 1]),
        ({"minimum": -(2**53), "maximum": 2**63 - 1}, [-(2**53), 2**63 - 1], [-(2**53) - 1, 2**63]),
        ({"minimum": 0, "exclusiveMaximum": 2**63}, [0, 2**63 - 1], [-1, 2**63]),
        ({"minimum": -(2**63), "maximum": 2**63 - 1}, [0, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 2**64 - 1], [-1, 2**64]),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 1}, [2**53 + 1], [2**53, 2**53 + 2]),
        ({"exclusiveMinimum": -(2**63) - 1, "exclusiveMaximum": 2**63}, [-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
        ({"minimum": 1e19}, [10**19, 10**30], [10**19 - 1, -(10**19), 0]),
        ({"maximum": -1e19}, [-(10**19), -(10**30)], [-(10**19) + 1, 10**19, 0]),
        ({"exclusiveMaximum": 1e19}, [10**19 - 1, -(10**30)], [10**19]),
        ({"minimum": 2.5, "maximum": 1e19}, [3, 10**19], [2, 10**19 + 1]),
        ({"minimum": 10**18, "maximum": 2**63 - 1}, [10**18, 2**63 - 1], [10**18 - 1, 2**63]),
        ({"minimum": 5, "exclusiveMinimum": 2**53 + 1}, [2**53 + 2], [5, 2**53 + 1]),
    ],
)
def test_bounds_of_integers_are_exact(bounds: dict[str, int], inside: list[int], outside: list[int]) -> None:
    matcher = start({"type": "integer", **bounds})
    assert [number for number in inside if not allows(matcher, str(number))] == []
    assert [number for number in outside if allows(matcher, str(number))] == []


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 10**18 + 1, 2**63, 2**64 - 1, 2**70, 10**39])
@pytest.mark.parametrize("keyword", ["minimum", "maximum", "const", "enum"])
def test_integers_that_floats_do_not_hold_are_exact(keyword: str, value: int) -> None:
    part = {keyword: [value, "x"] if keyword == "enum" else value, "type": ["integer", "string"]}
    matcher = start({"$ref": "#/$defs/x", "$defs": {"x": part}})
    allowed = [value, value + 1] if keyword == "minimum" else [value - 1, value] if keyword == "maximum" else [value]
    assert [one for one in (value - 1, value, value + 1) if allows(matcher, str(one))] == allowed
    assert allows(matcher, '"x"') == (keyword != "const")


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "const", "enum"])
def test_integers_of_very_many_digits_are_refused_by_name(keyword: str) -> None:
    part = {keyword: [10**400] if keyword == "enum" else 10**400, "type": "integer"}
    with pytest.raises(ValueError, match=rf"schema {keyword} must have at most 40 digits, got 401 at #/\$defs/x"):
        start({"$ref": "#/$defs/x", "$defs": {"x": part}})


@pytest.mark.parametrize("value", [1e19, 10**18, -1e300, 2**63, 123456789012345664])
def test_bounds_of_numbers_that_the_library_would_round_are_refused_by_name(value: float) -> None:
    for keyword in ("minimum", "maximum"):
        with pytest.raises(ValueError, match=f"schema {keyword} .* at #/{keyword}"):
            start({"type": "number", keyword: value})


@pytest.mark.parametrize("text", ["1e23", "18446744073709551616.0", "1e400", "-1e400"])
def test_a_bound_whose_text_is_another_number_than_its_float_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="schema maximum must be a number with which the grammar can compute exactly"):
        start(f'{{"type": "integer", "maximum": {text}}}')


@pytest.mark.parametrize("value", [2**53, 10**20, 2**70, -(2**63), -(2**62), 2**63 - 1024, 123])
def test_integers_beside_other_values_are_exact(value: int) -> None:
    matcher = start({"enum": [value, "x"]})
    assert allows(matcher, str(value))
    assert not allows(matcher, str(value + 1))


@pytest.mark.parametrize("name", ["int64", "regex", "uri-reference", "wibble"])
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    matcher = start({"properties": {"format": {"type": "string", "format": name}}, "required": ["format"]})
    assert allows(matcher, '{"format":"anything"}')
    assert not allows(start({"type": "string", "format": "date"}), '"anything"')
    assert allows(start({"const": {"format": name}}), json.dumps({"format": name}))


@pytest.mark.parametrize(
    "schema",
    [
        DEAD_END,
        {"type": "array", "items": DEAD_END, "minItems": 1},
        {**DEAD_END, "patternProperties": {"^(a|b)$": True}, "required": ["a", "b"]},
        {**DEAD_END, "properties": {"é": True}, "required": [], "patternProperties": {"^[é]$": {"type": "null"}}},
        {"properties": {"a": True}, "patternProperties": {"": False}},
        {"properties": {"a": True}, "patternProperties": {"^[^a]": False, "^$": False, "^a.": False}},
    ],
)
def test_no_comma_precedes_a_property_that_has_no_name(schema: object) -> None:
    matcher = start(schema)
    assert all(walk(matcher.copy(), embedded(), seed).is_complete for seed in range(60))


def test_properties_keep_what_patterns_say_of_them() -> None:
    matcher = start({**DEAD_END, "patternProperties": {"^a$": {"const": True}}})
    assert allows(matcher, '{"a":true}')
    assert not allows(matcher, '{"a":false}')


def test_names_that_repeat_do_not_count() -> None:
    with pytest.raises(ValueError, match=r"schema minProperties .* got 2 at #/items/minProperties"):
        start({"items": {"type": "object", "minProperties": 2}})


def test_schemas_in_lark_are_kept_too() -> None:
    matcher = start('start: "a" %json {"type": "string", "format": "wibble"} "b"', kind="lark")
    assert allows(matcher, 'a"x"b')
    assert not allows(matcher, r'a"\u0001"b')
    with pytest.raises(ValueError, match="schema minimum"):
        start('start: %json {"minimum": 1e19}', kind="lark")
