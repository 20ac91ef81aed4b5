"""Policies that fail, and namespaces and policies that are none."""

import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from pagewood.radixcache import (
    ANY,
    FIFO,
    LRU,
    S3FIFO,
    Namespace,
    Policy,
    QueueInformed,
    RadixCache,
    Retained,
    Usage,
)
from pagewood.radixcache.events import EventLog, RemoteIndex, from_plain, to_plain


def ids(*items: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(items, np.int32)


class Failing(Policy):
    """LRU, with a switch for each way to fail."""

    def __init__(self) -> None:
        self.score_is: Any = None
        self.score_raises = self.use_raises = False
        self.raises_for = 0

    def score(self, usage: Usage, num_tokens: int) -> Any:
        if self.score_raises or usage.created == self.raises_for:
            raise OSError("no score")
        return usage.last_used if self.score_is is None else self.score_is

    def used(self, usage: Usage) -> None:
        if self.use_raises:
            raise OSError("no use")


@pytest.mark.parametrize("score", [math.nan, (1, math.nan), ((math.nan,), 2), float("nan")])
def test_a_score_that_is_nan_is_an_error_and_no_page_is_lost(score: object):
    policy = Failing()
    cache = RadixCache(1, policy=policy)
    cache.insert(ids(1), ids(10))
    policy.score_is = score
    cache.insert(ids(2), ids(20))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"score must not be NaN, got .*nan.* from Failing"):
            cache.evict(1)
    policy.score_is = None
    cache.check()
    assert sorted(cache.evict(9).tolist()) == [10, 20]


def test_a_policy_that_raises_never_stops_a_change_halfway():
    policy = Failing()
    cache = RadixCache(1, policy=policy)
    cache.insert(ids(1, 2), ids(10, 11))
    lease = cache.lock(cache.match(ids(1, 2)).node)
    policy.score_raises = True
    cache.insert(ids(1, 3), ids(10, 12))
    cache.insert(ids(4), ids(13))
    cache.unlock(lease)
    assert (cache.num_pages, cache.num_locked, cache.num_evictable) == (4, 0, 4)
    with pytest.raises(OSError, match="no score"):
        cache.evict(1)
    assert cache.num_pages == 4
    policy.score_raises = False
    cache.check()
    assert sorted(cache.evict(9).tolist()) == [10, 11, 12, 13]


def test_an_exception_of_used_is_raised_by_the_next_eviction():
    policy = Failing()
    cache = RadixCache(1, policy=policy)
    policy.use_raises = True
    lease = cache.lock(cache.insert(ids(1), ids(10)).node)
    cache.unlock(lease)
    policy.use_raises = False
    with pytest.raises(OSError, match="no use"):
        cache.evict(1)
    assert cache.evict(1).tolist() == [10]


def test_pages_evicted_before_a_policy_fails_are_returned():
    policy = Failing()
    cache = RadixCache(1, policy=policy)
    cache.insert(ids(1), ids(10))
    cache.insert(ids(2), ids(20))
    policy.raises_for = 2
    assert cache.evict(2).tolist() == [10]
    with pytest.raises(OSError, match="no score"):
        cache.evict(1)
    policy.raises_for = 0
    assert cache.evict(2).tolist() == [20]
    assert cache.num_pages == 0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (FIFO, r"such as LRU\(\), so write FIFO\(\), got <class"),
        ("lru", r"must be an object with the methods of Policy, such as LRU\(\), got 'lru'"),
        (Retained(FIFO), r"so write FIFO\(\), got <class .* in Retained"),  # pyright: ignore[reportArgumentType]
        (QueueInformed(S3FIFO()), "in QueueInformed"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_is_not_a_policy_is_refused(policy: Any, message: str):
    with pytest.raises(ValueError, match=message):
        RadixCache(1, policy=policy)


def test_numbers_of_numpy_are_accepted_as_counts() -> None:
    cache = RadixCache(np.int64(2))  # pyright: ignore[reportArgumentType]
    cache.insert(ids(1, 2, 3, 4, 5, 6), ids(0, 1, 2))
    cache.limit("tenant", quota=np.int64(4), floor=np.int32(1))  # pyright: ignore[reportArgumentType]
    assert cache.evict(np.int64(1)).tolist() == [2]  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"num_pages must be an integer, got 1\.0"):
        cache.evict(1.0)  # pyright: ignore[reportArgumentType]
    assert cache.num_pages == 2
    retained = RadixCache(1, policy=Retained(FIFO()))
    node = retained.insert(ids(1, 2, 3), ids(0, 1, 2)).node
    retained.retain(node, priority=1, start=np.int64(1))  # pyright: ignore[reportArgumentType]
    assert retained.evict(1).tolist() == [2]


