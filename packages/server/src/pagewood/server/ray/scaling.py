"""How many engines there should be, from the requests that wait and run and from the KV memory that they hold."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

WAITING, RUNNING, PLACES, KV_USE = "pagewood_waiting", "pagewood_running", "pagewood_places", "pagewood_kv_use"
"""What an engine says of itself, and in WAITING of the requests that wait for any engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkPolicy:
    """An autoscaling policy of Ray Serve, which adds delays and bounds to what it returns.

    Without engines, Ray Serve starts one as soon as a call waits for it; so this decides from the first one on.
    """

    target_load: float
    """Share of the places that requests should have."""
    target_kv_use: float
    """Share of the KV memory that requests should hold."""

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return how many engines the work needs, and no state; `context` is Ray Serve's `AutoscalingContext`."""
        found: dict[str, dict[object, float]] = context.aggregated_metrics or {}
        running, places, kv_use = (found.get(name, {}).values() for name in (RUNNING, PLACES, KV_USE))
        if not places:
            return context.current_num_replicas, {}
        num_requests = sum(running) + max(found.get(WAITING, {}).values(), default=0.0)
        by_load = num_requests / (self.target_load * max(places))
        by_memory = sum(kv_use) / self.target_kv_use
        return ceil(round(max(by_load, by_memory), 6)), {}
