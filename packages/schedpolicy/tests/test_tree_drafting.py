import random
from typing import Any

import pytest

from pagewood.schedpolicy import DraftCost, StepCost, TreeControl
from pagewood.schedpolicy.testing import FakeRequest

Control = TreeControl[FakeRequest]
CHEAP, DEAR = [0.01, 0.0101], [0.01, 0.4]


def requests(*priorities: int) -> list[FakeRequest]:
    return [FakeRequest(arrival=arrival, priority=priority) for arrival, priority in enumerate(priorities)]


def control(seconds: list[float], num_plain: int, **arguments: Any) -> Control:
    """Return a policy with a known cost of 1 and 64 tokens, for trees of 8 nodes, 3 deep."""
    cost = StepCost([1, 64], seconds)
    for _ in range(20):
        cost.observe(num_plain, cost.seconds(num_plain))
    return Control(3, cost, num_nodes=8, draft_cost=DraftCost(per_pass_s=1e-9), **arguments)


def test_cheap_trees_are_whole():
    cheap = control(CHEAP, 2)
    assert cheap.lengths(requests(0, 0), 0) == [3, 3]
    assert cheap.reason == "gain"
    assert control(CHEAP, 1).lengths(requests(0), 0) == [3]


def test_a_tree_costs_all_of_its_nodes():
    """A chain of three tokens would pay here."""
    seconds = [0.01, 0.08]
    assert control(seconds, 1, prior_acceptance=0.4).lengths(requests(0), 0) == [0]
    assert control(seconds, 1, prior_acceptance=0.9).lengths(requests(0), 0) == [3]


@pytest.mark.parametrize("num", [1, 2, 20])
def test_dear_trees_are_not_made(num: int):
    dear = control(DEAR, num)
    assert dear.lengths(requests(*[0] * num), 0) == [0] * num
    assert dear.reason == ("acceptance" if num == 1 else dear.reason)


def test_there_are_trees_for_the_likeliest_requests_only():
    cost = StepCost([1, 2, 10, 11, 64], [0.01, 0.01, 0.0101, 0.08, 0.5])
    for _ in range(20):
        cost.observe(2, 0.01)
    some = Control(3, cost, num_nodes=8, draft_cost=DraftCost(per_pass_s=1e-9))
    both = requests(0, 0)
    assert sorted(some.lengths(both, 0)) == [0, 3]
    for _ in range(30):
        some.observe(both[:1], [3], [3], [0], num_tokens=10)
        some.observe(both[1:], [3], [3], [3], num_tokens=10)
    lengths = {tuple(some.lengths(both, 0)) for _ in range(8)}
    assert lengths <= {(0, 3), (0, 0)}
    assert (0, 3) in lengths


def test_priorities_come_first():
    cost = StepCost([1, 2, 10, 11, 64], [0.01, 0.01, 0.0101, 0.08, 0.5])
    for _ in range(20):
        cost.observe(2, 0.01)
    some = Control(3, cost, num_nodes=8, draft_cost=DraftCost(per_pass_s=1e-9))
    assert some.lengths(requests(0, 5), 0) == [0, 3]


def test_fixed_is_always_the_whole_tree():
    fixed = Control(3, num_nodes=8, mode="fixed")
    assert fixed.lengths(requests(0, 0), 100) == [3, 3]
    assert fixed.reason == "fixed"


def test_a_probe_is_a_whole_tree():
    unknown = Control(3, StepCost([1, 64], CHEAP), num_nodes=8)
    unknown.observe(requests(0), [0], [0], [0], num_tokens=1, verify_s=0.01)
    assert unknown.lengths(requests(0), 0) == [3]
    assert unknown.reason == "probe"


@pytest.mark.parametrize("seed", range(4))
def test_decoding_is_hardly_slower_than_without_trees(seed: int):
    """Nothing is ever accepted; requests come and go."""
    rng = random.Random(seed)
    cost = StepCost([1, 2, 16, 64, 300], [0.01, 0.01, 0.012, 0.02, 0.08])
    never, true_cost = Control(3, cost, num_nodes=8), StepCost([1, 2, 16, 64, 300], [0.01, 0.01, 0.012, 0.02, 0.08])
    taken_s = plain_s = 0.0
    for step in range(4000):
        now = [FakeRequest(arrival=step // 100 * 100 + i) for i in range(1 + rng.randrange(20) if step % 100 else 5)]
        lengths = never.lengths(now, 0)
        num = 8 * sum(length > 0 for length in lengths)
        draft_s = 0.002 if num else 0.0
        verify_s = true_cost.seconds(len(now) + num)
        given = [(one, length) for one, length in zip(now, lengths, strict=True) if length]
        granted = [length for _, length in given]
        never.observe(
            [one for one, _ in given], granted, granted, [0] * len(given), num_tokens=len(now) + num,
            num_others=len(now) - len(given), draft_s=draft_s, verify_s=verify_s,
        )  # fmt: skip
        taken_s += draft_s + verify_s
        plain_s += true_cost.seconds(len(now))
    assert taken_s < 1.03 * plain_s


def test_fewer_nodes_than_levels_are_refused():
    with pytest.raises(ValueError, match="num_nodes must be >= depth, got 2 with depth 3"):
        Control(3, num_nodes=2)