@pytest.mark.parametrize("node", [7, None, "node"])
def test_what_is_not_a_handle_is_refused(node: Any) -> None:
    cache = RadixCache(1)
    for call in (cache.lock, cache.unlock, cache.release, partial(cache.relock, cache.lock(cache.root()))):
        with pytest.raises(ValueError, match="node must be a handle from this cache"):
            call(node)


@pytest.mark.parametrize("namespace", ["\ud800", 7, b"x", ["a"], ("a", 1.5), ("\udfff",), (True,), {"a": 1}])
def test_what_is_not_a_namespace_is_refused(namespace: Any):
    cache = RadixCache(1)
    for call in (
        lambda: cache.insert(ids(1), ids(10), namespace),
        lambda: cache.match(ids(1), namespace),
        lambda: cache.watch(ids(1), namespace),
        lambda: cache.limit(namespace, quota=1),
        lambda: cache.root(namespace),
    ):
        with pytest.raises(ValueError, match="namespace must be"):
            call()
    assert cache.num_pages == 0
    assert cache.namespaces() == []


def test_tuples_are_namespaces_that_share_nothing():
    cache = RadixCache(1)
    log, index = EventLog(cache), RemoteIndex()
    index.apply(log.read(None))
    names: list[Namespace] = [None, "", "a", (), ("a",), ("a", None), ("a", "None"), ("a", 1), ("a", "1"), ("a1",)]
    names += [("1:a", "b"), ("1", "a:b")]
    for number, name in enumerate(names):
        cache.insert(ids(number), ids(number), name)
    index.apply(from_plain(to_plain(log.read(index.position))))
    for number, name in enumerate(names):
        for tokens in range(len(names)):
            expected = int(tokens == number)
            assert cache.match(ids(tokens), name).num_tokens == expected
            assert index.match(ids(tokens), name) == expected
    assert cache.namespaces() == names


def test_the_floor_of_the_namespace_none_gives_way_to_itself_only():
    cache = RadixCache(1)
    cache.insert(ids(1), ids(10))
    cache.limit(None, floor=1)
    assert cache.evict(1).tolist() == cache.evict(1, ANY).tolist() == cache.evict(1, "other").tolist() == []
    assert cache.evict(1, None).tolist() == [10]


def test_a_shared_prefix_keeps_its_highest_priority():
    now_s = [0.0]
    cache = RadixCache(1, policy=Retained(LRU(), clock=lambda: now_s[0]))
    shared = cache.insert(ids(1), ids(10)).node
    longer = cache.insert(ids(1, 2), ids(10, 20)).node
    cache.insert(ids(3), ids(30))
    cache.insert(ids(4), ids(40))
    cache.retain(cache.peek(ids(3)).node, priority=2)
    cache.retain(shared, priority=5, until=10.0)
    cache.retain(longer, priority=1, until=20.0)
    assert cache.evict(2).tolist() == [40, 20]
    now_s[0] = 9.0
    assert cache.evict(1).tolist() == [30]  # 2 is less than 5
    cache.insert(ids(3), ids(30))
    now_s[0] = 11.0
    assert cache.evict(1).tolist() == [30]  # 0 is less than 1, to which 5 has fallen back
    cache.insert(ids(3), ids(30))
    now_s[0] = 21.0
    assert cache.evict(1).tolist() == [10]
    with pytest.raises(ValueError, match="until must be a number, got nan"):
        cache.retain(cache.peek(ids(3)).node, priority=1, until=math.nan)
