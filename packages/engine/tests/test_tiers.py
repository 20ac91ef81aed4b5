"""KV that leaves the device and comes back: with the embedded model, and with the echo model in random traffic."""

import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from answered import answers_to, tokens_of
from pagewood.engine import EngineConfig, SamplingParams
from pagewood.engine.api import Submit
from pagewood.engine.assembly.tiers.lower_caches import TieredCaches
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory.divided_kv import DividedKV, PageRange
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.kvpool import MultiHeadLayout, PageAllocator
from pagewood.kvpool.storage import KVStorage
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    HostTier,
    PrefetchMode,
    PrefetchPolicy,
    TieredIndex,
    WritePolicy,
)
from pagewood.kvpool.tiers.torch_pages import device_pages
from pagewood.radixcache import RadixCache
from parts import make_queue, make_request
from scenarios.drawing import random_scenario, with_holds, with_interruptions, with_urgency
from scenarios.faulty import random_faults
from scenarios.running import run_scenario

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PAGE = 16


class Server:
    """An engine with the embedded model, and one request at a time."""

    def __init__(self, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        self.engine: Engine = build_engine(EngineConfig(**options), inbox=self.inbox, outbox=self.outbox)

    def answer(self, prompt: list[int]) -> tuple[list[int], int]:
        """Answer one prompt; return the answer and how many positions were computed for it."""
        before = self.engine.counters().num_tokens
        submit = Submit(request_id="x", tokens=np.array(prompt, "<i4").tobytes(), sampling=GREEDY)
        [answer] = answers_to(self.engine, self.inbox, self.outbox, [submit])
        return tokens_of(answer), self.engine.counters().num_tokens - before


@contextmanager
def serving(**options: Any) -> Generator[Server]:
    server = Server(max_total_tokens=256, **options)
    try:
        yield server
    finally:
        server.engine.close()


def prompt(seed: int, n: int) -> list[int]:
    return [5 + (seed * 7919 + i * i * 31 + i) % 200 for i in range(n)]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_conversation_that_was_evicted_is_loaded_and_not_computed_again(policy: str) -> None:
    first = prompt(1, 100)
    with serving(host_cache_gb=0.1, cache_write_policy=policy) as server:
        answer, num_computed = server.answer(first)
        assert num_computed == 100 + 8 - 1
        for other in range(2, 6):  # each evicts the one before
            server.answer(prompt(other, 200))
        resumed = first + answer + prompt(9, 20)
        tokens, num_computed = server.answer(resumed)
        num_kept = (100 + 8 - 1) // PAGE * PAGE
        assert num_computed == len(resumed) - num_kept + 8 - 1
    with serving() as plain:
        assert plain.answer(resumed)[0] == tokens


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_a_conversation_survives_a_restart_on_disk(policy: str, tmp_path: Path) -> None:
    options = {
        "host_cache_gb": 0.1, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.1,
        "cache_write_policy": policy,
    }  # fmt: skip
    first = prompt(1, 100)
    with serving(**options) as server:
        expected, _ = server.answer(first)
    with serving(**options) as server:
        tokens, num_computed = server.answer(first)
    assert tokens == expected
    assert num_computed == 100 - 96 + 8 - 1


def test_engines_share_a_folder(tmp_path: Path) -> None:
    options = {"host_cache_gb": 0.1, "remote_cache": str(tmp_path), "remote_cache_gb": 0.1}
    first = prompt(1, 100)
    with serving(**options) as one, serving(**options) as other:
        expected, _ = one.answer(first)
        deadline_s = time.monotonic() + 30
        while not list(tmp_path.rglob("*.pages")):  # written behind
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
            one.answer(prompt(2, 5))
        tokens, num_computed = other.answer(first)
    assert tokens == expected
    assert num_computed == 100 - 96 + 8 - 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_random_traffic_over_tiers_gives_the_tokens_of_the_oracle(seed: int, overlap: bool, tmp_path: Path) -> None:
    rng = random.Random(seed)
    host_pages, policy = rng.randint(1, 40), rng.choice(list(WritePolicy))
    prefetch = PrefetchPolicy(mode=rng.choice(list(PrefetchMode)))

    def make_caches(memory: NDArray[np.uint64], page_size: int) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        disk = DiskTier(tmp_path / "pages", page_bytes=page_size * 8, num_bytes=100 * page_size * 8)
        return lambda: TieredIndex(
            RadixCache(page_size),
            device=device,
            host=HostTier(page_bytes=page_size * 8, num_pages=host_pages),
            disk=disk,
            page_size=page_size,
            write_policy=policy,
            prefetch=prefetch,
        )

    scenario = random_scenario(rng, overlap=overlap)
    config = replace(scenario.config, prefix_cache=True)
    faults = random_faults(rng) if seed % 2 else {}
    run_scenario(replace(scenario, config=config, faults=faults), make_caches=make_caches)


@pytest.mark.parametrize("seed", range(10))
def test_random_pauses_and_retention_over_tiers(seed: int) -> None:
    rng = random.Random(seed)
    host_pages, policy = rng.randint(1, 40), rng.choice(list(WritePolicy))

    def make_caches(memory: NDArray[np.uint64], page_size: int) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        host = HostTier(page_bytes=page_size * 8, num_pages=host_pages)
        return lambda: TieredIndex(
            RadixCache(page_size), device=device, host=host, page_size=page_size, write_policy=policy
        )

    scenario = with_holds(random_scenario(rng, overlap=seed % 2 > 0), rng)
    scenario = replace(scenario, config=replace(scenario.config, prefix_cache=True, retained_share=0.5))
    run_scenario(scenario, make_caches=make_caches)


@pytest.mark.parametrize("seed", range(20))
def test_random_priorities_over_tiers(seed: int) -> None:
    """Requests are parked behind the prompts of others of lower priority, and preempted for them."""
    rng = random.Random(seed)
    host_pages, policy = rng.randint(1, 40), rng.choice(list(WritePolicy))

    def make_caches(memory: NDArray[np.uint64], page_size: int) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, page_size * 8)]])
        host = HostTier(page_bytes=page_size * 8, num_pages=host_pages)
        return lambda: TieredIndex(
            RadixCache(page_size), device=device, host=host, page_size=page_size, write_policy=policy
        )

    scenario = with_interruptions(random_scenario(rng, overlap=seed % 2 > 0, bursts=0.9), rng)
    run_scenario(with_urgency(scenario, rng), make_caches=make_caches)


