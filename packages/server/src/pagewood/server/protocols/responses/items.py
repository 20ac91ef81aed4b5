"""The items of a conversation, and the messages made from them for chat templates."""

from __future__ import annotations

import base64
import binascii
import json
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.http.errors import ApiError
from pagewood.server.http.validation import kind, validated
from pagewood.server.images.sources import joined
from pagewood.server.protocols.common.messages import CalledFunction, CallMessage, Message
from pagewood.server.protocols.responses import objects
from pagewood.server.protocols.responses.custom_input import as_arguments

_SEALED = "pagewood-1:"


def seal(reasoning: str) -> str:
    """Return reasoning in the form of `encrypted_content`: encoded, not secret, because the client sees it anyway."""
    return _SEALED + base64.b64encode(reasoning.encode()).decode()


def unseal(content: str) -> str:
    """Return the reasoning in `encrypted_content`.

    Raises:
        ValueError: this server has not written it.
    """
    try:
        if content.startswith(_SEALED):
            return base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise ValueError("it was not written by this server")


def _text(content: Any) -> Any:
    """Return the text of a message or of an output: a string, or parts that are all text."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"expected a string or an array of text parts, but got {kind(content)} instead")
    return "".join([_part(part) for part in cast("list[Any]", content)])


def _part(part: Any) -> str:
    match part:
        case {"type": "input_text" | "output_text" | "text", "text": str(text)}:
            return text
        case {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(other)} if other not in ("input_text", "output_text", "text", "refusal"):
            raise ValueError(f"only parts of text are supported, but got '{other}'")
        case _:
            raise ValueError('every part must be an object {"type": "input_text", "text": "..."}')


class ItemText(BaseModel):
    """Text of an item."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class ItemRefusal(BaseModel):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


_Text = Annotated[str, BeforeValidator(_text, str | list[ItemText | ItemRefusal])]


class ItemImage(BaseModel):
    """An image in a message of the user."""

    type: Literal["input_image"]
    image_url: str
    """A data URL in base64; or, if the operator allows its host, one of http or https."""
    detail: str | None = None
    """Without effect: the model's folder says how large images are."""


def _content(content: Any) -> Any:
    """Return the text of a message, or its parts if there are images among them."""
    if not isinstance(content, list):
        return _text(content)
    parts: list[dict[str, str]] = []
    for part in cast("list[Any]", content):
        match part:
            case {"type": "input_image", "image_url": str(url)}:
                parts.append({"type": "image", "image": url})
            case {"type": "input_image"}:
                raise ValueError("an image must have the field 'image_url'; files are not supported")
            case _:
                parts.append({"type": "text", "text": _part(part)})
    return joined(parts)


_Content = Annotated[
    str | list[dict[str, str]], BeforeValidator(_content, str | list[ItemText | ItemImage | ItemRefusal])
]


class _Item(BaseModel):
    """Fields of all items that the model does not see: clients send answers back as they got them."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    status: str | None = None
    created_by: Any = None
    caller: Any = None


class MessageItem(_Item):
    """A message."""

    type: Literal["message"] | None = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    phase: Any = None
    namespace: None = None


class FunctionCallItem(_Item):
    """A call of a function in an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str
    parsed_arguments: Any = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class CallOutputItem(_Item):
    """The output of a function."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: _Text
    name: Any = None
    namespace: Any = None


class CustomCallItem(_Item):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None


class SummaryPart(BaseModel):
    """A summary of reasoning."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(_Item):
    """Reasoning of an earlier answer."""

    type: Literal["reasoning"]
    summary: list[SummaryPart] = []
    content: list[ReasoningPart] | None = None
    encrypted_content: str | None = None
    namespace: None = None

    def text(self, param: str) -> str:
        """Return the reasoning itself, or else its summary; `param` is the name of this item.

        Raises:
            ApiError: it cannot be read.
        """
        if self.content:
            return "".join([part.text for part in self.content])
        if self.encrypted_content and not self.summary:
            try:
                return unseal(self.encrypted_content)
            except ValueError as error:
                param = f"{param}.encrypted_content"
                message = f"Invalid value for '{param}': {error}."
                raise ApiError(message, param=param, code="invalid_encrypted_content") from error
        return "\n\n".join([part.text for part in self.summary])


class AdditionalToolsItem(_Item):
    """Tools that come with the conversation. They count from its beginning: the prompt describes tools once."""

    type: Literal["additional_tools"]
    role: Literal["developer"] = "developer"
    tools: list[dict[str, Any]]


class SearchCallItem(_Item):
    """A search for further tools in an earlier answer."""

    type: Literal["tool_search_call"]
    call_id: str
    arguments: Any
    execution: Literal["client"] = "client"


class SearchOutputItem(_Item):
    """The tools that a search has found. They count from the beginning of the conversation, too."""

    type: Literal["tool_search_output"]
    call_id: str
    tools: list[dict[str, Any]]
    execution: Literal["client"] = "client"


