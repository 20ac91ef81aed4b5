"""Values that come as text, such as those of XML parameters, converted by a tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from pagewood.engine.text.response.tool_schema import Schema, object_forms, resolved, types_of
from pagewood.engine.text.response.values import json_text

CANONICAL_INTEGER = r"0|-?[1-9][0-9]*"
CANONICAL_NUMBER = rf"{CANONICAL_INTEGER}|-?(?:0|[1-9][0-9]*)\.[0-9]*[1-9]"
"""Numbers as JSON writes them, without needless digits."""
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,4000})(?:\.[0-9]{1,400})?(?:[eE][-+]?[0-9]{1,4})?")
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


class Functions:
    """The functions that may be called, by name: the schemas of their arguments."""

    __slots__ = ("_schemas", "_types")

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Take tools as OpenAI writes them, `{"type": "function", "function": {..}}`, or their functions alone.

        Raises:
            ValueError: a tool has no name, or its parameters are not an object.
        """
        self._schemas: dict[str, Schema] = {}
        self._types: dict[str, dict[str, tuple[str, ...]]] = {}  # written by: types
        for index, tool in enumerate(tools):
            name, parameters = function_of(tool, f"tools[{index}]")
            self._schemas[name] = parameters

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def types(self, function: str, parameter: str) -> tuple[str, ...]:
        """Return the JSON types that a parameter may have, in the order of the schema; empty if they are not known."""
        if function not in self._types:
            self._types[function] = parameter_types(self._schemas.get(function, {}))
        return self._types[function].get(parameter, ())


def parameter_types(root: Schema) -> dict[str, tuple[str, ...]]:
    """Return the JSON types that the schema of arguments allows for each parameter; empty if any type is allowed.

    If one form of the arguments allows any type and another form some types, the parameter may be a string in the
    first.
    """
    properties: Any = resolved(root, root).get("properties")
    named: list[Schema] = [cast("Schema", properties)] if isinstance(properties, Mapping) else []
    with suppress(ValueError):
        named = [form.properties for form in object_forms(root, root, "")]
    found: dict[str, list[str]] = {}
    for schemas in named:
        for key, schema in schemas.items():
            found.setdefault(key, []).extend(types_of(schema, root) or ("",))
    return {
        key: () if not any(types) else tuple(dict.fromkeys(name or "string" for name in types))
        for key, types in found.items()
    }


def function_of(tool: Mapping[str, Any], where: str) -> tuple[str, Schema]:
    """Return the name of a tool's function, and the schema of its arguments.

    Raises:
        ValueError: it has no name, or its parameters are not an object.
    """
    function: Any = tool.get("function", tool)
    if not isinstance(function, Mapping):
        raise ValueError(f"{where}.function must be an object, got {function!r:.100}")
    fields = cast("Schema", function)
    name, parameters = fields.get("name"), fields.get("parameters")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where} must have a function with a name, got {name!r:.100}")
    if parameters is None:
        return name, {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping):
        raise ValueError(f"{where}.function.parameters must be a JSON schema, got {parameters!r:.100}")
    return name, cast("Schema", parameters)


def json_of(text: str, types: Sequence[str]) -> str:
    """Return the JSON text of a value that is written as `text`, given its possible types; nothing is rounded.

    If a string is allowed, a text is another type only if JSON would write it in the same way: `5` and `null`, but not
    `05`, `1.10` or `None`. If no string is allowed, a number passes unchanged, and Python's words are read. A text that
    fits no type is a string.
    """
    if "string" in types:
        is_other = any(name in types and is_exact(text) for name, is_exact in _EXACT.items())
        return as_written(text) if is_other else json_text(text)
    stripped = text.strip()
    for name in types:
        if (found := _lenient(stripped, name, types)) is not None:
            return found
    return json_text(text)


def _lenient(text: str, name: str, types: Sequence[str]) -> str | None:
    """Return the JSON text of a value of one type that is written as `text`; None if `text` is not of this type."""
    match name:
        case "integer":
            return text if _NUMBER.fullmatch(text) and _is_whole(text) else None
        case "number":
            return text if _NUMBER.fullmatch(text) else None
        case "boolean" if text in ("0", "1"):
            return None if {"integer", "number"} & set(types) else _BOOLEANS[text]
        case "boolean":
            return _BOOLEANS.get(text.lower())
        case "null":
            return "null" if text in ("null", "None") else None
        case "object" | "array":
            return as_written(text) if _is_structure(text, dict if name == "object" else list) else None
        case _:
            return None


def _is_whole(number: str) -> bool:
    return number.lstrip("-").isdecimal() or float(number).is_integer()


def _is_structure(text: str, kind: type) -> bool:
    return text.lstrip()[:1] in ("{", "[") and isinstance(any_json(text), kind)


def as_written(text: str) -> str:
    """Return a JSON text unchanged, except for halves of surrogate pairs, which are replaced."""
    return json_text(json.loads(text)) if "\\ud" in text.lower() else text.strip()


def any_json(text: str) -> object:
    """Return the value of a JSON text; None if it is not JSON. A number beyond the range of floats is infinite."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_EXACT: Mapping[str, Callable[[str], object]] = {
    "integer": re.compile(CANONICAL_INTEGER).fullmatch,
    "number": re.compile(CANONICAL_NUMBER).fullmatch,
    "boolean": ("true", "false").__contains__,
    "null": ("null",).__contains__,
    "object": lambda text: _is_structure(text, dict),
    "array": lambda text: _is_structure(text, list),
}
"""Tests whether a text is the JSON of a value of a type, as JSON would write it."""
