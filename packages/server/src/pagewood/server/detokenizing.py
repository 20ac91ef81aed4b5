"""The detokenizer stage: turns tokens into text for clients, and ends a request at its first stop string or
expression."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pagewood.engine.api import Delta, FinishReason, Refusal
from pagewood.engine.text import Part, ResponseParser, ResponseTemplate, TextStream, Tokenizer
from pagewood.server import wire
from pagewood.server.links import Receiver, Sender
from pagewood.server.token_entries import TokenEntries
from pagewood.server.token_ids import bytes_of, ids_of

LOST = Refusal(message="The detokenizer process was restarted while it worked on this request.")

logger = logging.getLogger(__name__)


def run_detokenizer(
    tokenizer: Tokenizer, inbox: Receiver, outbox: Sender, *, stopped: Callable[[], bool], incarnation: int = 0
) -> None:
    """Serve until `stopped`; `incarnation` counts the detokenizer processes of this server from 0."""
    streams = TextStreams(tokenizer, incarnation=incarnation)
    while not stopped():
        for message in wire.read(wire.from_engine, inbox.receive(timeout_s=None)):
            outbox.send(wire.encode(streams.take(message)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A request whose end is still to come."""

    stream: TextStream
    entries: TokenEntries
    parser: ResponseParser | None
    """None: the answer is plain text."""
    is_scoring: bool
    """Whether its answer is not shown."""
    is_encoding: bool
    """Whether the ids of its prompt are the whole answer."""
    reports_tokens: bool
    """Whether its client gets the ids of its tokens."""


class _News(NamedTuple):
    """What one step adds to an answer."""

    text: str = ""
    num_unused: int = 0
    """New tokens that are not shown, and do not count."""
    logprobs: wire.Logprobs | None = None
    parts: tuple[wire.Part, ...] | None = None
    """What `text` says, if the answer is read by a response template."""
    stopped_by: str | None = None
    """The stop string, or the match of an expression, that ended the text in this step."""
    tokens: bytes = b""
    """Ids of the new tokens that are shown, int32, little-endian, if they were asked for."""


_NO_NEWS = _News()


class TextStreams:
    """The text of every request that the engine works on.

    Invariant: holds only requests whose end is still to come. A request whose first Delta this process has not seen,
    or whose text fails, gets no more text but an error.

    Args:
        tokenizer: decodes.
        incarnation: of this detokenizer process, noted in what it passes on.
    """

    __slots__ = (
        "_engine",
        "_incarnation",
        "_shows_special_tokens",
        "_streams",
        "_template",
        "_template_without_calls",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, *, incarnation: int = 0) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.response_template
        self._template_without_calls = None if self._template is None else _without_calls(self._template)
        self._shows_special_tokens = self._template is not None and self._template.marks_with(tokenizer.special_tokens)
        """Whether the parser must see special tokens, because they are its marks."""
        self._incarnation = incarnation
        self._streams: dict[str, _Open | None] = {}  # written by: _is_late, _answer. None: has ended in an error
        self._engine = -1  # written by: _is_late. Newest incarnation of the engine; -1 before its first message

    @property
    def num_open(self) -> int:
        """Requests whose end is still to come."""
        return len(self._streams)

    def take(self, message: wire.FromEngine) -> wire.ToHttp:
        """Return the message for HTTP that follows from `message`."""
        is_late = self._is_late(message.incarnation)
        match message:
            case wire.Step() if is_late:
                return wire.Answers(())
            case wire.Step():
                return wire.Answers(
                    tuple([answer for delta in message.deltas if (answer := self._answer(delta)) is not None])
                )
            case wire.Loading() | wire.Pulse():
                return msgspec.structs.replace(message, relay=self._incarnation)

    def _is_late(self, incarnation: int) -> bool:
        """Return whether a message comes from an engine that was replaced; forget the requests of replaced engines."""
        if incarnation > self._engine:
            self._engine = incarnation
            self._streams.clear()
        return incarnation < self._engine

    def _answer(self, delta: Delta) -> wire.Answer | None:
        """Return the answer to send for `delta`; None if there is nothing new for its client."""
        error: Refusal | None = None
        news = _NO_NEWS
        is_known = delta.first or delta.request_id in self._streams
        open_ = self._streams.get(delta.request_id)
        is_over = is_known and not delta.first and (open_ is None or open_.stream.stopped_by is not None)
        if not is_known:
            error = LOST
        elif not is_over:
            try:
                open_, news = self._read(delta)
            except Exception as exception:  # a tokenizer comes with its model: any error is this request's alone
                logger.exception("request %s: its tokens cannot be decoded", delta.request_id)
                error = Refusal(message=f"The tokens of the answer cannot be decoded: {exception}")
        ended = delta.finish is not None
        if ended:
            self._streams.pop(delta.request_id, None)
        else:
            self._streams[delta.request_id] = None if error is not None else open_
        if is_over:  # its client has already received the end
            return _answer_to(delta, _NO_NEWS, finish=delta.finish, ended=True) if ended else None
        ends_text = delta.finish in (None, FinishReason.STOP, FinishReason.LENGTH)
        if error is not None and ends_text:
            return _answer_to(delta, _NO_NEWS, finish=FinishReason.ERROR, ended=ended, refusal=error)
        finish = delta.finish
        if ends_text and open_ is not None and open_.stream.stopped_by is not None:
            finish = FinishReason.STOP
        elif open_ is not None and open_.is_scoring and finish is FinishReason.STOP:
            finish = FinishReason.LENGTH  # of no tokens; that the token which is not shown ended the text says nothing
        elif open_ is not None and open_.is_encoding:
            delta, finish = delta._replace(refusal=None), FinishReason.STOP
        return _answer_to(delta, news, finish=finish, ended=ended)

    def _read(self, delta: Delta) -> tuple[_Open, _News]:
        """Return the state of a request, and what `delta` adds to its answer."""
        prefix, prompt, prompt_tokens = "", None, b""
        open_ = self._streams.get(delta.request_id)
        if delta.first or open_ is None:
            options = wire.text_options.decode(delta.carry) if delta.carry else wire.TextOptions()
            parser = self._parser(options.reading)
            stream = TextStream(
                self._tokenizer,
                stop=options.stop,
                stop_regex=options.stop_regex,
                skip_special_tokens=parser is None or not self._shows_special_tokens,
            )
            prefix, prompt_tokens = options.prefix, options.prompt_tokens
            entries = TokenEntries(self._tokenizer, start=len(prefix))
            open_ = _Open(
                stream=stream,
                entries=entries,
                parser=parser,
                is_scoring=options.is_scoring,
                is_encoding=options.is_encoding,
                reports_tokens=options.reports_tokens,
            )
            if options.first_token is not None:
                prompt = self._prompt(options.first_token, delta)
            elif options.shows_pieces:
                prompt = tuple([entries.first_of_prompt(token) for token in ids_of(prompt_tokens)])
        if open_.is_scoring:
            return open_, _News(prefix, delta.num_output_tokens, None if prompt is None else wire.Logprobs((), prompt))
        text, num_shown, num_unused = _push(open_.stream, delta)
        if delta.finish is not None:
            text += open_.stream.finish()
        logprobs = None
        if delta.logprobs or prompt is not None or prompt_tokens:
            logprobs = wire.Logprobs(open_.entries.of(delta.logprobs[:num_shown]), prompt, prompt_tokens)
        tokens = bytes_of(delta.tokens[:num_shown]) if open_.reports_tokens else b""
        if open_.parser is None:
            return open_, _News(prefix + text, num_unused, logprobs, None, open_.stream.stopped_by, tokens)
        parts = open_.parser.feed(text) if text else []
        if delta.finish is not None or open_.stream.stopped_by is not None:
            parts += open_.parser.finish()
        shown = tuple([_part(part) for part in parts])
        return open_, _News("", num_unused, logprobs, shown, open_.stream.stopped_by, tokens)

    def _parser(self, reading: wire.Reading | None) -> ResponseParser | None:
        """Return what reads an answer. Where no function was offered, calls are text."""
        template = None if reading is None else self._template if reading.tools else self._template_without_calls
        if reading is None or template is None:
            return None
        return ResponseParser(template, tools=reading.tools, prompt_tail=reading.prompt_tail)

    def _prompt(self, first_token: int, delta: Delta) -> tuple[wire.TokenEntry, ...]:
        """Return the entries of all tokens of a prompt."""
        entries = TokenEntries(self._tokenizer, start=0)
        return (entries.first_of_prompt(first_token), *entries.of(delta.prompt_logprobs))


