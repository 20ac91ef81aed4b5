"""What a parser of answers reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer. Joined, the `arguments` of one call are the JSON text of an object."""

    kind: Literal["content", "reasoning", "tool_call", "arguments"]
    """tool_call: a call begins; arguments: a fragment of its arguments."""
    text: str
    """The text, the name of the function, or a fragment of JSON."""
    index: int = 0
    """Number of the call, from 0; 0 for content and reasoning."""
    id: str = ""
    """The id of a call (only in its `tool_call`), if the model writes one before the arguments; otherwise empty."""
