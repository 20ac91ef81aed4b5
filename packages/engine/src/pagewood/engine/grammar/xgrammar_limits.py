"""The combinations of keywords that xgrammar keeps; a schema with another one is refused by name.

The library chooses one keyword of a schema and ignores those beside it: `allOf` of two parts, `type` beside `enum`,
bounds without a `type`. So each schema must have one of the shapes below. They were found by sampling random schemas
and checking texts drawn from the masks (`packages/engine/tests/grammar/test_combinations.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

from pagewood.engine.grammar.schema_form import FORMATS, leaves
from pagewood.engine.grammar.schema_limits import KEYWORDS, Schema

_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "$anchor", "$comment", "$defs", "definitions", "title", "description", "default"),
        *("examples", "deprecated", "readOnly", "writeOnly", "contentMediaType", "contentEncoding"),
    )
)
_ALONE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""Keywords that the library keeps only if no other keyword is beside them."""
_OF_TYPE: dict[str, frozenset[str]] = {
    "null": frozenset(),
    "boolean": frozenset(),
    "integer": frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "number": frozenset(),
    "string": frozenset(("pattern", "format")),
    "array": frozenset(("items", "prefixItems", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties")),
}
"""Keywords that the library keeps beside a `type`."""
_APART = (("pattern", "format"),)
"""Pairs of keywords of one type; the library keeps only one keyword of a pair."""
_FORMATS = frozenset(("date", "time", "date-time", "uuid", "ipv4"))
"""Formats whose instances the library spells as JSON."""
_PLAIN_PATTERN = re.compile(
    r"\^(?:[\w \-/:,;@#%&=~!<>']|\\[-.+*?()\[\]{}/dw]|\[(?:[\w \-/:,;@#%&=~!<>'.+*?(){}]|\\[-.dw])+\]|"
    r"[+*?]|\{\d{1,3}(?:,\d{0,3})?\})*\$"
)
"""Expressions without alternatives that match no quote, backslash or control character, because the library writes
matches into a string unchanged."""
_MAX_INTEGER = 10**15
_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "array": (list,),
    "object": (dict,),
}


def kept_by_xgrammar(schema: Schema) -> Schema:
    """Return a schema that the library keeps; objects without a rule for other properties then forbid them.

    Raises:
        ValueError: it has a combination of keywords that the library does not keep.
    """
    return cast("Schema", _kept(schema, "#"))


def _kept(value: object, place: str) -> object:
    if value is True or value == {}:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"schema must be an object or true for xgrammar, got {value!r} at {place}")
    node = cast("Schema", value)
    keywords = sorted(node.keys() & KEYWORDS - {"format"} | ({"format"} if node.get("format") in FORMATS else set()))
    kept: Schema = {key: node[key] for key in ("$defs", "definitions") if key in node}
    for key, definitions in kept.items():
        kept[key] = {name: _kept(one, f"{place}/{key}/{name}") for name, one in definitions.items()}
    for key in node.keys() - KEYWORDS - _ANNOTATIONS - {"format"}:  # a reference may lead there
        if isinstance(node[key], dict):
            kept[key] = {name: _kept(one, f"{place}/{key}/{name}") for name, one in node[key].items()}
    alone = [keyword for keyword in _ALONE if keyword in keywords]
    if alone:
        return kept | _alone(node, alone[0], keywords, place)
    return kept | _typed(node, keywords, place)


def _alone(node: Schema, keyword: str, keywords: list[str], place: str) -> Schema:
    value: Any = node[keyword]
    others = [other for other in keywords if other != keyword]
    if keyword in ("const", "enum"):
        values = [value] if keyword == "const" else cast("list[object]", value)
        for number in leaves(values):
            if isinstance(number, int) and not -(2**63) <= number < 2**63:
                raise _refusal(f"{keyword} of {number}", place)
        if others == ["type"] and all(_is_of(one, node["type"]) for one in values):
            others = []
    if others:
        raise _refusal(f"{keyword} beside {others[0]}", place)
    if keyword in ("$ref", "const", "enum"):
        return {keyword: value}
    parts = cast("list[object]", value)
    if keyword == "allOf" and len(parts) != 1:
        raise _refusal(f"allOf of {len(parts)} schemas", place)
    kept = [_kept(part, f"{place}/{keyword}/{i}") for i, part in enumerate(parts)]
    if keyword == "oneOf" and not _are_apart(cast("list[Schema]", kept)):
        raise _refusal("oneOf of schemas that are neither of different types nor told apart by a constant", place)
    return {keyword: kept}


