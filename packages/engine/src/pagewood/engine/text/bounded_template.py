"""Jinja templates that always end: limits on their time and on the size of their output, besides jinja2's own sandbox.

A template is a program that comes with a model. The sandbox keeps it away from Python objects, but not from
looping or from doubling a text forty times. So the tree of a template is changed before it is compiled: each turn of a
loop and each call of a macro first checks the clock, and all text that the template writes or joins is counted.

One risk remains: a single long operation of Python, such as a comparison of lists that hold each other many times. No
code in the same process can interrupt it; the server then ends its tokenizer process.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any, NoReturn, cast

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0
"""Longest time of the processor for one rendering."""
MAX_LENGTH = 1 << 26
"""Most characters that one rendering may write or capture; also the longest single text or list."""
MAX_DEPTH = 1_000
"""Levels of JSON, at most: Python's limit of recursion."""
_MAX_BITS = 1 << 16
"""Most bits of an integer."""
_LONG_FORMAT = re.compile(r"%[^%a-zA-Z]*(\*|\d{5})")
"""A field of a % format with a computed width, or one of 10,000 or more."""
_TICK, _WRITTEN, _JOINED = "pagewood tick", "pagewood written", "pagewood joined"
"""Names of filters."""
_PADDING = ("center", "ljust", "rjust", "zfill")


class TemplateTooLong(Exception):
    """A rendering took too long, or made too much text."""


