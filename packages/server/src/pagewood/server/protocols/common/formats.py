"""The parts of an answer that all protocols have, and the Protocol of their formats, which the sending code needs."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

import msgspec

from pagewood.engine.api import Explanation, RequestTimings, Rows
from pagewood.engine.weight_spans import WeightSpan, add_span, spans_shown
from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.messages.token_ids import ids_of
from pagewood.server.protocols.common.timings import Timings, timings

EVENTS = "text/event-stream; charset=utf-8"
"""Content type of server-sent events."""
LINES = "application/x-ndjson"
"""Content type of lines of JSON."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Prompt tokens by their origin."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of reasoning, and draft tokens that were verified. Rejected ones are not in `completion_tokens`."""

    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """UNSET: the answers are plain text."""
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    """UNSET: the engine does not speculate."""
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET
    """UNSET: the answers are plain text, and the engine does not speculate."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the steps that wrote reasoning; 0 if the answers are plain text."""
        return (self.completion_tokens_details and self.completion_tokens_details.reasoning_tokens) or 0


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of one answer, taken from its messages."""

    num_prompt_tokens: int = 0  # written by: add
    num_cached_tokens: int = 0  # written by: add
    num_output_tokens: int = 0  # written by: add
    num_drafted_tokens: int = 0  # written by: add
    num_accepted_tokens: int = 0  # written by: add
    num_reasoning_tokens: int = 0  # written by: _count
    spans: list[WeightSpan] = field(default_factory=list[WeightSpan])
    """Which weights have computed its tokens; empty: those that the engine began with."""  # contents written by: add
    _num_counted: int = 0  # written by: _count
    """Output tokens up to the last step that showed something."""
    _last_kind: str = ""  # written by: _count
    """Kind of the last section of the answer."""

    def add(self, answer: wire.Answer) -> None:
        """Take over the counts of the latest answer; they only grow."""
        if answer.computed is not None or self.spans:
            self._note_version(answer)
        if answer.num_output_tokens > self.num_output_tokens:
            self.num_output_tokens = answer.num_output_tokens
        if answer.num_prompt_tokens > self.num_prompt_tokens:
            self.num_prompt_tokens = answer.num_prompt_tokens
        if answer.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = answer.num_cached_tokens
        if answer.num_drafted_tokens:
            self.num_drafted_tokens = answer.num_drafted_tokens
            self.num_accepted_tokens = answer.num_accepted_tokens
        if answer.parts is not None:
            self._count(answer, answer.parts)

    def _note_version(self, answer: wire.Answer) -> None:
        """Add the tokens of a step to the spans of the weights, before they are counted."""
        if not self.spans:
            add_span(self.spans, "", self.num_output_tokens)
        if answer.computed is not None:
            add_span(self.spans, *answer.computed)
        elif answer.finish is None:  # by an engine that has begun anew; the last step may have no token to show
            add_span(self.spans, "", answer.num_output_tokens - self.num_output_tokens)

    @property
    def weight_versions(self) -> tuple[WeightSpan, ...]:
        """Which weights have computed its tokens so far."""
        if not self.spans:
            return spans_shown([WeightSpan("", 0, self.num_output_tokens)], always=True)
        return spans_shown(self.spans, always=True)

    def _count(self, answer: wire.Answer, parts: Sequence[wire.Part]) -> None:
        """Count the tokens of steps that wrote reasoning, by the rule of `Choice`."""
        kinds = [part.kind for part in parts if part.text or part.kind in ("tool_call", "call_end")]
        of_calls = ("arguments", "call_end")
        self._last_kind = next((kind for kind in reversed(kinds) if kind not in of_calls), self._last_kind)
        if not kinds and answer.finish is None:
            return
        if (kinds[-1] if kinds else self._last_kind) == "reasoning" and "content" not in kinds:
            self.num_reasoning_tokens += self.num_output_tokens - self._num_counted
        self._num_counted = self.num_output_tokens


def usage(tallies: Sequence[Tally], *, num_answers: int = 1, is_speculating: bool, is_read: bool = False) -> Usage:
    """Return the tokens of a request.

    Each prompt counts once, regardless of the number of its answers. Its cached tokens are those of its first request,
    because the other requests also find the tokens that the first one has computed.

    Args:
        tallies: of all answers, those to the first prompt first.
        num_answers: to each prompt.
        is_speculating: whether the usage has draft tokens.
        is_read: whether the usage has tokens of reasoning.
    """
    known = [
        [tally for tally in tallies[i : i + num_answers] if tally.num_prompt_tokens]
        for i in range(0, len(tallies), num_answers)
    ]
    num_prompt = sum(answers[0].num_prompt_tokens for answers in known if answers)
    num_output = sum(tally.num_output_tokens for tally in tallies)
    cached = PromptTokensDetails(sum(min(one.num_cached_tokens for one in answers) for answers in known if answers))
    details = msgspec.UNSET
    if is_read or is_speculating:
        num_accepted = sum(tally.num_accepted_tokens for tally in tallies)
        num_rejected = sum(tally.num_drafted_tokens for tally in tallies) - num_accepted
        details = CompletionTokensDetails(
            reasoning_tokens=sum(tally.num_reasoning_tokens for tally in tallies) if is_read else msgspec.UNSET,
            accepted_prediction_tokens=num_accepted if is_speculating else msgspec.UNSET,
            rejected_prediction_tokens=num_rejected if is_speculating else msgspec.UNSET,
        )
    return Usage(num_prompt, num_output, num_prompt + num_output, cached, details)


@dataclass(slots=True, kw_only=True)
class ToolCall:
    """A call of a function that the model has written."""

    id: str
    name: str
    arguments: str = ""  # written by: Choice
    """JSON text of an object."""


@dataclass(slots=True, kw_only=True)
class Section:
    """A run of content or of reasoning in an answer, or one call, in the order in which the model has written them."""

    kind: Literal["content", "reasoning", "call"]
    call: ToolCall | None = None
    """Only of a call; its arguments are set when the answer has ended."""
    is_complete: bool = False  # written by: Choice
    """Whether it is a call that the model has closed. An unclosed call has only the beginning of its arguments."""
    texts: list[str] = field(default_factory=list[str])  # written by: Choice
    """Pieces of its text; those of a call are pieces of its arguments."""
    tokens: list[wire.TokenEntry] = field(default_factory=list[wire.TokenEntry])  # written by: Choice
    """Tokens of the steps that are counted as its own, if their log probabilities are known."""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)


class AnswerMetadata(msgspec.Struct, frozen=True):
    """What an answer says of its computation, as SGLang does."""

    weight_version: str
    """Version of the weights that have computed its last token."""


@dataclass(slots=True)
class InnerRows:
    """Experts and hidden states of the positions of an answer, if they were asked for, taken from its messages."""

    _experts: list[Rows] = field(default_factory=list[Rows])  # contents written by: add
    _states: list[Rows] = field(default_factory=list[Rows])  # contents written by: add

    def add(self, answer: wire.Answer) -> None:
        """Append those of a message."""
        if answer.experts is not None:
            self._experts.append(answer.experts)
        if answer.states is not None:
            self._states.append(answer.states)

    @property
    def experts(self) -> Rows | None:
        """The experts; None: there are none."""
        return Rows.joined(self._experts)

    @property
    def states(self) -> Rows | None:
        """The hidden states; None: there are none."""
        return Rows.joined(self._states)


def kept_of(tokens: Sequence[wire.TokenEntry]) -> list[bytes] | None:
    """Return what the filters have left for tokens (see `TokenLogprob.kept`); None: not all of it is known."""
    found = [entry.kept for entry in tokens if entry.kept is not None]
    return found if len(found) == len(tokens) else None


@dataclass(slots=True, kw_only=True)
class Choice:
    """An answer, put together from its messages.

    The tokens of a step belong to the section that the step extends. If it extends several, they belong to content, or
    else to the last one. Tokens of steps that show nothing (marks, half characters) belong to the next section that is
    extended.
    """

    text: str = ""  # written by: add
    """Its content, set when it has ended."""
    reasoning: str = ""  # written by: add
    """Its reasoning, set when it has ended."""
    finish: str = ""  # written by: add
    """`stop` or `length`; empty: it has not ended."""
    stopped_by: str | None = None  # written by: add
    """The stop string, or the match of a stop expression, that ended it."""
    first_s: float | None = None  # written by: add
    """When its first message came, seconds on the clock of `time.monotonic`."""
    last_s: float | None = None  # written by: add
    """When it ended, seconds on the clock of `time.monotonic`."""
    tokens: list[wire.TokenEntry] = field(default_factory=list[wire.TokenEntry])  # written by: add
    """Entries of the tokens of the answer, if their log probabilities are known."""
    prompt: tuple[wire.TokenEntry, ...] = ()  # written by: add
    """Entries of the tokens of the prompt, if their log probabilities are known."""
    ids: list[int] = field(default_factory=list[int])  # written by: add
    """Ids of its tokens, if they were asked for."""
    prompt_ids: list[int] = field(default_factory=list[int])  # written by: add
    """Ids of its prompt, if they were asked for."""
    rows: InnerRows = field(default_factory=lambda: InnerRows())
    explanation: Explanation | None = None  # written by: add
    """Explanation of the time before its first token, if requested."""
    timings: RequestTimings | None = None  # written by: add
    """Times of its events, set when it has ended, if requested."""
    tally: Tally = field(default_factory=Tally)
    sections: list[Section] = field(default_factory=list[Section])  # written by: add
    """Contents, reasoning and calls in their order."""
    _num_noted: int = 0  # written by: add
    """Entries of `tokens` that are already assigned to a section."""

    def add(self, answer: wire.Answer) -> None:
        """Append a message."""
        if self.first_s is None:
            self.first_s = time.monotonic()
            self.explanation = answer.explanation
        self.ids += ids_of(answer.tokens)
        self.rows.add(answer)
        parts = (wire.Part("content", answer.text),) if answer.parts is None else answer.parts
        touched = [self._add(part) for part in parts if part.text or part.kind in ("tool_call", "call_end")]
        if answer.logprobs is not None:
            self.tokens += answer.logprobs.tokens
            self.prompt = self.prompt or answer.logprobs.prompt or ()
            self.prompt_ids += ids_of(answer.logprobs.prompt_tokens)
        if answer.finish is not None:
            self.finish = answer.finish.value
            self.timings = answer.timings
            self.last_s = time.monotonic()
            self.stopped_by = answer.stopped_by
            self.text = self._joined("content")
            self.reasoning = self._joined("reasoning")
            for section in self.sections:
                if section.call is not None:
                    section.call.arguments = section.text
            touched = touched or self.sections[-1:]
        if touched:
            owner = next((section for section in touched if section.kind == "content"), touched[-1])
            owner.tokens += self.tokens[self._num_noted :]
            self._num_noted = len(self.tokens)

    @property
    def kept(self) -> list[bytes] | None:
        """What the filters have left for each of its tokens; None: not all of it is known."""
        return kept_of(self.tokens)

    def _joined(self, kind: str) -> str:
        return "".join([text for section in self.sections if section.kind == kind for text in section.texts])

    def _add(self, part: wire.Part) -> Section:
        """Append a part; return its section."""
        if part.kind == "tool_call":
            self.sections.append(Section(kind="call", call=ToolCall(id=part.id or new_call_id(), name=part.text)))
            return self.sections[-1]
        if part.kind in ("content", "reasoning") and (not self.sections or self.sections[-1].kind != part.kind):
            self.sections.append(Section(kind=part.kind))
        section = self.sections[-1]  # the parts of a call stand together
        if part.kind == "call_end":
            section.is_complete = True
        else:
            section.texts.append(part.text)
        return section

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that the model has closed."""
        return [section.call for section in self.sections if section.call is not None and section.is_complete]

    @property
    def has_broken_off(self) -> bool:
        """Whether one of its calls was not closed by the model."""
        return any(section.call is not None and not section.is_complete for section in self.sections)

    @property
    def has_called(self) -> bool:
        """Whether it ended by itself with calls of functions, all of them complete."""
        return self.finish == "stop" and bool(self.calls) and not self.has_broken_off

    @property
    def shown_timings(self) -> Timings | msgspec.UnsetType:
        """Times of its events; UNSET if not requested."""
        if self.timings is None:
            return msgspec.UNSET
        tally = self.tally
        return timings(
            self.timings,
            num_prompt=tally.num_prompt_tokens,
            num_cached=tally.num_cached_tokens,
            num_output=tally.num_output_tokens,
        )

    @property
    def score(self) -> float:
        """Mean log probability of its tokens; minus infinity without tokens. The token that ended it does not count."""
        if not self.tokens:
            return -math.inf
        return sum(entry.chosen.logprob for entry in self.tokens) / len(self.tokens)


