import pytest

from pagewood.schedpolicy.drafting.wake_debt import WakeDebt


def test_four_steps_without_drafts_are_a_rest():
    debt = WakeDebt(0.01)
    assert debt.end_rest()  # nothing was drafted before the start
    debt.rest(3)
    assert not debt.end_rest()
    debt.rest(3)
    debt.rest(32)
    assert debt.end_rest()
    assert not debt.end_rest()


def test_the_price_is_a_moving_average_and_falls_with_the_requests():
    debt = WakeDebt(0.01)
    debt.charge(0.02, 0.01)
    assert debt.usual_s == pytest.approx(0.01)
    debt.charge(-1.0, 0.01)
    assert debt.usual_s == pytest.approx(0.005)
    debt.scale(0.5)
    assert debt.usual_s == pytest.approx(0.0025)


def test_following_the_text_before_a_probe_has_a_price_that_falls_with_the_requests():
    debt = WakeDebt(0.01)
    assert debt.following_s == 0
    for _ in range(100):
        debt.follow(0.002, 0.01)
    assert debt.following_s == pytest.approx(24 * 0.002, rel=1e-3)
    debt.scale(0.5)
    assert debt.following_s == pytest.approx(24 * 0.001, rel=1e-3)
    debt.follow(9.0, 0.01)  # an interruption
    assert debt.following_s == pytest.approx(24 * (0.001 + 0.1 * 0.009), rel=1e-3)


def test_the_first_long_one_is_paid_in_part_because_it_may_be_an_interruption():
    debt = WakeDebt(0.5)
    assert debt.charge(10.0, 0.01) == pytest.approx(4 * 0.01)
    assert debt.usual_s == pytest.approx(64 * 0.01 / 2)
    assert debt.charge(10.0, 0.01) == pytest.approx(64 * 0.01)


def test_it_is_paid_from_gains_and_from_the_time_of_steps():
    debt = WakeDebt(0.01)
    debt.charge(0.02, 0.01)
    assert debt.num_steps_to_pay(0.01) == int(0.02 / 0.000025) + 1
    assert debt.repay(0.005) == 0
    assert debt.owed_s == pytest.approx(0.015)
    debt.pass_time(32, 0.01)
    assert debt.owed_s == pytest.approx(0.015 - 32 * 0.000025)
    assert debt.repay(1.0) == pytest.approx(1.0 - 0.0142)
    assert debt.owed_s == 0
    debt.pass_time(1, 1.0)
    assert debt.owed_s == 0


def test_no_debt_takes_more_steps_than_the_most():
    debt = WakeDebt(0.01)
    for _ in range(100):
        debt.charge(9.0, 0.01)
    assert 8192 <= debt.num_steps_to_pay(0.01) <= 8193