class Bounds:
    """The functions that a compiled template calls. The counts belong to the rendering of the present thread."""

    __slots__ = ("_of_thread",)

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def begin(self, max_seconds: float, max_length: int) -> None:
        """Begin a rendering in this thread."""
        self._of_thread.end_s = time.thread_time() + max_seconds  # not ours
        self._of_thread.left = max_length  # not ours

    def filters(self) -> dict[str, Callable[..., Any]]:
        """Return the filters that compiled templates call; no template can name them, because they hold a space.

        They take the context without need, because otherwise jinja2 would compute filters of constants beforehand.
        """

        @pass_context
        def tick(context: Context, num_characters: int) -> None:
            """Begin a turn of a loop that writes that many characters of the template itself."""
            self._count(max(0, num_characters))  # a template can call filters by any name with `map`
            if time.thread_time() > self._of_thread.end_s:
                raise TemplateTooLong("it takes too long")

        @pass_context
        def written(context: Context, value: Any) -> Any:
            """Return the text that `{{ }}` writes, and count it."""
            self._count(len(value) if isinstance(value, str) else len(str(value)))
            return value

        @pass_context
        def joined(context: Context, *values: Any) -> str:
            """Return the text that `~` joins from values."""
            texts = [str(value) for value in values]
            _check_length(sum(map(len, texts)))
            return "".join(texts)

        return {_TICK: tick, _WRITTEN: written, _JOINED: joined}

    def _count(self, number: int) -> None:
        self._of_thread.left -= number  # not ours
        if self._of_thread.left < 0:
            _too_much()


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates end. It is a subclass, because jinja2 has operators and calls checked that way."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})  # pyright: ignore[reportAssignmentType]

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.bounds = Bounds()
        """Counts text, and checks the clock."""
        filters: dict[str, Any] = self.filters
        filters |= self.bounds.filters()
        for name in ("batch", "center", "format", "indent", "join", "replace", "round", "slice", "wordwrap"):
            filters[name] = _checked_filter(name, filters[name])
        self.globals.pop("lipsum", None)  # it writes any requested number of words

    def bounded(self, source: str, *, variables: Mapping[str, Any]) -> jinja2.Template:
        """Return a compiled template; `begin` the bounds before each rendering.

        Args:
            source: Jinja.
            variables: that every rendering has.

        Raises:
            jinja2.TemplateError: the source is not a template.
        """
        tree = self.parse(source)
        _instrument(tree)
        tree.set_environment(self)  # of the new nodes
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(dict(variables)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute a binary operation, unless its result would be too large."""
        match operator:
            case "+" if type(left) is str and type(right) is str:  # the common operations of templates
                if len(left) + len(right) > MAX_LENGTH:
                    _too_much()
                return left + right
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
                _check_length(len(cast("Sized", left)) + len(cast("Sized", right)))
            case "*":
                _check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * max(0, right))
            case "%" if isinstance(left, str):
                _check_format(left)
            case _:
                pass
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method, unless the result of a method of a text would be too long."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps `format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            args = tuple(_check_method(method.__name__, owner, args))
        return super().call(__context, __obj, *args, **kwargs)


def _instrument(tree: nodes.Template) -> None:
    """Make a template check the clock and count its text."""
    for loop in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
        length = sum(len(data.data) for node in loop.body for data in _data(node))
        tick = _filtered(_TICK, [nodes.Const(length)], loop.lineno)
        loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))  # not ours
    for output in tree.find_all(nodes.Output):
        output.nodes = [  # not ours
            one if isinstance(one, nodes.TemplateData) else _filtered(_WRITTEN, [one], output.lineno)
            for one in output.nodes
        ]
    _replace_concatenations(tree)


def _data(node: nodes.Node) -> Iterable[nodes.TemplateData]:
    return [node] if isinstance(node, nodes.TemplateData) else node.find_all(nodes.TemplateData)


def _replace_concatenations(node: nodes.Node) -> None:
    """Replace `a ~ b` in all fields of a node and below."""
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_without_concatenation(one) for one in cast("list[Any]", value)])
        else:
            setattr(node, name, _without_concatenation(value))


def _without_concatenation(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concatenations(value)
    return _filtered(_JOINED, value.nodes, value.lineno) if isinstance(value, nodes.Concat) else value


def _filtered(name: str, arguments: Sequence[nodes.Expr], line: int) -> nodes.Filter:
    return nodes.Filter(arguments[0], name, list(arguments[1:]), [], None, None, lineno=line)


def _checked_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that is refused if its result would be too long."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        # Filters that need the context or the environment get it first.
        first = int(hasattr(function, "jinja_pass_arg"))
        before, value, rest = args[:first], args[first], list(args[first + 1 :])
        match name:
            case "batch" | "slice":  # of lists, which take 56 bytes
                number = _integer(rest, kwargs, "linecount" if name == "batch" else "slices")
                _check_length(number * (56 if name == "slice" else 1))
            case "center":
                _check_length(_integer(rest, kwargs, "width"))
            case "round":  # computes 10 ** precision
                _check_bits(4 * abs(_integer(rest, kwargs, "precision")))
            case "wordwrap":
                wrap = rest[2] if len(rest) > 2 else kwargs.get("wrapstring")
                _check_length(len(str(value)) * max(1, len(str(wrap or ""))))
            case "indent":
                width = rest[0] if rest else kwargs.get("width", 4)
                unit = len(width) if isinstance(width, str) else _integer([width], {}, "")
                _check_length(len(str(value)) + unit * (str(value).count("\n") + 1))
            case "replace":
                old, new = [*rest, kwargs.get("old", ""), kwargs.get("new", "")][:2]
                _check_method("replace", str(value), (str(old), str(new)))
            case "join":
                attribute = rest[1] if len(rest) > 1 else kwargs.get("attribute")
                between, value = str(rest[0] if rest else kwargs.get("d", "")), list(value)
                if attribute is None:
                    _check_method("join", between, (value,))
                else:
                    _check_length(len(between) * len(value))
            case _:
                _check_format(str(value))
        return function(*before, value, *rest, **kwargs)

    checked.__dict__.update(function.__dict__)  # not ours; jinja2 marks what a filter needs there
    return checked


def indented_json(value: Any, encoder: json.JSONEncoder, indent: int | str) -> str:
    """Return the JSON of a value with line breaks, unless it would be too long: `indent` counts for each level."""
    _check_length(MAX_DEPTH * (len(indent) if isinstance(indent, str) else indent))
    parts: list[str] = []
    length = 0
    for part in encoder.iterencode(value):
        length += len(part)
        _check_length(length)
        parts.append(part)
    return "".join(parts)


def _check_method(name: str, text: str, args: Sequence[Any]) -> Sequence[Any]:
    """Check the length of the result of a method of a text; return its arguments, with a list for an iterator."""
    match name, args:
        case "join", [values]:
            values = list(values)
            _check_length(sum(len(str(value)) for value in values) + len(text) * len(values))
            return [values]
        case "replace", [str() as old, str() as new, *_]:
            _check_length(len(text) + text.count(old) * len(new))
        case "expandtabs", [int() as width]:
            _check_length(len(text) + text.count("\t") * width)
        case "translate", [Mapping()]:
            table = cast("Mapping[Any, Any]", args[0])
            longest = max((len(str(value)) for value in table.values()), default=1)
            _check_length(len(text) * max(1, longest))
        case name, [int() as width, *_] if name in _PADDING:
            _check_length(width)
        case "format" | "format_map", _:
            if re.search(r"\{[^}]*(\d{5}|\{)", text):  # a width of 10,000 or more, or a computed one
                _too_much()
        case _:
            pass
    return args


def _check_product(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(other, int) and isinstance(one, str | list | tuple):
            _check_length(len(cast("Sized", one)) * other)
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())


def _check_bits(number: int) -> None:
    if number > _MAX_BITS:
        _too_much()


def _check_format(text: str) -> None:
    if _LONG_FORMAT.search(text):
        _too_much()


def _check_length(number: int) -> None:
    if number > MAX_LENGTH:
        _too_much()


def _integer(args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> int:
    value = args[0] if args else kwargs.get(name, 0)
    return value if isinstance(value, int) else 0


def _too_much() -> NoReturn:
    raise TemplateTooLong("it makes too much text")
