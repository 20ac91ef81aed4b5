"""Random traffic over a model that is cut into stages: as many steps in flight, against the sequential oracle."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.core import loop
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.steps import plan, stage_turns
from scale import scaled
from scenarios.drawing import random_scenario, with_stages
from scenarios.extending import extended
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_found

KINDS: tuple[tuple[str, ...], ...] = (
    (), (), (), ("drafts",), ("grammars",), ("log probabilities",), ("vectors", "drafts"), ("interruptions",),
    ("holds", "grammars"), ("windows",), ("faults",), ("urgency",), ("grammars", "drafts"), ("states",),
    ("states", "drafts"),
)  # fmt: skip


def scenario_of_stages(rng: random.Random) -> Scenario:
    kinds = rng.choice(KINDS)
    scenario = with_stages(random_scenario(rng, overlap=rng.random() < 0.3, bursts=0.6), rng)
    scenario = extended(scenario, rng, *kinds)
    if rng.random() < 0.3 and not scenario.faults and not (scenario.max_drafts and "grammars" in kinds):
        return replace(scenario, num_ranks=rng.choice((2, 3)))
    return scenario


@settings(max_examples=scaled(7), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False))
def test_the_output_of_stages_is_that_of_the_sequential_oracle(rng: random.Random) -> None:
    run_scenario(scenario_of_stages(rng), after_step=check_turns)


def check_turns(engine: Engine) -> None:
    """No request has two steps in flight of which one but the last yields tokens; there are no more than may be."""
    stages = engine._stages  # pyright: ignore[reportPrivateUsage]
    assert stages is not None
    assert len(stages.in_flight) < stages.turns.most_in_flight
    promised: set[str] = set()
    for pending in stages.in_flight:
        for grant in pending.grants:
            assert grant.request.request_id not in promised, "a request was launched before its token was known"
            if grant.num_promised:
                promised.add(grant.request.request_id)


def test_scenarios_of_stages_exercise_what_they_claim() -> None:
    depths: list[int] = []
    num_flowing = 0

    def count(engine: Engine) -> None:
        nonlocal num_flowing
        stages = engine._stages  # pyright: ignore[reportPrivateUsage]
        assert stages is not None
        depths.append(len(stages.in_flight) - stages.turns.most_in_flight)
        requests = [grant.request.request_id for pending in stages.in_flight for grant in pending.grants]
        num_flowing += len(requests) - len(set(requests))

    reports = [run_scenario(scenario_of_stages(random.Random(seed)), after_step=count) for seed in range(16)]
    assert sum(report.num_preempted for report in reports) > 1
    assert sum(report.num_cached_tokens for report in reports) > 80
    assert sum(report.num_aborted for report in reports) > 3
    assert depths.count(-1) > 200  # one more is launched in the next pass, and all stages are busy
    assert num_flowing > 8  # chunks of a prompt behind each other


FAULTS: dict[str, Edit] = {
    "a request decodes before its token is known": (
        stage_turns.StageTurns, "sitting_out", "if request.num_unseen:", "if False:"
    ),
    "the newest step is retired first": (loop.Engine, "_finish_oldest", "popleft()", "pop()"),
    "a step too many is in flight": (
        loop.Engine, "step_staged", "== stages.turns.most_in_flight", "> stages.turns.most_in_flight"
    ),
    "requests that sit out are planned": (plan.Planner, "plan", "sitting_out = self._turns.sitting_out(state)",
                                          "sitting_out = frozenset()"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_the_loop_are_noticed(name: str) -> None:
    assert_found(
        [FAULTS[name]],
        lambda seed: run_scenario(
            replace(scenario_of_stages(random.Random(seed)), num_ranks=1), after_step=check_turns
        ),
        range(100),
    )
