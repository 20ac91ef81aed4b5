"""The scenarios of `test_scenarios` with a model whose layers have states, in few or many places.

The echo model's state is a hash of all KV in its order, so that a state of another position, or of another text,
changes the tokens. With drafts it writes copies of drafted positions too, before it knows which drafts stay.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.core.memory import kv, states
from pagewood.engine.core.steps import batch_builder
from pagewood.engine.testing import echo
from scale import scaled
from scenarios.drawing import random_scenario, with_states
from scenarios.extending import extended
from scenarios.running import Report, run_scenario
from seeded_faults import Edit, assert_found, by_turns

KINDS = (
    "adapters", "grammars", "holds", "interruptions", "limits", "log probabilities", "urgency", "vectors"
)  # fmt: skip


def run(
    rng: random.Random, *, overlap: bool, kind: str | None, has_faults: bool = False, has_drafts: bool = False
) -> Report:
    scenario = random_scenario(rng, overlap=overlap)
    scenario = extended(scenario, rng, "drafts" if has_drafts else None, kind, "faults" if has_faults else None)
    return run_scenario(replace(with_states(scenario, rng), is_encoded=rng.random() < 0.3))


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False),
    overlap=st.booleans(),
    kind=st.sampled_from((None, *KINDS)),
    has_faults=st.booleans(),
    has_drafts=st.booleans(),
)
def test_tokens_are_those_of_the_oracle(
    rng: random.Random, overlap: bool, kind: str | None, has_faults: bool, has_drafts: bool
) -> None:
    run(rng, overlap=overlap, kind=kind, has_faults=has_faults, has_drafts=has_drafts)


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_requests_hit_and_are_preempted(overlap: bool, has_drafts: bool) -> None:
    reports = [run(random.Random(seed), overlap=overlap, kind=None, has_drafts=has_drafts) for seed in range(15)]
    assert sum(report.num_cached_tokens for report in reports) > 0
    assert sum(report.num_preempted for report in reports) > 0
    assert sum(report.num_drafted - report.num_accepted for report in reports) >= 100 * has_drafts
    assert sum(report.num_accepted for report in reports) >= 100 * has_drafts


def test_a_request_that_needs_all_pages_ends() -> None:
    """Beside pages that it has computed again, because the cache has lost the state behind them."""
    for seed in (*range(scaled(4)), 55, 72, 97, 127):  # the last ones once made no progress
        rng = random.Random(seed)
        scenario = with_states(random_scenario(rng, overlap=seed % 2 > 0), rng)
        chosen = [rng.choice(scenario.arrivals) for _ in range(12)]
        arrivals = tuple(
            replace(one, at_step=15 * number, prompt=one.prompt[: rng.randint(1, 99)], abort_at_step=None,
                    priority_from_step=None)
            for number, one in enumerate(chosen)
        )  # fmt: skip
        num_pages = -(-scenario.max_length // scenario.config.page_size)
        config = replace(scenario.config, prefix_cache=True)
        run_scenario(replace(scenario, arrivals=arrivals, num_pages=num_pages, config=config))


FAULTS: dict[str, list[Edit]] = {
    "copy of the position before": [
        (states.StatePlaces, "of_grant", " copies.append((length,", " copies.append((length - 1,")
    ],
    "copy of a position that a step in flight has": [
        (
            states.StatePlaces,
            "_lengths",
            "first = end - max(1, grant.num_promised)",
            "first = grant.request.num_computed",
        )
    ],
    "copy that is asked for once": [(states.StatePlaces, "of_grant", "num_computed < copy[0] <= end", "False")],
    "drafts stay in the state": [(echo.EchoRunner, "_compute", "states[max(len(yielded[-1]), 1) - 1]", "states[-1]")],
    "a draft too many stays in the state": [
        (echo.EchoRunner, "_compute", "max(len(yielded[-1]), 1) - 1", "min(len(yielded[-1]), count - 1)")
    ],
    "copy under a longer prefix": [
        (states.StatePlaces, "offer", "request.cached_ids(0, length)", "request.cached_ids(0, end)")
    ],
    "copies of steps that were left out": [(states.StatePlaces, "offer", "copy[0] <= end", "True")],
    "a hit begins with zeros": [(states.StatePlaces, "begin", "source = found", "source = ZEROS")],
    "a hit goes on in the place of the cache": [
        (
            states.StatePlaces,
            "begin",
            "self._held[request] = _Held(own=own,",
            "self._held[request] = _Held(own=max(own if source < 0 else source, 0),",
        )
    ],
    "a hit needs no snapshot": [(kv.KVSpace, "_match", "needs_snapshot=True", "needs_snapshot=False")],
    "a place given back twice": [
        (states.StatePlaces, "offer", "if not cache.attach(node, place):", "if cache.attach(node, place) or True:")
    ],
    "places of ended requests lost": [(states.StatePlaces, "end", "[held.own, *", "[*")],
    "a step reads where the one before began": [
        (states.StatePlaces, "of_grant", "(held.source, held.own), held.own", "(held.source, held.own), held.source")
    ],
    "a step of decodes without states": [(batch_builder.BatchBuilder, "build", "(grants, extras,", "(grants, {},")],
}


@pytest.mark.parametrize("fault", by_turns(FAULTS, "copy that is asked for once"))
def test_seeded_faults_are_found(fault: str) -> None:
    def one(seed: int) -> None:
        run(random.Random(seed), overlap=seed % 3 > 0, kind=None, has_drafts=seed % 2 > 0)

    assert_found(FAULTS[fault], one, range(300))
