from pagewood.schedpolicy import StepCost
from pagewood.schedpolicy.drafting.plain_samples import PlainSamples


def table(step_s: float, num_observed: int = 1) -> StepCost:
    """Return a table in which steps of one token have been observed."""
    cost = StepCost([1, 64], [step_s, step_s])
    for _ in range(num_observed):
        cost.observe(1, step_s)
    return cost


def waits(samples: PlainSamples, cost: StepCost, num: int) -> list[int]:
    """Draft until there have been `num` samples, and return the steps with drafts before each."""
    found: list[int] = []
    num_drafted = 0
    while len(found) < num:
        if samples.takes(cost, 1, cost.seconds(1)):
            found.append(num_drafted)
            num_drafted = 0
        else:
            samples.draft()
            num_drafted += 1
    return found


def test_a_new_size_is_taken_plain_once():
    cost, samples = table(0.01, num_observed=0), PlainSamples()
    assert [samples.takes(cost, 1, 0.01) for _ in range(3)] == [True, False, False]
    assert samples.takes(cost, 40, 0.01)
    cost.observe(1, 0.01)
    assert not samples.takes(cost, 1, 0.01)


def test_while_drafts_are_made_one_step_of_many_is_plain():
    assert waits(PlainSamples(), table(0.01), 3) == [16, 16, 16]


def test_short_steps_are_taken_three_at_a_time():
    assert waits(PlainSamples(), table(0.0002), 4) == [16, 0, 0, 16]


def test_samples_are_rarer_where_they_agree_with_the_table():
    samples, cost = PlainSamples(), table(0.01)
    intervals: list[int] = []
    for ratio in (1.05, 0.95, *[1.0] * 4, 1.2, *[2.0] * 6):
        samples.compare(ratio)
        intervals += waits(samples, cost, 1)
    assert intervals == [32, 64, 128, 256, 256, 256, 128, 64, 32, 16, 8, 4, 4]


def test_they_cost_a_small_part_of_what_drafts_gain():
    samples = PlainSamples()
    samples.speedup = 2.5
    assert waits(samples, table(0.01), 2) == [96, 96]
    assert waits(samples, table(0.0002), 2) == [288, 0]


def test_a_decision_for_no_drafts_starts_the_count_again():
    samples, cost = PlainSamples(), table(0.01)
    for _ in range(15):
        samples.draft()
    samples.decline()
    assert waits(samples, cost, 1) == [16]


def test_of_short_plain_steps_the_second_counts():
    samples, short, long = PlainSamples(), table(0.0002), table(0.01)
    for is_typical in (False, True, False):
        samples.observe_plain()
        assert samples.is_typical(short, 1, 1) == is_typical
        assert samples.is_typical(short, 1, 32)
        assert samples.is_typical(long, 1, 1)
    samples.observe_drafts()
    assert [samples.observe_plain() for _ in range(3)] == [False, True, True]
