"""Schemas with integers that the library's schemas cannot bound exactly, as Lark around the other parts.

The library compiles a JSON schema as a whole, and reads all its numbers as 64-bit floats. In Lark an integer may be any
regular expression, and a schema may stand in a rule. So the objects, arrays and alternatives on the way to such an
integer become rules, and everything else stays a schema. The texts have the library's form: properties in the order of
the schema, then others; strings with one spelling each; white space of a bounded length.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

from pagewood.engine.grammar.integer_range import IntegerRange, range_expression
from pagewood.engine.grammar.schema_limits import DATA, KEYWORDS, NAMED_PARTS, Schema

Kept: TypeAlias = "Schema | bool | IntegerRange"
_DEFINITIONS = ("$defs", "definitions")
MAX_PROPERTIES = 300
"""Properties of an object with a range. The library follows a rule for each property that may come next, and has a
limit of 2,000 rules at once."""
_OF_KIND = {
    "object": frozenset(("properties", "required", "additionalProperties")),
    "array": frozenset(("items", "minItems", "maxItems")),
}
"""Keywords that rules keep beside a `type`."""
_NO_EFFECT = frozenset(("format", "minLength", "maxLength", "pattern", "type"))
"""Keywords that do not restrict objects and arrays."""
_KINDS = ("null", "boolean", "number", "string", "array", "object")
_NAME = r"""/"([^"\\\x00-\x1f\x7f]|\\["\\bfnrt])*"/"""


def holds_range(value: object) -> bool:
    """Return whether a schema from `kept_schema` has an `IntegerRange` somewhere."""
    return _holds(value, frozenset())


def lark_of_schema(schema: Kept, options: Mapping[str, object], *, whitespace: str | None) -> str:
    """Return a Lark grammar for the instances of a schema from `kept_schema`.

    Args:
        schema: the result of `kept_schema`.
        options: of the library, for the parts that stay schemas.
        whitespace: expression for white space where it is allowed; None: it is not allowed.

    Raises:
        ValueError: an integer is in a place where rules cannot stand; the message has its keyword, value and place.
    """
    return _Rules(schema, options, whitespace).text()


class _Rules:
    """A grammar under construction. Invariant: every name in a returned body has a rule, or gets one."""

    __slots__ = ("_definitions", "_of_reference", "_options", "_root", "_rules", "_space", "_wide")

    def __init__(self, root: Kept, options: Mapping[str, object], whitespace: str | None) -> None:
        self._root = root
        self._options = options
        self._rules: list[str] = [] if whitespace is None else [f"SPACE: /{whitespace}/"]
        self._space = "" if whitespace is None else "SPACE?"
        self._of_reference: dict[str, str] = {}
        self._wide = _wide_references(root)
        self._definitions = self._narrow_definitions()

    def text(self) -> str:
        body = self._value(self._root)
        return "\n".join([f"start: {body}", *self._rules])

    def _narrow_definitions(self) -> Schema:
        if not isinstance(self._root, dict):
            return {}
        return {
            key: {name: one for name, one in cast("Schema", group).items() if not _holds(one, self._wide)}
            for key in _DEFINITIONS
            if isinstance(group := self._root.get(key), dict)
        }

    def _value(self, value: Kept) -> str:
        """Return a body for the instances of a part."""
        if value is self._root:
            value = cast("Kept", _body(value))
        if isinstance(value, IntegerRange):
            return f"/{range_expression(value.low, value.high)}/"
        if isinstance(value, bool) or not _holds(value, self._wide):
            return self._part({} if isinstance(value, bool) else value)
        keywords = value.keys() & KEYWORDS
        if "$ref" in keywords:
            self._check_alone("$ref", keywords, value)
            return self._reference(value["$ref"])
        for keyword in ("anyOf", "oneOf"):
            if keyword in keywords:
                self._check_alone(keyword, keywords, value)
                parts = [part for part in cast("list[Kept]", value[keyword]) if part is not False]
                if keyword == "oneOf" and not _are_apart(parts):
                    raise self._refusal(value, "oneOf of parts that are not of different types")
                return self._rule(" | ".join(self._value(part) for part in parts))
        return self._typed(value, keywords)

    def _typed(self, node: Schema, keywords: set[str]) -> str:
        given = node.get("type", _KINDS)
        kinds = cast("list[str]", [given] if isinstance(given, str) else list(given))
        ours = [
            kind for kind in kinds if any(_holds({key: node.get(key)}, self._wide) for key in _OF_KIND.get(kind, ()))
        ]
        allowed = _NO_EFFECT.union(*(_OF_KIND.values()))
        if not ours or not keywords <= allowed:
            beside = sorted(keywords - allowed) or [f"type {given}"]
            raise self._refusal(node, beside[0])
        bodies = [self._object(node) if kind == "object" else self._array(node) for kind in ours]
        if rest := [kind for kind in kinds if kind not in ours]:
            dropped = frozenset[str]().union(*(_OF_KIND[kind] for kind in ours))
            bodies.append(self._part({key: one for key, one in node.items() if key not in dropped} | {"type": rest}))
        return self._rule(" | ".join(bodies))

    def _object(self, node: Schema) -> str:
        """Return a body for an object: a chain of rules, two for each property, before and after the first comma."""
        properties = cast("dict[str, Kept]", node.get("properties") or {})
        required = cast("list[str]", node.get("required") or [])
        others: Kept = node.get("additionalProperties", True)
        names = list(dict.fromkeys([*properties, *required]))
        if len(names) > MAX_PROPERTIES:
            raise self._refusal(node, f"more than {MAX_PROPERTIES} properties")
        first, later = self._others(names, others)
        for name in reversed(names):
            part = properties.get(name, others)
            if part is False:
                if name in required:
                    raise ValueError(f"schema must allow a property that is required, got false for {name!r}")
                continue
            member = self._rule(self._member(_literal(json.dumps(name, ensure_ascii=False)), part))
            is_required = name in required
            first, later = (
                self._rule(f"{member} {later}" if is_required else f"{member} {later} | {first}"),
                self._rule(self._comma(f"{member} {later}") + ("" if is_required else f" | {later}")),
            )
        return f'"{{" {self._space} {first} "}}"'

    def _others(self, names: list[str], others: Kept) -> tuple[str, str]:
        """Return bodies for the properties after the named ones, without and with a comma before each."""
        if others is False:
            nothing = self._rule('""')
            return nothing, nothing
        known = " | ".join(_literal(json.dumps(name, ensure_ascii=False)) for name in names)
        key = f"NAME_{len(self._rules)}"
        self._rules.append(f"{key}: {_NAME} & ~({known})" if known else f"{key}: {_NAME}")
        member = self._rule(self._member(key, others))
        later = self._rule(f"({self._comma(member)})*")
        return self._rule(f'{member} {later} | ""'), later

    def _member(self, key: str, value: Kept) -> str:
        return f'{key} {self._space} ":" {self._space} {self._value(value)} {self._space}'

    def _comma(self, body: str) -> str:
        return f'"," {self._space} {body}'

    def _array(self, node: Schema) -> str:
        items = node.get("items")
        if not isinstance(items, (dict, IntegerRange)):
            raise self._refusal(node, "items that are a list")
        least, most = int(node.get("minItems", 0)), node.get("maxItems")
        if most == 0:
            return f'"[" {self._space} "]"'
        item = self._rule(f"{self._value(cast('Kept', items))} {self._space}")
        more = f"({self._comma(item)}){{{max(least - 1, 0)},{'' if most is None else int(most) - 1}}}"
        body = item if most == 1 else self._rule(f"{item} {more}")
        return f'"[" {self._space} {body}{"" if least else "?"} "]"'

    def _reference(self, reference: str) -> str:
        if reference not in self._of_reference:
            name = self._of_reference[reference] = f"ref_{len(self._of_reference)}"
            self._rules.append(f"{name}: {self._value(cast('Kept', _target(self._root, reference)))}")
        return self._of_reference[reference]

    def _part(self, schema: Schema) -> str:
        """Return a body for a part that stays a schema."""
        references = _references(schema)
        if references:
            schema = self._definitions | schema
        for reference in references:
            if reference.startswith("#") and _target(schema, reference) is None:
                raise self._refusal(self._root, f"$ref to {reference}")
        text = json.dumps(schema | {"x-guidance": dict(self._options)}, ensure_ascii=False)
        return self._rule(f"%json {text}")

    def _rule(self, body: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def _check_alone(self, keyword: str, keywords: set[str], node: Schema) -> None:
        if others := sorted(keywords - {keyword}):
            raise self._refusal(node, f"{keyword} beside {others[0]}")

    def _refusal(self, node: object, construct: str) -> ValueError:
        keyword, _, value = next(_ranges(node, self._root, self._wide)).origin.partition(" ")
        return ValueError(f"schema {keyword} must be exact as a 64-bit float in a schema with {construct}, got {value}")


def _body(value: object) -> object:
    """Return a schema without its definitions, which do not restrict its own instances."""
    if not isinstance(value, dict):
        return value
    return {key: part for key, part in cast("Schema", value).items() if key not in _DEFINITIONS}


def _wide_references(root: object) -> frozenset[str]:
    """Return the references to parts that hold a range, or refer to one that does."""
    targets = {reference: _target(root, reference) for reference in _references(root)}
    wide: frozenset[str] = frozenset()
    while True:
        found = frozenset(
            reference
            for reference, target in targets.items()
            if _holds(_body(target) if target is root else target, wide)
        )
        if found == wide:
            return wide
        wide = found


def _holds(value: object, wide: frozenset[str]) -> bool:
    """Return whether a part holds a range or one of the references `wide`."""
    return any(isinstance(one, IntegerRange) or _reference_in(one) in wide for one in _parts(value))


def _ranges(value: object, root: object, wide: frozenset[str]) -> Iterator[IntegerRange]:
    """Yield the ranges of a part and of the parts that it refers to."""
    waiting, seen = [value], set[str]()
    while waiting:
        for one in _parts(waiting.pop()):
            if isinstance(one, IntegerRange):
                yield one
            elif (reference := _reference_in(one)) in wide - seen:
                seen.add(reference)
                waiting.append(_target(root, reference))


def _references(value: object) -> list[str]:
    return [reference for one in _parts(value) if (reference := _reference_in(one)) is not None]


def _reference_in(part: object) -> str | None:
    reference = cast("Schema", part).get("$ref") if isinstance(part, dict) else None
    return reference if isinstance(reference, str) else None


def _parts(value: object) -> Iterator[object]:
    """Yield all schemas and ranges in a schema or a list of schemas, itself included; constants are not schemas."""
    waiting: list[object] = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, IntegerRange):
            yield one
        elif isinstance(one, dict):
            yield (node := cast("Schema", one))
            for key, inner in node.items():
                if key in NAMED_PARTS and isinstance(inner, dict):
                    waiting += cast("Schema", inner).values()
                elif key not in DATA:
                    waiting.append(inner)
        elif isinstance(one, list):
            waiting += cast("list[object]", one)


def _target(root: object, reference: str) -> object:
    """Return the target of a reference within a schema; None if there is none."""
    place, node = reference.removeprefix("#"), root
    if not reference.startswith("#") or (place and not place.startswith("/")):
        return None
    for step in place.split("/")[1:]:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = cast("Schema", node).get(name)
        elif isinstance(node, list) and name.isdecimal():
            parts = cast("list[object]", node)
            node = parts[int(name)] if int(name) < len(parts) else None
        else:
            return None
    return node


def _are_apart(parts: list[Kept]) -> bool:
    """Return whether parts have disjoint types, so that no value is an instance of two of them."""
    kinds = ["integer" if isinstance(part, IntegerRange) else _kind(part) for part in parts]
    return None not in kinds and len(set(kinds)) == len(kinds) and not {"integer", "number"} <= set(kinds)


def _kind(part: Schema | bool) -> str | None:
    kind: Any = None if isinstance(part, bool) else part.get("type")
    return kind if isinstance(kind, str) else None


def _literal(text: str) -> str:
    """Return a Lark string, which has the escapes of JSON."""
    return json.dumps(text).replace("\x7f", r"\u007f")