def metadata_of(choices: Sequence[Choice]) -> AnswerMetadata | msgspec.UnsetType:
    """Return the metadata of the answers to a request; nothing if the weights were not updated before their ends."""
    versions = [choice.tally.weight_versions[-1].version for choice in choices if choice.tally.spans]
    return AnswerMetadata(versions[-1]) if versions else msgspec.UNSET


def new_call_id() -> str:
    """Return an id for a call without an id from the model."""
    return f"call_{uuid.uuid4().hex[:24]}"


class EventStream(Protocol):
    """The body of one streamed response. Methods return bytes to send, perhaps none."""

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the bytes that a message of choice `index` adds to the body."""
        ...

    def end(self) -> bytes:
        """Return the end of the body, after the last message of the last choice."""
        ...

    def fail(self, error: ApiError) -> bytes:
        """Return the end of the body after an error; part of the body may have been sent."""
        ...


class Format(Protocol):
    """How a protocol writes the answers of one HTTP request."""

    media_type: ClassVar[str]
    """The content type of a stream."""

    def stream(self, usage: Callable[[], Usage]) -> EventStream:
        """Return a new stream; `usage` returns the tokens of the whole request so far."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the JSON of the complete answer, with all its choices in order."""
        ...


def event(payload: bytes, *, name: bytes = b"") -> bytes:
    """Return a server-sent event with a JSON payload, and its name if it has one."""
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + payload + b"\n\n"