def _typed(node: Schema, keywords: list[str], place: str) -> Schema:
    kind: Any = node.get("type")
    others = [keyword for keyword in keywords if keyword != "type"]
    if not others:
        return {"type": kind} if kind is not None else {}
    if not isinstance(kind, str):
        raise _refusal(f"{others[0]} {'without type' if kind is None else 'beside several types'}", place)
    allowed = _OF_TYPE.get(kind, frozenset())
    for keyword in others:
        if keyword not in allowed:
            raise _refusal(f"{keyword} beside type {kind}", place)
    for first, second in _APART:
        if first in others and second in others:
            raise _refusal(f"{first} beside {second}", place)
    kept = {"type": kind, **{keyword: node[keyword] for keyword in others}}
    match kind:
        case "string":
            _check_string(kept, place)
        case "integer":
            _check_bounds(kept, place)
        case "array":
            return _array(kept, place)
        case _:
            return _object(kept, place)
    return kept


def _check_string(node: Schema, place: str) -> None:
    pattern, name = node.get("pattern"), node.get("format")
    if name is not None and name not in _FORMATS:
        raise _refusal(f"format {name}", place)
    if pattern is not None and not (isinstance(pattern, str) and _PLAIN_PATTERN.fullmatch(pattern)):
        raise _refusal(f"pattern {pattern!r}", place)


def _check_bounds(node: Schema, place: str) -> None:
    for keyword, value in node.items():
        if keyword != "type" and not (isinstance(value, int) and abs(value) < _MAX_INTEGER):
            raise _refusal(f"{keyword} of {value!r}", place)
    for first, second in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if first in node and second in node:
            raise _refusal(f"{first} beside {second}", place)


def _array(node: Schema, place: str) -> Schema:
    kept = dict(node)
    if "prefixItems" in node and ("minItems" in node or "maxItems" in node):
        raise _refusal("prefixItems beside minItems or maxItems", place)
    if node.get("items") is False and "prefixItems" not in node:
        raise _refusal("items of false", place)
    if "items" in node and node["items"] is not False:
        kept["items"] = _kept(node["items"], f"{place}/items")
    if "prefixItems" in node:
        parts = cast("list[object]", node["prefixItems"])
        kept["prefixItems"] = [_kept(part, f"{place}/prefixItems/{i}") for i, part in enumerate(parts)]
    return kept


def _object(node: Schema, place: str) -> Schema:
    properties = cast("Schema", node.get("properties") or {})
    others: object = node.get("additionalProperties", not properties and "required" not in node)
    for name in cast("list[str]", node.get("required") or []):
        if name not in properties:
            raise _refusal(f"required without a property {name!r}", place)
    if others is not False and properties:
        raise _refusal("additionalProperties beside properties", place)
    return {
        **node,
        "properties": {name: _kept(part, f"{place}/properties/{name}") for name, part in properties.items()},
        "additionalProperties": others if others is False else _kept(others, f"{place}/additionalProperties"),
    }


def _are_apart(parts: list[Schema]) -> bool:
    """Return whether schemas have different types, or objects have different constants, so that no value fits two."""
    if any(len(set(tags)) == len(parts) for tags in _tags(parts)):
        return True
    if any("type" not in part for part in parts):
        return False
    kinds = list(_kinds(parts))
    return len(kinds) == len(set(kinds)) and not (("type", "integer") in kinds and ("type", "number") in kinds)


def _tags(parts: list[Schema]) -> Iterator[list[str]]:
    """Yield the constants of each property that is a required string constant in all schemas."""
    if all(part.get("type") == "object" for part in parts):
        for name in cast("list[str]", parts[0].get("required") or []):
            found = [part["properties"][name].get("const") for part in parts if name in part.get("required", ())]
            if len(found) == len(parts) and all(isinstance(tag, str) for tag in found):
                yield found


def _kinds(parts: list[Schema]) -> Iterator[object]:
    for part in parts:
        kind = part.get("type")
        if isinstance(kind, list):
            yield from (("type", one) for one in cast("list[str]", kind))
        else:
            yield ("type", kind)


def _is_of(value: object, kind: object) -> bool:
    kinds = cast("list[str]", kind if isinstance(kind, list) else [kind])
    return any(
        isinstance(value, _TYPES.get(one, ())) and (one == "boolean" or not isinstance(value, bool)) for one in kinds
    )


def _refusal(what: str, place: str) -> ValueError:
    return ValueError(f"schema must have combinations that xgrammar keeps, got {what} at {place}")
