"""The scenarios of `test_scenarios` with adapters: few slots, several names, other contents under a name while it runs.

The KV of the echo model depends on the contents of the adapter that is in the request's slot when a step is computed.
Some adapters compute from invocation tokens on only, and positions before have the KV of the model. So a token that was
computed with another adapter, another version of it or without it differs, and so does one that read such KV from the
cache.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.core import adapter, cache_keys
from pagewood.engine.core.memory import adapters, kv
from pagewood.engine.core.steps import batch_builder
from scale import scaled
from scenarios.drawing import random_scenario, with_adapters
from scenarios.extending import extended
from scenarios.faulty import random_faults
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_found, by_turns

KINDS = ("drafts", "grammars", "holds", "interruptions", "limits", "urgency", "vectors", "windows")


def drawn(rng: random.Random, *, overlap: bool, kind: str | None, has_faults: bool = False) -> Scenario:
    scenario = extended(random_scenario(rng, overlap=overlap), rng, kind)
    if has_faults:
        # An interrupted step may take commands a step later, and so give a request another version than expected.
        faults = {launch: fault for launch, fault in random_faults(rng).items() if "INTERRUPTED" not in fault.name}
        scenario = replace(scenario, faults=faults)
    return replace(with_adapters(scenario, rng), is_encoded=rng.random() < 0.3)


@settings(max_examples=scaled(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32), st.booleans(), st.sampled_from([None, *KINDS]), st.booleans()
)  # fmt: skip
def test_every_token_is_that_of_the_oracle(seed: int, overlap: bool, kind: str | None, has_faults: bool) -> None:
    run_scenario(drawn(random.Random(seed), overlap=overlap, kind=kind, has_faults=has_faults))


FAULTS: dict[str, list[Edit]] = {
    "a stale prefix after a reload": [
        (cache_keys.CacheKeys, "of", "None if adapter is None else adapter.version", "None"),
    ],
    "prefixes of other adapters": [
        (cache_keys.CacheKeys, "of", "None if adapter is None else adapter.name", "None"),
        (cache_keys.CacheKeys, "of", "None if adapter is None else adapter.version", "None"),
    ],
    "a slot is reused in flight": [
        (adapters.AdapterPool, "_is_free", " and adapter.number not in self._num_users", ""),
    ],
    "a slot is given back too early": [
        (kv.KVSpace, "admit", "adapters.hold(request)", "adapters.hold(request); self.adapters.drop(request)"),
        (kv.KVSpace, "release", "self.adapters.drop(request)", "pass"),
    ],
    "the adapter of the neighbour": [
        (
            batch_builder.BatchBuilder, "build", "self._adapters.place_of(one) for one in admitted",
            "self._adapters.place_of(one) for one in admitted[::-1]",
        ),
    ],
    "prefixes of the model for activated adapters": [
        (adapter.Activation, "marked", "if begin >= end", "if True"),
    ],
    "prefixes of activated adapters for others of them": [
        (adapter.Adapter, "activation_in", "_marks_of(self.version)", "_marks_of('')"),
    ],
    "an adapter computes before its activation": [
        (adapters.AdapterPool, "place_of", "request.activation.start", "request.activation.start // 2"),
    ],
    "an adapter computes only behind its invocation": [
        (adapters.AdapterPool, "place_of", "request.activation.start", "request.activation.start + 1"),
    ],
    "the first occurrence activates": [
        (adapter.Adapter, "activation_in", "places[-1]", "places[0]"),
    ],
    "running requests get the new version": [
        (
            adapters.AdapterPool, "place_of", "adapter = request.adapter",
            "adapter = request.adapter and self.current(request.adapter.name) or request.adapter; self.hold",
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("fault", by_turns(FAULTS))
def test_a_seeded_fault_is_found(fault: str) -> None:
    def run(seed: int) -> None:
        run_scenario(drawn(random.Random(seed), overlap=seed % 2 == 0, kind=None))

    assert_found(FAULTS[fault], run, range(300))