@pytest.mark.parametrize("has_disk", [False, True])
def test_healing_keeps_the_pages_of_lower_tiers(has_disk: bool, tmp_path: Path) -> None:
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_size=4)
    memory = KVStorage(layout, 16).memory
    disk: dict[str, Any] = {"disk_cache_path": str(tmp_path), "disk_cache_gb": 0.001} if has_disk else {}
    caches = TieredCaches(EngineConfig(host_cache_gb=0.001, **disk), memory=memory, page_size=4, fingerprint=b"")
    kv = KVSpace(make_cache=caches.make, allocator=PageAllocator(16), page_size=4, num_rows=2)
    first = make_request(list(range(12)))
    assert kv.admit(first, max_tokens=100, num_reserved=0) == 12
    first.num_computed = 12
    kv.release(first)
    kv.poll()
    kv.heal()
    assert (kv.num_free, kv.num_cached, kv.violation(())) == (16, 0, None)
    again = make_request(list(range(12)), arrival=1)
    queue = make_queue(kv)
    queue.add(again)
    while queue.recall(again, num_reserved=0):
        assert kv.violation((), is_recalling=True) is None
    assert kv.admit(again, max_tokens=100, num_reserved=0) == 12 - 8
    assert kv.violation([again]) is None
    kv.release(again)
    kv.close()


def test_healing_keeps_the_pages_of_lower_tiers_for_all_ranks() -> None:
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_size=4)
    memory, other = (KVStorage(layout, 16).memory for _ in range(2))
    config = EngineConfig(host_cache_gb=0.001)
    caches = TieredCaches(config, memory=memory, page_size=4, fingerprint=b"", by_request=[device_pages(other)])
    ranks, rows = [PageRange(PageAllocator(16), first=first) for first in (0, 16)], [0, 1]
    kv = DividedKV(
        [KVSpace(make_cache=caches.make, allocator=one, page_size=4, num_rows=2, free_rows=rows) for one in ranks]
    )
    memory.blocks(0)[0].numpy()[:] = np.arange(16)[:, None]
    first = make_request(list(range(12)))
    kv.place(first).admit(first, max_tokens=100, num_reserved=0)
    first.num_computed = 12
    kv.release(first)
    kv.poll()
    kv.heal()
    assert (kv.num_free, kv.num_cached, kv.violation(())) == (32, 0, None)
    filler, again = make_request([7] * 60, arrival=1), make_request(list(range(12)), arrival=2)
    assert kv.place(filler).admit(filler, max_tokens=60, num_reserved=0) == 60
    queue = make_queue(kv)
    queue.add(again)
    assert kv.place(again) is kv.spaces[1]
    while queue.recall(again, num_reserved=0):
        assert kv.violation([filler], is_recalling=True) is None
    assert kv.spaces[1].admit(again, max_tokens=100, num_reserved=0) == 12 - 8
    assert kv.violation([filler, again]) is None
    assert (other.blocks(0)[0].numpy()[again.pages[:2] - 16] == first.pages[:2, None]).all()
    kv.release(again)
    kv.release(filler)
    kv.close()


