"""KV that leaves the pages of one rank, and comes back to those of any, where ranks divide attention by request."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_bench import PAGE, EchoBench, expected, submit
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig, FinishReason
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory.divided_kv import DividedKV, SharedCaches
from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.core.steps.admission import Admission
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    HostTier,
    Lanes,
    PageStore,
    PrefetchMode,
    PrefetchPolicy,
    SharedFolder,
    TierCounters,
    TieredIndex,
    WritePolicy,
)
from pagewood.kvpool.tiers.pages.device import ChainedPages
from pagewood.kvpool.tiers.testing import ManualLane, manual_lanes
from pagewood.radixcache import RadixCache
from random_traffic import check_alike
from scenarios.drawing import (
    random_scenario,
    with_drafts,
    with_grammars,
    with_holds,
    with_pools,
    with_urgency,
)
from scenarios.faulty import random_faults
from scenarios.running import MakeCaches, Report, run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, seed_fault

Extend = Callable[[Scenario, random.Random], Scenario]
KINDS: tuple[tuple[Extend, ...], ...] = (
    (), (with_drafts,), (with_grammars,), (with_holds,), (with_urgency,),
)  # fmt: skip


def divided_caches(
    num_pools: int,
    *,
    num_host_pages: int,
    stores: Callable[[int], dict[str, PageStore]] = lambda page_bytes: {},
    num_per_host: int | None = None,
    **options: Any,
) -> MakeCaches:
    """The function that is made makes a cache for each rank in turn, and then those that replace them.

    Ranks have tiers in common with the other ranks of their host. `num_per_host`: ranks of a host; None: all.
    """
    num_per_host = num_per_host or num_pools

    def make_caches(memory: NDArray[np.uint64], page_size: int) -> Callable[[], TieredIndex]:
        page_bytes = page_size * 8
        parts = memory.view(np.uint8).reshape(num_pools, -1, page_bytes)
        device = ChainedPages([ArrayPages([[part]]) for part in parts], num_pages=parts.shape[1])
        hosts = [
            (HostTier(page_bytes=page_bytes, num_pages=num_host_pages), stores(page_bytes))
            for _ in range(0, num_pools, num_per_host)
        ]
        made: list[TieredIndex] = []

        def make() -> TieredIndex:
            cache = RadixCache(page_size)
            if len(made) == num_pools:
                while made:
                    made.pop().close(keep_stores=True)
            if len(made) % num_per_host:
                made.append(made[-1].beside(cache))
                return made[-1]
            host, below = hosts[len(made) // num_per_host]
            whole: dict[str, Any] = {"page_size": page_size, **below, **options}
            made.append(TieredIndex(cache, device=device, host=host, **whole))
            return made[-1]

        return make

    return make_caches


class Watch:
    """Checks the tiers of every rank after each step, and that requests stay where their prefixes are copied to."""

    def __init__(self) -> None:
        self._staying: dict[int, int] = {}
        """Arrival number -> rank to which the prefix of a waiting request was being copied after the last step."""
        self.counts: dict[str, int] = {}

    def __call__(self, engine: Engine) -> None:
        kv, state = engine._kv, engine._state  # pyright: ignore[reportPrivateUsage]
        assert isinstance(kv, DividedKV)
        for space in kv.spaces:
            assert isinstance(space.cache, TieredIndex)
            space.cache.check()
        self.counts = kv.tier_counts()
        requests = {request.arrival: request for request in state.by_id.values()}
        for arrival, rank in self._staying.items():
            request = requests.get(arrival)
            assert request is None or request.kv_rank == rank, "a request has left the rank that its prefix goes to"
        waiting = [request for request in requests.values() if request in state.waiting]
        self._staying = {one.arrival: one.kv_rank for one in waiting if state.waiting.stays(one)}


def asked_again(scenario: Scenario) -> Scenario:
    """Return the scenario with all prompts a second and a third time, after others have taken their pages."""
    again = [
        replace(one, at_step=one.at_step + after, abort_at_step=None, priority_from_step=None, hold=None)
        for after in (25, 50)
        for one in scenario.arrivals
    ]
    return replace(scenario, arrivals=(*scenario.arrivals, *again))


def drawn(seed: int, num_ranks: int) -> Scenario:
    rng = random.Random(seed)
    scenario = random_scenario(rng, overlap=seed % 2 > 0, bursts=0.5)
    for extend in rng.choice(KINDS):
        scenario = extend(scenario, rng)
    if seed % 3 == 0:
        scenario = replace(scenario, faults=random_faults(rng))
    scenario = with_pools(asked_again(scenario), rng, num_ranks)
    return replace(scenario, config=replace(scenario.config, prefix_cache=True, retained_share=0.5))


def run_over_tiers(seed: int, num_ranks: int, folder: Path, watch: Watch, *, num_per_host: int | None = None) -> Report:
    rng, scenario = random.Random(seed), drawn(seed, num_ranks)
    below, numbers = rng.choice(("nothing", "disk", "remote", "both")), count()

    def stores(page_bytes: int) -> dict[str, PageStore]:
        sizes: Any = {"page_bytes": page_bytes, "num_bytes": 100 * page_bytes}
        made: dict[str, PageStore] = {}
        if below in ("disk", "both"):
            made["disk"] = DiskTier(folder / f"pages-{next(numbers)}", **sizes)
        if below in ("remote", "both"):
            made["remote"] = SharedFolder(folder / "shared", **sizes)
        return made

    caches = divided_caches(
        num_ranks, num_host_pages=rng.choice((rng.randint(1, 12), rng.randint(1, 12), 40)), stores=stores,
        num_per_host=num_per_host,
        write_policy=rng.choice(list(WritePolicy)), prefetch=PrefetchPolicy(mode=rng.choice(list(PrefetchMode))),
    )  # fmt: skip
    return run_scenario(scenario, make_caches=caches, after_step=watch)


SEEDS = [*range(24, 28), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(28, 150))]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_traffic_gives_the_tokens_of_the_oracle(seed: int, num_ranks: int, tmp_path: Path) -> None:
    run_over_tiers(seed, num_ranks, tmp_path, Watch())


HOSTS = [(4, 2), (2, 1), (3, 1)]
"""Ranks, and those of a host."""


@pytest.mark.parametrize(
    ("seed", "num_ranks", "num_per_host"),
    [
        (24, 4, 2), (25, 2, 1), (27, 3, 1),
        *(pytest.param(seed, *HOSTS[seed % 3], marks=pytest.mark.slow) for seed in range(150, 270)),
    ],
)  # fmt: skip
def test_random_traffic_over_hosts_gives_the_tokens_of_the_oracle(
    seed: int, num_ranks: int, num_per_host: int, tmp_path: Path
) -> None:
    run_over_tiers(seed, num_ranks, tmp_path, Watch(), num_per_host=num_per_host)


@pytest.mark.parametrize("num_per_host", [2, 1])
def test_everything_happens(num_per_host: int, tmp_path: Path) -> None:
    num_preempted = num_loaded = num_fetched = 0
    for seed in (8, 13, 14, 17):
        watch, folder = Watch(), tmp_path / str(seed)
        folder.mkdir()
        num_preempted += run_over_tiers(seed, 2, folder, watch, num_per_host=num_per_host).num_preempted
        num_loaded += watch.counts["num_loaded"]
        num_fetched += watch.counts["num_fetched"]
    assert min(num_preempted, num_loaded, num_fetched) > 0, (num_preempted, num_loaded, num_fetched)


PREFIX = list(range(1, 41))


def run(lanes: Lanes, *names: str) -> None:
    """Make the copies that wait in some lanes."""
    for name in names:
        lane = getattr(lanes, name)
        assert isinstance(lane, ManualLane)
        lane.run(100)


def bench_of(lanes: Lanes, *, is_evicted: bool = False, num_per_host: int | None = None, **options: Any) -> EchoBench:
    """Return an engine with 16 pages on each of two ranks; the host has the pages of `PREFIX`, and so has rank 0."""
    caches = divided_caches(2, num_host_pages=64, lanes=lanes, num_per_host=num_per_host)
    options |= {"tensor_parallel_size": 2, "enable_dp_attention": True}
    bench = EchoBench(num_pools=2, max_running=4, make_caches=lambda memory: caches(memory, PAGE), **options)
    bench.answer(submit("first", PREFIX, max_tokens=1))
    run(lanes, "demote")
    if is_evicted:
        bench.answer(submit("filler", [7] * 60, max_tokens=4))
    found = [space.cache.peek(np.array(PREFIX, np.int32)).num_tokens for space in bench.spaces]
    assert found == [0 if is_evicted else 40, 0]
    return bench


def test_another_rank_recalls_a_page() -> None:
    """A request whose prefix is on a full rank loads it from the host to the other one, and stays there."""
    lanes = manual_lanes()
    bench = bench_of(lanes)
    bench.step(submit("long", [*PREFIX, 1, 2], max_tokens=22))  # on rank 0, until it has all of its pages
    bench.until(lambda: not bench.spaces[0].num_available)
    bench.step(submit("other", [*PREFIX, 3, 4], max_tokens=5))
    assert bench.state.waiting.num_recalling
    bench.until(lambda: bench.finish("long"))
    bench.steps(3)  # rank 0 has room and the prefix now
    request = bench.state.by_id["other"]
    run(lanes, "load")
    bench.until(lambda: bench.finish("other"))
    assert (request.kv_rank, bench.deltas["other"][-1].num_cached_tokens) == (1, len(PREFIX))
    assert bench.tokens("other") == expected([*PREFIX, 3, 4], 5)
    bench.engine.close()


def test_copies_keep_memory_of_their_rank() -> None:
    """Pages for which a request waits on rank 0 are not kept free on rank 1."""
    lanes = manual_lanes()
    bench = bench_of(lanes, is_evicted=True)
    bench.step(submit("urgent", [*PREFIX, 1], max_tokens=8, priority=1))
    bench.until(lambda: bench.state.waiting.num_recalling)
    bench.step(submit("other", [9] * 44, max_tokens=3))
    bench.until(lambda: bench.finish("other"))
    assert bench.finish("urgent") is None
    run(lanes, "load")
    bench.until(lambda: bench.finish("urgent"))
    assert bench.deltas["urgent"][-1].num_cached_tokens == len(PREFIX)
    bench.engine.close()


def test_a_request_goes_to_the_host_that_has_its_prefix() -> None:
    """Although the rank of another host has more room."""
    lanes = manual_lanes()
    bench = bench_of(lanes, is_evicted=True, num_per_host=1)
    bench.step(submit("long", [5] * 4, max_tokens=12))
    bench.until(lambda: bench.spaces[0].num_available < bench.spaces[-1].num_available)
    bench.step(submit("again", [*PREFIX, 1], max_tokens=2))
    request = bench.state.by_id["again"]
    bench.until(lambda: bench.state.waiting.num_recalling)
    run(lanes, "load")
    bench.until(lambda: bench.finish("again"))
    assert (request.kv_rank, bench.deltas["again"][-1].num_cached_tokens) == (0, len(PREFIX))
    bench.engine.close()


@pytest.mark.parametrize("num_per_host", [2, 1])
def test_what_all_have_is_found_before_a_request_is_queued(num_per_host: int) -> None:
    lanes = manual_lanes()
    bench = bench_of(lanes, is_evicted=True, num_per_host=num_per_host)
    bench.step(submit("known", [*PREFIX, 1], max_tokens=2, cache_hit_threshold=0.9))
    bench.step(submit("unknown", [9] * 41, max_tokens=2, cache_hit_threshold=0.9))
    bench.until(lambda: bench.finish("unknown"))
    run(lanes, "load")
    bench.until(lambda: bench.finish("known"))
    found = [bench.finish(name) for name in ("known", "unknown")]
    assert found == [FinishReason.LENGTH, FinishReason.CACHE_THRESHOLD]
    bench.engine.close()


@pytest.mark.parametrize("num_per_host", [2, 1])
def test_answers_wait_for_pages_that_any_rank_publishes(num_per_host: int, tmp_path: Path) -> None:
    """Then another engine goes on with them."""
    lanes = manual_lanes()
    bench = bench_of(
        lanes, num_per_host=num_per_host, host_cache_gb=0.1, remote_cache=str(tmp_path), remote_cache_gb=0.1
    )
    for name in ("0", "1"):
        bench.step(submit(name, [8 + int(name)] * 41, max_tokens=1, handover="publish"))
    bench.steps(3)
    assert bench.state.by_id == {}
    assert bench.finish("0") is bench.finish("1") is None
    run(lanes, "demote")
    bench.until(lambda: bench.finish("0") and bench.finish("1"))
    bench.engine.close()


FAULTS: dict[str, tuple[Edit, Callable[[], None]]] = {
    "offset of pages forgotten": (
        (ChainedPages, "_divided", "divmod(page, self._num_pages)", "0, page % self._num_pages"),
        test_another_rank_recalls_a_page,
    ),
    "recalled on another rank": (
        (WaitingQueue, "_recall", "self._kv.place(request, stays=True)", "self._kv.spaces[request.kv_rank - 1]"),
        test_another_rank_recalls_a_page,
    ),
    "leaves its rank while it recalls": (
        (WaitingQueue, "place", "stays=entry.is_coming", "stays=False"), test_another_rank_recalls_a_page
    ),
    "tiers of hosts are not looked at": (
        (DividedKV, "place", "near[rank] if near else 0", "0"), test_a_request_goes_to_the_host_that_has_its_prefix
    ),
    "one host is asked what it has": (
        (DividedKV, "probe", "space.probe(request) for space", "self.spaces[1].probe(request) for _"),
        partial(test_what_all_have_is_found_before_a_request_is_queued, num_per_host=1),
    ),
    "one host is asked what it stores": (
        (SharedCaches, "unstored", "in self._caches", "in self._caches[:1]"),
        partial(test_answers_wait_for_pages_that_any_rank_publishes, num_per_host=1, tmp_path=Path("unused")),
    ),
    "reserve of all ranks": (
        (Admission, "_reserve_in", "claim[0].kv_rank == request.kv_rank", "True"), test_copies_keep_memory_of_their_rank
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_seeded_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    edit, check = FAULTS[name]
    seed_fault([edit], monkeypatch)
    with pytest.raises(AssertionError):
        check()


def little(folder: Path, num_ranks: int, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), num_threads=num_ranks, tensor_parallel_size=num_ranks, enable_dp_attention=num_ranks > 1,
        max_running=6, chunked_prefill_size=16, page_size=4, max_length=84, max_total_tokens=84 * num_ranks,
        schedule_conservativeness=0.05, **options,
    )  # fmt: skip


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_ranks_with_tiers_have_the_tokens_of_one_process_without(
    seed: int, num_ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Latents, with requests that leave for others, in chunks; once, and again after a restart with the same disk."""
    model, disk, found = tmp_path / "model", tmp_path / "disk", TierCounters()
    model.mkdir()
    build(DIVIDED["deepseek3"], model)
    ranks_are_threads(monkeypatch)
    engines: list[Engine] = []

    def built(config: EngineConfig, **links: Any) -> Engine:
        engines.append(build_engine(config, **links))
        engines[-1].measure()
        return engines[-1]

    whole = EngineConfig(model=str(model), num_threads=1, max_running=6, page_size=4, max_total_tokens=1024)
    tiers: dict[str, Any] = {"host_cache_gb": 0.00005, "disk_cache_path": str(disk), "disk_cache_gb": 0.01}
    num_preempted = num_runs = 0
    while num_runs < 2 or (num_runs < 10 and not num_preempted):  # which requests meet depends on the threads
        num_preempted += check_alike(
            whole, little(model, num_ranks, **tiers), seed + 100 * (num_runs // 2), build=built
        )
        num_runs += 1
    assert num_preempted
    for engine in engines[1::2]:
        measured = engine.measurement()
        assert measured is not None
        assert measured.tiers["num_failed"] == 0
        found.num_loaded += measured.tiers["num_loaded"]
        found.num_fetched += measured.tiers["num_fetched"]
    assert min(found.num_loaded, found.num_fetched) > 0
