"""Fields of ropes."""

from __future__ import annotations

from typing import Any


def rope(kind: str, **extra: Any) -> dict[str, Any]:
    """Return the fields of a rope that all layers share."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **extra}}
