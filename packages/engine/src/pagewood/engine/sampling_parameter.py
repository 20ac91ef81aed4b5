"""What a number among the sampling parameters may be and where it is read, declared beside its field. Imports nothing.

A field of `api.SamplingParams` that is a number is declared as `Annotated[float, Parameter(...)]`. From that come its
check, its column of `core.messages.sampling_table.SamplingArrays`, its default in a model's folder and its range over
HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import get_args, get_type_hints


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number that says how tokens are chosen. Its kind and the value that changes nothing are those of its field."""

    low: float
    high: float
    excludes_low: bool = False
    """Whether `low` itself is out of the range."""
    off: float | None = None
    """The value for which drawing a token skips the parameter; None: logits are changed by it, before a token is drawn.

    Numbers with such a value are columns of `core.messages.sampling_table.SamplingArrays`.
    """
    is_recommended: bool = False
    """Whether `generation_config.json` has it."""

    @property
    def on(self) -> float:
        """A value in the range for which drawing a token does not skip the parameter."""
        return (self.low + self.high) / 2 if self.off == self.high else self.high

    def check(self, name: str, value: float) -> None:
        """Check a value of the field `name`.

        Raises:
            ValueError: it is out of the range.
        """
        is_above = self.low < value if self.excludes_low else self.low <= value
        if not (is_above and value <= self.high):  # true of NaN
            bracket = "(" if self.excludes_low else "["
            raise ValueError(f"{name} must be in {bracket}{self.low}, {self.high}], got {value}")


def parameters_of(owner: type) -> Mapping[str, Parameter]:
    """Return the declarations beside the fields of a dataclass, by name and in their order."""
    hints = get_type_hints(owner, include_extras=True)
    found = {field.name: get_args(hints[field.name]) for field in fields(owner)}
    return MappingProxyType(
        {name: one for name, arguments in found.items() for one in arguments if isinstance(one, Parameter)}
    )
