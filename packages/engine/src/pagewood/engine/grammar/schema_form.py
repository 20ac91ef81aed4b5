"""JSON schemas in a form that llguidance keeps exactly, or the keyword that has no such form.

The library reads bounds as 64-bit floats, fails on unknown formats, lets a comma precede a property that no name can
begin, and drops characters that may not be escaped. What follows from a schema is mended or refused here, and the
message has the keyword and its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from math import ceil, floor
from typing import Any, cast

from pagewood.engine.grammar.schema_limits import Schema

ESCAPES = 'nrbtf\\"'
"""Letters behind a backslash in strings. The library knows no general escape `\\u` beside patterns and names, and one
that is not general forces a model that has begun `\\u00e9` into a control character."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that the library knows; the last is its name for any text."""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that JSON has no letter for."""
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])+\]")
_UNWRITABLE_IN_PATTERN = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\\(?:x0[0-7be-f]|x1[0-9a-f]|x7f|u00(?:0[0-7be-f]|1[0-9a-f]|7f)|x\{|u\{|c[A-Za-z]|0|v|a)|"
    r"[\x00-\x07\x0b\x0e-\x1f\x7f])",
    re.IGNORECASE,
)
_MAX_FLOAT_INTEGER = 2**53
_MAX_NUMBER = 10**18
"""From it on, the library's expressions for ranges of numbers are wrong, and those of integers need both bounds."""
INT64_MIN = -(2**63)
LEAST_MINIMUM = INT64_MIN + 1024
"""What stands for `INT64_MIN`, whose range overflows in the library: the next integer that is exact as a float."""
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Keywords, and which way values lie."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "examples", "x-guidance"))


def kept_schema(schema: Schema, *, begins: Callable[[Schema, str], bool]) -> Schema:
    """Return a schema with the same instances that the library keeps.

    Args:
        schema: one that `check_schema` has accepted.
        begins: whether a text in compact JSON is the beginning of an instance of a schema.

    Raises:
        ValueError: no such form exists; the message has the keyword and its place.
    """
    return cast("Schema", _Form(begins).schema(schema, "#"))


class _Form:
    __slots__ = ("_begins",)

    def __init__(self, begins: Callable[[Schema, str], bool]) -> None:
        self._begins = begins

    def schema(self, value: object, place: str) -> object:
        if isinstance(value, list):
            return [self.schema(one, f"{place}/{i}") for i, one in enumerate(cast("list[object]", value))]
        if not isinstance(value, dict):
            return value
        node = cast("Schema", value)
        kept = {
            key: inner if key in _DATA else self._inner(key, inner, f"{place}/{_escaped(key)}")
            for key, inner in node.items()
        }
        if isinstance(name := kept.get("format"), str) and name not in FORMATS:
            del kept["format"]
        _check_data(node, place)
        _check_pattern(node.get("pattern"), f"{place}/pattern")
        _check_count(node, place)
        if not _BOUNDS.keys().isdisjoint(node):
            kept = _bounded(kept, place)
        if isinstance(patterns := node.get("patternProperties"), dict):
            for pattern in cast("Schema", patterns):
                _check_pattern(pattern, f"{place}/patternProperties")
            if not self._begins(*_with_names_only(kept)):
                kept = self._closed(kept)
        return kept

    def _inner(self, key: str, value: object, place: str) -> object:
        if key in _MAPS and isinstance(value, dict):
            members = cast("Schema", value)
            return {name: self.schema(one, f"{place}/{_escaped(name)}") for name, one in members.items()}
        return self.schema(value, place)

    def _closed(self, node: Schema) -> Schema:
        """Return an object that has no other properties than those with names."""
        properties = cast("Schema", node.get("properties") or {})
        patterns = cast("Schema", node["patternProperties"])
        closed: dict[str, object] = {}
        for name in _names(node):
            parts = [part for pattern, part in patterns.items() if self._matches(pattern, name)]
            if name in properties:
                parts.insert(0, properties[name])
            closed[name] = {"allOf": parts} if parts else node.get("additionalProperties", True)
        rest = {key: value for key, value in node.items() if key != "patternProperties"}
        return {**rest, "properties": closed, "additionalProperties": False}

    def _matches(self, pattern: str, name: str) -> bool:
        return self._begins({"type": "string", "pattern": pattern}, json.dumps(name, ensure_ascii=False))


