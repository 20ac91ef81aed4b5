"""The bodies of requests, and the meaning of their fields for the engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field

from pagewood.engine.api import Grammar, SamplingParams
from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import Name
from pagewood.server.http.validation import WHOLE, kind, parse
from pagewood.server.messages import wire
from pagewood.server.protocols.common.reasoning import reasoning_kwargs
from pagewood.server.protocols.common.sampling_fields import chosen
from pagewood.server.protocols.common.structured import ANY_OBJECT, Constraint, constrained
from pagewood.server.protocols.common.tools import MAX_TOOLS, Function, Tools
from pagewood.server.protocols.ollama.keep_alive import KeepAlive
from pagewood.server.protocols.ollama.lenient import Lenient, log_ignored
from pagewood.server.protocols.ollama.options import OllamaOptions, OptionsField

IGNORED = frozenset(
    {
        "truncate",  # a prompt that is too long is refused; it is never cut
        "shift",  # nor is an answer
    }
)
"""Fields that have no effect on an answer here, whatever their value."""
GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "template": (None, ""),
    "context": (None, []),
    "width": (None,),
    "height": (None,),
    "steps": (None,),
}
"""Fields of `/api/generate` that are not supported -> their neutral values, which have no effect and are accepted."""


def _format(value: Any) -> Any:
    if value == "":
        return None
    if value is None or value == "json" or isinstance(value, dict):
        return cast("Any", value)
    raise ValueError(f"expected 'json' or a JSON schema, but got {kind(value)} instead")


def _think(value: Any) -> Any:
    if value is None or isinstance(value, bool) or value in ("low", "medium", "high"):
        return value
    raise ValueError("expected true, false, 'low', 'medium' or 'high'")


class CommonFields(Lenient):
    """The common fields of chat and generate."""

    model: str
    stream: bool | None = None
    """None: yes."""
    format: Annotated[Any, BeforeValidator(_format, Literal["json", ""] | dict[str, Any] | None)] = None
    """"json", or a JSON schema of the answer."""
    options: OptionsField = None
    think: Annotated[Any, BeforeValidator(_think, bool | Literal["low", "medium", "high"] | None)] = None
    """Whether the model reasons before it answers, or how much."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    keep_alive: KeepAlive = None
    """How long one of several models stays loaded when no request uses it; the only model always does."""


class OllamaGenerateRequest(CommonFields):
    """The body of a request to `/api/generate`."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    """Images in base64, which come before the prompt."""
    raw: bool | None = None
    """Whether the prompt is continued as it is, without the chat template."""


class OllamaCalledFunction(Lenient):
    """`function` of a call."""

    name: str
    arguments: dict[str, Any]
    index: Annotated[int, WHOLE] | None = None
    """Answers have this field, and clients send it back."""


class OllamaCall(Lenient):
    """One call of an earlier answer."""

    function: OllamaCalledFunction
    id: str | None = None
    index: Annotated[int, WHOLE] | None = None
    """The same as in the function."""
    type: Literal["function"] | None = None


class OllamaMessage(Lenient):
    """One message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    """Images in base64, which come before the content."""
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @property
    def is_beginning(self) -> bool:
        """Whether it is an answer that can be continued."""
        return self.role == "assistant" and bool(self.content) and not self.tool_calls

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        found: dict[str, Any] = {"role": self.role, "content": _with_images(self.content or "", self.images)}
        if self.thinking:
            found["reasoning_content"] = self.thinking
        if self.tool_calls:
            found["tool_calls"] = [_call(call) for call in self.tool_calls]
        if self.tool_name is not None:
            found["name"] = self.tool_name
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        return found


def _with_images(text: str, images: list[str] | None) -> str | list[dict[str, str]]:
    """Return the content of a message: its text, or with images its parts."""
    if not images:
        return text
    found = [{"type": "image", "image": f"data:;base64,{one}"} for one in images]
    return [*found, {"type": "text", "text": text}] if text else found


class OllamaFunction(Lenient):
    """`function` of a tool."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Lenient):
    """A tool."""

    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaChatRequest(CommonFields):
    """The body of a request to `/api/chat`."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaShowRequest(Lenient):
    """The body of a request to `/api/show`."""

    model: str | None = None
    name: str | None = None
    """The older name of `model`."""
    verbose: bool | None = None
    """Without effect: all data is always shown."""


