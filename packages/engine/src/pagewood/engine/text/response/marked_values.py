"""Rules for values in a dialect of JSON: keys without quotes, strings between marks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

from pagewood.engine.text.response.lark_rules import LarkRules
from pagewood.engine.text.response.text_bounds import TEXT, text_bounds
from pagewood.engine.text.response.text_values import listed_texts, string_ways
from pagewood.engine.text.response.tool_schema import (
    ALL_TYPES,
    ANNOTATIONS,
    Schema,
    constants,
    is_of,
    object_forms,
    referred,
    refuse,
    types_of,
)
from pagewood.engine.text.response.values import Dialect, is_bare_key

_ANYTHING = "any value"
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
_OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset(("pattern", "minLength", "maxLength", "format")),
    "integer": _NUMBERS,
    "number": _NUMBERS,
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(("items", "minItems", "maxItems")),
    "object": frozenset(("properties", "required", "additionalProperties", "minProperties", "maxProperties")),
}
"""Keywords of values of a type that are kept."""
_KNOWN = frozenset(
    (
        *(
            "prefixItems",
            "additionalItems",
            "unevaluatedItems",
            "uniqueItems",
            "contains",
            "minContains",
            "maxContains",
        ),
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "not", "if", "then", "else", "$dynamicRef", "$recursiveRef"),
    )
)
"""Keywords that are not kept."""


class MarkedValues:
    """The rules of one tool's arguments. Invariant: each keyword of a schema is kept, or refused by name."""

    __slots__ = ("_closing", "_has_bare_keys", "_lark", "_opening", "_root", "_rules")

    def __init__(self, dialect: Dialect, lark: LarkRules, root: Schema) -> None:
        self._opening, self._closing = dialect.string_delims[0] if dialect.string_delims else ('"', '"')
        self._has_bare_keys = dialect.unquoted_keys
        self._lark = lark
        self._root = root
        self._rules: dict[str, str] = {}  # written by: _referred, _anything
        """By reference; recursive schemas refer to the rule that is being made."""

    def arguments(self, path: str) -> str:
        """Return a body for the arguments of a call.

        Raises:
            ValueError: a keyword is not kept; the message names it and its place.
        """
        forms = object_forms(self._root, self._root, path)
        bodies = [self._members(form.properties, form.required, path) for form in forms]
        return bodies[0] if len(bodies) == 1 else self._lark.rule(" | ".join(bodies))

    def key(self, key: str) -> str:
        """Return the text of a key and its colon."""
        if self._has_bare_keys and is_bare_key(key):
            return f"{key}:"
        if self._opening != '"' and self._closing not in key:
            return f"{self._opening}{key}{self._closing}:"
        return f"{json.dumps(key)}:"

    def value(self, schema: object, path: str) -> str:
        """Return the name of a rule, or a body, for a value.

        Raises:
            ValueError: a keyword is not kept; the message names it and its place.
        """
        if schema is True or schema == {}:
            return self._anything()
        if not isinstance(schema, Mapping):
            raise ValueError(f"{path} must be a schema that allows something, got {json.dumps(schema)[:100]}")
        node = cast("Schema", schema)
        if unknown := next((keyword for keyword in node if keyword in _KNOWN), None):
            raise refuse(path, unknown)
        combining = [keyword for keyword in _COMBINING if keyword in node]
        if not combining:
            return self._typed_or_any(node, path)
        types = types_of(node, self._root, nullable=False)
        if "object" in types and len(types) == 1 and not {"enum", "const"} & node.keys() and combining != ["$ref"]:
            forms = object_forms(node, self._root, path)
            return self._lark.rule(" | ".join(self._members(one.properties, one.required, path) for one in forms))
        keyword = combining[0]
        if types == ("string",):
            return self._string(node, path)
        others = [key for key in node if key not in ANNOTATIONS | {keyword}]
        if constants(node) is not None and keyword in ("enum", "const"):
            others = [key for key in others if key != "type"]
        if others and not (others == ["type"] and self._adds_nothing(node, types)):
            raise refuse(path, f"{others[0]} beside {keyword}")
        return self._combined(node, keyword, path)

    def _combined(self, node: Schema, keyword: str, path: str) -> str:
        """Return a rule for a schema that has one keyword besides its type and annotations."""
        match keyword:
            case "$ref":
                return self._referred(node, path)
            case "enum" | "const":
                declared = types_of({"type": node["type"]} if "type" in node else {}, self._root)
                listed = [one for one in constants(node) or () if not declared or is_of(one, declared)]
                if not listed:
                    raise ValueError(f"{path}.{keyword} must list a value that its type allows, got none")
                return self._lark.rule(" | ".join(self._constant(one, path) for one in listed))
            case _:
                choices = cast("list[object]", node[keyword])
                if keyword == "allOf" and len(choices) > 1:
                    raise refuse(path, "allOf of several schemas that are no objects")
                if keyword == "oneOf" and not self._exclude_each_other(choices):
                    raise refuse(path, "oneOf of schemas that are not of different types")
                inner = [
                    self.value(one, f"{path}.{keyword}[{index}]")
                    for index, one in enumerate(choices)
                    if one is not False
                ]
                return self._lark.rule(" | ".join(inner))

    def _referred(self, node: Schema, path: str) -> str:
        reference = str(node["$ref"])
        target = referred(node, self._root, path)
        if reference not in self._rules:
            self._rules[reference] = name = self._lark.rule("PLACEHOLDER")
            self._lark.define(name, self.value(target, f"{path}.$ref"))
        return self._rules[reference]

    def _exclude_each_other(self, choices: list[object]) -> bool:
        types = [types_of(one, self._root, nullable=False) for one in choices if one is not False]
        if len(types) > 1 and () in types:
            return False
        names = ["number" if name == "integer" else name for found in types for name in set(found)]
        return len(types) < 2 or len(names) == len(set(names))

    def _adds_nothing(self, node: Schema, types: tuple[str, ...]) -> bool:
        """Return whether the type of a schema is compatible with the schemas that it is combined with."""
        inner = {key: value for key, value in node.items() if key != "type"}
        found = types_of(inner, self._root, nullable=False)
        return bool(found) and set(found) == set(types)

    def _typed_or_any(self, node: Schema, path: str) -> str:
        names = types_of(node, self._root, nullable=False)
        if unknown := next((name for name in names if name not in ALL_TYPES), None):
            raise ValueError(f"{path}.type must be a type of JSON, got {json.dumps(unknown)[:100]}")
        kept = frozenset[str]().union(*(_OF_TYPE[name] for name in names or ALL_TYPES))
        if not names and not kept & node.keys():
            return self._anything()
        names = names or tuple(name for name in ALL_TYPES if name != "integer")
        return self._lark.rule(" | ".join(self._typed(name, node, path) for name in names))

    def _typed(self, name: str, node: Schema, path: str) -> str:
        match name:
            case "string":
                return self._string(node, path)
            case "object":
                return self._object(node, path)
            case "array":
                items = node.get("items", {})
                if items is False:
                    return '"[" "]"'
                return self._array(self.value(items, f"{path}.items"), node, path)
            case _:
                kept = {key: node[key] for key in _NUMBERS if key in node} if name in ("integer", "number") else {}
                return self._lark.json({"type": name, **kept}, self._root, path)

    def _string(self, node: Schema, path: str) -> str:
        found: list[str] = []
        for way in string_ways(node, self._root, path):
            texts, bounds = listed_texts(way), [bound for one in way for bound in text_bounds(one)]
            if texts is not None:
                if bounds:
                    raise refuse(path, "bounds of a string beside the strings that it may be")
                found += [self._constant(text, path) for text in texts]
                continue
            text = self._lark.bounded(bounds, without=self._closing, path=path) if bounds else TEXT
            found.append(f"{self._lark.literal(self._opening)} {self._lark.text_before(self._closing, text)}")
        if not found:
            raise ValueError(f"{path} must allow a string, got a schema that allows none")
        return self._lark.rule(" | ".join(found))

    def _object(self, node: Schema, path: str) -> str:
        others: Any = node.get("additionalProperties", True)
        if not node.get("properties") and not node.get("required") and others is not False:
            if bound := next((key for key in ("minProperties", "maxProperties") if node.get(key)), None):
                raise refuse(path, bound)
            return self._pairs(self.value(others, f"{path}.additionalProperties"))
        form = {**node, "type": "object"}
        if not isinstance(others, bool):
            required = dict.fromkeys(cast("list[str]", node.get("required", ())), cast("object", others))
            form |= {"properties": {**required, **node.get("properties", {})}, "additionalProperties": True}
        (found,) = object_forms(form, self._root, path)
        return self._members(found.properties, found.required, path)

    def _members(self, properties: Mapping[str, object], required: frozenset[str], path: str) -> str:
        members = [
            (f"{self._lark.literal(self.key(key))} {self.value(inner, f'{path}.properties.{key}')}", key in required)
            for key, inner in properties.items()
        ]
        return f'"{{" {self._lark.separated(members, ",")} "}}"'

    def _pairs(self, value: str) -> str:
        key = r"/[A-Za-z_][A-Za-z0-9_]{0,40}/" if self._has_bare_keys else r'/"[A-Za-z_][A-Za-z0-9_]{0,40}"/'
        pair = self._lark.rule(f'{key} ":" {value}')
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _constant(self, value: object, path: str) -> str:
        if isinstance(value, str) and self._closing in value:
            raise refuse(path, f"the constant {json.dumps(value)}, which has the mark {json.dumps(self._closing)}")
        text = f"{self._opening}{value}{self._closing}" if isinstance(value, str) else json.dumps(value)
        return self._lark.literal(text)

    def _array(self, item: str, node: Schema, path: str) -> str:
        low: Any = node.get("minItems", 0)
        high: Any = node.get("maxItems")
        for keyword, number in (("minItems", low), ("maxItems", high)):
            if number is not None and (not isinstance(number, int) or number < 0):
                raise ValueError(f"{path}.{keyword} must be a number of items, got {json.dumps(number)[:100]}")
        if high is not None and high < low:
            raise ValueError(f"{path}.maxItems must be >= minItems {low}, got {high}")
        most = "" if high is None else max(high - 1, 0)
        if high == 0:
            return '"[" "]"'
        more = f'("," {item}){{{max(low - 1, 0)},{most}}}' if most != 0 else ""
        items = f"{item} {more}"
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _anything(self) -> str:
        """Return a rule for any value."""
        if _ANYTHING not in self._rules:
            lark = self._lark
            self._rules[_ANYTHING] = name = lark.rule("PLACEHOLDER")
            scalar = lark.json({"type": ["number", "boolean", "null"]}, {}, "")
            text = f"{lark.literal(self._opening)} {lark.text_before(self._closing)}"
            lark.define(name, f'{scalar} | {text} | "[" ({name} ("," {name})*)? "]" | {self._pairs(name)}')
        return self._rules[_ANYTHING]
