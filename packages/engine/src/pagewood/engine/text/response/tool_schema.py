"""The schema of a tool by single parameters: the forms that its arguments may have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

Schema: TypeAlias = Mapping[str, Any]

MAX_DEPTH = 16
"""Levels of references and alternatives."""
_MAX_FORMS = 64
ALL_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "nullable"),
        *("$schema", "$id", "$defs", "definitions", "$anchor", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
"""Keywords that restrict nothing."""
_OF_ANY = frozenset(("not", "if", "then", "else", "$dynamicRef", "$recursiveRef"))
_OF_OBJECTS = frozenset(
    (
        *("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies"),
        *("unevaluatedProperties", "enum", "const"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectForm:
    """One of the forms that an object may have, with the properties that its schema names."""

    properties: Mapping[str, object] = field(default_factory=dict[str, object])
    """Their schemas, by name."""
    required: frozenset[str] = frozenset()
    is_closed: bool = False
    """Whether the schema forbids others."""
    fewest: int = 0
    most: int | None = None


def pointed(reference: str, root: Schema) -> object:
    """Return the part of `root` that a reference names.

    Raises:
        KeyError: it names no part of `root`.
    """
    target: Any = root
    if reference not in ("#", "#/"):
        if not reference.startswith("#/"):
            raise KeyError(reference)
        for key in unquote(reference[2:]).split("/"):
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list):
                items = cast("list[object]", target)
                if not key.isdecimal() or int(key) >= len(items):
                    raise KeyError(reference)
                target = items[int(key)]
            elif isinstance(target, Mapping):
                target = cast("Schema", target)[key]
            else:
                raise KeyError(reference)
    return target


def node_at(path: str, schema: object, depth: int) -> Schema:
    """Return a part of a schema that is an object; raises a ValueError for another, or one that is too deep."""
    if not isinstance(schema, Mapping):
        raise ValueError(f"{path} must be a JSON schema, got {schema!r:.100}")
    if depth > MAX_DEPTH:
        raise ValueError(f"{path} must refer at most {MAX_DEPTH} levels deep")
    return cast("Schema", schema)


def resolved(schema: object, root: Schema) -> Schema:
    """Return a schema, or the part of `root` that it refers to; an empty schema if this is not a schema."""
    for _ in range(MAX_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        node = cast("Schema", schema)
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return node
        try:
            schema = pointed(reference, root)
        except KeyError:
            return {}
    return {}


def types_of(schema: object, root: Schema, *, nullable: bool = True) -> tuple[str, ...]:
    """Return the JSON types that a schema allows, in its order; empty if it does not restrict them.

    Args:
        schema: a part of `root`.
        root: has what it refers to.
        nullable: whether OpenAPI's `nullable` counts.
    """
    return tuple(_types(schema, root, 0, nullable) or ())


def _types(schema: object, root: Schema, depth: int, nullable: bool) -> list[str] | None:
    """Return the types that a schema allows; None: all."""
    if depth > MAX_DEPTH or not isinstance(schema, Mapping):
        return None
    node = cast("Schema", schema)
    found: list[str] | None = None
    declared: Any = node.get("type")
    if isinstance(declared, (str, list)):
        names = [declared] if isinstance(declared, str) else cast("list[object]", declared)
        found = list(dict.fromkeys(name for name in names if isinstance(name, str)))
    listed = constants(node)
    if listed is not None:
        found = _both(found, list(dict.fromkeys(map(type_of, listed))))
    reference: Any = node.get("$ref")
    if isinstance(reference, str):
        with suppress(KeyError):
            found = _both(found, _types(pointed(reference, root), root, depth + 1, nullable))
    for one in _schemas(node, "allOf"):
        found = _both(found, _types(one, root, depth + 1, nullable))
    for union in ("anyOf", "oneOf"):
        choices = [_types(one, root, depth + 1, nullable) for one in _schemas(node, union) if one is not False]
        if choices and None not in choices:
            together = [name for choice in choices for name in choice or ()]
            found = _both(found, list(dict.fromkeys(together)))
    if nullable and node.get("nullable") and found is not None and "null" not in found:
        found = [*found, "null"]
    return found


def _both(one: list[str] | None, other: list[str] | None) -> list[str] | None:
    """Return the types that two schemas allow."""
    if one is None or other is None:
        return one if other is None else other
    return [
        name
        for name in dict.fromkeys([*one, *other])
        if (name in one or (name == "integer" and "number" in one))
        and (name in other or (name == "integer" and "number" in other))
    ]


def constants(node: Schema) -> list[object] | None:
    """Return the values that a schema lists; None: it has no list."""
    listed: Any = [node["const"]] if "const" in node else node.get("enum")
    return cast("list[object]", listed) if isinstance(listed, list) else None


def type_of(value: object) -> str:
    """Return the JSON type of a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def is_of(value: object, types: Sequence[str]) -> bool:
    """Return whether a value is of one of some JSON types."""
    name = type_of(value)
    return name in types or (name == "integer" and "number" in types)


def object_forms(schema: object, root: Schema, path: str) -> list[ObjectForm]:
    """Return the forms that an object may have, each with every required property among its properties.

    A schema without `additionalProperties` allows other properties, but they are in no form.

    Args:
        schema: a part of `root`.
        root: has what it refers to.
        path: of the schema, for messages.

    Raises:
        ValueError: a keyword cannot be expressed by the names of properties and their schemas, or nothing is allowed.
    """
    found = [form for one in _forms(schema, root, path, 0) if (form := _completed(one, path)) is not None]
    if not found:
        raise ValueError(f"{path} must allow an object, got a schema that allows none")
    return found


