"""The notifications of an observer add up to the content of the tree."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from pagewood.radixcache import Namespace, RadixCache
from pagewood.radixcache.arrays import Int32


def ids(*items: int) -> Int32:
    return np.array(items, np.int32)


class Mirror:
    """The tree according to the notifications: for each page its namespace, the page before it, and its tokens."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[int, tuple[Namespace, int | None, list[int]]] = {}
        self.calls: list[str] = []

    def stored(self, namespace: Namespace, parent_page: int | None, tokens: Int32, pages: Int32) -> None:
        self.calls.append("stored")
        for page, page_tokens in zip(pages.tolist(), tokens.reshape(-1, self.page_size).tolist(), strict=True):
            assert page not in self.pages
            self.pages[page] = (namespace, parent_page, page_tokens)
            parent_page = page

    def removed(self, namespace: Namespace, pages: Int32) -> None:
        self.calls.append("removed")
        for page in reversed(pages.tolist()):
            assert all(parent != page for _, parent, _ in self.pages.values())
            assert self.pages.pop(page)[0] == namespace

    def cleared(self, namespace: Namespace) -> None:
        self.calls.append(f"cleared {namespace}")


def mirror_of(cache: RadixCache) -> Mirror:
    mirror = Mirror(cache.page_size)
    for run in cache.runs():
        mirror.stored(run.namespace, run.parent_page, run.tokens, run.pages)
    return mirror


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from([None, "a"]), st.lists(st.integers(0, 1), max_size=9)),
        st.integers(0, 5),
        st.sampled_from([None, "a"]),
    ),
    max_size=20,
)


@given(st.integers(1, 3), STEPS)
def test_the_notifications_add_up_to_the_tree(
    page_size: int, steps: list[tuple[Namespace, list[int]] | int | None]
) -> None:
    cache, mirror, num_made = RadixCache(page_size), Mirror(page_size), 0
    cache.observe(mirror)
    for step in steps:
        if isinstance(step, tuple):
            namespace, tokens = step
            cache.insert(ids(*tokens), np.arange(num_made, num_made + len(tokens), dtype=np.int32), namespace)
            num_made += len(tokens)
        elif isinstance(step, int):
            cache.evict(step)
        else:
            cache.clear(step)
        assert mirror_of(cache).pages == mirror.pages


def test_a_clear_reports_the_removals_and_then_itself() -> None:
    cache, mirror = RadixCache(1), Mirror(1)
    cache.insert(ids(1), ids(1))
    cache.observe(mirror)
    cache.insert(ids(1, 2, 3), ids(9, 10, 11))
    cache.lock(cache.match(ids(1, 2)).node)
    assert [run.num_parent_pages for run in cache.runs()] == [0, 1, 2]
    assert mirror.calls == ["stored"]
    assert mirror.pages == {10: (None, 1, [2]), 11: (None, 10, [3])}
    cache.evict(1)
    cache.clear("other")
    assert mirror.calls == ["stored", "removed", "cleared other"]


def test_runs_show_what_is_locked() -> None:
    cache = RadixCache(2)
    cache.insert(ids(1, 2, 3, 4), ids(5, 6))
    cache.lock(cache.match(ids(1, 2)).node)
    first, second = cache.runs()
    assert (first.tokens.tolist(), first.pages.tolist(), first.parent_page) == ([1, 2], [5], None)
    assert (first.num_leases, first.is_locked, second.num_leases, second.is_locked) == (1, True, 0, False)
    assert second.parent_page == 5
