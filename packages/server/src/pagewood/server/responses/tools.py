"""The tools of a request. Only functions are offered to the model; tools of other types are skipped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagewood.server.errors import ApiError
from pagewood.server.responses.request import AllowedFunctions, FunctionChoice, FunctionTool, ResponsesRequest
from pagewood.server.tools import MAX_TOOLS, Function, Tools, check_known
from pagewood.server.validation import validated


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The tools of a request."""

    functions: tuple[Function, ...]
    """All functions of the request."""
    tools: Tools | None
    """How the prompt describes them to the model; None: not at all."""

    @property
    def shown(self) -> tuple[dict[str, Any], ...]:
        """The functions, as the answer repeats them."""
        return tuple(
            {
                "type": "function",
                "name": function.name,
                "description": function.description,
                "parameters": function.parameters,
                "strict": function.strict,
            }
            for function in self.functions
        )


def offer(said: ResponsesRequest) -> Offer:
    """Return the tools of a request.

    Raises:
        ApiError: a function is wrong, two have one name, or the choice is for a tool that there is not.
    """
    given = said.tools or []
    if len(given) > MAX_TOOLS:
        raise ApiError(
            f"Invalid value for 'tools': expected at most {MAX_TOOLS} tools, but got {len(given)} instead.",
            param="tools",
            code="invalid_value",
        )
    functions = tuple(
        _function(validated(FunctionTool, tool, at=("tools", index)))
        for index, tool in enumerate(given)
        if _type(tool, f"tools[{index}]") == "function"
    )
    choice, name, offered = "auto", None, functions
    match said.tool_choice:
        case None:
            pass
        case "none" | "auto" | "required":
            choice = said.tool_choice
        case {"type": "function"}:
            choice, name = "required", validated(FunctionChoice, said.tool_choice, at=("tool_choice",)).name
        case {"type": "allowed_tools"}:
            allowed = validated(AllowedFunctions, said.tool_choice, at=("tool_choice",))
            names = [
                validated(FunctionChoice, tool, at=("tool_choice", "tools", index)).name
                for index, tool in enumerate(allowed.tools)
                if _type(tool, f"tool_choice.tools[{index}]") == "function"
            ]
            check_known(names, functions, param="tool_choice.tools")
            offered = tuple(function for function in functions if function.name in names)
            choice = allowed.mode
        case _:
            raise ApiError(
                "Invalid value for 'tool_choice': expected 'none', 'auto', 'required', or an object with the type "
                "'function' or 'allowed_tools'; tools of other types are not offered to the model.",
                param="tool_choice",
                code="invalid_value",
            )
    tools = Tools(functions=offered, choice=choice, name=name, parallel=said.parallel_tool_calls is not False)
    return Offer(functions=functions, tools=tools.checked())


def _type(tool: dict[str, Any], param: str) -> str:
    found = tool.get("type")
    if not isinstance(found, str):
        raise ApiError(
            f"Missing required parameter: '{param}.type'.", param=f"{param}.type", code="missing_required_parameter"
        )
    return found


def _function(tool: FunctionTool) -> Function:
    return Function(name=tool.name, description=tool.description, parameters=tool.parameters, strict=bool(tool.strict))
