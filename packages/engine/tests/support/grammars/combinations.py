"""Random combinations of the keywords of JSON Schema, each schema with few and small values so that keywords meet."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

Schema: TypeAlias = dict[str, Any]

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -3, 2.5, 12, "", "a", "ab", 'q"\\', "é", "\n", [], [1], ["a", None], {}, {"a": 1},
    {"b": "x"},
)  # fmt: skip
_NAMES = ("a", "b", "ab", "é")
_PATTERNS = ("^a$", "^(a|b)$", "b", "^[a-c]{1,3}$", "^$", "^x_", "^[^a]", r"\d", "é$", "^.$")
_FORMATS = ("date", "uuid", "ipv4", "email", "date-time", "int64", "regex", "wibble")
_NUMBERS = (-3, 0, 1, 2, 5, 10, 2.5, -0.5, 100, -12, 7.25, 2**63 - 1, -(2**63), 2**53 + 1, 2**64 - 1)
_STEPS = (1, 2, 3, 0.5, 10, 7, 0.25)
_COUNTS = (0, 1, 2, 3)


def combination(draws: random.Random, *, depth: int = 2, is_plain: bool = False) -> Schema:
    """Return a random schema of one to five keywords at each level; many allow nothing, and are to be refused.

    Args:
        draws: what is drawn.
        depth: levels of schemas in schemas.
        is_plain: whether keywords are of one type, which is said, or alone.
    """
    definitions = {name: _schema(draws, depth - 1, (), is_plain) for name in ("d", "e") if draws.random() < 0.3}
    schema = _schema(draws, depth, tuple(definitions), is_plain)
    return {**schema, "$defs": definitions} if definitions else schema


def _schema(draws: random.Random, depth: int, definitions: tuple[str, ...], is_plain: bool) -> Schema:
    def inner() -> Any:
        if draws.random() < 0.15:
            return draws.choice([True, True, False])
        return _schema(draws, depth - 1, definitions, is_plain)

    def several() -> list[Any]:
        return [inner() for _ in range(draws.randint(1, 3))]

    def named(names: tuple[str, ...]) -> Schema:
        return {name: inner() for name in draws.sample(names, k=draws.randint(1, 3))}

    def pick(*values: Any) -> Callable[[], Any]:
        return lambda: draws.choice(values)

    of_numbers = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), pick(*_NUMBERS))
    counted: dict[str, dict[str, Callable[[], Any]]] = {
        kind: dict.fromkeys((f"min{kind}", f"max{kind}"), pick(*_COUNTS)) for kind in ("Length", "Items", "Properties")
    }
    groups: dict[str, dict[str, Callable[[], Any]]] = {
        "number": {**of_numbers, "multipleOf": pick(*_STEPS)},
        "string": {"pattern": pick(*_PATTERNS), "format": pick(*_FORMATS), **counted["Length"]},
        "array": dict(counted["Items"]),
        "object": {"required": lambda: draws.sample(_NAMES, k=draws.randint(1, 2)), **counted["Properties"]},
        "any": {
            "enum": lambda: draws.sample(_VALUES, k=draws.randint(1, 4)),
            "const": pick(*_VALUES),
            **({"$ref": lambda: f"#/$defs/{draws.choice(definitions)}"} if definitions else {}),
        },
    }
    if depth > 0:
        groups["array"] |= {"items": inner, "prefixItems": several}
        groups["object"] |= {
            "properties": lambda: named(_NAMES),
            "patternProperties": lambda: named(_PATTERNS),
            "additionalProperties": inner,
        }
        groups["any"] |= {"allOf": several, "anyOf": several, "oneOf": several}
    kind = draws.choice(list(groups))  # most keywords of one kind, so that they have something to say to each other
    pool = list(groups[kind].items()) * 3 + [item for group in groups.values() for item in group.items()]
    schema: Schema = {}
    if is_plain:
        if kind != "any":
            schema["type"] = draws.choice(["integer", "number"]) if kind == "number" else kind
        names = draws.sample(list(groups[kind]), k=1 if kind == "any" else draws.randint(0, 2))
        return schema | {name: groups[kind][name]() for name in names}
    if kind != "any" and draws.random() < 0.7:
        schema["type"] = draws.choice(["integer", "number"]) if kind == "number" else kind
    elif draws.random() < 0.3:
        schema["type"] = draws.choice([draws.choice(_TYPES), draws.sample(_TYPES, k=2)])
    for name, make in draws.sample(pool, k=draws.randint(1, 4)):
        schema[name] = make()
    return dict(draws.sample(sorted(schema.items(), key=lambda item: item[0]), k=len(schema)))
