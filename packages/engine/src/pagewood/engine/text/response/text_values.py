"""Values of parameters that a model writes as text, without quotes: rules for the values that their schemas allow."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pagewood.engine.text.response.conversion import CANONICAL_INTEGER, CANONICAL_NUMBER, json_of
from pagewood.engine.text.response.lark_rules import LarkRules, quoted
from pagewood.engine.text.response.text_bounds import TEXT, text_bounds
from pagewood.engine.text.response.tool_schema import (
    Schema,
    check_all_types,
    constants,
    is_of,
    node_at,
    referred,
    refuse,
    resolved,
    type_of,
    types_of,
)

_TRIMMED = r"/(\S((?s:.*)\S)?)?/"
"""A text without white space at its ends, because readers of parameters drop such white space."""
_MAX_WAYS = 64
_OTHERS = {
    "integer": CANONICAL_INTEGER,
    "number": CANONICAL_NUMBER,
    "boolean": "true|false",
    "null": "null",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
"""Texts that are read as a value of a type, and not as strings, if both are allowed."""
_BOUNDS = frozenset(
    ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "enum", "const", "allOf", "not")
)


def text_value(
    schema: object, types: Sequence[str], root: Schema, end: str, lark: LarkRules, path: str
) -> str:  # fmt: skip
    """Return a body for a value that is written as text, and its end.

    Args:
        schema: of the value.
        types: by which the value is read; empty: it is a string.
        root: holds the targets of the schema's references.
        end: what comes behind the value.
        lark: takes the rules.
        path: of the schema, for messages.

    Raises:
        ValueError: the schema has a keyword that cannot be kept; the message names it.
    """
    own = types_of(schema, root, nullable=False)
    if own and "string" not in own and "string" not in types:
        return f"{lark.json(schema, root, path)} {lark.literal(end)}"
    ways = string_ways(schema, root, path)
    others = [name for name in types if name != "string"]
    scalars = _scalars(schema, own, types, root, path)
    forms = [string_value(ways, others, end, lark, path, scalars)] if ways or scalars else []
    for name in own:
        if name in ("object", "array"):  # no string begins like these, so the library can distinguish them
            forms.append(f"{lark.json({'allOf': [schema, {'type': name}]}, root, path)} {lark.literal(end)}")
    if not forms:
        raise ValueError(f"{path} must allow a value, got a schema that allows none")
    return forms[0] if len(forms) == 1 else lark.rule(" | ".join(forms))


def _scalars(schema: object, own: Sequence[str], types: Sequence[str], root: Schema, path: str) -> list[str]:
    """Return expressions for values that are neither strings nor structures, where a string is allowed too.

    Raises:
        ValueError: the schema restricts such a value by more than its type and a list.
    """
    node: Schema = cast("Schema", schema) if isinstance(schema, Mapping) else {}
    if (listed := constants(node)) is not None:
        allowed = [value for value in listed if is_of(value, own)]
        for value in allowed:
            text = value if isinstance(value, str) else json.dumps(value)
            if (read := json_of(text, types)) != json.dumps(value, ensure_ascii=False):
                raise refuse(path, f"the constant {json.dumps(value)}, which would be read as {read}")
        return [quoted(json.dumps(value)) for value in allowed if type_of(value) not in ("string", "object", "array")]
    names = [name for name in own if name in ("integer", "number", "boolean", "null")]
    for name in names:
        if name != "null" and not _is_free(node, name, root):
            raise refuse(path, f"bounds of the type {name} beside a string")
    return [f"/{_OTHERS[name]}/" for name in names]


def _is_free(schema: object, name: str, root: Schema) -> bool:
    """Return whether a schema allows every value of a type, as far as can be seen at once."""
    node = resolved(schema, root)
    if _BOUNDS & node.keys():
        return False
    choices: Any = node.get("anyOf") or node.get("oneOf")
    if not isinstance(choices, list):
        return True
    of_type = [one for one in cast("list[object]", choices) if name in (types_of(one, root) or (name,))]
    return any(_is_free(one, name, root) for one in of_type)


def string_value(
    ways: Sequence[Sequence[Schema]], others: Sequence[str], end: str, lark: LarkRules, path: str,
    scalars: Sequence[str] = (),
) -> str:  # fmt: skip
    """Return a body for a string that is written as it is, and its end.

    Args:
        ways: its alternatives, from `string_ways`.
        others: types of values that it must not look like.
        end: what comes behind the value.
        lark: takes the rules.
        path: of the schema, for messages.
        scalars: expressions of other values that are allowed.

    Raises:
        ValueError: no value is allowed, or a constant contains the mark of the end.
    """
    if not ways and not scalars:
        raise ValueError(f"{path} must allow a value, got a schema that allows none")
    mark = end.strip()
    rest = lark.literal(end[end.index(mark) + len(mark) :])
    found = [(listed_texts(way), [bound for node in way for bound in text_bounds(node)]) for way in ways]
    literals = list(dict.fromkeys(text for texts, _ in found for text in texts or ()))
    if wrong := next((text for text in literals if mark in text), None):
        raise refuse(path, f"the constant {json.dumps(wrong)}, which has the mark {json.dumps(mark)}")
    if not others and all(texts is not None and not bounds for texts, bounds in found):
        return f"({' | '.join(map(lark.literal, literals))}) {lark.literal(end)}"
    if not others and any(texts is None and not bounds for texts, bounds in found):
        return f"{lark.text_before(mark)} {rest}"
    excluded = [rf"~/\s*({'|'.join(_OTHERS[name] for name in others)})\s*/"] if others else []
    names: list[str] = []
    for texts, bounds in found:
        listed = [f"({' | '.join(map(quoted, texts))})"] if texts else []
        trimmed = [_TRIMMED] if bounds and not texts else []
        names.append(lark.terminal(" & ".join([*listed, *bounds, *trimmed, *excluded] or [TEXT]), path=path))
    # One terminal, because the library would not see the end of one value if another value could continue.
    union = lark.terminal(" | ".join([*names, *scalars]), path=path)
    text = lark.bounded([union], without=mark, path=path)
    return f"{lark.text_before(end[: end.index(mark)] + mark, text)} {rest}"


def listed_texts(way: Sequence[Schema]) -> list[str] | None:
    """Return the strings that all schemas of a way list; None if no schema lists any."""
    found: list[str] | None = None
    for node in way:
        if (listed := constants(node)) is not None:
            texts = [value for value in listed if isinstance(value, str)]
            found = texts if found is None else [text for text in found if text in texts]
    return found


def string_ways(schema: object, root: Schema, path: str, depth: int = 0) -> list[list[Schema]]:
    """Return the alternatives of a string: for each way, the schemas whose own keywords it obeys.

    Raises:
        ValueError: a keyword that may restrict strings is not kept.
    """
    if isinstance(schema, bool):
        return [[]] if schema else []
    node = node_at(path, schema, depth)
    declared: Any = node.get("type", "string")
    if declared != "string" and not (isinstance(declared, list) and "string" in declared):
        return []
    listed = constants(node)
    if listed is not None and not any(isinstance(value, str) for value in listed):
        return []
    check_all_types(node, path)
    ways: list[list[Schema]] = [[node]]
    if "$ref" in node:
        ways = _combined(ways, string_ways(referred(node, root, path), root, f"{path}.$ref", depth + 1))
    for keyword in ("allOf", "anyOf", "oneOf"):
        choices: Any = node.get(keyword)
        inner = [
            string_ways(one, root, f"{path}.{keyword}[{index}]", depth + 1)
            for index, one in enumerate(cast("list[object]", choices) if isinstance(choices, list) else ())
        ]
        if keyword == "allOf":
            for one in inner:
                ways = _combined(ways, one)
        elif inner:
            if keyword == "oneOf" and not _exclude_each_other(inner):
                raise refuse(path, "oneOf")
            ways = _combined(ways, [way for found in inner for way in found])
    ways = [way for way in ways if listed_texts(way) != [] and _has_a_length(way)]
    if len(ways) > _MAX_WAYS:
        raise ValueError(f"{path} must have at most {_MAX_WAYS} alternatives of a string, got {len(ways)}")
    return ways


def _has_a_length(way: Sequence[Schema]) -> bool:
    """Return whether there is a length that all schemas of a way allow."""
    lows, highs = ([node[key] for node in way if isinstance(node.get(key), int)] for key in ("minLength", "maxLength"))
    return not lows or not highs or max(lows) <= min(highs)


def _combined(some: list[list[Schema]], others: list[list[Schema]]) -> list[list[Schema]]:
    return [[*one, *other] for one in some for other in others]


def _exclude_each_other(choices: Sequence[list[list[Schema]]]) -> bool:
    """Return whether some choices list different strings, so that no string is allowed by two of them."""
    some = [found for found in choices if found]
    listed = [[listed_texts(way) for way in found] for found in some]
    if len(some) < 2:
        return True
    texts = [{text for one in found for text in one or ()} for found in listed]
    return all(None not in found for found in listed) and sum(map(len, texts)) == len(set[str]().union(*texts))
