"""The scenarios of `test_scenarios` with a model whose layers have windows, in pools that may not hold a request whole.

The echo model's layers all have the same KV, so a window that lacks any of it changes the tokens.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pagewood.engine.assembly.tiers.framed_pages import FramedPages
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory import kv, page_groups
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.kvpool.tiers import ArrayPages, DiskTier, HostTier, TieredIndex, WritePolicy
from pagewood.radixcache import RadixCache
from scale import scaled
from scenarios.drawing import random_scenario, with_windows
from scenarios.extending import extended
from scenarios.running import Report, run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_found, by_turns

KINDS = ("drafts", "grammars", "holds", "interruptions", "limits", "log probabilities", "urgency", "vectors")


def drawn(rng: random.Random, *, overlap: bool, kind: str | None, has_faults: bool = False) -> Scenario:
    scenario = extended(random_scenario(rng, overlap=overlap), rng, kind, "faults" if has_faults else None)
    return replace(with_windows(scenario, rng), is_encoded=rng.random() < 0.3)


def run(rng: random.Random, *, overlap: bool, kind: str | None, has_faults: bool = False) -> Report:
    scenario = drawn(rng, overlap=overlap, kind=kind, has_faults=has_faults)
    return run_scenario(scenario, after_step=check_given_back)


def check_given_back(engine: Engine) -> None:
    """No running request uses the memory in windows of pages that are behind its own."""
    groups, page_size = engine._kv.groups, engine.info.page_size  # pyright: ignore[reportPrivateUsage]
    for request in engine._state.running:  # pyright: ignore[reportPrivateUsage]
        behind = 0 if groups is None else (request.num_computed + 1 - groups.window) // page_size
        assert request.num_passed >= behind


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rng=st.randoms(use_true_random=False),
    overlap=st.booleans(),
    kind=st.sampled_from((None, *KINDS)),
    has_faults=st.booleans(),
)
def test_windows_that_are_given_back_do_not_change_the_output(
    rng: random.Random, overlap: bool, kind: str | None, has_faults: bool
) -> None:
    run(rng, overlap=overlap, kind=kind, has_faults=has_faults and kind in (None, "holds", "interruptions"))


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_scenarios_with_windows_exercise_what_they_claim(overlap: bool) -> None:
    by_windows: dict[bool, list[Report]] = {True: [], False: []}
    for seed in range(100):
        scenario = drawn(random.Random(seed), overlap=overlap, kind=("holds", "interruptions", None)[seed % 3])
        by_windows[None in scenario.windows].append(run_scenario(scenario))
    for reports in by_windows.values():
        assert sum(report.num_preempted for report in reports) > 10
        assert sum(report.num_cached_tokens for report in reports) > 100
        assert sum(report.num_aborted for report in reports) > 5
        assert sum(report.num_held for report in reports) > 10


def run_with_tiers(seed: int, folder: Path) -> int:
    """Run a scenario over a host and a disk; return how many pages came back from them."""
    rng = random.Random(seed)
    kind = rng.choice((None, "drafts", "holds", "interruptions"))
    scenario = drawn(rng, overlap=seed % 2 > 0, kind=kind)
    num_host_pages, policy = rng.randint(1, 40), rng.choice(list(WritePolicy))
    indices: list[TieredIndex] = []

    def make_caches(memory: NDArray[np.uint64], page_size: int, groups: PageGroups) -> Callable[[], TieredIndex]:
        frames = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        page_bytes = FramedPages(frames, groups).page_bytes
        disk = DiskTier(folder / f"pages {seed}", page_bytes=page_bytes, num_bytes=100 * page_bytes)

        def make() -> TieredIndex:
            pages = FramedPages(frames, groups)
            host = HostTier(page_bytes=page_bytes, num_pages=num_host_pages)
            indices.append(
                TieredIndex(
                    RadixCache(page_size), device=pages, holder=pages, host=host, disk=disk, page_size=page_size,
                    write_policy=policy,
                )
            )  # fmt: skip
            return indices[-1]

        return make

    config = replace(scenario.config, prefix_cache=True)
    run_scenario(
        replace(scenario, config=config), make_framed_caches=make_caches, after_step=lambda _: indices[-1].check()
    )
    return sum(index.counters.num_loaded for index in indices)


def test_windows_that_move_between_memories_do_not_change_the_output(tmp_path: Path) -> None:
    assert sum(run_with_tiers(seed, tmp_path) for seed in range(60)) > 2


FAULTS: dict[str, list[Edit]] = {
    "given back before they are read": [
        (kv.KVSpace, "pass_windows", "request.num_computed + 1", "request.num_launched + 1 + self.page_size")
    ],
    "never given back": [(kv.KVSpace, "pass_windows", "first > request.num_passed", "False")],
    "windows of a hit not checked": [(page_groups.PageGroups, "num_usable", "if not missing.any():", "if True:")],
    "windows of a hit not used": [(kv.KVSpace, "_match", "self.groups.use(window)", "pass")],
    "declined request uses them for ever": [(kv.KVSpace, "_let_go", "self.groups.let_go(window)", "pass")],
    "frames in use taken": [(page_groups.PageGroups, "_is_idle", "(self._users[pages] == 0)", "True")],
    "only one group announced": [(page_groups.PageGroups, "spread", "frames >= 0", "(frames >= 0) & (firsts == 0)")],
}


@pytest.mark.parametrize("fault", by_turns(FAULTS))
def test_seeded_faults_are_found(fault: str) -> None:
    assert_found(FAULTS[fault], lambda seed: run(random.Random(seed), overlap=seed % 3 > 0, kind=None), range(300))
