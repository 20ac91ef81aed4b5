"""The messages and tools of a chat request, and what chat templates get of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.errors import ApiError
from pagewood.server.tools import MAX_NAME_LENGTH, MAX_TOOLS, Function, Tools, check_known
from pagewood.server.validation import kind


def text_of(content: Any) -> str | None:
    """Return the text of a message: a string, or parts that are all text.

    Raises:
        ValueError: it is something else.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"expected a string or an array of text parts, but got {kind(content)} instead")
    return "".join([_part(part) for part in cast("list[Any]", content)])


def _part(part: Any) -> str:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return text
        case {"type": str(other)} if other not in ("text", "refusal"):
            raise ValueError(f"only parts of type 'text' are supported, but got '{other}'")
        case _:
            raise ValueError('every part must be an object {"type": "text", "text": "..."}')


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(BaseModel):
    """Text of a message."""

    type: Literal["text"]
    text: str


class RefusalPart(BaseModel):
    """A refusal of an earlier answer."""

    type: Literal["refusal"]
    refusal: str


class CalledFunction(_Strict):
    """`function` of a call."""

    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class CallMessage(_Strict):
    """One call of an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Clients that put streams together send it back."""


class Message(_Strict):
    """One message. Fields that only answers have are accepted if they are empty: clients send answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(text_of, str | list[TextPart | RefusalPart] | None)] = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: None = None
    tool_calls: list[CallMessage] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    def check(self, param: str) -> None:
        """Check that the fields suit the role; `param` is the name of this message.

        Raises:
            ApiError: one is missing, or belongs to another role.
        """
        is_assistant = self.role == "assistant"
        if self.content is None and not is_assistant:
            raise _missing(f"{param}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise _missing(f"{param}.tool_call_id")
        for name in ("tool_calls", "refusal", "reasoning_content", "reasoning"):
            if getattr(self, name) and not is_assistant:
                raise _misplaced(f"{param}.{name}", "assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise _misplaced(f"{param}.tool_call_id", "tool")

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        # "developer" is the newer word for "system"; chat templates know the older word.
        found: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.refusal or "" if self.content is None else self.content,
        }
        if self.name is not None:
            found["name"] = self.name
        if self.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            found["reasoning_content"] = reasoning
        return found


def _missing(param: str) -> ApiError:
    return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _misplaced(param: str, role: str) -> ApiError:
    message = f"The '{param}' parameter is only allowed in messages with the role '{role}'."
    return ApiError(message, param=param, code="invalid_value")


class FunctionFields(_Strict):
    """`function` of a tool."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(_Strict):
    """A tool."""

    type: Literal["function"]
    function: FunctionFields


class NamedFunction(_Strict):
    """`function` of a tool choice."""

    name: str


class NamedChoice(_Strict):
    """`tool_choice`: one function, which must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(_Strict):
    """`allowed_tools` of a tool choice."""

    mode: Literal["auto", "required"]
    tools: list[NamedChoice]


class AllowedChoice(_Strict):
    """`tool_choice`: some of the functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def _choice(value: Any) -> Any:
    """Return a choice in the form that pydantic reads; its errors for unions name no field of the request."""
    match value:
        case None | "none" | "auto" | "required":
            return value
        case {"type": "function"}:
            return NamedChoice.model_validate(value)
        case {"type": "allowed_tools"}:
            return AllowedChoice.model_validate(value)
        case _:
            raise ValueError(
                "expected 'none', 'auto', 'required', or an object with the type 'function' or 'allowed_tools'"
            )


class ToolsFields(BaseModel):
    """The fields of a request about tools."""

    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None, BeforeValidator(_choice)
    ] = None
    parallel_tool_calls: bool | None = None


def tools_of(fields: ToolsFields) -> Tools | None:
    """Return the functions of a request; None: it has none.

    Raises:
        ApiError: two functions have one name, or the choice names a function that the request does not have.
    """
    functions = [
        Function(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            strict=bool(tool.function.strict),
        )
        for tool in fields.tools or ()
    ]
    parallel = fields.parallel_tool_calls is not False
    choice, name = "auto", None
    match fields.tool_choice:
        case NamedChoice(function=function):
            choice, name = "required", function.name
        case AllowedChoice(allowed_tools=allowed):
            names = [one.function.name for one in allowed.tools]
            check_known(names, functions, param="tool_choice.allowed_tools.tools")
            functions = [function for function in functions if function.name in names]
            choice = allowed.mode
        case str(word):
            choice = word
        case None:
            pass
    return Tools(functions=tuple(functions), choice=choice, name=name, parallel=parallel).checked()
