import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy.drafting.acceptance import Acceptance


def test_without_observations_every_position_has_the_prior():
    acceptance = Acceptance(3, prior=0.5)
    assert acceptance.rates == [0.5, 0.5, 0.5]
    assert acceptance.estimate().survival == [0.5, 0.25, 0.125]


def test_rates_are_conditional_on_the_positions_before():
    acceptance = Acceptance(3)
    for _ in range(400):
        acceptance.observe([3, 3], [3, 3], [1, 2])  # the second of two is accepted; the third never is
    assert acceptance.rates == pytest.approx([1.0, 0.5, 0.0], abs=0.1)


def test_tokens_that_were_not_drafted_are_no_rejections():
    acceptance = Acceptance(3)
    estimate = acceptance.estimate()
    for _ in range(400):
        acceptance.observe([3], [1], [1])
        estimate.observe(3, 1, 1)
    estimate.refresh()
    assert acceptance.rates[0] == pytest.approx(1.0, abs=0.1)
    assert acceptance.fill == pytest.approx(1 / 3, abs=0.01)
    assert estimate.fill == pytest.approx(1 / 3, abs=0.01)


def test_an_estimate_starts_from_the_average_and_moves_to_its_own():
    acceptance = Acceptance(2, weight=4)
    for _ in range(200):
        acceptance.observe([2], [2], [2])
    estimate = acceptance.estimate()
    assert estimate.survival[0] > 0.9
    seen: list[float] = []
    for _ in range(12):
        estimate.observe(2, 2, 0)
        estimate.refresh()
        seen.append(estimate.survival[0])
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 0.35
    # The second position was never reached, and is believed to be as bad.
    assert estimate.survival[1] < 0.5 * estimate.survival[0]


def test_evidence_of_a_request_fades_only_while_others_draft():
    acceptance = Acceptance(1)
    estimate = acceptance.estimate()
    for _ in range(20):
        acceptance.observe([1], [1], [0])
        estimate.observe(1, 1, 0)
    estimate.refresh()
    low = estimate.survival[0]
    estimate.refresh()
    assert estimate.survival[0] == low
    for _ in range(2000):
        acceptance.observe([1], [1], [1])
    estimate.refresh()
    assert estimate.survival[0] > 0.9


def test_a_position_that_is_no_longer_drafted_returns_to_the_one_before():
    acceptance = Acceptance(2)
    for _ in range(100):
        acceptance.observe([2], [2], [1])
    assert acceptance.rates[1] < 0.2
    for _ in range(3000):
        acceptance.observe([1], [1], [1])
    assert acceptance.rates[1] > 0.9


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4), st.integers(0, 4)), max_size=60),
    st.sampled_from([0.0, 6.0]),
)
def test_probabilities_are_probabilities(steps: list[tuple[int, int, int]], weight: float):
    acceptance = Acceptance(4, weight=weight)
    estimate = acceptance.estimate()
    for granted, drafted, accepted in steps:
        drafted = min(drafted, granted)
        accepted = min(accepted, drafted)
        acceptance.observe([granted], [drafted], [accepted])
        estimate.observe(granted, drafted, accepted)
        estimate.refresh()
        assert all(0 <= rate <= 1 for rate in acceptance.rates)
        assert all(0 <= survival <= 1 for survival in estimate.survival)
        assert estimate.survival == sorted(estimate.survival, reverse=True)
        assert 0 <= estimate.fill <= 1 + 1e-9


@pytest.mark.parametrize(
    ("prior", "weight", "message"),
    [
        (0.0, 1.0, r"prior must be in \(0, 1\), got 0.0"),
        (1.0, 1.0, r"prior must be in \(0, 1\), got 1.0"),
        (0.5, -1.0, "weight must be >= 0, got -1.0"),
    ],
)
def test_the_prior_is_checked(prior: float, weight: float, message: str):
    with pytest.raises(ValueError, match=message):
        Acceptance(2, prior=prior, weight=weight)
