"""The promises of `RadixCache`, one test each; the conformance machine (test_testing.py) combines them."""

import re

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from pagewood.radixcache import RadixCache
from pagewood.radixcache.arrays import Int32


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


def filled(page_size: int, *sequences: Int32) -> RadixCache:
    """Return a cache of these sequences; pages are numbered in order of insertion."""
    cache = RadixCache(page_size)
    for sequence in sequences:
        num_pages = len(sequence) // page_size
        existing = cache.peek(sequence).pages
        fresh = np.arange(cache.num_pages, cache.num_pages + num_pages - len(existing), dtype=np.int32)
        cache.insert(sequence, np.concatenate((existing, fresh)))
    return cache


def test_match_of_an_empty_cache_is_the_root() -> None:
    cache = RadixCache(4)
    match = cache.match(ids(1, 2, 3, 4), "tenant")
    assert (match.num_tokens, match.pages.tolist(), match.pages.dtype) == (0, [], np.int32)
    assert repr(match.node) == "Node(namespace='tenant', num_pages=0)"
    cache.check()


def test_only_whole_pages_are_cached() -> None:
    cache = RadixCache(2)
    insertion = cache.insert(ids(1, 2, 3, 4, 5), ids(10, 11, 12))
    assert (insertion.num_existing, insertion.node.num_pages, cache.num_pages) == (0, 2, 2)
    match = cache.match(ids(1, 2, 3))
    assert (match.num_tokens, match.pages.tolist()) == (2, [10])


def test_a_match_is_a_snapshot() -> None:
    cache = filled(1, ids(1, 2, 3))
    match = cache.match(ids(1, 2, 3))
    cache.evict(3)
    cache.insert(ids(1, 2, 3), ids(7, 8, 9))
    assert match.pages.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        match.pages[0] = 5


def test_arrays_are_copied_on_insert() -> None:
    cache = RadixCache(1)
    tokens, pages = ids(1, 2), ids(10, 11)
    cache.insert(tokens, pages)
    tokens[:] = pages[:] = 0
    assert cache.match(ids(1, 2)).pages.tolist() == [10, 11]


def test_strided_arrays_are_accepted() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1, 0, 2, 0)[::2], ids(11, 10)[::-1])
    assert cache.match(ids(1, 0, 2)[::2]).pages.tolist() == [10, 11]


@given(
    st.integers(1, 3),
    st.lists(st.lists(st.integers(0, 1), max_size=9), max_size=6),
    st.lists(st.integers(0, 1), max_size=9),
)
def test_match_and_peek_split_nothing(page_size: int, sequences: list[list[int]], probe: list[int]) -> None:
    cache = filled(page_size, *(ids(*sequence) for sequence in sequences))
    before = cache.dump()
    peeked = cache.peek(ids(*probe))
    assert cache.dump() == before
    matched = cache.match(ids(*probe))
    assert without_ranks(cache.dump()) == without_ranks(before)
    assert peeked.pages.tolist() == matched.pages.tolist()
    cache.check()


def without_ranks(dump: str) -> str:
    return re.sub(r"rank \d+", "", dump)


def test_match_counts_as_use_and_peek_does_not() -> None:
    cache = filled(1, ids(1), ids(2), ids(3))
    cache.match(ids(1))
    cache.peek(ids(2))
    assert cache.evict(2).tolist() == [1, 2]


def test_a_match_inside_an_edge_is_not_a_use_of_its_tail() -> None:
    cache = filled(1, ids(1, 2, 3), ids(9))
    cache.unlock(cache.lock(cache.match(ids(1, 2)).node))
    assert [cache.evict(1).tolist() for _ in range(4)] == [[2], [3], [1], [0]]


def test_a_lease_inside_an_edge_locks_only_its_prefix() -> None:
    cache = filled(1, ids(1, 2, 3, 4))
    lease = cache.lock(cache.match(ids(1, 2, 9)).node)
    assert (cache.num_locked, cache.num_evictable) == (2, 2)
    assert sorted(cache.evict(9).tolist()) == [2, 3]
    cache.unlock(lease)
    assert sorted(cache.evict(9).tolist()) == [0, 1]


def test_a_handle_from_before_a_split_can_be_locked_and_unlocked() -> None:
    cache = filled(1, ids(1, 2, 3, 4))
    early = cache.peek(ids(1, 2)).node
    cache.insert(ids(1, 2, 3, 7), ids(0, 1, 2, 9))
    cache.insert(ids(1, 8), ids(0, 10))
    lease = cache.lock(early)
    assert cache.num_locked == lease.num_pages == 2
    cache.unlock(early)
    assert cache.num_locked == 0


