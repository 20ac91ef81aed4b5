"""The bodies of requests, and what their fields mean to the engine."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, Field

from pagewood.engine.api import Grammar
from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import MAX_STOPS, Name, StopString
from pagewood.server.http.validation import WHOLE, parse
from pagewood.server.protocols.anthropic.blocks import Blocks, Strict, Texts
from pagewood.server.protocols.common.reasoning import reasoning_kwargs
from pagewood.server.protocols.common.sampling_fields import INT32_MAX
from pagewood.server.protocols.common.structured import Constraint, constrained
from pagewood.server.protocols.common.tools import MAX_TOOLS, Function, Tools

IGNORED = frozenset(
    {
        "metadata",  # accounts and tiers of a hosted service
        "service_tier",
        "inference_geo",
        "user_profile_id",
        "workspace_id",
        "speed",
        "diagnostics",  # asks for a report about Anthropic's cache
    }
)
"""Fields that have no effect on an answer here, whatever their value."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "container": (None,),
    "mcp_servers": (None, []),
    "fallbacks": (None, []),
    "compaction": (None,),
    "thread": (None,),
}
"""Fields that this server does not support -> their neutral values, which have no effect and are accepted."""
SERVER_TOOLS = (
    "web_search_",
    "web_fetch_",
    "bash_",
    "text_editor_",
    "computer_",
    "browser_",
    "code_execution_",
    "memory_",
    "tool_search_tool_",
)
"""Beginnings of the types of tools that Anthropic defines."""


def _custom_tools(value: Any) -> Any:
    """Return the tools that the client defines, without Anthropic's own."""
    if value is None or not isinstance(value, list):
        return value
    tools = cast("list[Any]", value)
    found: list[Any] = []
    for index, tool in enumerate(tools):
        type: Any = cast("dict[str, Any]", tool).get("type") if isinstance(tool, dict) else None
        if type is None or type == "custom":
            found.append(tool)
        elif not isinstance(type, str) or not type.startswith(SERVER_TOOLS):
            raise ValueError(f"tools of type {str(type)[:40]!r}, as at index {index}, are not supported")
    return found


class AnthropicTool(Strict):
    """A tool of the client."""

    name: Name
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None
    """Without effect: arguments are always streamed as they are written."""
    defer_loading: bool | None = None
    """Without effect: all tools are in the prompt."""
    allowed_callers: list[str] | None = None
    """Without effect: the model is the only caller."""
    input_examples: Annotated[list[Any], Field(max_length=0)] | None = None


class ServerTool(BaseModel):
    """A tool that Anthropic defines. It is left out: only Anthropic's models know it."""

    type: Annotated[str, Field(pattern=f"^({'|'.join(SERVER_TOOLS)})")]


class AnthropicToolChoice(Strict):
    """Whether the model may, must or must not call a tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class BlockBinding(Strict):
    """How to treat reasoning from another conversation. Without effect: this server does not check its origin."""

    prefix_mismatch_behavior: Literal["error", "drop_block"] | None = None


class Thinking(Strict):
    """Whether the model reasons before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE] | None = None
    """Not enforced: reasoning is limited by `max_tokens` only."""
    display: Literal["summarized", "omitted", "updates"] | None = None
    """"omitted": answers have no text of the reasoning."""
    block_binding: BlockBinding | None = None


class JsonFormat(Strict):
    """`output_config.format`."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class TaskBudget(Strict):
    """A budget of tokens for several requests. Without effect: only Anthropic's models can read it."""

    type: Literal["tokens"]
    total: Annotated[int, WHOLE]
    remaining: Annotated[int, WHOLE] | None = None


