"""An outline holds the largest branches, and sums of what it has seen."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.radixcache import LFU, LRU, Node, RadixCache, Run

PAGE = 2


def fill(cache: RadixCache, sequences: list[list[int]], *, locked: int = 0, namespaces: int = 1) -> list[Node]:
    """Insert sequences, each token a whole page, and lock the first `locked`; return the leases."""
    next_page, leases = 0, list[Node]()
    for index, items in enumerate(sequences):
        sequence = np.repeat(np.array(items, np.int32), PAGE)
        pages = np.arange(next_page, next_page + len(items), dtype=np.int32)
        next_page += len(items)
        name = None if index % namespaces == 0 else f"tenant {index % namespaces}"
        node = cache.insert(sequence, pages, name).node
        if index < locked:
            leases.append(cache.lock(node))
    return leases


def sums(runs: list[Run]) -> dict[int, tuple[int, int]]:
    """Return first page of each run -> pages and leases of the run and all after it; one run at a time."""
    children: dict[int | None, list[Run]] = defaultdict(list)
    for run in runs:
        children[run.parent_page].append(run)

    def total(run: Run) -> tuple[int, int]:
        below = [total(child) for child in children[int(run.pages[-1])]]
        return len(run.pages) + sum(p for p, _ in below), run.num_leases + sum(n for _, n in below)

    return {int(run.pages[0]): total(run) for run in runs}


SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=25)


@given(SEQUENCES, st.integers(0, 8), st.integers(1, 3), st.integers(1, 12), st.sampled_from([LRU, LFU]))
def test_it_agrees_with_the_runs(
    sequences: list[list[int]], locked: int, namespaces: int, max_branches: int, policy: type[LRU] | type[LFU]
) -> None:
    cache = RadixCache(PAGE, policy=policy())
    fill(cache, sequences, locked=locked, namespaces=namespaces)
    runs = {int(run.pages[0]): run for run in cache.runs()}
    expected = sums(list(runs.values()))
    found = cache.outline(max_branches=max_branches)
    assert (found.is_complete, found.num_runs) == (True, len(runs))
    assert len(found.branches) == min(max_branches, len(runs))
    for rank, branch in enumerate(found.branches):
        run = runs[int(branch.pages[0])]
        assert (branch.num_pages, branch.num_leases) == expected[int(branch.pages[0])]
        assert (branch.namespace, branch.is_locked, branch.num_parent_pages) == (
            run.namespace, run.is_locked, run.num_parent_pages,
        )  # fmt: skip
        assert branch.tokens.tolist() == run.tokens.tolist()
        assert branch.pages.tolist() == run.pages.tolist()
        assert branch.parent < rank
        above = None if branch.parent < 0 else int(found.branches[branch.parent].pages[-1])
        assert above == run.parent_page
    shown = [branch.num_pages for branch in found.branches]
    assert shown == sorted((pages for pages, _ in expected.values()), reverse=True)[:max_branches]
    cache.check()


def test_a_bounded_walk_says_what_it_did_not_see() -> None:
    cache = RadixCache(PAGE)
    fill(cache, [[first, second, first] for first in range(20) for second in range(5)])
    whole = cache.outline(max_visited=120)
    assert (whole.is_complete, whole.num_runs, whole.branches[0].num_pages) == (True, 120, 11)
    part = cache.outline(max_visited=30)
    assert (part.is_complete, part.num_runs, len(part.branches)) == (False, 120, 30)
    assert part.branches[0].num_children == 5
    least = cache.outline(max_visited=1, max_branches=1)
    assert [branch.num_pages for branch in least.branches] == [1]


def test_it_counts_operations_since_the_last_use() -> None:
    for policy in (LRU(), LFU()):
        cache = RadixCache(PAGE, policy=policy)
        fill(cache, [[1], [2], [3]])
        cache.match(np.repeat(np.array([1], np.int32), PAGE))
        idle = {int(branch.tokens[0]): branch.idle for branch in cache.outline().branches}
        assert idle[1] == 0 < idle[3] < idle[2]
        lease = cache.lock(cache.peek(np.repeat(np.array([2], np.int32), PAGE)).node)
        assert {int(branch.tokens[0]): branch.idle for branch in cache.outline().branches}[2] == 0
        cache.unlock(lease)


def test_it_changes_nothing() -> None:
    caches = [RadixCache(PAGE), RadixCache(PAGE)]
    for cache in caches:
        fill(cache, [[1, 2], [1, 3], [4]], locked=1)
    caches[0].outline()
    assert caches[0].dump() == caches[1].dump()
    assert caches[0].evict(2).tolist() == caches[1].evict(2).tolist()


@pytest.mark.parametrize("name", ["max_branches", "max_visited"])
def test_limits_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be >= 1, got 0"):
        RadixCache(PAGE).outline(**{name: 0})
