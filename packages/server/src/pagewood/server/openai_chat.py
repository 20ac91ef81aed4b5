"""`POST /v1/chat/completions`: the fields of a request, its prompt, and the JSON of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server import openai_fields, wire
from pagewood.server.errors import ApiError
from pagewood.server.formats import Choice, ChunkUsage, Usage
from pagewood.server.openai_beams import check_beams
from pagewood.server.openai_fields import INT32_MAX, Extent, GenerationFields
from pagewood.server.openai_logprobs import ChatLogprobs, PromptLogprobs, chat_logprobs, prompt_logprobs
from pagewood.server.validation import kind, parse

NEUTRAL: dict[str, tuple[Any, ...]] = openai_fields.NEUTRAL | {
    # OpenAI
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "verbosity": (None, "medium"),
    # vLLM, SGLang and other servers
    "best_of": (None, 1),
    "echo": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "include_reasoning": (None, True),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
}
"""Fields that this endpoint does not support -> the values that ask for nothing, which are accepted."""
IGNORED = openai_fields.IGNORED | {"parallel_tool_calls"}


def _text(content: Any) -> str | None:
    """Return the text of a message: a string, or parts that are all text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"expected a string or an array of text parts, but got {kind(content)} instead")
    return "".join([_part(part) for part in cast("list[Any]", content)])


def _part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(other)} if other != "text":
            raise ValueError(f"only parts of type 'text' are supported, but got '{other}'")
        case _:
            raise ValueError('every part must be an object {"type": "text", "text": "..."}')


class Message(BaseModel):
    """One message. Fields that only answers have are accepted if they are empty: clients send answers back."""

    model_config = ConfigDict(extra="forbid", strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_text)] = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatRequest(GenerationFields):
    """The body of a request."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


def parse_chat(body: bytes) -> ChatRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(ChatRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    for index, message in enumerate(request.messages):
        if message.content is None and message.role != "assistant":
            param = f"messages[{index}].content"
            raise ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if request.top_logprobs and not request.logprobs:
        raise ApiError(
            "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled.",
            param="top_logprobs",
            code="invalid_value",
        )
    check_beams(request)
    return request


def extent(request: ChatRequest) -> Extent:
    """Return how much is computed and shown.

    Raises:
        ApiError: two fields contradict each other.
    """
    num = request.n or 1
    return Extent(
        max_tokens=max_tokens(request),
        num_answers=num,
        num_choices=num,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        prompt_logprobs=openai_fields.prompt_logprobs(request),
    )


def prompt(request: ChatRequest) -> wire.ChatPrompt:
    """Return the conversation in the form that the model's chat template reads."""
    # "developer" is the newer word for "system"; chat templates know the older word.
    return wire.ChatPrompt(
        messages=tuple(
            {
                "role": "system" if message.role == "developer" else message.role,
                "content": message.content or "",
                **({} if message.name is None else {"name": message.name}),
            }
            for message in request.messages
        )
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


class _Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class _ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: _Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_ChunkChoice, ...]
    usage: ChunkUsage = msgspec.UNSET


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class _Choice(msgspec.Struct, frozen=True):
    index: int
    message: _Message
    logprobs: ChatLogprobs | None
    finish_reason: str


class _Completion(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    model: str
    choices: tuple[_Choice, ...]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The answers to one chat request."""

    id: str
    created: int
    """Unix time, seconds."""
    model: str
    logprobs: bool = False
    """Whether choices have log probabilities."""
    prompt_logprobs: int | None = None
    """Alternatives for each prompt token; None: the answer has no such field."""

    def begin(self, index: int, usage: ChunkUsage) -> bytes:
        """Return the chunk with the role."""
        return self._chunk(_ChunkChoice(index, _Delta(role="assistant", content="")), usage)

    def text(self, index: int, text: str, logprobs: wire.Logprobs | None, usage: ChunkUsage) -> bytes:
        """Return the chunk with the next text of the message."""
        shown = chat_logprobs(logprobs.tokens if logprobs else ()) if self.logprobs else None
        return self._chunk(_ChunkChoice(index, _Delta(content=text), shown), usage)

    def end(self, index: int, reason: str, usage: ChunkUsage) -> bytes:
        """Return the chunk with the reason why the message ended."""
        return self._chunk(_ChunkChoice(index, _Delta(), finish_reason=reason), usage)

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices."""
        return msgspec.json.encode(_Chunk(self.id, "chat.completion.chunk", self.created, self.model, (), usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the complete answer."""
        shown = tuple(
            _Choice(
                index,
                _Message("assistant", choice.text),
                chat_logprobs(choice.tokens) if self.logprobs else None,
                choice.finish,
            )
            for index, choice in enumerate(choices)
        )
        completion = _Completion(self.id, "chat.completion", self.created, self.model, shown, usage)
        if self.prompt_logprobs is not None:
            prompt = prompt_logprobs(choices[0].prompt, num_top=self.prompt_logprobs)
            completion = msgspec.structs.replace(completion, prompt_logprobs=prompt)
        return msgspec.json.encode(completion)

    def _chunk(self, choice: _ChunkChoice, usage: ChunkUsage) -> bytes:
        return msgspec.json.encode(_Chunk(self.id, "chat.completion.chunk", self.created, self.model, (choice,), usage))
