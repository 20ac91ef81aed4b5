"""What the output of a request may be."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

MAX_MARKS = 64
"""Most texts of `Grammar.after`."""
MAX_MARK_LENGTH = 256
"""Longest text of `Grammar.after`, in characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """What the output of a request may be. `Grammar.regex("[0-9]+")` and the like make one of each kind.

    The engine compiles the text, and refuses the request if it is wrong.

    Raises:
        ValueError: `text` is empty, or `after` has too many texts, or one that is empty or too long.
    """

    kind: Literal["json_schema", "regex", "lark", "choice", "structural_tag"]
    """json_schema: one JSON value by a JSON schema; regex: a text that matches the whole expression, in Rust's syntax;
    lark: a grammar in llguidance's form of Lark; choice: one of the strings of a JSON array; structural_tag: free text
    with typed regions, as JSON (see `pagewood.engine.grammar`)."""
    text: str
    after: tuple[str, ...] = ()
    """The grammar begins behind the first of these texts that the output has, such as the end of a section of
    reasoning. The output before it is free, but does not end. Empty: the grammar begins at once."""

    def __post_init__(self) -> None:
        """Check that there is a text, and that the marks may be."""
        if not self.text:
            raise ValueError("grammar.text must not be empty")
        if len(self.after) > MAX_MARKS or any(not 0 < len(mark) <= MAX_MARK_LENGTH for mark in self.after):
            raise ValueError(
                f"grammar.after must hold at most {MAX_MARKS} texts of 1 to {MAX_MARK_LENGTH} characters, "
                f"got {self.after!r:.300}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of one JSON value that a schema describes.

        Properties come in the order of the schema.

        Args:
            schema: an object, or its JSON text.

        Raises:
            TypeError: it holds something that JSON does not have.
            ValueError: it holds a number that is not finite.
        """
        return cls(kind="json_schema", text=_json_text("schema", schema))

    @classmethod
    def regex(cls, expression: str) -> Grammar:
        """Return the grammar of the texts that an expression in Rust's syntax matches from their start to their end."""
        return cls(kind="regex", text=expression)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        """Return the grammar of one of several texts.

        Raises:
            TypeError: `choices` is a string, or does not hold strings.
        """
        items: list[object] = list(choices)
        if isinstance(choices, str) or not all(isinstance(item, str) for item in items):
            raise TypeError(f"choices must be a sequence of strings, got {choices!r:.100}")
        return cls(kind="choice", text=_json_text("choices", items))

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return the grammar that a text in llguidance's form of Lark describes.

        `pagewood.engine.ebnf.lark_of_ebnf` translates EBNF, as llama.cpp has it.
        """
        return cls(kind="lark", text=grammar)

    @classmethod
    def structural_tag(cls, tag: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of free text with typed regions.

        Args:
            tag: an object with the type structural_tag, or its JSON text.

        Raises:
            TypeError: it holds something that JSON does not have.
            ValueError: it holds a number that is not finite.
        """
        return cls(kind="structural_tag", text=_json_text("tag", tag))


def _json_text(name: str, value: object) -> str:
    """Return the compact JSON of a value; a string is such a text already."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except TypeError as error:
        raise TypeError(f"{name} must be a JSON value or its text: {error}") from None
    except ValueError as error:
        raise ValueError(f"{name} must be a JSON value or its text: {error}") from None
