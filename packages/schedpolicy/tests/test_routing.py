from collections import Counter, deque
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.schedpolicy import Quota, Quotas, order_named
from pagewood.schedpolicy.routing.load import ReplicaLoad, Report
from pagewood.schedpolicy.routing.placement import Placement, Ticket
from pagewood.schedpolicy.routing.replicas import Role
from pagewood.schedpolicy.routing.router import Router, default_order
from pagewood.schedpolicy.testing.routing import FakeRouted, check_router

BLOCK_SIZE = 4


def router(**arguments: Any) -> Router[FakeRouted]:
    all_arguments: dict[str, Any] = {"block_size": BLOCK_SIZE, "rng": Random(0), "request_tokens": 8}
    return Router(**(all_arguments | arguments))


def request(arrival: int, **attributes: Any) -> FakeRouted:
    return FakeRouted(arrival=arrival, **attributes)


def stored(*hashes: int) -> list[object]:
    return [["BlockStored", list(hashes)]]


@pytest.mark.parametrize("order", ["default", "fcfs", "fair", "lpm"])
@settings(max_examples=25, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_choices_are_those_of_a_search_over_all_replicas(order: str, rng: Random):
    check_router(Router, default_order if order == "default" else lambda: order_named(order), rng)


@settings(max_examples=25, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_choices_with_roles_are_those_of_a_search_over_all_replicas(rng: Random):
    check_router(Router, default_order, rng, roles=tuple(Role))


def test_many_replicas_with_one_prefix_are_searched_by_load():
    rng = Random(0)
    fleet = router(max_excess_tokens=100.0)
    names = list(range(200))
    for name in names:
        fleet.join(name, num_places=9)
        fleet.follow(name, 0, 1, stored(*range(rng.choice((0, 1, 1, 5)))))
    for arrival in range(600):
        key = {
            name: (fleet.load(name)[1] + 8 * (fleet.load(name)[0] + 1), name)
            for name in names
            if fleet.load(name)[0] < 9
        }
        cached = {name: 4 * len(fleet.index.blocks(name)) for name in range(200)}
        (placement,) = fleet.route(request(arrival, num_tokens=24, block_hashes=(0, 1, 2, 3, 4)), 0.0)
        least = min(key.values())[0]
        chosen = placement.replica
        assert isinstance(chosen, int)
        assert key[chosen][0] - cached[chosen] == min(
            key[name][0] - cached[name] for name in key if key[name][0] <= least + 100
        )


def test_the_prefix_attracts_a_request_only_as_far_as_it_saves_work():
    fleet = router()
    fleet.join("cold", num_places=100)
    fleet.join("warm", num_places=100)
    fleet.follow("warm", 0, 1, stored(*range(10)))
    chosen = [
        fleet.route(request(arrival, num_tokens=41, block_hashes=tuple(range(10))), 0.0)[0].replica
        for arrival in range(9)
    ]
    # A request on "warm" costs 8 + 1 tokens there, and saves 40 against the idle "cold".
    assert chosen == ["warm"] * 5 + ["cold"] + ["warm"] * 3


def test_a_cache_attracts_no_request_above_the_bound_on_imbalance():
    fleet = router(max_excess_tokens=20.0)
    fleet.join("cold", num_places=100)
    fleet.join("warm", num_places=100)
    fleet.follow("warm", 0, 1, stored(*range(100)))
    chosen = [
        fleet.route(request(arrival, num_tokens=400, block_hashes=tuple(range(100))), 0.0)[0].replica
        for arrival in range(4)
    ]
    # Each of them costs 8 tokens of load on "warm", and saves 400 against "cold".
    assert chosen == ["warm", "warm", "warm", "cold"]


def test_a_removed_prefix_attracts_no_more():
    fleet = router()
    fleet.join("a", num_places=9)
    fleet.join("b", num_places=9)
    fleet.follow("a", 0, 1, stored(1, 2, 3))
    (first,) = fleet.route(request(0, num_tokens=13, block_hashes=(1, 2, 3)), 0.0)
    assert (first.replica, first.request.num_matched) == ("a", 12)
    fleet.follow("a", 1, 2, [["BlockRemoved", [1, 2, 3]]])
    (second,) = fleet.route(request(1, num_tokens=13, block_hashes=(1, 2, 3)), 0.0)
    assert (second.replica, second.request.num_matched) == ("b", 0)


def test_an_old_report_causes_no_herd():
    fleet = router()
    for name in ("a", "b", "c"):
        fleet.join(name, num_places=1000)
    fleet.report("b", Report(at_s=0.0, num_requests=5, num_prompt_tokens=50))
    fleet.report("c", Report(at_s=0.0, num_requests=5, num_prompt_tokens=50))
    chosen = Counter(fleet.route(request(n, num_tokens=12), 1.0)[0].replica for n in range(30))
    assert chosen["a"] < 20  # its report is old, but not what was sent since
    before = {name: fleet.load(name) for name in fleet.replicas}
    fleet.report("a", Report(at_s=0.5, num_requests=0))
    assert fleet.load("a") == before["a"]
    fleet.report("a", Report(at_s=1.0, num_requests=chosen["a"] + 2, num_prompt_tokens=12 * chosen["a"] + 7))
    assert fleet.load("a") == (chosen["a"] + 2, 12 * chosen["a"] + 7)
    fleet.report("a", Report(at_s=0.9, num_requests=99))
    assert fleet.load("a") == (chosen["a"] + 2, 12 * chosen["a"] + 7)


@settings(max_examples=100, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_reported_loads_count_what_was_sent_and_ended_since(rng: Random):
    load, log, foreign = ReplicaLoad(), list[tuple[float, int]](), 3
    now_s = 0.0
    for _ in range(30):
        now_s += rng.choice((0.0, 1.0))
        change = rng.choice((1, 1, -1)) if load.num_own_requests else 1
        load.change(now_s, change, 10 * change)
        log.append((now_s, change))
        if rng.random() < 0.3:
            foreign, at_s = rng.randrange(5), now_s - rng.choice((0.0, 0.0, 2.0))
            own = sum(num for then_s, num in log if then_s <= at_s)
            if not load.report(Report(at_s=at_s, num_requests=own + foreign, num_prompt_tokens=10 * (own + foreign))):
                foreign = load.num_foreign_requests
        elif load.num_foreign_requests == 0 and load.num_foreign_tokens == 0:
            foreign = 0
        assert (load.num_requests, load.num_tokens) == (load.num_own_requests + foreign, 10 * load.num_requests)


def test_a_slow_replica_gets_less():
    fleet = router()
    fleet.join("slow", num_places=1000)
    fleet.join("fast", num_places=1000)
    fleet.report("slow", Report(at_s=0.0, num_requests=0, slowness=3.0))
    chosen = Counter(fleet.route(request(n, num_tokens=12), 1.0)[0].replica for n in range(40))
    assert chosen == {"fast": 30, "slow": 10}


def test_a_full_and_a_draining_replica_get_nothing_until_they_have_room():
    fleet = router()
    fleet.join("a", num_places=2)
    fleet.join("b", num_places=2)
    fleet.drain("b")
    fleet.report("a", Report(at_s=0.0, num_requests=0, is_full=True))
    assert fleet.route(request(0), 1.0) == []
    fleet.report("a", Report(at_s=1.0, num_requests=0))
    assert [placement.replica for placement in fleet.dispatch(1.0)] == ["a"]
    fleet.route(request(1), 1.0)
    assert fleet.route(request(2), 1.0) == []
    fleet.drain("b", drains=False)
    assert [placement.replica for placement in fleet.dispatch(1.0)] == ["b"]


def test_a_lost_replica_gets_nothing_and_its_requests_go_to_others():
    fleet = router()
    fleet.join("a", num_places=2)
    (first,) = fleet.route(request(0), 0.0)
    fleet.join("b", num_places=2)
    departure = fleet.leave("a", 1.0, has_died=True)
    assert [one.arrival for one in departure.waiting] == [0]
    (second,) = fleet.dispatch(1.0)
    assert (second.replica, second.ticket.attempt) == ("b", 2)
    assert not fleet.end(first.ticket, 2.0)  # the answer of "a" came late
    assert fleet.end(second.ticket, 2.0)
    assert not fleet.end(second.ticket, 2.0)
    assert all(fleet.route(request(n), 3.0)[0].replica == "b" for n in (1, 2))
    assert fleet.route(request(3), 3.0) == []


def test_a_request_whose_replicas_die_is_ended():
    fleet = router(max_deaths=2)
    fleet.join("a", num_places=2)
    fleet.route(request(0), 0.0)
    assert fleet.leave("a", 1.0, has_died=True).ended == ()
    fleet.join("b", num_places=2)
    fleet.dispatch(1.0)
    assert [one.arrival for one in fleet.leave("b", 2.0, has_died=True).ended] == [0]
    assert (fleet.num_waiting, fleet.num_placed) == (0, 0)


def test_an_urgent_request_takes_the_place_of_the_last_of_the_lowest_priority():
    fleet = router()
    fleet.join("a", num_places=2)
    fleet.join("b", num_places=2)
    low = {n: fleet.route(request(n, priority=n % 2), 0.0)[0].ticket for n in range(4)}
    (placement,) = fleet.route(request(4, priority=2), 1.0)
    assert placement.displaced == low[2]
    assert placement.replica == low[2].replica
    assert fleet.num_waiting == 1
    (again,) = fleet.route(request(5, priority=2), 1.0)
    assert again.displaced == low[0]
    assert fleet.end(placement.ticket, 2.0)
    (back,) = fleet.dispatch(2.0)
    assert (back.request.arrival, back.ticket.attempt) == (0, 2)


def test_a_request_is_displaced_a_bounded_number_of_times():
    fleet = router(max_moves=2)
    fleet.join("a", num_places=1)
    (low,) = fleet.route(request(0), 0.0)
    for n in (1, 2):
        (high,) = fleet.route(request(n, priority=1), 1.0)
        assert high.displaced is not None
        fleet.end(high.ticket, 2.0)
        (low,) = fleet.dispatch(2.0)
    assert fleet.route(request(3, priority=1), 3.0) == []
    assert fleet.end(low.ticket, 4.0)
    assert [placement.request.arrival for placement in fleet.dispatch(4.0)] == [3]


def test_a_draining_replica_gets_no_request_in_place_of_another():
    fleet = router()
    fleet.join("a", num_places=1)
    fleet.route(request(0), 0.0)
    fleet.drain("a")
    assert fleet.route(request(1, priority=1), 1.0) == []
    fleet.drain("a", drains=False)
    assert [placement.request.arrival for placement in fleet.dispatch(1.0)] == [1]


@settings(max_examples=60, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_quotas_are_counted_once_over_the_fleet(rng: Random):
    quotas = Quotas({"a": Quota(max_running=3), "b": Quota(max_tokens_in_flight=150)})
    fleet = router(quotas=quotas, order=order_named(rng.choice(("fcfs", "fair"))))
    for name in range(3):
        fleet.join(name, num_places=4)
    live: dict[int, FakeRouted] = {}
    tickets: dict[int, Ticket] = {}
    moves: Counter[int] = Counter()
    arrival = 0
    for _ in range(80):
        sent: list[Placement[FakeRouted]] = []
        if rng.random() < 0.5:
            new = request(
                arrival, tenant=rng.choice("abc"), num_tokens=rng.choice((10, 90)), priority=rng.choice((0, 1))
            )
            live[arrival] = new
            arrival += 1
            sent = fleet.route(new, 0.0)
        elif tickets and rng.random() < 0.8:
            ended = rng.choice(list(tickets))
            assert fleet.end(tickets.pop(ended), 0.0)
            del live[ended]
            sent = fleet.dispatch(0.0)
        elif live:
            cancelled = rng.choice(list(live))
            ticket = fleet.cancel(cancelled, 0.0)
            assert ticket == tickets.pop(cancelled, None)
            del live[cancelled]
            sent = fleet.dispatch(0.0)
        for placement in sent:
            if placement.displaced is not None:
                assert tickets.pop(placement.displaced.arrival) == placement.displaced
                moves[placement.displaced.arrival] += 1
            tickets[placement.request.arrival] = placement.ticket
        placed = [live[one] for one in tickets]
        assert sum(one.tenant == "a" for one in placed) <= 3
        assert sum(one.num_tokens + one.max_new_tokens for one in placed if one.tenant == "b") <= 150
        assert fleet.num_placed == len(placed)
        assert fleet.num_placed + fleet.num_waiting == len(live)
        waiting = [one for number, one in live.items() if number not in tickets]
        first = {tenant: min((-w.priority, w.arrival) for w in waiting if w.tenant == tenant) for tenant in
                 {w.tenant for w in waiting}}  # fmt: skip
        could = [live[number] for _, number in first.values() if quotas.check(live[number]).fits]
        if len(placed) < 12:
            assert not could, "a request waits although its quota and a place are free"
        else:
            lowest = min((live[one].priority for one in tickets if moves[one] < 3), default=1)  # others are not moved
            assert all(one.priority <= lowest or fleet.num_held for one in could)


def test_a_large_request_of_a_tenant_at_its_quota_is_not_passed_for_ever():
    fleet = router(quotas=Quotas({"a": Quota(max_tokens_in_flight=100)}))
    fleet.join("a", num_places=9)
    small = deque(fleet.route(request(n, tenant="a", num_tokens=30, max_new_tokens=1), 0.0)[0].ticket for n in range(3))
    assert fleet.route(request(3, tenant="a", num_tokens=90, max_new_tokens=1), 0.0) == []
    for n in range(4, 7):
        assert fleet.route(request(n, tenant="a", num_tokens=30, max_new_tokens=1), 0.0) == []
        fleet.end(small.popleft(), 0.0)
        sent = [placement.request.arrival for placement in fleet.dispatch(0.0)]
        assert sent == ([] if small else [3])


@settings(max_examples=40, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_no_request_starves(rng: Random):
    """With m older ones waiting it is among the next 8 * (m + 1) that get a free place, each time it waits."""
    fleet = router(max_moves=2)
    fleet.join(0, num_places=2)
    fleet.join(1, num_places=1)
    tickets: dict[int, Ticket] = {}
    waits_since: dict[int, int] = {}  # number of free places that were taken when it had waited 10 s, by arrival
    bound: dict[int, int] = {}
    num_free, num_moves = 0, Counter[int]()
    queued: dict[int, float] = {}
    for step in range(150):
        now_s = float(step)
        sent = list[Placement[FakeRouted]]()
        if rng.random() < 0.7:
            new = request(step, arrived_s=now_s, priority=rng.choice((0, 5, 5, 6)), tenant=rng.choice("ab"))
            queued[step] = now_s
            sent = fleet.route(new, now_s)
        elif tickets:
            assert fleet.end(tickets.pop(rng.choice(list(tickets))), now_s)
            sent = fleet.dispatch(now_s)
        for placement in sent:
            number = placement.request.arrival
            if number in bound:
                assert num_free - waits_since.pop(number) < bound.pop(number)
            num_free += placement.displaced is None
            del queued[number]
            tickets[number] = placement.ticket
            if placement.displaced is not None:
                victim = placement.displaced.arrival
                del tickets[victim]
                queued[victim] = float(victim)
                num_moves[victim] += 1
                # Those older than the one that returns come back at most `max_moves` times each.
                for other in bound:
                    bound[other] += 8 * (victim < other)
        for number, since_s in queued.items():
            if number not in bound and now_s - since_s >= 10.0:
                waits_since[number] = num_free
                bound[number] = 8 * (sum(other < number for other in queued) + 1)
        for number, limit in bound.items():
            assert num_free - waits_since[number] < limit
    assert all(num <= 2 for num in num_moves.values())


def test_a_prompt_is_computed_by_a_replica_for_prompts():
    fleet = router(min_apart_tokens=10)
    fleet.join("p", num_places=9, role=Role.PREFILL)
    assert fleet.route(request(0, num_tokens=50), 0.0) == []
    fleet.join("d", num_places=9, role=Role.DECODE)
    (first,) = fleet.dispatch(0.0)
    assert (first.replica, first.prefill) == ("d", "p")
    assert (fleet.load("d"), fleet.load("p")) == ((1, 0), (1, 50))
    (short,) = fleet.route(request(1, num_tokens=10), 0.0)
    assert (short.replica, short.prefill) == ("d", None)
    assert fleet.computed(first.ticket, 1.0)
    assert fleet.load("p") == (0, 0)
    (declined,) = fleet.route(request(4, num_tokens=30), 1.0)
    assert fleet.unaid(declined.ticket, 1.0)
    assert (fleet.load("d"), fleet.load("p")) == ((3, 40), (0, 0))
    assert fleet.end(declined.ticket, 1.0)
    assert not fleet.unaid(declined.ticket, 1.0)
    (third,) = fleet.route(request(2, num_tokens=60), 1.0)
    departure = fleet.leave("p", 2.0, has_died=True)
    assert [(one.ticket, one.prefill) for one in departure.unaided] == [(third.ticket, None)]
    assert (departure.waiting, fleet.load("d")) == ((), (3, 70))
    (alone,) = fleet.route(request(3, num_tokens=60), 2.0)
    assert (alone.replica, alone.prefill) == ("d", None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"block_size": 0}, "block_size must be >= 1, got 0"),
        ({"request_tokens": -1}, "request_tokens must be >= 0, got -1"),
        ({"max_excess_tokens": float("nan")}, "max_excess_tokens must be >= 0, got nan"),
        ({"max_moves": -1}, "max_moves must be >= 0, got -1"),
        ({"max_deaths": 0}, "max_deaths must be >= 1, got 0"),
        ({"max_blocks": 0}, "max_blocks must be >= 1, got 0"),
        ({"min_apart_tokens": 0.5}, "min_apart_tokens must be an integer, got 0.5"),
    ],
)
def test_limits_are_checked(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        router(**arguments)


def test_calls_are_checked():
    fleet = router(quotas=Quotas({"a": Quota(max_kv_tokens=9)}))
    fleet.join("a", num_places=1)
    with pytest.raises(ValueError, match="replica must be new, got 'a'"):
        fleet.join("a", num_places=1)
    with pytest.raises(ValueError, match="num_places must be >= 1, got 0"):
        fleet.join("b", num_places=0)
    with pytest.raises(KeyError, match="replica must have joined, got 'b'"):
        fleet.leave("b", 0.0, has_died=False)
    fleet.route(request(0), 0.0)
    with pytest.raises(ValueError, match="arrival must be unique, got 0 again"):
        fleet.route(request(0), 0.0)
    with pytest.raises(ValueError, match="request must fit its tenant's quota, got max_kv_tokens: 64 wanted, 9 left"):
        fleet.route(request(1, tenant="a"), 0.0)
    waiting = order_named("fcfs")
    waiting.add(request(7))
    with pytest.raises(ValueError, match="order must be empty, got 1 requests"):
        router(order=waiting)
    for name, value in (("at_s", float("inf")), ("slowness", 0.0), ("num_requests", -1), ("num_prompt_tokens", -1)):
        fields: dict[str, Any] = {"at_s": 0.0, "num_requests": 0}
        fields[name] = value
        with pytest.raises(ValueError, match=f"{name} must be"):
            Report(**fields)
