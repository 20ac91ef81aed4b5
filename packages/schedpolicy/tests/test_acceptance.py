import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy.drafting.acceptance import Acceptance
from pagewood.schedpolicy.testing import FakeRequest

ONE, OTHER = FakeRequest(arrival=1), FakeRequest(arrival=2)


def test_without_observations_every_position_has_the_prior() -> None:
    acceptance = Acceptance(3, prior=0.5)
    assert acceptance.rates == [0.5, 0.5, 0.5]
    own = acceptance.of(ONE)
    assert acceptance.survival(own) == [0.5, 0.25, 0.125]
    assert acceptance.fill(own) == 1.0


def test_rates_are_conditional_on_the_positions_before() -> None:
    acceptance = Acceptance(3, prior=0.6)
    for _ in range(400):
        acceptance.observe([ONE, OTHER], [3, 3], [3, 3], [1, 2])  # the second of two is accepted, the third never
    assert acceptance.rates == pytest.approx([1.0, 0.5, 0.0], abs=0.1)


def test_tokens_that_were_not_found_are_no_rejections() -> None:
    acceptance = Acceptance(3, prior=0.6)
    own = acceptance.of(ONE)
    for _ in range(400):
        acceptance.observe([ONE], [3], [1], [1])
    assert acceptance.rates[0] == pytest.approx(1.0, abs=0.1)
    assert acceptance.survival(own)[0] == pytest.approx(0.95, abs=0.06)
    assert acceptance.fill(own) == pytest.approx(1 / 3, abs=0.02)


def test_a_request_starts_like_all_and_moves_to_its_own() -> None:
    acceptance = Acceptance(2, prior=0.6)
    for _ in range(200):
        acceptance.observe([OTHER], [2], [2], [2])
    own = acceptance.of(ONE)
    assert acceptance.survival(own)[0] > 0.9
    seen: list[float] = []
    for _ in range(30):
        acceptance.observe([ONE, *[OTHER] * 9], [2] * 10, [2] * 10, [0] + [2] * 9)
        seen.append(acceptance.survival(own)[0])
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 0.3
    assert acceptance.survival(acceptance.of(OTHER))[0] > 0.8


def test_a_request_that_others_leave_without_drafts_is_forgotten_by_half() -> None:
    acceptance = Acceptance(1, prior=0.6)
    own, other = acceptance.of(ONE), acceptance.of(OTHER)
    for _ in range(40):
        acceptance.observe([ONE, OTHER], [1, 1], [1, 1], [0, 1])
    low, high = acceptance.survival(own)[0], acceptance.survival(other)[0]
    for _ in range(160):
        acceptance.skip(own)
    assert acceptance.survival(own)[0] > 1.5 * low
    assert acceptance.survival(other)[0] == high


def test_hope_raises_what_is_low_and_leaves_what_is_high() -> None:
    acceptance = Acceptance(3, prior=0.6)
    for _ in range(100):
        acceptance.observe([ONE], [3], [3], [1])
    before = list(acceptance.rates)
    acceptance.hope()
    assert acceptance.rates[0] == before[0] > 0.9
    assert 2 * before[1] < acceptance.rates[1] < 0.6


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)), max_size=60))
def test_survival_never_rises(observations: list[tuple[int, int, int]]) -> None:
    acceptance = Acceptance(4, prior=0.6)
    own = acceptance.of(ONE)
    for granted, found, taken in observations:
        found = min(granted, found)
        acceptance.observe([ONE], [granted], [found], [min(found, taken)])
    survival = acceptance.survival(own)
    assert survival == sorted(survival, reverse=True)
    assert all(0 <= value <= 1 for value in survival)
    assert 0 <= acceptance.fill(own) <= 1


def test_a_forgotten_request_counts_but_is_not_kept() -> None:
    acceptance = Acceptance(1, prior=0.6)
    acceptance.of(ONE)
    acceptance.forget(ONE)
    acceptance.forget(ONE)
    acceptance.observe([ONE], [1], [1], [1])
    assert len(acceptance) == 0
    assert acceptance.rates[0] > 0.6
    assert acceptance.latest_length(ONE, 3) == 3
