"""Sampling parameters, with defaults for fields that a request of any protocol leaves out."""

from __future__ import annotations

import dataclasses
from typing import Any

from pydantic import BaseModel, Field

from pagewood.engine.api import SAMPLING_PARAMETERS, SamplingParams

INT32_MAX = 2**31 - 1


def allowed(name: str, *, low: float | None = None) -> Any:
    """Return the range of a sampling parameter, for the annotation of a field.

    Args:
        name: of the parameter.
        low: another least value; values below the range of the engine mean the engine's least value.
    """
    parameter = SAMPLING_PARAMETERS[name]
    if parameter.excludes_low and low is None:
        return Field(gt=parameter.low, le=parameter.high)
    return Field(ge=parameter.low if low is None else low, le=parameter.high)


def chosen(defaults: SamplingParams, fields: BaseModel) -> SamplingParams:
    """Return the defaults of a model, replaced where a request has a value.

    Args:
        defaults: of the model.
        fields: of the request. Those that are named like a parameter of the engine are read; None means the default. A
            `top_p` of 0 leaves only the most likely token.
    """
    found: dict[str, Any] = {}
    for name in SAMPLING_PARAMETERS.keys() & type(fields).model_fields.keys():
        value = getattr(fields, name)
        if value is not None:
            found[name] = max(value, SAMPLING_PARAMETERS[name].low)
    if found.get("top_p") == 0:
        found |= {"top_p": 1.0, "temperature": 0.0}
    return dataclasses.replace(defaults, **found)


def neutral_values(name: str) -> tuple[float, ...]:
    """Return the neutral values of a sampling parameter; clients send -1 for some that 0 switches off."""
    neutral = getattr(SamplingParams(), name)
    return (neutral, -1) if SAMPLING_PARAMETERS[name].off == 0 else (neutral,)
