"""A tiered index over a radix cache is the same cache, as far as the device goes: it passes the cache's own machine."""

import numpy as np
import pytest
from hypothesis import settings

from pagewood.kvpool.tiers import ArrayPages, HostTier, KeyChain, PrefetchPolicy, TieredIndex
from pagewood.kvpool.tiers.plain_cache import PlainCache
from pagewood.kvpool.tiers.testing import manual_lanes
from pagewood.radixcache import LRU, CacheKey, RadixCache, Retained
from pagewood.radixcache.events import EventLog, RemoteIndex
from pagewood.radixcache.testing import ManualClock, conformance_machine

CLOCK = ManualClock()
PAGE_BYTES = 8


def device() -> ArrayPages:
    return ArrayPages([[np.zeros((4096, PAGE_BYTES), np.uint8)]])


def tiered(page_size: int) -> TieredIndex:
    return TieredIndex(
        RadixCache(page_size, policy=Retained(LRU(), clock=CLOCK)),
        device=device(),
        host=HostTier(page_bytes=PAGE_BYTES, num_pages=16),
        page_size=page_size,
        lanes=manual_lanes(),
    )


Conformance = conformance_machine(tiered, page_size=2, make_policy=lambda: Retained(LRU(), clock=CLOCK), clock=CLOCK)
Conformance.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestConformance = Conformance.TestCase


def ids(*items: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(items, np.int32)


def test_events_and_live_matches_are_those_of_the_device() -> None:
    index = tiered(1)
    log, remote = EventLog(index), RemoteIndex()
    remote.apply(log.read(None))
    watch = index.watch(ids(1, 2, 3), ("salt", "adapter", 1))
    node = index.insert(ids(1, 2), ids(10, 11), ("salt", "adapter", 1)).node
    remote.apply(log.read(remote.position))
    assert watch.num_tokens == remote.match(ids(1, 2, 3), ("salt", "adapter", 1)) == 2
    assert [run.pages.tolist() for run in index.runs()] == [[10, 11]]
    assert index.release(node).tolist() == [10, 11]
    assert (watch.num_tokens, index.num_pages_in(("salt", "adapter", 1))) == (0, 0)


def test_each_part_of_a_key_keeps_pages_of_lower_tiers_apart() -> None:
    short = [None, "a", "ab", ("a",), CacheKey(None, "ab"), CacheKey("a", "b"), CacheKey("a", rope="b")]
    keys = [*short, CacheKey("a", "b", 1), CacheKey("a", "b", "1"), CacheKey("a", "b", None, 1)]
    chain = KeyChain(1, fingerprint=b"model")
    assert len({chain.root(key) for key in keys}) == len(keys)
    assert chain.root(CacheKey("a", "b", 1)) == chain.root(("a", "b", 1, None, None))


def test_a_cache_without_these_methods_says_so() -> None:
    index = TieredIndex(PlainCache(1), device=device(), host=HostTier(page_bytes=PAGE_BYTES, num_pages=4), page_size=1)
    for call in (
        lambda: index.watch(ids(1)),
        lambda: index.limit("a", quota=1),
        lambda: index.retain(index.peek(ids(1)).node, priority=1),
        lambda: index.observe(None),
    ):
        with pytest.raises(ValueError, match=r"cache must have the method \w+, got PlainCache"):
            call()
    index.close()


def test_less_than_the_minimum_is_not_recalled() -> None:
    def recalled(min_tokens: int) -> bool:
        index = TieredIndex(
            RadixCache(2),
            device=device(),
            host=HostTier(page_bytes=PAGE_BYTES, num_pages=16),
            page_size=2,
            lanes=manual_lanes(),
            prefetch=PrefetchPolicy(min_tokens=min_tokens),
        )
        index.insert(ids(1, 2, 3, 4), ids(0, 1))
        index.evict(2)
        recall = index.recall(ids(1, 2, 3, 4, 5))
        if recall is not None:
            index.cancel(recall)
        return recall is not None

    assert [recalled(0), recalled(4), recalled(5)] == [True, True, False]
    with pytest.raises(ValueError, match="min_tokens must be >= 0, got -1"):
        PrefetchPolicy(min_tokens=-1)
