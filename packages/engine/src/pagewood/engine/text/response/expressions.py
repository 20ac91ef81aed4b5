"""Regular expressions of response templates: searched in a stream, in bounded time and memory.

The expressions come with checkpoints, and a checkpoint may come from any source. So they are read here, in the part of
Python's syntax that templates use, and written again for RE2, which searches in linear time. Repetitions without a
limit get one, `MAX_REPEAT`: then a match has a largest width, and a stream holds back no more than that.
"""

# pyright: basic
# re2 has no types.

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import re2

MAX_REPEAT = 128
"""Most repetitions of an item that has no limit of its own."""
MAX_LENGTH = 1024
"""Longest expression, in characters."""
MAX_WIDTH = 4096
"""Longest match, in characters."""
_MAX_NESTING = 20
_MAX_BYTES = 1 << 23
_SPACE = r"\t-\r\x1c-\x20\x85\xa0\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_CLASSES = {"s": _SPACE, "w": r"\pL\pN_", "d": r"\p{Nd}"}
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_MAX_FIRST = 64


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an expression."""

    kind: str
    """char, class, sequence, choice, repeat, group or never."""
    text: str = ""
    """The character, RE2's form of a class, or the name of a group."""
    items: tuple[Node, ...] = ()
    low: int = 1
    high: int | None = 1
    """Most times of a repetition; None: no limit."""
    lazy: bool = False
    first: frozenset[str] | None = field(default=None)
    """The characters of a class, if they are few."""


class Found(NamedTuple):
    """A match: its length in characters, and its named groups."""

    length: int
    groups: Mapping[str, str]


class Expression:
    """A compiled expression. Invariant: its matches have at least one character and at most `width`.

    Raises:
        ValueError: the expression cannot be read, or is too large.
    """

    __slots__ = ("_beginnings", "_compiled", "_starts", "names", "node", "width")

    def __init__(self, where: str, node: Node) -> None:
        self.node = node
        self.names = tuple(_names(node))
        width = width_of(node)
        if least_of(node) < 1:
            raise ValueError(f"{where} must match at least one character")
        if width > MAX_WIDTH:
            raise ValueError(f"{where} must match at most {MAX_WIDTH} characters, got {width}")
        self.width = width
        self._compiled = _compile(where, _source(node))
        self._starts = _compile(where, _proper_prefixes(node))
        self._beginnings = tuple(text for text, _ in _beginnings(node))

    def may_begin(self, text: str) -> bool:
        """Return quickly whether `text` could begin with a match or be the start of one."""
        return any(text.startswith(one) or one.startswith(text) for one in self._beginnings)

    def match(self, text: str) -> Found | None:
        """Return the match at the start of `text`."""
        found = _safely(self._compiled.match, text)
        if found is None:
            return None
        groups = {name: value for name, value in found.groupdict().items() if value is not None}
        return Found(found.end(), groups)

    def may_continue(self, text: str) -> bool:
        """Return whether `text` is the start of a longer match."""
        return len(text) < self.width and _safely(self._starts.fullmatch, text) is not None


def from_literals(where: str, literals: Sequence[str]) -> Expression:
    """Return the expression that matches one of several strings, the longest first."""
    longest_first = sorted(dict.fromkeys(literals), key=len, reverse=True)
    choices = tuple(Node("sequence", items=tuple(Node("char", char) for char in text)) for text in longest_first)
    return Expression(where, choices[0] if len(choices) == 1 else Node("choice", items=choices))


def without_leading_space(node: Node) -> Node:
    """Return a sequence without the optional white space at its start."""
    items = node.items
    while node.kind == "sequence" and items and _is_optional_space(items[0]):
        items = items[1:]
    return Node("sequence", items=items) if node.kind == "sequence" else node


def _is_optional_space(node: Node) -> bool:
    return node.kind == "repeat" and node.low == 0 and node.items[0].text == f"[{_SPACE}]"


def first_characters(node: Node) -> frozenset[str] | None:
    """Return the characters with which matches begin; None if they are many."""
    match node.kind:
        case "char":
            return frozenset(node.text)
        case "class":
            return node.first
        case "sequence":
            found: frozenset[str] = frozenset()
            for item in node.items:
                first = first_characters(item)
                if first is None:
                    return None
                found |= first
                if least_of(item):
                    return found
            return found
        case _:
            found = frozenset()
            for item in node.items:
                first = first_characters(item)
                if first is None:
                    return None
                found |= first
            return found


