"""The calls in a section of an answer: reported as soon as a name and the beginning of its arguments are known."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias, cast

from pagewood.engine.text.response import expressions
from pagewood.engine.text.response.conversion import Functions, any_json, as_written, json_of
from pagewood.engine.text.response.part import Part
from pagewood.engine.text.response.source import Reading, Source
from pagewood.engine.text.response.template import Capture, Field, Key, Parameters
from pagewood.engine.text.response.values import (
    PYTHON,
    decoded,
    escaped,
    has_open_string,
    json_text,
    read_string,
    read_value,
)
from pagewood.engine.text.response.watch import Watch, comes, until, watch_for

MAX_HELD = 1 << 16
"""Most characters of a section that are held back until a call can be reported; then the section is text."""
MAX_NAME = 128
_NAME = re.compile(r"[^\s\"'{}<>()\[\],|=]+")
_IDENTIFIER = re.compile(r"[\w.-]*")
_PARAMETER = re.compile(r"[^\s=,:()\[\]{}\"'<>|]*")
"""Python has fewer names, but schemas have more."""
Captures: TypeAlias = Mapping[str, str]


class Overdue(Exception):
    """More text is held back than is allowed."""


class CallBook:
    """The calls of one answer, numbered from 0. Invariant: `num_calls` of them have been read, also in the prompt."""

    __slots__ = ("_commit", "_ended", "_first", "_open", "_report", "functions", "num_calls", "stray")

    def __init__(
        self,
        functions: Functions,
        *,
        report: Callable[[Part], None],
        commit: Callable[[], None],
        ended: Callable[[], None],
        stray: Callable[[str], None],
    ) -> None:
        """Begin without calls.

        Args:
            functions: that may be called.
            report: takes parts.
            commit: notified before a call is reported, after which the text read so far cannot become content.
            ended: notified after a call has been closed by the model.
            stray: after a call, takes the text that was between its parameters.
        """
        self.functions = functions
        self.stray = stray
        self._report = report
        self._commit = commit
        self._ended = ended
        self._first = 0  # written by: CallBook. Calls that the prompt has begun
        self._open: int | None = None  # written by: CallBook. Number of the call that was begun and is not closed
        self.num_calls = 0  # written by: CallBook

    @property
    def is_open(self) -> bool:
        """Whether the newest call has not been closed by the model."""
        return self._open is not None

    def forget(self) -> None:
        """Number the calls from here on from 0, and report nothing more of the open one."""
        self._first, self._open = self.num_calls, None

    def accepts(self, name: str, *, known: bool) -> bool:
        """Return whether `name` can be called; if `known`, only given functions can."""
        if name in self.functions:
            return True
        return not known and len(name) <= MAX_NAME and _NAME.fullmatch(name) is not None

    def begin(self, name: str, id_: str = "") -> Callable[[str], None]:
        """Report a call; return the receiver of the fragments of its arguments."""
        self._commit()
        self._open = index = self.num_calls - self._first
        self.num_calls += 1
        self._report(Part("tool_call", name, index, id_))

        def arguments(text: str) -> None:
            if text and self._open == index:
                self._report(Part("arguments", text, index))

        return arguments

    def end(self) -> None:
        """Report that the model has closed the newest call."""
        if self._open is not None:
            self._report(Part("call_end", "", self._open))
            self._open = None
            self._ended()


def read_calls(source: Source, field: Field, captures: Captures, book: CallBook, *, is_bare: bool) -> Reading[None]:
    """Read the calls of a section up to its close; formats without an end of their own read the close as well."""
    match field.content:
        case "json":
            yield from _json(source, field, captures, book, is_bare=is_bare)
        case "pythonic":
            yield from _pythonic(source, field, book, is_bare=is_bare)
        case _:
            name, id_ = _captured(field.shape.name, captures), _captured(field.shape.id, captures)
            if name is not None and book.accepts(name, known=False):
                parameters = cast("Parameters", field.parameters)
                emit = book.begin(name, id_ or "")
                if parameters.open is None:
                    yield from _collected(source, field, parameters, name, book, emit)
                else:
                    yield from _streamed(source, field, parameters, name, book, emit)


def _captured(place: Capture | Key | None, captures: Captures) -> str | None:
    return captures.get(place.name, "").strip() if isinstance(place, Capture) else None


class _Call:
    """A call that is being read as JSON; its arguments are kept until it can be reported."""

    __slots__ = ("_book", "_emit", "_held", "_num_held", "has_all_arguments", "has_arguments", "id", "is_bare", "name")

    def __init__(self, book: CallBook, name: str | None, id_: str, *, is_bare: bool) -> None:
        self._book = book
        self.is_bare = is_bare
        self._emit: Callable[[str], None] | None = None
        self._held: list[str] = []
        self._num_held = 0
        self.name = name  # written by: calls
        self.id = id_  # written by: calls
        self.has_arguments = False  # written by: calls
        self.has_all_arguments = False  # written by: calls

    @property
    def is_reported(self) -> bool:
        return self._emit is not None

    def weigh(self, text: str) -> None:
        """Count text that is held back.

        Raises:
            Overdue: it is too much.
        """
        self._num_held += len(text)
        if self._num_held > MAX_HELD:
            raise Overdue

    def emit(self, text: str) -> None:
        """Pass a fragment of the arguments on."""
        if self._emit is not None:
            self._emit(text)
        else:
            self.weigh(text)
            self._held.append(text)

    def report(self) -> bool:
        """Report the call when its name and the beginning of its arguments are known; return False if it is no call."""
        if self._emit is None and self.name is not None and self.has_arguments:
            if not self._book.accepts(self.name, known=self.is_bare):
                return False
            self._emit = self._book.begin(self.name, self.id)
            self._emit("".join(self._held))
        return True


def _json(source: Source, field: Field, captures: Captures, book: CallBook, *, is_bare: bool) -> Reading[None]:
    yield from source.space()
    if not field.each or (yield from source.peek()) != "[":
        while (yield from _json_call(source, field, captures, book, is_bare=is_bare)):
            if field.close is not None or not (yield from _passes(source, ";", "{")):
                return
        return
    source.at += 1
    while True:
        yield from source.space()
        if book.num_calls and source.mark is None:
            source.mark = source.at  # text that is not reported from here on is given back
        if not (yield from _json_call(source, field, captures, book, is_bare=is_bare)):
            return
        yield from source.space()
        char = yield from source.peek()
        source.at += char in (",", "]")
        if char != ",":
            return


def _passes(source: Source, separator: str, following: str) -> Reading[bool]:
    """Pass a separator if `following` comes after it."""
    source.mark = source.at
    yield from source.space()
    passes = yield from source.follows(separator)
    if passes:
        source.at += len(separator)
        yield from source.space()
        passes = yield from source.follows(following)
    if not passes and source.is_cut and source.at == len(source.text):
        source.mark = None  # the passed text is not content, but begins the text after a call
    elif not passes:
        source.at, source.mark = source.mark, None
    return passes


def _json_call(source: Source, field: Field, captures: Captures, book: CallBook, *, is_bare: bool) -> Reading[bool]:
    """Read one call; return whether it is complete.

    A call whose arguments are complete may lack brackets at its end, if the close of its section follows.
    """
    shape = field.shape
    name, id_ = _captured(shape.name, captures), _captured(shape.id, captures)
    call = _Call(book, name, id_ or "", is_bare=is_bare)
    if (yield from source.peek()) != "{":
        return False
    if not shape.arguments and not field.name_as_key:
        call.has_arguments = True
        is_complete = call.report() and (yield from read_value(source, call.emit, field.dialect))
    else:
        whole = _keyed(source, call, field) if field.name_as_key else _object(source, call, field, ())
        is_complete = yield from whole
        if is_complete and not call.has_arguments:
            call.has_arguments = True
            call.emit("{}")
        if not is_complete and call.is_reported and call.has_all_arguments:
            is_complete = yield from _closes(source, field.close)
        is_complete = is_complete and call.report() and call.is_reported
    if is_complete:
        book.end()
    return is_complete


def _closes(source: Source, close: expressions.Expression | None) -> Reading[bool]:
    """Return whether the close of a section comes next, without passing it."""
    if close is None:
        return False
    watch = watch_for(close)
    yield from source.space()
    while True:
        start, hit = watch.look(source.text, source.at, ended=source.ended)
        if hit is not None or start > source.at or source.ended:
            return hit is not None and start == source.at
        yield


def _object(source: Source, call: _Call, field: Field, path: Key) -> Reading[bool]:
    """Read an object that holds parts of a call at `path`; return whether it is complete."""
    source.at += 1
    yield from source.space()
    if (yield from source.peek()) == "}":
        source.at += 1
        return True
    while True:
        name = yield from _key(source, call, field)
        if name is None or not (yield from _member(source, call, field, (*path, name))):
            return False
        yield from source.space()
        char = yield from source.peek()
        if char not in (",", "}") or not char:
            return False
        source.at += 1
        if char == "}":
            return True
        yield from source.space()


def _key(source: Source, call: _Call, field: Field) -> Reading[str | None]:
    """Read a key of a call, up to its value; return None if there is none."""
    fragments: list[str] = []

    def keep(text: str) -> None:
        if not call.is_reported:
            call.weigh(text)
        fragments.append(text)

    if not (yield from read_string(source, keep, field.dialect)):
        return None
    yield from source.space()
    if (yield from source.peek()) != ":":
        return None
    source.at += 1
    yield from source.space()
    return str(decoded("".join(fragments)))


def _keyed(source: Source, call: _Call, field: Field) -> Reading[bool]:
    """Read an object whose only key is the name of a call; return whether it is complete."""
    source.at += 1
    yield from source.space()
    name = yield from _key(source, call, field)
    if name is None:
        return False
    call.name = name.strip()
    if not (yield from _arguments(source, call, field)):
        return False
    yield from source.space()
    is_complete = (yield from source.peek()) == "}"
    source.at += is_complete
    return is_complete


def _member(source: Source, call: _Call, field: Field, key: Key) -> Reading[bool]:
    """Read the value of a key of a call; return whether it is complete and can be in a call."""
    shape = field.shape
    if key == shape.arguments:
        return (yield from _arguments(source, call, field))
    places = [place for place in (shape.name, shape.arguments, shape.id) if isinstance(place, tuple)]
    if any(place[: len(key)] == key and len(place) > len(key) for place in places):
        return (yield from source.peek()) == "{" and (yield from _object(source, call, field, key))
    if call.is_bare and key[0] not in {"type", *(place[0] for place in places)}:
        return False  # an answer in JSON
    fragments: list[str] = []

    def keep(text: str) -> None:
        call.weigh(text)
        fragments.append(text)

    is_part = key in (shape.name, shape.id)
    skip = call.weigh if not call.is_reported else _ignore
    if not (yield from read_value(source, keep if is_part else skip, field.dialect)):
        return False
    if is_part:
        value = decoded("".join(fragments))
        if key == shape.name:
            if not isinstance(value, str) or call.name is not None:
                return False
            call.name = value.strip()
            return call.report()
        call.id = value if isinstance(value, str) else str(value) if isinstance(value, int) else ""
    return True


def _ignore(text: str) -> None:
    pass


def _arguments(source: Source, call: _Call, field: Field) -> Reading[bool]:
    """Read the arguments: an object, null, or a text that is empty or the JSON of an object."""
    if call.has_arguments:
        return False
    if (yield from source.peek()) == "{":
        call.has_arguments = True
        call.has_all_arguments = call.report() and (yield from read_value(source, call.emit, field.dialect))
        return call.has_all_arguments
    fragments: list[str] = []

    def keep(text: str) -> None:
        call.weigh(text)
        fragments.append(text)

    if not (yield from read_value(source, keep, field.dialect)):
        return False
    value = decoded("".join(fragments))
    text = value.strip() if isinstance(value, str) else ""
    if not isinstance(any_json(text or "{}"), dict) or not isinstance(value, str | None):
        return False
    call.has_arguments = call.has_all_arguments = True
    call.emit(as_written(text or "{}"))
    return call.report()


def _streamed(
    source: Source, field: Field, parameters: Parameters, name: str, book: CallBook, emit: Callable[[str], None]
) -> Reading[None]:
    """Read parameters one by one, and the close of the section. Without it, the call broke off."""
    opening, closing = cast("expressions.Expression", parameters.open), cast("expressions.Expression", parameters.close)
    between = watch_for(opening, cast("expressions.Expression", field.close))
    inside = watch_for(closing)
    emit("{")
    separator = ""
    stray: list[str] = []
    while True:
        hit = yield from until(source, between, stray.append)
        if hit is None:
            return
        if hit.which == 1:
            emit("}")
            book.end()
            book.stray("".join(stray))
            return
        key = hit.found.groups.get("key", "").strip()
        declared = hit.found.groups.get("string")
        types = ("string",) if declared == "true" else () if declared else book.functions.types(name, key)
        is_json = declared == "false" or parameters.is_json
        head = f"{separator}{json_text(key)}: "
        if types == ("string",) or not (types or is_json):
            emit(f'{head}"')
            if not (yield from _text(source, inside, between, lambda text: emit(escaped(text)))):
                return
            emit('"')
        else:
            pieces: list[str] = []
            if not (yield from _value(source, inside, between, types, pieces)):
                return
            emit(head + _converted("".join(pieces), types, is_json=is_json))
        separator = ", "


def _text(source: Source, inside: Watch, after: Watch, show: Callable[[str], None]) -> Reading[bool]:
    """Show a text up to its end, and pass that: the first closing mark before something that follows a parameter.

    Returns:
        False if the answer ends before.
    """
    while True:
        hit = yield from until(source, inside, show)
        if hit is None:
            return False
        mark = source.text[source.at - hit.found.length : source.at]
        if (yield from comes(source, after)):
            return True
        show(mark)


def _value(
    source: Source, inside: Watch, after: Watch, types: tuple[str, ...], pieces: list[str]
) -> Reading[bool]:  # fmt: skip
    """Collect a value up to its end, and pass that; a closing mark in a string of JSON does not end it.

    Args:
        source: the answer.
        inside: finds closing marks.
        after: finds what follows a parameter.
        types: that the value may have; empty: it is any JSON.
        pieces: gets the value.

    Returns:
        False if the answer ends before.
    """
    begins = '{["' if not types else "{[" if {"object", "array"} & set(types) else ""
    num_seen, is_json, is_open = 0, None, False
    while True:
        hit = yield from until(source, inside, pieces.append)
        if hit is None:
            return False
        mark = source.text[source.at - hit.found.length : source.at]
        text = "".join(pieces[num_seen:])
        num_seen = len(pieces)
        if is_json is None and (stripped := text.lstrip()):
            is_json = stripped[0] in begins
        if is_json:
            is_open = has_open_string(text, is_open=is_open)
            if not is_open:
                return True
        elif "string" not in types or (yield from comes(source, after)):
            return True
        pieces.append(mark)


def _converted(text: str, types: tuple[str, ...], *, is_json: bool) -> str:
    if not types and is_json:
        value = any_json(text)
        return as_written(text) if value is not None or text.strip() == "null" else json_text(text.strip())
    return json_of(text, types)


def _collected(
    source: Source, field: Field, parameters: Parameters, name: str, book: CallBook, emit: Callable[[str], None]
) -> Reading[None]:
    """Read all parameters when they are complete, and the close of the section. Without it, the call broke off."""
    pieces: list[str] = []
    close = watch_for(cast("expressions.Expression", field.close))
    if (yield from until(source, close, pieces.append)) is None:
        return
    text = "".join(pieces)
    pairs = _lines(text, parameters) if parameters.whole is None else _tags(text, parameters)
    values: dict[str, list[str]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(
            _converted(value, book.functions.types(name, key), is_json=parameters.is_json)
        )
    members: list[str] = []
    for key, found in values.items():
        value = f"[{', '.join(found)}]" if parameters.merges and len(found) > 1 else found[-1]
        members.append(f"{json_text(key)}: {value}")
    emit(f"{{{', '.join(members)}}}")
    book.end()


def _lines(text: str, parameters: Parameters) -> Iterable[tuple[str, str]]:
    line_separator, separator = parameters.separators
    for line in text.split(line_separator):
        key, found, value = line.strip().partition(separator)
        if found:
            yield key.strip(), value.strip()


def _tags(text: str, parameters: Parameters) -> Iterable[tuple[str, str]]:
    for groups in expressions.find_all(parameters.whole, text):
        yield groups["key"], groups.get("value", "")


def _pythonic(source: Source, field: Field, book: CallBook, *, is_bare: bool) -> Reading[None]:
    yield from source.space()
    if not field.in_lines:
        if (yield from source.peek()) != "[":
            return
        source.at += 1
    while True:
        yield from source.space()
        if book.num_calls and source.mark is None:
            source.mark = source.at
        if not (yield from _pythonic_call(source, book, is_bare=is_bare)):
            return
        yield from source.space()
        char = yield from source.peek()
        if field.in_lines:
            if not char or not _IDENTIFIER.fullmatch(char):
                return
            continue
        source.at += char in (",", "]")
        if char != ",":
            return


def _pythonic_call(source: Source, book: CallBook, *, is_bare: bool) -> Reading[bool]:
    name = yield from source.run(_IDENTIFIER, MAX_NAME)
    yield from source.space()
    if (yield from source.peek()) != "(" or not book.accepts(name, known=is_bare):
        return False
    source.at += 1
    emit: Callable[[str], None] | None = None
    separator = "{"
    while True:
        yield from source.space()
        if (yield from source.peek()) == ")":
            source.at += 1
            emit = emit or book.begin(name)
            emit("{}" if separator == "{" else "}")
            book.end()
            return True
        key = yield from source.run(_PARAMETER, MAX_NAME)
        yield from source.space()
        if not key or (yield from source.peek()) != "=":
            return False
        source.at += 1
        yield from source.space()
        emit = emit or book.begin(name)
        value = _Headed(emit, f"{separator}{json_text(key)}: ")
        is_value = yield from read_value(source, value, PYTHON)
        separator = ", " if value.has_begun else separator
        yield from source.space()
        char = yield from source.peek()
        if not is_value or char not in (",", ")") or not char:
            return False
        source.at += char == ","


class _Headed:
    """Passes fragments on, a text before the first."""

    __slots__ = ("_emit", "_head", "has_begun")

    def __init__(self, emit: Callable[[str], None], head: str) -> None:
        self._emit = emit
        self._head = head
        self.has_begun = False

    def __call__(self, text: str) -> None:
        self._emit(text if self.has_begun else self._head + text)
        self.has_begun = True
