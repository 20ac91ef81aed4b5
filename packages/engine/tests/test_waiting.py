"""Single behaviours of the queue; random traffic is in test_scenarios.py."""

from dataclasses import replace

import pytest

from pagewood.engine.api import PoolingParams
from pagewood.engine.core.memory.caches import NoPrefixCache
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.pooling import Pool
from pagewood.engine.core.request import Request
from pagewood.kvpool import PageAllocator
from parts import make_queue, make_request, make_space


def compute(kv: KVSpace, prompt: list[int], *, arrival: int = 0, namespace: str | None = None) -> None:
    """Put the KV of a whole prompt into the cache."""
    one = replace(make_request(prompt, arrival=arrival), key=namespace)
    assert kv.admit(one, max_tokens=1000, num_reserved=0)
    one.num_computed = len(prompt)
    kv.release(one)


@pytest.mark.parametrize("is_watching", [False, True])
def test_matches_are_up_to_date_in_every_pass(is_watching: bool) -> None:
    kv = make_space(num_pages=4)
    queue = make_queue(kv, order="lpm" if is_watching else "fcfs", is_watching=is_watching)
    waiting, other = make_request(list(range(12)), arrival=1), make_request([7] * 5, arrival=2)
    queue.add(waiting)
    queue.add(other)

    def matched() -> dict[int, int]:
        found = {request.arrival: request.num_matched for request in queue.examine(0.0)}
        queue.end_pass([])
        return found

    assert matched() == {1: 0, 2: 0}
    compute(kv, list(range(8)))
    assert matched() == {1: 8, 2: 0}
    compute(kv, [9] * 12)  # evicts a page
    assert matched() == {1: 4, 2: 0}


def test_a_longer_match_goes_first_as_soon_as_it_is_cached() -> None:
    kv = make_space()
    queue = make_queue(kv, order="lpm", is_watching=True)
    for arrival, prompt in enumerate(([7] * 12, list(range(12)))):
        queue.add(make_request(prompt, arrival=arrival))
    assert [request.arrival for request in queue.examine(0.0)] == [0, 1]
    queue.end_pass([])
    compute(kv, list(range(8)), arrival=9)
    assert [request.arrival for request in queue.examine(0.0)] == [1, 0]


def test_requests_of_a_namespace_are_a_family_only_if_they_share_a_cached_prefix() -> None:
    kv = make_space()
    queue = make_queue(kv, order="dfs-weight", is_watching=True)
    prompts = [("a", 1), ("a", 2), ("a", 3), (None, 4), ("b", 4), ("b", 4)]
    for arrival, (namespace, token) in enumerate(prompts):
        prompt = [token] * 8 + [20 + arrival]
        compute(kv, prompt, namespace=namespace)
        queue.add(replace(make_request(prompt, arrival=arrival), key=namespace))
    assert [request.arrival for request in queue.examine(0.0)] == [4, 5, 0, 1, 2, 3]


def test_prefixes_of_different_namespaces_differ_from_the_first_token_on() -> None:
    tokens = list(range(5, 12))
    requests = [replace(make_request(tokens), key=namespace) for namespace in (None, "", "a", "b", ("a", 1))]
    prefixes = [request.prefix(6) for request in requests]
    assert len({prefix[:4] for prefix in prefixes}) == 5
    assert [len(prefix) for prefix in prefixes] == [24] * 5
    for request, prefix in zip(requests, prefixes, strict=True):
        assert [request.prefix(num) for num in range(7)] == [prefix[: 4 * num] for num in range(7)]


def test_after_healing_the_queue_watches_the_new_cache() -> None:
    kv = make_space()
    queue = make_queue(kv, order="lpm", is_watching=True)
    kv.heal()
    queue.watch_again()
    waiting = make_request(list(range(12)), arrival=1)
    queue.add(waiting)
    compute(kv, list(range(8)))
    assert [request.num_matched for request in queue.examine(0.0)] == [8]


def test_an_order_that_reads_matches_needs_a_cache_with_watches() -> None:
    kv = KVSpace(make_cache=NoPrefixCache, allocator=PageAllocator(8), page_size=4, num_rows=1)
    with pytest.raises(ValueError, match="make_cache must make a cache with watches, got NoPrefixCache"):
        make_queue(kv, order="lpm", is_watching=True)


