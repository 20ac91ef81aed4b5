import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.schedpolicy.simulation.histogram import DurationHistogram
from pagewood.schedpolicy.simulation.metrics import Moment, Observations, Outcome, RequestRecord, Timeline
from pagewood.schedpolicy.simulation.report import Objective, overtaken_s, spread_of, summarise
from pagewood.schedpolicy.simulation.service import ServiceGap


def record(arrival: int, *, admitted_s: float = 0.0, **changes: float) -> RequestRecord:
    values = {"arrived_s": float(arrival), "first_token_s": arrival + 1.0, "finished_s": arrival + 2.0} | changes
    return RequestRecord(
        arrival=arrival,
        replica=0,
        tenant="",
        outcome=Outcome.FINISHED if admitted_s < math.inf else Outcome.REFUSED,
        reason="",
        admitted_s=admitted_s,
        num_prompt=100,
        num_output=11,
        num_hit=25,
        num_preemptions=0,
        num_recomputed=0,
        deadline_s=values.pop("deadline_s", math.inf),
        **values,
    )


@given(st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=50), st.sampled_from([1, 50, 90, 99, 100]))
def test_a_percentile_of_the_histogram_is_within_one_percent(values: list[float], percent: int):
    histogram = DurationHistogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=0.01)
    assert histogram.num == len(values)


@given(st.floats(1e-3, 1.0), st.floats(0, 1e-2), st.integers(1, 500), st.integers(1, 9))
def test_a_ramp_counts_as_its_values_one_by_one(first_s: float, step_s: float, num_steps: int, num: int):
    ramp, single = DurationHistogram(), DurationHistogram()
    ramp.add_ramp(first_s, step_s, num_steps, num)
    for step in range(num_steps):
        single.add(first_s + step * step_s, num)
    assert ramp.num == single.num
    assert ramp.total_s == pytest.approx(single.total_s)
    assert ramp.longest_s == pytest.approx(single.longest_s)
    for percent in (10, 50, 99):
        assert ramp.percentile(percent) == pytest.approx(single.percentile(percent), rel=0.011)


def test_merged_histograms_count_both():
    one, other = DurationHistogram(), DurationHistogram()
    one.add(1.0, 3)
    other.add(2.0)
    one.merge(other)
    assert (one.num, one.total_s, one.longest_s) == (4, 5.0, 2.0)
    assert [count for _, count in one.buckets()] == [3, 1]
    assert DurationHistogram().percentile(50) == 0.0


def test_percentiles_are_of_nearest_rank():
    spread = spread_of([float(value) for value in range(1, 101)])
    assert (spread.p50, spread.p90, spread.p99, spread.longest, spread.mean) == (50, 90, 99, 100, 50.5)
    assert spread_of([]).longest == 0.0


def test_overtaken_is_the_longest_time_by_which_a_request_overtook_another():
    assert overtaken_s([record(0, admitted_s=1), record(1, admitted_s=2)]) == 0
    assert overtaken_s([record(0, admitted_s=9), record(3, admitted_s=4), record(5, admitted_s=9)]) == 3
    assert overtaken_s([record(0, admitted_s=math.inf), record(1, admitted_s=2)]) == 0


def brute_gap(events: list[tuple[str, str, float]]) -> float:
    """Compare every pair of tenants over every interval in which both wait."""
    tenants = sorted({tenant for _, tenant, _ in events})
    largest = 0.0
    for one in tenants:
        for other in tenants:
            waiting = dict.fromkeys(tenants, 0)
            service = dict.fromkeys(tenants, 0.0)
            since: list[float] = []
            for kind, tenant, cost in events:
                if kind == "serve":
                    service[tenant] += cost
                else:
                    waiting[tenant] += 1 if kind == "wait" else -1
                if waiting[one] and waiting[other]:
                    since.append(service[one] - service[other])
                    largest = max(largest, max(since) - min(since))
                else:
                    since = []
    return largest


@given(st.integers(0, 10_000), st.integers(1, 60))
def test_the_service_gap_is_that_of_all_intervals(seed: int, num: int):
    rng, gap = Random(seed), ServiceGap()
    waiting = dict.fromkeys("abc", 0)
    events: list[tuple[str, str, float]] = []
    for _ in range(num):
        tenant = rng.choice("abc")
        kind = rng.choice(["wait", "leave", "serve", "serve"])
        if kind == "leave" and not waiting[tenant]:
            continue
        if kind == "wait" or (kind == "serve" and tenant not in gap.service_of()):
            gap.wait(tenant)
            waiting[tenant] += 1
            events.append(("wait", tenant, 0.0))
        elif kind == "leave":
            gap.leave(tenant)
            waiting[tenant] -= 1
            events.append(("leave", tenant, 0.0))
        else:
            cost = float(rng.randint(1, 9))
            gap.serve({tenant: cost})
            events.append(("serve", tenant, cost))
    assert gap.largest == brute_gap(events)


def test_a_summary():
    observed = Observations()
    observed.records = [
        record(0),
        record(1, first_token_s=9.0, finished_s=9.5),
        record(2, deadline_s=3.0),
        record(3, admitted_s=math.inf, finished_s=3.0),
    ]
    observed.busy_s = 4.75
    summary = summarise([observed], Objective(first_token_s=2.0, per_token_s=0.1))
    assert (summary.num_requests, summary.num_refused, summary.duration_s) == (4, 1, 9.5)
    assert (summary.goodput, summary.deadlines_met, summary.hit_rate, summary.busy) == (0.25, 0.0, 0.25, 0.5)
    assert (summary.ttft.longest, summary.e2e.p50) == (8.0, 2.0)
    assert summary.tenants[""].goodput == 0.25


def test_a_timeline_stays_short_and_covers_all_of_the_run():
    timeline = Timeline()
    for second in range(100_000):
        if timeline.is_due(second):
            timeline.add(Moment(second, 0, 0, 0, 0))
    assert 250 <= len(timeline.moments) <= 600
    assert timeline.moments[0].at_s == 0
    assert timeline.moments[-1].at_s > 99_000


@pytest.mark.parametrize("name", ["first_token_s", "per_token_s"])
def test_an_objective_is_positive(name: str):
    with pytest.raises(ValueError, match=f"{name} must be > 0"):
        Objective(**{name: 0.0})
