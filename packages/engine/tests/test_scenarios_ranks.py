"""Random traffic over several ranks of the echo model: the loop, the messages and the comparison of every step."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thread_ranks
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.runner.ranks import following
from scale import scaled
from scenarios.drawing import random_scenario
from scenarios.extending import extended
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, seed_fault

KINDS: tuple[tuple[str, ...], ...] = (
    (), ("drafts",), ("grammars",), ("log probabilities",), ("vectors", "drafts"), ("interruptions",),
    ("holds", "grammars"), ("windows",), ("states",), ("states", "drafts"),
)  # fmt: skip


def scenario_of_ranks(rng: random.Random, *, overlap: bool) -> Scenario:
    scenario = extended(random_scenario(rng, overlap=overlap), rng, *rng.choice(KINDS))
    return replace(scenario, num_ranks=rng.choice((2, 2, 3)))


@settings(max_examples=scaled(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_the_output_of_ranks_is_that_of_the_sequential_oracle(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_of_ranks(rng, overlap=overlap))


_SKIP = """number += 1
                if number == 4:
                    continue"""
_OLD_PAGES = """assert isinstance(batch, Batch)
                batch = replace(batch, page_ids=batch.page_ids * 0)"""
_OTHER_SEED = """assert isinstance(batch, Batch)
                batch.sampling.words[:, 0] += 1"""
FAULTS: dict[str, Edit] = {
    "a rank skips a step": (following, "_follow", "number += 1", _SKIP),
    "a rank holds old page tables": (following, "_follow", "assert isinstance(batch, Batch)", _OLD_PAGES),
    "a rank draws with another seed": (following, "_follow", "assert isinstance(batch, Batch)", _OTHER_SEED),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_rank_that_differs_ends_its_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread_ranks, "_HEARTBEAT_S", 8.0)  # of the one that waits for the step that was skipped
    monkeypatch.setattr(following, "replace", replace, raising=False)  # for the code of the faults
    seed_fault([FAULTS[name]], monkeypatch)
    for seed in range(100):
        rng = random.Random(seed)
        scenario = replace(random_scenario(rng, overlap=seed % 3 > 0), num_ranks=2)
        with suppress(RunnerLostError):
            run_scenario(scenario)
            continue
        return
    pytest.fail("the fault was not found")