def space_with_copies(num_tokens: int) -> KVSpace:
    """Return a space of 16 pages of 4 tokens, all free, whose host has the pages of the first `num_tokens` numbers."""
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_size=4)
    memory = KVStorage(layout, 16).memory
    caches = TieredCaches(EngineConfig(host_cache_gb=0.001), memory=memory, page_size=4, fingerprint=b"")
    kv = KVSpace(make_cache=caches.make, allocator=PageAllocator(16), page_size=4, num_rows=2)
    first = make_request(list(range(num_tokens)))
    kv.admit(first, max_tokens=100, num_reserved=0)
    first.num_computed = num_tokens
    kv.release(first)
    kv.heal()
    return kv


def test_an_aborted_request_stops_its_recall() -> None:
    kv = space_with_copies(12)
    waiting = make_request(list(range(12)), arrival=1)
    queue = make_queue(kv)
    queue.add(waiting)
    queue.recall(waiting, num_reserved=0)
    queue.remove(waiting)
    assert (queue.num_recalling, kv.violation(())) == (0, None)
    kv.close()


def test_a_copy_that_no_pass_reaches_does_not_keep_its_pages() -> None:
    kv = space_with_copies(40)
    behind = make_request(list(range(40)), arrival=1)
    queue = make_queue(kv)
    queue.add(behind)
    while kv.num_available == 16:
        assert queue.recall(behind, num_reserved=0)
    before = make_request(list(range(100, 164)), arrival=2)
    queue.add(before)
    while not kv.admit(before, max_tokens=100, num_reserved=0):  # it needs all pages, so it is the only one examined
        queue.end_copies()
    assert before.num_pages == 16
    before.num_computed = 64
    kv.release(before)
    assert not queue.recall(behind, num_reserved=0)  # it is over, and what it copied has been evicted
    assert queue.num_recalling == 0
    queue.remove(behind)
    queue.remove(before)
    assert kv.violation(()) is None
    kv.close()


def test_kv_on_disk_belongs_to_one_model_and_layout(tmp_path: Path) -> None:
    options = {"host_cache_gb": 0.1, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.1}
    Server(**options).engine.close()
    with pytest.raises(ValueError, match="path must hold pages of the same model and layout"):
        Server(**options, page_size=8)


def test_a_budget_below_a_page_and_a_folder_without_rights_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="host_cache_gb must hold at least one page"):
        Server(host_cache_gb=1e-9)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="path must be a file that can be made and written"):
        Server(host_cache_gb=0.1, disk_cache_path=str(tmp_path / "file"), disk_cache_gb=0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_cache_gb": 0.0}, "host_cache_gb must be > 0, got 0.0"),
        ({"disk_cache_path": "x"}, "disk_cache_path and disk_cache_gb must be given together"),
        ({"disk_cache_path": "x", "disk_cache_gb": 1.0}, "disk_cache_path must come with host_cache_gb"),
        ({"remote_cache": "x"}, "remote_cache and remote_cache_gb must be given together"),
        ({"remote_cache": "x", "remote_cache_gb": 1.0}, "remote_cache must come with host_cache_gb"),
        ({"remote_cache": "lmcache+lm://x:1"}, "remote_cache must come with host_cache_gb"),
        ({"remote_cache": "lmcache+lm://x:1", "remote_cache_gb": 1.0}, "remote_cache_gb must be None with lmcache"),
        ({"host_cache_gb": 1.0, "prefix_cache": False}, "host_cache_gb must come with the prefix cache"),
        ({"cache_write_policy": "x"}, "cache_write_policy must be write_through, "),
    ],
)
def test_options_that_contradict_each_other_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)  # pyright: ignore[reportArgumentType]