def _agent_text(content: Any) -> Any:
    """Return the text of a message between agents; clients call such text of the model encrypted."""
    if not isinstance(content, list):
        return _text(content)
    return _text([_decrypted(part) for part in cast("list[Any]", content)])


def _decrypted(part: Any) -> Any:
    match part:
        case {"type": "encrypted_content", "encrypted_content": str(text)}:
            return {"type": "input_text", "text": text}
        case _:
            return part


class EncryptedPart(BaseModel):
    """Text from the model to another agent; this server has not encrypted it."""

    type: Literal["encrypted_content"]
    encrypted_content: str


class AgentMessageItem(_Item):
    """A message of another agent of the client. To the model it is a message of the user."""

    type: Literal["agent_message"]
    author: str | None = None
    recipient: str | None = None
    content: Annotated[str | None, BeforeValidator(_agent_text, str | list[ItemText | EncryptedPart] | None)] = None


Item = (
    MessageItem | FunctionCallItem | CallOutputItem | CustomCallItem | ReasoningItem
    | AdditionalToolsItem | AgentMessageItem | SearchCallItem | SearchOutputItem
)  # fmt: skip
_ITEMS: dict[str, type[Item]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "additional_tools": AdditionalToolsItem,
    "agent_message": AgentMessageItem,
    "tool_search_call": SearchCallItem,
    "tool_search_output": SearchOutputItem,
}


def items_of(given: str | list[dict[str, Any]]) -> list[Item]:
    """Return the items of `input`.

    Raises:
        ApiError: one is wrong, or of a type that is not supported.
    """
    if isinstance(given, str):
        return [MessageItem(role="user", content=given)]
    return [_item(item, index) for index, item in enumerate(given)]


def _item(item: dict[str, Any], index: int) -> Item:
    found: Any = item.get("type") or ("message" if "role" in item else "item_reference")
    model = _ITEMS.get(found) if isinstance(found, str) else None
    if model is None:
        raise ApiError(
            f"Unsupported value for 'input[{index}].type': expected one of {', '.join(_ITEMS)}, "
            f"but got '{str(found)[:100]}' instead.",
            param=f"input[{index}].type",
            code="unsupported_value",
        )
    return validated(model, item, at=("input", index))


_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
    "agent_message": "amsg",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


def listed(item: Item) -> objects.ListedItem:
    """Return an item of the input as clients read it: with an id, a status, and content in parts."""
    id = item.id or f"{_PREFIXES[item.type or 'message']}_{uuid.uuid4().hex}"
    status = item.status or "completed"
    match item:
        case MessageItem():
            part = objects.OutputText if item.role == "assistant" else objects.InputText
            parts = [{"type": "text", "text": item.content}] if isinstance(item.content, str) else item.content
            content = tuple(
                objects.InputImage(image_url=one["image"]) if one["type"] == "image" else part(text=one["text"])
                for one in parts
            )
            return objects.ListedMessage(id=id, status=status, role=item.role, content=content)
        case FunctionCallItem():
            of: dict[str, Any] = {"id": id, "status": status, "call_id": item.call_id, "namespace": item.namespace}
            return objects.FunctionCall(**of, name=item.name, arguments=item.arguments)
        case CustomCallItem():
            of = {"id": id, "status": status, "call_id": item.call_id, "namespace": item.namespace}
            return objects.CustomCall(**of, name=item.name, input=item.input)
        case AdditionalToolsItem():
            return objects.AdditionalTools(id=id, status=status, tools=item.tools)
        case SearchCallItem():
            return objects.SearchCall(id=id, status=status, call_id=item.call_id, arguments=item.arguments)
        case SearchOutputItem():
            return objects.SearchOutput(id=id, status=status, call_id=item.call_id, tools=item.tools)
        case AgentMessageItem():
            text = objects.InputText(text=item.content or "")
            return objects.ListedMessage(id=id, status=status, role="user", content=(text,))
        case CallOutputItem():
            output = objects.CallOutput if item.type == "function_call_output" else objects.CustomOutput
            return output(id=id, status=status, call_id=item.call_id, output=item.output)
        case ReasoningItem():
            return objects.Reasoning(
                id=id,
                status=status,
                content=tuple(objects.ReasoningText(text=part.text) for part in item.content or ()),
                summary=tuple(objects.SummaryText(text=part.text) for part in item.summary),
                encrypted_content=item.encrypted_content,
            )


