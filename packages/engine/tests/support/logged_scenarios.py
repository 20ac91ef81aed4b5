"""Random scenarios whose decisions are logged."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from scenarios.drawing import (
    random_scenario,
    with_adapters,
    with_drafts,
    with_grammars,
    with_holds,
    with_interruptions,
    with_limits,
    with_logprobs,
    with_pooling,
    with_updates,
)
from scenarios.faulty import random_faults
from scenarios.scenario import Scenario

MIXES: dict[str, Callable[[Scenario, random.Random], Scenario]] = {
    "plain": lambda scenario, _: scenario,
    "drafts": with_drafts,
    "interruptions": with_interruptions,
    "grammars": with_grammars,
    "adapters": lambda scenario, rng: with_adapters(with_grammars(scenario, rng), rng),
    "updates": lambda scenario, rng: with_updates(with_drafts(with_interruptions(scenario, rng), rng), rng),
    "holds and limits": lambda scenario, rng: with_holds(with_limits(scenario, rng), rng),
    "faults": lambda scenario, rng: replace(scenario, faults=random_faults(rng)),
    "all": lambda scenario, rng: with_drafts(with_grammars(with_interruptions(scenario, rng), rng), rng),
    "reports": lambda scenario, rng: with_pooling(with_logprobs(with_drafts(scenario, rng), rng), rng),
}


def scenario_of(seed: int, mix: str, path: Path, *, bursts: float = 0.3, **options: Any) -> Scenario:
    """Return a scenario of a mix whose log is at `path`; `options` are fields of its configuration."""
    rng = random.Random(seed)
    scenario = MIXES[mix](random_scenario(rng, overlap=seed % 2 > 0, bursts=bursts), rng)
    return replace(scenario, config=replace(scenario.config, decision_log=str(path), **options))
