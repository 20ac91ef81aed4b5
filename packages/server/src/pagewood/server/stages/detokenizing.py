"""The detokenizer stage: turns tokens into text, and ends a request at a stop string, a stop expression or its only
call."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from pagewood.engine.api import Delta, FinishReason, Refusal
from pagewood.engine.text import ResponseParser, ResponseTemplate, TextStream, Tokenizer, stops_of
from pagewood.server.dashboard.branch_text import with_text
from pagewood.server.messages import wire
from pagewood.server.messages.links import Receiver, Sender
from pagewood.server.messages.token_ids import bytes_of, ids_of
from pagewood.server.observe.logs import request_fields
from pagewood.server.stages.token_entries import TokenEntries

LOST = Refusal(message="The detokenizer process was restarted while it worked on this request.")

_ENDS_OF_TEXT = (None, FinishReason.STOP, FinishReason.LENGTH, FinishReason.CACHE_THRESHOLD)
"""Ends that an error or a stop string replaces."""

logger = logging.getLogger(__name__)


def run_detokenizer(
    tokenizer: Tokenizer, inbox: Receiver, outbox: Sender, *, stopped: Callable[[], bool], incarnation: int = 0
) -> None:
    """Serve until `stopped`; `incarnation` counts the detokenizer processes of this server from 0."""
    streams: dict[int, TextStreams] = {}  # by replica: when one is replaced, the requests of the others go on
    while not stopped():
        for message in wire.read(wire.from_engine, inbox.receive(timeout_s=None)):
            if message.replica not in streams:
                streams[message.replica] = TextStreams(tokenizer, incarnation=incarnation)
            outbox.send(wire.encode(streams[message.replica].take(message)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Open:
    """A request that has not ended."""

    stream: TextStream
    """Finds the stop strings, if the answer is plain text."""
    entries: TokenEntries
    parser: ResponseParser | None
    """Finds the stop strings, if it exists. None: the answer is plain text."""
    hides_reasoning: bool
    """Whether log probabilities of reasoning are hidden from the client."""
    is_scoring: bool
    """Whether its answer is not shown."""
    reports_tokens: bool
    """Whether its client gets the ids of its tokens."""
    prefix: str
    """Shown before its first text."""
    prompt: tuple[wire.TokenEntry, ...] | None
    """Entries of all tokens of its prompt, if they are shown."""
    prompt_tokens: bytes
    """Ids of its prompt for the client, int32, little-endian."""
    hidden: frozenset[int]
    """Tokens that end it and are answered, and whose text is not shown."""
    keeps_output: bool
    """Whether the HTTP process gets the ids of all its tokens."""
    begun: wire.Begun | None
    """What its client has had from an earlier process; None: nothing."""

    @property
    def has_ended(self) -> bool:
        """Whether the answer has ended, although the engine may send more tokens."""
        return self.stream.stopped_by is not None if self.parser is None else self.parser.is_over

    def read(self, delta: Delta) -> wire.Answer:
        """Return the addition of `delta` to its answer."""
        prefix, prompt, prompt_tokens = ("", None, b"")
        if delta.first:
            prefix, prompt, prompt_tokens = self.prefix, self.prompt, self.prompt_tokens
        if self.begun is not None:
            delta = replace(delta, num_cached_tokens=self.begun.num_cached_tokens, explanation=None)
        finish, refusal = delta.finish, delta.refusal
        if self.is_scoring:
            # It ends with 0 shown tokens. Whether the hidden token ended the text does not matter.
            finish = FinishReason.LENGTH if finish is FinishReason.STOP else finish
            logprobs = None if prompt is None else wire.Logprobs((), prompt)
            return _answer_to(
                delta, finish, refusal, text=prefix, num_unused=delta.num_output_tokens, logprobs=logprobs
            )
        new = self._push(delta)
        if finish is not None:
            self._end(new, finish)
        logprobs = None
        if delta.logprobs or prompt is not None or prompt_tokens:
            tokens = self.entries.of(delta.logprobs[: new.num_tokens])
            if new.hidden:
                tokens = tuple(token for index, token in enumerate(tokens) if index not in new.hidden)
            if tokens or not new.hidden or prompt is not None or prompt_tokens:
                logprobs = wire.Logprobs(tokens, prompt, prompt_tokens)
        if self.has_ended and finish in _ENDS_OF_TEXT:
            finish = FinishReason.STOP
        return _answer_to(
            delta,
            finish,
            refusal,
            text=prefix + new.text,
            num_unused=new.num_unused,
            logprobs=logprobs,
            parts=None if self.parser is None else tuple(new.parts),
            stopped_by=self.stream.stopped_by if self.parser is None else self.parser.stopped_by,
            tokens=bytes_of(delta.tokens[: new.num_tokens]) if self.reports_tokens else b"",
            output=delta.tokens if self.keeps_output else (),
            num_tokens=new.num_tokens,
        )

    def replay(self, tokens: Sequence[int]) -> None:
        """Go on to where the client is that has had the text of `tokens`, and show nothing of it."""
        for token in tokens:  # as `_push` takes them
            self._take(_New(), (token,))
        self.entries.skip(tokens)

    def _push(self, delta: Delta) -> _New:
        """Append the tokens of a step, up to the one with which the answer ends.

        That token is the last one of the answer: it counts and has a log probability, although the stop string, and
        what comes with it in the same token, is not shown.
        """
        new = _New()
        hides = self.hides_reasoning and bool(delta.logprobs)
        # `tokens` does not hold the token that ended the request, unless asked for; `num_output_tokens` counts it.
        is_kept = bool(delta.tokens) and delta.tokens[-1] in self.hidden
        num_ending = int(delta.finish is FinishReason.STOP and not is_kept)
        if len(delta.tokens) < 2 and not hides:
            self._take(new, delta.tokens)
            if delta.tokens and self.has_ended:
                new.num_unused = num_ending
            return new
        for token in delta.tokens:
            parser, num_parts = self.parser, len(new.parts)
            was_reasoning = parser is not None and parser.is_reasoning
            self._take(new, (token,))
            is_reasoning = parser is not None and (was_reasoning or parser.is_reasoning)
            # A token that begins or ends the reasoning may also have other text.
            if hides and is_reasoning and all(part.kind == "reasoning" for part in new.parts[num_parts:]):
                new.hidden.add(new.num_tokens - 1)
            if self.has_ended:
                new.num_unused = len(delta.tokens) - new.num_tokens + num_ending
                break
        return new

    def _take(self, new: _New, tokens: Sequence[int]) -> None:
        text = self.stream.push(tokens)
        new.num_tokens += len(tokens)
        if self.parser is None:
            new.text += text
        elif text:
            new.parts += self.parser.feed(text)

    def _end(self, new: _New, finish: FinishReason) -> None:
        """Add the text that was held back; the sequence has ended."""
        text = self.stream.finish()
        if self.parser is None:
            new.text += text
            return
        if text:
            new.parts += self.parser.feed(text)
        new.parts += self.parser.finish(is_cut=finish is not FinishReason.STOP)


@dataclass(slots=True)
class _New:
    """The addition of a step to an answer."""

    text: str = ""  # written by: detokenizing
    parts: list[wire.Part] = field(default_factory=list[wire.Part])  # written by: detokenizing
    num_tokens: int = 0  # written by: detokenizing
    """Tokens of the step that belong to the answer."""
    num_unused: int = 0  # written by: detokenizing
    """Tokens of the step after the end of the answer."""
    hidden: set[int] = field(default_factory=set[int])  # contents written by: detokenizing
    """Tokens of the step whose log probabilities are hidden from the client."""


class TextStreams:
    """The text of every request that the engine works on.

    Invariant: holds only requests that have not ended. A request whose first Delta this process has not seen, or whose
    text fails, gets an error and no more text.

    Args:
        tokenizer: decodes.
        incarnation: of this detokenizer process, noted in its messages.
    """

    __slots__ = (
        "_engine",
        "_incarnation",
        "_marks",
        "_stray_marks",
        "_streams",
        "_template",
        "_template_without_calls",
        "_tokenizer",
    )

    def __init__(self, tokenizer: Tokenizer, *, incarnation: int = 0) -> None:
        self._tokenizer = tokenizer
        self._template = tokenizer.response_template
        self._template_without_calls = None if self._template is None else _without_calls(self._template)
        self._marks = (
            frozenset[str]() if self._template is None else self._template.marks_with(tokenizer.special_tokens)
        )
        """Special tokens that the parser must see, because they are its marks."""
        self._stray_marks = re.compile("|".join(map(re.escape, self._marks))) if self._marks else None
        self._incarnation = incarnation
        self._streams: dict[str, _Open | None] = {}  # written by: _is_late, _answer. None: has ended in an error
        self._engine = -1  # written by: _is_late. Newest incarnation of the engine; -1 before its first message

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    def take(self, message: wire.FromEngine) -> wire.ToHttp:
        """Return the message for HTTP that follows from `message`."""
        match message:
            case wire.Step() if self._is_late(message.incarnation):
                return wire.Answers(())
            case wire.Step():
                return wire.Answers(
                    tuple([answer for delta in message.deltas if (answer := self._answer(delta)) is not None]),
                    message.replica,
                )
            case wire.Snapshot():
                return with_text(self._tokenizer, message)
            case wire.Loading() | wire.Pulse():
                return replace(message, relay=self._incarnation)
            case wire.CacheChanges() | wire.OtherLoad():
                return message

    def _is_late(self, incarnation: int) -> bool:
        """Return whether a step comes from an engine that was replaced; forget the requests of replaced engines.

        Only steps show that an engine was replaced: while it loads, the one before it may still work.
        """
        if incarnation > self._engine:
            self._engine = incarnation
            self._streams.clear()
        return incarnation < self._engine

    def _answer(self, delta: Delta) -> wire.Answer | None:
        """Return the answer to send for `delta`; None if there is nothing new for its client."""
        streams, request_id, finish = self._streams, delta.request_id, delta.finish
        error = LOST
        if delta.first or request_id in streams:
            open_ = None if delta.first else streams[request_id]
            if not delta.first and (open_ is None or open_.has_ended):
                if finish is None:  # its client has already received the end
                    return None
                del streams[request_id]
                return _answer_to(delta, finish, delta.refusal)
            try:
                if open_ is None:
                    carried = wire.carried.decode(delta.carry) if delta.carry else wire.TextOptions()
                    if isinstance(carried, wire.Encoded):
                        return _answer_to(delta, finish, encoded=carried)
                    streams[request_id] = open_ = self._open(delta, carried)
                    if carried.begun is not None:
                        open_.replay(ids_of(carried.begun.output))
                answer = open_.read(delta)
            except Exception as exception:  # a tokenizer comes with its model: any error concerns this request only
                logger.exception(
                    "request %s: its tokens cannot be decoded", request_id, extra=request_fields(request_id)
                )
                error = Refusal(message=f"The tokens of the answer cannot be decoded: {exception}")
            else:
                if finish is not None:
                    del streams[request_id]
                return answer
        if finish is None:
            streams[request_id] = None
        else:
            streams.pop(request_id, None)
        if finish in _ENDS_OF_TEXT:
            return _answer_to(delta, FinishReason.ERROR, error)
        return _answer_to(delta, finish, delta.refusal)

    def _open(self, delta: Delta, options: wire.TextOptions) -> _Open:
        """Return the state of a request at its first `delta`."""
        parser = self._parser(options)
        entries = TokenEntries(self._tokenizer, start=len(options.prefix))
        prompt = None
        if options.first_token is not None:
            prompt = self._prompt(options.first_token, delta)
        is_new = options.begun is None
        hidden = frozenset(options.hidden)
        return _Open(
            stream=TextStream(
                self._tokenizer,
                stop=options.stop,
                stop_regex=options.stop_regex,
                skip_special_tokens=not options.shows_special_tokens,
                hidden=hidden,
            )
            if parser is None
            else TextStream(self._tokenizer, keep=self._marks, hidden=hidden),
            entries=entries,
            parser=parser,
            hides_reasoning=options.reading is not None and not options.reading.shows_reasoning,
            is_scoring=options.is_scoring,
            reports_tokens=options.reports_tokens,
            prefix=options.prefix if parser is None and is_new else "",
            prompt=prompt,
            prompt_tokens=options.prompt_tokens,
            hidden=hidden,
            keeps_output=options.keeps_output,
            begun=options.begun,
        )

    def _parser(self, options: wire.TextOptions) -> ResponseParser | None:
        """Return the parser of an answer. If no function was offered, calls are text."""
        reading = options.reading
        template = None if reading is None else self._template if reading.tools else self._template_without_calls
        if reading is None or template is None:
            return None
        return ResponseParser(
            template,
            tools=reading.tools,
            prompt_tail=reading.prompt_tail,
            stops=stops_of(options.stop, options.stop_regex) if options.stop or options.stop_regex else None,
            parallel=reading.parallel,
            hidden=self._stray_marks,
        )

    def _prompt(self, first_token: int, delta: Delta) -> tuple[wire.TokenEntry, ...]:
        """Return the entries of all tokens of a prompt."""
        entries = TokenEntries(self._tokenizer, start=0)
        return (entries.first_of_prompt(first_token), *entries.of(delta.prompt_logprobs))


def _without_calls(template: ResponseTemplate) -> ResponseTemplate | None:
    """Return a template that reads calls as text; None: the whole answer is text."""
    fields = tuple(field for field in template.fields if field.kind != "calls")
    return dataclasses.replace(template, fields=fields) if any(field.kind != "content" for field in fields) else None


def _answer_to(
    delta: Delta,
    finish: FinishReason | None,
    refusal: Refusal | None = None,
    *,
    text: str = "",
    num_unused: int = 0,
    logprobs: wire.Logprobs | None = None,
    parts: tuple[wire.Part, ...] | None = None,
    stopped_by: str | None = None,
    tokens: bytes = b"",
    encoded: wire.Encoded | None = None,
    output: tuple[int, ...] = (),
    num_tokens: int = 0,
) -> wire.Answer:
    """Return the answer; `num_unused` of the new tokens are not shown, and do not count, `num_tokens` are."""
    return wire.Answer(
        delta.request_id,
        text,
        finish,
        delta.finish is not None,
        refusal,
        delta.num_prompt_tokens,
        delta.num_cached_tokens,
        delta.num_output_tokens - num_unused,
        delta.num_drafted_tokens,
        delta.num_accepted_tokens,
        logprobs,
        parts,
        stopped_by,
        delta.vector,
        tokens,
        delta.explanation,
        delta.timings,
        encoded,
        output,
        (delta.weights, num_tokens) if delta.weights else None,
        None if delta.experts is None else delta.experts.without_last(num_unused),
        None if delta.states is None else delta.states.without_last(num_unused),
    )
