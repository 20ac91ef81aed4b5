"""The tools of a request. The model sees functions; its calls are returned as calls of the client's tools.

A custom tool is a function with one string. Functions of a namespace have the namespace as a prefix. A search for tools
is a function whose results add further functions. Tools of other types, which a hosted service would run, are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from pagewood.server.http.errors import ApiError
from pagewood.server.http.field_limits import MAX_NAME_LENGTH
from pagewood.server.http.validation import validated
from pagewood.server.protocols.common.tools import MAX_TOOLS, Function, Tools, check_known
from pagewood.server.protocols.responses.custom_input import PARAMETER
from pagewood.server.protocols.responses.items import SEARCH, AdditionalToolsItem, Item, SearchOutputItem, function_name
from pagewood.server.protocols.responses.request import (
    AllowedFunctions,
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesRequest,
    SearchTool,
    ToolChoice,
)

_CUSTOM_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {PARAMETER: {"type": "string"}},
    "required": [PARAMETER],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The client's tool that a function of the model stands for."""

    name: str
    namespace: str | None = None
    kind: Literal["function", "custom", "search"] = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The tools of a request."""

    shown: tuple[dict[str, Any], ...]
    """The accepted tools, as the answer repeats them."""
    origins: Mapping[str, Origin]
    """Function -> the client's tool, unless that is a function with the same name."""
    tools: Tools | None
    """Their description in the prompt; None: they are not described."""


@dataclass(slots=True)
class _Offering:
    """Collects functions."""

    functions: list[Function] = field(default_factory=list[Function])  # written by: add
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])  # written by: add
    num_given: int = 0  # written by: add

    def add(self, tools: Sequence[dict[str, Any]], param: str, namespace: str | None = None) -> list[dict[str, Any]]:
        """Add tools; return the accepted ones, as the answer repeats them."""
        shown: list[dict[str, Any]] = []
        for index, given in enumerate(tools):
            at = (param, index)
            match _type(given, f"{param}[{index}]"):
                case "function":
                    tool = validated(FunctionTool, given, at=at)
                    self._offer(tool, tool.parameters, namespace, f"{param}[{index}]", strict=bool(tool.strict))
                    known = {"parameters": tool.parameters, "strict": bool(tool.strict)}
                    shown.append({"type": "function", "name": tool.name, "description": tool.description, **known})
                case "custom":
                    tool = validated(CustomTool, given, at=at)
                    self._offer(tool, _CUSTOM_INPUT, namespace, f"{param}[{index}]", strict=False)
                    format = tool.format.model_dump() if tool.format is not None else {"type": "text"}
                    known = {"description": tool.description, "format": format}
                    shown.append({"type": "custom", "name": tool.name, **known})
                case "namespace" if namespace is None:
                    tool = validated(NamespaceTool, given, at=at)
                    inner = self.add(tool.tools, f"{param}[{index}].tools", tool.name)
                    known = {"description": tool.description or "", "tools": inner}
                    shown.append({"type": "namespace", "name": tool.name, **known})
                case "tool_search":
                    tool = validated(SearchTool, given, at=at)
                    if tool.execution == "client":
                        function = Function(name=SEARCH, description=tool.description, parameters=tool.parameters)
                        self.functions.append(function)
                        self.origins[SEARCH] = Origin(name=SEARCH, kind="search")
                        known = {"description": tool.description, "parameters": tool.parameters}
                        shown.append({"type": "tool_search", "execution": "client", **known})
                case _:
                    pass
        self.num_given += len(tools)
        if self.num_given > MAX_TOOLS:
            raise ApiError(
                f"Invalid value for 'tools': expected at most {MAX_TOOLS} tools, but got {self.num_given} instead.",
                param="tools",
                code="invalid_value",
            )
        return shown

    def _offer(
        self,
        tool: FunctionTool | CustomTool,
        parameters: dict[str, Any] | None,
        namespace: str | None,
        param: str,
        *,
        strict: bool,
    ) -> None:
        name = function_name(tool.name, namespace)
        if len(name) > MAX_NAME_LENGTH:
            raise ApiError(
                f"Invalid value for '{param}.name': with its namespace, the name '{name}' is longer than "
                f"{MAX_NAME_LENGTH} characters.",
                param=f"{param}.name",
                code="invalid_value",
            )
        is_custom = isinstance(tool, CustomTool)
        description = _custom_description(tool) if is_custom else tool.description
        self.functions.append(Function(name=name, description=description, parameters=parameters, strict=strict))
        if is_custom or namespace is not None:
            kind = "custom" if is_custom else "function"
            self.origins[name] = Origin(name=tool.name, namespace=namespace, kind=kind)


