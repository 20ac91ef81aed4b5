"""`keep_alive`: how long a model stays loaded after a request."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BeforeValidator

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)"
_NUMBER = re.compile(r"[+-]?\d{1,12}(\.\d{1,12})?")
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)", re.ASCII)
_LONGEST = 64


def seconds(value: Any) -> float | None:
    """Return the seconds of a number or of a duration such as `1h30m`; a negative one means for ever.

    Raises:
        ValueError: it is neither.
    """
    if value is None:
        return None
    found = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and len(value) <= _LONGEST:
        if _NUMBER.fullmatch(value):
            found = float(value)
        elif (match := _DURATION.fullmatch(value)) is not None:
            found = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, match[2]))
            found = -found if match[1] == "-" else found
    if found is None or math.isnan(found):
        raise ValueError("expected seconds, or a duration such as '10m' or '1h30m'; negative: for ever")
    return math.inf if found < 0 else found


KeepAlive = Annotated[float | None, BeforeValidator(seconds, float | str | None)]
"""Seconds; infinity: for ever; None: nothing is asked."""
