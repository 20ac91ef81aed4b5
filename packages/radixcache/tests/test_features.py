"""Watches, limits, release, partial pages and explanations, one test for each promise."""

import numpy as np
import pytest

from pagewood.radixcache import CacheKey, Cause, RadixCache
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.events import EventLog, RemoteIndex, block_hashes, from_plain, router_events, to_plain
from pagewood.radixcache.pages import PageSet
from pagewood.radixcache.testing import ManualClock


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


def filled(page_size: int, *sequences: Int32, history_tokens: int = 0) -> RadixCache:
    """Return a cache of these sequences; pages are numbered in order of insertion."""
    cache = RadixCache(page_size, history_tokens=history_tokens, clock=ManualClock())
    for sequence in sequences:
        existing = cache.peek(sequence).pages
        num_new = len(sequence) // page_size - len(existing)
        fresh = np.arange(cache.num_pages, cache.num_pages + num_new, dtype=np.int32)
        cache.insert(sequence, np.concatenate((existing, fresh)))
    return cache


def test_a_watch_follows_inserts_evictions_and_clears() -> None:
    cache = RadixCache(1)
    watch = cache.watch(ids(1, 2, 3, 4))
    other = cache.watch(ids(1, 2), "tenant")
    lengths = [watch.num_tokens]
    cache.insert(ids(1, 2), ids(10, 11))
    lengths.append(watch.num_tokens)
    cache.insert(ids(1, 9), ids(10, 12))
    cache.insert(ids(1, 2, 3, 5), ids(10, 11, 13, 14))
    lengths.append(watch.num_tokens)
    cache.evict(3)
    lengths.append(watch.num_tokens)
    cache.clear()
    lengths.append(watch.num_tokens)
    assert lengths == [0, 2, 3, 2, 0]
    assert repr(other) == "Watch(namespace='tenant', num_tokens=0)"
    watch.close()
    watch.close()
    cache.insert(ids(1), ids(10))
    assert watch.num_tokens == 0
    cache.check()


def test_a_watch_ignores_a_partial_page_and_keeps_no_array() -> None:
    cache, tokens = RadixCache(2), ids(1, 2, 3, 4, 5)
    watch = cache.watch(tokens)
    cache.insert(tokens, ids(2000, 1))
    tokens[:] = 0
    assert watch.num_tokens == 4
    cache.evict(1)
    assert watch.num_tokens == 2


def test_a_group_reports_which_of_its_watches_have_changed() -> None:
    cache = RadixCache(1)
    group, others = cache.watch_group(), cache.watch_group()
    watches = {name: group.watch(name, ids(*tokens)) for name, *tokens in (("a", 1, 2), ("b", 3), ("c", 1, 2, 3))}
    others.watch("d", ids(1))
    cache.watch(ids(1))
    assert group.changed() == []  # the initial length of a watch is not a change
    cache.insert(ids(3), ids(30))
    cache.insert(ids(1, 2), ids(10, 20))
    assert group.changed() == ["b", "a", "c"]
    assert group.changed() == []
    assert others.changed() == ["d"]
    cache.clear()
    cache.insert(ids(1, 2, 3), ids(10, 20, 30))
    watches["c"].close()
    assert [(name, watches[name].num_tokens) for name in group.changed()] == [
        ("a", 2),
        ("b", 0),
    ]  # "a" had been 0


def test_watches_that_change_together_are_reported_in_the_order_of_opening() -> None:
    cache = RadixCache(2)
    group = cache.watch_group()
    for name in range(100):
        group.watch(name, ids(1, 2, 3, 4 + name))
    cache.insert(ids(1, 2, 3, 4), ids(0, 1))
    cache.clear()
    assert group.changed() == list(range(100))


def test_namespaces_over_their_quota_are_evicted_from_first() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1), ids(1), "modest")
    cache.insert(ids(1, 2, 3), ids(2, 3, 4), "greedy")
    cache.limit("greedy", quota=1)
    assert sorted(cache.evict(3).tolist()) == [1, 3, 4]
    assert cache.num_pages_in("modest") == 0
    cache.limit("greedy")
    assert cache.evict(1).tolist() == [2]
    assert cache.namespaces() == ["greedy"]
    cache.check()


