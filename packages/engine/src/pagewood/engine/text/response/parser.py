"""The streaming parser of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from pagewood.engine.text.response.calls import CallBook, Captures, Overdue, read_calls
from pagewood.engine.text.response.conversion import Functions
from pagewood.engine.text.response.expressions import Expression
from pagewood.engine.text.response.part import Part
from pagewood.engine.text.response.source import Reading, Source
from pagewood.engine.text.response.template import Field, ResponseTemplate
from pagewood.engine.text.response.watch import until, watch_for

MAX_TAIL = 1 << 16
"""Most characters of the end of a prompt that are looked at."""


class ResponseParser:
    """Divides the text of one answer into content, reasoning and calls, while it comes.

    Invariant: the joined parts do not depend on how the text is divided. No output of a model is an error:

    - A section of calls that is none (broken JSON, no name) is content, as it was written, marks included.
    - A call that breaks off behind its name and the beginning of its arguments has been reported: its arguments are
      closed, so that they are a JSON object without what was incomplete; a text keeps what came of it. What follows is
      content, up to the close of the section.
    - A section that is not closed ends with the text.
    - Calls of functions that are not among `tools` are reported like others, so that the client sees them; but calls
      without an opening mark (`bare`) must name a tool, because they could be an answer in JSON.

    Content and reasoning lose the white space at their ends, as in transformers (unless the template says
    `strip: false`). Where transformers keeps only the last of several texts of content, all are reported, with the
    field's `join` between them, or a line break. Arguments in JSON are passed on as they are written; arguments that
    come as text are converted by the schema of the tool. An id is reported if it stands before the arguments.
    """

    __slots__ = ("_book", "_content", "_parts", "_reading", "_reasoning", "_source", "_template")

    def __init__(
        self, template: ResponseTemplate, *, tools: Sequence[Mapping[str, Any]] = (), prompt_tail: str = ""
    ) -> None:
        """Begin an answer.

        Args:
            template: how the model writes.
            tools: what may be called, as in OpenAI's API.
            prompt_tail: the end of the prompt. What is in it behind the last `start_anchor` belongs to the answer, such
                as an opened section of reasoning, but is not reported. Without an anchor, all of it does.

        Raises:
            ValueError: a tool has no name, or parameters that are not a schema.
        """
        self._template = template
        self._parts: list[Part] = []
        self._content = _Text("content", self._parts)
        self._reasoning = _Text("reasoning", self._parts)
        self._source = Source()
        self._book = CallBook(
            Functions(tools), report=self._parts.append, commit=self._commit, stray=self._content.show
        )
        self._reading = self._read()
        next(self._reading)
        tail = _behind_anchor(template, prompt_tail[-MAX_TAIL:])
        if tail:
            self.feed(tail)
            self._book.num_calls = 0
            for text in (self._content, self._reasoning):
                text.forget()

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of the answer; return what is known now.

        Raises:
            RuntimeError: the answer has been finished.
        """
        if self._source.ended:
            raise RuntimeError("feed must not be called after finish")
        idle = self._source.idle
        if idle is not None and not idle[0](text):
            idle[1](text)
        else:
            self._source.append(text)
            next(self._reading, None)
        return self._taken()

    def finish(self) -> list[Part]:
        """End the answer; return the rest. A second call returns nothing."""
        if not self._source.ended:
            self._source.ended = True
            next(self._reading, None)
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = self._parts
        taken = parts[:] if len(parts) < 2 else _joined(parts)
        parts.clear()
        return taken

    def _read(self) -> Reading[None]:
        """Read the whole answer."""
        yield  # until there is a text
        template, source = self._template, self._source
        outside = template.outside
        sections = [field for field in template.fields if field.open is not None]
        opens = [field.open for field in sections if field.open is not None]
        ends = [outside.close] if outside is not None and outside.close is not None else []
        watch = watch_for(*opens, *ends)
        region = self._reasoning if outside is not None and outside.kind == "reasoning" else self._content
        region.begin(outside)
        yield from self._bare()
        orphan: Expression | None = None  # the close of a section of calls, whose end is not known
        while True:
            hit = yield from until(source, watch if orphan is None else watch_for(*opens, *ends, orphan), region.show)
            if hit is None:
                region.end()
                return
            if hit.which >= len(sections):
                region.end()
                region.begin(outside)
                orphan = orphan if hit.which < len(sections) + len(ends) else None
                continue
            field = sections[hit.which]
            if field.kind == "calls":
                if (yield from self._calls(field, hit.found.length, hit.found.groups)):
                    orphan = field.close if field.content in ("json", "pythonic") else None
                    region.begin(outside)
                continue
            region.end()
            orphan = None
            inner = self._reasoning if field.kind == "reasoning" else self._content
            inner.begin(field)
            yield from until(source, watch_for(*([field.close] if field.close else [])), inner.show)
            inner.end()
            region.begin(outside)

    def _bare(self) -> Reading[None]:
        """Read calls that begin the answer without a mark."""
        fields = [field for field in self._template.fields if field.is_bare]
        if not fields or not self._book.functions:
            return
        self._source.mark = self._source.at
        yield from self._source.space()
        start = self._source.at
        char = yield from self._source.peek()
        for field in fields:
            if char and char in ("{[" if field.each else "{" if field.content == "json" else "["):
                self._source.at = start
                yield from self._calls(field, 0, {}, is_bare=True)
                return
        self._source.at, self._source.mark = self._source.mark, None

    def _calls(self, field: Field, length: int, captures: Captures, *, is_bare: bool = False) -> Reading[bool]:
        """Read a section of calls, whose open of `length` characters has been passed; return whether it has any."""
        source, before = self._source, self._book.num_calls
        if not is_bare:
            source.mark = source.at - length
        with suppress(Overdue):
            yield from read_calls(source, field, captures, self._book, is_bare=is_bare)
        if source.mark is not None:  # not reported
            source.at, source.mark = source.mark, None
            if self._book.num_calls == before:
                self._content.show(source.text[source.at : source.at + length])
                source.at += length
        return self._book.num_calls > before

    def _commit(self) -> None:
        """End the text before a call."""
        self._source.mark = None
        self._content.end()


