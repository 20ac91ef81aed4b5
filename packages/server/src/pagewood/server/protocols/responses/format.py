"""Writes responses, whole and as a stream. Both are made from the same sections of an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from pagewood.server.http.errors import ApiError
from pagewood.server.messages import wire
from pagewood.server.protocols.common.formats import EVENTS, Choice, Section, Usage, event
from pagewood.server.protocols.common.logprobs import TokenWithTop, chat_logprobs
from pagewood.server.protocols.responses import objects
from pagewood.server.protocols.responses.custom_input import CustomInput
from pagewood.server.protocols.responses.items import seal
from pagewood.server.protocols.responses.objects import OutputItem, OutputText, ReasoningText, Response
from pagewood.server.protocols.responses.tools import Origin

_PREFIXES = {"content": "msg", "reasoning": "rs", "function": "fc", "custom": "ctc", "search": "tsc"}
"""Section, or kind of the called tool -> beginning of the id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesFormat:
    """The answer to one request."""

    response: Response
    """Its state before the first token."""
    keep: Callable[[Response], None] | None = None
    """Gets the response when it has ended; None: it is not kept."""
    shows_logprobs: bool = False
    shows_encrypted: bool = False
    """Whether reasoning comes in the form of `encrypted_content`, too."""
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    """Function -> the client's tool that it stands for, see `tools.Offer`."""
    clock: Callable[[], float] = time.time

    media_type: ClassVar[str] = EVENTS

    @property
    def id(self) -> str:
        """The id of the response."""
        return self.response.id

    def stream(self, usage: Callable[[], Usage]) -> ResponsesStream:
        """Return a new stream."""
        return ResponsesStream(self, usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        return msgspec.json.encode(self.ended(choices[0], usage))

    def ended(self, choice: Choice, usage: Usage) -> Response:
        """Return the response with the whole answer, and keep it."""
        is_cut = choice.finish == "length"
        is_incomplete = is_cut or choice.has_broken_off
        # The protocol has no reason for a model that ends its answer within a call.
        details: dict[str, str] | None = {"reason": "max_output_tokens"} if is_cut else {} if is_incomplete else None
        response = msgspec.structs.replace(
            self.response,
            status="incomplete" if is_incomplete else "completed",
            completed_at=None if is_incomplete else int(self.clock()),
            incomplete_details=details,
            output=self.output(choice),
            usage=objects.ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=objects.InputTokensDetails(
                    cached_tokens=usage.prompt_tokens_details.cached_tokens
                ),
                output_tokens=usage.completion_tokens,
                output_tokens_details=objects.OutputTokensDetails(reasoning_tokens=usage.num_reasoning_tokens),
                total_tokens=usage.total_tokens,
            ),
        )
        if self.keep is not None:
            self.keep(response)
        return response

    def failed(self, choice: Choice, error: ApiError) -> Response:
        """Return the response with the answer so far, and the error."""
        code = {429: "rate_limit_exceeded"}.get(
            error.status, "server_error" if error.status >= 500 else "invalid_prompt"
        )
        return msgspec.structs.replace(
            self.response,
            status="failed",
            error=objects.ResponseError(code=code, message=str(error)),
            output=self.output(choice),
        )

    def output(self, choice: Choice) -> tuple[OutputItem, ...]:
        """Return the items of an answer that has ended."""
        return tuple(
            self.item(index, section, status=_status(choice, index, section))
            for index, section in enumerate(shown(choice))
        )

    def item(self, index: int, section: Section, *, status: str) -> OutputItem:
        """Return an item; while it is in progress, it is empty."""
        id, is_begun = self.item_id(index, section), status == "in_progress"
        if section.call is not None:
            origin, arguments = self.origin(section), "" if is_begun else section.text
            of: dict[str, Any] = {"id": id, "status": status, "call_id": section.call.id, "name": origin.name}
            if origin.kind == "search":
                del of["name"]
                return objects.SearchCall(**of, arguments=_object(arguments))
            if origin.kind == "custom":
                text = "" if is_begun else CustomInput.of(arguments, is_whole=status == "completed")
                return objects.CustomCall(**of, namespace=origin.namespace, input=text)
            return objects.FunctionCall(**of, namespace=origin.namespace, arguments=arguments)
        part = self.part(section)
        if isinstance(part, OutputText):
            return objects.OutputMessage(id=id, status=status, content=() if is_begun else (part,))
        if is_begun:
            return objects.Reasoning(id=id, status=status)
        encrypted = seal(part.text) if self.shows_encrypted else None
        return objects.Reasoning(id=id, status=status, content=(part,), encrypted_content=encrypted)

    def item_id(self, index: int, section: Section) -> str:
        """Return the id of an item: the same in all events and in the response."""
        kind = section.kind if section.call is None else self.origin(section).kind
        return f"{_PREFIXES[kind]}_{self.id.removeprefix('resp_')}{index:02x}"

    def origin(self, section: Section) -> Origin:
        """Return which tool of the client a call is for."""
        assert section.call is not None
        return self.origins.get(section.call.name) or Origin(name=section.call.name)

    def part(self, section: Section) -> OutputText | ReasoningText:
        """Return the content of a message or of reasoning."""
        if section.kind == "reasoning":
            return ReasoningText(text=section.text)
        return OutputText(text=section.text, logprobs=self.logprobs(section.tokens))

    def logprobs(self, tokens: Sequence[wire.TokenEntry]) -> list[TokenWithTop]:
        """Return the log probabilities of tokens, if they are shown."""
        return chat_logprobs(tokens).content if self.shows_logprobs else []


