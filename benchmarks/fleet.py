"""What the router of many replicas costs, and what it finds in their caches.

    python benchmarks/fleet.py                            # cost of a decision
    python benchmarks/fleet.py --trace TRACE.jsonl        # and the hit rate on a trace of Mooncake's form
    python benchmarks/fleet.py --smoke                    # only to see that the script works

Cost: requests with prompts of 64 blocks, of which each replica has cached a part, arrive at a fleet that is three
quarters full; each time one ends, its replica publishes events, and the router decides again. Hit rate: the simulator,
with the router against requests that are sent in turn and at random.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter

from pagewood.schedpolicy import Router
from pagewood.schedpolicy.simulation import (
    H100_8B,
    Fleet,
    Objective,
    Operations,
    Trace,
    generate,
    load_trace,
    policies_named,
    simulate,
    simulate_routed,
    summarise,
)
from pagewood.schedpolicy.simulation.choosers import RoundRobin
from pagewood.schedpolicy.testing import FakeRouted

NUMS_REPLICAS = (3, 100, 1000)
NUM_PLACES = 16
NUM_BLOCKS = 64
BLOCK_SIZE = 16
NUM_FAMILIES = 200
PAGE_SIZE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Time of the router for one request, in us."""

    route_us: float
    """`route`, median."""
    route_p99_us: float
    end_us: float
    """`end`, the events of the replica, and `dispatch`, median."""


class AtRandom:
    """Sends each request to a random replica."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def choose(self, keys: Sequence[int], loads: Sequence[int]) -> int:
        """Return a replica, whatever its load."""
        return self._rng.randrange(len(loads))


def measure_cost(num_replicas: int, num_requests: int) -> Cost:
    """Measure the router at a load of three quarters of the places."""
    rng = Random(num_replicas)
    router = Router[FakeRouted](block_size=BLOCK_SIZE, rng=rng)
    positions = [0] * num_replicas
    for replica in range(num_replicas):
        router.join(replica, num_places=NUM_PLACES)
        _publish(router, replica, positions, rng)
    num_live = max(1, num_replicas * NUM_PLACES * 3 // 4)
    tickets = [router.route(_request(rng, arrival), 0.0)[0].ticket for arrival in range(num_live)]
    route_us: list[float] = []
    end_us: list[float] = []
    for arrival in range(num_live, num_live + num_requests):
        ended = rng.randrange(len(tickets))
        tickets[ended], tickets[-1] = tickets[-1], tickets[ended]
        ticket = tickets.pop()
        began_s = perf_counter()
        router.end(ticket, 0.0)
        assert isinstance(ticket.replica, int)
        _publish(router, ticket.replica, positions, rng)
        router.dispatch(0.0)
        end_us.append(1e6 * (perf_counter() - began_s))
        request = _request(rng, arrival)
        began_s = perf_counter()
        (placement,) = router.route(request, 0.0)
        route_us.append(1e6 * (perf_counter() - began_s))
        tickets.append(placement.ticket)
    route_us.sort()
    return Cost(route_us=median(route_us), route_p99_us=route_us[len(route_us) * 99 // 100], end_us=median(end_us))


def _request(rng: Random, arrival: int) -> FakeRouted:
    family = rng.randrange(NUM_FAMILIES)
    hashes = tuple(1000 * family + block for block in range(NUM_BLOCKS))
    return FakeRouted(
        arrival=arrival, tenant=rng.choice("abcd"), num_tokens=NUM_BLOCKS * BLOCK_SIZE + 5, block_hashes=hashes
    )


def _publish(router: Router[FakeRouted], replica: int, positions: list[int], rng: Random) -> None:
    """Store the first blocks of one prompt, and remove the last ones of another."""
    stored, removed = 1000 * rng.randrange(NUM_FAMILIES), 1000 * rng.randrange(NUM_FAMILIES)
    num_blocks = rng.randint(1, NUM_BLOCKS)
    events = [
        ("BlockStored", [stored + block for block in range(num_blocks)]),
        ("BlockRemoved", [removed + block for block in range(num_blocks, NUM_BLOCKS)]),
    ]
    router.follow(replica, positions[replica], positions[replica] + 1, events)
    positions[replica] += 1


def hit_rates(trace: Trace, *, num_replicas: int, num_pages: int) -> dict[str, float]:
    """Return the part of all prompt tokens that was found in a cache, by the way in which requests are sent."""
    fleet = Fleet(machine=H100_8B, num_pages=num_pages, page_size=PAGE_SIZE, num_replicas=num_replicas)

    def rate(way: str) -> float:
        if way == "router":
            observed = simulate_routed(
                trace, fleet, Operations(), make_policies=lambda _: policies_named("fcfs", page_size=PAGE_SIZE)
            ).replicas
        else:
            observed = simulate(
                trace,
                fleet,
                make_policies=lambda _: policies_named("fcfs", page_size=PAGE_SIZE),
                router=RoundRobin() if way == "round-robin" else AtRandom(Random(0)),
            )
        return summarise(observed, Objective()).hit_rate

    return {way: rate(way) for way in ("router", "round-robin", "random")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, help="JSON lines of Mooncake's form")
    parser.add_argument(
        "--requests", type=int, default=5000, help="decisions that are measured, and requests of the trace"
    )
    parser.add_argument("--replicas", type=int, default=8, help="replicas for the hit rate")
    parser.add_argument("--smoke", action="store_true", help="a few requests only, and a generated trace")
    options = parser.parse_args(arguments)
    num_requests = 20 if options.smoke else options.requests
    print("| replicas | route, us | p99 | end, us |\n|---|---|---|---|")
    for num_replicas in NUMS_REPLICAS:
        cost = measure_cost(num_replicas, num_requests)
        print(f"| {num_replicas} | {cost.route_us:.0f} | {cost.route_p99_us:.0f} | {cost.end_us:.0f} |")
    if options.trace is None and not options.smoke:
        return
    if options.trace is None:
        trace = generate("multi-turn", num_requests=60, rate=20, seed=0)
    else:
        trace = load_trace(options.trace)
        trace = Trace(name=trace.name, requests=trace.requests[:num_requests], block_size=trace.block_size)
    rates = hit_rates(trace, num_replicas=options.replicas, num_pages=H100_8B.kv_tokens // PAGE_SIZE)
    print(f"\n{trace.name}: {len(trace.requests)} requests, {options.replicas} replicas\n")
    print("| sent | hit rate |\n|---|---|")
    for way, rate in rates.items():
        print(f"| {way} | {rate:.1%} |")


if __name__ == "__main__":
    main()