def test_a_floor_protects_only_against_other_namespaces() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1, 2, 3), ids(1, 2, 3), "kept")
    cache.insert(ids(1), ids(9), "other")
    cache.limit("kept", floor=2)
    assert cache.num_evictable == 2
    assert sorted(cache.evict(9, "other").tolist()) == [3, 9]
    assert cache.evict(9).tolist() == []
    lease = cache.lock(cache.peek(ids(1), "kept").node)
    assert cache.evict(9, "kept").tolist() == [2]
    cache.unlock(lease)
    assert cache.num_evictable == 0
    with pytest.raises(ValueError, match=r"floor must be in \[0, quota\], got floor 3, quota 2"):
        cache.limit("kept", quota=2, floor=3)
    cache.check()


def test_release_frees_a_branch_up_to_the_next_fork() -> None:
    cache = filled(1, ids(1, 2, 3, 4), ids(1, 2, 7))
    node = cache.peek(ids(1, 2, 3)).node
    assert sorted(cache.release(node).tolist()) == [2, 3]
    assert cache.peek(ids(1, 2, 7)).num_tokens == 3
    with pytest.raises(ValueError, match="node must be cached"):
        cache.release(node)
    lease = cache.lock(cache.peek(ids(1)).node)
    assert sorted(cache.release(cache.peek(ids(1, 2, 7)).node).tolist()) == [1, 4]
    assert cache.release(lease).tolist() == []
    cache.unlock(lease)
    assert cache.release(cache.root()).tolist() == [0]
    cache.check()


def test_partial_finds_the_page_that_shares_most_tokens() -> None:
    cache = filled(4, ids(1, 1, 1, 1, 2, 2, 2, 2), ids(1, 1, 1, 1, 2, 2, 3, 3))
    partial = cache.match(ids(1, 1, 1, 1, 2, 2, 2)).partial
    assert partial is not None
    assert (partial.num_tokens, partial.page) == (3, 1)
    inside = cache.match(ids(1, 1, 5)).partial
    assert inside is not None
    assert (inside.num_tokens, inside.page) == (2, 0)
    assert cache.match(ids(1, 1, 1, 1)).partial is None
    assert cache.match(ids(1, 1, 1, 1, 9)).partial is None
    assert cache.match(ids(9)).partial is None


def test_explain_distinguishes_the_causes() -> None:
    cache = filled(2, ids(1, 1, 2, 2, 3, 3), ids(8, 8), history_tokens=100)
    cache.insert(ids(5, 5, 6, 6), ids(50, 51), "tenant")
    assert cache.explain(ids(1, 1, 2, 2)).cause is Cause.COMPLETE
    rounded = cache.explain(ids(1, 1, 2, 9))
    assert (rounded.cause, rounded.num_tokens, rounded.first_difference) == (Cause.PAGE_ROUNDING, 2, 3)
    assert cache.explain(ids(1, 1, 7, 7)).cause is Cause.NEVER_SEEN
    elsewhere = cache.explain(ids(5, 5, 6, 6))
    assert (elsewhere.cause, elsewhere.num_possible_tokens, elsewhere.namespace) == (Cause.OTHER_NAMESPACE, 4, "tenant")
    cache.evict(2)
    evicted = cache.explain(ids(1, 1, 2, 2, 3, 3))
    assert (evicted.cause, evicted.num_tokens, evicted.num_possible_tokens) == (Cause.EVICTED, 2, 6)
    assert (evicted.evicted_by, evicted.evicted_at_s) == ("LRU", 0.0)
    cache.clear()
    assert cache.explain(ids(1, 1, 2, 2)).evicted_by == "clear"
    cache.release(cache.insert(ids(4, 4), ids(4)).node)
    assert cache.explain(ids(4, 4)).evicted_by == "release"
    cache.check()


def test_history_is_bounded_and_forgets_the_oldest() -> None:
    cache = filled(1, ids(1, 2, 3), ids(4, 5, 6), ids(7, 8, 9), history_tokens=6)
    for _ in range(3):
        cache.evict(3)
        cache.check()
    causes = [cache.explain(ids(*tokens)).cause for tokens in ((1, 2), (4, 5), (7, 8))]
    assert causes == [Cause.NEVER_SEEN, Cause.EVICTED, Cause.EVICTED]


def test_history_stays_small_when_the_same_run_is_evicted_repeatedly() -> None:
    cache = RadixCache(1, history_tokens=10)
    for _ in range(300):
        cache.insert(ids(1, 2), ids(1, 2))
        cache.evict(2)
    history = cache._history  # pyright: ignore[reportPrivateUsage]
    assert history is not None
    assert history.num_tokens == 2
    assert len(history._queue) < 150  # pyright: ignore[reportPrivateUsage]