def _beginnings(node: Node) -> frozenset[tuple[str, bool]]:
    """Return texts such that every match begins with one of them, each with whether it is the whole match."""
    match node.kind:
        case "char":
            return frozenset({(node.text, True)})
        case "choice":
            return frozenset().union(*map(_beginnings, node.items))
        case "repeat":
            inner = frozenset((text, is_whole and node.high == 1) for text, is_whole in _beginnings(node.items[0]))
            return inner if node.low else inner | {("", node.high == 1)}
        case "sequence" | "group":
            found = frozenset({("", True)})
            for item in node.items:
                open_ = {text for text, is_whole in found if is_whole}
                behind = _beginnings(item) if len(open_) <= _MAX_BEGINNINGS else {("", False)}
                longer = {(text + more, is_whole) for text in open_ for more, is_whole in behind}
                found = frozenset(one for one in found if not one[1]) | longer
            return found
        case _:
            return frozenset({("", False)}) if node.kind == "class" else frozenset()


_MAX_BEGINNINGS = 16


def least_of(node: Node) -> int:
    """Return the least number of characters of a match."""
    match node.kind:
        case "char" | "class":
            return 1
        case "choice":
            return min((least_of(item) for item in node.items if item.kind != "never"), default=0)
        case "repeat":
            return node.low * least_of(node.items[0])
        case _:
            return sum(map(least_of, node.items))


def width_of(node: Node) -> int:
    """Return the largest number of characters of a match."""
    match node.kind:
        case "char" | "class":
            return 1
        case "choice":
            return max(map(width_of, node.items), default=0)
        case "repeat":
            return (MAX_REPEAT if node.high is None else node.high) * width_of(node.items[0])
        case _:
            return sum(map(width_of, node.items))


def literal_of(node: Node) -> str | None:
    """Return the one text that a node matches; None if there are several, or none."""
    match node.kind:
        case "char":
            return node.text
        case "sequence" | "group":
            texts = [literal_of(item) for item in node.items]
            return None if None in texts else "".join(text for text in texts if text)
        case _:
            return None


def shortest(node: Node, groups: Mapping[str, str]) -> str:
    """Return a short text that a node matches, with the given texts in its groups."""
    match node.kind:
        case "char":
            return node.text
        case "class":
            found = (char for char in _SAMPLES if re2.fullmatch(node.text, char))
            return next(found, "")
        case "choice":
            return min((shortest(item, groups) for item in node.items if item.kind != "never"), key=len, default="")
        case "repeat":
            return node.low * shortest(node.items[0], groups)
        case "group" if node.text in groups:
            return groups[node.text]
        case _:
            return "".join(shortest(item, groups) for item in node.items)


