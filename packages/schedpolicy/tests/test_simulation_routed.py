from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.schedpolicy import Autoscaler, Order, Quota, Quotas, Router, order_named
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.metrics import Outcome, RequestRecord
from pagewood.schedpolicy.simulation.operations import Failures, Operations, Scaling
from pagewood.schedpolicy.simulation.policies import Policies, policies_named
from pagewood.schedpolicy.simulation.presets import H100_8B
from pagewood.schedpolicy.simulation.report import Objective, records_of, summarise
from pagewood.schedpolicy.simulation.routed import FleetObservations, default_router, simulate_routed
from pagewood.schedpolicy.simulation.routed_request import RoutedSimRequest
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest
from pagewood.schedpolicy.simulation.workloads import generate

FLEET = Fleet(machine=H100_8B, num_pages=2000, page_size=64, num_replicas=3)


def policies(replica: int) -> Policies:
    return policies_named("fcfs", page_size=64)


def run(
    trace: Trace, operations: Operations, *, fleet: Fleet = FLEET, quotas: Quotas | None = None
) -> FleetObservations:
    router = default_router(fleet.page_size, 0, quotas=quotas)
    return simulate_routed(trace, fleet, operations, make_policies=policies, router=router)


def check_answers(trace: Trace, observed: FleetObservations) -> list[RequestRecord]:
    """Check that each request is answered once, with all its tokens."""
    records = records_of(observed.replicas)
    assert [record.arrival for record in records] == list(range(len(trace.requests)))
    for record, spec in zip(records, trace.requests, strict=True):
        assert record.outcome is Outcome.FINISHED
        assert record.num_output == spec.num_output
        assert spec.arrived_s == record.arrived_s <= record.admitted_s < record.first_token_s <= record.finished_s
    return records


def test_one_replica_with_places_for_all_does_what_it_does_without_a_router():
    trace = generate("multi-turn", num_requests=300, rate=20, seed=0)
    one = replace(FLEET, num_replicas=1)
    alone = records_of(simulate(trace, one, make_policies=policies))
    assert check_answers(trace, run(trace, Operations(num_places=300), fleet=one)) == alone


@settings(max_examples=25, deadline=None)
@given(rng=st.randoms(use_true_random=False))
def test_no_request_is_lost_or_answered_twice(rng: Random):
    """Whatever dies, drains, starts or is displaced, and wherever prompts are computed."""
    seed = rng.randrange(1000)
    trace = generate(rng.choice(("multi-turn", "bursty")), num_requests=60, rate=rng.choice((5, 100)), seed=seed)
    requests = tuple(replace(request, priority=rng.choice((0, 0, 1))) for request in trace.requests)
    trace = Trace(name="random", requests=requests, block_size=trace.block_size)
    is_scaled = rng.random() < 0.3
    scaler = Autoscaler(min_replicas=rng.choice((0, 1)), max_replicas=4, num_places=4, zero_after_s=5.0)
    operations = Operations(
        num_places=rng.choice((1, 4, 64)),
        num_prefill=0 if is_scaled else rng.choice((0, 0, 1, 2)),
        failures=rng.choice((None, Failures(mean_s=rng.choice((5.0, 20.0)), restart_s=rng.choice((0.0, 5.0))))),
        restart_every_s=None if is_scaled else rng.choice((None, 5.0)),
        restart_s=rng.choice((0.0, 3.0)),
        scaling=Scaling(autoscaler=scaler, every_s=1.0, startup_s=2.0) if is_scaled else None,
        seed=seed,
    )
    fleet = replace(FLEET, num_pages=rng.choice((200, 2000)), overlaps=rng.choice((False, True)))
    longest = max(request.num_prompt + request.max_new_tokens for request in trace.requests)
    if longest > 200 * 64:
        fleet = replace(fleet, num_pages=2000)
    check_answers(trace, run(trace, operations, fleet=fleet))


