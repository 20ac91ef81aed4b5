"""Bounds on JSON schemas, see `limits`."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, TypeAlias, cast

from pagewood.engine.grammar.limits import MAX_EXPRESSIONS, MAX_LITERAL, check_expression, check_size

Schema: TypeAlias = dict[str, Any]

KEYWORDS = frozenset(
    (
        *("$ref", "$dynamicRef", "$recursiveRef", "const", "enum", "anyOf", "oneOf", "allOf", "not", "if", "then"),
        *("else", "type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern"),
        *("format", "minLength", "maxLength", "items", "prefixItems", "additionalItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems", "properties", "required"),
        *("additionalProperties", "patternProperties", "propertyNames", "minProperties", "maxProperties"),
        *("unevaluatedProperties", "dependencies", "dependentRequired", "dependentSchemas"),
    )
)
"""Keywords that determine the instances of a schema."""
NAMED_PARTS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords with schemas by name."""
DATA = frozenset(("const", "enum", "default", "examples", "x-guidance"))
"""Keywords whose values are not schemas."""
MAX_NODES = 50_000
"""Most objects and arrays in a schema."""
MAX_REFERENCES = 2_000
"""Distinct targets of `$ref`. A chain of references is compiled by recursion."""
MAX_PROPERTIES = 2_000
"""Properties of one object; compiling takes time by their square."""
MAX_PATTERN_PAIRS = 10_000
"""Pairs of a pattern of `patternProperties` with another pattern or a property. Each pair is checked for common
matches."""
MAX_MULTIPLE = 10_000
"""Sum of the distinct `multipleOf`, as integers without trailing zeros; each is a machine of that many states."""
MAX_MULTIPLES = 1_000_000
"""Product of the distinct `multipleOf`, if schemas can be combined: the machine of an intersection has that many."""
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


def check_schema(value: object, *, allows_options: bool = False) -> Schema:
    """Return `value` as a JSON schema that can be compiled in bounded time; `true` becomes `{}`.

    Args:
        value: from the JSON text.
        allows_options: whether the schema may have options of llguidance under `x-guidance`, without `lenient`.

    Raises:
        ValueError: it is not a schema, or too large in some way.
    """
    if value is True:
        return {}
    if value is False:
        raise ValueError("schema must allow something, got false")
    if not isinstance(value, dict):
        raise ValueError(f"schema must be a JSON object or a boolean, got {type(value).__name__}")
    schema = cast("Schema", value)
    _check_options(schema, allows_options=allows_options)
    num_pairs = num_characters = 0
    references: set[str] = set()
    multiples: set[int] = set()
    is_combined = False
    for node in all_objects(schema):
        is_combined |= not _COMBINING.isdisjoint(node)
        if isinstance(reference := node.get("$ref"), str):
            references.add(reference)
        if isinstance(multiple := node.get("multipleOf"), (int, float)):
            multiples.add(_significant(multiple))
        num_properties = _num_members(node, "properties")
        if num_properties > MAX_PROPERTIES:
            raise ValueError(f"schema must have at most {MAX_PROPERTIES} properties in an object, got {num_properties}")
        num_patterns = _num_members(node, "patternProperties")
        num_pairs += num_patterns * (num_patterns + num_properties)
        for literal in _literals(node):
            check_size("schema string", literal, MAX_LITERAL)
        for pattern in _patterns(node):
            check_expression("schema pattern", pattern)
            num_characters += len(pattern)
    if num_characters > MAX_EXPRESSIONS:
        raise ValueError(f"schema patterns must have at most {MAX_EXPRESSIONS} characters, got {num_characters}")
    if len(references) > MAX_REFERENCES:
        raise ValueError(f"schema must refer to at most {MAX_REFERENCES} targets, got {len(references)}")
    if num_pairs > MAX_PATTERN_PAIRS:
        raise ValueError(f"schema must have at most {MAX_PATTERN_PAIRS} pairs of patternProperties, got {num_pairs}")
    if sum(multiples) > MAX_MULTIPLE:
        raise ValueError(f"schema multipleOf must add up to at most {MAX_MULTIPLE}, got {sum(multiples)}")
    if is_combined and prod(multiples) > MAX_MULTIPLES:
        raise ValueError(
            f"schema multipleOf must have a product of at most {MAX_MULTIPLES} beside allOf, anyOf, oneOf or $ref, "
            f"got {sorted(multiples)}"
        )
    return schema


def _check_options(schema: Schema, *, allows_options: bool) -> None:
    options = schema.get("x-guidance")
    if options is None:
        return
    if not allows_options:
        raise ValueError("schema must not have options of a library, got x-guidance")
    if not isinstance(options, dict) or cast("Schema", options).get("lenient"):
        raise ValueError("x-guidance must be an object without lenient: keywords would be dropped without notice")


def all_objects(value: object) -> Iterator[Schema]:
    """Yield all objects in a JSON value, including the data of enum and const.

    Raises:
        ValueError: there are too many.
    """
    waiting: list[object] = [value]
    num_nodes = 0
    while waiting:
        node = waiting.pop()
        if not isinstance(node, (dict, list)):
            continue
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise ValueError(f"schema must have at most {MAX_NODES} objects and arrays")
        if isinstance(node, dict):
            yield (inner := cast("Schema", node))
            waiting += inner.values()
        else:
            waiting += cast("list[object]", node)


def _num_members(node: Schema, key: str) -> int:
    value = node.get(key)
    return len(cast("Schema", value)) if isinstance(value, dict) else 0


def _literals(node: Schema) -> Iterator[str]:
    """Yield the strings of `const` and `enum`, and the names of properties."""
    if isinstance(properties := node.get("properties"), dict):
        yield from cast("Schema", properties)
    waiting: list[object] = [node.get("const"), node.get("enum")]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            yield from (members := cast("Schema", value))
            waiting += members.values()
        elif isinstance(value, list):
            waiting += cast("list[object]", value)


def _patterns(node: Schema) -> Iterator[str]:
    if isinstance(pattern := node.get("pattern"), str):
        yield pattern
    if isinstance(patterns := node.get("patternProperties"), dict):
        yield from cast("Schema", patterns)


def _significant(number: float) -> int:
    """Return the digits of `number` as an integer, without zeros at its ends; 0 if it has none."""
    digits = repr(abs(number)).partition("e")[0].replace(".", "").strip("0")
    return int(digits) if digits.isdigit() else 0