def spellings(node: Node, groups: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """Return texts that a node matches: one for each choice in it, with the fewest repetitions.

    Optional parts of more than one character are present in some texts and absent in others. Groups have the given
    texts.
    """
    match node.kind:
        case "choice":
            found = [text for item in node.items for text in spellings(item, groups)]
        case "repeat" if (node.low, node.high) == (0, 1) and width_of(node) > 1:
            found = ["", *spellings(node.items[0], groups)]
        case "group" if node.text in groups:
            found = [groups[node.text]]
        case "sequence" | "group":
            found = [""]
            for item in node.items:
                found = [text + more for text in found for more in spellings(item, groups)][:_MAX_SPELLINGS]
        case _:
            found = [shortest(node, groups)]
    return found[:_MAX_SPELLINGS]


_MAX_SPELLINGS = 64
_SAMPLES = "0a \n_-.:/<>"


def compile_whole(where: str, node: Node) -> Any:
    """Return RE2's pattern of a node with its repetitions unbounded, to search a text that is complete."""
    return _compile(where, _source(node, is_bounded=False))


def find_all(pattern: Any, text: str) -> list[dict[str, str]]:
    """Return the named groups of all matches."""
    return [match.groupdict(default="") for match in _safely(lambda text: list(pattern.finditer(text)), text)]


def _safely(search: Any, text: str) -> Any:
    try:
        return search(text)
    except UnicodeEncodeError:  # half of a surrogate pair, which RE2 does not take; "?" has the same length
        return search(text.encode(errors="replace").decode())


def _compile(where: str, source: str) -> Any:
    options = re2.Options()
    for name, value in (("log_errors", False), ("max_mem", _MAX_BYTES), ("dot_nl", True)):
        setattr(options, name, value)
    try:
        return re2.compile(source, options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0].decode(errors="replace") if isinstance(error.args[0], bytes) else str(error)
        raise ValueError(f"{where} must be small enough for RE2: {reason[:200]}") from error


def _names(node: Node) -> list[str]:
    own = [node.text] if node.kind == "group" else []
    return own + [name for item in node.items for name in _names(item)]


def _source(node: Node, *, is_bounded: bool = True, has_groups: bool = True) -> str:
    def source(item: Node) -> str:
        return _source(item, is_bounded=is_bounded, has_groups=has_groups)

    match node.kind:
        case "char":
            return re2.escape(node.text)
        case "class":
            return node.text
        case "sequence":
            return "".join(map(source, node.items))
        case "choice":
            return f"(?:{'|'.join(map(source, node.items))})"
        case "repeat":
            high = MAX_REPEAT if node.high is None else node.high
            item, lazy = f"(?:{source(node.items[0])})", "?" if node.lazy else ""
            if node.high is None and not is_bounded:
                return f"{item}{{{node.low},}}{lazy}"
            return f"{item}{{{node.low},{high}}}{lazy}"
        case "group":
            inner = source(node.items[0])
            return f"(?P<{node.text}>{inner})" if has_groups else f"(?:{inner})"
        case _:
            return _NEVER


_NEVER = r"[^\x00-\x{10FFFF}]"


def _proper_prefixes(node: Node) -> str:
    """Return an expression for proper beginnings of matches: for `abc`, the empty text, `a` and `ab`."""
    match node.kind:
        case "char" | "class":
            return "(?:)"
        case "sequence":
            result = _NEVER
            for item in reversed(node.items):
                result = f"(?:{_proper_prefixes(item)}|{_source(item, has_groups=False)}{result})"
            return result
        case "choice":
            return f"(?:{'|'.join(map(_proper_prefixes, node.items))})"
        case "repeat":
            high = MAX_REPEAT if node.high is None else node.high
            if high < 1:
                return _NEVER
            inner = node.items[0]
            return f"(?:(?:{_source(inner, has_groups=False)}){{0,{high - 1}}}{_proper_prefixes(inner)})"
        case "group":
            return _proper_prefixes(node.items[0])
        case _:
            return _NEVER


def parse(where: str, expression: object) -> Node:
    """Read an expression.

    Raises:
        ValueError: it is not a text, too long, wrong, or uses an unsupported feature.
    """
    if not isinstance(expression, str):
        raise ValueError(f"{where} must be a regular expression, got {expression!r:.100}")
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"{where} must have at most {MAX_LENGTH} characters, got {len(expression)}")
    reader = _Reader(where, expression)
    node = reader.choice(0)
    if reader.at < len(expression):
        raise reader.error("an unbalanced parenthesis")
    return node


