"""The OpenAPI document of all operations, made from the types by which bodies are read and answers are written."""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from typing import Any, cast, get_args, get_type_hints

import msgspec
from pydantic import BaseModel, BeforeValidator
from pydantic.json_schema import models_json_schema

from pagewood.server.http.operations import Operation
from pagewood.server.http.validation import describe_unused
from pagewood.server.protocols.common.formats import EVENTS

OPENAPI = "3.1.0"
_REF = "#/components/schemas/"
_ERRORS = {
    400: "A field is wrong, unknown, missing or not supported, or the prompt does not fit.",
    401: "The server has API keys, and the request has none of them.",
    403: "Another host, a foreign web page, or a key that does not allow it.",
    404: "There is no such model, request or response.",
    408: "The body came too slowly.",
    413: "The body is too long.",
    415: "The body is not declared as application/json, or its Content-Encoding is neither gzip nor zstd.",
    422: "The grammar of the answer reached a limit, or a state that allows no token.",
    429: "The server holds too many requests, or the key has used what it may; see Retry-After.",
    500: "A step of the engine failed.",
    503: "The engine is not ready, or the server has too many connections; see Retry-After.",
    507: "There is no memory for the model, or no room for another file.",
}
_BUSY = 503
_WITH_KEY: Any = ({"bearer": []}, {"key": []})
"""Ways to send a key, as in OpenAPI."""
_STATUSES = {
    "GET": (400, 401, 403, _BUSY),
    "DELETE": (400, 401, 403, _BUSY),
    "POST": (400, 401, 403, 404, 408, 413, 415, 422, 429, 500, _BUSY),
}