def offer(said: ResponsesRequest, items: Sequence[Item] = ()) -> Offer:
    """Return the tools of a request.

    Args:
        said: the request.
        items: the conversation, which may bring further tools.

    Raises:
        ApiError: a tool is wrong, two functions have one name, or the choice names an unknown tool.
    """
    offering = _Offering()
    shown = offering.add(said.tools or [], "tools")
    for item in items:
        if isinstance(item, AdditionalToolsItem):
            shown += offering.add(item.tools, "input.tools")
        elif isinstance(item, SearchOutputItem):
            offering.add(_loaded(item.tools, {function.name for function in offering.functions}), "input.tools")
    functions = tuple(offering.functions)
    choice, name, offered = "auto", None, functions
    match said.tool_choice:
        case None:
            pass
        case "none" | "auto" | "required":
            choice = said.tool_choice
        case {"type": "function" | "custom"}:
            choice, name = "required", _chosen(said.tool_choice, ("tool_choice",))
        case {"type": "allowed_tools"}:
            allowed = validated(AllowedFunctions, said.tool_choice, at=("tool_choice",))
            names = [
                _chosen(tool, ("tool_choice", "tools", index))
                for index, tool in enumerate(allowed.tools)
                if _type(tool, f"tool_choice.tools[{index}]") in ("function", "custom")
            ]
            check_known(names, functions, param="tool_choice.tools")
            offered = tuple(function for function in functions if function.name in names)
            choice = allowed.mode
        case _:
            raise ApiError(
                "Invalid value for 'tool_choice': expected 'none', 'auto', 'required', or an object with the type "
                "'function', 'custom' or 'allowed_tools'; tools of other types are not offered to the model.",
                param="tool_choice",
                code="invalid_value",
            )
    tools = Tools(functions=offered, choice=choice, name=name, parallel=said.parallel_tool_calls is not False)
    return Offer(shown=tuple(shown), origins=offering.origins, tools=tools.checked())


def _loaded(tools: Sequence[dict[str, Any]], known: set[str], namespace: str | None = None) -> list[dict[str, Any]]:
    """Return the new tools that a search has found, as tools that are offered at once."""
    found: list[dict[str, Any]] = []
    for tool in tools:
        name, inner = tool.get("name"), tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(name, str) and isinstance(inner, list):
            found.append({**tool, "tools": _loaded(cast("list[dict[str, Any]]", inner), known, name)})
        elif not isinstance(name, str) or function_name(name, namespace) not in known:
            found.append({key: value for key, value in tool.items() if key != "defer_loading"})
            known.add(function_name(str(name), namespace))
    return found


def _custom_description(tool: CustomTool) -> str:
    """Return the description of a custom tool for the model, which calls it like a function."""
    parts = [] if tool.description is None else [tool.description]
    parts.append(f"The text for this tool is the string `{PARAMETER}`.")
    if tool.format is not None and tool.format.type == "grammar":
        parts.append(f"It must match this {tool.format.syntax} grammar:\n{tool.format.definition}")
    return "\n\n".join(parts)


def _chosen(tool: dict[str, Any], at: tuple[str | int, ...]) -> str:
    choice = validated(ToolChoice, tool, at=at)
    return function_name(choice.name, choice.namespace)


def _type(tool: dict[str, Any], param: str) -> str:
    found = tool.get("type")
    if not isinstance(found, str):
        raise ApiError(
            f"Missing required parameter: '{param}.type'.", param=f"{param}.type", code="missing_required_parameter"
        )
    return found