def test_a_lease_survives_splits_above_its_end() -> None:
    cache = filled(1, ids(1, 2, 3, 4))
    lease = cache.lock(cache.match(ids(1, 2, 3, 4)).node)
    cache.insert(ids(1, 2, 9), ids(0, 1, 20))
    insertion = cache.insert(ids(5), ids(21), after=lease)
    assert insertion.node.num_pages == 5
    assert cache.match(ids(1, 2, 3, 4, 5)).pages.tolist() == [0, 1, 2, 3, 21]
    cache.unlock(lease)
    cache.check()
    assert cache.num_locked == 0


def test_duplicate_pages_still_belong_to_the_caller() -> None:
    cache = filled(1, ids(1, 2))
    insertion = cache.insert(ids(1, 2, 3), ids(50, 51, 52))
    assert insertion.num_existing == 2
    assert cache.match(ids(1, 2, 3)).pages.tolist() == [0, 1, 52]


def test_insert_after_finds_pages_inserted_in_the_meantime() -> None:
    cache = RadixCache(1)
    lease = cache.lock(cache.root("tenant"))
    cache.insert(ids(1, 2), ids(10, 11), "tenant")
    insertion = cache.insert(ids(1, 2, 3), ids(20, 21, 22), after=lease)
    assert insertion.num_existing == 2
    assert cache.num_pages_in("tenant") == 3
    assert cache.num_pages_in() == 0


def test_eviction_trims_a_tail_and_never_takes_more_than_requested() -> None:
    cache = filled(2, ids(1, 1, 2, 2, 3, 3, 4, 4))
    assert cache.evict(1).tolist() == [3]
    assert cache.evict(0).tolist() == []
    assert cache.match(ids(1, 1, 2, 2, 3, 3, 4, 4)).num_tokens == 6
    cache.check()


def test_a_parent_that_becomes_a_leaf_keeps_its_place() -> None:
    cache = filled(1, ids(1), ids(1, 2), ids(5), ids(6))
    cache.match(ids(1))  # now more recent than 5 and 6, but its child is not
    assert [cache.evict(1).tolist() for _ in range(4)] == [[1], [2], [3], [0]]


def test_unlocking_is_a_use() -> None:
    cache = filled(1, ids(1), ids(2))
    lease = cache.lock(cache.peek(ids(1)).node)
    cache.match(ids(2))
    cache.unlock(lease)
    assert cache.evict(1).tolist() == [1]


def test_namespaces_share_only_recency() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1), ids(10), "a")
    cache.insert(ids(1), ids(11), "b")
    cache.insert(ids(1), ids(12))
    assert [cache.peek(ids(1), name).pages.tolist() for name in ("a", "b", None, "c")] == [[10], [11], [12], []]
    assert cache.evict(2).tolist() == [10, 11]


def test_clear_keeps_locked_pages() -> None:
    cache = filled(1, ids(1, 2, 3), ids(1, 2, 4), ids(5))
    cache.insert(ids(1), ids(9), "other")
    lease = cache.lock(cache.match(ids(1, 2)).node)
    assert sorted(cache.clear().tolist()) == [2, 3, 4]
    cache.check()
    assert (cache.num_pages_in(), cache.num_pages_in("other")) == (2, 1)
    assert cache.clear("empty").tolist() == []
    cache.unlock(lease)
    assert sorted(cache.clear().tolist()) == [0, 1]
    cache.check()


def test_a_namespace_without_pages_and_leases_is_forgotten() -> None:
    cache = RadixCache(1)
    cache.insert(ids(), ids(), "empty")
    cache.match(ids(1), "probed")
    cache.insert(ids(1), ids(0), "evicted")
    cache.insert(ids(1), ids(1), "cleared")
    cache.unlock(cache.lock(cache.root("leased")))
    cache.clear("cleared")
    cache.evict(1)
    assert cache.dump() == ""


def test_dump_shows_leases_and_ranks() -> None:
    cache = filled(2, ids(1, 2, 3, 4))
    cache.lock(cache.match(ids(1, 2)).node)
    assert cache.dump().splitlines() == [
        "None: 0 leases",
        "  [0, 1) tokens [1, 2] pages [0] 1 leases, 1 pins",
        "  [1, 2) tokens [3, 4] pages [1] rank 0",
    ]
    assert cache.page_size == 2


