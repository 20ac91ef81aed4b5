"""The guarantees of the index, one per test; random traffic is in test_index_traffic.py."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from faulty_tiers import FaultyDevice
from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    Hits,
    HostTier,
    KeyChain,
    Lanes,
    PageStore,
    PrefetchMode,
    PrefetchPolicy,
    Recall,
    SharedFolder,
    TieredIndex,
    TierLog,
    WritePolicy,
    thread_lanes,
)
from pagewood.kvpool.tiers.pages.arrays import Bytes, Int32
from pagewood.kvpool.tiers.plain_cache import PlainCache
from pagewood.kvpool.tiers.testing import ManualLane, manual_lanes

PAGE, PAGE_BYTES = 2, 16
SIZES: Any = {"page_bytes": PAGE_BYTES, "num_bytes": 10_000}
TOKENS = np.arange(8, dtype=np.int32)
NOTHING = Hits(num_device=0, num_host=0, num_disk=0, num_remote=0, num_usable=0)


class Engine:
    """The parts of an engine that an index needs."""

    def __init__(self, *, num_pages: int = 8, num_host_pages: int = 32, lanes: Lanes | None = None, **options: Any):
        self.layers = [np.zeros((num_pages, PAGE_BYTES // 2), np.uint8) for _ in range(2)]
        self.allocator = PageAllocator(num_pages)
        self.now_s = 0.0
        self.device = FaultyDevice(ArrayPages([[layer] for layer in self.layers]))
        self.host = HostTier(page_bytes=PAGE_BYTES, num_pages=num_host_pages)
        options.setdefault("device", self.device)
        self.lanes = lanes or manual_lanes()
        self.index = TieredIndex(
            PlainCache(PAGE), host=self.host, page_size=PAGE, lanes=self.lanes, clock=lambda: self.now_s, **options
        )

    def compute(self, tokens: Int32, namespace: str | None = None) -> None:
        """Publish tokens; a page holds its last token."""
        match = self.index.match(tokens, namespace)
        pages = self.allocator.alloc(len(tokens) // PAGE - len(match.pages))
        for layer in self.layers:
            layer[pages] = tokens[match.num_tokens + 1 :: PAGE, None]
        lease = self.index.lock(match.node)
        insertion = self.index.insert(tokens[match.num_tokens :], pages, namespace, after=lease)
        self.index.unlock(lease)
        self.allocator.free(pages[: insertion.num_existing])

    def evict(self, n: int = 100) -> int:
        pages = self.index.evict(n)
        for layer in self.layers:
            layer[pages] = 0xEE
        self.allocator.free(pages)
        return len(pages)

    def finish(self, recall: Recall) -> None:
        """Advance to the end; every copy is made as soon as it is queued."""
        while self.index.advance(recall, self.allocator.alloc):
            for name in ("demote", "load", "store", "fetch"):
                lane = getattr(self.lanes, name)
                if isinstance(lane, ManualLane):
                    lane.run(100)

    def run_lane(self, name: str) -> None:
        """Make the copies that a lane has queued."""
        lane = getattr(self.lanes, name)
        assert isinstance(lane, ManualLane)
        lane.run(100)

    def contents(self, tokens: Int32, namespace: str | None = None) -> list[int]:
        """Return what the cached pages of these tokens hold."""
        pages = self.index.peek(tokens, namespace).pages
        assert all((layer[pages] == layer[pages][:, :1]).all() for layer in self.layers)
        return self.layers[1][pages, 0].tolist()


def test_a_forward_pass_may_start_before_a_load_ends() -> None:
    class SlowDevice:
        """A device that copies the second layer only after `may_continue` is set."""

        def __init__(self, device: ArrayPages) -> None:
            self.page_bytes, self.read = device.page_bytes, device.read
            self.may_continue = Event()
            self._device = device

        def write(
            self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]
        ) -> None:
            def report(num_layers: int) -> None:
                arrived(num_layers)
                assert self.may_continue.wait(10)

            self._device.write(pages, memory, slots, report)

    layers = [np.zeros((8, PAGE_BYTES // 2), np.uint8) for _ in range(2)]
    device = SlowDevice(ArrayPages([[layer] for layer in layers]))
    engine = Engine(device=device, lanes=thread_lanes())
    engine.layers = layers
    engine.compute(TOKENS)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    while recall.load is None:
        assert engine.index.advance(recall, engine.allocator.alloc)
    load = recall.load
    assert load.wait_layer(0, 10)
    assert layers[0][recall.pages, 0].tolist() == [1, 3, 5, 7]  # a forward pass reads this first
    assert not load.wait_layer(1, 0.0)
    assert layers[1][recall.pages, 0].tolist() == [0xEE] * 4
    device.may_continue.set()
    assert load.wait_layer(1, 10)
    assert layers[1][recall.pages, 0].tolist() == [1, 3, 5, 7]
    engine.finish(recall)
    assert engine.contents(TOKENS) == [1, 3, 5, 7]
    engine.index.close()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_flush_stores_everything_through_a_host_that_is_smaller(policy: WritePolicy, tmp_path: Path) -> None:
    engine = Engine(disk=DiskTier(tmp_path / "pages", **SIZES), num_host_pages=2, write_policy=policy)
    engine.compute(np.arange(16, dtype=np.int32))
    engine.index.flush()
    assert engine.index.counters.num_stored == 8
    engine.index.close()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_evicted_pages_can_be_loaded_again(policy: WritePolicy) -> None:
    engine = Engine(write_policy=policy)
    engine.compute(TOKENS)
    assert engine.evict() == 4
    assert engine.index.locate(TOKENS) == Hits(num_device=0, num_host=8, num_disk=0, num_remote=0, num_usable=8)
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    engine.finish(recall)
    assert engine.contents(TOKENS) == [1, 3, 5, 7]
    assert engine.index.counters.num_loaded == 4
    engine.index.close()


def test_eviction_waits_for_a_copy_that_reads_the_pages() -> None:
    engine = Engine()
    engine.compute(TOKENS)
    assert isinstance(engine.lanes.demote, ManualLane)
    assert engine.lanes.demote.num_pending == 1  # its pages are still being read
    engine.evict()
    assert engine.lanes.demote.num_pending == 0
    assert engine.index.locate(TOKENS).num_host == 8
    engine.index.close()


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK])
def test_clear_drops_device_and_host_but_not_what_is_locked(policy: WritePolicy) -> None:
    engine = Engine(write_policy=policy)
    engine.compute(TOKENS)
    engine.evict()  # to the host
    engine.compute(TOKENS + 20)
    lease = engine.index.lock(engine.index.match(TOKENS[:2] + 20).node)
    num_copied = engine.index.counters.num_demoted
    engine.allocator.free(engine.index.clear())
    assert engine.index.locate(TOKENS).num_tokens == 0
    assert engine.index.locate(TOKENS + 20).num_device == 2
    assert engine.index.locate(TOKENS + 20).num_host == 0
    if policy is WritePolicy.WRITE_BACK:  # eviction would have copied them
        assert engine.index.counters.num_demoted == num_copied
    engine.index.unlock(lease)
    assert engine.allocator.num_free == 7
    engine.allocator.free(engine.index.clear())
    assert engine.allocator.num_free == 8
    engine.index.check()
    engine.index.close()


def test_selective_write_through_copies_only_pages_used_again() -> None:
    engine = Engine(write_policy=WritePolicy.WRITE_THROUGH_SELECTIVE, min_uses=2)
    engine.compute(TOKENS)
    engine.index.match(TOKENS[:4])
    engine.index.poll()
    engine.evict()
    assert engine.index.locate(TOKENS).num_host == 4
    assert engine.index.counters.num_dropped == 2
    engine.index.close()


def test_namespaces_share_nothing_in_any_tier(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "pages", page_bytes=PAGE_BYTES, num_bytes=10_000)
    engine = Engine(disk=disk, write_policy=WritePolicy.WRITE_BACK)
    engine.compute(TOKENS, "tenant")
    engine.evict()
    engine.index.flush()
    for namespace in (None, "", "other"):
        assert engine.index.locate(TOKENS, namespace) == NOTHING
        assert engine.index.recall(TOKENS, namespace) is None
    assert engine.index.locate(TOKENS, "tenant").num_host == 8
    engine.index.close()


def test_each_tier_provides_what_the_tiers_above_do_not_have(tmp_path: Path) -> None:
    first = Engine(remote=SharedFolder(tmp_path / "shared", **SIZES))
    first.compute(TOKENS)
    first.index.close()
    second = Engine(disk=DiskTier(tmp_path / "pages", **SIZES))
    second.compute(TOKENS[:6])
    second.index.close()
    third = Engine(disk=DiskTier(tmp_path / "pages", **SIZES), remote=SharedFolder(tmp_path / "shared", **SIZES))
    third.compute(TOKENS[:2])
    assert third.index.locate(TOKENS) == Hits(num_device=2, num_host=0, num_disk=4, num_remote=2, num_usable=8)
    recall = third.index.recall(TOKENS)
    assert recall is not None
    third.finish(recall)
    assert third.contents(TOKENS) == [1, 3, 5, 7]
    assert third.index.counters.num_fetched == 3
    third.index.close()
    fourth = Engine(disk=DiskTier(tmp_path / "pages", **SIZES))
    assert fourth.index.locate(TOKENS).num_disk == 8  # the pages from the remote store are on the disk, too
    fourth.index.close()


@pytest.mark.parametrize(
    ("mode", "num_loaded", "waits_until_s"),
    [(PrefetchMode.BEST_EFFORT, 0, 0.0), (PrefetchMode.TIMEOUT, 0, 2.0), (PrefetchMode.WAIT, 4, 99.0)],
)
def test_the_policy_decides_how_long_a_request_waits_for_a_store(
    mode: PrefetchMode, num_loaded: int, waits_until_s: float, tmp_path: Path
) -> None:
    first = Engine(disk=DiskTier(tmp_path / "pages", **SIZES))
    first.compute(TOKENS)
    first.index.close()
    policy = PrefetchPolicy(mode=mode, base_s=2.0, per_1024_tokens_s=0.0)
    engine = Engine(disk=DiskTier(tmp_path / "pages", **SIZES), prefetch=policy)
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    for now_s in (0.0, 1.0, 2.0, 99.0):
        engine.now_s = now_s
        if now_s == 99.0:
            engine.finish(recall)
        else:
            assert engine.index.advance(recall, engine.allocator.alloc) == (now_s < waits_until_s)
    assert engine.index.counters.num_loaded == num_loaded
    engine.index.close()


def test_a_recall_without_free_device_pages_does_not_delay_admission() -> None:
    engine = Engine()
    engine.compute(TOKENS)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    assert not engine.index.advance(recall, lambda _: None)
    assert not recall.is_over
    assert (engine.index.num_locked, engine.host.num_pinned) == (0, 0)
    engine.finish(recall)
    assert engine.contents(TOKENS) == [1, 3, 5, 7]
    engine.index.close()


def test_a_failed_load_returns_its_device_pages() -> None:
    engine = Engine()
    engine.compute(TOKENS)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    engine.device.num_writes_failing = 1
    engine.finish(recall)
    assert (engine.index.peek(TOKENS).num_tokens, engine.index.num_pages, engine.allocator.num_free) == (0, 4, 4)
    assert engine.evict() == 4
    assert engine.allocator.num_free == 8
    assert engine.index.locate(TOKENS).num_host == 8
    engine.index.close()


def test_a_failed_copy_to_the_host_is_tried_again_at_eviction() -> None:
    engine = Engine()
    engine.device.num_reads_failing = 1
    engine.compute(TOKENS)
    engine.evict()
    assert engine.index.locate(TOKENS).num_host == 8
    engine.index.close()


class Gate:
    """A device or a store that stops in a copy until `go_on` is set."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.reached, self.go_on = Event(), Event()

    @property
    def page_bytes(self) -> int:
        return self.inner.page_bytes

    def pause(self) -> None:
        self.reached.set()
        assert self.go_on.wait(20)

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        self.inner.read(pages, memory, slots)

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        self.pause()
        self.inner.write(pages, memory, slots, arrived)

    def put(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
        self.inner.put(keys, pages)

    def get(self, keys: Sequence[bytes], pages: Sequence[Bytes]) -> list[bool]:
        self.pause()
        return self.inner.get(keys, pages)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        return self.inner.exists(keys)

    def close(self) -> None:
        self.inner.close()


def test_pages_of_a_cancelled_load_come_back_only_when_the_copy_has_ended() -> None:
    layers = [np.zeros((8, PAGE_BYTES // 2), np.uint8) for _ in range(2)]
    gate = Gate(ArrayPages([[layer] for layer in layers]))
    engine = Engine(device=gate, lanes=thread_lanes())
    engine.layers = layers
    engine.compute(TOKENS)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    assert engine.index.advance(recall, engine.allocator.alloc)
    load = recall.load
    assert load is not None
    assert gate.reached.wait(20)
    engine.index.cancel(recall)
    assert (engine.index.num_loading, engine.index.num_evictable, engine.index.num_locked) == (4, 0, 0)
    assert engine.evict() == 0
    gate.go_on.set()
    engine.lanes.load.wait(load)
    assert engine.evict() == 4
    assert engine.allocator.num_free == 8
    assert load.num_layers == 1  # the second was not copied
    engine.index.close()


def test_slots_of_a_cancelled_fetch_come_back_only_when_the_store_has_returned(tmp_path: Path) -> None:
    first = Engine(disk=DiskTier(tmp_path / "pages", **SIZES))
    first.compute(TOKENS)
    first.index.close()
    gate = Gate(DiskTier(tmp_path / "pages", **SIZES))
    disk: PageStore = gate
    engine = Engine(disk=disk, lanes=thread_lanes())
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    assert gate.reached.wait(20)
    engine.index.cancel(recall)
    engine.index.poll()
    assert engine.host.num_taken == 4
    engine.index.check()
    gate.go_on.set()
    engine.index.close()
    assert engine.host.num_taken == 0


def test_the_host_keeps_pages_until_the_stores_have_been_offered_them(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "pages", page_bytes=PAGE_BYTES, num_bytes=10_000)
    engine = Engine(num_host_pages=4, disk=disk, write_policy=WritePolicy.WRITE_BACK)
    engine.compute(TOKENS)
    engine.evict()
    engine.compute(TOKENS + 100)
    engine.evict()  # no room on the host: these pages are lost, not those that wait for the disk
    assert engine.index.counters.num_dropped == 4
    engine.index.flush()
    assert engine.index.locate(TOKENS).num_tokens == 8
    engine.compute(TOKENS + 100)
    engine.evict()
    engine.index.flush()
    assert engine.index.locate(TOKENS) == Hits(num_device=0, num_host=0, num_disk=8, num_remote=0, num_usable=8)
    engine.index.close()


def test_arguments_that_do_not_fit_together_are_errors() -> None:
    with pytest.raises(ValueError, match="host must have the device's page size, 8 bytes, got 16 bytes"):
        Engine(device=ArrayPages([[np.zeros((2, 8), np.uint8)]]))
    with pytest.raises(ValueError, match="min_uses must be >= 1, got 0"):
        Engine(min_uses=0)
    with pytest.raises(ValueError, match="cache must have the method watch_group, got PlainCache"):
        Engine().index.watch_group()
    with pytest.raises(ValueError, match="cache must have the method explain, got PlainCache"):
        Engine().index.explain(np.zeros(4, np.int32))
    with pytest.raises(ValueError, match=r"base_s must be >= 0, got -1"):
        PrefetchPolicy(base_s=-1)


def test_an_index_that_is_replaced_copies_nothing_more_out_of_the_device(tmp_path: Path) -> None:
    """An index is replaced when the device's pages can no longer be trusted."""
    disk = DiskTier(tmp_path / "pages", **SIZES)
    engine = Engine(disk=disk, write_policy=WritePolicy.WRITE_BACK)
    engine.compute(TOKENS[:4])
    engine.evict()
    engine.compute(TOKENS)
    engine.index.close(keep_stores=True)
    assert (engine.host.num_held, engine.host.num_pinned, disk.num_held) == (2, 0, 2)
    engine.host.take(32)  # nothing is pinned, so all slots can be taken
    disk.close()


class Ledger:
    """Keeps account of what an index tells a holder; pages in `lacking` lack something."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.adopted: list[int] = []
        self.given_back: list[int] = []
        self.lacking: set[int] = set()

    def hold(self, pages: Sequence[int]) -> None:
        self.held += pages

    def let_go(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.held.remove(page)

    def first_lacking(self, pages: Sequence[int], num_pages: int) -> int:
        return next((place for place, page in enumerate(pages) if page in self.lacking), len(pages))

    def adopt(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        assert len(pages) == len(slots)
        self.adopted += pages

    def fill(self, cached: Sequence[int], pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> int:
        assert len(cached) == len(pages) == len(slots)
        num_filled = len(self.lacking.intersection(cached))
        self.lacking.difference_update(cached)
        return num_filled

    def give_back(self, pages: Sequence[int]) -> None:
        self.given_back += pages


def test_a_holder_keeps_pages_while_they_are_copied() -> None:
    ledger = Ledger()
    engine = Engine(holder=ledger)
    engine.compute(TOKENS)
    assert sorted(ledger.held) == sorted(engine.index.peek(TOKENS).pages.tolist())
    engine.index.finish_copies()
    assert not ledger.held
    assert engine.index.counters.num_demoted == 4


def test_a_holder_gets_every_page_of_a_recall_as_cached_or_back() -> None:
    ledger = Ledger()
    engine = Engine(holder=ledger)
    engine.compute(TOKENS)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    assert engine.index.advance(recall, engine.allocator.alloc)
    first = recall.pages.tolist()
    engine.index.cancel(recall)
    engine.lanes.load.wait(engine.index._recalls._abandoned[0].transfer)  # pyright: ignore[reportPrivateUsage]
    engine.index.poll()
    assert (ledger.adopted, ledger.given_back) == ([], first)
    again = engine.index.recall(TOKENS)
    assert again is not None
    engine.finish(again)
    assert ledger.adopted == engine.index.peek(TOKENS).pages.tolist()


def test_cached_pages_that_lack_something_are_filled_from_the_host() -> None:
    ledger = Ledger()
    engine = Engine(holder=ledger)
    engine.compute(TOKENS)
    engine.index.flush()
    pages = engine.index.peek(TOKENS).pages.tolist()
    assert engine.index.recall(TOKENS) is None
    ledger.lacking = {pages[2]}
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    engine.finish(recall)
    assert not ledger.lacking
    assert engine.index.peek(TOKENS).pages.tolist() == pages
    assert len(ledger.given_back) == 2  # from the one that lacked something on
    assert engine.index.counters.num_loaded == 1
    engine.host.clear()
    ledger.lacking = {pages[2]}
    assert engine.index.recall(TOKENS) is None  # the host does not have it


def test_pages_are_copied_before_they_lose_a_part() -> None:
    engine = Engine(write_policy=WritePolicy.WRITE_BACK)
    engine.compute(TOKENS)
    pages = engine.index.peek(TOKENS).pages
    engine.index.keep(pages[2:])
    assert engine.host.num_held == 2
    engine.evict()
    assert engine.host.num_held == 4
    assert engine.index.counters.num_demoted == 4


def remote(folder: Path) -> SharedFolder:
    return SharedFolder(folder, **SIZES)


def test_pages_are_on_their_way_until_the_store_has_them(tmp_path: Path) -> None:
    engine = Engine(remote=remote(tmp_path))
    engine.compute(TOKENS)
    index = engine.index
    keys = index.keys_of(TOKENS)
    assert len(keys) == 4
    assert index.unstored() == set(keys)  # to the host
    engine.run_lane("demote")
    assert index.unstored() == set(keys)
    index.poll()
    assert index.unstored() == set(keys)  # to the store
    engine.run_lane("store")
    index.poll()
    assert index.unstored() == set()
    other = remote(tmp_path)
    assert other.exists(keys) == [True] * 4


def test_pages_whose_copy_fails_are_not_waited_for(tmp_path: Path) -> None:
    engine = Engine(remote=remote(tmp_path))
    engine.device.num_reads_failing = 1
    engine.compute(TOKENS)
    engine.run_lane("demote")
    engine.index.poll()
    assert engine.index.unstored() == set()
    idle = Engine(remote=remote(tmp_path), write_policy=WritePolicy.WRITE_BACK)
    idle.compute(TOKENS)
    assert idle.index.unstored() == set()


def test_a_probe_counts_all_tiers_and_copies_nothing(tmp_path: Path) -> None:
    writer = Engine(remote=remote(tmp_path))
    writer.compute(TOKENS)
    writer.index.flush()
    reader = Engine(remote=remote(tmp_path), lanes=manual_lanes())
    probe = reader.index.probe(TOKENS)
    assert reader.index.num_found(probe) is None
    reader.run_lane("fetch")
    assert reader.index.num_found(probe) == 8
    longer = np.append(TOKENS, [50, 51, 52]).astype(np.int32)
    probe = reader.index.probe(longer)
    reader.run_lane("fetch")
    assert reader.index.num_found(probe) == 8
    probe = reader.index.probe(TOKENS, "another")
    reader.run_lane("fetch")
    assert reader.index.num_found(probe) == 0
    reader.compute(TOKENS[:4])
    assert reader.index.num_found(reader.index.probe(TOKENS[:5])) == 4  # nothing to ask the store
    assert reader.index.peek(TOKENS).num_tokens == 4
    reader.index.check()


def test_what_is_near_is_on_the_device_the_host_or_the_disk(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "pages", **SIZES)
    writer = Engine(disk=disk, remote=remote(tmp_path / "shared"))
    writer.compute(TOKENS)
    writer.index.flush()
    writer.index.clear()
    assert writer.index.num_near(TOKENS) == 8
    reader = Engine(remote=remote(tmp_path / "shared"))
    assert reader.index.num_near(TOKENS) == 0
    reader.compute(TOKENS[:4])
    assert reader.index.num_near(TOKENS) == 4


def test_a_disk_that_does_not_answer_counts_as_empty(tmp_path: Path) -> None:
    class Silent:
        def __init__(self, disk: DiskTier) -> None:
            self.put, self.get, self.close = disk.put, disk.get, disk.close

        def exists(self, keys: Sequence[bytes]) -> list[bool]:
            raise OSError("no connection")

    engine = Engine(disk=Silent(DiskTier(tmp_path / "pages", **SIZES)))
    engine.compute(TOKENS)
    engine.index.flush()
    engine.index.clear()
    assert engine.index.num_near(TOKENS) == 0
    assert engine.index.recall(TOKENS) is None


def test_a_store_that_says_nothing_counts_as_empty_after_a_time(tmp_path: Path) -> None:
    engine = Engine(remote=remote(tmp_path), prefetch=PrefetchPolicy(base_s=2.0))
    engine.compute(TOKENS[:4])
    probe = engine.index.probe(TOKENS)
    engine.now_s = 1.9
    assert engine.index.num_found(probe) is None
    engine.now_s = 2.0
    assert engine.index.num_found(probe) == 4
    engine.run_lane("fetch")
    assert engine.index.num_found(probe) == 4


def test_a_store_without_room_for_the_question_counts_as_empty(tmp_path: Path) -> None:
    engine = Engine(remote=remote(tmp_path), lanes=manual_lanes(max_pending=1))
    first, second = engine.index.probe(TOKENS), engine.index.probe(TOKENS)
    assert engine.index.num_found(first) is None
    assert engine.index.num_found(second) == 0


def test_stores_are_closed_with_the_last_of_the_indices_beside_each_other(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path / "pages", **SIZES)
    engine = Engine(disk=disk)
    first, second = engine.index, engine.index.beside(PlainCache(PAGE))
    engine.compute(TOKENS)
    first.close()
    assert disk.num_held == 0
    engine.index = second
    engine.compute(TOKENS + 1)
    second.close()  # the pages of both are stored
    with_both = DiskTier(tmp_path / "pages", **SIZES)
    assert with_both.num_held == 8
    with_both.close()


def test_a_log_follows_one_cache_only() -> None:
    log = TierLog(KeyChain(PAGE, fingerprint=b""), page_size=PAGE)
    alone, index = Engine().index, Engine().index
    index.beside(PlainCache(PAGE))
    with pytest.raises(ValueError, match="log must follow an index without others beside it, got 2 indices"):
        index.follow_tiers(log)
    alone.follow_tiers(log)
    with pytest.raises(ValueError, match="an index whose tiers are followed by a log must have no other beside it"):
        alone.beside(PlainCache(PAGE))
