"""The JSON of answers: a message, and the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec

from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.anthropic.errors import anthropic_error
from pagewood.server.protocols.common.formats import EVENTS, Choice, Section, Usage, event, new_call_id

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
UNSIGNED = "unsigned"
"""The signature of all reasoning: clients need one, and this server checks none."""


class _Text(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class _Thinking(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class _ToolUse(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw


_Block = _Text | _Thinking | _ToolUse


class _TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class _ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class _SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class _InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class _Usage(msgspec.Struct, frozen=True):
    input_tokens: int
    """Tokens that were not cached."""
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """An answer."""

    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: tuple[_Block, ...]
    stop_reason: StopReason | None
    """null: the answer goes on."""
    stop_sequence: str | None
    """The stop string that ended it."""
    usage: _Usage


class _MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Message


class _Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class _BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: _Block


class _BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: _TextDelta | _ThinkingDelta | _SignatureDelta | _InputDelta


class _BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class _End(msgspec.Struct, frozen=True):
    stop_reason: StopReason
    stop_sequence: str | None


class _MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: _End
    usage: _Usage


class _MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = _MessageStart | _Ping | _BlockStart | _BlockDelta | _BlockStop | _MessageDelta | _MessageStop


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageFormat:
    """The answer to one request."""

    id: str
    model: str
    request_id: str
    """Id of the HTTP request, for errors."""
    max_tokens: int | None = None
    """Most tokens of the answer that the client asks for; None: as many as fit."""
    shows_thinking: bool = True
    """Whether the text of the reasoning is shown."""

    media_type: ClassVar[str] = EVENTS

    def stream(self, usage: Callable[[], Usage]) -> MessageStream:
        """Return a new stream."""
        return MessageStream(self, usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        (choice,) = choices
        blocks = tuple(
            self._block(section) for section in choice.sections if section.call is None or section.is_complete
        )
        end = _end(choice.finish, choice.stopped_by, has_called=choice.has_called, has_room=self.has_room(usage))
        return msgspec.json.encode(self._message(blocks, end, usage))

    def begin(self, usage: Usage) -> bytes:
        """Return the events that begin a stream."""
        return _event(_MessageStart(self._message((), None, usage))) + _event(_Ping())

    def has_room(self, usage: Usage) -> bool:
        """Return whether an answer with these tokens is shorter than the client allows."""
        return self.max_tokens is None or usage.completion_tokens < self.max_tokens

    def error(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return event(anthropic_error(error, self.request_id)[1], name=b"error")

    def _block(self, section: Section) -> _Block:
        if section.call is not None:
            call = section.call
            return _ToolUse(_tool_use_id(call.id), call.name, msgspec.Raw(call.arguments.encode() or b"{}"))
        if section.kind == "content":
            return _Text(section.text)
        return _Thinking(section.text if self.shows_thinking else "", UNSIGNED)

    def _message(self, blocks: tuple[_Block, ...], end: _End | None, usage: Usage) -> Message:
        reason, sequence = (None, None) if end is None else (end.stop_reason, end.stop_sequence)
        return Message(
            id=self.id,
            model=self.model,
            content=blocks,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(usage),
        )


class MessageStream:
    """The events of one answer. Invariant: at most one block is open, and only the open block gets deltas.

    If a call breaks off, its block ends after the last delta, and its input is not valid JSON.
    """

    __slots__ = ("_format", "_has_begun", "_has_called", "_index", "_kind", "_num_open", "_usage")

    def __init__(self, format: MessageFormat, usage: Callable[[], Usage]) -> None:
        self._format = format
        self._usage = usage
        self._has_begun = False  # written by: take
        self._has_called = False  # written by: _part
        self._num_open = 0
        """Calls that are not complete."""  # written by: _part
        self._index = -1
        """Index of the newest block."""  # written by: _open
        self._kind: wire.PartKind | None = None
        """Kind of the open block; None: no block is open."""  # written by: _open, _close

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the events of one message of the engine."""
        found: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            found.append(self._format.begin(self._usage()))
        for part in (wire.Part("content", answer.text),) if answer.parts is None else answer.parts:
            found += self._part(part)
        if answer.finish is not None:
            found += self._close()
            usage, has_called = self._usage(), self._has_called and not self._num_open
            has_room = self._format.has_room(usage)
            end = _end(answer.finish.value, answer.stopped_by, has_called=has_called, has_room=has_room)
            found.append(_event(_MessageDelta(end, _usage(usage))))
        return b"".join(found)

    def end(self) -> bytes:
        """Return the last event."""
        return _event(_MessageStop())

    def fail(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return self._format.error(error)

    def _part(self, part: wire.Part) -> list[bytes]:
        """Return the events of a piece of the answer."""
        if part.kind == "tool_call":
            self._has_called = True
            self._num_open += 1
            before = self._close()
            block = _ToolUse(_tool_use_id(part.id or new_call_id()), part.text, msgspec.Raw(b"{}"))
            return [*before, self._open("tool_call", block)]
        if part.kind == "call_end":
            self._num_open -= 1
            return self._close()
        if not part.text:
            return []
        if part.kind == "arguments":
            return [self._delta(_InputDelta(part.text))]
        if part.kind == "content":
            before = [] if self._kind == "content" else [*self._close(), self._open("content", _Text(""))]
            return [*before, self._delta(_TextDelta(part.text))]
        before = [] if self._kind == "reasoning" else [*self._close(), self._open("reasoning", _Thinking("", ""))]
        return [*before, self._delta(_ThinkingDelta(part.text))] if self._format.shows_thinking else before

    def _open(self, kind: wire.PartKind, block: _Block) -> bytes:
        self._index += 1
        self._kind = kind
        return _event(_BlockStart(self._index, block))

    def _close(self) -> list[bytes]:
        if self._kind is None:
            return []
        before = [self._delta(_SignatureDelta(UNSIGNED))] if self._kind == "reasoning" else []
        self._kind = None
        return [*before, _event(_BlockStop(self._index))]

    def _delta(self, delta: _TextDelta | _ThinkingDelta | _SignatureDelta | _InputDelta) -> bytes:
        return _event(_BlockDelta(self._index, delta))


def _event(body: MessageEvent) -> bytes:
    return event(msgspec.json.encode(body), name=str(body.__struct_config__.tag).encode())


def _usage(usage: Usage) -> _Usage:
    num_cached = usage.prompt_tokens_details.cached_tokens
    return _Usage(
        input_tokens=usage.prompt_tokens - num_cached,
        cache_creation_input_tokens=0,
        cache_read_input_tokens=num_cached,
        output_tokens=usage.completion_tokens,
    )


def _end(finish: str, stopped_by: str | None, *, has_called: bool, has_room: bool) -> _End:
    """Return why an answer ended. If it ended by length and still `has_room`, it has filled the context window."""
    if finish == "length":
        return _End("model_context_window_exceeded" if has_room else "max_tokens", None)
    if stopped_by is not None:
        return _End("stop_sequence", stopped_by)
    return _End("tool_use" if has_called else "end_turn", None)


def _tool_use_id(id: str) -> str:
    """Return the id of a call as Anthropic writes ids; ids that the model has chosen are kept."""
    return f"toolu_{id.removeprefix('call_')}" if id.startswith("call_") else id
