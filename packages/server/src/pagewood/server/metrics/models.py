"""The series of a server with several models that tell which are loaded."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.server.metrics.families import Families
from pagewood.server.metrics.native import PREFIX
from pagewood.server.protocols.common.models import ModelEntry

STATES = ("unloaded", "loading", "loaded")


def model_families(entries: Sequence[ModelEntry]) -> Families:
    """Return them; none for a server with one model."""
    families = Families(PREFIX)
    found = [({"model_name": one.name}, one.state, one.loads) for one in entries if one.state is not None]
    if not found:
        return families
    families.gauge(
        "model_state", "1 for the state of a model.",
        [
            ({**labels, "state": state}, float(one.value == state))
            for labels, one, _ in found
            for state in STATES
        ],
    )  # fmt: skip
    families.gauge(
        "model_memory_bytes", "What a model takes, or would take if it were loaded, by the server's account.",
        [(labels, one.memory_bytes) for labels, one, _ in found],
    )  # fmt: skip
    families.gauge(
        "model_requests_waiting", "Requests that wait until a model is loaded.",
        [(labels, one.waiting) for labels, one, _ in found],
    )  # fmt: skip
    families.counter(
        "model_loads", "Loads of a model, by their outcome.",
        [
            ({**labels, "outcome": outcome}, num)
            for labels, _, loads in found
            for outcome, num in (("loaded", loads.num_loaded), ("failed", loads.num_failed))
        ],
    )  # fmt: skip
    families.counter(
        "model_unloads", "How often a model was unloaded, by why: idle, memory or request.",
        [({**labels, "reason": reason}, num) for labels, _, loads in found for reason, num in loads.unloaded.items()],
    )  # fmt: skip
    families.counter(
        "model_load_seconds", "Time of the loads of a model that succeeded.",
        [(labels, loads.load_s) for labels, _, loads in found],
    )  # fmt: skip
    return families
