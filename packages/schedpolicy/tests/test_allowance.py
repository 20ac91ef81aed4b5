from random import Random

from pagewood.schedpolicy.drafting.allowance import Allowance


def test_it_starts_full_and_pays_for_a_part_of_the_time():
    allowance = Allowance(0.01, most=2)
    spent: list[int] = []
    for step in range(400):
        if allowance.covers(0.001, 0.0005):
            allowance.spend(0.0005)
            spent.append(step)
    assert spent[:2] == [0, 1]
    assert 7 <= len(spent) <= 10  # two at the start, and one for each 50 steps


def test_what_is_spent_without_cover_is_missing_later():
    allowance = Allowance(0.5, most=1)
    assert allowance.covers(1.0, 1.0)
    allowance.spend(1.0)
    allowance.spend(1.0)
    assert [allowance.covers(1.0, 1.0) for _ in range(4)] == [False, False, False, True]


def test_never_more_than_the_share_is_spent_after_the_first_pieces():
    rng = Random(0)
    allowance = Allowance(0.02, most=4)
    spent_s = time_s = dearest_s = 0.0
    for _ in range(2000):
        step_s, price_s = rng.uniform(1e-4, 1e-2), rng.uniform(1e-5, 1e-3)
        dearest_s = max(dearest_s, price_s)
        time_s += step_s
        if allowance.covers(step_s, price_s):
            allowance.spend(price_s)
            spent_s += price_s
        assert spent_s <= 0.02 * time_s + 4 * dearest_s
