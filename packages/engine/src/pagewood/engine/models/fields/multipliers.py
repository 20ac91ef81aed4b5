"""The fields of numbers that multiply embeddings, logits and what layers add, or that bound logits."""

from __future__ import annotations

from pagewood.engine.json_fields import Fields
from pagewood.engine.models.parts.output import OutputConfig

_LARGEST = 1e6


def read_multiplier(fields: Fields, name: str, default: float = 1.0) -> float:
    """Return a multiplier; `default` if it is absent, as it is where `check_fields` does not allow it.

    Raises:
        ValueError: it is not a number from 1e-6 to 1e6.
    """
    return fields.number(name, default, low=1 / _LARGEST, high=_LARGEST)


def read_multipliers(fields: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return a list of multipliers, each 1 if it is absent or null.

    Raises:
        ValueError: it is not a list of `count` numbers from 1e-6 to 1e6.
    """
    if fields.values.get(name) is None:
        return (1.0,) * count
    return fields.numbers(name, count, low=1 / _LARGEST, high=_LARGEST)


def read_cap(fields: Fields, name: str) -> float | None:
    """Return a soft cap, or None if the field is absent, null or 0.

    Raises:
        ValueError: it is not a number from 0 to 1e6.
    """
    cap = fields.number(name, 0.0, low=0, high=_LARGEST)
    return cap or None


def read_output(fields: Fields) -> OutputConfig:
    """Return what the output projection does with logits.

    Raises:
        ValueError: a field is not a number, or out of its range.
    """
    multiplier = read_multiplier(fields, "logit_scale") / read_multiplier(fields, "logits_scaling")
    return OutputConfig(multiplier=multiplier, soft_cap=read_cap(fields, "final_logit_softcapping"))
