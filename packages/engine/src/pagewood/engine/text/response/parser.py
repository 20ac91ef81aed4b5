"""The streaming parser of answers."""

from __future__ import annotations

import re
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
from pagewood.engine.text.stop_regex import Stops

MAX_TAIL = 1 << 16
"""Most characters at the end of a prompt that are read."""


class _Over(Exception):
    """The answer ends here, regardless of the text that follows."""


class ResponseParser:
    """Divides the text of one answer into content, reasoning and calls, while it arrives.

    Invariant: the joined parts do not depend on how the text is cut into pieces. No output of a model is an error:

    - A malformed section of calls (broken JSON, no name) is content, unchanged, marks included.
    - A call is complete when the model has closed it: then a `call_end` is reported. A call that breaks off after its
      name and the beginning of its arguments has been reported, but has no `call_end`, and the incomplete part of its
      arguments is missing. If the model goes on after an error, that text is content, up to the close of the section.
    - An unclosed section ends with the text. If the text was cut (`finish`), the beginning of a mark, and a section of
      calls before the name of its first call, are not shown, because the model has not written them as text.
    - Calls of functions that are not among `tools` are reported like others, so that the client sees them; but calls
      without an opening mark (`bare`) must name a tool, because they could be an answer in JSON.

    Content and reasoning lose the white space at their ends, as in transformers (unless the template says
    `strip: false`). If there are several texts of content, transformers keeps only the last one; here all are reported,
    with the field's `join` or a line break between them. Arguments in JSON are passed on unchanged; arguments written
    as text are converted by the schema of the tool. An id is reported if it stands before the arguments.

    Stop strings and expressions are searched in each text of content by itself, without white space before it. White
    space after it may precede a call, and is then no content: if the template has calls, it is searched only when more
    content follows.
    """

    __slots__ = (
        "_book", "_content", "_parallel", "_parts", "_reading", "_reasoning", "_source", "_stops", "_template",
        "is_over", "is_reasoning",
    )  # fmt: skip

    def __init__(
        self,
        template: ResponseTemplate,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        prompt_tail: str = "",
        stops: Stops | None = None,
        parallel: bool = True,
        hidden: re.Pattern[str] | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            template: the model's format.
            tools: functions that may be called, as in OpenAI's API.
            prompt_tail: the end of the prompt. The text after its last `start_anchor` belongs to the answer, such as an
                opened section of reasoning, but is not reported. Without an anchor, all of it belongs to the answer.
            stops: searches the content for ends of the answer.
            parallel: whether there may be several calls; otherwise the answer ends after the first complete one.
            hidden: finds texts that are never shown, such as special tokens that begin or end no section here.

        Raises:
            ValueError: a tool has no name, or parameters that are not a schema.
        """
        self._template = template
        self._parts: list[Part] = []
        self._content = _Text("content", self._parts, hidden)
        self._reasoning = _Text("reasoning", self._parts, hidden)
        self._source = Source()
        self._stops: Stops | None = None  # nothing in the prompt ends the answer
        self._parallel = True
        self.is_over = False  # written by: parser
        """Whether the answer has ended before its text: at a stop string, or after the only call that it may have."""
        self.is_reasoning = False  # written by: parser
        """Whether the next text is reasoning, as far as is known."""
        self._book = CallBook(
            Functions(tools),
            report=self._parts.append,
            commit=self._commit,
            ended=self._end_of_call,
            stray=self._content.show,
        )
        self._reading = self._read()
        next(self._reading)
        tail = _behind_anchor(template, prompt_tail[-MAX_TAIL:])
        if tail:
            self.feed(tail)
            self._book.forget()
            for text in (self._content, self._reasoning):
                text.forget()
        self._stops = self._content.stops = stops
        self._content.waits = template.has_calls
        self._parallel = parallel

    @property
    def stopped_by(self) -> str | None:
        """The stop string or the match of an expression that ended the answer; or None."""
        return None if self._stops is None else self._stops.matched

    @property
    def num_held(self) -> int:
        """The last characters whose section is not known yet, or that may end the answer."""
        source = self._source
        return len(source.text) - (source.at if source.mark is None else source.mark) + self._content.num_held

    def feed(self, text: str) -> list[Part]:
        """Take the next piece of the answer; return the parts that are known now. After `is_over`, no more parts come.

        Raises:
            RuntimeError: the answer has been finished.
        """
        if self._source.ended:
            raise RuntimeError("feed must not be called after finish")
        if self.is_over:
            return []
        idle = self._source.idle
        try:
            if idle is not None and not idle[0](text):
                idle[1](text)
            else:
                self._source.append(text)
                next(self._reading, None)
        except _Over:
            self.is_over = True
        return self._taken()

    def finish(self, *, is_cut: bool = False) -> list[Part]:
        """End the answer; return the rest. A second call returns nothing.

        Args:
            is_cut: whether something other than the model ended the answer, such as a limit of its length.
        """
        if not self._source.ended:
            self._source.ended, self._source.is_cut = True, is_cut
            if not self.is_over:
                try:
                    next(self._reading, None)
                except _Over:
                    self.is_over = True
        return self._taken()

    def _taken(self) -> list[Part]:
        parts = self._parts
        taken = parts[:] if len(parts) < 2 else _joined(parts)
        parts.clear()
        return taken

    def _read(self) -> Reading[None]:
        """Read the whole answer."""
        yield  # until there is text
        template, source = self._template, self._source
        outside = template.outside
        sections = [field for field in template.fields if field.open is not None]
        opens = [field.open for field in sections if field.open is not None]
        ends = [outside.close] if outside is not None and outside.close is not None else []
        watch = watch_for(*opens, *ends)
        region = self._reasoning if outside is not None and outside.kind == "reasoning" else self._content
        region.begin(outside)
        self.is_reasoning = region is self._reasoning
        yield from self._bare()
        orphan: Expression | None = None  # the close of a section of calls whose end is not known
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
            self.is_reasoning = inner is self._reasoning
            yield from until(source, watch_for(*([field.close] if field.close else [])), inner.show)
            inner.end()
            region.begin(outside)
            self.is_reasoning = region is self._reasoning

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
        """Read a section of calls after its open of `length` characters; return whether it has any calls."""
        source, before = self._source, self._book.num_calls
        if not is_bare:
            source.mark = source.at - length
        if not source.is_cut or source.at < len(source.text):
            with suppress(Overdue):
                yield from read_calls(source, field, captures, self._book, is_bare=is_bare)
        has_broken_off = self._book.num_calls > before and self._book.is_open
        if source.ended and (has_broken_off or (source.is_cut and source.mark is not None)):
            source.at, source.mark = len(source.text), None  # the rest belongs to a call that the end cut
        elif source.mark is not None:  # not reported
            source.at, source.mark = source.mark, None
            if self._book.num_calls == before:
                self._content.show(source.text[source.at : source.at + length])
                source.at += length
        return self._book.num_calls > before

    def _commit(self) -> None:
        """End the text before a call."""
        self._source.mark = None
        self._content.end()

    def _end_of_call(self) -> None:
        """End the answer after a call, if there may be no second one."""
        if not self._parallel:
            raise _Over


class _Text:
    """The content or the reasoning of an answer, without white space at its ends, up to the end of the answer."""

    __slots__ = (
        "_has_shown", "_hidden", "_is_at_start", "_is_stripped", "_join", "_kind", "_lead", "_parts", "_pending",
        "_started", "stops", "waits",
    )  # fmt: skip

    def __init__(
        self, kind: Literal["content", "reasoning"], parts: list[Part], hidden: re.Pattern[str] | None
    ) -> None:
        self._kind: Literal["content", "reasoning"] = kind
        self._parts = parts
        self._hidden = hidden
        self.stops: Stops | None = None  # written by: parser
        """Searches for the end of the answer."""
        self.waits = False  # written by: parser
        """Whether white space is searched only when more text follows."""
        self._is_stripped = True
        self._join = ""
        self._has_shown = False  # in a section before
        self._is_at_start = True  # of the section: only white space has come
        self._started = False  # whether some of the section was reported, or is held back by the search
        self._lead = ""  # text to put before the section's first text
        self._pending = ""

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._pending) + (0 if self.stops is None else self.stops.num_held)

    def begin(self, field: Field | None) -> None:
        """Begin a section, if the one before has been ended."""
        self._is_stripped = field is None or field.strips
        self._join = "\n" if field is None else field.join

    def show(self, text: str) -> None:
        """Report a text, but hold back white space at its end, or the possible beginning of the answer's end.

        Raises:
            _Over: the answer ends in it; the text before the end is reported.
        """
        if self._hidden is not None:
            text = self._hidden.sub("", text)
        if self._is_at_start:
            text = text.lstrip() if self._is_stripped else text
            self._is_at_start = not text
        if self.stops is None or self.waits:
            self._strip(text)
        else:
            self._strip(self.stops.push(text))
            self._check()

    def end(self) -> None:
        """End the section.

        Raises:
            _Over: as `show`.
        """
        if self.stops is not None:
            (self._report if self.waits else self._strip)(self.stops.flush())
            self._check()
        self._has_shown |= self._started
        self._is_at_start = True
        self._started = False
        self._lead = self._pending = ""

    def forget(self) -> None:
        """Skip the text so far without reporting it."""
        self._has_shown = False
        self._lead = self._pending = ""

    def _strip(self, text: str) -> None:
        """Pass a text on, but hold back white space that may be at its end."""
        if not text:
            return
        body = text.rstrip() if self._is_stripped else text
        if not body:
            self._pending += text
            return
        if not self._started and self._has_shown:
            self._lead = self._join
        self._started = True
        whole, self._pending = self._pending + body, text[len(body) :]
        if self.stops is None or not self.waits:
            self._report(whole)
        else:
            self._report(self.stops.push(whole))
            self._check()

    def _report(self, text: str) -> None:
        if text:
            self._parts.append(Part(self._kind, self._lead + text))
            self._lead = ""

    def _check(self) -> None:
        """End the answer if its end was found."""
        if self.stops is not None and self.stops.matched is not None:
            raise _Over


def _behind_anchor(template: ResponseTemplate, text: str) -> str:
    """Return the text after the last anchor; the whole text if there is none."""
    watch = watch_for(template.anchor)
    end = at = 0
    while True:
        at, hit = watch.look(text, at, ended=True)
        if hit is None:
            return text[end:]
        at += hit.found.length
        end = at


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Return parts, with adjacent pieces of one text joined."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if last is not None and part.kind == last.kind != "tool_call" and part.index == last.index:
            joined[-1] = Part(last.kind, last.text + part.text, last.index)
        else:
            joined.append(part)
    return joined
