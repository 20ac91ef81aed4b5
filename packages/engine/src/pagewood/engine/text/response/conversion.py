"""Values that come as text, such as those of XML parameters, converted by a tool's JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

from pagewood.engine.text.response.values import json_text

Schema: TypeAlias = Mapping[str, Any]

_MAX_DEPTH = 16
_INTEGER = re.compile(r"[-+]?[0-9]{1,4000}(?:\.0{1,100})?")
_NUMBER = re.compile(r"[-+]?(?:[0-9]{1,400}\.?[0-9]{0,400}|\.[0-9]{1,400})(?:[eE][-+]?[0-9]{1,4})?")
_BOOLEANS = {"true": "true", "1": "true", "false": "false", "0": "false"}


class Functions:
    """The functions that may be called, by name: the schemas of their arguments."""

    __slots__ = ("_schemas",)

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """Take tools as OpenAI writes them, `{"type": "function", "function": {..}}`, or their functions alone.

        Raises:
            ValueError: a tool has no name, or its parameters are not an object.
        """
        self._schemas: dict[str, Schema] = {}
        for index, tool in enumerate(tools):
            name, parameters = function_of(tool, f"tools[{index}]")
            self._schemas[name] = parameters

    def __contains__(self, name: object) -> bool:
        return name in self._schemas

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def types(self, function: str, parameter: str) -> tuple[str, ...]:
        """Return the JSON types that a parameter may have, in the order of the schema; empty if they are not known."""
        root = self._schemas.get(function, {})
        properties = resolved(root, root).get("properties")
        if not isinstance(properties, dict) or parameter not in properties:
            return ()
        return tuple(dict.fromkeys(types_of(cast("dict[str, Any]", properties)[parameter], root)))


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


def resolved(schema: object, root: Schema) -> Schema:
    """Return the schema that `schema` refers to, if it refers to a part of `root`; an empty one if it is none."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        node = cast("Schema", schema)
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return node
        if not reference.startswith("#"):
            return {}
        target: Any = root
        for key in filter(None, reference[1:].split("/")):
            key = key.replace("~1", "/").replace("~0", "~")
            target = cast("Schema", target).get(key) if isinstance(target, Mapping) else None
        schema = target
    return {}


def types_of(schema: object, root: Schema, depth: int = 0) -> Iterator[str]:
    """Yield the JSON types that a schema names, also in its alternatives."""
    if depth > _MAX_DEPTH:
        return
    node = resolved(schema, root)
    declared: Any = node.get("type")
    if isinstance(declared, str):
        yield declared
    elif isinstance(declared, list):
        yield from (item for item in cast("list[object]", declared) if isinstance(item, str))
    else:
        listed: Any = node.get("enum")
        values = cast("list[object]", listed) if isinstance(listed, list) else []
        yield from (_type_of(value) for value in [*values, *([node["const"]] if "const" in node else [])])
    for union in ("anyOf", "oneOf", "allOf"):
        choices: Any = node.get(union)
        for choice in cast("list[object]", choices) if isinstance(choices, list) else []:
            yield from types_of(choice, root, depth + 1)
    if node.get("nullable"):
        yield "null"


def _type_of(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def json_of(text: str, types: Sequence[str]) -> str:
    """Return the JSON text of a value: of the first type that it can be converted to, otherwise of a string."""
    for name in types:
        convert = _CONVERSIONS.get(name)
        converted = None if convert is None else convert(text)
        if converted is not None:
            return converted
    return json_text(text)


def _integer(text: str) -> str | None:
    text = text.strip()
    return str(int(text.partition(".")[0])) if _INTEGER.fullmatch(text) else None


def _number(text: str) -> str | None:
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        return None
    number = float(text)
    if number in (float("inf"), float("-inf")):
        return None
    return str(int(text)) if re.fullmatch(r"[-+]?[0-9]+", text) else json.dumps(number)


def _boolean(text: str) -> str | None:
    return _BOOLEANS.get(text.strip().lower())


def _null(text: str) -> str | None:
    return "null" if text.strip() in ("null", "None") else None


def _object(text: str) -> str | None:
    return _structure(text, dict)


def _array(text: str) -> str | None:
    return _structure(text, list)


def _structure(text: str, kind: type) -> str | None:
    value = any_json(text)
    return json_text(value) if isinstance(value, kind) else None


def any_json(text: str) -> object:
    """Return the value of a JSON text; None if it is none, or has a number that is not finite."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


_CONVERSIONS: dict[str, Callable[[str], str | None]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _object,
    "array": _array,
}
