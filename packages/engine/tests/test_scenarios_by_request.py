"""Random traffic over pages and states that ranks divide by request: one of another rank changes the tokens."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import thread_ranks
from pagewood.engine import assemble
from pagewood.engine.core.loop import Engine, RunnerLostError
from pagewood.engine.core.memory import divided_kv
from pagewood.engine.core.memory.divided_kv import DividedKV
from pagewood.engine.core.memory.states import StatePlaces
from pagewood.engine.runner.ranks import following
from scale import scaled
from scenarios.drawing import random_scenario, with_pools
from scenarios.extending import extended
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_found, seed_fault

KINDS: tuple[tuple[str, ...], ...] = (
    (), ("drafts",), ("grammars",), ("grammars", "drafts"), ("log probabilities",), ("vectors", "drafts"),
    ("holds", "grammars"), ("limits",), ("urgency",),
)  # fmt: skip


def drawn(rng: random.Random, *, overlap: bool, has_faults: bool = False) -> Scenario:
    scenario = extended(random_scenario(rng, overlap=overlap), rng, *rng.choice(KINDS))
    scenario = with_pools(extended(scenario, rng, "faults" if has_faults else None), rng)
    return replace(extended(scenario, rng, rng.choice(("states", None))), is_encoded=rng.random() < 0.3)


@settings(max_examples=scaled(15), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), has_faults=st.booleans())
def test_the_output_is_that_of_the_sequential_oracle(rng: random.Random, overlap: bool, has_faults: bool) -> None:
    run_scenario(drawn(rng, overlap=overlap, has_faults=has_faults))


@settings(max_examples=scaled(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_the_output_of_ranks_is_that_of_the_sequential_oracle(rng: random.Random, overlap: bool) -> None:
    scenario = extended(with_pools(random_scenario(rng, overlap=overlap), rng), rng, rng.choice(("states", None)))
    run_scenario(replace(scenario, num_ranks=scenario.num_pools))


def test_scenarios_use_all_ranks_and_everything_happens() -> None:
    num_preempted = num_cached = num_moved = 0
    for seed in range(30):
        rng = random.Random(seed)
        ranks: dict[str, set[int]] = {}

        def note(engine: Engine, ranks: dict[str, set[int]] = ranks) -> None:
            for request in engine._state.holders:  # pyright: ignore[reportPrivateUsage]
                ranks.setdefault(request.request_id, set()).add(request.kv_rank)

        scenario = with_pools(random_scenario(rng, overlap=seed % 2 > 0), rng)
        report = run_scenario(extended(scenario, rng, "states" if seed % 4 > 1 else None), after_step=note)
        num_preempted += report.num_preempted
        num_cached += report.num_cached_tokens > 0
        num_moved += any(len(of_one) > 1 for of_one in ranks.values())
    assert num_preempted > 5
    assert num_cached > 5
    assert num_moved > 0, "no preempted request has come back on another rank"


FAULTS: dict[str, list[Edit]] = {
    "page of another rank": [(DividedKV, "grow", "self._of(request)", "self.spaces[0]")],
    "admitted on another rank": [(DividedKV, "place", "return self.spaces[rank]", "return self.spaces[rank - 1]")],
    "moved while it runs": [(DividedKV, "publish", "self._of(request).publish", "self.place(request).publish")],
    "page given back elsewhere": [(DividedKV, "release", "self._of(request)", "self.spaces[-1]")],
    "ids of the first rank": [(divided_kv.PageRange, "alloc", "pages += self._first", "pass")],
    "state place of another rank": [
        (StatePlaces, "begin", "_Held(own=own,", "_Held(own=own - (own == self._places.start > 0),")
    ],
    "snapshot of another rank": [
        (DividedKV, "states_of", ".states_of(grant)", ".states.of_grant(grant, self.spaces[0].snapshots)")
    ],
    "state of an aborted request lost": [
        (StatePlaces, "end", "[held.own, *(", "[*[held.own] * (request.finish is not FinishReason.ABORT), *(")
    ],
    "places of all ranks on each": [(assemble, "_space", "info.num_states // info.num_pools", "info.num_states")],
}


_SKIP = """if len(batch.page_ids) and batch.page_ids.max() < {}:
                    continue
                latest = runner.launch(batch)"""


def test_an_idle_rank_that_skips_a_step_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 skips steps whose new pages are all of rank 0."""
    monkeypatch.setattr(thread_ranks, "_HEARTBEAT_S", 8.0)  # of the one that waits for the step that was skipped
    for seed in range(100):
        rng = random.Random(seed)
        scenario = with_pools(random_scenario(rng, overlap=seed % 3 > 0), rng)
        skip = _SKIP.format(scenario.num_pages // scenario.num_pools)
        with monkeypatch.context() as patch, suppress(RunnerLostError):
            seed_fault([(following, "_follow", "latest = runner.launch(batch)", skip)], patch)
            run_scenario(replace(scenario, num_ranks=2))
            continue
        return
    pytest.fail("the fault was not found")


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str) -> None:
    assert_found(FAULTS[name], lambda seed: run_scenario(drawn(random.Random(seed), overlap=seed % 2 > 0)), range(200))
