from operator import attrgetter
from random import Random
from typing import Any

import pytest

from naive_orders import NaiveShares, NaiveTags, depth_first
from pagewood.schedpolicy import (
    MATCH_ORDERS,
    ORDERS,
    PLAIN_ORDERS,
    Ageing,
    ByLongestMatch,
    ByRemaining,
    DepthFirstWeight,
    FallbackAbove,
    MultilevelOrder,
    Order,
    RankedOrder,
    ShareOrder,
    by_arrival,
    order_named,
    weighted_round_robin,
)
from pagewood.schedpolicy.testing import (
    FakeRequest,
    Naive,
    by,
    check_order,
    check_same_order,
    random_request,
)
from starvation import longest_wait

SEEDS = range(100)

ORACLES = {
    "fcfs": by(lambda r: (-r.priority,)),
    "priority": by(lambda r: (-r.priority,)),
    "priority-low": by(lambda r: (r.priority,)),
    "lpm": by(lambda r: (-r.priority, 1000.0 * r.arrived_s - r.num_matched)),
    "lof": by(lambda r: (-r.priority, -(r.max_new_tokens - r.num_generated))),
    "shortest": by(
        lambda r: (
            -r.priority,
            r.num_tokens - r.num_matched + 2.0 * (0.7 * max(0, r.max_new_tokens - r.num_generated)),
        )
    ),
    "srtf": by(
        lambda r: (
            -r.priority,
            r.num_tokens - r.num_matched + 2.0 * max(1.0, 0.7 * r.max_new_tokens - r.num_generated),
        )
    ),
    "dfs-weight": depth_first,
    "edf": by(lambda r: (r.deadline_s,)),
}


def of_one_priority(rng: Random, arrival: int, now_s: float) -> FakeRequest:
    """Return a random request; a lower priority could starve."""
    request = random_request(rng, arrival, now_s)
    request.priority = 0
    return request


def wrapped(name: str) -> list[Order[Any]]:
    return [
        Ageing[Any](order_named(name), after_s=2.0, every=2),
        MultilevelOrder[Any](attrgetter("num_generated"), lambda: order_named(name)),
        FallbackAbove[Any](order_named(name), RankedOrder[Any](by_arrival), max_waiting=5),
    ]


@pytest.mark.parametrize("name", ORDERS)
def test_an_order_is_a_permutation_and_the_same_for_the_same_calls(name: str) -> None:
    for seed in SEEDS:
        check_order(lambda: order_named(name, seed=3), Random(seed))


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", ["fcfs", "lpm", "fair", "tag", "random", "dfs-weight"])
def test_wrappers_combine_with_any_order(name: str, index: int) -> None:
    for seed in range(60):
        check_order(lambda: wrapped(name)[index], Random(seed))


@pytest.mark.parametrize("notified", [False, True])
@pytest.mark.parametrize("name", sorted(ORACLES))
def test_an_order_equals_sorting_everything_in_each_pass(name: str, notified: bool) -> None:
    # Where changes of matches are not notified, they are found by reading.
    for seed in SEEDS:
        check_same_order(
            order_named(name, notified=notified), Naive(ORACLES[name]), Random(seed), num_steps=60, notifies=notified
        )


def test_fair_shares_are_those_of_the_paper() -> None:
    weights = {"a": 2.0, "c": 0.5}
    for seed in SEEDS:
        order = ShareOrder[Any](
            attrgetter("tenant"),
            make_order=lambda: order_named("fcfs"),
            weights=weights,
            admission_cost=lambda r: r.num_tokens - r.num_matched,
            output_cost=2.0,
        )
        oracle = NaiveShares(attrgetter("tenant"), weights, lambda r: r.num_tokens - r.num_matched, 2.0)
        check_same_order(order, oracle, Random(seed), num_steps=100)
        oracle.settle()
        assert {tenant: order.service(tenant) for tenant in oracle.service} == oracle.service


def test_weighted_turns_are_those_of_the_paper_at_a_price_of_one() -> None:
    weights = {"gold": 4.0}
    for seed in SEEDS:
        oracle = NaiveShares(attrgetter("service_class"), weights, lambda request: 1.0, 0.0)
        check_same_order(weighted_round_robin(weights), oracle, Random(seed), num_steps=100)


def test_tags_are_ordered_by_running_requests() -> None:
    for seed in SEEDS:
        check_same_order(order_named("tag"), NaiveTags(), Random(seed), num_steps=100)


def test_classes_take_turns_by_weight():
    order: ShareOrder[FakeRequest] = weighted_round_robin({"gold": 3.0, "bronze": 1.0})
    for arrival in range(80):
        order.add(FakeRequest(arrival=arrival, service_class="bronze" if arrival % 2 else "gold"))
    classes = [request.service_class for request in order.ordered(0.0)]
    for turn in range(0, 40, 4):
        assert sorted(classes[turn : turn + 4]) == ["bronze", "gold", "gold", "gold"]


