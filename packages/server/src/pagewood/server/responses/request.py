"""The body of `POST /v1/responses`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.errors import ApiError
from pagewood.server.openai import fields
from pagewood.server.openai.fields import INT32_MAX, GenerationFields
from pagewood.server.responses.items import Item
from pagewood.server.structured import JsonSchemaFormat, ResponseFormat
from pagewood.server.tools import MAX_NAME_LENGTH, MAX_TOOLS
from pagewood.server.validation import WHOLE, kind, parse

NEUTRAL: dict[str, tuple[Any, ...]] = fields.NEUTRAL | {
    # OpenAI's Responses
    "background": (None, False),
    "conversation": (None,),
    "prompt": (None,),
    "truncation": (None, "disabled"),
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
"""Fields that this endpoint does not support -> the values that ask for nothing, which are accepted."""
IGNORED = frozenset({"client_metadata", "service_tier", "prompt_cache_retention", "prompt_cache_options"})
"""Fields about accounts and caches of a hosted service. They have no effect here, whatever their value."""

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
_Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # of tools and inputs that this server does not have
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
    """`text`. Nothing tells the model to be brief or verbose, so only the default verbosity is accepted."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningFields(_Strict):
    """`reasoning`. Summaries have no effect: the reasoning itself is shown."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class FunctionTool(_Strict):
    """A function. What it returns and from where it is called do not change what the model is told."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    allowed_callers: list[str] | None = None
    defer_loading: Literal[False] | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class FunctionChoice(_Strict):
    """`tool_choice`: one function, which must be called."""

    type: Literal["function"]
    name: str


class AllowedFunctions(_Strict):
    """`tool_choice`: some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class OtherTool(BaseModel):
    """A tool of another type, which is skipped: only functions are offered to the model."""

    type: str


def _as_it_is(value: Any) -> Any:
    return value


# What is accepted, for the schema of the body. `items` and `tools` read these: their errors name the field.
_Items = str | list[Item]
_Tools = Annotated[list[FunctionTool | OtherTool], Field(max_length=MAX_TOOLS)] | None
_Choice = Literal["none", "auto", "required"] | FunctionChoice | AllowedFunctions | None
_Label = Annotated[str, Field(max_length=512)]


class ResponsesRequest(GenerationFields):
    """The fields of a request. Those of `GenerationFields` that OpenAI does not have here are extensions."""

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
    store: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Beyond OpenAI's API: variables of the chat template."""

    # Only repeated in the answer. `max_tool_calls` limits tools that the server runs, and it runs none.
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], _Label], Field(max_length=16)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = None
    prompt_cache_key: _Label | None = None
    safety_identifier: _Label | None = None
    user: _Label | None = None

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
