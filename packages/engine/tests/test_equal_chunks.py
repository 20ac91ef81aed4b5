"""Sizes of chunks that take equal time, against a direct count."""

from hypothesis import given
from hypothesis import strategies as st

from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.equal_chunks import EqualChunks
from pagewood.engine.core.steps.grant import Grant


def work(ratio: float, start: int, count: int) -> float:
    """Return the time of some tokens, added up one by one."""
    return sum(1 + ratio * (position + 1) for position in range(start, start + count))


@given(st.floats(1e-6, 0.1) | st.floats(0, 1e-300) | st.just(1e-17), st.integers(0, 5000), st.integers(1, 600))
def test_a_chunk_is_the_longest_that_takes_no_more_time(ratio: float, start: int, most: int) -> None:
    chunks = EqualChunks(2)
    chunks.pair_tokens = ratio
    count = chunks.tokens(start, most)
    assert 0 < count <= most
    limit = work(ratio, 0, most)
    assert count <= 16 or work(ratio, start, count) <= limit * (1 + 1e-9)
    assert count >= most - 1 or count == 16 or work(ratio, start, count + 1) > limit * (1 - 1e-9)
    worth = chunks.worth(start, count)
    assert worth >= count
    assert worth <= most or count == 16 or most <= 16
    assert work(ratio, 0, worth) >= work(ratio, start, count) * (1 - 1e-9)


@given(st.integers(0, 5000), st.integers(1, 600))
def test_nothing_shrinks_before_steps_were_measured(start: int, most: int) -> None:
    assert EqualChunks(2).tokens(start, most) == EqualChunks(2).worth(start, most) == most


def test_steps_that_are_all_alike_say_nothing() -> None:
    chunks = EqualChunks(2)
    request: Request = object.__new__(Request)
    for number in range(40):
        grants = [Grant(request, 100, 1, 1)]
        chunks.ended(grants, num_beside=0, launched_s=float(number), now_s=number + 0.01)
    assert chunks.pair_tokens == 0


def test_times_of_busy_and_of_idle_pipelines_are_told_apart() -> None:
    """A step alone takes the time of all stages; with others, one ends after each time of a stage."""
    chunks = EqualChunks(4)
    request: Request = object.__new__(Request)
    now_s = 0.0
    for number in range(64):
        start, count = 37 * number % 501, 1 + 13 * number % 97
        stage_s = 1e-3 + 1e-4 * work(0.01, start, count)
        beside = (0, 3, 1)[number % 3]
        took_s = {0: 4 * stage_s, 3: stage_s, 1: 123.0}[beside]
        launched_s = now_s if beside == 0 else now_s - 0.5
        chunks.ended([Grant(request, start, count, 0)], num_beside=beside, launched_s=launched_s, now_s=now_s + took_s)
        now_s += took_s
    assert abs(chunks.pair_tokens - 0.01) < 1e-4
