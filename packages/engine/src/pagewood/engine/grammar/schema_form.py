"""Converts JSON schemas to a form that llguidance keeps exactly, or refuses keywords without such a form.

The library reads numbers as 64-bit floats, fails on unknown formats, lets a comma precede a property that no name can
begin, drops characters that may not be escaped, and allows an excluded bound if the other one lies within the unit
after it. This module rewrites or refuses such parts of a schema; the message has the keyword and its place. Integers
that floats cannot hold become an `IntegerRange`, see `wide_schema`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from math import ceil, floor, isfinite
from typing import Any, TypeGuard, cast

from pagewood.engine.grammar.integer_range import MAX_DIGITS, IntegerRange
from pagewood.engine.grammar.schema_limits import DATA, KEYWORDS, NAMED_PARTS, Schema, all_objects

ESCAPES = 'nrbtf\\"'
"""Letters after a backslash in strings. The library has no general escape `\\u` outside of patterns and names, and a
restricted one would force a model that has begun `\\u00e9` into a control character."""
FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that the library knows; the last is its name for any text."""
_UNWRITABLE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters without an escape letter in JSON."""
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])+\]")
_UNWRITABLE_IN_PATTERN = re.compile(
    r"(?<!\\)(?:\\\\)*(?:\\(?:x0[0-7be-f]|x1[0-9a-f]|x7f|u00(?:0[0-7be-f]|1[0-9a-f]|7f)|x\{|u\{|c[A-Za-z]|0|v|a)|"
    r"[\x00-\x07\x0b\x0e-\x1f\x7f])",
    re.IGNORECASE,
)
_MAX_FLOAT_INTEGER = 2**53
_MAX_NUMBER = 10**18
"""From this number on, the library's expressions for ranges of numbers are wrong, and ranges of integers need both
bounds."""
_ON_INTEGERS = frozenset(
    (
        *("multipleOf", "const", "enum", "allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef"),
        "$recursiveRef",
    )
)
"""Keywords that restrict integers, besides types and bounds."""
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""Keywords, and the direction in which values lie."""
_DIGITS = 15
"""Digits of a number after an excluded integer. The library reads floats of more digits as one of their neighbours."""
_LEAST_NUMBER = 1e-20
"""The number after an excluded 0."""


def kept_schema(schema: Schema, *, begins: Callable[[Schema, str], bool]) -> Schema | IntegerRange:
    """Return a schema with the same instances that the library keeps, apart from an `IntegerRange` in it.

    Args:
        schema: one that `check_schema` has accepted.
        begins: whether a text in compact JSON is the beginning of an instance of a schema.

    Raises:
        ValueError: no such form exists; the message has the keyword and its place.
    """
    return cast("Schema | IntegerRange", _Form(begins, _units_of(schema)).schema(schema, "#"))


class _Form:
    __slots__ = ("_begins", "_units")

    def __init__(self, begins: Callable[[Schema, str], bool], units: frozenset[tuple[int, int]]) -> None:
        self._begins = begins
        self._units = units

    def schema(self, value: object, place: str) -> object:
        if isinstance(value, list):
            return [self.schema(one, f"{place}/{i}") for i, one in enumerate(cast("list[object]", value))]
        if not isinstance(value, dict):
            return value
        node = cast("Schema", value)
        kept = {
            key: inner if key in DATA else self._inner(key, inner, f"{place}/{_escaped(key)}")
            for key, inner in node.items()
        }
        if isinstance(name := kept.get("format"), str) and name not in FORMATS:
            del kept["format"]
        _check_pattern(node.get("pattern"), f"{place}/pattern")
        _check_count(node, place)
        kept = _without_excluded(kept, self._units, place)
        found = _with_wide_data(kept, place)
        if found is kept:
            _check_data(node, place)
            found = _bounded(kept, place)
        if found is not kept:
            return found
        if isinstance(patterns := node.get("patternProperties"), dict):
            for pattern in cast("Schema", patterns):
                _check_pattern(pattern, f"{place}/patternProperties")
            if not self._begins(*_with_names_only(kept)):
                kept = self._closed(kept)
        return kept

    def _inner(self, key: str, value: object, place: str) -> object:
        if key in NAMED_PARTS and isinstance(value, dict):
            members = cast("Schema", value)
            return {name: self.schema(one, f"{place}/{_escaped(name)}") for name, one in members.items()}
        return self.schema(value, place)

    def _closed(self, node: Schema) -> Schema:
        """Return an object schema that allows only named properties."""
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
        for value in leaves(node.get(keyword)):
            if isinstance(value, str) and (found := _UNWRITABLE.search(value)):
                raise ValueError(
                    f"schema {keyword} must not have characters that JSON can write as \\u only, "
                    f"got U+{ord(found[0]):04X} at {place}"
                )
            if _is_integer(value) and not _is_kept_data(value):
                raise ValueError(
                    f"schema {keyword} must have integers that are exact as 64-bit floats, "
                    f"got {_shown(value)} at {place}"
                )


