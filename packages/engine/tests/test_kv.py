import numpy as np
import pytest

from pagewood.engine.core.memory.caches import NoPrefixCache
from pagewood.engine.core.memory.kv import KVSpace, private_pages
from pagewood.engine.core.request import Request
from pagewood.kvpool import PageAllocator
from parts import make_request, make_space


def computed(kv: KVSpace, prompt: list[int], *, arrival: int = 0) -> Request:
    """Return a request whose whole prompt is computed, but not published."""
    one = make_request(prompt, arrival=arrival)
    assert kv.admit(one, max_tokens=1000, num_reserved=0)
    one.num_computed = len(prompt)
    return one


def test_admission_takes_pages_for_the_granted_tokens_only() -> None:
    kv = make_space()
    one = make_request(list(range(10)))
    assert kv.admit(one, max_tokens=5, num_reserved=0) == 5
    assert (one.num_pages, kv.num_free, kv.num_free_rows) == (2, 14, 3)


def test_admission_declines_when_the_whole_prompt_and_the_reserve_do_not_fit() -> None:
    kv = make_space(num_pages=4)
    assert kv.admit(make_request(list(range(16))), max_tokens=1, num_reserved=1) == 0
    assert (kv.num_free, kv.num_free_rows) == (4, 4)
    assert kv.admit(make_request(list(range(16))), max_tokens=1, num_reserved=0) == 1


def test_admission_declines_without_a_row() -> None:
    kv = make_space(num_rows=1)
    assert kv.admit(make_request([1, 2]), max_tokens=9, num_reserved=0)
    assert kv.admit(make_request([1, 2]), max_tokens=9, num_reserved=0) == 0


def test_the_last_token_is_always_computed() -> None:
    kv = make_space()
    kv.release(computed(kv, list(range(8))))
    again = make_request(list(range(8)))
    assert kv.admit(again, max_tokens=100, num_reserved=0) == 4
    assert (again.num_matched, again.num_cached) == (4, 4)


def test_released_pages_can_be_matched_and_evicted() -> None:
    kv = make_space(num_pages=4)
    kv.release(computed(kv, list(range(12))))
    assert (kv.num_free, kv.num_cached, kv.num_available) == (1, 3, 4)
    other = make_request(list(range(100, 116)))
    assert kv.admit(other, max_tokens=100, num_reserved=0) == 16
    assert (kv.num_free, kv.num_cached) == (0, 0)


@pytest.mark.parametrize(("num_needed", "num_spare"), [(3, 256), (200, 400), (400, 500)])
def test_an_eviction_in_a_large_pool_frees_little_more_than_the_request_needs(num_needed: int, num_spare: int) -> None:
    """Twice what it needs, but at least the pages of 1,024 tokens, and at most 1/256 of 128,000 pages."""
    kv = make_space(num_pages=128_000)
    for start in range(0, 128_000, 4000):
        pages = kv.take(4000, num_available=4000)
        assert pages is not None
        kv.cache.insert(np.arange(4 * start, 4 * (start + 4000), dtype=np.int32), pages)
    assert kv.take(num_needed, num_available=num_needed) is not None
    assert kv.num_free == num_spare


def test_a_lease_keeps_its_pages_from_eviction() -> None:
    kv = make_space(num_pages=4)
    first = computed(kv, list(range(12)))
    kv.publish(first)
    assert kv.num_available == 1
    assert kv.admit(make_request(list(range(100, 112))), max_tokens=100, num_reserved=0) == 0
    assert kv.violation([first]) is None


def test_duplicates_stay_private_until_release() -> None:
    kv = make_space()
    first, second = computed(kv, list(range(8)), arrival=1), computed(kv, list(range(8)), arrival=2)
    pages = second.pages[:2].copy()
    kv.publish(first)
    kv.publish(second)
    assert second.pages[:2].tolist() == pages.tolist()
    assert private_pages(second).tolist() == [*pages, *second.pages[2 : second.num_pages]]
    assert kv.violation([first, second]) is None
    kv.release(second)
    kv.release(first)
    assert (kv.num_free, kv.num_cached) == (14, 2)


def test_growth_is_all_or_nothing() -> None:
    kv = make_space(num_pages=3)
    one = make_request(list(range(4)), max_new=20)
    kv.admit(one, max_tokens=4, num_reserved=0)
    assert not kv.grow(one, 16)
    assert (one.num_pages, kv.num_free) == (1, 2)
    assert kv.grow(one, 12)
    assert kv.grow(one, 12)
    assert (one.num_pages, kv.num_free) == (3, 0)


def test_a_violation_is_described_and_healing_frees_every_page() -> None:
    kv = make_space()
    lost = computed(kv, list(range(8)))
    kv.publish(lost)
    violation = kv.violation(())
    assert violation is not None
    assert "2 cached pages are locked" in violation
    stray = computed(kv, [50, 51], arrival=2)
    assert "private pages are 15, not 16" in (kv.violation([lost]) or "")
    assert "private pages are 17, not 16" in (kv.violation([lost, stray, stray]) or "")
    kv.heal()
    assert (kv.num_free, kv.num_cached, kv.violation(())) == (16, 0, None)


def test_without_a_prefix_cache_pages_go_back_to_the_free_list() -> None:
    kv = KVSpace(make_cache=NoPrefixCache, allocator=PageAllocator(8), page_size=4, num_rows=1)
    kv.release(computed(kv, list(range(8))))
    assert (kv.num_free, kv.num_cached) == (8, 0)
    assert kv.peek(make_request(list(range(8)))) == 0


def test_a_request_in_flight_cannot_be_released() -> None:
    kv = make_space()
    one = computed(kv, [1, 2, 3])
    one.num_in_flight = 1
    with pytest.raises(AssertionError):
        kv.release(one)
