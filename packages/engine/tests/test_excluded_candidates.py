"""Requests that the reserve excludes at one moment are declined as if they had been tried: all else is the same.

Each random scenario runs twice, and in the second run nothing is excluded in advance. Compared are, after every step:
which requests run, how far and in which pages; which wait, and what was found of them; the free pages; and what is
cached, with its order of eviction.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.steps.admission import Admission
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import StepReserve
from pagewood.schedpolicy.memory import reserve
from scale import scaled
from scenarios.drawing import random_scenario, with_drafts, with_holds, with_interruptions, with_limits
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import seed_fault

MIXES: dict[str, Callable[[Scenario, random.Random], Scenario]] = {
    "plain": lambda scenario, _: scenario,
    "drafts": with_drafts,
    "holds": with_holds,
    "interruptions": with_interruptions,
    "limits": with_limits,
}


def states(seed: int, mix: str) -> list[Any]:
    """Run a scenario; return what it has come to after each step."""
    found: list[Any] = []

    def note(engine: Engine) -> None:
        state, kv = engine._state, engine._kv  # pyright: ignore[reportPrivateUsage]
        running = [
            (one.request_id, one.num_known, one.num_launched, one.pages[: one.num_pages].tolist())
            for one in state.running
        ]
        waiting = [(one.request_id, one.num_matched, state.waiting.is_parked(one)) for one in state.by_id.values()]
        assert isinstance(kv, KVSpace)
        cached = kv.cache.dump() if isinstance(kv.cache, RadixCache) else ""
        found.append((running, waiting, kv.num_free, kv.num_retained, cached))

    rng = random.Random(seed)
    scenario = MIXES[mix](random_scenario(rng, overlap=seed % 2 > 0, bursts=0.8), rng)
    config = replace(scenario.config, max_running=6, schedule_conservativeness=(0.3, 1.0)[seed % 3 > 0])
    run_scenario(replace(scenario, config=config), after_step=note)
    return found


def differing(seeds: range, mix: str) -> tuple[list[int], int]:
    """Return the seeds whose two runs differ, and how many requests were excluded in the first runs."""
    found: list[int] = []
    num_excluded = 0
    exceeds: Callable[..., bool] = StepReserve.exceeds

    def none(step: StepReserve, candidate: Any, *, num_available: int) -> bool:
        return False

    def counted(step: StepReserve, candidate: Any, *, num_available: int) -> bool:
        nonlocal num_excluded
        is_excluded = exceeds(step, candidate, num_available=num_available)
        num_excluded += is_excluded
        return is_excluded

    for seed in seeds:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepReserve, "exceeds", counted)
            quick = states(seed, mix)
            patch.setattr(StepReserve, "exceeds", none)
            if states(seed, mix) != quick:
                found.append(seed)
    return found, num_excluded


@pytest.mark.parametrize("is_many", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_whether_requests_are_excluded_makes_no_difference(
    mix: str, is_many: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_many:  # as columns, however few run
        monkeypatch.setattr(reserve, "_NUM_MANY", 1)
    seeds, num_excluded = differing(range(scaled(10)), mix)
    assert not seeds
    assert num_excluded > 20


FAULTS = {
    "prefix not touched": ("plain", "_give_memory", "if request.num_matched:", "if False:"),
    "retained pages forgotten": ("holds", "__init__", "and not kv.num_retained", ""),
    "own pages counted twice": (
        "plain", "_give_memory", "num_available - num_wanted", "num_available - 2 * num_wanted"
    ),
}  # fmt: skip
"""The scenarios that notice it, a method of `Admission`, a piece of it, and what takes its place."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_make_a_difference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mix, method, old, new = FAULTS[name]
    seed_fault([(Admission, method, old, new)], monkeypatch)
    assert differing(range(60), mix)[0]