class OutputConfig(Strict):
    """The effort of the model, and the form of its answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None
    task_budget: TaskBudget | None = None


class Edit(Strict):
    """An edit of the prompt. Chat templates leave out the reasoning of earlier turns as their models expect it."""

    type: Literal["clear_thinking_20251015"]
    keep: Any = None


class ContextManagement(Strict):
    """`context_management`."""

    edits: list[Edit] | None = None


class AnthropicMessage(Strict):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


_Tools = list[AnthropicTool | ServerTool] | None
"""The accepted types, for the schema of the body."""


class PromptFields(Strict):
    """The fields that make up the prompt."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: Texts = Field(default_factory=list[Any])
    tools: Annotated[
        list[AnthropicTool] | None, Field(max_length=MAX_TOOLS), BeforeValidator(_custom_tools, _Tools)
    ] = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    """The older name of `output_config.format`."""
    context_management: ContextManagement | None = None
    cache_control: Any = None
    """As in blocks; see `retention`."""


class CountTokensRequest(PromptFields):
    """The body of a request to count the tokens of a prompt."""


class MessagesRequest(PromptFields):
    """The body of a request for an answer."""

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX), WHOLE]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX), WHOLE] | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None


def parse_messages(body: bytes) -> MessagesRequest:
    """Return the request for an answer that `body` holds.

    Raises:
        ApiError: a field is wrong, missing, unknown or not supported.
    """
    request = parse(MessagesRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    _check(request)
    return request


def parse_count(body: bytes) -> CountTokensRequest:
    """Return the request for a count that `body` holds.

    Raises:
        ApiError: as in `parse_messages`.
    """
    request = parse(CountTokensRequest, body, neutral=NEUTRAL, ignored=IGNORED)
    _check(request)
    return request


def _check(request: PromptFields) -> None:
    thinking, choice = request.thinking, request.tool_choice
    if thinking is not None and (thinking.budget_tokens is not None) != (thinking.type == "enabled"):
        if thinking.type == "enabled":
            raise _missing("thinking.budget_tokens")
        raise _misplaced("thinking.budget_tokens", "enabled")
    if choice is not None and (choice.name is not None) != (choice.type == "tool"):
        if choice.type == "tool":
            raise _missing("tool_choice.name")
        raise _misplaced("tool_choice.name", "tool")


def _missing(param: str) -> ApiError:
    return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _misplaced(param: str, type: str) -> ApiError:
    message = f"The '{param}' parameter is only allowed with the type '{type}'."
    return ApiError(message, param=param, code="invalid_value")


def tools_of(request: PromptFields) -> Tools | None:
    """Return the functions of a request; None: it has none.

    Raises:
        ApiError: two functions have one name, or the choice asks for a function that the request does not have.
    """
    functions = tuple(
        Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=bool(tool.strict))
        for tool in request.tools or ()
    )
    choice = request.tool_choice or AnthropicToolChoice(type="auto")
    words: dict[str, Literal["none", "auto", "required"]] = {"none": "none", "auto": "auto"}
    return Tools(
        functions=functions,
        choice=words.get(choice.type, "required"),
        name=choice.name,
        parallel=not choice.disable_parallel_tool_use,
    ).checked()


def template_kwargs(request: PromptFields) -> dict[str, Any]:
    """Return the variables of the chat template that control the amount of reasoning."""
    thinking, output = request.thinking, request.output_config
    return reasoning_kwargs(
        thinks=None if thinking is None else thinking.type != "disabled",
        effort=None if output is None else output.effort,
    )


def constraint(request: MessagesRequest) -> Constraint | None:
    """Return the grammar of the answer; None: no restriction.

    Raises:
        ApiError: the schema is too long or nested too deeply, or is given under two names.
    """
    named = {
        "output_config.format": None if request.output_config is None else request.output_config.format,
        "output_format": request.output_format,
    }
    given = [(name, format) for name, format in named.items() if format is not None]
    if not given:
        return None
    if len(given) > 1:
        message = "The 'output_format' parameter is the older name of 'output_config.format'; send one of them."
        raise ApiError(message, param="output_format", code="invalid_value")
    [(name, format)] = given
    return constrained(f"{name}.schema", Grammar.json_schema, format.schema_)
