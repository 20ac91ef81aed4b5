"""Typed reading of a JSON object, with errors that name the file and the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and where it came from. An absent or null field has its default; without one, it is an error.

    Every reader raises ValueError for a value of another type.
    """

    source: str
    values: Mapping[str, object]

    @classmethod
    def from_file(cls, path: Path) -> Fields:
        """Read a file.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it does not hold a JSON object.
        """
        try:
            values: object = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must hold JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(str(path), cast("dict[str, object]", values))

    def empty(self, name: str) -> Fields:
        """Return an object without fields, named as if it were this one's field `name`."""
        return Fields(f"{self.source}: {name}", {})

    def section(self, name: str) -> Fields | None:
        """Return the object in field `name`, or None where it is absent, null or empty."""
        value = self.values.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(f"{self.source}: {name}", cast("dict[str, object]", value))

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        return float(value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return a truth value."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a list of strings, or None where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise self._wrong(name, "a list of strings", items)
        return tuple(cast("list[str]", items))

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a whole number or a list of them, as a tuple; empty where it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) for item in items):
            raise self._wrong(name, "a whole number or a list of them", items)
        return tuple(cast("list[int]", items))

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"{self.source}: {name} is missing")
        return default

    def _wrong(self, name: str, wanted: str, value: object) -> ValueError:
        return ValueError(f"{self.source}: {name} must be {wanted}, got {value!r}")
