"""What a scenario can be extended by, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from scenarios import drawing
from scenarios.faulty import random_faults
from scenarios.scenario import Scenario


def with_faults(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return a scenario whose runner fails."""
    return replace(scenario, faults=random_faults(rng))


EXTENSIONS: dict[str, Callable[[Scenario, random.Random], Scenario]] = {
    "adapters": drawing.with_adapters,
    "drafts": drawing.with_drafts,
    "faults": with_faults,
    "grammars": drawing.with_grammars,
    "holds": drawing.with_holds,
    "interruptions": drawing.with_interruptions,
    "limits": drawing.with_limits,
    "log probabilities": drawing.with_logprobs,
    "states": drawing.with_states,
    "urgency": drawing.with_urgency,
    "vectors": drawing.with_pooling,
    "windows": drawing.with_windows,
}


def extended(scenario: Scenario, rng: random.Random, *names: str | None) -> Scenario:
    """Return a scenario with extensions, in this order; None: nothing."""
    for name in names:
        scenario = scenario if name is None else EXTENSIONS[name](scenario, rng)
    return scenario
