"""Grammars of answers that are calls, in the format of the model, with arguments bound to the schemas of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from pagewood.engine.api import Grammar
from pagewood.engine.text.response.conversion import function_of, parameter_types
from pagewood.engine.text.response.expressions import shortest, spellings
from pagewood.engine.text.response.lark_rules import LarkRules
from pagewood.engine.text.response.marked_values import MarkedValues
from pagewood.engine.text.response.readable import Function, check_readable, written_name
from pagewood.engine.text.response.template import Capture, Field, ResponseTemplate, Writing
from pagewood.engine.text.response.text_bounds import TEXT
from pagewood.engine.text.response.text_values import string_value, string_ways, text_value
from pagewood.engine.text.response.tool_schema import ANNOTATIONS, ObjectForm, Schema, object_forms, refuse, types_of

_PLACEHOLDERS = re.compile(r"(\{name\}|\{index\})")
_MARKER = re.compile(r"[<\[][^<>\[\]]+[>\]]")


def reasoning_ends(template: ResponseTemplate) -> tuple[str, ...]:
    """Return the texts that close a section of reasoning; empty if it ends with the answer."""
    closes = [field.close for field in template.fields if field.kind == "reasoning"]
    texts = (text for close in closes if close is not None for text in spellings(close.node))
    return tuple(dict.fromkeys(filter(None, texts)))


def tool_grammar(
    template: ResponseTemplate,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    *,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> Grammar | None:
    """Return a grammar of answers in which calls have the model's format, and arguments that their schemas allow.

    Each keyword of a schema is kept or refused. Formats that write parameters one by one have only the parameters that
    the schema names; if they write strings without quotes, `format` is not enforced.

    Args:
        template: the model's format of calls.
        tools: what may be called, as in OpenAI's API.
        choice: "required": one call or, if `parallel`, several; a name: one call of that function; "auto": text and
            calls.
        parallel: whether there may be several calls.
        special_tokens: text -> id of tokens that a grammar cannot spell, because they are no text for the model.

    Returns:
        The grammar. None if no grammar is possible: for "auto", if calls have no mark of their own; otherwise, if the
        template has no field of calls, or marks that cannot be written from their expressions.

    Raises:
        ValueError: there are no tools, `choice` names none of them, a tool has no name or one that calls cannot have,
            or a schema has a keyword that calls cannot keep. The message names the tool, the path and the keyword.
    """
    functions = [Function(*function_of(tool, f"tools[{index}]"), f"tools[{index}]") for index, tool in enumerate(tools)]
    if not functions:
        raise ValueError("tools must hold at least one tool")
    if choice not in ("auto", "required"):
        functions = [function for function in functions if function.name == choice]
        parallel = False
        if not functions:
            raise ValueError(f"choice must be auto, required or the name of a tool, got {choice!r:.100}")
    field = next((field for field in template.fields if field.kind == "calls"), None)
    writing = None if field is None else field.writing or _derived(field, functions)
    if field is None or writing is None:
        return None
    lark = LarkRules(dict(special_tokens or {}))
    for function in functions:
        check_readable(template, field, writing, function, lark)
    if choice == "auto":
        return _free(template, field, writing, functions, lark, parallel=parallel)
    calls = _calls(field, writing, functions, lark, parallel=parallel)
    lead = f"({lark.literal(writing.lead)})? " if writing.lead else ""
    return lark.grammar(f"{lead}{lark.literal(writing.begin)} {calls} {lark.literal(writing.end)}")


def calls_or(answer: Grammar, calls: Grammar) -> Grammar:
    """Return the grammar of answers that are either calls or texts of another grammar.

    Args:
        answer: of answers without calls.
        calls: from `tool_grammar`.

    Raises:
        ValueError: `answer` is a structural tag in the older form, with `structures`.
    """
    elements = [_format(answer), _format(calls)]
    return Grammar.structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": elements}})


def _format(grammar: Grammar) -> Mapping[str, Any]:
    """Return the format in a structural tag that means a grammar."""
    match grammar.kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json.loads(grammar.text)}
        case "regex":
            return {"type": "regex", "pattern": grammar.text}
        case "lark":
            return {"type": "grammar", "grammar": grammar.text}
        case "choice":
            choices = [{"type": "const_string", "value": choice} for choice in json.loads(grammar.text)]
            return {"type": "or", "elements": choices}
        case "structural_tag":
            tag = json.loads(grammar.text)
            if not isinstance(tag, dict) or "format" not in tag:
                raise ValueError("a structural tag must have a format, so that calls can be an alternative to it")
            return cast("Schema", tag["format"])


def _free(
    template: ResponseTemplate, field: Field, writing: Writing, functions: Sequence[Function], lark: LarkRules,
    *, parallel: bool,
) -> Grammar | None:  # fmt: skip
    """Return a grammar of text in which the mark of a call begins one.

    Text has no special tokens, but sections of the template may begin and end with special tokens.
    """
    whole = writing.begin or writing.call
    special = lark.leading_special(whole)
    marker = _MARKER.match(whole)
    mark = special or (marker and marker[0])
    if mark is None or (special is None and lark.has_special(mark)):
        return None
    if writing.begin:
        begin = lark.literal(writing.begin[len(mark) :])
        call = f"{begin} {_calls(field, writing, functions, lark, parallel=parallel)} {lark.literal(writing.end)}"
    else:
        shortened = replace(writing, call=writing.call[len(mark) :])
        call = _calls(field, shortened, functions, lark, parallel=False)
    lead = f"({lark.literal(writing.lead)})? " if lark.has_special(writing.lead) else ""
    outside = _outside(template, mark, lark)
    call = lark.rule(f"{lark.text_before(mark, outside, lead)} {call}")
    others = [one for one in template.fields if one.kind != "calls"]
    opened = lark.special_mark([one.open for one in others])
    closed = lark.special_mark([one.close for one in others])
    last = f"({outside} | {outside} {opened} {TEXT})" if opened else outside
    other = lark.rule(f"{last} {closed}") if closed else ""
    if parallel and writing.between is not None:
        return lark.grammar(f"({call}{f' | {other}' if other else ''})* {last}")
    many = f"{other}* " if other else ""
    if not parallel:
        return lark.grammar(f"{many}({call} | {last})")
    return lark.grammar(f"{many}({call} {many})? {last}")


def _outside(template: ResponseTemplate, mark: str, lark: LarkRules) -> str:
    """Return a body for text outside of sections. It cannot begin a call without `mark`, which would not be bound."""
    forms = [one.open.node for one in template.fields if one.kind == "calls" and one.open]
    begins = {lark.beginning(text) for form in forms for text in spellings(form, {"name": "\0", "id": "\0"})} - {""}
    others = sorted(text for text in begins if not text.startswith(mark))
    return lark.text_without(others) if others else TEXT


def _calls(
    field: Field, writing: Writing, functions: Sequence[Function], lark: LarkRules, *, parallel: bool
) -> str:  # fmt: skip
    call = lark.rule(" | ".join(_call(field, writing, function, lark) for function in functions))
    if not parallel or writing.between is None:
        return call
    return f"{call} ({lark.literal(writing.between)} {call})*"


def _call(field: Field, writing: Writing, function: Function, lark: LarkRules) -> str:
    name = written_name(field, function.name)
    pieces = [
        "/[0-9]{1,3}/" if piece == "{index}" else lark.literal(name if piece == "{name}" else piece)
        for piece in _PLACEHOLDERS.split(writing.call)
    ]
    return " ".join([*pieces, _arguments(field, writing, function, lark), lark.literal(writing.call_end)])


def _arguments(field: Field, writing: Writing, function: Function, lark: LarkRules) -> str:
    schema, path = function.parameters, function.path
    if field.content == "json":
        if field.dialect.string_delims or field.dialect.unquoted_keys:
            return MarkedValues(field.dialect, lark, schema).arguments(path)
        closed = _closed(schema, path)
        return lark.json(closed, closed, path)
    types = parameter_types(schema)
    forms = object_forms(schema, schema, path)
    _check_alternatives(
        forms, schema, path, is_text=field.content != "pythonic" and "{string}" not in writing.parameter
    )
    bodies: list[str] = []
    for form in forms:
        members = [
            (_parameter(key, inner, types.get(key, ()), function, field, writing, lark), key in form.required)
            for key, inner in form.properties.items()
        ]
        if field.content == "pythonic":
            bodies.append(lark.separated(members, ", "))
        else:
            bodies.append(" ".join(body if is_required else f"({body})?" for body, is_required in members))
    return bodies[0] if len(bodies) == 1 else lark.rule(" | ".join(body or '""' for body in bodies))


def _check_alternatives(forms: Sequence[ObjectForm], root: Schema, path: str, *, is_text: bool) -> None:
    """Raise ValueError if a parameter may be one of several structures: the library follows only one at a time."""
    for key in dict.fromkeys(key for form in forms for key in form.properties):
        schemas = [form.properties[key] for form in forms if key in form.properties]
        if all(schema == schemas[0] for schema in schemas):
            continue
        for schema in schemas:
            names = types_of(schema, root) or (() if is_text else ("object",))
            if {"object", "array"} & set(names):
                raise refuse(f"{path}.properties.{key}", "several schemas in alternatives, of which one is no scalar")


def _parameter(
    key: str, schema: object, types: Sequence[str], function: Function, field: Field, writing: Writing, lark: LarkRules
) -> str:  # fmt: skip
    """Return a body for a parameter, with its key before it and, unless it is one of Python, its end after it."""
    root, path = function.parameters, f"{function.path}.properties.{key}"
    opening, end = writing.parameter.replace("{key}", key), writing.parameter_end
    if field.content == "pythonic":
        node: Schema = cast("Schema", schema) if isinstance(schema, Mapping) else {}
        is_boolean = node.keys() - ANNOTATIONS == {"type"} and types_of(node, root) == ("boolean",)
        value = '("True" | "False")' if is_boolean else lark.json(cast("object", schema), root, path)
        return f"{lark.literal(opening)} {value}"
    if "{string}" not in opening:
        return f"{lark.literal(opening)} {text_value(schema, types, root, end, lark, path)}"
    own = types_of(schema, root, nullable=False)
    forms: list[str] = []
    if own != ("string",):
        value = f"{lark.json(schema, root, path)} {lark.literal(end)}"
        forms.append(f"{lark.literal(opening.replace('{string}', 'false'))} {value}")
    if not own or "string" in own:
        try:
            text = string_value(string_ways(schema, root, path), (), end, lark, path)
            forms.append(f"{lark.literal(opening.replace('{string}', 'true'))} {text}")
        except ValueError:  # JSON keeps more of the schema
            if not forms:
                raise
    return lark.rule(" | ".join(forms))


def _closed(schema: Schema, path: str) -> Schema:
    """Return the schema of arguments: an object, without unnamed properties unless the schema allows them.

    Raises:
        ValueError: the schema allows no object.
    """
    types = types_of(schema, schema)
    if types and "object" not in types:
        raise ValueError(f"{path} must allow an object, got the type {', '.join(types)}")
    closed = {**schema, "type": "object"}
    if not closed.keys() & {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}:
        (form,) = object_forms({key: closed[key] for key in ("properties", "required") if key in closed}, schema, path)
        closed |= {"properties": form.properties, "additionalProperties": False}
    return closed


def _derived(field: Field, functions: Sequence[Function]) -> Writing | None:
    """Return the texts around calls, derived from a template's expressions without `write`; None if ambiguous."""
    if field.open is None or field.content not in ("json", "xml-inline"):
        return None
    names = {"name": "{name}", "id": "{name}"} if isinstance(field.shape.name, Capture) else {}
    for name in (function.name for function in functions):
        sample = shortest(field.open.node, dict.fromkeys(names, name))
        found = field.open.match(sample)
        if found is None or found.length != len(sample) or (names and found.groups.get("name") != name):
            return None
    opening = shortest(field.open.node, names)
    closing = "" if field.close is None else shortest(field.close.node, {})
    if field.content == "xml-inline":
        return _derived_parameters(field, opening, closing)
    shape = field.shape
    if field.name_as_key:
        return _derived_list(field, opening, "{{name}: ", "}", closing)
    if not shape.arguments:
        return Writing(call=opening, call_end=closing)
    if isinstance(shape.name, Capture) or shape.name[:-1] != shape.arguments[:-1] or not shape.name:
        return None
    outer = "".join(f"{{{json.dumps(key)}: " for key in shape.arguments[:-1])
    call = f"{outer}{{{json.dumps(shape.name[-1])}: {{name}}, {json.dumps(shape.arguments[-1])}: "
    return _derived_list(field, opening, call, "}" * len(shape.arguments), closing)


def _derived_list(field: Field, opening: str, call: str, call_end: str, closing: str) -> Writing:
    if field.each:
        return Writing(begin=f"{opening}[", call=call, call_end=call_end, between=", ", end=f"]{closing}")
    return Writing(call=opening + call, call_end=call_end + closing)


def _derived_parameters(field: Field, opening: str, closing: str) -> Writing | None:
    parameters = field.parameters
    if parameters is None or parameters.open is None or parameters.close is None:
        return None
    if "string" in parameters.open.names:
        return None
    return Writing(
        call=opening, call_end=closing,
        parameter=shortest(parameters.open.node, {"key": "{key}"}),
        parameter_end=shortest(parameters.close.node, {}),
    )  # fmt: skip
