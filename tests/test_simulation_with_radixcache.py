"""The simulator gives each request the same record over the radix cache as over its own cache."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
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


def run(fleet: Fleet, *, over_radix: bool, workload: str = "multi-turn") -> Observations:
    trace = generate(workload, num_requests=400, rate=20, seed=0)
    (observed,) = simulate(
        trace,
        fleet,
        make_policies=lambda _: policies_named("lpm", page_size=64),
        make_cache=radix_cache if over_radix else BlockCache,
    )
    return observed


@pytest.mark.parametrize("workload", ["multi-turn", "poisson"])  # in the latter, pages are not shared that are cached
def test_every_request_has_the_same_record(workload: str) -> None:
    over_radix, own = (run(FLEET, over_radix=one, workload=workload) for one in (True, False))
    assert over_radix.records == own.records


def test_hits_are_similar_when_both_evict() -> None:
    tight = replace(FLEET, num_pages=700)
    over_radix, own = run(tight, over_radix=True), run(tight, over_radix=False)
    hits = [sum(record.num_hit for record in observed.records) for observed in (over_radix, own)]
    assert len(over_radix.records) == len(own.records) == 400
    assert 0.9 < hits[0] / hits[1] < 1.1
