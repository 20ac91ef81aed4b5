"""Builds Lark grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from pagewood.engine.api import Grammar
from pagewood.engine.text.response.expressions import Expression, spellings
from pagewood.engine.text.response.text_bounds import TEXT
from pagewood.engine.text.response.tool_schema import Schema, types_of

_JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SCALARS = frozenset(("string", "integer", "number", "boolean", "null"))
_DATA = frozenset(("enum", "const", "default", "examples"))
_ROOT = "#/$defs/_root"


class LarkRules:
    """A Lark grammar under construction. Invariant: every name in a returned body has a rule."""

    __slots__ = ("_json", "_rules", "_special", "special_tokens")

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self.special_tokens = special_tokens
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self._rules: list[str] = []
        self._json: dict[str, str] = {}  # written by: json
        """Rules of JSON values by their bodies, so that equal values share a rule, also in alternatives."""

    def grammar(self, body: str) -> Grammar:
        """Return the grammar of a body with the rules that have been made."""
        return Grammar.lark("\n".join([f"start: {body}", *self._rules]))

    def literal(self, text: str) -> str:
        """Return a body for a text; the special tokens in it are tokens."""
        pieces = [text] if self._special is None else self._special.split(text)
        return " ".join(
            f"<[{self.special_tokens[piece]}]>" if piece in self.special_tokens else quoted(piece)
            for piece in pieces
            if piece
        )

    def has_special(self, text: str) -> bool:
        """Return whether there is a special token in a text."""
        return self._special is not None and self._special.search(text) is not None

    def leading_special(self, text: str) -> str | None:
        """Return the special token with which a text begins; None if there is none."""
        found = None if self._special is None else self._special.match(text)
        return found and found[0]

    def special_mark(self, marks: Iterable[Expression | None]) -> str:
        """Return a rule for the spellings of marks that have special tokens; empty if no mark has any."""
        texts = dict.fromkeys(text for mark in marks if mark is not None for text in spellings(mark.node))
        bodies = [self.literal(text) for text in texts if self.has_special(text)]
        return self.rule(" | ".join(bodies)) if bodies else ""

    def beginning(self, text: str) -> str:
        """Return the part of a text before its first special token or null character."""
        return text.partition("\0")[0] if self._special is None else self._special.split(text.partition("\0")[0])[0]

    def rule(self, body: str, *, lazy: bool = False, path: str = "") -> str:
        """Return the name of a new rule; `path` is the schema that it comes from."""
        name = f"r_{len(self._rules)}"
        self._rules.append(f"{_remark(path)}{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def define(self, name: str, body: str) -> None:
        """Give a rule another body."""
        self._rules[int(name.removeprefix("r_"))] = f"{name}: {body}"

    def json(self, schema: object, root: Schema, path: str) -> str:
        """Return a rule for a JSON value.

        Args:
            schema: of the value.
            root: holds the targets of the schema's references.
            path: of the schema, for errors of the grammar library.
        """
        node: dict[str, Any] = dict(cast("Schema", schema)) if isinstance(schema, Mapping) else {}
        if schema is False:
            raise ValueError(f"{path} must allow a value, got false")
        if schema is not root:
            node = _with_definitions(node, root)
        if not _SCALARS.issuperset(types_of(node, node) or ("object",)):
            node["x-guidance"] = _JSON_FORM
        body = f"%json {json.dumps(node, ensure_ascii=False)}"
        if body not in self._json:
            self._json[body] = self.rule(body, path=path)
        return self._json[body]

    def text_before(self, mark: str, text: str = TEXT, lead: str = "") -> str:
        """Return a rule for text up to a mark, which is part of it; `lead` may stand before the mark."""
        return self.rule(f"{text} {lead}{self.literal(mark)}", lazy=not self.has_special(mark))

    def text_without(self, texts: Sequence[str]) -> str:
        """Return a terminal for text without any of some texts."""
        hidden = "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text) for text in texts)
        return self.terminal(f"{TEXT} & ~/(?s:.*)({hidden})(?s:.*)/")

    def bounded(self, bounds: Sequence[str], *, without: str, path: str) -> str:
        """Return a terminal for text that matches all bounds and does not contain a mark."""
        if self.has_special(without):
            return self.terminal(" & ".join(bounds), path=path)
        return self.terminal(" & ".join([*bounds, self.text_without([without])]), path=path)

    def terminal(self, body: str, *, path: str = "") -> str:
        """Return the name of a new terminal; `path` is the schema that it comes from."""
        name = f"TEXT_{len(self._rules)}"
        self._rules.append(f"{_remark(path)}{name}: {body}")
        return name

    def separated(self, members: Sequence[tuple[str, bool]], separator: str) -> str:
        """Return a body for members in order, each with whether it is required, and the separator between them."""
        comma = self.literal(separator)
        none = some = ""  # the members from here on, without any or with some of those before
        for body, is_required in reversed(members):
            one = self.rule(body)
            if is_required:
                none, some = self.rule(f"{one} {some}"), self.rule(f"{comma} {one} {some}")
            else:
                none = self.rule(f"({one} {some} | {none})" if none else f"({one} {some})?")
                some = self.rule(f"({comma} {one})? {some}")
        return none


def _with_definitions(node: dict[str, Any], root: Schema) -> dict[str, Any]:
    """Return a part of `root` as a schema of its own, with all targets of its references."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    references = [*_references(node), *_references(definitions)]
    if not references:
        return node
    if not definitions.keys() & node.keys() and all(
        one.startswith(("#/$defs/", "#/definitions/")) for one in references
    ):
        return node | definitions
    return cast("dict[str, Any]", _moved(node)) | {"$defs": {"_root": _moved(root)}}


def _references(value: object) -> Iterable[str]:
    """Yield the references to parts of the same schema that are in a schema."""
    if isinstance(value, list):
        for one in cast("list[object]", value):
            yield from _references(one)
    elif isinstance(value, Mapping):
        for key, inner in cast("Schema", value).items():
            if key == "$ref" and isinstance(inner, str):
                yield inner
            elif key not in _DATA:
                yield from _references(inner)


def _moved(value: object) -> object:
    """Return a schema whose references to parts of the root name the same parts under `_root`."""
    if isinstance(value, list):
        return [_moved(one) for one in cast("list[object]", value)]
    if not isinstance(value, Mapping):
        return value
    moved: dict[str, object] = {}
    for key, inner in cast("Schema", value).items():
        is_reference = key == "$ref" and isinstance(inner, str) and inner.startswith("#")
        moved[key] = f"{_ROOT}{inner[1:]}" if is_reference else inner if key in _DATA else _moved(inner)
    return moved


def _remark(path: str) -> str:
    """Return a line of Lark that names the schema of the next line."""
    return f"// {json.dumps(path)}\n" if path else ""


def quoted(text: str) -> str:
    """Return a Lark string, which has the escapes of JSON."""
    return json.dumps(text).replace("\x7f", r"\u007f")
