"""The eviction order of each policy, on traces small enough to follow by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from pagewood.radixcache import (
    FIFO,
    FILO,
    GDSF,
    LFU,
    LRU,
    MRU,
    S3FIFO,
    SLRU,
    Policy,
    QueueInformed,
    RadixCache,
    Retained,
    TailOptimizedLRU,
    Usage,
)
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.order.choice import AnyPolicy, name_of
from pagewood.radixcache.testing import ManualClock


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


def cache_of(policy: AnyPolicy, *tokens: int) -> RadixCache:
    """Return a cache of one-token sequences; the page of a token has the same number as the token."""
    cache = RadixCache(1, policy=policy)
    for token in tokens:
        cache.insert(ids(token), ids(token))
    return cache


def hit(cache: RadixCache, *tokens: int) -> None:
    for token in tokens:
        cache.unlock(cache.lock(cache.match(ids(token)).node))


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (LRU(), [3, 4, 1, 2]),
        (MRU(), [2, 1, 4, 3]),
        (FIFO(), [1, 2, 3, 4]),
        (FILO(), [4, 3, 2, 1]),
        (LFU(), [3, 4, 1, 2]),
        (SLRU(), [3, 4, 1, 2]),
        (SLRU(protected_uses=3), [3, 4, 1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_order(policy: AnyPolicy, order: list[int]) -> None:
    cache = cache_of(policy, 1, 2, 3, 4)
    hit(cache, 1, 2, 2)
    cache.check()
    assert [cache.evict(1).item() for _ in range(4)] == order


def test_lfu_counts_only_locked_matches() -> None:
    cache = cache_of(LFU(), 1, 2)
    hit(cache, 1)
    for _ in range(3):
        cache.match(ids(2))
        cache.peek(ids(2))
        cache.unlock(cache.lock(cache.root()))
    assert cache.evict(1).tolist() == [2]


def test_a_match_alone_counts_for_recency() -> None:
    cache = cache_of(MRU(), 1, 2)
    cache.match(ids(1))
    assert cache.evict(1).tolist() == [1]


def test_slru_protects_pages_used_again_from_newer_ones() -> None:
    cache = cache_of(SLRU(), 1)
    hit(cache, 1)
    cache.insert(ids(2), ids(2))
    cache.insert(ids(3), ids(3))
    assert [cache.evict(1).item() for _ in range(3)] == [2, 3, 1]


def test_gdsf_forgets_former_popularity() -> None:
    cache = cache_of(GDSF(attention_tokens=1), 1)
    hit(cache, 1)  # two uses at a cost of 2: value 4
    cache.insert(ids(2), ids(2))
    assert cache.evict(1).tolist() == [2]
    cache.insert(ids(3), ids(3))  # value 2 above the last evicted page: equal to page 1, but newer
    assert cache.evict(1).tolist() == [1]


def test_gdsf_keeps_pages_that_cost_more_to_compute() -> None:
    cache = RadixCache(1, policy=GDSF(attention_tokens=1))
    cache.insert(ids(1, 2, 3), ids(1, 2, 3))
    cache.insert(ids(4), ids(4))
    assert cache.evict(2).tolist() == [4, 3]


def test_tail_optimised_evicts_pages_not_needed_for_the_target_first() -> None:
    cache = RadixCache(1, policy=TailOptimizedLRU(threshold_tokens=3, next_prompt_tokens=1))
    cache.insert(ids(1, 2), ids(1, 2))  # short: it meets the target without any cached page
    cache.insert(ids(5, 6, 7, 8), ids(5, 6, 7, 8))  # meets the target without the last two
    assert [cache.evict(1).item() for _ in range(6)] == [2, 1, 8, 7, 6, 5]
    cache.insert(ids(5, 6, 7, 8), ids(5, 6, 7, 8))
    cache.insert(ids(1, 2), ids(1, 2))
    assert cache.evict(3).tolist() == [7, 8, 2]  # before less recent pages that are needed


def test_s3_fifo_keeps_a_run_used_twice_in_the_small_queue() -> None:
    cache = cache_of(S3FIFO(), 1, 2, 3)
    hit(cache, 1, 1)
    assert [cache.evict(1).item() for _ in range(2)] == [2, 3]
    cache.check()
    cache.insert(ids(2), ids(2))  # remembered: it enters the main queue directly
    cache.insert(ids(4), ids(4))
    assert [cache.evict(1).item() for _ in range(3)] == [4, 1, 2]


def test_a_priority_holds_until_its_deadline() -> None:
    clock = ManualClock()
    cache = cache_of(Retained(LRU(), clock=clock), 1, 2, 3)
    cache.retain(cache.peek(ids(1)).node, priority=5, until=10.0)
    cache.retain(cache.peek(ids(3)).node, priority=-1)
    assert cache.evict(1).tolist() == [3]
    cache.insert(ids(4), ids(4))
    assert cache.evict(1).tolist() == [2]
    clock.now_s = 10.0
    assert cache.evict(1).tolist() == [1]


def test_a_range_is_retained_from_its_start() -> None:
    clock = ManualClock()
    cache = RadixCache(1, policy=Retained(FIFO(), clock=clock))
    cache.insert(ids(1, 2, 3, 4), ids(1, 2, 3, 4))
    cache.insert(ids(9), ids(9))
    cache.retain(cache.peek(ids(1, 2, 3)).node, priority=1, start=1)
    assert cache.evict(2).tolist() == [4, 9]
    assert [run.pages.tolist() for run in cache.runs()] == [[1], [2, 3]]
    with pytest.raises(ValueError, match=r"start must be a page of Node\(namespace=None, num_pages=3\), got 3"):
        cache.retain(cache.peek(ids(1, 2, 3)).node, priority=1, start=3)
    with pytest.raises(ValueError, match="policy must be Retained"):
        (plain := RadixCache(1)).retain(plain.root(), priority=1)


def test_watched_pages_are_evicted_last_but_are_evicted() -> None:
    cache = RadixCache(1, policy=QueueInformed(LRU()))
    cache.insert(ids(1, 2, 3), ids(1, 2, 3))
    cache.insert(ids(8, 9), ids(8, 9))
    watch = cache.watch(ids(1, 2, 7))
    assert cache.evict(3).tolist() == [3, 8, 9]
    assert watch.num_tokens == 2
    cache.insert(ids(6), ids(6))
    watch.close()
    assert cache.evict(1).tolist() == [2]
    assert cache.watch(ids(1)).num_tokens == 1
    assert sorted(cache.evict(9).tolist()) == [1, 6]


class Recorder(Policy):
    """Records the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def score(self, usage: Usage, num_tokens: int) -> tuple[int, int]:
        return num_tokens, usage.last_used

    def used(self, usage: Usage) -> None:
        usage.age = 1.0
        self.calls.append("used")

    def evicted(self, score: object) -> None:
        self.calls.append(score)