class _Reader:
    """Reads an expression by recursive descent."""

    __slots__ = ("at", "text", "where")

    def __init__(self, where: str, text: str) -> None:
        self.where = where
        self.text = text
        self.at = 0

    def error(self, reason: str) -> ValueError:
        return ValueError(f"{self.where} must be a regular expression that is supported, got {self.text!r}: {reason}")

    def choice(self, depth: int) -> Node:
        if depth > _MAX_NESTING:
            raise self.error(f"groups nested more than {_MAX_NESTING} levels deep")
        branches = [self._sequence(depth)]
        while self.text.startswith("|", self.at):
            self.at += 1
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else Node("choice", items=tuple(branches))

    def _sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            item = self._repeated(self._item(depth))
            items.extend(item.items if item.kind == "sequence" else [item])
        return Node("sequence", items=tuple(items))

    def _item(self, depth: int) -> Node:
        char = self.text[self.at]
        self.at += 1
        match char:
            case "(":
                return self._group(depth)
            case "[":
                return self._class()
            case ".":
                return Node("class", ".")
            case "\\":
                return self._escape()
            case "$":
                return Node("never")  # the end of the text closes every section anyway
            case "^" | "*" | "+" | "?":
                raise self.error(f"{char} at {self.at - 1}")
            case _:
                return Node("char", char)

    def _group(self, depth: int) -> Node:
        name = ""
        if self.text.startswith("?", self.at):
            opening = re.compile(r"\?(?::|P<([A-Za-z_]\w*)>)", re.ASCII).match(self.text, self.at)
            if opening is None:
                raise self.error(f"a group of another kind at {self.at - 1}")
            self.at = opening.end()
            name = opening[1] or ""
        inner = self.choice(depth + 1)
        if not self.text.startswith(")", self.at):
            raise self.error("an unbalanced parenthesis")
        self.at += 1
        if name:
            return Node("group", name, (inner,))
        return Node("choice", items=(inner,)) if inner.kind == "sequence" and len(inner.items) != 1 else inner

    def _repeated(self, item: Node) -> Node:
        while self.at < len(self.text):
            char = self.text[self.at]
            braces = _REPEAT.match(self.text, self.at)
            if char in "*+?":
                low, high = int(char == "+"), 1 if char == "?" else None
                self.at += 1
            elif braces:
                low = int(braces[1])
                high = low if braces[2] is None else int(braces[3]) if braces[3] else None
                if low > MAX_REPEAT or (high is not None and not low <= high <= MAX_REPEAT):
                    raise self.error(f"a repetition must be at most {MAX_REPEAT} and not reversed")
                self.at = braces.end()
            else:
                break
            lazy = self.text.startswith("?", self.at)
            if self.text.startswith("+", self.at):
                raise self.error("a possessive repetition")
            self.at += lazy
            item = Node("repeat", items=(item,), low=low, high=high, lazy=lazy)
        return item

    def _escape(self) -> Node:
        if self.at >= len(self.text):
            raise self.error("a backslash at the end")
        char = self.text[self.at]
        if char == "Z":
            self.at += 1
            return Node("never")
        if char in _CLASSES:
            self.at += 1
            return Node("class", f"[{_CLASSES[char]}]", first=_space_characters() if char == "s" else None)
        if char.lower() in _CLASSES:
            self.at += 1
            return Node("class", f"[^{_CLASSES[char.lower()]}]")
        return Node("char", self._character())

    def _character(self) -> str:
        """Return the character that an escape stands for, whose backslash has been read."""
        code = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})").match(self.text, self.at)
        char = self.text[self.at]
        if code:
            self.at = code.end()
            return chr(int(code[1] or code[2], 16))
        self.at += 1
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum() and char.isascii():
            raise self.error(f"the escape \\{char}")
        return char

    def _class(self) -> Node:
        is_negated = self.text.startswith("^", self.at)
        self.at += is_negated
        parts: list[str] = []
        first: set[str] | None = None if is_negated else set()
        is_first = True
        while True:
            if self.at >= len(self.text):
                raise self.error("a class of characters without an end")
            if self.text[self.at] == "]" and not is_first:
                self.at += 1
                break
            is_first = False
            kind = self.text[self.at + 1 : self.at + 2] if self.text[self.at] == "\\" else ""
            if kind and kind in _CLASSES:
                self.at += 2
                parts.append(_CLASSES[kind])
                first = first | _space_characters() if first is not None and kind == "s" else None
                continue
            if kind and kind.lower() in _CLASSES:
                raise self.error(f"\\{kind} in a class of characters")
            start = end = self._class_character()
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in ("]", ""):
                self.at += 1
                end = self._class_character()
                if end < start:
                    raise self.error("a reversed range of characters")
            parts.append(rf"\x{{{ord(start):x}}}-\x{{{ord(end):x}}}")
            if first is not None:
                small = ord(end) - ord(start) < _MAX_FIRST
                first = first | {chr(code) for code in range(ord(start), ord(end) + 1)} if small else None
        text = f"[{'^' if is_negated else ''}{''.join(parts)}]"
        return Node("class", text, first=None if first is None else frozenset(first))

    def _class_character(self) -> str:
        char = self.text[self.at]
        self.at += 1
        if char == "\\":
            if self.at >= len(self.text):
                raise self.error("a backslash at the end")
            return self._character()
        return char


def _space_characters() -> frozenset[str]:
    return frozenset(chr(code) for code in range(0x3001) if chr(code).isspace())