def refuse(path: str, keyword: str) -> ValueError:
    """Return the error of a keyword that the form of a model's calls cannot keep."""
    return ValueError(f"{path} must have keywords that calls of this model can keep, got {keyword}")


def check_all_types(node: Schema, path: str) -> None:
    """Raise ValueError if a schema has a keyword for values of any type that no form keeps."""
    for keyword in node:
        if keyword in _OF_ANY:
            raise refuse(path, keyword)


def _forms(schema: object, root: Schema, path: str, depth: int) -> list[ObjectForm]:
    if isinstance(schema, bool):
        return [ObjectForm()] if schema else []
    node = node_at(path, schema, depth)
    declared: Any = node.get("type", "object")
    if declared != "object" and not (isinstance(declared, list) and "object" in declared):
        return []
    check_all_types(node, path)
    for keyword in node:
        if keyword in _OF_OBJECTS and not (keyword == "unevaluatedProperties" and isinstance(node[keyword], bool)):
            raise refuse(path, keyword)
    ways = [_own_form(node, path)]
    for inner_path, choices in _parts(node, root, path):
        inner = [_forms(one, root, where, depth + 1) for where, one in choices]
        if inner_path.endswith("oneOf") and sum(map(bool, inner)) > 1:
            raise refuse(path, "oneOf")
        options = [form for forms in inner for form in forms]
        ways = [both for one in ways for other in options if (both := _intersected(one, other)) is not None]
        if len(ways) > _MAX_FORMS:
            raise ValueError(f"{path} must have at most {_MAX_FORMS} alternatives of its properties, got {len(ways)}")
    return ways


def _parts(node: Schema, root: Schema, path: str) -> Iterable[tuple[str, list[tuple[str, object]]]]:
    """Yield the schemas that a schema is combined with: alternatives by place, each with its own place."""
    if "$ref" in node:
        yield path, [(f"{path}.$ref", referred(node, root, path))]
    for index, one in enumerate(_schemas(node, "allOf")):
        yield f"{path}.allOf[{index}]", [(f"{path}.allOf[{index}]", one)]
    for union in ("anyOf", "oneOf"):
        if choices := _schemas(node, union):
            yield f"{path}.{union}", [(f"{path}.{union}[{index}]", one) for index, one in enumerate(choices)]


def referred(node: Schema, root: Schema, path: str) -> object:
    """Return the target of the `$ref` of a schema.

    Raises:
        ValueError: `root` has no such part.
    """
    reference: Any = node["$ref"]
    try:
        return pointed(reference if isinstance(reference, str) else "", root)
    except KeyError:
        raise ValueError(f"{path}.$ref must name a part of the same schema, got {reference!r:.100}") from None


def _own_form(node: Schema, path: str) -> ObjectForm:
    """Return the form of a schema without the schemas that it is combined with."""
    properties: Any = node.get("properties", {})
    if not isinstance(properties, Mapping):
        raise ValueError(f"{path}.properties must be an object, got {properties!r:.100}")
    required: Any = node.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in cast("list[object]", required)):
        raise ValueError(f"{path}.required must be a list of strings, got {required!r:.100}")
    others: Any = node.get("additionalProperties", True)
    if others not in (True, False, {}):
        raise refuse(path, "additionalProperties with a schema")
    fewest, most = node.get("minProperties", 0), node.get("maxProperties")
    for keyword, number in (("minProperties", fewest), ("maxProperties", most)):
        if number is not None and (not isinstance(number, int) or number < 0):
            raise ValueError(f"{path}.{keyword} must be a number of properties, got {number!r:.100}")
    return ObjectForm(
        properties=cast("Schema", properties),
        required=frozenset(cast("list[str]", required)),
        is_closed=others is False,
        fewest=fewest,
        most=most,
    )


def _intersected(one: ObjectForm, other: ObjectForm) -> ObjectForm | None:
    """Return the form of objects that have both forms; None if there are none."""
    names = [
        key
        for key in dict.fromkeys([*one.properties, *other.properties])
        if (key in one.properties or not one.is_closed) and (key in other.properties or not other.is_closed)
    ]
    required = one.required | other.required
    schemas = {
        key: [form.properties[key] for form in (one, other) if key in form.properties and form.properties[key] != {}]
        for key in names
    }
    is_closed = one.is_closed or other.is_closed
    if is_closed and not required.issubset(names):
        return None
    bounds = [most for most in (one.most, other.most) if most is not None]
    return ObjectForm(
        properties={key: reduce(_all_of, found, cast("object", {})) for key, found in schemas.items()},
        required=required,
        is_closed=is_closed,
        fewest=max(one.fewest, other.fewest),
        most=min(bounds, default=None),
    )


def _all_of(one: object, other: object) -> object:
    return other if one in ({}, other) else {"allOf": [one, other]}


def _completed(form: ObjectForm, path: str) -> ObjectForm | None:
    """Return a form that names all required properties and no impossible ones; None if it allows nothing.

    Raises:
        ValueError: the number of properties is restricted in a way that names cannot express.
    """
    properties = {key: schema for key, schema in form.properties.items() if schema is not False}
    missing = [key for key in sorted(form.required) if key not in properties]
    if any(form.is_closed or key in form.properties for key in missing):
        return None
    properties |= {key: {} for key in missing}
    if form.fewest > len(form.required):
        raise refuse(path, "minProperties")
    if form.most is not None and form.most < len(properties):
        raise refuse(path, "maxProperties")
    return ObjectForm(properties=properties, required=form.required)


def _schemas(node: Schema, key: str) -> Sequence[object]:
    listed: Any = node.get(key)
    return cast("list[object]", listed) if isinstance(listed, list) else ()
