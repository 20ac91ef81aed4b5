"""Priority, fairness and the bound on starvation over a whole simulated fleet: with three replicas and with 1,000."""

from dataclasses import replace
from heapq import heappop, heappush
from random import Random
from typing import Any, cast

import pytest

from pagewood.schedpolicy import MultilevelOrder, Order, Router, fair_share
from pagewood.schedpolicy.routing.placement import Placement
from pagewood.schedpolicy.simulation.fleet import Fleet
from pagewood.schedpolicy.simulation.metrics import RequestRecord
from pagewood.schedpolicy.simulation.operations import Operations
from pagewood.schedpolicy.simulation.policies import Policies, policies_named
from pagewood.schedpolicy.simulation.presets import H100_8B
from pagewood.schedpolicy.simulation.report import records_of
from pagewood.schedpolicy.simulation.routed import simulate_routed
from pagewood.schedpolicy.simulation.routed_request import RoutedSimRequest
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest

NUM_OUTPUT = 240
SERVICE_S = 1.5
"""Roughly what a request takes alone."""
AGE_AFTER_S = 10.0
BOUND = 8
SIZES = pytest.mark.parametrize("num_replicas", [3, pytest.param(1000, marks=pytest.mark.slow)])


class Watched:
    """A router that checks the bound on starvation which `Router` promises.

    A request that has waited `AGE_AFTER_S`, with m older ones waiting then, is among the next `BOUND * (m + 1)` that
    get a free place. An older one that is displaced later waits again, and counts again.
    """

    def __init__(self, order: Order[Any] | None = None) -> None:
        self._router = Router[RoutedSimRequest](block_size=64, rng=Random(0), order=order)
        self._waiting: set[int] = set()
        # Those that have not waited long enough, by the time when they will have.
        self._young: list[tuple[float, int]] = []
        self._latest: dict[int, int] = {}  # by arrival, the number of free places that may be given before it gets one
        self.num_free = 0
        self.num_old = 0
        self.num_late = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)

    def route(self, request: RoutedSimRequest, now_s: float) -> list[Placement[RoutedSimRequest]]:
        self._wait(request.arrival, request.arrived_s)
        return self._seen(self._router.route(request, now_s), now_s)

    def dispatch(self, now_s: float) -> list[Placement[RoutedSimRequest]]:
        return self._seen(self._router.dispatch(now_s), now_s)

    def _wait(self, arrival: int, arrived_s: float) -> None:
        self._waiting.add(arrival)
        heappush(self._young, (arrived_s + AGE_AFTER_S, arrival))

    def _seen(self, placements: list[Placement[RoutedSimRequest]], now_s: float) -> list[Placement[RoutedSimRequest]]:
        displaced = [one.displaced.arrival for one in placements if one.displaced is not None]
        for one in placements:
            arrival = one.request.arrival
            self.num_late += self.num_free >= self._latest.pop(arrival, self.num_free + 1)
            self.num_free += one.displaced is None
            self._waiting.discard(arrival)
        for arrival in displaced:
            self._wait(arrival, 0.0)
            for other in self._latest:
                self._latest[other] += BOUND * (arrival < other)
        while self._young and self._young[0][0] <= now_s:
            _, arrival = heappop(self._young)
            if arrival in self._waiting and arrival not in self._latest:
                num_older = sum(other < arrival for other in self._waiting)
                self._latest[arrival] = self.num_free + BOUND * (num_older + 1)
                self.num_old += 1
        return placements


def policies(replica: int) -> Policies:
    return policies_named("fcfs", page_size=64)


def run(trace: Trace, router: Watched, *, num_replicas: int) -> list[RequestRecord]:
    fleet = Fleet(machine=H100_8B, num_pages=200, page_size=64, num_replicas=num_replicas)
    operations = Operations(num_places=1)
    observed = simulate_routed(
        trace, fleet, operations, make_policies=policies, router=cast("Router[RoutedSimRequest]", router)
    )
    return records_of(observed.replicas)


def flood(num_replicas: int) -> Trace:
    """Requests of high priority, 1.2 times as many as the fleet can serve, and some of low priority at the start."""
    spec = TraceRequest(arrived_s=0.0, num_prompt=64, num_output=NUM_OUTPUT, max_new_tokens=256)
    num_low, seconds = max(2, num_replicas // 10), 25.0
    low = [replace(spec, arrived_s=0.5 * index / num_low, tenant="low") for index in range(num_low)]
    num_high = int(1.2 * seconds * num_replicas / SERVICE_S)
    high = [replace(spec, arrived_s=index * seconds / num_high, tenant="high", priority=1) for index in range(num_high)]
    requests = tuple(sorted((*low, *high), key=lambda request: request.arrived_s))
    return Trace(name="flood", requests=requests, block_size=64)


@SIZES
def test_no_request_starves(num_replicas: int) -> None:
    trace = flood(num_replicas)
    aged = Watched()
    records = run(trace, aged, num_replicas=num_replicas)
    assert aged.num_old >= max(2, num_replicas // 10)
    assert aged.num_late == 0
    # Low ones are served while high ones still wait, although there is never a place for all of these.
    last_s = max(record.admitted_s for record in records)
    low_s = max(record.finished_s for record in records if record.tenant == "low")
    assert low_s < last_s


def test_without_ageing_they_starve_and_this_test_sees_it() -> None:
    starving = Watched(MultilevelOrder[Any](lambda one: one.priority, lambda: fair_share(charges_at_stop=True)))
    records = run(flood(3), starving, num_replicas=3)
    assert starving.num_late > 0
    last_s = max(record.admitted_s for record in records if record.tenant == "high")
    assert max(record.finished_s for record in records if record.tenant == "low") > last_s


@SIZES
def test_an_urgent_request_waits_for_no_other_one(num_replicas: int) -> None:
    """All places are taken by long requests of low priority, whichever replica it would have been sent to."""
    spec = TraceRequest(arrived_s=0.0, num_prompt=64, num_output=NUM_OUTPUT, max_new_tokens=256)
    low = [spec] * (2 * num_replicas)
    urgent = [
        replace(spec, arrived_s=0.3 + 0.2 * index / num_replicas, tenant="high", priority=1, num_output=2)
        for index in range(num_replicas // 2)
    ]
    trace = Trace(name="urgent", requests=(*low, *urgent), block_size=64)
    records = run(trace, Watched(), num_replicas=num_replicas)
    waits = [one.admitted_s - one.arrived_s for one in records if one.tenant == "high"]
    assert max(waits) < 0.05  # the end of the step that runs
    assert sorted(one.admitted_s for one in records if one.tenant != "high")[-1] > 1.0


@SIZES
def test_tenants_share_the_whole_fleet(num_replicas: int) -> None:
    """A tenant with ten times the requests of another, all waiting, gets no more places than that one."""
    spec = TraceRequest(arrived_s=0.0, num_prompt=64, num_output=NUM_OUTPUT, max_new_tokens=256)
    many = [replace(spec, tenant="many")] * (10 * num_replicas)
    few = [replace(spec, tenant="few", arrived_s=0.001)] * num_replicas
    records = run(Trace(name="shares", requests=(*many, *few), block_size=64), Watched(), num_replicas=num_replicas)
    done_s = max(one.finished_s for one in records if one.tenant == "few")
    num_many = sum(one.admitted_s < done_s for one in records if one.tenant == "many")
    # The first places are those of the many; then both get as many, so all few ends about two rounds later.
    assert num_many <= 3 * num_replicas + 8
