"""The text of a state: plain, or turns of a conversation, with variables in it whose text may not be known yet."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pagewood.engine.program.backend import Prompt
from pagewood.engine.program.variable import Variable

Part = str | Variable


@dataclass(frozen=True, slots=True)
class _Turn:
    role: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The text of a state at one moment."""

    turns: tuple[_Turn, ...]
    parts: tuple[Part, ...]
    is_conversation: bool
    is_open: bool

    def prompt(self, *, tools: tuple[dict[str, Any], ...] = ()) -> Prompt:
        """Return the prompt, with the tools that it describes; waits for the variables in it.

        Raises:
            VariableError: one has no value.
        """
        return Prompt(
            is_conversation=self.is_conversation,
            messages=tuple({"role": turn.role, "content": _join(turn.parts)} for turn in self.turns),
            is_open=self.is_open,
            text=_join(self.parts),
            tools=tools,
        )


class Text:
    """The text of a state. Invariant: it has roles or plain text, never both.

    A conversation is complete turns, and perhaps an assistant's turn that has begun. Plain text is `parts` alone.
    """

    __slots__ = ("_in_block", "_is_conversation", "_is_open", "_parts", "_turns", "last")

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        """Complete turns."""  # contents written by: turn, close
        self._parts: list[Part] = []
        """Plain text, or the assistant's turn so far."""  # contents written by: add, close
        self._is_conversation = False  # written by: turn, open
        self._is_open = False
        """Whether the assistant's turn has begun."""  # written by: open, close
        self._in_block = False
        """Whether the assistant's turn is that of a `with`."""  # written by: block
        self.last: Variable | None = None
        """The latest variable in it."""  # written by: add

    def copy(self) -> Text:
        """Return an independent text that begins like this one."""
        text = Text()
        text._turns, text._parts = list(self._turns), list(self._parts)
        text._is_conversation, text._is_open, text.last = self._is_conversation, self._is_open, self.last
        return text

    def add(self, part: Part) -> None:
        """Append to the assistant's turn, which begins if it has not, or to plain text."""
        if self._is_conversation:
            self._is_open = True
        self._parts.append(part)
        if isinstance(part, Variable):
            self.last = part

    def turn(self, role: str, content: str) -> None:
        """Append a complete turn.

        Raises:
            ValueError: there is plain text before it, or it is inside the assistant's turn.
        """
        self._begin(role)
        self._turns.append(_Turn(role, (content,)))

    @contextmanager
    def block(self) -> Generator[None]:
        """Begin the assistant's turn, and complete it at the end of a `with`. Raises what `turn` raises."""
        self._begin("assistant")
        self._is_open = self._in_block = True
        try:
            yield
        finally:
            self._in_block = False
            self._close()

    def snapshot(self, *, is_continued: bool) -> Snapshot:
        """Return the text as it is now; `is_continued` begins the assistant's turn if it has not begun."""
        return Snapshot(
            turns=tuple(self._turns),
            parts=tuple(self._parts),
            is_conversation=self._is_conversation,
            is_open=self._is_open or is_continued,
        )

    def _begin(self, role: str) -> None:
        if self._in_block:
            raise ValueError(f"{role} must come after the assistant's block, got it inside")
        if self._parts and not self._is_conversation:
            raise ValueError(f"{role} must not follow plain text: a program has roles from its beginning, or none")
        self._close()
        self._is_conversation = True

    def _close(self) -> None:
        if self._parts:
            self._turns.append(_Turn("assistant", tuple(self._parts)))
        self._parts = []
        self._is_open = False


def _join(parts: tuple[Part, ...]) -> str:
    return "".join(part if isinstance(part, str) else part.answer().text for part in parts)
