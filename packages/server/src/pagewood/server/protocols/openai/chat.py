"""`POST /v1/chat/completions`: the fields of a request, its prompt, and the JSON of its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import Field

from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import WHOLE, parse
from pagewood.server.messages import wire
from pagewood.server.protocols.common import fields
from pagewood.server.protocols.common.fields import INT32_MAX, Extent, GenerationFields, StreamOptions
from pagewood.server.protocols.common.formats import EVENTS, AnswerMetadata, Choice, Usage, metadata_of, new_call_id
from pagewood.server.protocols.common.logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from pagewood.server.protocols.common.messages import Message, ToolsFields
from pagewood.server.protocols.common.reasoning import style_kwargs
from pagewood.server.protocols.common.timings import Timings
from pagewood.server.protocols.common.tools import Tools
from pagewood.server.protocols.openai.beams import check_beams
from pagewood.server.protocols.openai.stream import ChunkStream, ChunkUsage

NEUTRAL: dict[str, tuple[Any, ...]] = fields.NEUTRAL | {
    # OpenAI
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    # vLLM, SGLang and other servers
    "best_of": (None, 1),
    "echo": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
}
"""Fields that this endpoint does not support -> their neutral values, which have no effect and are accepted."""
IGNORED = fields.IGNORED | {"prediction"}
"""A prediction can only make an answer faster; here drafts come from the prompt itself."""


class ChatRequest(GenerationFields, ToolsFields):
    """The body of a request."""

    messages: Annotated[list[Message], Field(min_length=1)]
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

    # Beyond OpenAI's API: variables of the chat template, and shown parts of an answer.
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    include_reasoning: bool | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(ChatRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    for index, message in enumerate(request.messages):
        message.check(f"messages[{index}]")
    if request.continue_final_message and request.add_generation_prompt:
        raise ApiError(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
            code="invalid_value",
        )
    if request.top_logprobs and not request.logprobs:
        raise ApiError(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            param="top_logprobs",
            code="invalid_value",
        )
    check_beams(request)
    fields.check_token_ids(request)
    return request


def extent(request: ChatRequest) -> Extent:
    """Return the amounts to compute and to show.

    Raises:
        ApiError: two fields contradict each other.
    """
    num = request.n or 1
    return Extent(
        max_tokens=max_tokens(request),
        max_tokens_param="max_completion_tokens" if request.max_tokens is None else None,
        num_answers=num,
        num_choices=num,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs(request),
    )


def prompt(request: ChatRequest, tools: Tools | None) -> wire.ChatPrompt:
    """Return the conversation in the form that the model's chat template reads."""
    return wire.ChatPrompt(
        messages=tuple(message.for_template() for message in request.messages),
        tools=() if tools is None else tools.offered,
        documents=tuple(request.documents or ()),
        template_kwargs=style_kwargs(request.reasoning_effort, request.verbosity)
        | (request.chat_template_kwargs or {}),
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
    )


def max_tokens(request: ChatRequest) -> int | None:
    """Return the longest answer in tokens; None: as many as fit.

    Raises:
        ApiError: `max_tokens` and `max_completion_tokens` differ.
    """
    old, new = request.max_tokens, request.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) must be equal; send only one of them.",
            param="max_completion_tokens",
            code="invalid_value",
        )
    return new if old is None else old


class _FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    arguments: str
    name: str | None = None


class _CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    function: _FunctionDelta
    id: str | None = None
    type: str | None = None


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[_CallDelta, ...] | None = None
    function_call: _FunctionDelta | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    timings: Timings | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[_ChunkChoice, ...]
    usage: ChunkUsage = msgspec.UNSET


class _Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class _Call(msgspec.Struct, frozen=True):
    id: str
    function: _Function
    type: str = "function"


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: tuple[_Call, ...] | msgspec.UnsetType = msgspec.UNSET
    function_call: _Function | msgspec.UnsetType = msgspec.UNSET