def test_requests_go_on_where_they_were():
    trace = generate("poisson", num_requests=100, rate=20, seed=0)
    observed = run(trace, Operations(failures=Failures(mean_s=5.0, restart_s=1.0)))
    check_answers(trace, observed)
    assert observed.num_deaths > 3
    assert observed.num_resumed > 10
    # With their tokens so far, so none is decoded twice; the first of each is not decoded.
    num_decoded = sum(one.num_decode_tokens for one in observed.replicas)
    assert num_decoded <= sum(request.num_output - 1 for request in trace.requests)


def test_a_request_displaced_in_its_last_step_is_answered_by_the_next_replica_only():
    requests = tuple(
        TraceRequest(arrived_s=0.0007 * number, num_prompt=64, num_output=1, max_new_tokens=1, priority=number % 3)
        for number in range(60)
    )
    trace = Trace(name="short", requests=requests, block_size=64)
    observed = run(trace, Operations(num_places=1))
    check_answers(trace, observed)
    assert observed.num_displaced >= 3


def test_a_run_can_be_repeated():
    trace = generate("bursty", num_requests=100, rate=20, seed=0)
    operations = Operations(num_places=4, failures=Failures(mean_s=5.0, restart_s=1.0), seed=3)
    first, second = run(trace, operations), run(trace, operations)
    assert records_of(first.replicas) == records_of(second.replicas)
    other = run(trace, replace(operations, seed=4))
    assert records_of(first.replicas) != records_of(other.replicas)


