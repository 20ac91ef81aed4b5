from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from pagewood.schedpolicy.admission.deadlines import Feasibility
from pagewood.schedpolicy.admission.quotas import Quota, Quotas
from pagewood.schedpolicy.admission.skip_ahead import SkipAhead
from pagewood.schedpolicy.orders.ranked import ByLongestMatch, RankedOrder
from pagewood.schedpolicy.simulation.choosers import CHOOSERS, LeastLoaded, PowerOfTwo, PrefixAware, chooser_named
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.metrics import Observations, Outcome
from pagewood.schedpolicy.simulation.policies import Policies, policies_named
from pagewood.schedpolicy.simulation.presets import H100_8B
from pagewood.schedpolicy.simulation.report import Objective, overtaken_s, records_of, summarise
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest
from pagewood.schedpolicy.simulation.workloads import generate

ONE = Fleet(machine=H100_8B, num_pages=14_304, page_size=64)


def lpm(age_weight: float) -> Policies:
    """Longest prefix match without skipping ahead: the order alone decides."""
    rank = ByLongestMatch(age_weight=age_weight)
    return replace(
        policies_named("lpm", page_size=64),
        order=RankedOrder[SimRequest](rank, reads_match=True, notified=True),
        skip_ahead=SkipAhead(max_skipped=0, max_passes=0),
    )


@pytest.mark.parametrize("age_weight", [1000.0, 4000.0])
def test_ageing_bounds_how_late_a_request_can_overtake_a_cold_one(age_weight: float):
    trace = generate("hot-and-cold", num_requests=2500, rate=15, seed=1)
    longest_match = max(len(request.keys) for request in trace.requests) * trace.block_size
    bound_s = longest_match / age_weight

    def overtaken(weight: float) -> float:
        (observed,) = simulate(trace, ONE, make_policies=lambda _: lpm(weight))
        return overtaken_s(observed.records)

    assert 0 < overtaken(age_weight) <= bound_s
    assert overtaken(0.0) > 1.2 * bound_s  # by match alone, cold requests starve


def test_with_overlap_a_request_starts_one_step_later_if_others_run():
    long = TraceRequest(arrived_s=0.0, num_prompt=64, num_output=200, max_new_tokens=256)
    late = replace(long, arrived_s=0.5)
    alone = replace(long, arrived_s=60.0)
    trace = Trace(name="three", requests=(long, late, alone), block_size=64)

    def first_tokens(*, overlaps: bool) -> list[float]:
        fleet = replace(ONE, overlaps=overlaps)
        (observed,) = simulate(trace, fleet, make_policies=lambda _: policies_named("fcfs", page_size=64))
        return [record.first_token_s for record in records_of([observed])]

    plain, overlapped = first_tokens(overlaps=False), first_tokens(overlaps=True)
    step_s = H100_8B.decode_s(1, 1, 200)
    assert overlapped[1] - plain[1] == pytest.approx(step_s, rel=0.02)
    assert overlapped[0] == plain[0]
    assert overlapped[2] == plain[2]


def test_a_request_that_can_never_fit_is_refused():
    trace = generate("poisson", num_requests=50, rate=5, seed=0)
    (observed,) = simulate(
        trace, replace(ONE, num_pages=40), make_policies=lambda _: policies_named("fcfs", page_size=64)
    )
    refused = [record for record in observed.records if record.outcome is Outcome.REFUSED]
    assert refused
    assert all(record.reason.endswith("pages of 40") for record in refused)
    assert len(observed.records) == 50


def test_a_request_that_would_be_late_is_refused_at_once():
    trace = generate("deadlines", num_requests=600, rate=60, seed=0)
    feasibility = Feasibility(model=H100_8B.model, chunk_tokens=2048, output_ratio=0.5)

    def met(chosen: Feasibility | None) -> tuple[float, int]:
        policies = [policies_named("edf", page_size=64, feasibility=chosen)]
        summary = summarise(simulate(trace, ONE, make_policies=lambda _: policies.pop()), Objective())
        return summary.deadlines_met, summary.num_refused

    (without, none), (with_, some) = met(None), met(feasibility)
    assert none == 0 < some
    assert with_ > without