def test_an_evicted_prefix_cannot_be_locked() -> None:
    cache = filled(1, ids(1, 2, 3))
    whole, half = cache.match(ids(1, 2, 3)).node, cache.match(ids(1, 2)).node
    cache.evict(1)
    with pytest.raises(ValueError, match=r"node must be cached, got Node\(namespace=None, num_pages=3\)"):
        cache.lock(whole)
    cache.unlock(cache.lock(half))
    cache.evict(2)
    with pytest.raises(ValueError, match="node must be cached"):
        cache.insert(ids(9), ids(9), after=half)
    cache.check()


def test_unlocking_an_unlocked_handle_is_an_error() -> None:
    cache = filled(1, ids(1, 2, 3))
    lease = cache.lock(cache.match(ids(1, 2, 3)).node)
    inside = cache.peek(ids(1, 2)).node
    with pytest.raises(ValueError, match=r"node must be locked, got Node\(namespace=None, num_pages=2\)"):
        cache.unlock(inside)
    cache.insert(ids(1, 2, 9), ids(0, 1, 9))
    with pytest.raises(ValueError, match="node must be locked"):
        cache.unlock(inside)
    cache.unlock(lease)
    with pytest.raises(ValueError, match="node must be locked"):
        cache.unlock(lease)
    with pytest.raises(ValueError, match="node must be locked"):
        cache.unlock(cache.root())
    cache.check()


@pytest.mark.parametrize(
    ("tokens", "rule"),
    [
        ([1, 2], "tokens must be a numpy array, got list"),
        (np.array([1, 2]), "tokens must have dtype int32, got int64"),
        (np.array([1, 2], ">i4"), "tokens must have dtype int32, got >i4"),
        (np.zeros((1, 2), np.int32), "tokens must have 1 dimension, got 2"),
        (np.array(1, np.int32), "tokens must have 1 dimension, got 0"),
    ],
)
def test_bad_tokens_are_refused(tokens: Int32, rule: str) -> None:
    cache = RadixCache(1)
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        cache.match(tokens)
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        cache.peek(tokens)
    with pytest.raises(ValueError, match=f"^{re.escape(rule)}$"):
        cache.insert(tokens, ids(1, 2))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="page_size must be >= 1, got 0"):
        RadixCache(0)
    cache = RadixCache(2)
    with pytest.raises(ValueError, match="pages must have dtype int32, got int64"):
        cache.insert(ids(1, 2), np.array([1]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="pages must hold a page id for each of 2 whole pages, got 1"):
        cache.insert(ids(1, 2, 3, 4), ids(1))
    with pytest.raises(ValueError, match="num_pages must be >= 0, got -1"):
        cache.evict(-1)
    with pytest.raises(ValueError, match="namespace must be that of after, 'a', got 'b'"):
        cache.insert(ids(1, 2), ids(1), "b", after=cache.root("a"))
    assert cache.num_pages == 0


def test_a_handle_of_a_trimmed_prefix_stays_stale_when_the_rest_grows() -> None:
    cache = filled(1, ids(1, 2, 3, 4))
    whole = cache.peek(ids(1, 2, 3, 4)).node
    cache.evict(2)
    lease = cache.lock(cache.match(ids(1, 2)).node)
    cache.insert(ids(8, 9), ids(8, 9), after=lease)
    cache.unlock(lease)
    assert cache.peek(ids(1, 2, 8, 9)).num_tokens == 4
    with pytest.raises(ValueError, match="node must be cached"):
        cache.lock(whole)


@pytest.mark.parametrize("step", [1, 2])  # tokens that lie together, and those that do not
def test_long_sequences_are_searched_like_short_ones(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    long, short = RadixCache(2), RadixCache(2)  # `long` searches without a copy, as if all sequences were long
    for _ in range(300):
        tokens = rng.integers(0, 2, 2 * rng.integers(0, 24), dtype=np.int32)[::step]
        lengths: list[int] = []
        for cache, most in ((long, 0), (short, 8192)):
            monkeypatch.setattr("pagewood.radixcache.arrays._MAX_COPIED", most)
            found = cache.match(tokens)
            fresh = np.arange(cache.num_pages, cache.num_pages + len(tokens) // 2 - len(found.pages), dtype=np.int32)
            insertion = cache.insert(tokens, np.concatenate((found.pages, fresh)))
            assert insertion.num_existing == len(found.pages)
            lengths.append(found.num_tokens)
        assert lengths[0] == lengths[1]
    assert long.dump() == short.dump()
    long.check()
