"""What a parser of answers reports."""

from __future__ import annotations

from typing import Literal, NamedTuple

PartKind = Literal["content", "reasoning", "tool_call", "arguments"]


class Part(NamedTuple):
    """A piece of an answer. Joined, the `arguments` of one call are the JSON text of an object.

    A tuple rather than a dataclass, because there is one for nearly every token.
    """

    kind: PartKind
    """tool_call: a call begins; arguments: a fragment of its arguments."""
    text: str
    """The text, the name of the function, or a fragment of JSON."""
    index: int = 0  # pyright: ignore[reportIncompatibleMethodOverride]
    """Number of the call, from 0; 0 for content and reasoning."""
    id: str = ""
    """The id of a call (only in its `tool_call`), if the model writes one before the arguments; otherwise empty."""
