"""An adapter that requests may name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Adapter:
    """An adapter as it was loaded once. A request keeps the one that it had at its arrival, to its end."""

    name: str
    version: str
    """Distinguishes its results from those of other adapters of that name: a digest of its contents."""
    number: int
    """Unique among all that the engine has loaded; the runner knows it by this."""
    weights: object
    """What the runner computes with; the engine only keeps it alive."""
