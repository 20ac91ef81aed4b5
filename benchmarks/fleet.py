"""What the router of many replicas costs, what it finds in their caches, and what whole fleets do in the simulator.

    python benchmarks/fleet.py cost                     # of one decision at 3, 100 and 1,000 replicas; timed
    python benchmarks/fleet.py hits TRACE.jsonl         # hit rates on a trace of Mooncake's form
    python benchmarks/fleet.py scale                    # 1,000 replicas and a million requests: time and memory; timed
    python benchmarks/fleet.py apart                    # prompts computed apart against both mixed, 2 to 1,000 replicas
    python benchmarks/fleet.py all --smoke              # only to see that the script works

cost: requests with prompts of 64 blocks, of which each replica has cached a part, arrive at a fleet that is three
quarters full; each time one ends, its replica publishes events, and the router decides again. hits, scale and apart
run the simulator, whose results do not depend on the machine. apart: long prompts arrive among chats; the table has the
times between tokens and to the first token, by the part of the replicas that only compute prompts. What clients of real
processes see of deaths is measured by `recovery.py`, prompts apart on two real engines by `prefill_apart.py`, and the
simulator is compared with real replicas by `fleet_real.py`.
"""

from __future__ import annotations

import argparse
import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time

from pagewood.schedpolicy import Router
from pagewood.schedpolicy.routing.prefix_index import MAX_BLOCKS
from pagewood.schedpolicy.simulation import (
    H100_8B,
    Fleet,
    Objective,
    Operations,
    Policies,
    Trace,
    TraceRequest,
    generate,
    load_trace,
    policies_named,
    simulate,
    simulate_routed,
    summarise,
)
from pagewood.schedpolicy.simulation.choosers import RoundRobin
from pagewood.schedpolicy.simulation.routed import default_router
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


def measure_scale(num_replicas: int, num_requests: int, *, max_blocks: int) -> str:
    """Run many requests on many replicas; return a row of the table below."""
    trace = generate("multi-turn", num_requests=num_requests, rate=5.0 * num_replicas, seed=0)
    trace_gb = _used_gb()
    fleet, router = _fleet(num_replicas), default_router(PAGE_SIZE, 0, max_blocks=max_blocks)
    gc.collect()
    gc.disable()  # nothing of a run is a cycle, and a full collection would visit all requests
    began_s = process_time()
    observed = simulate_routed(trace, fleet, Operations(), make_policies=_policies, router=router)
    took_s = process_time() - began_s
    gc.enable()
    num_steps = sum(one.num_steps for one in observed.replicas)
    summary = summarise(observed.replicas, Objective())
    return (
        f"| {num_replicas} | {num_requests} | {num_steps} | {took_s:.0f} | {1e6 * took_s / num_requests:.0f} "
        f"| {trace_gb:.2f} | {_used_gb():.2f} | {summary.hit_rate:.1%} | {router.index.spacing} |"
    )


