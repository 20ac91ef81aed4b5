"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import Name
from pagewood.server.http.validation import WHOLE, kind, parse
from pagewood.server.protocols.common import fields
from pagewood.server.protocols.common.fields import INT32_MAX, GenerationFields
from pagewood.server.protocols.common.structured import JsonSchemaFormat, ResponseFormat
from pagewood.server.protocols.common.tools import MAX_TOOLS
from pagewood.server.protocols.responses.items import Item

NEUTRAL: dict[str, tuple[Any, ...]] = fields.NEUTRAL | {
    # OpenAI's Responses
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "context_management": (None, []),
    "moderation": (None,),
    "access_programs": (None,),
    "image": (None,),
    # fields of chat completions and completions that have another name or no meaning here
    "max_tokens": (None,),
    "n": (None, 1),
    "response_format": (None,),
    "prompt_logprobs": (None, False),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
}
"""Fields that this endpoint does not support -> their neutral values, which have no effect and are accepted."""
IGNORED = frozenset({"client_metadata", "service_tier", "prompt_cache_options"})
"""Fields about accounts and caches of a hosted service. They have no effect here, whatever their value."""

_DAY_S = 86400.0
_NEXT_TURN_S = 300.0
"""Seconds in which a conversation that continues a response is likely to be continued again."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # these belong to tools and inputs that this server does not have
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_INCLUDABLE: tuple[str, ...] = get_args(_Includable)


def _input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError(f"expected a string or an array of items, but got {kind(value)} instead")
    return cast("Any", value)


def _included(value: Any) -> Any:
    if not isinstance(value, list):
        raise ValueError(f"expected an array of strings, but got {kind(value)} instead")
    names = cast("list[Any]", value)
    unknown = next((name for name in names if name not in _INCLUDABLE), None)
    if unknown is not None:
        raise ValueError(f"expected one of {', '.join(sorted(_INCLUDABLE))}, but got {str(unknown)[:100]!r}")
    return names


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextFormat(_Strict):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None
    description: str | None = None


class TextFields(_Strict):
    """`text`. The verbosity is a variable of the chat template, which may read it."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningFields(_Strict):
    """`reasoning`. Summaries have no effect: the reasoning itself is shown."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class FunctionTool(_Strict):
    """A function. The description for the model does not contain its output schema or its callers."""

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: Literal[False] | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class TextInput(_Strict):
    """Any text."""

    type: Literal["text"]


class GrammarInput(_Strict):
    """Text of a grammar. The model sees it, but its output is not forced to match it."""

    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(_Strict):
    """A tool that takes a text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: Annotated[TextInput | GrammarInput, Field(discriminator="type")] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: Literal[False] | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class NamespaceTool(_Strict):
    """Functions and custom tools with a common prefix of their names."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: list[dict[str, Any]]


class SearchTool(_Strict):
    """A search of the client for further tools. A search that a hosted service would run is skipped."""

    type: Literal["tool_search"]
    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ToolChoice(_Strict):
    """`tool_choice`: one tool, which must be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedFunctions(_Strict):
    """`tool_choice`: some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class OtherTool(BaseModel):
    """A tool of another type, which is skipped."""

    type: str


def _as_it_is(value: Any) -> Any:
    return value


# The accepted types, for the schema of the body. `items` and `tools` read these, so that errors name the field.
_Items = str | list[Item]
_Tools = (
    Annotated[list[FunctionTool | CustomTool | NamespaceTool | SearchTool | OtherTool], Field(max_length=MAX_TOOLS)]
    | None
)
_Choice = Literal["none", "auto", "required"] | ToolChoice | AllowedFunctions | None
_Label = Annotated[str, Field(max_length=512)]


class ResponsesRequest(GenerationFields):
    """The fields of a request. Fields of `GenerationFields` that OpenAI's API does not have are extensions."""

    input: Annotated[str | list[dict[str, Any]], BeforeValidator(_input, _Items)]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    include: Annotated[list[str], BeforeValidator(_included, list[_Includable])] | None = None
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    tools: Annotated[list[dict[str, Any]] | None, BeforeValidator(_as_it_is, _Tools)] = None
    tool_choice: Annotated[Any, BeforeValidator(_as_it_is, _Choice)] = None
    parallel_tool_calls: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    """Without effect: a prompt that fits is never cut, and one that does not fit is refused."""
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Beyond OpenAI's API: variables of the chat template."""
    prompt_cache_retention: Any = None
    """"24h" keeps the conversation cached for that time if the server retains prefixes; other values have no effect."""

    # Only repeated in the answer. `max_tool_calls` limits tools that the server runs, and it runs none.
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], _Label], Field(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = None
    prompt_cache_key: _Label | None = None
    safety_identifier: _Label | None = None
    user: _Label | None = None

    @property
    def retain_s(self) -> float | None:
        """Seconds for which the conversation is likely to return; None: unknown.

        A conversation that continues a response is likely to be continued again.
        """
        if self.prompt_cache_retention == "24h":
            return _DAY_S
        return _NEXT_TURN_S if self.previous_response_id is not None else None

    @property
    def shows_logprobs(self) -> bool:
        """Whether the answer has log probabilities."""
        return LOGPROBS in (self.include or ())

    @property
    def shows_encrypted(self) -> bool:
        """Whether reasoning comes in the form of `encrypted_content`, too."""
        return ENCRYPTED in (self.include or ())


def parse_request(body: bytes) -> ResponsesRequest:
    """Return the request that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported, or contradicts another one.
    """
    said = parse(ResponsesRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    if said.top_logprobs and not said.shows_logprobs:
        raise ApiError(
            f"The 'top_logprobs' parameter is only allowed when 'include' has '{LOGPROBS}'.",
            param="top_logprobs",
            code="invalid_value",
        )
    options = fields.stream_options(said)
    if options.continuous_usage_stats:
        raise ApiError(
            "Unsupported parameter: 'stream_options.continuous_usage_stats' is not supported here; leave it out.",
            param="stream_options.continuous_usage_stats",
            code="unsupported_parameter",
        )
    return said


def response_format(said: ResponsesRequest) -> ResponseFormat | None:
    """Return `text.format` in the form of chat completions.

    Raises:
        ApiError: a part of it is missing, or belongs to another type.
    """
    format = None if said.text is None else said.text.format
    if format is None:
        return None
    given = {"name": format.name, "schema": format.schema_, "strict": format.strict, "description": format.description}
    given = {name: value for name, value in given.items() if value is not None}
    if format.type != "json_schema":
        if given:
            param = f"text.format.{next(iter(given))}"
            message = f"The '{param}' parameter is not allowed with the type '{format.type}'."
            raise ApiError(message, param=param, code="invalid_value")
        return ResponseFormat(type=format.type)
    missing = next((f"text.format.{name}" for name in ("name", "schema") if name not in given), None)
    if missing is not None:
        message = f"Missing required parameter: '{missing}'."
        raise ApiError(message, param=missing, code="missing_required_parameter")
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat.model_validate(given))