def openapi(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the document, as JSON values.

    Raises:
        ValueError: two operations, two types of bodies or two types of errors have one name.
    """
    repeated = [name for name, number in Counter(one.name for one in operations).items() if number > 1]
    if repeated:
        raise ValueError(f"operations must have names of their own, got {repeated} repeatedly")
    schemas = _bodies(operations)
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        other = [] if one.other_form is None else [one.other_form.answer, one.other_form.error]
        refs, found = _written([one.answer, one.event, *other], prefix=f"{one.name}.")
        [error], errors = _written([one.error])
        unclear = [name for name, schema in errors.items() if schemas.get(name, schema) != schema]
        if unclear:
            raise ValueError(f"types of errors must have names of their own, got {unclear}")
        schemas |= found | errors
        described = _operation(one, refs, error)
        for number, path in enumerate(one.public_paths, start=1):
            alias = (
                {}
                if number == 1
                else {
                    "operationId": f"{one.name}{number}",
                    "description": f"The same as `{one.public_paths[0]}`.",
                }
            )
            paths.setdefault(path, {})[one.method.lower()] = described | alias
    return {
        "openapi": OPENAPI,
        "info": {
            "title": "Pagewood",
            "version": version("pagewood-server"),
            "description": "A server of one language model.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in dict.fromkeys(one.tag for one in operations)],
        "paths": paths,
        "security": [{}, *_WITH_KEY],
        "components": {
            "schemas": dict(sorted(schemas.items())),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, if the server has some."},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
            },
        },
    }


def _operation(one: Operation, refs: Sequence[dict[str, Any]], error_ref: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if one.answer is not None:
        content[one.answer_type] = {"schema": refs[0] if one.other_form is None else {"anyOf": [refs[0], refs[2]]}}
    if one.other_form is not None:
        error_ref = {"anyOf": [error_ref, refs[3]]}
    if one.event is not None:
        media_type = one.stream.partition(";")[0]
        content[media_type] = {"schema": _piece(one, {"anyOf": [refs[1], error_ref]})}
    error = {"application/json": {"schema": error_ref}}
    errors = {
        str(one.busy_status if status == _BUSY else status): {"description": _ERRORS[status], "content": error}
        for status in (*_STATUSES[one.method], *one.statuses)
    }
    found: dict[str, Any] = {
        "operationId": one.name,
        "tags": [one.tag],
        "summary": (inspect.getdoc(one.endpoint) or one.name).split("\n\n")[0].replace("\n", " "),
        "responses": {
            **({"200": {"description": "The answer.", "content": content}} if content else {}),
            **dict(sorted(errors.items())),
        },
    }
    names = [part[1:-1] for part in one.public_paths[0].split("/") if part.startswith("{")]
    text = {"type": "string", "minLength": 1}
    parameters = [
        *({"name": name, "in": "path", "required": True, "schema": text} for name in names),
        *({"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()),
        *({"name": other.header, "in": "header", "schema": text} for other in (one.other_form,) if other is not None),
    ]
    if parameters:
        found["parameters"] = parameters
    if one.is_open:
        found["security"] = []
    if one.admin:
        found["description"] = "For admins: needs an admin key."
        found["security"] = _WITH_KEY
    elif one.is_overview:
        found["description"] = "On a server with keys it needs an admin key."
    if one.body is not None:
        schema = {"$ref": _REF + one.body.__name__}
        content = {"schema": schema} if one.example is None else {"schema": schema, "example": one.example}
        found["requestBody"] = {"required": True, "content": {one.body_type: content}}
    return found


def _piece(one: Operation, held: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one event or line of a stream, given that of the JSON in it."""
    if one.stream != EVENTS:
        return held
    data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": held}
    if one.last_event is not None:
        data = {"anyOf": [{"const": one.last_event}, data]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _bodies(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of all bodies and of the types in them, by name."""
    bodies = {one.body: one for one in operations if one.body is not None}
    _, found = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF + "{model}")
    schemas = cast("dict[str, Any]", found["$defs"])
    unclear = [name for name in schemas if "__" in name]
    if unclear:
        raise ValueError(f"types of bodies must have names of their own, got {unclear}")
    held = _held(bodies)
    for name, schema in schemas.items():
        _describe(schema, held.get(name))
    for body, one in bodies.items():
        describe_unused(schemas[body.__name__], neutral=one.neutral, ignored=one.ignored)
    return schemas


def _written(types: Sequence[Any], *, prefix: str = "") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the schemas of types that msgspec writes, and those that they refer to, by name with the prefix."""
    schemas, components = msgspec.json.schema_components(types, ref_template=f"{_REF}{prefix}{{name}}")
    held = _held(types)
    for name, schema in components.items():
        _describe(schema, held.get(name))
    # The names of private types begin with an underscore.
    refs = json.dumps(schemas).replace(f"{_REF}{prefix}_", f"{_REF}{prefix}")
    found = json.dumps({f"{prefix}{name.removeprefix('_')}": one for name, one in components.items()})
    return json.loads(refs), json.loads(found.replace(f"{_REF}{prefix}_", f"{_REF}{prefix}"))


def _held(annotations: Iterable[Any]) -> dict[str, type]:
    """Return the models and structs in annotations and in the fields of such types, by name."""
    found: dict[str, type] = {}
    pending = list(annotations)
    while pending:
        one = pending.pop()
        pending += get_args(one)
        if isinstance(one, BeforeValidator):
            pending.append(one.json_schema_input_type)
        if not isinstance(one, type) or one.__name__ in found:
            continue
        if issubclass(one, BaseModel):
            for field in one.model_fields.values():
                pending += [field.annotation, *field.metadata]
        elif issubclass(one, msgspec.Struct):
            pending += get_type_hints(one).values()
        else:
            continue
        found[one.__name__] = one
    return found


def _describe(schema: dict[str, Any], owner: type | None) -> None:
    """Describe the fields of a schema by their docstrings, and leave out titles that repeat their names."""
    if owner is None:
        return
    texts = _docstrings(owner)
    aliases: dict[str, str] = {}
    if issubclass(owner, BaseModel):
        aliases = {field.alias or name: name for name, field in owner.model_fields.items()}
    properties: dict[str, Any] = schema.get("properties", {})
    for name, field in properties.items():
        field.pop("title", None)
        text = texts.get(aliases.get(name, name))
        if text:
            field.setdefault("description", text)


def _docstrings(owner: type) -> dict[str, str]:
    """Return the text below each field of a class and of the classes that it extends, by the name of the field."""
    found: dict[str, str] = {}
    for one in reversed(owner.__mro__):
        if not one.__module__.startswith("pagewood."):
            continue
        for line, below in pairwise(_classes(one.__module__)[one.__name__].body):
            match line, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = inspect.cleandoc(text).replace("\n", " ")
                case _:
                    pass
    return found


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Return the classes of a module of ours, by name."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {one.name: one for one in tree.body if isinstance(one, ast.ClassDef)}
