"""The largest sizes in a configuration. Sizes from a file are checked before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagewood.engine.json_fields import Fields

MAX_POSITION = 1 << 28
"""The longest sequence that a configuration may ask for."""
LARGEST: Mapping[str, int] = MappingProxyType(
    {
        "vocab_size": 1 << 24,
        "hidden_size": 1 << 20,
        "intermediate_size": 1 << 22,
        "num_layers": 1 << 12,
        "num_experts": 1 << 12,
        "num_heads": 1 << 14,
        "num_kv_heads": 1 << 14,
        "head_dim": 512,
        "max_position": MAX_POSITION,
    }
)
"""Far above the sizes of real models, but small enough to be handled."""


def check_size(name: str, value: int) -> None:
    """Check a size.

    Raises:
        ValueError: it is not in [1, LARGEST[name]].
    """
    if not 1 <= value <= LARGEST[name]:
        raise ValueError(f"{name} must be in [1, {LARGEST[name]}], got {value}")


def read_size(fields: Fields, field: str, name: str, default: int | None = None) -> int:
    """Return a whole number from 1 to LARGEST[name].

    Raises:
        ValueError: it is out of its range, or absent without a default.
    """
    return fields.integer(field, default, low=1, high=LARGEST[name])
