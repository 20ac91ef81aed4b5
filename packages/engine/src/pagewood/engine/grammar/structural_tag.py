"""Structural tags: free text with typed regions, translated from JSON to Lark.

Two forms are read, xgrammar's and the older one of vLLM and SGLang:

    {"type": "structural_tag", "format": FORMAT}
    {"type": "structural_tag", "structures": [{"begin": "<f>", "schema": {..}, "end": "</f>"}, ..], "triggers": ["<f"]}

Formats: const_string, json_schema (style json), regex, grammar (Lark), any_text, sequence, or, optional, plus, star,
tag, triggered_tags, tags_with_separator. Other formats, and unknown fields that would have an effect, are refused by
name. Free text (any_text and triggered_tags) must be the last part of the whole or of a tag, whose end ends it;
llguidance cannot find the end of free text otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

_REPEATS = {"optional": "?", "plus": "+", "star": "*"}
Format: TypeAlias = Mapping[str, Any]
Named: TypeAlias = dict[str, "str | dict[str, Any] | bool"]
"""Grammars that the Lark grammar refers to by name: Lark texts and JSON schemas."""

_IGNORED = frozenset({"type", "description", "title"})
_NO_EFFECT: tuple[object, ...] = (None, False, [], "json")
"""Values with which unknown fields have no effect; `style` is json by default."""


def lark_of_tag(value: object, *, quote_regex: Callable[[str], str]) -> tuple[str, Named]:
    """Return a Lark grammar for a structural tag, and the grammars that it refers to.

    Args:
        value: from the JSON text.
        quote_regex: puts a regular expression between the slashes of Lark.

    Raises:
        ValueError: it is not a structural tag, or has a format or a field that is not supported.
    """
    tag = _fields(value, "structural tag")
    if tag.get("type") != "structural_tag":
        raise ValueError(f"structural tag must have the type structural_tag, got {_shown(tag.get('type'))}")
    if "format" in tag:
        _check_fields(tag, "structural tag", {"format"})
        outer = _fields(tag["format"], "format")
    else:
        _check_fields(tag, "structural tag", {"structures", "triggers"})
        outer = _from_structures(tag)
    translation = _Translation(quote_regex)
    body = translation.format(outer, "format", ends=())
    return "\n".join([f"start: {body}", *translation.rules]), translation.named


def _from_structures(tag: Format) -> Format:
    structures = _list(tag, "structures", "structural tag")
    tags: list[Format] = []
    for index, value in enumerate(structures):
        where = f"structures[{index}]"
        structure = _fields(value, where)
        _check_fields(structure, where, {"begin", "schema", "end"})
        schema = structure.get("schema", True)
        content = {"type": "json_schema", "json_schema": schema}
        begin, end = structure.get("begin"), structure.get("end", "")
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Translation:
    """A grammar under construction. Invariant: every name in a returned body has a rule."""

    __slots__ = ("_quote_regex", "named", "rules")

    def __init__(self, quote_regex: Callable[[str], str]) -> None:
        self._quote_regex = quote_regex
        self.rules: list[str] = []
        self.named: Named = {}

    def format(self, value: object, where: str, *, ends: Sequence[str]) -> str:
        """Return a Lark body for a format.

        Args:
            value: the format.
            where: its place, for messages.
            ends: strings of which one follows it, and is part of the body; empty: no known string follows.
        """
        fields = _fields(value, where)
        kind = fields.get("type")
        where = f"{where} {kind}"
        match kind:
            case "any_text":
                _check_fields(fields, where, {"excludes"})
                return self._free_text(_strings(fields, "excludes", where), ends)
            case "triggered_tags":
                return self._triggered(fields, where, ends)
            case "sequence":
                _check_fields(fields, where, {"elements"})
                return self._sequence(_list(fields, "elements", where), where, ends)
            case "or":
                _check_fields(fields, where, {"elements"})
                elements = _list(fields, "elements", where)
                return self._rule(" | ".join(self.format(element, where, ends=ends) for element in elements))
            case "optional" if ends:
                _check_fields(fields, where, {"content"})
                return self._rule(f"{self.format(fields.get('content'), where, ends=ends)} | {_any_of(ends)}")
            case _:
                body = self._bounded(fields, kind, where)
                return f"{body} {_any_of(ends)}" if ends else body

    def _bounded(self, fields: Format, kind: Any, where: str) -> str:
        """Return a body for a format that has an end of its own."""
        match kind:
            case "const_string":
                _check_fields(fields, where, {"value"})
                return _literal(_string(fields, "value", where))
            case "json_schema":
                _check_fields(fields, where, {"json_schema"})
                schema = fields.get("json_schema")
                if not isinstance(schema, (dict, bool)):
                    raise ValueError(f"{where} must have a schema as json_schema, got {_shown(schema)}")
                return self._name(cast("dict[str, Any] | bool", schema))
            case "regex":
                _check_fields(fields, where, {"pattern"})
                pattern = _string(fields, "pattern", where)
                return self._quote_regex(pattern) if pattern else '""'
            case "grammar":
                _check_fields(fields, where, {"grammar"})
                grammar = _string(fields, "grammar", where)
                if "::=" in grammar:
                    raise ValueError(f"{where} must have a Lark grammar, got one in EBNF")
                return self._name(grammar)
            case "tag":
                return self._tag(fields, where)
            case "tags_with_separator":
                return self._separated(fields, where)
            case "optional" | "plus" | "star" as kind:
                _check_fields(fields, where, {"content"})
                content = self.format(self._closed(fields.get("content"), where), where, ends=())
                return self._rule(f"({content}){_REPEATS[kind]}")
            case _:
                raise ValueError(f"structural tag must have formats that are supported, got {_shown(kind)}")

    def _sequence(self, elements: Sequence[object], where: str, ends: Sequence[str]) -> str:
        parts = [self.format(self._closed(element, where), where, ends=()) for element in elements[:-1]]
        return self._rule(" ".join([*parts, self.format(elements[-1], where, ends=ends)]))

    def _tag(self, value: object, where: str, *, trigger: str = "") -> str:
        """Return a body for a tag without the `trigger` that it begins with."""
        fields = _fields(value, where)
        if fields.get("type", "tag") != "tag":
            raise ValueError(f"{where} must have tags, got {_shown(fields.get('type'))}")
        _check_fields(fields, where, {"begin", "content", "end"})
        begin = _string(fields, "begin", f"{where} tag")
        end = fields.get("end")
        ends = [end] if isinstance(end, str) else _strings(fields, "end", f"{where} tag")
        if isinstance(end, list) and not ends:
            raise ValueError(f"{where} tag must have an end, got none")
        content = fields.get("content")
        if "" in ends:
            content = self._closed(content, f"{where} tag without an end")
            body = self.format(content, where, ends=())
            others = [end for end in ends if end]
            return f"{_literal(begin[len(trigger) :])} {body} {f'{_any_of(others)}?' if others else ''}"
        return f"{_literal(begin[len(trigger) :])} {self.format(content, where, ends=ends)}"

    def _triggered(self, fields: Format, where: str, ends: Sequence[str]) -> str:
        """Return a body for free text in which each trigger begins one of the tags."""
        _check_fields(fields, where, {"triggers", "tags", "excludes", "at_least_one", "stop_after_first"})
        triggers, excludes = _strings(fields, "triggers", where), _strings(fields, "excludes", where)
        tags = _list(fields, "tags", where)
        if not triggers or "" in triggers:
            raise ValueError(f"{where} must have triggers that are not empty, got {_shown(triggers)}")
        of_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        whole: list[str] = []
        for index, tag in enumerate(tags):
            begin = _string(_fields(tag, f"{where} tags[{index}]"), "begin", f"{where} tags[{index}]")
            matching = [trigger for trigger in of_trigger if begin.startswith(trigger)]
            if len(matching) != 1:
                raise ValueError(f"{where} must have one trigger for the begin {_shown(begin)}, got {len(matching)}")
            of_trigger[matching[0]].append(self._tag(tag, where, trigger=matching[0]))
            if fields.get("at_least_one"):
                whole.append(self._tag(tag, where))
        text = self._text(excludes)
        calls = [
            f"{self._rule(f'{text} {_literal(trigger)}', lazy=True)} {self._rule(' | '.join(bodies))}"
            for trigger, bodies in of_trigger.items()
            if bodies
        ]
        call = self._rule(" | ".join(calls))
        stops, after = bool(fields.get("stop_after_first")), _any_of(ends) if ends else ""
        if fields.get("at_least_one"):  # it begins with a tag then, as in xgrammar
            first = self._rule(" | ".join(whole))
            return f"{first} {after}" if stops else self._rule(f"{first} {call}* {self._free_text(excludes, ends)}")
        if stops:
            return self._rule(f"{call} {after} | {self._free_text(excludes, ends)}")
        return self._rule(f"{call}* {self._free_text(excludes, ends)}")

    def _separated(self, fields: Format, where: str) -> str:
        _check_fields(fields, where, {"tags", "separator", "at_least_one", "stop_after_first"})
        tags = _list(fields, "tags", where)
        tag = self._rule(" | ".join(self._tag(tag, where) for tag in tags))
        separator = _literal(_string(fields, "separator", where))
        many = tag if fields.get("stop_after_first") else self._rule(f"{tag} ({separator} {tag})*")
        return many if fields.get("at_least_one") else f"{many}?"

    def _free_text(self, excludes: Sequence[str], ends: Sequence[str]) -> str:
        """Return a body for text up to the first of `ends`, which is part of it; without ends, up to the end of all."""
        text = self._text(excludes)
        return self._rule(f"{text} {_any_of(ends)}", lazy=True) if ends else text

    def _text(self, excludes: Sequence[str]) -> str:
        """Return a terminal for text without the strings `excludes`."""
        if not excludes:
            return r"/(?s:.*)/"
        if "" in excludes:
            raise ValueError("excludes must be strings that are not empty")
        name = f"TEXT_{len(self.rules)}"
        hidden = "|".join(_escaped(text) for text in excludes)
        self.rules.append(rf"{name}: /(?s:.*)/ & ~/(?s:.*)({hidden})(?s:.*)/")
        return name

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _name(self, grammar: str | dict[str, Any] | bool) -> str:
        name = f"g_{len(self.named)}"
        self.named[name] = grammar
        return f"@{name}"

    def _closed(self, value: object, where: str) -> object:
        """Return a format after which something may follow.

        Raises:
            ValueError: it is free text.
        """
        if _is_open(value):
            raise ValueError(
                f"{where} must have free text only as its last part, or as the content of a tag with an end"
            )
        return value


def _is_open(value: object) -> bool:
    """Return whether a format has no end of its own."""
    if not isinstance(value, dict):
        return False
    fields = cast("Format", value)
    match fields.get("type"):
        case "any_text":
            return True
        case "triggered_tags":
            return True
        case "sequence" | "or":
            elements = fields.get("elements")
            return isinstance(elements, list) and any(map(_is_open, cast("list[object]", elements)))
        case "optional" | "plus" | "star":
            return _is_open(fields.get("content"))
        case _:
            return False


def _any_of(ends: Sequence[str]) -> str:
    return _literal(ends[0]) if len(ends) == 1 else f"({' | '.join(map(_literal, ends))})"


def _literal(text: str) -> str:
    """Return a Lark string, which has the escapes of JSON; `""` stands for nothing."""
    return json.dumps(text).replace("\x7f", r"\u007f")


def _escaped(text: str) -> str:
    """Return a regular expression in Lark's slashes for `text` itself."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text)


def _fields(value: object, where: str) -> Format:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a JSON object, got {_shown(value)}")
    return cast("Format", value)


def _check_fields(fields: Format, where: str, known: set[str]) -> None:
    for name, value in fields.items():
        if name not in known and name not in _IGNORED and value not in _NO_EFFECT:
            raise ValueError(f"{where} must have only fields that are supported, got {name}")


def _string(fields: Format, name: str, where: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{where} must have a string as {name}, got {_shown(value)}")
    return value


def _strings(fields: Format, name: str, where: str) -> list[str]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in cast("list[object]", value)):
        raise ValueError(f"{where} must have a list of strings as {name}, got {_shown(cast('object', value))}")
    return cast("list[str]", value)


def _list(fields: Format, name: str, where: str) -> Sequence[object]:
    value = fields.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must have a list as {name} that is not empty, got {_shown(cast('object', value))}")
    return cast("list[object]", value)


def _shown(value: object) -> str:
    return json.dumps(value)[:100]
