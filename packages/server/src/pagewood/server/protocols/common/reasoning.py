"""The amount of reasoning, as variables of chat templates."""

from __future__ import annotations

from typing import Any


def reasoning_kwargs(*, thinks: bool | None = None, effort: str | None = None) -> dict[str, Any]:
    """Return the variables of a chat template; a template may read none of them.

    Args:
        thinks: whether the model reasons before it answers; None: the default of its template.
        effort: amount of reasoning; None: the default of its template.
    """
    found: dict[str, Any] = {}
    if effort is not None:
        found["reasoning_effort"] = effort
    if thinks is not None:
        found |= {"enable_thinking": thinks, "thinking": thinks}
    return found


def style_kwargs(effort: str | None, verbosity: str | None) -> dict[str, Any]:
    """Return the variables of chat templates for reasoning effort and verbosity; a template may read none."""
    style: dict[str, Any] = {} if verbosity is None else {"verbosity": verbosity}
    return style if effort is None else style | reasoning_kwargs(thinks=effort != "none", effort=effort)