def leaves(value: object) -> Iterator[object]:
    """Yield the values in a JSON value that are neither objects nor arrays."""
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
    """Raise ValueError if a pattern requires a particular control character that cannot be written.

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
    """Raise ValueError if several properties without fixed names are required: repeated names would count, too."""
    least, required, types = node.get("minProperties"), node.get("required"), node.get("type", "object")
    if "object" not in cast("str | list[str]", types):
        return
    num_named = len(cast("list[object]", required)) if isinstance(required, list) else 0
    if isinstance(least, int) and least > num_named + 1 and node.get("additionalProperties") is not False:
        raise ValueError(
            f"schema minProperties must be at most one more than the required properties where others are allowed, "
            f"got {least} at {place}/minProperties"
        )


def _with_wide_data(node: Schema, place: str) -> Schema | IntegerRange:
    """Return a node whose `const` or `enum` has no integers that the library would round: they become ranges."""
    keyword = "const" if "const" in node else "enum"
    given: object = node.get(keyword)
    values = cast("list[object]", given) if keyword == "enum" and isinstance(given, list) else [given]
    wide = [value for value in values if _is_integer(value) and not _is_kept_literal(value)]
    others = node.keys() & KEYWORDS - {keyword, "format"}
    if not wide or others - {"type"} or not _kinds(node) & {"integer", "number"}:
        return node
    for value in wide:
        _check_digits(value, keyword, place)
    parts: list[object] = [
        IntegerRange(low=value, high=value, origin=f"{keyword} {_shown(value)} at {place}") for value in wide
    ]
    if rest := [value for value in values if value not in wide]:
        parts.append(node | {"enum": rest})
        _check_data({"enum": rest}, place)
    return cast("IntegerRange", parts[0]) if len(parts) == 1 else {"anyOf": parts}


def _units_of(schema: Schema) -> frozenset[tuple[int, int]]:
    """Return the units that hold bounds with a fraction: for a positive maximum 1 and the integer below it, for a
    negative minimum -1 and the integer below its negation. `allOf` and references can combine such a bound with any
    other."""
    return frozenset(
        (-sign, floor(-sign * value))
        for node in all_objects(schema)
        for keyword, sign in _BOUNDS.items()
        if isinstance(value := node.get(keyword), float) and -sign * value > 0 and isfinite(value) and value % 1
    )


def _without_excluded(node: Schema, units: frozenset[tuple[int, int]], place: str) -> Schema:
    """Return a node in which an excluded integer is replaced by a number just after it, if the other bound may lie in
    its unit. There the library loses the exclusion, as in 2 < x <= 2.5 and in -2.5 <= x < -2. Numbers of more digits
    are lost.

    Raises:
        ValueError: the integer has too many digits.
    """
    if "number" not in _kinds(node):
        return node
    for inclusive, sign in (("minimum", 1), ("maximum", -1)):
        keyword = f"exclusive{inclusive.capitalize()}"
        value: Any = node.get(keyword)
        if not _is_bound(value) or (sign, value * sign) not in units:
            continue
        if (num_digits := len(str(abs(int(value))))) >= _DIGITS:
            raise _inexact(node, keyword, place)
        behind = float(abs(int(value)) + Decimal(10) ** (num_digits - _DIGITS)) if value else _LEAST_NUMBER
        bounds = [behind * sign, *(one for one in [node.get(inclusive)] if _is_bound(one))]
        rest = {key: part for key, part in node.items() if key != keyword}
        node = rest | {inclusive: max(bounds, key=lambda bound: bound * sign)}
    return node


def _bounded(node: Schema, place: str) -> Schema | IntegerRange:
    """Return a node with bounds that the library handles exactly, or its replacement for a `wide_schema`.

    Raises:
        ValueError: neither exists.
    """
    kinds = _kinds(node)
    wide = [key for key in _BOUNDS if _is_bound(node.get(key)) and abs(node[key]) >= _MAX_FLOAT_INTEGER]
    if not wide:
        return node
    if "number" in kinds or "integer" not in kinds:
        for keyword in wide:
            is_inclusive = keyword in ("minimum", "maximum")
            if kinds & {"number", "integer"} and not (is_inclusive and _is_kept_number(node[keyword])):
                raise _inexact(node, keyword, place)
        return node
    low, high = _side(node, "minimum", place), _side(node, "maximum", place)
    if _is_kept_range(low, high):
        kept = {key: value for key, value in node.items() if key not in _BOUNDS}
        bounds = {key: bound for key, bound in (("minimum", low), ("maximum", high)) if bound is not None}
        return kept | bounds
    if others := node.keys() & _ON_INTEGERS:
        raise ValueError(
            f"schema {wide[0]} must be exact as a 64-bit float beside {min(others)}, "
            f"got {_shown(node[wide[0]])} at {place}/{wide[0]}"
        )
    if low is not None and high is not None and low > high:
        raise ValueError(f"schema minimum must be at most the maximum, got {_shown(low)} and {_shown(high)} at {place}")
    for keyword in wide:
        _check_digits(node[keyword], keyword, f"{place}/{keyword}")
    origin = f"{wide[0]} {_shown(node[wide[0]])} at {place}/{wide[0]}"
    found = IntegerRange(low=low, high=high, origin=origin)
    if kinds == {"integer"}:
        return found
    rest = {key: value for key, value in node.items() if key not in _BOUNDS}
    return {"anyOf": [found, rest | {"type": sorted(kinds - {"integer"})}]}


def _side(node: Schema, inclusive: str, place: str) -> int | None:
    """Return the least allowed integer, or the greatest; None: integers have no such bound."""
    exclusive, sign = (f"exclusive{inclusive.capitalize()}", _BOUNDS[inclusive])
    bounds: list[int] = []
    for keyword, step in ((inclusive, 0), (exclusive, 1)):
        value: Any = node.get(keyword)
        if not _is_bound(value):
            continue
        if isinstance(value, float) and abs(value) >= _MAX_FLOAT_INTEGER and not _is_decimal(value):
            raise _inexact(node, keyword, place)  # the text has another number than the float
        nearest = ceil(value * sign) if not step else floor(value * sign) + 1
        bounds.append(nearest * sign)
    return max(bounds, key=lambda bound: bound * sign, default=None)


def _is_bound(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _kinds(node: Schema) -> set[str]:
    """Return the types that a node allows; if it names no type, also one that has no bounds."""
    given: object = node.get("type", ["integer", "number", "other"])
    return {given} if isinstance(given, str) else set(cast("list[str]", given))


def _is_kept_range(low: int | None, high: int | None) -> bool:
    if low is not None and (abs(low) >= 2**63 or not _is_float(low) or (high is None and low >= _MAX_NUMBER)):
        return False
    if high is None or high == 2**63 - 1:
        return True  # rounded up, and limited to the range of int64
    return abs(high) < 2**63 and _is_float(high) and not (low is None and high <= -_MAX_NUMBER)


def _is_kept_number(value: float) -> bool:
    return _is_decimal(value) and abs(value) < _MAX_NUMBER


def _is_kept_data(value: int) -> bool:
    return _is_kept_literal(value) or (_is_decimal(value) and abs(value) < 10**MAX_DIGITS)


def _is_kept_literal(value: int) -> bool:
    """Return whether an integer that may stand beside a `type` is kept."""
    return abs(value) < 2**63 and _is_float(value)


def _check_digits(value: float, keyword: str, place: str) -> None:
    if (number := len(str(abs(int(value))))) > MAX_DIGITS:
        raise ValueError(f"schema {keyword} must have at most {MAX_DIGITS} digits, got {number} at {place}")


def _inexact(node: Schema, keyword: str, place: str) -> ValueError:
    return ValueError(
        f"schema {keyword} must be a number with which the grammar can compute exactly, "
        f"got {_shown(node[keyword])} at {place}/{keyword}"
    )


def _is_float(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def _is_decimal(value: float) -> bool:
    """Return whether the shortest digits of a value's float, with which the library writes it, are exact."""
    try:
        return isfinite(value) and Decimal(repr(float(value))) == value
    except OverflowError:
        return False


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:20]}...{text[-10:]}"


def _names(node: Schema) -> list[str]:
    """Return the names that the library puts in order; other names come after them."""
    required = cast("list[str]", node.get("required") or [])
    return list(dict.fromkeys([*cast("Schema", node.get("properties") or {}), *required]))


def _with_names_only(node: Schema) -> tuple[Schema, str]:
    """Return a small schema for the names of an object, and the beginning of a text with a name after all others."""
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