class _Text:
    """The content or the reasoning of an answer, without white space at its ends."""

    __slots__ = ("_has_shown", "_is_stripped", "_join", "_kind", "_parts", "_pending", "_started")

    def __init__(self, kind: Literal["content", "reasoning"], parts: list[Part]) -> None:
        self._kind: Literal["content", "reasoning"] = kind
        self._parts = parts
        self._is_stripped = True
        self._join = ""
        self._has_shown = False  # in a section before
        self._started = False
        self._pending = ""

    def begin(self, field: Field | None) -> None:
        """Begin a section, if the one before has been ended."""
        self._is_stripped = field is None or field.strips
        self._join = "\n" if field is None else field.join

    def show(self, text: str) -> None:
        """Report a text, but hold back white space that may be at the end."""
        if self._started:
            if not self._pending and not text[-1:].isspace():
                if text:
                    self._parts.append(Part(self._kind, text))
                return
        elif self._is_stripped:
            text = text.lstrip()
        if not text:
            return
        body = text.rstrip() if self._is_stripped else text
        if not body:
            self._pending += text
            return
        if not self._started and self._has_shown:
            self._pending = self._join
        self._parts.append(Part(self._kind, self._pending + body))
        self._pending = text[len(body) :]
        self._started = True

    def end(self) -> None:
        """End the section."""
        self._has_shown |= self._started
        self._started = False
        self._pending = ""

    def forget(self) -> None:
        """Report nothing of what has come, but go on where it is."""
        self._has_shown = False
        self._pending = ""


def _behind_anchor(template: ResponseTemplate, text: str) -> str:
    """Return what comes behind the last anchor; all of the text if there is none."""
    watch = watch_for(template.anchor)
    end = at = 0
    while True:
        at, hit = watch.look(text, at, ended=True)
        if hit is None:
            return text[end:]
        at += hit.found.length
        end = at


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return parts with neighbours of the same text joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and part.kind == last.kind != "tool_call" and part.index == last.index:
            joined[-1] = Part(last.kind, last.text + part.text, last.index)
        else:
            joined.append(part)
    return joined
