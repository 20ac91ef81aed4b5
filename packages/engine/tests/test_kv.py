import pytest

from pagewood.engine.core.kv import KVSpace, NoPrefixCache
from pagewood.engine.core.state import Request
from pagewood.engine.testing import make_request, make_space
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import Watch


def computed(kv: KVSpace, prompt: list[int], *, arrival: int = 0) -> Request:
    """A request whose whole prompt is computed, but not published."""
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


def test_what_is_released_can_be_matched_and_evicted() -> None:
    kv = make_space(num_pages=4)
    kv.release(computed(kv, list(range(12))))
    assert (kv.num_free, kv.num_cached, kv.num_available) == (1, 3, 4)
    other = make_request(list(range(100, 116)))
    assert kv.admit(other, max_tokens=100, num_reserved=0) == 16
    assert (kv.num_free, kv.num_cached) == (0, 0)


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
    assert second.private[:2].all()
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


def test_a_violation_is_named_and_healing_frees_every_page() -> None:
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
    kv.probe(again := make_request(list(range(8))))
    assert again.num_matched == 0


def test_a_request_in_flight_cannot_be_released() -> None:
    kv = make_space()
    one = computed(kv, [1, 2, 3])
    one.num_in_flight = 1
    with pytest.raises(AssertionError):
        kv.release(one)


def test_a_followed_request_is_told_of_what_comes_and_goes() -> None:
    kv = make_space(num_pages=4, follows_waiting=True)
    waiting, other = make_request(list(range(12)), arrival=1), make_request([7] * 5, arrival=2)
    kv.follow(waiting)
    kv.follow(other)
    assert (waiting.num_matched, kv.changed()) == (0, [])
    kv.release(computed(kv, list(range(8))))
    assert kv.changed() == [waiting]
    assert (waiting.num_matched, kv.changed()) == (8, [])
    kv.release(computed(kv, [9] * 12))  # takes the place of a page
    kv.probe(waiting)
    assert waiting.num_matched == 4  # read before it is told
    assert kv.changed() == [waiting]
    assert kv.admit(waiting, max_tokens=100, num_reserved=0) == 8
    assert waiting.watch is None


def test_a_healed_space_follows_who_comes_after() -> None:
    kv = make_space(follows_waiting=True)
    kv.heal()
    waiting = make_request(list(range(12)), arrival=1)
    kv.follow(waiting)
    kv.release(computed(kv, list(range(8))))
    assert (kv.changed(), waiting.num_matched) == ([waiting], 8)


def test_an_order_that_reads_matches_needs_a_cache_with_watches() -> None:
    with pytest.raises(ValueError, match="make_cache must make a cache with watches, got NoPrefixCache"):
        KVSpace(make_cache=NoPrefixCache, allocator=PageAllocator(8), page_size=4, num_rows=1, follows_waiting=True)


def test_a_request_that_leaves_is_watched_no_more() -> None:
    kv = make_space(follows_waiting=True)
    waiting = make_request(list(range(12)), arrival=1)
    kv.follow(waiting)
    watch = waiting.watch
    assert isinstance(watch, Watch)
    kv.forget(waiting)
    kv.release(computed(kv, list(range(8))))
    assert waiting.watch is None
    assert kv.changed() == []
    assert watch.num_tokens == 0  # it keeps its last value
