"""The messages and tools of a chat request, and their form for chat templates."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import Name
from pagewood.server.http.validation import WHOLE, kind
from pagewood.server.images.sources import joined
from pagewood.server.protocols.common.tools import MAX_TOOLS, Function, Tools, check_known


def content_of(content: Any) -> str | list[object] | None:
    """Return the content of a message: its text, or its parts if there are images among them.

    Raises:
        ValueError: it is neither a string nor parts of text and images.
    """
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"expected a string or an array of parts, but got {kind(content)} instead")
    return joined([_part(part) for part in cast("list[Any]", content)])


def _part(part: Any) -> dict[str, str]:
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": {"url": str(url)}} | {"type": "image_url", "image_url": str(url)}:
            return {"type": "image", "image": url}
        case {"type": str(other)} if other not in ("text", "refusal", "image_url"):
            raise ValueError(f"only parts of the types 'text' and 'image_url' are supported, but got '{other}'")
        case {"type": "image_url"}:
            raise ValueError("a part of the type 'image_url' must have the 'url' of an image")
        case _:
            raise ValueError('every part must be an object like {"type": "text", "text": "..."}')


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


class ImageUrl(BaseModel):
    """Where an image is."""

    url: str
    """A data URL in base64; or, if the operator allows its host, one of http or https."""
    detail: str | None = None
    """Without effect: the model's folder says how large images are."""


class ImagePart(BaseModel):
    """An image in a message of the user."""

    type: Literal["image_url"]
    image_url: ImageUrl | str


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
    index: Annotated[int, WHOLE] | None = None
    """Clients that assemble streams send it back."""


_TEMPLATE_ROLES = {"developer": "system", "function": "tool"}
"""Roles that have another name in chat templates."""


class Message(_Strict):
    """One message. Fields that only answers have are accepted if they are empty: clients send answers back."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[dict[str, str]] | None,
        BeforeValidator(content_of, str | list[TextPart | ImagePart | RefusalPart] | None),
    ] = None
    name: str | None = None
    refusal: str | None = None
    audio: None = None
    function_call: CalledFunction | None = None
    """The only call of an earlier answer, in the form that goes with `functions`."""
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
        if isinstance(self.content, list) and self.role != "user":
            raise _misplaced(f"{param}.content: image_url", "user")
        if self.content is None and not is_assistant:
            raise _missing(f"{param}.content")
        if self.role == "tool" and self.tool_call_id is None:
            raise _missing(f"{param}.tool_call_id")
        if self.role == "function" and self.name is None:
            raise _missing(f"{param}.name")
        if self.tool_calls and self.function_call is not None:
            raise _both(f"{param}.tool_calls", f"{param}.function_call")
        for name in ("tool_calls", "function_call", "refusal", "reasoning_content", "reasoning"):
            if getattr(self, name) and not is_assistant:
                raise _misplaced(f"{param}.{name}", "assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise _misplaced(f"{param}.tool_call_id", "tool")

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read."""
        found: dict[str, Any] = {
            "role": _TEMPLATE_ROLES.get(self.role, self.role),
            "content": self.refusal or "" if self.content is None else self.content,
        }
        if self.name is not None:
            found["name"] = self.name
        calls = [(call.id, call.function) for call in self.tool_calls or ()]
        if self.function_call is not None:
            calls = [(_call_id(self.function_call.name), self.function_call)]
        if calls:
            found["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": called.name, "arguments": called.arguments}}
                for id, called in calls
            ]
        if self.role == "function":
            found["tool_call_id"] = _call_id(self.name or "")
        elif self.tool_call_id is not None:
            found["tool_call_id"] = self.tool_call_id
        reasoning = self.reasoning_content or self.reasoning
        if reasoning:
            found["reasoning_content"] = reasoning
        return found


def _call_id(name: str) -> str:
    """Return the id that ties the result of a `function_call` to it: such a call has none."""
    return f"call_{name}"


def _both(first: str, second: str) -> ApiError:
    message = f"'{first}' and '{second}' cannot both be sent."
    return ApiError(message, param=second, code="invalid_value")


def _missing(param: str) -> ApiError:
    return ApiError(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _misplaced(param: str, role: str) -> ApiError:
    message = f"The '{param}' parameter is only allowed in messages with the role '{role}'."
    return ApiError(message, param=param, code="invalid_value")


class FunctionFields(_Strict):
    """`function` of a tool."""

    name: Name
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


def _function_choice(value: Any) -> Any:
    """Return a choice in the form that pydantic reads."""
    if value is None or value in ("none", "auto"):
        return value
    if isinstance(value, dict):
        return NamedFunction.model_validate(value)
    raise ValueError("expected 'none', 'auto', or an object with the name of a function")


class ToolsFields(BaseModel):
    """The fields of a request about tools; those of an older form ask for answers with `function_call`."""

    tools: Annotated[list[ToolFields], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None, BeforeValidator(_choice)
    ] = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[FunctionFields], Field(max_length=MAX_TOOLS)] | None = None
    function_call: Annotated[Literal["none", "auto"] | NamedFunction | None, BeforeValidator(_function_choice)] = None

    @property
    def has_old_form(self) -> bool:
        """Whether answers have `function_call` instead of `tool_calls`."""
        return bool(self.functions)


def tools_of(fields: ToolsFields) -> Tools | None:
    """Return the functions of a request; None: it has none.

    Raises:
        ApiError: two functions have one name, the choice names a function that the request does not have, or the fields
            of both forms were sent.
    """
    if fields.has_old_form:
        for name in ("tools", "tool_choice"):
            if getattr(fields, name) is not None:
                raise _both(name, "functions")
        match fields.function_call:
            case NamedFunction(name=name):
                choice = "required"
            case word:
                choice, name = word or "auto", None
        functions = tuple(map(_function, fields.functions or ()))
        tools = Tools(functions=functions, choice=choice, name=name, parallel=False, param="functions")
        return tools.checked(choice_param="function_call")
    if isinstance(fields.function_call, NamedFunction):
        message = "The 'function_call' parameter is only allowed when 'functions' are specified."
        raise ApiError(message, param="function_call", code="invalid_value")
    functions = [_function(tool.function) for tool in fields.tools or ()]
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


def _function(said: FunctionFields) -> Function:
    return Function(name=said.name, description=said.description, parameters=said.parameters, strict=bool(said.strict))