def _used_gb() -> float:
    """Return the most memory that this process has had, in units of 1e9 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def _fleet(num_replicas: int) -> Fleet:
    num_pages = H100_8B.kv_tokens // PAGE_SIZE
    return Fleet(machine=H100_8B, num_pages=num_pages, page_size=PAGE_SIZE, num_replicas=num_replicas)


def _policies(replica: int) -> Policies:
    return policies_named("fcfs", page_size=PAGE_SIZE)


def long_among_chats(num_requests: int, rate: float, share: float, seed: int) -> Trace:
    """Return chats, and among them a share of requests with prompts of 8,000 to 32,000 tokens; nothing is shared."""
    rng = Random(f"long among chats/{seed}")
    requests: list[TraceRequest] = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += rng.expovariate(rate)
        is_long = rng.random() < share
        num_prompt = rng.randint(8_000, 32_000) if is_long else rng.randint(100, 1_000)
        num_output = rng.randint(100, 400)
        requests.append(
            TraceRequest(
                arrived_s=now_s, num_prompt=num_prompt, num_output=num_output, max_new_tokens=512,
                tenant="long" if is_long else "chat",
            )
        )  # fmt: skip
    return Trace(name="long among chats", requests=tuple(requests), block_size=PAGE_SIZE)


def apart_rows(num_replicas: int, num_requests: int, *, rate: float, share: float) -> list[str]:
    """Return a row for each number of replicas that only compute prompts, none of them included."""
    trace = long_among_chats(num_requests, rate * num_replicas, share, seed=0)
    rows: list[str] = []
    for part in (0.0, 0.125, 0.25, 0.375, 0.5):
        num_prefill = round(part * num_replicas)
        if part and (not num_prefill or num_prefill == num_replicas or abs(num_prefill / num_replicas - part) > 0.02):
            continue
        observed = simulate_routed(
            trace, _fleet(num_replicas), Operations(num_prefill=num_prefill, num_places=128), make_policies=_policies
        ).replicas
        one = summarise(observed, Objective(first_token_s=5.0, per_token_s=0.03))
        ttft = [1e3 * value for value in (one.tenants["chat"].ttft.p50, one.tenants["chat"].ttft.p99)]
        long = one.tenants["long"].ttft
        rows.append(
            f"| {num_replicas} | {num_prefill} | {1e3 * one.itl.p50:.1f} | {1e3 * one.itl.p99:.1f} "
            f"| {1e3 * one.itl.longest:.0f} | {ttft[0]:.0f} | {ttft[1]:.0f} | {1e3 * long.p50:.0f} "
            f"| {1e3 * long.p99:.0f} | {one.goodput:.1%} |"
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "hits", "scale", "apart", "all"))
    parser.add_argument("trace", nargs="?", type=Path, help="JSON lines of Mooncake's form, for hits")
    parser.add_argument("--requests", type=int, help="default: 5,000; all of a trace; a million for scale")
    parser.add_argument("--replicas", type=int, help="default: 8 for hits, 1,000 for scale")
    parser.add_argument("--max-blocks", type=int, default=MAX_BLOCKS, help="scale: bound of the router's index")
    parser.add_argument("--rate", type=float, default=5.0, help="apart: requests/s for each replica")
    parser.add_argument("--share", type=float, default=0.1, help="apart: part of the requests that is long")
    parser.add_argument("--smoke", action="store_true", help="a few requests only, and a generated trace")
    options = parser.parse_args(arguments)
    parts = ("cost", "hits", "scale", "apart") if options.part == "all" else (options.part,)
    if "hits" in parts and options.trace is None and not options.smoke:
        parser.error("TRACE must be given for hits")
    if "cost" in parts:
        _print_cost(20 if options.smoke else options.requests or 5000)
    if "hits" in parts:
        _print_hits(options)
    if "scale" in parts:
        num_replicas = 20 if options.smoke else options.replicas or 1000
        print("\n| replicas | requests | steps | CPU, s | us/request | GB, trace | GB, all | hit rate | one block of |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        print(
            measure_scale(
                num_replicas, 200 if options.smoke else options.requests or 1_000_000, max_blocks=options.max_blocks
            )
        )
    if "apart" in parts:
        print(
            "\n| replicas | of them for prompts | gap p50, ms | p99 | longest | chat: first token p50, ms | p99 ",
            end="",
        )
        print("| long: p50 | p99 | served well |\n|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
        for num_replicas in (2, 8) if options.smoke else (2, 8, 64, 1000):
            num_requests = 100 if options.smoke else options.requests or max(2000, 30 * num_replicas)
            for row in apart_rows(num_replicas, num_requests, rate=options.rate, share=options.share):
                print(row, flush=True)


def _print_cost(num_requests: int) -> None:
    print("| replicas | route, us | p99 | end, us |\n|---|---|---|---|")
    for num_replicas in NUMS_REPLICAS:
        cost = measure_cost(num_replicas, num_requests)
        print(f"| {num_replicas} | {cost.route_us:.0f} | {cost.route_p99_us:.0f} | {cost.end_us:.0f} |")


def _print_hits(options: argparse.Namespace) -> None:
    num_replicas = options.replicas or 8
    if options.trace is None:
        trace = generate("multi-turn", num_requests=60, rate=20, seed=0)
    else:
        trace = load_trace(options.trace)
        requests = trace.requests[: options.requests]
        trace = Trace(name=trace.name, requests=requests, block_size=trace.block_size)
    rates = hit_rates(trace, num_replicas=num_replicas, num_pages=H100_8B.kv_tokens // PAGE_SIZE)
    print(f"\n{trace.name}: {len(trace.requests)} requests, {num_replicas} replicas\n")
    print("| sent | hit rate |\n|---|---|")
    for way, rate in rates.items():
        print(f"| {way} | {rate:.1%} |")


if __name__ == "__main__":
    main()