def messages(items: Sequence[Item], *, instructions: str | None, num_earlier: int = 0) -> list[dict[str, Any]]:
    """Return a conversation in the form that chat templates read.

    Instructions and the system messages at the beginning are one message, because many templates know only one. The
    reasoning, the text and the calls of one answer are one message, too.

    Args:
        items: the conversation.
        instructions: go before it.
        num_earlier: number of leading items from earlier requests.

    Raises:
        ApiError: an item cannot be read, or is the output of an unknown call.
    """
    conversation = _Conversation(instructions)
    for index, item in enumerate(items):
        conversation.add(item, f"input[{index - num_earlier}]")
    found = conversation.messages()
    if not found:
        raise ApiError("Invalid value for 'input': expected at least one item.", param="input", code="invalid_value")
    return [message.for_template() for message in found]


class _Conversation:
    """Messages that are assembled from items. An incomplete call is left out, and so is its output.

    Invariant: pending reasoning, text and calls belong to one answer.
    """

    __slots__ = ("_call_ids", "_calls", "_found", "_incomplete_ids", "_reasoning", "_system", "_text")

    def __init__(self, instructions: str | None) -> None:
        self._system = [] if instructions is None else [instructions]
        self._found: list[Message] = []
        self._call_ids: set[str] = set()
        self._incomplete_ids: set[str] = set()
        self._reasoning = ""
        self._text: str | None = None
        self._calls: list[CallMessage] = []

    def add(self, item: Item, param: str) -> None:
        """Append an item; `param` is its name."""
        match item:
            case ReasoningItem():
                if self._text is not None or self._calls:
                    self._end_answer()
                self._reasoning += item.text(param)
            case MessageItem(content=list()) if item.role != "user":
                message = f"Invalid value for '{param}.content': images belong to messages of the user."
                raise ApiError(message, param=f"{param}.content", code="invalid_value")
            case MessageItem(role="assistant", content=str(text)):
                if self._text is not None or self._calls:
                    self._end_answer()
                self._text = text
            case FunctionCallItem() | CustomCallItem() | SearchCallItem() if item.status == "incomplete":
                self._incomplete_ids.add(item.call_id)
            case FunctionCallItem() | CustomCallItem() | SearchCallItem():
                self._call_ids.add(item.call_id)
                self._calls.append(_call(item))
            case CallOutputItem() | SearchOutputItem() if item.call_id in self._incomplete_ids - self._call_ids:
                pass
            case CallOutputItem() | SearchOutputItem():
                if item.call_id not in self._call_ids:
                    message = f"No tool call found for function call output with call_id {item.call_id[:100]}."
                    raise ApiError(message, param=f"{param}.call_id", code="invalid_value")
                self._end_answer()
                output = item.output if isinstance(item, CallOutputItem) else _found_names(item)
                self._found.append(Message(role="tool", content=output, tool_call_id=item.call_id))
            case AdditionalToolsItem():
                pass
            case AgentMessageItem():
                self._end_answer()
                self._found.append(Message(role="user", content=item.content or ""))
            case MessageItem():
                self._end_answer()
                if item.role != "user" and not self._found:
                    assert isinstance(item.content, str)
                    self._system.append(item.content)
                else:
                    self._found.append(Message(role=item.role, content=_as_in_chats(item.content)))

    def messages(self) -> list[Message]:
        """Return the messages."""
        self._end_answer()
        system = [Message(role="system", content="\n\n".join(self._system))] if self._system else []
        return system + self._found

    def _end_answer(self) -> None:
        if self._text is not None or self._calls or self._reasoning:
            self._found.append(
                Message(
                    role="assistant",
                    content=self._text,
                    reasoning_content=self._reasoning or None,
                    tool_calls=self._calls or None,
                )
            )
        self._reasoning, self._text, self._calls = "", None, []


def _as_in_chats(content: str | list[dict[str, str]]) -> Any:
    """Return the content of a message as chat completions have it."""
    if isinstance(content, str):
        return content
    return [{"type": "image_url", "image_url": one["image"]} if one["type"] == "image" else one for one in content]


def function_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


SEARCH = "tool_search"
"""The name under which the model knows the client's search for tools."""


def _call(item: FunctionCallItem | CustomCallItem | SearchCallItem) -> CallMessage:
    match item:
        case FunctionCallItem():
            name, arguments = function_name(item.name, item.namespace), item.arguments
        case CustomCallItem():
            name, arguments = function_name(item.name, item.namespace), as_arguments(item.input)
        case SearchCallItem():
            name, arguments = SEARCH, json.dumps(item.arguments)
    return CallMessage(id=item.call_id, function=CalledFunction(name=name, arguments=arguments))


def _found_names(item: SearchOutputItem) -> str:
    """Return the model's view of a search result: the names of the functions that it may call now."""
    names: list[str] = []
    for tool in item.tools:
        inner: Any = tool.get("tools") if tool.get("type") == "namespace" else None
        if isinstance(inner, list):
            some = cast("list[dict[str, Any]]", inner)
            names += [function_name(str(one.get("name")), str(tool.get("name"))) for one in some]
        else:
            names.append(str(tool.get("name")))
    return json.dumps({"tools": names})
