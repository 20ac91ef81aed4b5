"""Random JSON schemas, each with a function that makes an instance of it without looking at a grammar.

In the spirit of JSONSchemaBench (Geng et al., 2025): types, enums, constants, ranges, lengths, patterns, formats,
required and optional properties, nested arrays and objects, unions, references and recursion.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]
Instance: TypeAlias = Callable[[], Any]
"""Makes an instance; properties come in the order in which the grammar has them."""

_WORDS = ["id", "name", "kind", "size", "tags", "owner", "url", "price", "note", "items", "type", "properties"]
_PATTERNS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("^[a-z]{2,8}$", lambda r: "".join(r.choices(string.ascii_lowercase, k=r.randint(2, 8)))),
    ("^[A-Z]{3}-[0-9]{4}$", lambda r: f"{''.join(r.choices(string.ascii_uppercase, k=3))}-{r.randint(0, 9999):04}"),
    ("^(red|green|blue)$", lambda r: r.choice(["red", "green", "blue"])),
    ("^#[0-9a-f]{6}$", lambda r: f"#{r.randrange(1 << 24):06x}"),
    ("^v[0-9]+(\\.[0-9]+){1,2}$", lambda r: f"v{r.randint(0, 99)}.{r.randint(0, 9)}"),
    ("^\\+?[0-9]{6,12}$", lambda r: "+" * r.randint(0, 1) + str(r.randint(10**6, 10**11))),
]
_FORMATS: list[tuple[str, Callable[[random.Random], str]]] = [
    ("date", lambda r: f"{r.randint(1990, 2030)}-{r.randint(1, 12):02}-{r.randint(1, 28):02}"),
    ("uuid", lambda r: f"{r.randrange(1 << 32):08x}-{r.randrange(1 << 16):04x}-4abc-9abc-{r.randrange(1 << 48):012x}"),
    ("ipv4", lambda r: ".".join(str(r.randint(0, 255)) for _ in range(4))),
    ("email", lambda r: f"user{r.randint(0, 99)}@example.com"),
    ("date-time", lambda r: f"2026-0{r.randint(1, 9)}-1{r.randint(0, 9)}T1{r.randint(0, 9)}:00:00Z"),
]
_TEXTS = ["", "plain", 'a "quoted" text', "tab\tand\nline", "naïve café", "日本語", "🎉 party", "back\\slash", "x" * 40]


@dataclass(frozen=True)
class Case:
    """A schema, and a function that makes instances of it."""

    schema: Schema
    instance: Instance


def case(seed: int) -> Case:
    """Return the case of this number; every fifth has the shape of a schema of real life."""
    maker = _Maker(random.Random(seed))
    if seed % 5 == 0:
        return maker.real()
    schema, instance = maker.any(depth=3)
    if maker.definitions:
        schema = {**schema, "$defs": maker.definitions}
    return Case(schema, instance)


class _Maker:
    def __init__(self, draws: random.Random) -> None:
        self.draws = draws
        self.definitions: Schema = {}

    def any(self, depth: int) -> tuple[Schema, Instance]:
        kinds = [self.string, self.integer, self.number, self.boolean, self.enum, self.constant, self.types]
        if depth > 0:
            kinds = [self.object, self.object, self.array, self.union, self.reference, self.tree, *kinds[:5]]
        return self.draws.choice(kinds)(depth)

    def string(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        match r.randint(0, 4):
            case 0:
                return {"type": "string"}, lambda: r.choice(_TEXTS)
            case 1:
                low = r.randint(0, 5)
                high = low + r.randint(0, 10)
                alphabet = string.ascii_letters + "é日🎉"
                return {"type": "string", "minLength": low, "maxLength": high}, lambda: "".join(
                    r.choices(alphabet, k=r.randint(low, high))
                )
            case 2 | 3:
                pattern, make = r.choice(_PATTERNS)
                return {"type": "string", "pattern": pattern}, lambda: make(r)
            case _:
                name, make = r.choice(_FORMATS)
                return {"type": "string", "format": name}, lambda: make(r)

    def integer(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        low = r.randint(-1000, 1000)
        high = low + r.randint(3, 5000)
        match r.randint(0, 4):
            case 0:
                return {"type": "integer"}, lambda: r.randint(-(10**6), 10**6)
            case 1:
                return {"type": "integer", "minimum": low, "maximum": high}, lambda: r.randint(low, high)
            case 2:
                schema = {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": high}
                return schema, lambda: r.randint(low + 1, high - 1)
            case 3:
                return {"type": "integer", "minimum": low}, lambda: low + r.randint(0, 10**4)
            case _:
                step = r.choice([2, 5, 7, 10, 12])
                return {"type": "integer", "multipleOf": step}, lambda: step * r.randint(-100, 100)

    def number(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        low, high = r.randint(-100, 0), r.randint(1, 100)
        if r.random() < 0.5:
            return {"type": "number"}, lambda: r.choice([0, -1.5, 2.25, 1e-7, 12345.678, -7])
        return {"type": "number", "minimum": low, "maximum": high}, lambda: r.choice([low, high, 0.5, 0])

    def boolean(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        if r.random() < 0.2:
            return {"type": "null"}, lambda: None
        return {"type": "boolean"}, lambda: r.random() < 0.5

    def enum(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        values = r.sample([*_TEXTS, 1, -2.5, None, True, ["a", 1], {"k": "v"}], k=r.randint(1, 6))
        return {"enum": values}, lambda: r.choice(values)

    def constant(self, depth: int) -> tuple[Schema, Instance]:
        value = self.draws.choice([*_TEXTS, 0, 3.5, False, {"a": [1, 2]}])
        return {"const": value}, lambda: value

    def types(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        return {"type": ["string", "null"], "maxLength": 5}, lambda: r.choice([None, "", "abc"])

    def array(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        items, make = self.any(depth - 1)
        if r.random() < 0.25:
            first, make_first = self.any(depth - 1)
            schema: Schema = {"type": "array", "prefixItems": [first], "items": items, "minItems": 1, "maxItems": 4}
            return schema, lambda: [make_first(), *(make() for _ in range(r.randint(0, 3)))]
        low = r.randint(0, 2)
        high = low + r.randint(0, 3)
        schema = {"type": "array", "items": items}
        if r.random() < 0.7:
            schema |= {"minItems": low, "maxItems": high}
        return schema, lambda: [make() for _ in range(r.randint(low, high))]

    def object(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        names = r.sample(_WORDS, k=r.randint(0, 5))
        parts = {name: self.any(depth - 1) for name in names}
        required = [name for name in names if r.random() < 0.6]
        schema: Schema = {"type": "object", "properties": {name: part for name, (part, _) in parts.items()}}
        if required:
            schema["required"] = required
        extra: Instance | None = None
        match r.randint(0, 3):
            case 0:
                schema["additionalProperties"], extra = self.any(0)
            case 1:
                pass
            case _:
                schema["additionalProperties"] = False

        def make() -> Any:
            value = {name: make() for name, (_, make) in parts.items() if name in required or r.random() < 0.5}
            return value | ({f"extra{i}": extra() for i in range(r.randint(0, 2))} if extra else {})

        return schema, make

    def union(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        if r.random() < 0.4:  # told apart by a constant, so exactly one of them fits
            parts = [self.object(depth - 1) for _ in range(r.randint(2, 3))]
            schemas = [
                {
                    "type": "object",
                    "properties": {"tag": {"const": f"t{i}"}, "value": part},
                    "required": ["tag", "value"],
                    "additionalProperties": False,
                }
                for i, (part, _) in enumerate(parts)
            ]

            def tagged() -> Any:
                i = r.randrange(len(parts))
                return {"tag": f"t{i}", "value": parts[i][1]()}

            return {"oneOf": schemas}, tagged
        parts = [self.any(depth - 1) for _ in range(r.randint(2, 3))]
        return {"anyOf": [part for part, _ in parts]}, lambda: r.choice(parts)[1]()

    def reference(self, depth: int) -> tuple[Schema, Instance]:
        schema, make = self.any(depth - 1)
        name = f"d{len(self.definitions)}"
        self.definitions[name] = schema
        return {"$ref": f"#/$defs/{name}"}, make

    def tree(self, depth: int) -> tuple[Schema, Instance]:
        r = self.draws
        label, make = self.string(0)
        name = f"d{len(self.definitions)}"
        here = {"$ref": f"#/$defs/{name}"}
        self.definitions[name] = {
            "type": "object",
            "properties": {"label": label, "children": {"type": "array", "items": here, "maxItems": 3}},
            "required": ["label"],
            "additionalProperties": False,
        }

        def grow(depth: int) -> Any:
            children = [grow(depth - 1) for _ in range(r.randint(0, 2))] if depth > 0 else []
            return {"label": make()} | ({"children": children} if children else {})

        return here, lambda: grow(2)

    def real(self) -> Case:
        """Return a schema as people write them, with the names and the annotations of real ones."""
        r = self.draws
        text: Schema = {"type": "string", "description": "free text"}
        match r.randint(0, 4):
            case 0:  # the arguments of a tool
                schema: Schema = {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "title": "get_weather",
                    "type": "object",
                    "properties": {
                        "location": {**text, "examples": ["Paris, France"]},
                        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                        "days": {"type": "integer", "minimum": 1, "maximum": r.randint(2, 14)},
                    },
                    "required": ["location"],
                    "additionalProperties": False,
                }
                return Case(schema, lambda: {"location": r.choice(_TEXTS), "unit": "celsius", "days": 1})
            case 1:  # what pydantic writes
                schema = {
                    "$defs": {
                        "Step": {
                            "title": "Step",
                            "type": "object",
                            "properties": {
                                "explanation": {"title": "Explanation", "type": "string"},
                                "output": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
                            },
                            "required": ["explanation", "output"],
                        }
                    },
                    "title": "Reasoning",
                    "type": "object",
                    "properties": {
                        "steps": {"type": "array", "items": {"$ref": "#/$defs/Step"}, "maxItems": r.randint(1, 4)},
                        "final_answer": {"title": "Final Answer", "type": "string"},
                    },
                    "required": ["steps", "final_answer"],
                }
                return Case(
                    schema,
                    lambda: {
                        "steps": [{"explanation": "e", "output": r.choice([None, "o"])}],
                        "final_answer": r.choice(_TEXTS),
                    },
                )
            case 2:  # an event of a log
                schema = {
                    "type": "object",
                    "properties": {
                        "timestamp": {"type": "string", "format": "date-time"},
                        "level": {"enum": ["debug", "info", "warning", "error"]},
                        "http": {
                            "type": "object",
                            "properties": {
                                "status": {"type": "integer", "minimum": 100, "maximum": 599},
                                "path": {"type": "string", "pattern": "^/[a-z/]*$"},
                            },
                            "required": ["status", "path"],
                        },
                        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    },
                    "required": ["timestamp", "level"],
                }
                return Case(
                    schema,
                    lambda: {
                        "timestamp": "2026-11-22T10:00:00Z",
                        "level": "info",
                        "http": {"status": r.randint(100, 599), "path": "/a/b"},
                        "labels": {"k": r.choice(_TEXTS)},
                    },
                )
            case 3:  # entities that were found in a text
                kinds = r.sample(["person", "place", "date", "money", "product"], k=3)
                schema = {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "text": {"type": "string", "minLength": 1},
                            "kind": {"enum": kinds},
                            "span": {
                                "type": "array",
                                "prefixItems": [{"type": "integer", "minimum": 0}, {"type": "integer", "minimum": 0}],
                                "minItems": 2,
                                "maxItems": 2,
                            },
                            "score": {"type": "number", "minimum": 0, "maximum": 1},
                        },
                        "required": ["text", "kind", "span"],
                        "additionalProperties": False,
                    },
                    "maxItems": 10,
                }
                return Case(
                    schema, lambda: [{"text": "Ann", "kind": kinds[0], "span": [0, 3], "score": r.choice([0, 1, 0.25])}]
                )
            case _:  # one of several calls
                schema = {
                    "type": "object",
                    "properties": {
                        "calls": {
                            "type": "array",
                            "minItems": 1,
                            "items": {
                                "oneOf": [
                                    {
                                        "type": "object",
                                        "properties": {
                                            "name": {"const": name},
                                            "arguments": {
                                                "type": "object",
                                                "properties": {"q": text, "k": {"type": "integer"}},
                                                "required": ["q"],
                                                "additionalProperties": False,
                                            },
                                        },
                                        "required": ["name", "arguments"],
                                        "additionalProperties": False,
                                    }
                                    for name in ("search", "open", "edit")
                                ]
                            },
                        }
                    },
                    "required": ["calls"],
                    "additionalProperties": False,
                }
                return Case(
                    schema,
                    lambda: {"calls": [{"name": r.choice(["search", "edit"]), "arguments": {"q": r.choice(_TEXTS)}}]},
                )
