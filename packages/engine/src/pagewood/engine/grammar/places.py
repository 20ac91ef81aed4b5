"""Finds the wrong part of a schema in a Lark grammar: the place in the remark before it, and the path within it.

A line `// "PLACE"` before a rule, with a JSON string, names the schema that the rule comes from. A client that has sent
schemas knows these places, but not the lines of the grammar made from them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

Schema: TypeAlias = dict[str, Any]
_REMARK = "// "
_ERROR = re.compile(r"at (\d+)\(\d+\): (?:failed to compile JSON schema: )?(.*?)(?:\n +\d+ \|.*)?", re.DOTALL)
_SCHEMA = re.compile(r"\w+: %json (.*)")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_MAX_TRIES = 200


def remark_before(text: str, position: int) -> str:
    """Return the place that the line before that of `position` names, with a colon; empty if it names none."""
    place = _place(text[:position].split("\n")[-2:-1])
    return "" if place is None else f"{place}: "


def located(message: str, grammar: str, reason_of: Callable[[Schema], str | None]) -> str:
    """Return an error of the library with the place of the schema that it concerns, if the grammar names it.

    Args:
        message: of the library.
        grammar: in Lark.
        reason_of: compiles a schema alone; returns its error, or None.
    """
    found = _ERROR.fullmatch(message.strip())
    lines = grammar.split("\n")
    number = int(found[1]) if found is not None else 0
    place = _place(lines[max(0, number - 2) : max(0, number - 1)])
    if found is None or place is None:
        return message
    reason = found[2]
    schema = _SCHEMA.fullmatch(lines[number - 1])
    path = "" if schema is None else _path(json.loads(schema[1]), reason, reason_of)
    return f"{place}{path}: {reason}"


def reason_in(message: str) -> str:
    """Return the reason in an error of the library, without the lines that it shows."""
    found = _ERROR.fullmatch(message.strip())
    return message if found is None else found[2]


def _place(lines: Sequence[str]) -> str | None:
    """Return the place that a line names; None if it names no place, or there is no line."""
    if not lines or not lines[0].startswith(_REMARK):
        return None
    try:
        place: object = json.loads(lines[0].removeprefix(_REMARK))
    except ValueError:
        return None
    return place if isinstance(place, str) else None


def _path(schema: Schema, reason: str, reason_of: Callable[[Schema], str | None]) -> str:
    """Return the way to the innermost part of a schema for which `reason` holds."""
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    path, node, num_tries = "", schema, 0
    while True:
        for step, child in _children(node):
            num_tries += 1
            inner = reason_of({**definitions, **child}) if num_tries <= _MAX_TRIES else None
            if inner is not None and (inner == reason or reason.startswith("Unsatisfiable")):
                path, node, reason = f"{path}.{step}", child, inner
                break
        else:
            return path


def _children(node: Schema) -> Iterator[tuple[str, Schema]]:
    for key, value in node.items():
        if key in _SINGLE:
            parts = [(key, value)]
        elif key in _LISTS and isinstance(value, list):
            parts = [(f"{key}[{index}]", one) for index, one in enumerate(cast("list[object]", value))]
        elif key in _MAPS and isinstance(value, dict):
            parts = [(f"{key}.{name}", one) for name, one in cast("Schema", value).items()]
        else:
            continue
        yield from ((step, cast("Schema", part)) for step, part in parts if isinstance(part, dict))
