"""The columns of many running requests say what the requests say one by one."""

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy import NewTokenRatio
from pagewood.schedpolicy.memory.lengths import num_at_parts
from pagewood.schedpolicy.memory.look_ahead import NUM_MOMENTS, LookAhead

pytest.importorskip("numpy")

from pagewood.schedpolicy.memory.columns import LengthReader


@dataclass(slots=True)
class Runner:
    arrival: int
    num_tokens: int
    num_generated: int
    max_new_tokens: int
    priority: int = 0


@st.composite
def many(draw: st.DrawFn) -> list[Runner]:
    """Return running requests; some are at their limit, a few beyond it, and a few may generate nothing."""
    running: list[Runner] = []
    for arrival in range(draw(st.integers(1, 6))):
        limit = draw(st.one_of(st.integers(0, 300), st.integers(0, 10_000_000)))
        num_generated = draw(st.one_of(st.integers(0, limit), st.integers(max(0, limit - 300), limit + 2)))
        num_prompt = draw(st.one_of(st.integers(1, 100), st.integers(1, 1_000_000)))
        running.append(Runner(arrival, num_prompt + num_generated, num_generated, limit))
    return running


page_sizes = st.one_of(st.integers(1, 64), st.integers(1, 1000))
shares = st.lists(st.sampled_from([1.0, 1.0, 0.97, 0.5, 0.1]), min_size=100, max_size=100)


def check(reader: LengthReader, running: list[Runner], page_size: int) -> None:
    """Compare the columns with the requests."""
    lengths = reader.read(running, page_size=page_size)
    assert lengths.num_at_parts() == num_at_parts(running)
    assert lengths.kept.max_limit == max(request.max_new_tokens for request in running)
    assert lengths.kept.prompt_pages.tolist() == [
        math.ceil((request.num_tokens - request.num_generated) / page_size) for request in running
    ]
    num_now = sum(math.ceil(request.num_tokens / page_size) for request in running)
    num_most = sum(
        math.ceil((request.num_tokens + min(4096, max(0, request.max_new_tokens - request.num_generated))) / page_size)
        for request in running
    )
    assert lengths.num_pages == num_now
    assert lengths.num_most_pages() == num_most - num_now
    assert lengths.kept.num_prompt_pages == sum(
        math.ceil((request.num_tokens - request.num_generated) / page_size) for request in running
    )


@given(many(), page_sizes)
def test_columns_say_what_the_requests_say(running: list[Runner], page_size: int):
    check(LengthReader(), running, page_size)


@given(many(), many(), page_sizes, page_sizes, st.data())
def test_columns_follow_requests_that_make_progress_start_and_end(
    first: list[Runner], second: list[Runner], page_size: int, other: int, data: st.DataObject
):
    reader = LengthReader()
    check(reader, first, page_size)
    for request in first:
        num_more = data.draw(st.integers(0, 2))
        request.num_tokens += num_more
        request.num_generated += num_more
    check(reader, first, page_size)
    check(reader, first, other)
    for request in second:
        request.arrival += len(first)
    stay = data.draw(st.lists(st.sampled_from(first), unique_by=id))
    check(reader, [*second, *stay], other)


@given(many(), shares, page_sizes, st.integers(0, 4096))
def test_requests_one_by_one_and_all_at_once_are_expected_to_hold_the_same(
    running: list[Runner], going_on: list[float], page_size: int, num_more: int
):
    survival = list(accumulate(going_on, mul, initial=1.0))
    num_most = min(4096, max(request.max_new_tokens for request in running) + num_more)
    ahead = LookAhead(survival, num_most=num_most, page_size=page_size)
    growth = [0.0] * NUM_MOMENTS
    for request in running:
        ahead.add(request, growth)
    lengths = LengthReader().read(running, page_size=page_size)
    together = lengths.growth(ahead)
    assert together == pytest.approx(growth, abs=1e-6)
    for number in range(NUM_MOMENTS):
        alone = LookAhead(survival, num_most=num_most, page_size=page_size, number=number)
        assert lengths.growth(alone) == [together[number]]  # not only to within errors


class Counted:
    """A request that counts how often its limit is read."""

    priority = 0
    num_tokens = 20
    num_generated = 10

    def __init__(self, arrival: int) -> None:
        self.arrival = arrival
        self.num_reads = 0

    @property
    def max_new_tokens(self) -> int:
        self.num_reads += 1
        return 100


def test_what_requests_keep_is_read_again_only_when_others_run():
    reader, requests = LengthReader(), [Counted(arrival) for arrival in range(3)]
    for num_reads in (1, 1):
        reader.read(requests, page_size=16)
        assert [request.num_reads for request in requests] == [num_reads] * 3
    reader.read(requests[1:], page_size=16)
    assert [request.num_reads for request in requests] == [1, 2, 2]


def test_the_reserve_reads_many_requests_as_columns():
    ratio, requests = NewTokenRatio(), [Counted(arrival) for arrival in range(24)]
    for _ in range(3):
        assert ratio.open(requests, page_size=16, num_to_complete=0).num_pages > 0
    assert {request.num_reads for request in requests} == {1}
