"""Snapshots as callers see them, and what `check` detects."""

from collections.abc import Callable

import numpy as np
import pytest

from pagewood.radixcache import Cause, RadixCache
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.node import Node
from pagewood.radixcache.snapshots import Snapshots

PROMPT = (1, 1, 2, 2, 3, 3, 4, 4)


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


def filled(*sequences: tuple[int, ...]) -> RadixCache:
    """Return a cache with pages of two tokens; page ids count up."""
    cache = RadixCache(2, history_tokens=100, clock=lambda: 7.0)
    for tokens in sequences or (PROMPT,):
        cache.insert(ids(*tokens), np.arange(cache.num_pages, cache.num_pages + len(tokens) // 2, dtype=np.int32))
    return cache


def node_of(cache: RadixCache, *tokens: int) -> Node:
    return cache.peek(ids(*tokens)).node


def test_a_match_that_needs_a_snapshot_ends_at_the_last_one() -> None:
    cache = filled()
    assert cache.match(ids(*PROMPT), needs_snapshot=True).num_tokens == 0
    assert cache.attach(node_of(cache, 1, 1), 5)
    assert cache.attach(node_of(cache, 1, 1, 2, 2, 3, 3), 6)  # both within the one edge of the tree
    match = cache.match(ids(*PROMPT, 9), needs_snapshot=True)
    assert (match.num_tokens, match.pages.tolist()) == (6, [0, 1, 2])
    assert match.partial is None  # the next page is cached, but no state from which to continue there
    assert cache.snapshot(cache.lock(match.node)) == 6
    assert cache.peek(ids(1, 1, 2, 2), needs_snapshot=True).num_tokens == 2
    assert cache.match(ids(*PROMPT)).num_tokens == 8
    assert cache.snapshot(node_of(cache, *PROMPT)) is None
    assert cache.snapshot(cache.root()) is None
    cache.check()


def test_a_second_snapshot_of_a_prefix_is_declined() -> None:
    cache = filled()
    node = node_of(cache, *PROMPT)
    assert cache.attach(node, 5)
    assert not cache.attach(node, 6)
    assert (cache.snapshot(node), cache.num_snapshots) == (5, 1)
    with pytest.raises(ValueError, match=r"snapshot must be below 2\*\*31 and not be attached already, got 5"):
        cache.attach(node_of(cache, 1, 1), 5)
    with pytest.raises(ValueError, match="node must have a page to attach a snapshot"):
        cache.attach(cache.root(), 6)
    cache.evict(4)
    with pytest.raises(ValueError, match="node must be cached"):
        cache.attach(node, 6)
    with pytest.raises(ValueError, match="not be attached already, got 5"):
        cache.attach(cache.insert(ids(8, 8), ids(9)).node, 5)  # not returned yet


REMOVALS: dict[str, Callable[[RadixCache], object]] = {
    "evict": lambda cache: cache.evict(2),
    "clear": lambda cache: cache.clear(),
    "release": lambda cache: cache.release(cache.root()),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_a_snapshot_is_returned_once_its_pages_are_gone(remove: Callable[[RadixCache], object]) -> None:
    cache = filled()
    cache.attach(node_of(cache, *PROMPT), 5)
    lease = cache.lock(node_of(cache, 1, 1))
    cache.attach(lease, 6)
    remove(cache)
    assert cache.num_snapshots == 2
    assert cache.evict_snapshots(0).tolist() == [5]
    assert cache.evict_snapshots(9).tolist() == []  # the other one is locked
    cache.unlock(lease)
    assert cache.evict_snapshots(9).tolist() == [6]
    assert cache.num_snapshots == 0
    cache.check()


def test_superseded_snapshots_are_evicted_before_branch_points() -> None:
    cache = filled(PROMPT, (1, 1, 5, 5, 6, 6))
    for snapshot, tokens in enumerate([(1, 1), (1, 1, 2, 2), (1, 1, 2, 2, 3, 3), (1, 1, 5, 5), (1, 1, 5, 5, 6, 6)]):
        cache.attach(node_of(cache, *tokens), snapshot)
    cache.match(ids(*PROMPT[:6]), needs_snapshot=True)  # a use of 2, which supersedes 1
    assert [cache.evict_snapshots(1).tolist() for _ in range(5)] == [[1], [3], [0], [4], [2]]


def test_a_use_of_a_superseded_snapshot_keeps_it() -> None:
    cache = filled()
    for snapshot, tokens in enumerate([(1, 1), (1, 1, 2, 2)]):
        cache.attach(node_of(cache, *tokens), snapshot)
    cache.match(ids(1, 1, 9, 9), needs_snapshot=True)  # a prompt that branches off between the two
    assert [cache.evict_snapshots(1).tolist() for _ in range(2)] == [[1], [0]]


def test_explain_says_which_snapshot_is_missing() -> None:
    cache = filled()
    why = cache.explain(ids(*PROMPT, 9), needs_snapshot=True)
    assert (why.cause, why.num_tokens, why.num_possible_tokens, why.first_difference) == (Cause.NO_SNAPSHOT, 0, 8, 8)
    cache.attach(node_of(cache, 1, 1, 2, 2), 5)
    assert cache.evict_snapshots(1).tolist() == [5]
    why = cache.explain(ids(*PROMPT), needs_snapshot=True)
    assert (why.cause, why.num_tokens, why.num_possible_tokens) == (Cause.SNAPSHOT_EVICTED, 0, 4)
    assert (why.evicted_by, why.evicted_at_s) == ("evict_snapshots", 7.0)
    cache.attach(node_of(cache, *PROMPT), 5)
    assert cache.explain(ids(*PROMPT), needs_snapshot=True).cause is Cause.COMPLETE
    assert cache.explain(ids(9, 9), needs_snapshot=True) == cache.explain(ids(9, 9))


def test_page_ids_beyond_all_places_have_no_snapshot() -> None:
    cache = RadixCache(1)
    cache.insert(ids(1, 2), ids(1023, 5000))
    assert cache.attach(node_of(cache, 1), 0)
    assert cache.peek(ids(1, 2), needs_snapshot=True).num_tokens == 1
    cache.check()


def lose(snapshots: Snapshots) -> None:
    snapshots._others.popitem()  # pyright: ignore[reportPrivateUsage]


def misplace(snapshots: Snapshots) -> None:
    _, attached = snapshots._others.popitem()  # pyright: ignore[reportPrivateUsage]
    snapshots._others[2] = attached  # pyright: ignore[reportPrivateUsage]
    snapshots._is_place[[2, 3]] = True, False  # pyright: ignore[reportPrivateUsage]


def unmark(snapshots: Snapshots) -> None:
    snapshots._is_place[:] = False  # pyright: ignore[reportPrivateUsage]


def remember_what_is_gone(snapshots: Snapshots) -> None:
    snapshots._evicted_at_s[77] = 0.0  # pyright: ignore[reportPrivateUsage]
    snapshots._is_place[77] = True  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lose, "the owned snapshots must be"),
        (misplace, "a snapshot must be stored under the last page"),
        (unmark, "_is_place must be true"),
        (remember_what_is_gone, "a page that had a snapshot must be cached"),
    ],
)
def test_check_detects_damage(damage: Callable[[Snapshots], None], rule: str) -> None:
    cache = filled()
    cache.attach(node_of(cache, *PROMPT), 5)
    cache.check()
    damage(cache._snapshots)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=rule):
        cache.check()