def _escaped(name: str) -> str:
    """Return a step of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def _check_data(node: Schema, place: str) -> None:
    """Check the values of `const` and `enum`.

    Raises:
        ValueError: one holds a character that cannot be written, or an integer that is not exact as a float.
    """
    for keyword in ("const", "enum"):
        for value in _leaves(node.get(keyword)):
            if isinstance(value, str) and (found := _UNWRITABLE.search(value)):
                raise ValueError(
                    f"schema {keyword} must not have characters that JSON can write as \\u only, "
                    f"got U+{ord(found[0]):04X} at {place}"
                )
            if isinstance(value, int) and (not _is_exact(value) or value == INT64_MIN):
                raise ValueError(
                    f"schema {keyword} must have integers that are exact as 64-bit floats, "
                    f"got {_shown(value)} at {place}"
                )


def _leaves(value: object) -> Iterator[object]:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            waiting += cast("Mapping[str, object]", one).values()
        elif isinstance(one, list):
            waiting += cast("list[object]", one)
        else:
            yield one


def _check_pattern(pattern: object, place: str) -> None:
    """Raise ValueError if a pattern asks for a certain control character that cannot be written.

    A class of several characters may contain them: the library leaves them out.
    """
    if not isinstance(pattern, str):
        return
    single = re.sub(r"\[((?:\\(?:[xu][0-9a-fA-F]+|.)|[^\]\\^]))\]", r"\1", pattern)
    if _UNWRITABLE_IN_PATTERN.search(_CLASS.sub(".", single)):
        raise ValueError(
            f"schema pattern must not ask for characters that JSON can write as \\u only, got {pattern!r} at {place}"
        )


def _check_count(node: Schema, place: str) -> None:
    """Raise ValueError if properties without fixed names must be several: the library would count repeated names."""
    least, required, types = node.get("minProperties"), node.get("required"), node.get("type", "object")
    if "object" not in cast("str | list[str]", types):
        return
    num_named = len(cast("list[object]", required)) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_named + 1 and node.get("additionalProperties") is not False:
        raise ValueError(
            f"schema minProperties must be at most one more than the required properties where others are allowed, "
            f"got {least} at {place}/minProperties"
        )


def _bounded(node: Schema, place: str) -> Schema:
    """Return a node with bounds with which the library computes exactly.

    Raises:
        ValueError: there are none.
    """
    is_integer = node.get("type") == "integer"
    kept = dict(node)
    for keyword, sign in _BOUNDS.items():
        value: Any = node.get(keyword)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) < _MAX_FLOAT_INTEGER:
            continue
        inclusive = "minimum" if sign > 0 else "maximum"
        if is_integer:
            del kept[keyword]
            if keyword != inclusive:
                value = (floor(value) if sign > 0 else ceil(value)) + sign
            if value == INT64_MIN and sign > 0:
                value = LEAST_MINIMUM
            other: Any = kept.get(inclusive, value)
            kept[inclusive] = max(value, other, key=lambda bound: bound * sign)
        is_kept = _is_kept_integer(value, sign, node) if is_integer else _is_kept_number(value, keyword == inclusive)
        if not is_kept:
            raise ValueError(
                f"schema {keyword} must be a number with which the grammar can compute exactly, "
                f"got {_shown(node[keyword])} at {place}/{keyword}"
            )
    return kept


def _is_kept_integer(value: float, sign: int, node: Schema) -> bool:
    if sign < 0 and value == 2**63 - 1:
        return True  # rounded up, and cut to what an int64 holds
    other_side = "maximum" if sign > 0 else "minimum"
    if value * sign >= _MAX_NUMBER and not isinstance(node.get(other_side), (int, float)):
        return False  # the number of digits has no end
    return _is_exact(value) and abs(value) < 2**63


def _is_kept_number(value: float, is_inclusive: bool) -> bool:
    return is_inclusive and _is_exact(value) and abs(value) < _MAX_NUMBER


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}"


def _is_exact(value: float) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _names(node: Schema) -> list[str]:
    """Return the names that the library puts in order; others come behind them."""
    required = cast("list[str]", node.get("required") or [])
    return list(dict.fromkeys([*cast("Schema", node.get("properties") or {}), *required]))


def _with_names_only(node: Schema) -> tuple[Schema, str]:
    """Return a small schema for the names of an object, and the beginning of a text with a name behind all others."""
    anything: Schema = {"const": 0}
    names = _names(node)
    patterns = cast("Schema", node["patternProperties"])
    probe = {
        "type": "object",
        "properties": dict.fromkeys(names, anything),
        "required": names,
        "patternProperties": {pattern: part is not False and anything for pattern, part in patterns.items()},
        "additionalProperties": node.get("additionalProperties") is not False and anything,
    }
    return probe, "{" + "".join(f"{json.dumps(name, ensure_ascii=False)}:0," for name in names) + '"'
