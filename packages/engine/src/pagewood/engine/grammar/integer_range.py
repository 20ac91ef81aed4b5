"""Ranges of integers of any size as regular expressions over their digits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_DIGITS = 40
"""Most digits of a bound; expressions nest to a depth of this many levels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerRange:
    """Integers between two inclusive bounds; None is no bound.

    It replaces a part of a schema that the library would compute in 64-bit floats.
    """

    low: int | None
    high: int | None
    origin: str
    """Keyword, value and place of the bound that floats cannot hold, for messages."""


def range_expression(low: int | None, high: int | None) -> str:
    """Return a regular expression for the decimal texts of integers in [low, high], without `-0` and leading zeros.

    Raises:
        ValueError: there are none.
    """
    if low is not None and high is not None and low > high:
        raise ValueError(f"low must be at most high, got {low} and {high}")
    parts: list[str] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts += [f"-{part}" for part in _natural(least, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _natural(max(low or 0, 0), high)
    return _any_of(parts)


def _natural(low: int, high: int | None) -> Iterator[str]:
    """Yield expressions for [low, high], one for each case of the number of digits; `low` is at least 0."""
    least, most = str(low), "" if high is None else str(high)
    if len(least) == len(most):
        yield _same_length(least, most)
        return
    yield _same_length(least, "9" * len(least))
    if high is None:
        yield f"[1-9][0-9]{{{len(least)},}}"
        return
    if len(most) - len(least) > 1:
        yield f"[1-9][0-9]{{{len(least)},{len(most) - 2}}}"
    yield _same_length("1" + "0" * (len(most) - 1), most)


def _same_length(low: str, high: str) -> str:
    """Return an expression for the texts between two with the same number of digits."""
    if not low:
        return ""
    if set(low) == {"0"} and set(high) == {"9"}:
        return _digits(len(low))
    first, last, rest = int(low[0]), int(high[0]), len(low) - 1
    if first == last:
        return low[0] + _same_length(low[1:], high[1:])
    parts: list[str] = []
    if low[1:] != "0" * rest:
        parts.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    is_cut = high[1:] != "9" * rest
    if first <= last - is_cut:
        parts.append(f"[{first}-{last - is_cut}]{_digits(rest)}")
    if is_cut:
        parts.append(high[0] + _same_length("0" * rest, high[1:]))
    return _any_of(parts)


def _digits(number: int) -> str:
    return f"[0-9]{{{number}}}" if number else ""


def _any_of(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({'|'.join(parts)})"
