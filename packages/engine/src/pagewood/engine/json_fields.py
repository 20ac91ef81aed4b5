"""Typed reading of a JSON object, with errors that name the file, the field, the rule and the value."""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

_MAX_FILE_BYTES = 1 << 28
_MAX_SHOWN = 80  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object and where it came from.

    A field that is absent or null has its default. Without a default it must be there. Every reader raises ValueError
    for a value of another type or out of its range.
    """

    source: str
    values: Mapping[str, object]
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names that errors have for fields, where they differ."""

    @classmethod
    def from_file(cls, path: Path) -> Fields:
        """Read a file.

        Raises:
            FileNotFoundError: the file does not exist.
            ValueError: it does not hold a JSON object, or is larger than 256 MiB.
        """
        if path.is_dir():
            raise ValueError(f"{path} must be a file, got a folder")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"{path} must hold at most {_MAX_FILE_BYTES} bytes, got {path.stat().st_size}")
        try:
            values: object = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of too many digits, too deep
            raise ValueError(f"{path} must hold JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return cls(str(path), cast("dict[str, object]", values))

    def empty(self, name: str) -> Fields:
        """Return an object without fields, for errors named like field `name` of this one."""
        return Fields(f"{self.source}: {name}", {})

    def renamed(self, names: Mapping[str, str]) -> Fields:
        """Return the fields with those of `names` also under the names by which they are read, the keys of `names`.

        A key that is another one's name comes before it: so a field may have two names, of which the key's counts.
        """
        found: dict[str, object] = {}
        for name, own in names.items():
            value = found.get(own, self.values.get(own))
            if value is not None:
                found[name] = value
        shown = {name: own for name, own in names.items() if name in found or self.values.get(name) is None}
        return replace(self.over(found), names={**self.names, **shown}) if names else self

    def over(self, values: Mapping[str, object]) -> Fields:
        """Return the fields with those of `values` before them."""
        return replace(self, values=ChainMap(dict(values), cast("dict[str, object]", self.values)))

    def section(self, name: str) -> Fields | None:
        """Return the object in field `name`, or None if it is absent, null or empty."""
        value = self.values.get(name)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "an object", value)
        return Fields(f"{self.source}: {name}", cast("dict[str, object]", value))

    def integer(self, name: str, default: int | None = None, *, low: int = 0, high: int) -> int:
        """Return a whole number in [low, high]; a default is not checked."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number", value)
        if value is not default and not low <= value <= high:
            raise self._wrong(name, f"in [{low}, {high}]", value)
        return value

    def number(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        """Return a finite number in [low, high]; a default is not checked."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(name, "a number", value)
        if value is not default and not (low <= value <= high and math.isfinite(value)):
            raise self._wrong(name, f"in [{low}, {high}]", value)
        return float(value)

    def numbers(self, name: str, count: int, *, low: float, high: float) -> tuple[float, ...]:
        """Return a list of `count` numbers in [low, high]."""
        value = self._value(name, None)
        items: list[object] = list(cast("list[object]", value)) if isinstance(value, list) else []
        if len(items) != count:
            raise self._wrong(name, f"a list of {count} numbers", self.values.get(name))
        found: list[float] = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int | float) or not low <= item <= high:
                raise self._wrong(name, f"a list of numbers in [{low}, {high}]", item)
            found.append(float(item))
        return tuple(found)

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
        """Return a list of strings, or None if it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return None
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        if not all(isinstance(item, str) for item in items):
            raise self._wrong(name, "a list of strings", items)
        return tuple(cast("list[str]", items))

    def integers(self, name: str, *, low: int = 0, high: int) -> tuple[int, ...]:
        """Return a whole number or a list of them, each in [low, high]; an empty tuple if it is absent or null."""
        value = self.values.get(name)
        if value is None:
            return ()
        items = cast("list[object]", value) if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self._wrong(name, "a whole number or a list of them", items)
            if not low <= item <= high:
                raise self._wrong(name, f"in [{low}, {high}]", item)
        return tuple(cast("list[int]", items))

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is None:
            raise ValueError(f"{self.source}: {self.names.get(name, name)} is missing")
        return default

    def _wrong(self, name: str, rule: str, value: object) -> ValueError:
        return ValueError(f"{self.source}: {self.names.get(name, name)} must be {rule}, got {shown(value)}")


def check_same(source: str, said: Sequence[tuple[str, object]]) -> None:
    """Check that fields for one property agree, given as pairs of name and value; None is ignored.

    Raises:
        ValueError: two of them differ.
    """
    known = [(name, value) for name, value in said if value is not None]
    for name, value in known[1:]:
        if value != known[0][1]:
            raise contradiction(source, known[0], (name, value))


def contradiction(source: str, one: tuple[str, object], other: tuple[str, object]) -> ValueError:
    """Return the error of two fields, each with its value, that differ about one number."""
    return ValueError(f"{source}: {one[0]} and {other[0]} must say the same, got {shown(one[1])} and {shown(other[1])}")


def shown(value: object) -> str:
    """Return a value as an error shows it: the beginning of a long one."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