def parse_generate(body: bytes) -> OllamaGenerateRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing or not supported.
    """
    request = parse(OllamaGenerateRequest, body, neutral=GENERATE_NEUTRAL, ignored=IGNORED)
    for name in ("system", "images"):
        if request.raw and getattr(request, name):
            message = f"The '{name}' parameter is not available when 'raw' is enabled."
            raise ApiError(message, param=name, code="invalid_value")
    _check(request)
    return request


def parse_chat(body: bytes) -> OllamaChatRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: as in `parse_generate`.
    """
    request = parse(OllamaChatRequest, body, neutral={}, ignored=IGNORED)
    for index, message in enumerate(request.messages or ()):
        if message.images and message.role != "user":
            param = f"messages[{index}].images"
            text = f"The '{param}' parameter is only allowed in messages with the role 'user'."
            raise ApiError(text, param=param, code="invalid_value")
    _check(request)
    return request


def parse_show(body: bytes) -> str:
    """Return the name of the model that a request asks about.

    Raises:
        ApiError: as in `parse_generate`.
    """
    request = parse(OllamaShowRequest, body, neutral={}, ignored=frozenset())
    log_ignored(request)
    name = request.model or request.name
    if not name:
        raise ApiError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    return name


def _check(request: CommonFields) -> None:
    if request.top_logprobs and not request.logprobs:
        message = "The 'top_logprobs' parameter is only allowed when 'logprobs' is enabled."
        raise ApiError(message, param="top_logprobs", code="invalid_value")


def generate_prompt(request: OllamaGenerateRequest) -> wire.Prompt:
    """Return the prompt: a text to continue, or a conversation of one message."""
    text = request.prompt or ""
    if request.raw:
        return wire.TextPrompt(text=text)
    system = [{"role": "system", "content": request.system}] if request.system else []
    return wire.ChatPrompt(
        messages=(*system, {"role": "user", "content": _with_images(text, request.images)}),
        template_kwargs=_template_kwargs(request),
    )


def chat_prompt(request: OllamaChatRequest, tools: Tools | None) -> wire.ChatPrompt:
    """Return the conversation in the form that the model's chat template reads. A last message of the assistant is
    continued, unless it has calls or no text."""
    messages = request.messages or []
    is_continued = bool(messages) and messages[-1].is_beginning
    return wire.ChatPrompt(
        messages=tuple(message.for_template() for message in messages),
        tools=() if tools is None else tools.offered,
        template_kwargs=_template_kwargs(request),
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
    )


def tools_of(request: OllamaChatRequest) -> Tools | None:
    """Return the functions of a request; None: it has none.

    Raises:
        ApiError: two functions have one name.
    """
    functions = tuple(
        Function(name=tool.function.name, description=tool.function.description, parameters=tool.function.parameters)
        for tool in request.tools or ()
    )
    return Tools(functions=functions).checked()


def constraint(request: CommonFields) -> Constraint | None:
    """Return the grammar of the answer; None: no restriction.

    Raises:
        ApiError: the schema is too long or nested too deeply.
    """
    if request.format is None:
        return None
    return constrained("format", Grammar.json_schema, ANY_OBJECT if request.format == "json" else request.format)


def sampling(request: CommonFields, defaults: SamplingParams, *, grammar: Grammar | None) -> SamplingParams:
    """Return the sampling parameters of the engine.

    Args:
        request: the body.
        defaults: values of options that the request leaves out.
        grammar: of the answer; None: no restriction.
    """
    options = request.options or OllamaOptions()
    found = chosen(defaults, options)
    if options.repeat_penalty is not None:
        found = dataclasses.replace(found, repetition_penalty=options.repeat_penalty)
    if options.repeat_last_n == 0:
        found = dataclasses.replace(found, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    return dataclasses.replace(
        found,
        max_tokens=options.num_predict if options.num_predict and options.num_predict > 0 else None,
        seed=options.seed if options.seed is not None and options.seed >= 0 else None,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        grammar=grammar,
    )


def _template_kwargs(request: CommonFields) -> dict[str, Any]:
    if isinstance(request.think, str):
        return reasoning_kwargs(thinks=True, effort=request.think)
    return reasoning_kwargs(thinks=request.think)


def _call(call: OllamaCall) -> dict[str, Any]:
    arguments = json.dumps(call.function.arguments, ensure_ascii=False)
    found: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return found if call.id is None else {"id": call.id, **found}
