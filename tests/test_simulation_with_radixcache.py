"""The simulator gives each request the same record over the radix cache as over its own cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagewood.radixcache import RadixCache
from pagewood.schedpolicy.simulation import H100_8B, Fleet, OverTokens, generate, policies_named, simulate
from pagewood.schedpolicy.simulation.cache import BlockCache, PrefixCache
from pagewood.schedpolicy.simulation.metrics import Observations

FLEET = Fleet(machine=H100_8B, num_pages=14_304, page_size=64)


def radix_cache() -> PrefixCache:
    def array(numbers: Sequence[int]) -> NDArray[np.int32]:
        return np.array(numbers, np.int32)

    return OverTokens(RadixCache(page_size=1), array=array)


def run(fleet: Fleet, *, over_radix: bool) -> Observations:
    trace = generate("multi-turn", num_requests=400, rate=20, seed=0)
    (observed,) = simulate(
        trace,
        fleet,
        make_policies=lambda _: policies_named("lpm", page_size=64),
        make_cache=radix_cache if over_radix else BlockCache,
    )
    return observed


def test_every_request_has_the_same_record() -> None:
    assert run(FLEET, over_radix=True).records == run(FLEET, over_radix=False).records


def test_hits_are_similar_when_both_evict() -> None:
    tight = replace(FLEET, num_pages=700)
    over_radix, own = run(tight, over_radix=True), run(tight, over_radix=False)
    hits = [sum(record.num_hit for record in observed.records) for observed in (over_radix, own)]
    assert len(over_radix.records) == len(own.records) == 400
    assert 0.9 < hits[0] / hits[1] < 1.1