def test_a_refused_adopt_leaves_the_page_set_unchanged() -> None:
    pages = PageSet()
    pages.adopt(ids(5, 3000))
    for wrong, rule in (
        (ids(1, -2), "pages must be >= 0, got page -2"),
        (ids(7, 1, 7), "pages must be distinct, got page 7 twice"),
        (ids(1, 3000), "pages must not be in the tree already, got page 3000"),
    ):
        with pytest.raises(ValueError, match=rule):
            pages.adopt(wrong)
    pages.adopt(ids())
    pages.drop(ids(5))
    assert [page in pages for page in (1, 5, 7, 3000, 10_000, -1)] == [False, False, False, True, False, False]
    assert len(pages) == 1


def test_a_double_unlock_is_refused_even_with_another_lease() -> None:
    cache = filled(1, ids(1, 2))
    first, second = (cache.lock(cache.match(ids(1, 2)).node) for _ in range(2))
    cache.unlock(first)
    with pytest.raises(ValueError, match="node must be locked"):
        cache.unlock(first)
    assert cache.num_locked == 2
    cache.unlock(second)
    with pytest.raises(ValueError, match="node must be a handle from this cache"):
        RadixCache(1).lock(cache.root())


def test_explain_without_other_namespaces_says_what_it_would_if_there_were_none() -> None:
    cache, alone = RadixCache(2, history_tokens=100), RadixCache(2, history_tokens=100)
    for one in (cache, alone):
        one.insert(ids(1, 1, 2, 2), ids(0, 1), "a")
    cache.insert(ids(1, 1, 3, 3, 5, 5), ids(2, 3, 4), "b")
    for tokens in (ids(1, 1, 2, 2), ids(1, 1, 3, 3, 5), ids(1, 1, 2, 9), ids(7, 7), ids(1, 1, 3)):
        assert cache.explain(tokens, "a", searches_others=False) == alone.explain(tokens, "a")
    assert cache.explain(ids(1, 1, 3, 3), "a").cause is Cause.OTHER_NAMESPACE


KEYS = [
    None,
    "a",
    "ab",
    ("a",),
    CacheKey("a", "b"),
    CacheKey(None, "ab"),
    CacheKey("a", "b", 1),
    CacheKey("a", "b", "1"),
    CacheKey("a", "b", None, 1),
    CacheKey("a", "b", 1, 1),
    CacheKey("a", "b", 1, None, 1),
    CacheKey("a", rope="b"),
]


def test_each_part_of_a_key_keeps_prefixes_apart() -> None:
    cache = RadixCache(1)
    for page, name in enumerate(KEYS):
        assert cache.insert(ids(1), ids(page), name).num_existing == 0
    assert [cache.peek(ids(1), name).pages.tolist() for name in KEYS] == [[page] for page in range(len(KEYS))]
    assert cache.peek(ids(1), ("a", "b", 1, None, None)).pages.tolist() == [KEYS.index(CacheKey("a", "b", 1))]
    assert len({name for key in KEYS for name in block_hashes(ids(1), 1, key)}) == len(KEYS)
    cache.check()


@pytest.mark.parametrize("namespace", [None, "a"])
def test_a_key_of_nothing_but_a_namespace_is_that_namespace(namespace: str | None) -> None:
    cache = RadixCache(1)
    cache.insert(ids(1), ids(0), CacheKey.of(namespace))
    assert cache.namespaces() == [namespace]
    assert CacheKey.of(namespace, rope="long") == CacheKey(namespace, rope="long")
    alone = CacheKey(namespace)
    for call in (lambda: cache.match(ids(1), alone), lambda: list(block_hashes(ids(1), 1, alone))):
        with pytest.raises(ValueError, match=f"namespace must be {namespace!r} where a key says nothing else, got"):
            call()


def test_a_router_reads_the_parts_of_a_key() -> None:
    cache = RadixCache(1)
    log, index = EventLog(cache), RemoteIndex()
    index.apply(log.read(index.position))
    key = CacheKey("salt", "adapter", 3, "weights", rope="long")
    cache.insert(ids(1), ids(0), key)
    update = log.read(index.position)
    [event] = router_events(update.events)
    assert isinstance(event, dict)
    assert (event["cache_salt"], event["lora_name"]) == ("salt", "adapter")
    assert event["weights_version"] == "weights"
    assert event["extra_keys"] == [["adapter", "long", "salt"]]
    assert index.apply(from_plain(to_plain(update)))
    assert index.match(ids(1), key) == 1
    assert index.match(ids(1), CacheKey("salt", "adapter", 3)) == 0
