"""The time for which the `cache_control` of a request asks to keep its prompt cached."""

from __future__ import annotations

from typing import Any, cast

from pagewood.server.protocols.anthropic.fields import MessagesRequest

_SECONDS = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL = "5m"


def retain_s(said: MessagesRequest) -> float | None:
    """Return the longest time that a `cache_control` of a request names, in seconds; None: there is no such field.

    The engine keeps the whole conversation for it, not only the part before the mark: the next turn begins with all of
    it. A time that Anthropic does not define counts as the default.
    """
    marks: list[Any] = [said.cache_control, *(block.cache_control for block in said.system)]
    marks += [tool.cache_control for tool in said.tools or ()]
    marks += [getattr(block, "cache_control", None) for message in said.messages for block in message.content]
    times = [_seconds(cast("dict[str, Any]", mark)) for mark in marks if isinstance(mark, dict)]
    return max(times, default=None)


def _seconds(mark: dict[str, Any]) -> float:
    ttl = mark.get("ttl")
    return _SECONDS.get(ttl if isinstance(ttl, str) else _DEFAULT_TTL, _SECONDS[_DEFAULT_TTL])
