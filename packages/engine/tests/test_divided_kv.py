"""KV memory that ranks divide by request, alone: where requests are placed, and what a rank's pages are for."""

from functools import partial

import numpy as np
import pytest

from pagewood.engine.core.memory.divided_kv import DividedKV, PageRange
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.shortage import Shortage
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import choose_victim, deserving, order_named
from parts import make_request

PAGE = 4


def make_divided(*, num_pages: int = 8, num_ranks: int = 2, num_rows: int = 4) -> DividedKV:
    """Return empty memory, with `num_pages` on each rank."""
    free_rows = list(range(num_rows))
    return DividedKV(
        [
            KVSpace(
                make_cache=partial(RadixCache, PAGE),
                allocator=PageRange(PageAllocator(num_pages), first=rank * num_pages),
                page_size=PAGE,
                num_rows=num_rows,
                free_rows=free_rows,
            )
            for rank in range(num_ranks)
        ]
    )


def admitted(kv: DividedKV, prompt: list[int], *, arrival: int = 0, max_new: int = 8) -> Request:
    """Return a request that has a row, and pages for its prompt."""
    request = make_request(prompt, arrival=arrival, max_new=max_new)
    assert kv.place(request).admit(request, max_tokens=len(prompt), num_reserved=0) == len(prompt) - request.num_matched
    request.num_launched = len(prompt)
    return request


def ended(kv: DividedKV, prompt: list[int], *, arrival: int = 0) -> Request:
    """Return a request whose prompt is computed and cached."""
    request = admitted(kv, prompt, arrival=arrival)
    request.num_computed = len(prompt)
    kv.release(request)
    return request


def test_requests_go_where_most_pages_are_available() -> None:
    kv = make_divided()
    ranks = [admitted(kv, [10 * i] * 9, arrival=i).kv_rank for i in range(4)]
    assert ranks == [0, 1, 0, 1]
    assert kv.num_free_by_rank == (2, 2)
    assert kv.num_free == 4
    assert kv.num_free_rows == 0


def test_requests_go_where_their_longest_prefix_lies() -> None:
    kv = make_divided()
    prompt = list(range(12))
    assert ended(kv, [50] * 5, arrival=0).kv_rank == 0
    assert admitted(kv, [60] * 9, arrival=1).kv_rank == 0  # a cached page is available too
    assert ended(kv, prompt, arrival=2).kv_rank == 1
    assert admitted(kv, [70] * 17, arrival=3).kv_rank == 1
    request = make_request([*prompt, 1], arrival=4)
    assert kv.place(request) is kv.spaces[1]
    assert (request.kv_rank, request.num_matched) == (1, 12)


def test_a_prefix_without_room_behind_it_does_not_hold_a_request_up() -> None:
    kv = make_divided(num_rows=8)
    prompt = list(range(4))
    ended(kv, prompt)
    others = [admitted(kv, [90 + i] * 8, arrival=i, max_new=1) for i in range(1, 7)]
    assert {other.kv_rank for other in others} == {0, 1}
    long = make_request([*prompt, *[7] * 16])
    assert kv.spaces[0].peek(long) == 4
    assert kv.spaces[0].num_available < kv.num_missing(long, 4)
    kv.release(next(other for other in others if other.kv_rank == 1))
    kv.release(next(other for other in others if other.kv_rank == 1 and other.row >= 0))
    kv.place(long)
    assert (long.kv_rank, long.num_matched) == (1, 0)


def test_ids_of_pages_say_the_rank() -> None:
    kv = make_divided(num_pages=3)
    for rank in range(2):
        request = admitted(kv, [rank] * 12, arrival=rank, max_new=1)
        assert sorted(request.pages[:3].tolist()) == [3 * rank, 3 * rank + 1, 3 * rank + 2]
    assert kv.held_pages().tolist() == list(range(6))


def test_a_page_of_another_rank_is_a_violation() -> None:
    kv = make_divided()
    requests = [admitted(kv, [rank] * 8, arrival=rank) for rank in range(2)]
    assert kv.violation(requests) is None
    requests[0].pages[1] = requests[1].pages[1]
    assert kv.violation(requests) == "rank 0: a request has a page that is not in [0, 8)"


def test_a_page_is_given_to_all_or_to_none() -> None:
    kv = make_divided(num_pages=3)
    requests = [admitted(kv, [rank] * 8, arrival=rank) for rank in range(2)]
    assert kv.grow(requests[1], 12)
    assert not kv.add_page_to_each(requests)
    assert [request.num_pages for request in requests] == [2, 3]
    assert kv.add_page_to_each(requests[:1])
    assert requests[0].num_pages == 3


def test_a_request_takes_pages_from_requests_of_its_rank_only() -> None:
    """The worst request is on the other rank, whose pages do not help."""
    kv = make_divided(num_pages=4)
    first, other, second = (admitted(kv, [i] * 8, arrival=i) for i in range(3))
    last = admitted(kv, [3] * 8, arrival=3)
    assert [one.kv_rank for one in (first, other, second, last)] == [0, 1, 0, 1]
    queue = WaitingQueue(order=order_named("fcfs", notified=True), kv=kv, deferral=None, is_watching=False)
    state = EngineState(waiting=queue, rank=deserving)
    for request in (first, other, second, last):
        state.run(request)
    shortage = Shortage(state, kv, choose_victim)
    assert shortage.grow(first, 12, [])
    assert shortage.preempted == [second]
    assert last.row >= 0


def test_flush_drop_and_retain_reach_all_ranks() -> None:
    kv = make_divided()
    for rank in range(2):
        admitted(kv, [90 + rank] * 4, arrival=10 + rank)
    prompts = [[rank] * 8 for rank in range(2)]
    ranks = [ended(kv, prompt, arrival=i).kv_rank for i, prompt in enumerate(prompts)]
    assert set(ranks) == {0, 1} or kv.num_cached == 4
    assert kv.drop(np.array(prompts[0], np.int32), None) == 2
    assert kv.retain(np.array(prompts[1], np.int32), None, 1.0) is None, "retention is off"
    assert kv.flush() == 2
    assert kv.num_cached == 0


def test_a_queue_cannot_watch_several_caches() -> None:
    with pytest.raises(ValueError, match="is_watching must be False where KV memory is divided among ranks, got True"):
        WaitingQueue(order=order_named("lpm", notified=True), kv=make_divided(), deferral=None, is_watching=True)
