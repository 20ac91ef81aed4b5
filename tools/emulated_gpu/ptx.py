"""Parses PTX: the declarations of a module and the statements of its functions.

Source: NVIDIA, PTX ISA 9.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

WIDTH = {"pred": 1, "b8": 8, "u8": 8, "s8": 8, "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "bf16x2": 32}
WIDTH |= {f"{kind}{bits}": bits for kind in "bsu" for bits in (16, 32, 64)}
"""Bits of a type."""

_NOT_CODE = re.compile(r"//[^\n]*|/\*.*?\*/|^[ \t]*\.(?:loc|file)\b[^\n]*", re.S | re.M)
_HEAD = re.compile(r"(?:\.(?:visible|extern|weak|common)\s+)*\.(entry|func|global|const|shared)\b")
_FUNCTION = re.compile(r"\s*(?:\(([^()]*)\)\s*)?([$\w]+)\s*(?:\((.*?)\))?([^()]*(?:\(.*)?)$", re.S)
_VARIABLE = re.compile(
    r"\.(global|const|shared|local|param)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+(?:\.ptr[^,;]*?\s)?([$%\w]+)"
    r"\s*(\[\s*\d*\s*\])?\s*(?:=\s*(.*))?$",
    re.S,
)
_LABEL = re.compile(r"[$A-Za-z_%][\w$]*\s*:(?!:)")


class Unknown(Exception):
    """The PTX uses something that is not translated."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of a module or of a function."""

    space: str
    align: int
    element: str
    count: int | None
    """None if the launch decides."""
    values: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return max(WIDTH[self.element] // 8, 1) * (self.count or 0)


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel, or a function called by kernels."""

    name: str
    is_kernel: bool
    parameters: list[tuple[str, Variable]]
    results: list[tuple[str, Variable]]
    body: str

    def places(self) -> dict[str, int]:
        """Return the byte offset of each parameter of a kernel."""
        places: dict[str, int] = {}
        end = 0
        for name, variable in self.parameters:
            places[name] = -(-end // variable.align) * variable.align
            end = places[name] + variable.size
        return places


@dataclass(slots=True)
class Module:
    """The declarations of a PTX module; bodies and initial values are not parsed."""

    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Module:
        """Return the variables and functions of a text."""
        text, module, place = _NOT_CODE.sub("", text), cls(), 0
        while head := _HEAD.search(text, place):
            if head[1] not in ("entry", "func"):
                place = text.index(";", head.end())
                name, variable = parse_variable(text[head.start(1) - 1 : place])
                module.variables[name] = variable
                continue
            stop = re.compile(r"[{;]").search(text, head.end())
            if stop is None:
                raise Unknown("a function does not end")
            place = stop.start()
            if stop[0] == "{":  # a definition, not only a declaration
                place = _closing(text, stop.start())
                function = _function(head[1] == "entry", text[head.end() : stop.start()], text[stop.end() : place])
                module.functions[function.name] = function
        return module


def parse_variable(text: str) -> tuple[str, Variable]:
    """Parse a declaration such as `.shared .align 4 .b8 name[16]`; return name and variable."""
    match = _VARIABLE.search(text)
    if not match:
        raise Unknown(text)
    space, align, element, name, count, values = match.groups()
    number = 1 if count is None else (int(count.strip("[] ")) if count.strip("[] ") else None)
    return name, Variable(space, int(align or max(WIDTH[element] // 8, 1)), element, number, values or "")


def statements(body: str) -> Iterator[str]:
    """Yield statements without semicolons, labels with their colons, and the braces of scopes."""
    place = 0
    while place < len(body):
        if body[place].isspace() or body[place] == ";":
            place += 1
        elif body[place] in "{}":
            yield body[place]
            place += 1
        elif label := _LABEL.match(body, place):
            yield re.sub(r"\s", "", label[0])
            place = label.end()
        else:
            end = body.index(";", place)
            yield re.sub(r"\s+", " ", body[place:end].strip())
            place = end + 1


def split(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts: list[str] = []
    depth = start = 0
    for i, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            parts.append(text[start:i].strip())
            start = i + 1
    return [part for part in [*parts, text[start:].strip()] if part]


def elements(text: str) -> list[str]:
    """Return the elements of a vector, or a list with the one scalar."""
    return split(text.strip("{} ")) if text.startswith("{") else [text]


def _closing(text: str, opening: int) -> int:
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, opening):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise Unknown("a brace is not closed")


def _function(is_kernel: bool, head: str, body: str) -> Function:
    match = _FUNCTION.match(head)
    if match is None:
        raise Unknown(head)

    def declared(text: str | None) -> list[tuple[str, Variable]]:
        return [parse_variable(part.strip()) for part in (text or "").split(",") if part.strip()]

    return Function(match[2], is_kernel, declared(match[3]), declared(match[1]), body)
