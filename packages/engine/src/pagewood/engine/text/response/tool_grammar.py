"""Grammars of answers that are calls, in the form of the model, with arguments bound to the schemas of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, cast

from pagewood.engine.api import Grammar
from pagewood.engine.text.response.conversion import Schema, function_of, resolved, types_of
from pagewood.engine.text.response.expressions import Expression, shortest, spellings
from pagewood.engine.text.response.template import Capture, Field, ResponseTemplate, Writing
from pagewood.engine.text.response.text_bounds import TEXT, text_bounds

Function: TypeAlias = tuple[str, Schema]

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PLACEHOLDERS = re.compile(r"(\{name\}|\{index\})")
_MARKER = re.compile(r"[<\[][^<>\[\]]+[>\]]")
_MAX_DEPTH = 16
_TRIMMED = r"/(\S((?s:.*)\S)?)?/"
"""A text without white space at its ends, which readers of parameters do not take for a part of it."""


def reasoning_end(template: ResponseTemplate) -> str | None:
    """Return the text that closes a section of reasoning; None if there is none, or it is not one text."""
    return next((field.close_text for field in template.fields if field.kind == "reasoning"), None)


def tool_grammar(
    template: ResponseTemplate,
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    *,
    parallel: bool = True,
    special_tokens: Mapping[str, int] | None = None,
) -> Grammar | None:
    """Return a grammar of answers in which calls have the form of the model, and arguments that their schemas allow.

    Where a format writes strings without quotes, a string has the bounds of `enum`, `const`, `pattern`, `minLength` and
    `maxLength`, if it cannot be anything else than a string; of other keywords (`format`) it has none. There an object
    has no parameters that its schema does not name, unless it says `additionalProperties`.

    Args:
        template: how the model writes calls.
        tools: what may be called, as in OpenAI's API.
        choice: "required": one call or, if `parallel`, several; a name: one call of that function; "auto": text and
            calls.
        parallel: whether there may be several calls.
        special_tokens: text -> id of the tokens that a grammar cannot spell, because they are no text for the model.

    Returns:
        The grammar. None if there is none: for "auto", if calls have no mark of their own; otherwise, if the template
        has no field of calls, or one whose marks cannot be written from their expressions.

    Raises:
        ValueError: there are no tools, `choice` is none of them, or a tool has no name.
    """
    functions = [function_of(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if not functions:
        raise ValueError("tools must hold at least one tool")
    if choice not in ("auto", "required"):
        functions = [function for function in functions if function[0] == choice]
        parallel = False
        if not functions:
            raise ValueError(f"choice must be auto, required or the name of a tool, got {choice!r:.100}")
    field = next((field for field in template.fields if field.kind == "calls"), None)
    writing = None if field is None else field.writing or _derived(field, functions)
    if field is None or writing is None:
        return None
    lark = _Lark(dict(special_tokens or {}))
    if choice == "auto":
        return _free(template, field, writing, functions, lark, parallel=parallel)
    calls = _calls(field, writing, functions, lark, parallel=parallel)
    lead = f"({lark.literal(writing.lead)})? " if writing.lead else ""
    return lark.grammar(f"{lead}{lark.literal(writing.begin)} {calls} {lark.literal(writing.end)}")


def calls_or(answer: Grammar, calls: Grammar) -> Grammar:
    """Return the grammar of answers that are either calls or what another grammar allows.

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
    template: ResponseTemplate, field: Field, writing: Writing, functions: Sequence[Function], lark: _Lark,
    *, parallel: bool,
) -> Grammar | None:  # fmt: skip
    """Return a grammar of text in which the mark of a call begins one.

    Text has no special tokens, but sections of the template may begin and end with some.
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
    outside = TEXT if special is None else _outside(template, field, lark)
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


def _outside(template: ResponseTemplate, field: Field, lark: _Lark) -> str:
    """Return text outside of sections. It does not begin a call in another form, which would not be bound."""
    forms = [one.open.node for one in template.fields if one.kind == "calls" and one is not field and one.open]
    begins = {lark.beginning(text) for form in forms for text in spellings(form, {"name": "\0", "id": "\0"})} - {""}
    return lark.text_without(sorted(begins)) if begins else TEXT


def _calls(
    field: Field, writing: Writing, functions: Sequence[Function], lark: _Lark, *, parallel: bool
) -> str:  # fmt: skip
    call = lark.rule(" | ".join(_call(field, writing, function, lark) for function in functions))
    if not parallel or writing.between is None:
        return call
    return f"{call} ({lark.literal(writing.between)} {call})*"


def _call(field: Field, writing: Writing, function: Function, lark: _Lark) -> str:
    name = (
        function[0] if isinstance(field.shape.name, Capture) or field.content == "pythonic" else json.dumps(function[0])
    )
    pieces = [
        "/[0-9]{1,3}/" if piece == "{index}" else lark.literal(name if piece == "{name}" else piece)
        for piece in _PLACEHOLDERS.split(writing.call)
    ]
    return " ".join([*pieces, _arguments(field, writing, function[1], lark), lark.literal(writing.call_end)])


def _arguments(field: Field, writing: Writing, schema: Schema, lark: _Lark) -> str:
    if field.content == "json":
        if field.dialect.string_delims or field.dialect.unquoted_keys:
            return _Marked(field, lark, schema).object(schema)
        return lark.json(_closed(schema), schema)
    members: list[tuple[str, bool]] = []
    for key, inner, is_required in _properties(schema):
        if field.content == "pythonic":
            value = '("True" | "False")' if list(types_of(inner, schema)) == ["boolean"] else lark.json(inner, schema)
            members.append((f"{lark.literal(writing.parameter.replace('{key}', key))} {value}", is_required))
        else:
            members.append((_parameter(key, inner, schema, writing, lark), is_required))
    if field.content == "pythonic":
        return lark.separated(members, ", ")
    return " ".join(body if is_required else f"({body})?" for body, is_required in members)


def _parameter(key: str, schema: object, root: Schema, writing: Writing, lark: _Lark) -> str:
    """Return a parameter that is written with its key before it and its end behind it."""
    opening, end = writing.parameter.replace("{key}", key), writing.parameter_end
    if "{string}" not in opening:
        return f"{lark.literal(opening)} {_text_value(schema, root, end, lark)}"
    types = set(types_of(schema, root))
    forms: list[str] = []
    if not types or "string" in types:
        text = _text_value(schema, root, end, lark)
        forms.append(f"{lark.literal(opening.replace('{string}', 'true'))} {text}")
    if types != {"string"}:
        value = f"{lark.json(schema, root)} {lark.literal(end)}"
        forms.append(f"{lark.literal(opening.replace('{string}', 'false'))} {value}")
    return lark.rule(" | ".join(forms))


def _text_value(schema: object, root: Schema, end: str, lark: _Lark) -> str:
    """Return the value of a parameter that is written as text, and its end."""
    types = list(dict.fromkeys(types_of(schema, root)))
    if types and "string" not in types:
        return f"{lark.json(schema, root)} {lark.literal(end)}"
    texts = _texts(resolved(schema, root))
    if texts and types == ["string"]:
        return f"({' | '.join(map(lark.literal, texts))}) {lark.literal(end)}"
    mark = end.strip()
    rest = lark.literal(end[end.index(mark) + len(mark) :])
    bounds = text_bounds(resolved(schema, root)) if types == ["string"] else []
    if not bounds:
        return f"{lark.text_before(mark)} {rest}"
    text = lark.bounded([*bounds, _TRIMMED], without=mark)
    return f"{lark.text_before(end[: end.index(mark)] + mark, text)} {rest}"


def _texts(schema: Schema) -> list[str]:
    """Return the strings that a schema allows, if it lists them."""
    listed: Any = [schema["const"]] if "const" in schema else schema.get("enum")
    values = cast("list[object]", listed) if isinstance(listed, list) else []
    return [value for value in values if isinstance(value, str)]


def _properties(schema: Schema) -> Iterable[tuple[str, object, bool]]:
    """Yield the keys of an object's properties, their schemas, and whether they are required."""
    node = resolved(schema, schema)
    properties: Any = node.get("properties")
    required: Any = node.get("required")
    names = cast("list[object]", required) if isinstance(required, list) else []
    for key, inner in cast("Schema", properties).items() if isinstance(properties, Mapping) else ():
        yield key, inner, key in names


