"""The scenarios of `test_scenarios` with weights that change while requests wait, run and are paused.

KV and tokens of the echo model depend on the weights with which they are computed, and every answer says its version.
So a token of the wrong version differs, and so does one that has read KV of other weights from the cache. While memory
sleeps, all KV is lost.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.core import loop, rest, retire
from pagewood.engine.core.memory import kv
from pagewood.engine.core.queue import renewal
from scale import scaled
from scenarios.drawing import random_scenario, with_updates
from scenarios.extending import extended
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_found, slow_ones

KINDS = ("drafts", "holds", "limits", "urgency")


def drawn(rng: random.Random, *, overlap: bool, kind: str | None) -> Scenario:
    scenario = extended(random_scenario(rng, overlap=overlap), rng, kind)
    # Held answers would come behind the end of an update.
    config = replace(scenario.config, stream_interval=1)
    return with_updates(replace(scenario, faults={}, config=config), rng)


@settings(max_examples=scaled(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([None, *KINDS]))
def test_every_token_is_that_of_its_weights(seed: int, overlap: bool, kind: str | None) -> None:
    run_scenario(drawn(random.Random(seed), overlap=overlap, kind=kind))


FAULTS: dict[str, list[Edit]] = {
    "a stale prefix after an update": [
        (rest.Rest, "exchange", "weights=weights.digest", "weights=None"),
        (renewal, "renew", "kv.flush()", "pass"),
    ],
    "what waits keeps its key": [
        (renewal, "renew", "request.key = key", "pass"),
        (renewal, "renew", "kv.flush()", "pass"),
    ],
    "KV of two versions is published": [
        (kv.KVSpace, "publish", "if request.renewed_key is not None:", "if False:"),
        (kv.KVSpace, "release", "has_one_key = request.renewed_key is None", "has_one_key = True"),
        (renewal, "renew", "request.renewed_key = key", "request.key = key"),
    ],
    "spans are off by one step": [
        (retire, "retire", "weights=state.weight_version", "weights=getattr(kv, '_late', '')"),
        (retire, "retire", "kv.pass_windows", "kv.__class__._late = state.weight_version; kv.pass_windows"),
    ],
    "an update while a step is in flight": [
        (loop.Engine, "_exchange_weights", "self._finish(last)", "self._late = last"),
    ],
    "memory sleeps under cached prefixes": [
        (rest.Rest, "_fall_asleep", "or not self._kv.empty()", ""),
    ],
    "memory sleeps under a request": [
        (rest.Rest, "_fall_asleep", "self._state.holders or ", ""),
        (rest.Rest, "_fall_asleep", "not self._kv.empty()", "False"),
    ],
    "nothing is computed again": [
        (renewal, "renew", "if recomputes:", "if False:"),
    ],
}


QUICK = (
    "memory sleeps under cached prefixes",
    "a stale prefix after an update",
    "an update while a step is in flight",
)


@pytest.mark.parametrize("fault", slow_ones(FAULTS, *(FAULTS.keys() - set(QUICK))))
def test_a_seeded_fault_is_found(fault: str) -> None:
    def run(seed: int) -> None:
        scenario = drawn(random.Random(seed), overlap=seed % 2 == 0, kind=None)
        run_scenario(scenario if "sleeps" in fault else replace(scenario, naps=()))

    assert_found(FAULTS[fault], run, range(200))
