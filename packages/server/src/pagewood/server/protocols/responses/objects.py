"""The JSON of responses: the object, its items, and the events of a stream."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from pagewood.server.protocols.common.logprobs import TokenWithTop


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str
    annotations: tuple[Any, ...] = ()
    logprobs: list[TokenWithTop] = []


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """The text of reasoning."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="summary_text"):
    """A summary of reasoning. Only clients send it: this server shows the reasoning itself."""

    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: tuple[OutputText, ...] = ()


class _Call(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    status: str
    call_id: str
    name: str
    namespace: str | None = None


class FunctionCall(_Call, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a function."""

    arguments: str


class CustomCall(_Call, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a tool that takes a text."""

    input: str


class Reasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning of the model before its answer."""

    id: str
    status: str
    content: tuple[ReasoningText, ...] = ()
    summary: tuple[SummaryText, ...] = ()
    encrypted_content: str | None = None


class SearchCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_search_call"):
    """A search of the client for further tools."""

    id: str
    status: str
    call_id: str
    execution: Literal["client"] = "client"
    arguments: Any


OutputItem = OutputMessage | FunctionCall | CustomCall | SearchCall | Reasoning


class InputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    """Text for the model."""

    text: str


class InputImage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    """An image for the model."""

    image_url: str
    detail: str = "auto"


class ListedMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message of a conversation."""

    id: str
    status: str
    role: Literal["system", "developer", "user", "assistant"]
    content: tuple[InputText | InputImage | OutputText, ...]


class _Output(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    status: str
    call_id: str
    output: str


class CallOutput(_Output, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    """The output of a function."""


class CustomOutput(_Output, frozen=True, kw_only=True, tag_field="type", tag="custom_tool_call_output"):
    """The output of a tool that takes a text."""


class AdditionalTools(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="additional_tools"):
    """Tools that came with the conversation."""

    id: str
    status: str
    role: Literal["developer"] = "developer"
    tools: list[dict[str, Any]]


class SearchOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_search_output"):
    """The tools that a search has found."""

    id: str
    status: str
    call_id: str
    execution: Literal["client"] = "client"
    tools: list[dict[str, Any]]


ListedItem = (
    ListedMessage | FunctionCall | CallOutput | CustomCall | CustomOutput | SearchCall | SearchOutput | Reasoning
    | AdditionalTools
)  # fmt: skip
"""An item that led to a response."""


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of the items that led to a response."""

    object: Literal["list"] = "list"
    data: list[ListedItem]
    first_id: str
    """Empty if there are no items."""
    last_id: str
    has_more: bool


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response that was deleted."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by their origin."""

    cached_tokens: int
    cache_write_tokens: int = 0
    """Always 0: it is about prices."""


class OutputTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens by their use."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response failed."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response. Fields without a value here are those of features that this server does not have."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    """Unix time, seconds."""
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    """Unix time, seconds."""
    error: ResponseError | None = None
    incomplete_details: dict[str, str] | None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    usage: ResponseUsage | None = None

    # Repeated from the request.
    instructions: str | None
    previous_response_id: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: tuple[dict[str, Any], ...]
    top_logprobs: int
    top_p: float
    user: str | None

    background: bool = False
    service_tier: str = "default"
    truncation: str = "disabled"
    access_programs: None = None
    conversation: None = None
    image: None = None
    input_transformations: None = None
    moderation: None = None
    prompt: None = None
    prompt_cache_diagnostics: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    tool_usage: None = None


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An event of a stream; its type is also the name of the server-sent event."""

    sequence_number: int
    """From 0."""


class _Lifecycle(Event, frozen=True, kw_only=True):
    response: Response


class Created(_Lifecycle, frozen=True, kw_only=True, tag="response.created"):
    """The first event."""


class InProgress(_Lifecycle, frozen=True, kw_only=True, tag="response.in_progress"):
    """The second event."""


class Completed(_Lifecycle, frozen=True, kw_only=True, tag="response.completed"):
    """The last event of a response that is complete."""


class Incomplete(_Lifecycle, frozen=True, kw_only=True, tag="response.incomplete"):
    """The last event of a response that was cut."""


class Failed(_Lifecycle, frozen=True, kw_only=True, tag="response.failed"):
    """The last event of a response that failed."""


class ItemAdded(Event, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(Event, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item ends."""

    output_index: int
    item: OutputItem


class _OfItem(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _OfPart(_OfItem, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """The content of an item begins."""

    part: OutputText | ReasoningText


class PartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """The content of an item ends."""

    part: OutputText | ReasoningText


class TextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text of a message."""

    delta: str
    logprobs: list[TokenWithTop]


class TextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The whole text of a message."""

    text: str
    logprobs: list[TokenWithTop]


class ReasoningDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """More of the arguments of a call."""

    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """The whole arguments of a call."""

    name: str
    arguments: str


class CustomInputDelta(_OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.delta"):
    """More of the text for a custom tool."""

    delta: str


class CustomInputDone(_OfItem, frozen=True, kw_only=True, tag="response.custom_tool_call_input.done"):
    """The whole text for a custom tool."""

    input: str


class Failure(Event, frozen=True, kw_only=True, tag="error"):
    """An error; `response.failed` follows."""

    code: str | None
    message: str
    param: str | None


ResponseEvent = (
    Created | InProgress | Completed | Incomplete | Failed | Failure
    | ItemAdded | ItemDone | PartAdded | PartDone
    | TextDelta | TextDone | ReasoningDelta | ReasoningDone | ArgumentsDelta | ArgumentsDone
    | CustomInputDelta | CustomInputDone
)  # fmt: skip
"""Any event of a stream."""