def test_a_policy_is_notified_of_uses_and_evictions() -> None:
    policy = Recorder()
    cache = RadixCache(2, policy=policy)
    cache.insert(ids(1, 2, 3, 4), ids(1, 2))
    cache.evict(1)
    assert policy.calls[0] == "used"
    assert policy.calls[-1] == (4, 1)


def test_names() -> None:
    assert name_of(QueueInformed(Retained(LFU()))) == "QueueInformed(Retained(LFU))"
    assert name_of(S3FIFO()) == "S3FIFO"


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (lambda: SLRU(protected_uses=1), "protected_uses must be >= 2, got 1"),
        (lambda: TailOptimizedLRU(threshold_tokens=-1), "threshold_tokens must be >= 0, got -1"),
        (lambda: GDSF(attention_tokens=0), "attention_tokens must be >= 1, got 0"),
        (lambda: S3FIFO(small_share=1.0), r"small_share must be in \(0, 1\), got 1.0"),
        (lambda: RadixCache(1, history_tokens=-1), "history_tokens must be >= 0, got -1"),
    ],
)
def test_bad_parameters_are_refused(make: Callable[[], object], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        make()


def test_the_heap_does_not_grow_with_uses() -> None:
    cache = cache_of(MRU(), *range(20))
    for _ in range(200):
        hit(cache, *range(20))
    order = cache._tree.order  # pyright: ignore[reportPrivateUsage]
    assert len(order._heap) < 200  # pyright: ignore
    assert math.isinf(Usage(created=0, last_used=0).until)