def shown(choice: Choice) -> Sequence[Section]:
    """Return the sections of an answer; an ended answer without sections is an empty message."""
    return choice.sections or ([Section(kind="content")] if choice.finish else [])


def _status(choice: Choice, place: int, section: Section) -> str:
    """Return the status of an item that does not grow any more."""
    if section.call is not None:
        return "completed" if section.is_complete else "incomplete"
    is_last = place == len(choice.sections) - 1
    return "incomplete" if is_last and choice.finish != "stop" else "completed"


@dataclass(slots=True)
class _Sent:
    """The sent part of a section: everything before these places."""

    num_texts: int = 0  # written by: ResponsesStream
    num_tokens: int = 0  # written by: ResponsesStream
    is_complete: bool = False  # written by: ResponsesStream
    custom: CustomInput | None = None
    """Input of the call of a custom tool."""


class ResponsesStream:
    """The events of one response.

    Every message is added to a `Choice`, and the new parts of its sections are sent. So the events agree with the
    response at their end.

    Args:
        format: writes items.
        usage: returns the tokens of the request so far.
    """

    __slots__ = ("_choice", "_format", "_num_events", "_sent", "_usage")

    def __init__(self, format: ResponsesFormat, usage: Callable[[], Usage]) -> None:
        self._format = format
        self._usage = usage
        self._choice = Choice()
        self._num_events = 0  # written by: _say
        self._sent: list[_Sent] = []  # written by: take. Of sections that were begun

    def take(self, index: int, answer: wire.Answer) -> bytes:
        """Return the events of one message."""
        events: list[bytes] = []
        if not self._num_events:
            events.append(self._say(objects.Created, response=self._format.response))
            events.append(self._say(objects.InProgress, response=self._format.response))
        self._choice.add(answer)
        sections = shown(self._choice)
        last = len(sections) - 1
        for place in range(self._num_complete, len(sections)):
            section = sections[place]
            if place == len(self._sent):
                is_custom = section.call is not None and self._format.origin(section).kind == "custom"
                self._sent.append(_Sent(custom=CustomInput() if is_custom else None))
                events += self._begin(place, section)
            elif self._sent[place].is_complete:
                continue
            events += self._more(place, section)
            if answer.finish is not None or place < last or section.is_complete:
                events += self._complete(place, section, status=_status(self._choice, place, section))
        return b"".join(events)

    def end(self) -> bytes:
        """Return the last event."""
        response = self._format.ended(self._choice, self._usage())
        kind = objects.Incomplete if response.status == "incomplete" else objects.Completed
        return self._say(kind, response=response)

    def fail(self, error: ApiError) -> bytes:
        """Return the events with an error."""
        failure = self._say(objects.Failure, code=error.code, message=str(error), param=error.param)
        return failure + self._say(objects.Failed, response=self._format.failed(self._choice, error))

    @property
    def _num_complete(self) -> int:
        """Sections at the beginning whose end was sent."""
        return next((place for place, sent in enumerate(self._sent) if not sent.is_complete), len(self._sent))

    def _begin(self, place: int, section: Section) -> list[bytes]:
        item = self._format.item(place, section, status="in_progress")
        events = [self._say(objects.ItemAdded, output_index=place, item=item)]
        if section.call is None:
            empty = ReasoningText(text="") if section.kind == "reasoning" else OutputText(text="")
            events.append(self._say(objects.PartAdded, **self._of(place, section), part=empty))
        return events

    def _more(self, place: int, section: Section) -> list[bytes]:
        """Return the events with the new part of a section."""
        sent = self._sent[place]
        delta = "".join(section.texts[sent.num_texts :])
        logprobs = self._format.logprobs(section.tokens[sent.num_tokens :])
        sent.num_texts, sent.num_tokens = len(section.texts), len(section.tokens)
        of = self._of(place, section)
        match section.kind:
            case "content" if delta or logprobs:
                return [self._say(objects.TextDelta, **of, delta=delta, logprobs=logprobs)]
            case "reasoning" if delta:
                return [self._say(objects.ReasoningDelta, **of, delta=delta)]
            case "call" if sent.custom is not None:
                delta = sent.custom.take(delta)
                return [self._say(objects.CustomInputDelta, **of, delta=delta)] if delta else []
            case "call" if delta and self._format.origin(section).kind == "function":
                return [self._say(objects.ArgumentsDelta, **of, delta=delta)]
            case _:
                return []

    def _complete(self, place: int, section: Section, *, status: str) -> list[bytes]:
        self._sent[place].is_complete = True
        of, events = self._of(place, section), list[bytes]()
        custom = self._sent[place].custom
        if section.call is not None and not section.is_complete:
            pass  # its arguments are not complete
        elif custom is not None:
            delta = custom.end()
            if delta:
                events.append(self._say(objects.CustomInputDelta, **of, delta=delta))
            events.append(self._say(objects.CustomInputDone, **of, input=custom.text))
        elif section.call is not None and self._format.origin(section).kind == "search":
            pass
        elif section.call is not None:
            name, arguments = self._format.origin(section).name, section.text
            events.append(self._say(objects.ArgumentsDone, **of, name=name, arguments=arguments))
        else:
            part = self._format.part(section)
            if isinstance(part, OutputText):
                events.append(self._say(objects.TextDone, **of, text=part.text, logprobs=part.logprobs))
            else:
                events.append(self._say(objects.ReasoningDone, **of, text=part.text))
            events.append(self._say(objects.PartDone, **of, part=part))
        item = self._format.item(place, section, status=status)
        events.append(self._say(objects.ItemDone, output_index=place, item=item))
        return events

    def _of(self, place: int, section: Section) -> dict[str, Any]:
        return {"item_id": self._format.item_id(place, section), "output_index": place}

    def _say(self, kind: type[objects.Event], **fields: Any) -> bytes:
        payload = msgspec.json.encode(kind(sequence_number=self._num_events, **fields))
        self._num_events += 1
        return event(payload, name=str(kind.__struct_config__.tag).encode())


def _object(arguments: str) -> Any:
    """Return the arguments of a search; empty if they are not JSON, as in an incomplete call."""
    try:
        return json.loads(arguments) if arguments else {}
    except ValueError:
        return {}