class _Choice(msgspec.Struct, frozen=True):
    index: int
    message: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The complete answer."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET
    metadata: AnswerMetadata | msgspec.UnsetType = msgspec.UNSET
    """Once weights were updated."""
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The answers to one chat request."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    options: StreamOptions
    logprobs: bool = False
    """Whether choices have log probabilities."""
    prompt_logprobs: int | None = None
    """Alternatives for each prompt token; None: the answer has no such field."""
    shows_reasoning: bool = True
    has_old_form: bool = False
    """Whether a call is written as `function_call`, which only holds the first call of an answer."""
    has_ids: bool = False
    """Whether the answer has the ids of tokens."""
    names_ids: bool = False
    """Whether log probabilities have ids in the place of the texts of tokens."""

    media_type: ClassVar[str] = EVENTS

    def stream(self, usage: Callable[[], Usage]) -> ChunkStream:
        """Return a new stream."""
        return ChunkStream(self, self.options, usage)

    def begin(self, index: int, usage: ChunkUsage) -> bytes:
        """Return the chunk with the role."""
        return self._chunk(_ChunkChoice(index, _Delta(role="assistant", content="")), usage)

    def text(self, index: int, text: str, logprobs: wire.Logprobs | None, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text of the message."""
        shown = chat_logprobs(logprobs.tokens if logprobs else (), by_id=self.names_ids) if self.logprobs else None
        return self._chunk(_ChunkChoice(index, _Delta(content=text), shown), usage)

    def part(self, index: int, part: wire.Part, usage: ChunkUsage) -> bytes | None:
        """Return the chunk with the next reasoning, or with the next piece of a call."""
        if part.kind == "reasoning":
            if not self.shows_reasoning:
                return None
            delta = _Delta(reasoning_content=part.text)
        else:
            is_new = part.kind == "tool_call"
            function = _FunctionDelta(name=part.text, arguments="") if is_new else _FunctionDelta(part.text)
            if self.has_old_form:
                if part.index:
                    return None
                delta = _Delta(function_call=function)
            elif is_new:
                delta = _Delta(tool_calls=(_CallDelta(part.index, function, part.id or new_call_id(), "function"),))
            else:
                delta = _Delta(tool_calls=(_CallDelta(part.index, function),))
        return self._chunk(_ChunkChoice(index, delta), usage)

    def end(self, index: int, reason: str, usage: ChunkUsage, timings: Timings | msgspec.UnsetType) -> bytes:
        """Return the chunk with the reason why the message ended."""
        return self._chunk(_ChunkChoice(index, _Delta(), finish_reason=self._reason(reason), timings=timings), usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices."""
        return msgspec.json.encode(ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, (), usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        shown = tuple(
            _Choice(
                index,
                self._message(choice),
                chat_logprobs(choice.tokens, by_id=self.names_ids) if self.logprobs else None,
                self._reason("tool_calls" if choice.has_called else choice.finish),
                choice.shown_timings,
                choice.ids if self.has_ids else msgspec.UNSET,
            )
            for index, choice in enumerate(choices)
        )
        completion = ChatCompletion(
            self.id,
            "chat.completion",
            self.created,
            self.model,
            shown,
            usage,
            metadata=metadata_of(choices),
            prompt_token_ids=choices[0].prompt_ids if self.has_ids else msgspec.UNSET,
        )
        if self.prompt_logprobs is not None:
            prompt = prompt_logprobs(choices[0].prompt, num_top=self.prompt_logprobs)
            completion = msgspec.structs.replace(completion, prompt_logprobs=prompt)
        return msgspec.json.encode(completion)

    def _reason(self, reason: str) -> str:
        return "function_call" if reason == "tool_calls" and self.has_old_form else reason

    def _message(self, choice: Choice) -> _Message:
        calls = tuple(_Call(call.id, _Function(call.name, call.arguments)) for call in choice.calls)
        return _Message(
            "assistant",
            None if calls and not choice.text else choice.text,
            reasoning_content=choice.reasoning if choice.reasoning and self.shows_reasoning else msgspec.UNSET,
            tool_calls=calls if calls and not self.has_old_form else msgspec.UNSET,
            function_call=calls[0].function if calls and self.has_old_form else msgspec.UNSET,
        )

    def _chunk(self, choice: _ChunkChoice, usage: ChunkUsage) -> bytes:
        return msgspec.json.encode(
            ChatChunk(self.id, "chat.completion.chunk", self.created, self.model, (choice,), usage)
        )
