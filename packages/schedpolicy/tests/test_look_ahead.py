"""What requests are expected to hold at moments to come, compared with the definition."""

import math
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy.memory.lengths import part_of
from pagewood.schedpolicy.memory.look_ahead import NUM_MOMENTS, LookAhead


@dataclass(frozen=True, slots=True)
class Runner:
    arrival: int
    num_tokens: int
    num_generated: int
    max_new_tokens: int
    priority: int = 0


def numbered(lengths: list[tuple[int, int, int]]) -> list[Runner]:
    """Return requests with these prompts, limits, and tokens that are left; a few are beyond their limit."""
    found: list[Runner] = []
    for arrival, (num_prompt, limit, num_left) in enumerate(lengths):
        num_generated = max(0, limit - num_left)
        found.append(Runner(arrival, num_prompt + num_generated, num_generated, limit))
    return found


requests = st.tuples(
    st.integers(1, 1000),
    st.one_of(st.integers(0, 300), st.integers(0, 100_000)),
    st.one_of(st.integers(-2, 300), st.integers(0, 100_000)),
)
page_sizes = st.one_of(st.integers(1, 64), st.integers(1, 1000))
shares = st.lists(st.sampled_from([1.0, 1.0, 0.97, 0.5, 0.1]), min_size=100, max_size=100)


def added(ahead: LookAhead, running: list[Runner]) -> list[float]:
    growth = [0.0] * (NUM_MOMENTS if ahead.number is None else 1)
    for request in running:
        ahead.add(request, growth)
    return growth


@given(st.lists(requests, min_size=1, max_size=2).map(numbered), shares, page_sizes)
def test_at_each_moment_those_count_that_are_expected_to_run_at_the_one_before(
    running: list[Runner], going_on: list[float], page_size: int
):
    survival = list(accumulate(going_on, mul, initial=1.0))
    num_most = min(4096, max(request.max_new_tokens for request in running))
    growth = added(LookAhead(survival, num_most=num_most, page_size=page_size), running)
    for number in range(16):
        before, moment = (math.ceil(num_most * index**2 / 256) for index in (number, number + 1))
        expected = 0.0
        for request in running:
            generated, limit, now = request.num_generated, request.max_new_tokens, part_of(request)
            num_prompt = request.num_tokens - generated
            chance = 0.0
            if generated + before < limit:
                part = (generated + before) * 100 // limit
                chance = 1.0 if part == now else survival[part] / survival[now + 1]
            num_then = min(request.num_tokens + moment, num_prompt + max(limit, generated))
            pages_then, pages_now, pages_of_prompt = (
                math.ceil(num_tokens / page_size) for num_tokens in (num_then, request.num_tokens, num_prompt)
            )
            expected += chance * (pages_then - pages_of_prompt) + pages_of_prompt - pages_now
        assert growth[number] == pytest.approx(expected, abs=1e-6)
        alone = LookAhead(survival, num_most=num_most, page_size=page_size, number=number)
        assert added(alone, running) == [growth[number]]


def test_moments_are_denser_soon():
    ahead = LookAhead([1.0] * 101, num_most=512, page_size=1)
    assert added(ahead, [Runner(0, 10, 0, 512)])[:4] == [2, 8, 18, 32]
    assert added(ahead, [Runner(0, 10, 0, 512)])[-1] == 512
