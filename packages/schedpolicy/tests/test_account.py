"""The account of speculation: what steps add, what drafts pay, and when it stops them."""

from random import Random

import pytest

from pagewood.schedpolicy.drafting.account import DraftAccount


def opened(max_slowdown: float = 0.01, plain_s: float = 0.01) -> DraftAccount:
    account = DraftAccount(max_slowdown)
    assert account.lets_draft(plain_s, 0)
    return account


def draft(account: DraftAccount, gained_s: float, taken_s: float, draft_s: float = 0.0, **changes: float) -> float:
    """Enter a step that takes 0.01 s without drafts, and return by what the balance changes."""
    before_s = account.balance_s
    values = {"expected_s": 0.0, "num_steps": 1, "pace_s": 0.0, "elapsed_s": 0.0, "has_rested": False} | changes
    account.settle_drafts(0.01, gained_s, taken_s, draft_s, is_priced=True, **values)  # type: ignore[arg-type]
    return account.balance_s - before_s


def test_it_starts_with_a_quarter_of_the_most():
    assert DraftAccount(0.01).balance_s == 0
    assert opened(0.01, 0.01).balance_s == pytest.approx(0.01 * 4.0 / 4)
    assert opened(0.01, 1e-4).balance_s == pytest.approx(0.01 * 1.0 / 4)  # of a second, where steps are short


def test_plain_steps_add_a_part_of_their_time_and_pay_for_a_drafter_that_follows():
    account = opened()
    before_s = account.balance_s
    account.settle_plain(0.01, 0.02, 0.0, 32)
    assert account.balance_s - before_s == pytest.approx(32 * 0.0075 * 0.02)
    before_s = account.balance_s
    account.settle_plain(0.01, 0.01, 0.001, 2)
    assert account.balance_s - before_s == pytest.approx(2 * (0.0075 * 0.01 - 0.001))


def test_it_says_how_long_it_must_save():
    account = opened()
    assert account.num_steps_to_save(0.01, 0.01) == 1  # that is there
    assert account.num_steps_to_save(0.02, 0.01) == int(0.01 / 0.000075) + 1
    most = account.num_steps_to_save(0.04, 0.01)
    assert account.num_steps_to_save(1.0, 0.01) == most  # it never holds more
    account.settle_plain(0.01, 0.01, 0.0, most)
    assert account.balance_s == pytest.approx(0.04)


def test_drafts_add_what_their_tokens_would_have_cost_and_pay_what_they_took():
    assert draft(opened(), 0.006, 0.014, 0.001, expected_s=0.001) == pytest.approx(0.001 + 0.0075 * 0.015)
    assert draft(opened(), 0.0, 0.014, 0.0, expected_s=0.001) == pytest.approx(-0.005 + 0.0075 * 0.015)


def test_a_drafter_that_takes_more_than_twice_as_long_was_interrupted():
    assert draft(opened(), 0.0, 0.01, 0.5, expected_s=0.001) == pytest.approx(-0.002 + 0.0075 * 0.012)


def test_the_lower_of_two_estimates_counts_where_steps_are_short():
    account = DraftAccount(0.01)
    account.lets_draft(1e-4, 0)
    for pace_s, elapsed_s, profit_s in (
        (0.0, 1.5e-4, 1e-4),
        (1.5e-4, 0.0, 1e-4),
        (1.5e-4, 1.4e-4, 1e-5),
        (9.0, 1e-4, 1e-4),
    ):
        before_s = account.balance_s
        account.settle_drafts(1e-4, 1e-4, 1e-4, 0.0, 0.0, 1, has_rested=False, is_priced=True, pace_s=pace_s,
                              elapsed_s=elapsed_s)  # fmt: skip
        assert account.balance_s - before_s == pytest.approx(profit_s + 0.0075 * 1e-4)
    assert draft(opened(), 0.01, 0.01, pace_s=0.001, elapsed_s=0.01) > 0.009  # long steps: the host hardly counts


def test_drafts_stop_when_it_is_empty_and_start_when_it_has_recovered_or_they_gain():
    account = opened()
    draft(account, 0.0, 0.03)
    assert not account.lets_draft(0.01, 0)
    account.settle_plain(0.01, 0.01, 0.0, 160)
    assert not account.lets_draft(0.01, 0)  # more than a thirty-second, and less than an eighth
    account.settle_plain(0.01, 0.01, 0.0, 60)
    assert account.lets_draft(0.01, 0)
    draft(account, 0.0, 0.03)
    assert not account.lets_draft(0.01, 0)
    draft(account, 0.015, 0.013)
    assert 0.04 / 32 < account.balance_s < 0.04 / 8
    assert account.lets_draft(0.01, 0)


def test_what_waking_takes_is_owed_and_stops_drafts_only_after_another_rest():
    account = opened()
    assert draft(account, 0.0, 0.01, 0.02, has_rested=True) == pytest.approx(0.0075 * 0.01)
    assert account.wake.owed_s == pytest.approx(0.02 - 0.0025 * 0.01)
    assert account.lets_draft(0.01, 3)
    assert not account.lets_draft(0.01, 4)
    draft(account, 0.03, 0.01)  # a gain pays for it first
    assert account.wake.owed_s == 0
    assert account.lets_draft(0.01, 4)


def test_it_stays_between_its_limits():
    rng = Random(0)
    account = opened()
    for _ in range(1000):
        draft(account, rng.choice((0.0, 0.5)), rng.uniform(0.005, 0.5))
        assert -0.25 * 0.04 <= account.balance_s <= 0.04


def test_other_costs_open_it_anew():
    account = opened()
    draft(account, 0.0, 0.019)
    account.close()
    assert account.balance_s == 0
    assert account.lets_draft(0.01, 0)
    assert account.balance_s == pytest.approx(0.01)


def test_the_profit_of_several_steps_pays_what_is_owed_once():
    together, apart = opened(), opened()
    for account in (together, apart):
        account.wake.owed_s = 0.005
    draft(together, 0.006, 0.014, num_steps=4)
    for _ in range(4):
        draft(apart, 0.006, 0.014)
    assert together.balance_s == pytest.approx(apart.balance_s, rel=0.01)  # time pays a little in between
    assert together.wake.owed_s == apart.wake.owed_s == 0.0


def test_a_rest_pays_only_until_drafts_are_allowed_again():
    account = opened()
    before_s = account.balance_s
    account.settle_rest(0.01, 0.01, 1000)
    assert account.balance_s == before_s
    draft(account, 0.0, 9.0)
    assert account.balance_s < 0
    assert not account.lets_draft(0.01, 0)
    account.settle_rest(0.01, 0.01, 10)
    assert account.balance_s < 0.01 * 4.0 / 8
    account.settle_rest(0.01, 0.01, 100_000)
    assert account.balance_s == pytest.approx(0.01 * 4.0 / 8)
    assert account.lets_draft(0.01, 0)