def test_a_live_match_is_read_without_notification():
    class Watch:
        num_tokens = 0

    watch = Watch()

    class Watched(FakeRequest):
        __slots__ = ()

        @property
        def num_matched(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            return watch.num_tokens if self.arrival else 10

        @num_matched.setter
        def num_matched(self, value: int) -> None: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    for name in ("lpm", "shortest", "srtf"):
        watch.num_tokens = 0
        order = order_named(name)
        order.add(Watched(arrival=0))
        order.add(Watched(arrival=1))
        assert [request.arrival for request in order.ordered(0.0)] == [0, 1]
        watch.num_tokens = 20
        assert [request.arrival for request in order.ordered(0.0)] == [1, 0]


@pytest.mark.parametrize("name", ["fcfs", "lpm", "lof", "shortest", "srtf", "random", "dfs-weight"])
def test_a_priority_may_change_while_a_request_waits(name: str):
    order = order_named(name)
    requests = [FakeRequest(arrival=arrival) for arrival in range(5)]
    for request in requests:
        order.add(request)
    requests[3].priority = 1
    order.update(requests[3])
    assert next(order.ordered(1.0)) is requests[3]
    requests[3].priority = -1
    order.update(requests[3])
    assert list(order.ordered(1.0))[-1] is requests[3]


@pytest.mark.parametrize("name", ["fcfs", "lpm", "fair", "wrr", "random"])
def test_orders_that_exclude_starvation_do_not_starve(name: str):
    order = order_named(name)
    waited = longest_wait(order, Random(0), num_waiting=30, num_admissions=2000, make_request=of_one_priority)
    assert waited < 30 * 12


@pytest.mark.parametrize(("age_weight", "most"), [(1000.0, 8), (0.0, 500)])
def test_a_request_without_a_match_starves_only_without_ageing(age_weight: float, most: int):
    # Each second one request is served, and two with a match of 4,000 arrive. At 1,000 tokens a second the match is
    # worth 4 s: only the 8 requests of the first 4 s go before the cold one.
    order = RankedOrder[Any](ByLongestMatch(age_weight=age_weight), reads_match=True)
    cold = FakeRequest(arrival=0)
    order.add(cold)
    num_served = 0
    for step in range(500):
        for number in (2 * step + 1, 2 * step + 2):
            order.add(FakeRequest(arrival=number, arrived_s=float(step), num_matched=4000))
        request = next(order.ordered(float(step)))
        if request is cold:
            break
        order.admit(request)
        num_served += 1
    assert num_served == most


@pytest.mark.parametrize("name", sorted(set(ORDERS) - set(MATCH_ORDERS)))
def test_other_orders_read_the_match_only_of_yielded_requests(name: str):
    def arrivals(*, known_at_once: bool) -> list[int]:
        order, rng = order_named(name), Random(0)
        matches: list[int] = []
        for arrival in range(60):
            request = random_request(rng, arrival, 0.0)
            matches.append(request.num_matched)
            request.num_matched = request.num_matched if known_at_once else 0
            order.add(request)
        yielded: list[int] = []
        for request in order.ordered(0.0):
            request.num_matched = matches[request.arrival]
            yielded.append(request.arrival)
        return yielded

    assert arrivals(known_at_once=True) == arrivals(known_at_once=False)


def test_names():
    assert set(PLAIN_ORDERS) < set(ORDERS)
    assert set(MATCH_ORDERS) < set(ORDERS)
    assert isinstance(order_named("dfs_weight"), MultilevelOrder)
    with pytest.raises(ValueError, match=r"name must be one of fcfs, priority, .* got 'first'"):
        order_named("first")


def test_the_conformance_suite_finds_wrong_orders():
    class Forgetful(Naive):
        """An order that loses the last of more than five requests."""

        def ordered(self, now_s: float) -> Any:
            return iter(self.waiting[:5])

    class Repeating(Naive):
        def ordered(self, now_s: float) -> Any:
            return iter(self.waiting[:1] * len(self.waiting))

    class Untidy(Naive):
        """An order that keeps requests that have left."""

        def remove(self, request: FakeRequest) -> None:
            pass

        admit = remove

    def check_all(kind: type[Naive]) -> None:
        for seed in range(30):
            check_order(lambda: kind(by(lambda r: ())), Random(seed))

    for kind in (Forgetful, Repeating, Untidy):
        with pytest.raises(AssertionError):
            check_all(kind)


def test_trees_and_sweeps_leave_nothing_behind():
    order = DepthFirstWeight[Any]()
    requests = [FakeRequest(arrival=n, num_matched=8, text=b"AAAA" * n + b"BBBB" * (8 - n)) for n in range(8)]
    for request in requests:
        order.add(request)
    for request in requests:
        order.remove(request)
    assert list(order.ordered(0.0)) == []
    assert len(order) == 0


def test_srtf_counts_what_a_preempted_request_has_generated() -> None:
    fresh = FakeRequest(arrival=0, num_tokens=60, max_new_tokens=100)
    preempted = FakeRequest(arrival=1, num_tokens=120, num_matched=20, num_generated=60, max_new_tokens=150)
    for name, expected in (("shortest", [fresh, preempted]), ("srtf", [preempted, fresh])):
        order = order_named(name)
        order.add(fresh)
        order.add(preempted)
        assert list(order.ordered(1.0)) == expected


def test_srtf_expects_one_token_beyond_the_expected_end() -> None:
    late = FakeRequest(arrival=0, num_tokens=100, num_matched=99, num_generated=95, max_new_tokens=100)
    assert ByRemaining()(late) == (-late.priority, 1 + 2.0)