def test_an_urgent_request_waits_for_no_other_while_the_fleet_is_overloaded():
    trace = generate("poisson", num_requests=600, rate=60, seed=0)
    requests = tuple(
        replace(request, priority=int(arrival % 20 == 0)) for arrival, request in enumerate(trace.requests)
    )
    trace = Trace(name="priorities", requests=requests, block_size=trace.block_size)
    observed = run(trace, Operations(num_places=8))
    records = check_answers(trace, observed)
    urgent = [record for record in records if record.arrival % 20 == 0]
    others = sorted(record.admitted_s - record.arrived_s for record in records if record.arrival % 20)
    assert observed.num_displaced > 0
    assert others[len(others) // 2] > 1.0
    assert max(record.admitted_s - record.arrived_s for record in urgent) < 0.5


def test_tenants_share_the_fleet():
    trace = generate("noisy-tenant", num_requests=600, rate=60, seed=0)
    tenants = Counter(request.tenant for request in trace.requests)
    noisy = max(tenants, key=lambda tenant: tenants[tenant])

    def quiet_s(order: Order[RoutedSimRequest] | None) -> float:
        router = Router[RoutedSimRequest](block_size=64, rng=Random(0), order=order)
        observed = simulate_routed(trace, FLEET, Operations(num_places=8), make_policies=policies, router=router)
        records = check_answers(trace, observed)
        waits = sorted(one.admitted_s - one.arrived_s for one in records if one.tenant != noisy)
        return waits[len(waits) // 2]

    assert quiet_s(None) < 0.25 * quiet_s(order_named("fcfs"))


def test_a_quota_is_counted_once_over_the_fleet():
    trace = generate("noisy-tenant", num_requests=200, rate=100, seed=0)
    quotas = Quotas({}, default=Quota(max_running=3))
    records = check_answers(trace, run(trace, Operations(num_places=8), quotas=quotas))
    for tenant in {record.tenant for record in records}:
        own = [record for record in records if record.tenant == tenant]
        for record in own:
            at_s = record.first_token_s
            assert sum(one.first_token_s <= at_s < one.finished_s for one in own) <= 3


def test_a_request_beyond_its_quota_is_refused():
    trace = generate("poisson", num_requests=20, rate=20, seed=0)
    quotas = Quotas({}, default=Quota(max_tokens_in_flight=300))
    records = records_of(run(trace, Operations(), quotas=quotas).replicas)
    refused = [record for record in records if record.outcome is Outcome.REFUSED]
    assert len(records) == 20
    assert refused
    assert all(record.reason.startswith("max_tokens_in_flight") for record in refused)


def test_prompts_are_computed_apart_from_decodes():
    trace = generate("heavy-tailed", num_requests=300, rate=10, seed=0)
    apart = run(trace, Operations(num_prefill=1), fleet=replace(FLEET, num_pages=14_304))
    check_answers(trace, apart)
    prefill, *decodes = apart.replicas[:3]
    num_prompt = sum(request.num_prompt for request in trace.requests)
    assert prefill.num_prefill_tokens + prefill.num_decode_tokens > 0.8 * num_prompt
    assert sum(one.num_prefill_tokens for one in decodes) < 0.2 * num_prompt
    assert prefill.records == []


def test_the_fleet_follows_the_load_to_zero_and_back():
    busy = generate("poisson", num_requests=200, rate=40, seed=0)
    last_s = busy.requests[-1].arrived_s
    late = tuple(replace(request, arrived_s=request.arrived_s + last_s + 600) for request in busy.requests)
    trace = Trace(name="two", requests=(*busy.requests, *late), block_size=busy.block_size)
    autoscaler = Autoscaler(min_replicas=0, max_replicas=8, num_places=8, shrink_after_s=20.0, zero_after_s=60.0)
    scaling = Scaling(autoscaler=autoscaler, every_s=1.0, startup_s=5.0)
    observed = run(trace, Operations(num_places=8, scaling=scaling), fleet=replace(FLEET, num_replicas=1))
    records = check_answers(trace, observed)
    assert observed.most_replicas > 3
    assert observed.replica_s < 0.5 * observed.most_replicas * records[-1].finished_s
    first_late = records[200]
    assert 5.0 <= first_late.admitted_s - first_late.arrived_s <= 6.5  # a replica had to start


def test_the_router_hits_more_than_in_turn():
    trace = generate("multi-turn", num_requests=600, rate=60, seed=0)
    fleet = replace(FLEET, num_replicas=8)
    routed = summarise(run(trace, Operations(), fleet=fleet).replicas, Objective()).hit_rate
    assert routed > 1.3 * summarise(simulate(trace, fleet, make_policies=policies), Objective()).hit_rate


def test_a_fleet_that_dies_out_is_an_error():
    trace = generate("poisson", num_requests=100, rate=1, seed=0)
    with pytest.raises(ValueError, match=r"a replica must be left or start, \d+ requests wait for ever"):
        run(
            trace,
            Operations(failures=Failures(mean_s=2.0, restart_s=float("inf")), restart_every_s=10.0, restart_s=1e9),
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_places": 0}, "num_places must be >= 1, got 0"),
        ({"num_prefill": -1}, "num_prefill must be >= 0, got -1"),
        ({"transfer_s": -1.0}, "transfer_s must be >= 0 and finite, got -1.0"),
        ({"restart_every_s": 0.0}, "restart_every_s must be > 0 and finite, got 0.0"),
    ],
)
def test_operations_have_limits(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Operations(**arguments)


def test_what_cannot_be_together_is_refused():
    scaling = Scaling(autoscaler=Autoscaler(min_replicas=0, max_replicas=2, num_places=1))
    with pytest.raises(ValueError, match="num_prefill must be 0 with scaling, got 1"):
        Operations(scaling=scaling, num_prefill=1)
    with pytest.raises(ValueError, match="restart_every_s must be None with scaling, got 5"):
        Operations(scaling=scaling, restart_every_s=5.0)
    with pytest.raises(ValueError, match=r"num_prefill must be < num_replicas \(3\), got 3"):
        run(generate("poisson", num_requests=1, rate=1, seed=0), Operations(num_prefill=3))
    with pytest.raises(ValueError, match="mean_s must be > 0 and finite, got 0"):
        Failures(mean_s=0.0, restart_s=1.0)
