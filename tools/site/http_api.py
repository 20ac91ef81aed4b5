"""The page of the HTTP interface, from the OpenAPI document that a server sends at `/openapi.json`."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

from pagewood.server.documentation.openapi import openapi
from pagewood.server.http.app import Frontend

_REF = "#/components/schemas/"


def document() -> dict[str, Any]:
    """Return the OpenAPI document; no server runs, so a stand-in takes the place of what its endpoints would call."""
    stand_in: Any = MagicMock()
    frontend = Frontend(models=stand_in, limits=stand_in, access=stand_in, connections=stand_in, metrics=stand_in)
    return openapi(frontend.all_operations())


def http_page() -> str:
    """Return the page as Markdown."""
    found = document()
    schemas: dict[str, Any] = found["components"]["schemas"]
    lines = [
        "# HTTP interface", "",
        "Made from the OpenAPI document, which a running server has at `/openapi.json`; its `/docs` shows the same, "
        "with a form to try each operation.", "",
    ]  # fmt: skip
    for tag in (one["name"] for one in found["tags"]):
        lines += [f"## {tag}", ""]
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                if tag in operation["tags"]:
                    lines += _operation(f"{method.upper()} {path}", operation, schemas)
    return "\n".join(lines)


def _operation(title: str, operation: dict[str, Any], schemas: dict[str, Any]) -> list[str]:
    lines = [f"### `{title}`", "", _cell(operation.get("description") or operation["summary"]), ""]
    if operation.get("description", "").startswith("The same as"):
        return lines
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    properties = _resolved(body, schemas).get("properties", {})
    required = _resolved(body, schemas).get("required", ())
    if properties:
        lines += ["| field | type | |", "|---|---|---|"]
        for name, schema in properties.items():
            mark = " (required)" if name in required else ""
            lines.append(f"| `{name}`{mark} | {_cell(_type(schema))} | {_cell(schema.get('description', ''))} |")
        lines.append("")
    parameters = operation.get("parameters", ())
    if parameters:
        lines += ["| parameter | in | |", "|---|---|---|"]
        lines += [f"| `{one['name']}` | {one['in']} | {_cell(one.get('description', ''))} |" for one in parameters]
        lines.append("")
    return lines


def _resolved(schema: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    ref = schema.get("$ref", "")
    return schemas[ref.removeprefix(_REF)] if ref.startswith(_REF) else schema


def _type(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return schema["$ref"].removeprefix(_REF)
    if "const" in schema:
        return repr(schema["const"])
    if "enum" in schema:
        return " or ".join(repr(value) for value in schema["enum"])
    parts = schema.get("anyOf") or schema.get("oneOf")
    if parts:
        return " or ".join(dict.fromkeys(_type(part) for part in parts))
    kind: str | list[str] = schema.get("type", "any")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    return " or ".join(kind) if isinstance(kind, list) else kind


def _cell(text: str) -> str:
    for sign in "<>|":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ").replace("[", "\\[").replace("{", "\\{")
