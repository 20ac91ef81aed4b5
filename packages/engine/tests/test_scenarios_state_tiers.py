"""Scenarios of a model whose layers have states, over tiny lower tiers that lose, damage and refuse what they hold.

Copies are made when a scenario says so, so every run of a seed is the same.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pagewood.engine.core.memory import states
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    HostTier,
    PrefetchMode,
    PrefetchPolicy,
    SharedFolder,
    StatePages,
    TieredIndex,
    WritePolicy,
)
from pagewood.kvpool.tiers.pages import states as pages_of_states
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.testing import ManualLane, manual_lanes
from pagewood.kvpool.tiers.transfers import demotion, recall
from pagewood.radixcache import RadixCache
from scale import scaled
from scenarios.drawing import (
    random_scenario,
    with_adapters,
    with_drafts,
    with_holds,
    with_interruptions,
    with_logprobs,
    with_pooling,
    with_states,
    with_urgency,
)
from scenarios.faulty import random_faults
from scenarios.running import STATE_WORDS, Report, run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, seed_fault, slow_ones

EXTENSIONS: tuple[Callable[[Scenario, random.Random], Scenario], ...] = (
    with_adapters, with_drafts, with_holds, with_interruptions, with_logprobs, with_pooling, with_urgency,
)  # fmt: skip
STATE_BYTES = 8 * STATE_WORDS
LANES = ("demote", "load", "store", "fetch")


class UnreliableStore:
    """A store that forgets pages, stores half of them, brings garbage, and fails."""

    def __init__(self, store: PageStore, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self.exists, self.close = store.exists, store.close

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        kept = [index for index in range(len(keys)) if self._rng.random() < 0.9]
        self._store.put([keys[index] for index in kept], [pages[index] for index in kept])
        if self._rng.random() < 0.05:
            raise OSError(28, "No space left on device")

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        found = self._store.get(keys, pages)
        for index in range(len(keys)):
            if self._rng.random() < 0.1:
                pages[index].fill(0xAA)
                found[index] = False
        if self._rng.random() < 0.05:
            raise OSError(5, "Input/output error")
        return found


class Tiers:
    """Lower tiers of an engine of the echo model, of a kind and size that a seed says."""

    def __init__(self, rng: random.Random, folder: Path, *, is_roomy: bool) -> None:
        self._rng = rng
        self._folder = folder
        self._num_host_pages = 300 if is_roomy else rng.choice((1, 6, 20, 200))
        self._below = rng.choice(((), ("disk",), ("remote",), ("disk", "remote")))
        self._policy = rng.choice(list(WritePolicy))
        self._mode = rng.choice(list(PrefetchMode))
        self._is_reliable = is_roomy or rng.random() < 0.5
        self._lanes = manual_lanes(max_pending=rng.choice((1, 4)))
        self.made: list[TieredIndex] = []

    def make_caches(
        self, memory: NDArray[np.uint64], page_size: int, of_states: NDArray[np.uint64]
    ) -> Callable[[], TieredIndex]:
        page_bytes = 8 * page_size
        pages = ArrayPages([[memory.view(np.uint8).reshape(-1, page_bytes)]])
        words = [of_states.view(np.uint8).reshape(-1, STATE_BYTES)]
        device = StatePages(pages, [[words[0][:, :16]], [words[0][:, 16:17], words[0][:, 17:]]])
        host = HostTier(page_bytes=page_bytes, num_pages=self._num_host_pages)
        stores: dict[str, Any] = {}
        for name in self._below:
            store = (
                DiskTier(self._folder / "disk", page_bytes=page_bytes, num_bytes=300 * page_bytes)
                if name == "disk"
                else SharedFolder(self._folder / "shared", page_bytes=page_bytes, num_bytes=3000 * page_bytes)
            )
            stores[name] = store if self._is_reliable else UnreliableStore(store, self._rng)

        def make() -> TieredIndex:
            if self.made:
                self.made[-1].close(keep_stores=True)
            index = TieredIndex(
                RadixCache(page_size), device=device, host=host, page_size=page_size, write_policy=self._policy,
                prefetch=PrefetchPolicy(mode=self._mode), lanes=self._lanes, clock=lambda: 0.0, **stores,
            )  # fmt: skip
            self.made.append(index)
            return index

        return make

    def copy(self, _: object) -> None:
        """Make some of the copies that wait, and check that no slot is lost."""
        self.made[-1].check()
        for name in LANES:
            lane = getattr(self._lanes, name)
            assert isinstance(lane, ManualLane)
            lane.run(self._rng.randint(0, 2))


def returning(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with a memory for one request, and its prompts again and again."""
    arrivals = [
        replace(arrival, at_step=15 * number + rng.randint(0, 10), prompt=arrival.prompt[: rng.randint(1, 99)])
        for number, arrival in enumerate(rng.choice(scenario.arrivals) for _ in range(12))
    ]
    return replace(
        scenario,
        arrivals=tuple(replace(one, abort_at_step=None, priority_from_step=None) for one in arrivals),
        num_pages=-(-scenario.max_length // scenario.config.page_size),
    )


def run(seed: int, folder: Path) -> tuple[Report, Tiers]:
    """Run a scenario; every third one has few prompts that return often, and tiers with room that do not fail."""
    rng = random.Random(seed)
    is_roomy = seed % 3 == 0
    scenario = random_scenario(rng, overlap=seed % 2 > 0)
    if is_roomy:
        scenario = returning(scenario, rng)
    elif rng.random() < 0.6:
        scenario = rng.choice(EXTENSIONS)(scenario, rng)
    scenario = with_states(scenario, rng)
    tiers = Tiers(rng, folder / str(seed), is_roomy=is_roomy)
    config = replace(scenario.config, prefix_cache=True)
    faults = random_faults(rng) if seed % 3 == 1 else {}
    report = run_scenario(
        replace(scenario, config=config, faults=faults), make_caches_of_states=tiers.make_caches, after_step=tiers.copy
    )
    return report, tiers


def test_tokens_are_those_of_the_oracle(tmp_path: Path) -> None:
    found = [run(seed, tmp_path) for seed in (*range(scaled(24)), 232)]  # the last one once stood still
    assert sum(report.num_preempted for report, _ in found) > 0
    loaded = [sum(index.counters.num_loaded for index in tiers.made) for _, tiers in found]
    assert sum(num > 0 for num in loaded) > 3, loaded


_Recalls, _Index, _Places = recall.Recalls, TieredIndex, states.StatePlaces
FAULTS: dict[str, list[Edit]] = {
    "one key for all states": [(pages_of_states, "_key", "blake2b(key,", "blake2b(key[:0],")],
    "the state of a shorter prefix": [(_Recalls, "_state_on_host", "recall.keys[end - 1]", "recall.keys[0]")],
    "the state of another place stored": [
        (_Index, "attach", "self._states.parts_of(snapshot)", "self._states.parts_of(max(0, snapshot - 1))")
    ],
    "recalled into a place in use": [(_Places, "lend", "self._free.pop() if", "self._free[-1] if")],
    "pages behind the state used": [
        (_Recalls, "_load", "slots = slots[: max(0, end - num_cached)]", "pass"),
        (_Recalls, "_load", "= place, end", "= place, num_cached + num_pages"),
    ],
    "a place of the cache is spare too": [(_Recalls, "_attach", "recall.place = None", "pass")],
    "a place is given back while it is copied": [
        (demotion.Demotion, "_end_copies_of", "in pages:", "in (page for page in pages if page >= 0):"),
        (demotion.Demotion, "_finish_copies", "del self._copying[page]", "self._copying.pop(page, None)"),
    ],
    "places of dropped pages lost": [(_Index, "_collect_states", "self._recalls.give_places(places)", "pass")],
}  # fmt: skip
"""Faults, and what each changes."""


@pytest.mark.parametrize("fault", slow_ones(FAULTS, "a place is given back while it is copied"))
def test_seeded_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seed_fault(FAULTS[fault], monkeypatch)
    for index, seed in enumerate((*range(0, 90, 3), *range(400))):
        try:
            run(seed, tmp_path / str(index))
        except Exception:  # any error counts
            return
    pytest.fail("the fault was not found")