def _closed(schema: Schema) -> Schema:
    """Return the schema of arguments: an object, without properties that it does not name, unless it says so."""
    closed = {"type": "object", **schema}
    if not closed.keys() & {"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"}:
        closed["additionalProperties"] = False
    return closed


class _Lark:
    """A Lark grammar in the making. Invariant: every name in a body that was returned has a rule."""

    __slots__ = ("_rules", "_special", "special_tokens")

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.special_tokens = special_tokens
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._rules: list[str] = []

    def grammar(self, body: str) -> Grammar:
        return Grammar.lark("\n".join([f"start: {body}", *self._rules]))

    def literal(self, text: str) -> str:
        """Return a body for a text; the special tokens in it are tokens."""
        pieces = [text] if self._special is None else self._special.split(text)
        return " ".join(
            f"<[{self.special_tokens[piece]}]>" if piece in self.special_tokens else _quoted(piece)
            for piece in pieces
            if piece
        )

    def has_special(self, text: str) -> bool:
        """Return whether there is a special token in a text."""
        return self._special is not None and self._special.search(text) is not None

    def leading_special(self, text: str) -> str | None:
        """Return the special token with which a text begins; None: with none."""
        found = None if self._special is None else self._special.match(text)
        return found and found[0]

    def special_mark(self, marks: Iterable[Expression | None]) -> str:
        """Return a rule for those spellings of marks that have special tokens; nothing if none has any."""
        texts = dict.fromkeys(text for mark in marks if mark is not None for text in spellings(mark.node))
        bodies = [self.literal(text) for text in texts if self.has_special(text)]
        return self.rule(" | ".join(bodies)) if bodies else ""

    def beginning(self, text: str) -> str:
        """Return what comes before the first special token or null character in a text."""
        return text.partition("\0")[0] if self._special is None else self._special.split(text.partition("\0")[0])[0]

    def rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r_{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def define(self, name: str, body: str) -> None:
        """Give a rule another body."""
        self._rules[int(name.removeprefix("r_"))] = f"{name}: {body}"

    def json(self, schema: object, root: Schema) -> str:
        """Return a rule for a JSON value; `root` has the definitions that the schema refers to."""
        node: dict[str, Any] = dict(cast("Schema", schema)) if isinstance(schema, Mapping) else {}
        if schema is not root:
            for key in ("$defs", "definitions"):
                if key in root and key not in node:
                    node[key] = root[key]
        node["x-guidance"] = _JSON_FORM
        return self.rule(f"%json {json.dumps(node, ensure_ascii=False)}")

    def text_before(self, mark: str, text: str = TEXT, lead: str = "") -> str:
        """Return a rule for text up to a mark, which is part of it; `lead` may stand before the mark."""
        return self.rule(f"{text} {lead}{self.literal(mark)}", lazy=not self.has_special(mark))

    def text_without(self, texts: Sequence[str]) -> str:
        """Return a terminal for text in which none of some texts is."""
        hidden = "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text) for text in texts)
        return self._terminal(f"{TEXT} & ~/(?s:.*)({hidden})(?s:.*)/")

    def bounded(self, bounds: Sequence[str], *, without: str) -> str:
        """Return a terminal for text that matches all bounds, and in which a mark is not."""
        if self.has_special(without):
            return self._terminal(" & ".join(bounds))
        return self._terminal(" & ".join([*bounds, self.text_without([without])]))

    def _terminal(self, body: str) -> str:
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def separated(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return a body for members in order, each with whether it is required, and the separator between them."""
        comma = self.literal(separator)
        none = some = ""  # the members from here on, where none of those before is there, or some are
        for body, is_required in reversed(members):
            one = self.rule(body)
            if is_required:
                none, some = self.rule(f"{one} {some}"), self.rule(f"{comma} {one} {some}")
            else:
                none = self.rule(f"({one} {some} | {none})" if none else f"({one} {some})?")
                some = self.rule(f"({comma} {one})? {some}")
        return none


class _Marked:
    """Values in a dialect of JSON: keys without quotes, strings between marks."""

    __slots__ = ("_any", "_closing", "_has_keys", "_lark", "_opening", "_root")

    def __init__(self, field: Field, lark: _Lark, root: Schema) -> None:
        self._opening, self._closing = field.dialect.string_delims[0] if field.dialect.string_delims else ('"', '"')
        self._has_keys = not field.dialect.unquoted_keys
        self._lark = lark
        self._root = root
        self._any: str | None = None

    def object(self, schema: object, depth: int = 0) -> str:
        properties: Any = resolved(schema, self._root).get("properties")
        if not isinstance(properties, Mapping):
            return '"{" "}"' if depth == 0 else self._anything()
        required: Any = resolved(schema, self._root).get("required") or ()
        members = [
            (f"{self._key(key)} {self.value(inner, depth + 1)}", key in required)
            for key, inner in cast("Schema", properties).items()
        ]
        return f'"{{" {self._lark.separated(members, ",")} "}}"'

    def _key(self, key: str) -> str:
        return self._lark.literal(f"{json.dumps(key)}:" if self._has_keys else f"{key}:")

    def value(self, schema: object, depth: int) -> str:
        """Return a rule for a value."""
        node = resolved(schema, self._root)
        choices: Any = node.get("anyOf") or node.get("oneOf")
        types = list(dict.fromkeys(types_of(node, self._root)))
        if depth > _MAX_DEPTH or not (types or choices):
            return self._anything()
        if isinstance(choices, list):
            return self._lark.rule(" | ".join(self.value(one, depth + 1) for one in cast("list[object]", choices)))
        if "enum" in node or "const" in node:
            listed: Any = [node["const"]] if "const" in node else node["enum"]
            return self._lark.rule(" | ".join(map(self._constant, cast("list[object]", listed))))
        return self._lark.rule(" | ".join(self._typed(name, node, depth) for name in types))

    def _constant(self, value: object) -> str:
        text = f"{self._opening}{value}{self._closing}" if isinstance(value, str) else json.dumps(value)
        return self._lark.literal(text)

    def _typed(self, name: str, node: Schema, depth: int) -> str:
        match name:
            case "string":
                bounds = text_bounds(node)
                text = self._lark.bounded(bounds, without=self._closing) if bounds else TEXT
                return f"{self._lark.literal(self._opening)} {self._lark.text_before(self._closing, text)}"
            case "object":
                return self.object(node, depth)
            case "array":
                return self._array(self.value(node.get("items", {}), depth + 1), node)
            case _:
                bounds = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
                kept = {key: node[key] for key in bounds if key in node}
                return self._lark.json({"type": name, **kept}, self._root)

    def _array(self, item: str, node: Schema) -> str:
        low: Any = node.get("minItems", 0)
        high: Any = node.get("maxItems")
        most = "" if high is None else max(high - 1, 0)
        if high == 0:
            return '"[" "]"'
        items = f'{item} ("," {item}){{{max(low - 1, 0)},{most}}}'
        return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'

    def _anything(self) -> str:
        """Return a rule for any value."""
        if self._any is None:
            lark = self._lark
            self._any = name = lark.rule("PLACEHOLDER")
            scalar = lark.json({"type": ["number", "boolean", "null"]}, {})
            text = self._typed("string", {}, 0)
            key = r"/[A-Za-z_][A-Za-z0-9_]{0,40}/" if not self._has_keys else r'/"[A-Za-z_][A-Za-z0-9_]{0,40}"/'
            pair = lark.rule(f'{key} ":" {name}')
            body = f'{scalar} | {text} | "[" ({name} ("," {name})*)? "]" | "{{" ({pair} ("," {pair})*)? "}}"'
            lark.define(name, body)
        return self._any


def _quoted(text: str) -> str:
    """Return a Lark string, which has the escapes of JSON."""
    return json.dumps(text).replace("\x7f", r"\u007f")


def _derived(field: Field, functions: Sequence[Function]) -> Writing | None:
    """Return how calls are written, by the expressions of a template that does not say it; None if it is not clear."""
    if field.open is None or field.content not in ("json", "xml-inline"):
        return None
    names = {"name": "{name}", "id": "{name}"} if isinstance(field.shape.name, Capture) else {}
    for name, _ in functions:
        sample = shortest(field.open.node, dict.fromkeys(names, name))
        found = field.open.match(sample)
        if found is None or found.length != len(sample) or (names and found.groups.get("name") != name):
            return None
    opening = shortest(field.open.node, names)
    closing = "" if field.close is None else shortest(field.close.node, {})
    if field.content == "xml-inline":
        return _derived_parameters(field, opening, closing)
    shape = field.shape
    if not shape.arguments:
        return Writing(call=opening, call_end=closing)
    if isinstance(shape.name, Capture) or shape.name[:-1] != shape.arguments[:-1] or not shape.name:
        return None
    outer = "".join(f"{{{json.dumps(key)}: " for key in shape.arguments[:-1])
    call = f"{outer}{{{json.dumps(shape.name[-1])}: {{name}}, {json.dumps(shape.arguments[-1])}: "
    call_end = "}" * len(shape.arguments)
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
