"""Replicas behind a router, in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.simulation.cache import BlockCache, PrefixCache
from pagewood.schedpolicy.simulation.choosers import Chooser, RoundRobin
from pagewood.schedpolicy.simulation.decisions import OnDecision
from pagewood.schedpolicy.simulation.machine import Machine
from pagewood.schedpolicy.simulation.metrics import Observations
from pagewood.schedpolicy.simulation.policies import Policies
from pagewood.schedpolicy.simulation.replica import Replica
from pagewood.schedpolicy.simulation.request import SimRequest
from pagewood.schedpolicy.simulation.trace import Trace

MAX_REPLICAS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The replicas that a trace is run on.

    Attributes:
        machine: The machine of each replica.
        num_pages: Pages of KV of each replica, >= 1.
        page_size: Tokens per page, >= 1.
        num_replicas: Number of replicas, 1 to 1,000.
        overlaps: Whether a replica decides each step while the one before it runs, as pagewood-engine does unless it is
            told not to. Then a request is computed one step later than it could be, if others run when it comes.
    """

    machine: Machine
    num_pages: int
    page_size: int
    num_replicas: int = 1
    overlaps: bool = False

    def __post_init__(self) -> None:
        for name in ("num_pages", "page_size"):
            value: int = getattr(self, name)
            require_count(name, value, least=1)
        if not 1 <= require_count("num_replicas", self.num_replicas) <= MAX_REPLICAS:
            raise ValueError(f"num_replicas must be in [1, {MAX_REPLICAS}], got {self.num_replicas}")


def simulate(
    trace: Trace,
    fleet: Fleet,
    *,
    make_policies: Callable[[int], Policies],
    router: Chooser | None = None,
    make_cache: Callable[[], PrefixCache] = BlockCache,
    on_decision: OnDecision | None = None,
) -> list[Observations]:
    """Run a trace to its end.

    It draws no random numbers and reads no clock: the same arguments give the same observations.

    Args:
        trace: The requests.
        fleet: The replicas.
        make_policies: Makes the policies of a replica, given its number.
        router: Chooses the replica of each request; by default in turn.
        make_cache: Makes the prefix cache of a replica.
        on_decision: Gets every decision of every replica; None to record none.

    Returns:
        The observations of each replica.
    """
    router = router or RoundRobin()
    replicas = [
        Replica(
            index=index,
            policies=make_policies(index),
            machine=fleet.machine,
            num_pages=fleet.num_pages,
            page_size=fleet.page_size,
            overlaps=fleet.overlaps,
            make_cache=make_cache,
            on_decision=on_decision,
        )
        for index in range(fleet.num_replicas)
    ]
    ends: list[tuple[float, int]] = []  # heap of (end of what runs, replica), stale entries included
    loads = [0] * fleet.num_replicas

    def finish_runs(before_s: float) -> None:
        while ends and ends[0][0] < before_s:
            end_s, index = heappop(ends)
            replica = replicas[index]
            if replica.end_s != end_s:
                continue
            replica.finish_run()
            loads[index] = replica.num_outstanding
            if replica.end_s < inf:
                heappush(ends, (replica.end_s, index))

    names = trace.page_names(fleet.page_size)
    for arrival, spec in enumerate(trace.requests):
        # If a step ends at this time, its successor has not begun, and the request can still be in it.
        finish_runs(spec.arrived_s)
        keys = trace.page_keys(spec, fleet.page_size)
        index = router.choose(keys, loads)
        replica = replicas[index]
        end_s = replica.end_s
        replica.arrive(SimRequest(arrival, spec, next(names), fleet.page_size), spec.arrived_s)
        loads[index] = replica.num_outstanding
        if replica.end_s != end_s:
            heappush(ends, (replica.end_s, index))
    finish_runs(inf)
    return [replica.observed for replica in replicas]