def test_a_removed_request_is_not_watched() -> None:
    kv = make_space()
    queue = make_queue(kv, order="lpm", is_watching=True)
    waiting = make_request(list(range(12)), arrival=1)
    queue.add(waiting)
    queue.remove(waiting)
    compute(kv, list(range(8)))
    assert waiting.num_matched == 0
    assert (len(queue), waiting in queue, list(queue.examine(0.0))) == (0, False, [])


def test_a_repeat_is_parked_until_the_repeated_part_is_cached() -> None:
    kv = make_space(num_pages=64)
    queue = make_queue(kv, defers=True)
    prompt = list(range(1, 101))
    leader = make_request(prompt, arrival=0)
    repeat, other = make_request([*prompt, 5], arrival=1), make_request([200] * 50, arrival=2)
    for request in (leader, repeat, other):
        queue.add(request)

    def start_pass() -> list[tuple[int, bool]]:
        """Return the examined requests and whether they were parked; the first pass admits the leader."""
        seen: list[tuple[int, bool]] = []
        admitted: list[Request] = []
        queue.begin_step()
        for request in queue.examine(0.0):
            is_parked = queue.defer(request)
            seen.append((request.arrival, is_parked))
            if request is leader:
                assert kv.admit(leader, max_tokens=40, num_reserved=0) == 40
                queue.admitted(leader)
                admitted.append(leader)
        queue.end_pass(admitted)
        return seen

    assert start_pass() == [(0, False), (1, True), (2, False)]
    assert (len(queue), repeat in queue) == (2, True)
    assert start_pass() == [(2, False)]
    leader.num_computed = 40
    kv.publish(leader)
    assert start_pass() == [(2, False)]
    assert kv.grow(leader, 100)
    leader.num_computed = 100
    kv.publish(leader)
    assert start_pass() == [(1, False), (2, False)]
    assert repeat.num_matched == 100


@pytest.mark.parametrize("end", ["stop", "abort"])
def test_a_parked_request_leaves_or_returns_with_its_leader(end: str) -> None:
    kv = make_space(num_pages=64)
    queue = make_queue(kv, defers=True)
    prompt = list(range(1, 101))
    leader, repeat = make_request(prompt, arrival=0), make_request([*prompt, 5], arrival=1)
    for request in (leader, repeat):
        queue.add(request)
    admitted: list[Request] = []
    for request in queue.examine(0.0):
        if not queue.defer(request):
            kv.admit(request, max_tokens=40, num_reserved=0)
            queue.admitted(request)
            admitted.append(request)
    queue.end_pass(admitted)
    assert admitted == [leader]
    if end == "stop":
        queue.stopped(leader)
        queue.begin_step()
        assert list(queue.examine(0.0)) == [repeat]
    else:
        queue.remove(repeat)
        queue.stopped(leader)
        assert (len(queue), list(queue.examine(0.0))) == (0, [])


def test_a_request_that_must_compute_its_whole_prompt_is_not_parked() -> None:
    kv = make_space(num_pages=64)
    queue = make_queue(kv, defers=True)
    prompt = list(range(1, 101))
    leader, mean, last = (make_request([*prompt, arrival], arrival=arrival) for arrival in range(3))
    mean.pool = Pool.of(PoolingParams(kind="mean"), mean.num_prompt)
    last.pool = Pool.of(PoolingParams(kind="last"), last.num_prompt)
    for request in (leader, mean, last):
        queue.add(request)
    parked: list[Request] = []
    for request in queue.examine(0.0):
        if queue.defer(request):
            parked.append(request)
        elif request is leader:
            kv.admit(request, max_tokens=40, num_reserved=0)
            queue.admitted(request)
    queue.end_pass([leader])
    assert parked == [last]


def test_deferred_requests_do_not_starve_the_requests_behind_them() -> None:
    kv = make_space(num_pages=64, num_rows=4)
    queue = make_queue(kv, defers=True)
    prompt = list(range(1, 101))
    queue.add(make_request(prompt, arrival=0))
    for arrival in range(1, 301):
        queue.add(make_request([*prompt, arrival], arrival=arrival))
    queue.add(make_request([7, 8, 9], arrival=999))
    reached: list[int] = []
    admitted: list[Request] = []
    for request in queue.examine(0.0):
        if queue.defer(request):
            continue
        reached.append(request.arrival)
        if not admitted:
            kv.admit(request, max_tokens=40, num_reserved=0)
            queue.admitted(request)
            admitted.append(request)
    queue.end_pass(admitted)
    assert reached == [0, 999]