def _without_calls(template: ResponseTemplate) -> ResponseTemplate | None:
    """Return a template by which calls are text; None: everything is."""
    fields = tuple(field for field in template.fields if field.kind != "calls")
    return dataclasses.replace(template, fields=fields) if any(field.kind != "content" for field in fields) else None


def _part(part: Part) -> wire.Part:
    return wire.Part(part.kind, part.text, part.index, part.id)


def _push(stream: TextStream, delta: Delta) -> tuple[str, int, int]:
    """Append the tokens of a step to a stream, up to the one that completes a stop string.

    That token is the last one of the answer: it counts and has a log probability, although the stop string, and what
    comes with it in the same token, is not shown.

    Returns:
        The new text, the number of tokens up to that one, and the number of tokens after it in the same step.
    """
    # `tokens` does not hold the token that ended the request, but `num_output_tokens` counts it.
    num_ending = int(delta.finish is FinishReason.STOP)
    if len(delta.tokens) < 2:
        text = stream.push(delta.tokens)
        return text, len(delta.tokens), num_ending if delta.tokens and stream.stopped_by is not None else 0
    text = ""
    for index, token in enumerate(delta.tokens):
        text += stream.push((token,))
        if stream.stopped_by is not None:
            return text, index + 1, len(delta.tokens) - 1 - index + num_ending
    return text, len(delta.tokens), 0


def _answer_to(
    delta: Delta, news: _News, *, finish: FinishReason | None, ended: bool, refusal: Refusal | None = None
) -> wire.Answer:
    return wire.Answer(
        request_id=delta.request_id,
        text=news.text,
        finish=finish,
        ended=ended,
        refusal=refusal or delta.refusal,
        num_prompt_tokens=delta.num_prompt_tokens,
        num_cached_tokens=delta.num_cached_tokens,
        num_output_tokens=delta.num_output_tokens - news.num_unused,
        num_drafted_tokens=delta.num_drafted_tokens,
        num_accepted_tokens=delta.num_accepted_tokens,
        logprobs=news.logprobs,
        parts=news.parts,
        stopped_by=news.stopped_by,
        vector=delta.vector,
        tokens=news.tokens,
        explanation=delta.explanation,
    )