def test_a_quota_holds(monkeypatch: pytest.MonkeyPatch):
    trace = generate("noisy-tenant", num_requests=300, rate=30, seed=0)
    highest = Counter[str]()
    admit = Quotas.admit

    def spy(self: Quotas, request: SimRequest) -> None:
        admit(self, request)
        highest[request.tenant] = max(highest[request.tenant], self.usage(request.tenant).num_running)

    monkeypatch.setattr(Quotas, "admit", spy)
    quotas = Quotas({}, default=Quota(max_running=3))
    (observed,) = simulate(trace, ONE, make_policies=lambda _: policies_named("fcfs", page_size=64, quotas=quotas))
    assert len(observed.records) == 300
    assert max(highest.values()) == 3


@pytest.mark.parametrize("router", CHOOSERS)
def test_all_requests_of_a_fleet_are_served_where_they_were_sent(router: str):
    trace = generate("multi-turn", num_requests=600, rate=60, seed=0)
    fleet = replace(ONE, num_pages=2000, num_replicas=8)
    observed = simulate(
        trace,
        fleet,
        make_policies=lambda replica: policies_named("lpm", page_size=64, seed=replica),
        router=chooser_named(router, seed=0),
    )
    records = records_of(observed)
    assert [record.arrival for record in records] == list(range(600))
    assert all(record.arrived_s <= record.admitted_s < record.first_token_s <= record.finished_s for record in records)
    assert [record.replica for record in observed[5].records] == [5] * len(observed[5].records)


def test_a_prefix_aware_router_hits_more_than_round_robin():
    trace = generate("multi-turn", num_requests=1500, rate=60, seed=0)

    def hit_rate(router: str) -> float:
        observed: Sequence[Observations] = simulate(
            trace,
            replace(ONE, num_replicas=8),
            make_policies=lambda _: policies_named("fcfs", page_size=64),
            router=chooser_named(router, seed=0),
        )
        return summarise(observed, Objective()).hit_rate

    assert hit_rate("prefix-aware") > 1.3 * hit_rate("round-robin")


def test_routers():
    keys = (1, 2, 3)
    assert LeastLoaded().choose(keys, [3, 1, 1]) == 1
    robin = chooser_named("round-robin", seed=0)
    assert [robin.choose(keys, [0, 0, 0]) for _ in range(4)] == [0, 1, 2, 0]
    two = PowerOfTwo(Random(0))
    counts = Counter(two.choose(keys, [9, 0, 9, 9]) for _ in range(4000))
    assert 0.40 < counts[1] / 4000 < 0.48  # 7 of 16 pairs have it
    aware = PrefixAware(factor=1.5, slack=2)
    assert aware.choose((1, 2, 3), [1, 0]) == 1
    assert aware.choose((1, 2, 9), [0, 2]) == 1
    assert aware.choose((1, 2, 9, 10), [0, 3]) == 0
    assert aware.choose((4,), [5, 6]) == 0
    with pytest.raises(ValueError, match=r"router must be one of round-robin, .*, got 'nearest'"):
        chooser_named("nearest", seed=0)
    with pytest.raises(ValueError, match="factor must be >= 1"):
        PrefixAware(factor=0.5)
    with pytest.raises(ValueError, match="slack must be >= 0"):
        PrefixAware(slack=-1)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("num_replicas", 1001, r"num_replicas must be in \[1, 1000\], got 1001"), ("num_pages", 0, "num_pages must be")],
)
def test_a_fleet_has_limits(name: str, value: int, message: str):
    with pytest.raises(ValueError, match=message):
        replace(ONE, **{name: value})


@pytest.mark.parametrize("policy", ["best", "lpm+luck"])
def test_policies_have_names(policy: str):
    with pytest.raises(ValueError, match=r"policy .*must be"):
        policies_named(policy, page_size=64)


@pytest.mark.parametrize("policy", ["lpm-sglang", "lpm-unaged", "fair+age", "lpm+defer", "shortest+defer+age", "wrr"])
def test_orders_can_be_wrapped(policy: str):
    trace = generate("bursty", num_requests=200, rate=40, seed=0)
    (observed,) = simulate(trace, ONE, make_policies=lambda _: policies_named(policy, page_size=64))
    assert len(observed.records) == 200
