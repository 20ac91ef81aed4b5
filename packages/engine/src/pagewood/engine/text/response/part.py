"""The parts that a parser of answers reports."""

from __future__ import annotations

from typing import Literal, NamedTuple

PartKind = Literal["content", "reasoning", "tool_call", "arguments", "call_end"]


class Part(NamedTuple):
    """A piece of an answer. The parts of a call come one after the other, without parts of other calls between them.

    Joined, the `arguments` of a call that has a `call_end` are the JSON text of an object. A call without one broke
    off: its `arguments` are the beginning of such a text.

    A tuple rather than a dataclass, because there is one for nearly every token.
    """

    kind: PartKind
    """tool_call: a call begins; arguments: a fragment of its arguments; call_end: the model has closed it."""
    text: str
    """The text, the name of the function, or a fragment of JSON; empty in a `call_end`."""
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of the call, from 0; 0 for content and reasoning."""
    id: str = ""
    """The id of a call (only in its `tool_call`), if the model writes one before the arguments; otherwise empty."""
