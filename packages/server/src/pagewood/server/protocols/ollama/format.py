"""The JSON of answers: one object, or a line of JSON for each piece of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import ClassVar, Literal

import msgspec

from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import LINES, Choice, ToolCall, Usage, new_call_id
from pagewood.server.protocols.common.logprobs import TokenWithTop, chat_logprobs
from pagewood.server.protocols.ollama.errors import ollama_error


class _CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    """Number of the call in the answer, from 0."""
    name: str
    arguments: msgspec.Raw


class _Call(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    index: int
    """The same as in the function: some clients read it here, as in OpenAI's streams."""
    function: _CalledFunction


class _Message(msgspec.Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[_Call, ...] | msgspec.UnsetType = msgspec.UNSET


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of an answer, or the whole answer."""

    model: str
    created_at: str
    logprobs: list[TokenWithTop] | msgspec.UnsetType = msgspec.UNSET
    done: bool = False
    done_reason: Literal["stop", "length", "load", "unload"] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    """This and other durations are in nanoseconds."""
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class ChatLine(Line, frozen=True, kw_only=True):
    """A piece of an answer to a conversation."""

    message: _Message


class TextLine(Line, frozen=True, kw_only=True):
    """A piece of an answer to one prompt."""

    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaFormat:
    """The answer to one request."""

    model: str
    """Name of the model as the client wrote it."""
    is_chat: bool
    """Whether answers are messages, with calls; otherwise they are texts."""
    started_s: float
    """When the request came, on the clock."""
    load_s: float = 0.0
    """How long it waited for the load of its model."""
    logprobs: bool = False
    """Whether answers have log probabilities."""
    clock: Callable[[], float] = time.monotonic

    media_type: ClassVar[str] = LINES

    def stream(self, usage: Callable[[], Usage]) -> LineStream:
        """Return a new stream."""
        return LineStream(self, usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        (choice,) = choices
        line = self.line(choice.text, thinking=choice.reasoning, calls=choice.calls, tokens=choice.tokens)
        return msgspec.json.encode(self._ended(line, choice.finish, choice.first_s, usage))

    def without_text(self, reason: Literal["load", "unload"]) -> bytes:
        """Return the answer to a request without a prompt."""
        return msgspec.json.encode(msgspec.structs.replace(self.line(""), done=True, done_reason=reason))

    def line(
        self,
        text: str,
        *,
        thinking: str = "",
        calls: Sequence[ToolCall] = (),
        first_call: int = 0,
        tokens: Sequence[wire.TokenEntry] = (),
    ) -> Line:
        """Return a piece of the answer.

        Args:
            text: of the answer.
            thinking: text of the reasoning.
            calls: complete calls.
            first_call: number of the first of these calls in the answer, from 0.
            tokens: tokens whose log probabilities are shown, if the answer has them.
        """
        thought = thinking or msgspec.UNSET
        logprobs = chat_logprobs(tokens).content if self.logprobs and tokens else msgspec.UNSET
        created_at = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        if not self.is_chat:
            return TextLine(model=self.model, created_at=created_at, response=text, thinking=thought, logprobs=logprobs)
        called = tuple(_called(call, index) for index, call in enumerate(calls, start=first_call))
        message = _Message(text, thinking=thought, tool_calls=called or msgspec.UNSET)
        return ChatLine(model=self.model, created_at=created_at, message=message, logprobs=logprobs)

    def last(self, reason: str, first_s: float | None, usage: Usage) -> Line:
        """Return the last line of a stream."""
        return self._ended(self.line(""), reason, first_s, usage)

    def _ended(self, line: Line, reason: str, first_s: float | None, usage: Usage) -> Line:
        now_s = self.clock()
        first_s = now_s if first_s is None else first_s
        return msgspec.structs.replace(
            line,
            done=True,
            done_reason=reason,
            total_duration=_nanoseconds(now_s - self.started_s),
            load_duration=_nanoseconds(self.load_s),
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=_nanoseconds(first_s - self.started_s - self.load_s),
            eval_count=usage.completion_tokens,
            eval_duration=_nanoseconds(now_s - first_s),
        )


class LineStream:
    """The lines of one answer. A call is sent when it is complete; one that breaks off is not sent."""

    __slots__ = ("_arguments", "_call", "_first_s", "_format", "_num_calls", "_usage")

    def __init__(self, format: OllamaFormat, usage: Callable[[], Usage]) -> None:
        self._format = format
        self._usage = usage
        self._first_s: float | None = None  # written by: take
        self._call: wire.Part | None = None
        """The beginning of the newest call."""  # written by: _part
        self._arguments: list[str] = []
        """Arguments of that call so far."""  # written by: _part
        self._num_calls = 0
        """Calls that were sent."""  # written by: _completed

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the lines of one message of the engine."""
        if self._first_s is None:
            self._first_s = self._format.clock()
        lines: list[Line] = []
        for part in (wire.Part("content", answer.text),) if answer.parts is None else answer.parts:
            lines += self._part(part)
        if self._format.logprobs and answer.logprobs is not None and answer.logprobs.tokens:
            lines = lines or [self._format.line("")]
            shown = chat_logprobs(answer.logprobs.tokens).content
            lines[0] = msgspec.structs.replace(lines[0], logprobs=shown)
        if answer.finish is not None:
            lines.append(self._format.last(answer.finish.value, self._first_s, self._usage()))
        return b"".join([msgspec.json.encode(line) + b"\n" for line in lines])

    def end(self) -> bytes:
        """Return nothing: the last line has been sent."""
        return b""

    def fail(self, error: ApiError) -> bytes:
        """Return the line of an error."""
        return ollama_error(error, "")[1] + b"\n"

    def _part(self, part: wire.Part) -> list[Line]:
        match part.kind:
            case "arguments":
                self._arguments.append(part.text)
                return []
            case "tool_call":
                self._call = part
                self._arguments.clear()
                return []
            case "call_end":
                return [self._completed()]
            case "content":
                return [self._format.line(part.text)] if part.text else []
            case "reasoning":
                return [self._format.line("", thinking=part.text)] if part.text else []

    def _completed(self) -> Line:
        """Return the line of the newest call."""
        assert self._call is not None
        call = ToolCall(id=self._call.id or new_call_id(), name=self._call.text, arguments="".join(self._arguments))
        line = self._format.line("", calls=[call], first_call=self._num_calls)
        self._num_calls += 1
        return line


def _called(call: ToolCall, index: int) -> _Call:
    arguments = msgspec.Raw(call.arguments.encode() or b"{}")
    return _Call(id=call.id, index=index, function=_CalledFunction(index=index, name=call.name, arguments=arguments))


def _nanoseconds(duration_s: float) -> int:
    return max(0, round(duration_s * 1e9))
