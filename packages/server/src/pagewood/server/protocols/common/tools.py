"""The functions that a request offers to the model, and whether the model must call them, in any protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagewood.server.http.errors import ApiError

MAX_TOOLS = 1024
"""Most functions of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of an object; None: it has no parameters."""
    strict: bool = False
    """Whether the arguments of every call must follow the schema, even if calling it is optional."""

    def as_tool(self) -> dict[str, Any]:
        """Return the tool as in OpenAI's API, which chat templates read."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """Functions, and whether the model may, must or must not call them."""

    functions: tuple[Function, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    """The only function that may be called, if it must be."""
    parallel: bool = True
    """Whether an answer may have several calls."""
    param: str = "tools"
    """The client's name of the field with the functions."""

    @property
    def offered(self) -> tuple[dict[str, Any], ...]:
        """The functions that the prompt describes to the model, as in OpenAI's API; none if it must not call any."""
        return () if self.choice == "none" else tuple(function.as_tool() for function in self.functions)

    @property
    def binds(self) -> str | None:
        """Which calls a grammar binds to their schemas, see `wire.Reading.binds`."""
        if self.choice == "auto":
            return "auto" if any(function.strict for function in self.functions) else None
        return self.name or self.choice

    def checked(self, *, choice_param: str = "tool_choice") -> Tools | None:
        """Return these tools after the checks that all protocols need; None: there are none.

        Args:
            choice_param: the client's name of the field with the choice.

        Raises:
            ApiError: two functions have one name, or the choice names an unknown function.
        """
        names = [function.name for function in self.functions]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ApiError(
                f"Invalid value for '{self.param}': expected different names, but got '{twice}' twice.",
                param=self.param,
                code="invalid_value",
            )
        if not names and self.choice == "required":
            raise ApiError(
                f"The '{choice_param}' parameter is only allowed when '{self.param}' are specified.",
                param=choice_param,
                code="invalid_value",
            )
        if self.name is not None:
            check_known([self.name], self.functions, param=choice_param, among=self.param)
        return self if names else None


def check_known(names: Sequence[str], functions: Sequence[Function], *, param: str, among: str = "tools") -> None:
    """Check that all names are those of functions.

    Args:
        names: of the functions that the client wants called.
        functions: of the request.
        param: the client's name of the field with the names.
        among: the client's name of the field with the functions.

    Raises:
        ApiError: one is not.
    """
    known = {function.name for function in functions}
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise ApiError(
            f"Invalid value for '{param}': the function '{unknown}' is not among '{among}'.",
            param=param,
            code="invalid_value",
        )
