"""Compares the simulator with a second one that counts every token and every page, one step at a time."""

import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from random import Random
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from naive_orders import NaiveDeferral
from pagewood.schedpolicy.admission.deferral import InBatchDeferral
from pagewood.schedpolicy.admission.skip_ahead import SkipAhead
from pagewood.schedpolicy.memory.reserve import NewTokenRatio
from pagewood.schedpolicy.orders.names import order_named
from pagewood.schedpolicy.orders.order import Order
from pagewood.schedpolicy.preemption.victim import by_least_output, by_lowest_priority, choose_victim, deserving
from pagewood.schedpolicy.simulation.fleet import Fleet, simulate
from pagewood.schedpolicy.simulation.machine import Machine
from pagewood.schedpolicy.simulation.metrics import Observations, Outcome
from pagewood.schedpolicy.simulation.policies import Policies, policies_named
from pagewood.schedpolicy.simulation.replica import Replica
from pagewood.schedpolicy.simulation.trace import Trace, TraceRequest
from pagewood.schedpolicy.steps.budget import Budget, StepBudget
from pagewood.schedpolicy.steps.latency import StepModel

# Sums of these are exact in binary floating point, in any order.
MODEL = StepModel(base_s=2**-6, prefill_s=2**-10, decode_s=2**-8, kv_s=2**-14, pair_s=2**-18)
MACHINE = Machine(name="exact", source="test", model=MODEL)
ORDERS = ("fcfs", "lpm", "lof", "shortest", "srtf", "random", "fair", "dfs-weight", "edf", "adaptive")


class Naive:
    """A request of the oracle: counted pages, and a token appended at a time."""

    def __init__(self, arrival: int, spec: TraceRequest, keys: list[int], page_size: int) -> None:
        self.arrival = arrival
        self.spec = spec
        self.keys = keys
        self.page_size = page_size
        self.arrived_s = spec.arrived_s
        self.priority = self.own_priority = spec.priority
        self.tenant = spec.tenant
        self.tag = self.service_class = spec.tag
        self.max_new_tokens = spec.max_new_tokens
        self.deadline_s = inf if spec.deadline_s is None else spec.arrived_s + spec.deadline_s
        self.num_matched = 0
        self.num_generated = 0
        self.is_decoding = False
        self.computed = 0
        self.leased: list[int] = []
        self.private = 0
        self.twins = 0  # private pages of which the cache has a copy from another request
        self.first_token_s = self.finished_s = inf
        self.refused = False
        self.num_hit = -1
        self.num_preemptions = 0
        self.token_s: list[float] = []

    @property
    def num_tokens(self) -> int:
        return self.spec.num_prompt + self.num_generated

    @property
    def num_prompt(self) -> int:
        return self.spec.num_prompt

    @property
    def num_computed(self) -> int:
        return self.computed

    def num_shared(self, other: "Naive") -> int:
        num_pages = 0
        for mine, theirs in zip(self.keys, other.keys, strict=False):
            if mine != theirs or self.page_size * (num_pages + 1) > min(self.num_prompt, other.num_prompt):
                break
            num_pages += 1
        return self.page_size * num_pages

    def prefix(self, num_tokens: int) -> bytes:
        return b"".join(key.to_bytes(4, "little", signed=True) for key in self.keys[: num_tokens // self.page_size])


@dataclass(frozen=True, slots=True, kw_only=True)
class NaivePolicies:
    """The policies of the oracle; its order reads all matches itself in every pass."""

    order: Order[Naive]
    budget: Budget
    reserve: NewTokenRatio
    skip_ahead: SkipAhead
    victim: Callable[[Naive], tuple[float, ...]]
    deferral: NaiveDeferral


class NaiveCache:
    """Pages with the time of their last use; every method looks at all of them."""

    def __init__(self) -> None:
        self.parent: dict[int, int | None] = {}
        self.used: dict[int, int] = {}
        self.leases: list[list[int]] = []
        self.now = 0

    def match(self, keys: list[int]) -> int:
        num = 0
        while num < len(keys) and keys[num] in self.parent:
            num += 1
        return num

    def insert(self, keys: list[int]) -> int:
        num_new = sum(key not in self.parent for key in keys)
        for place, key in enumerate(keys):
            self.parent[key] = keys[place - 1] if place else None
        self.use(keys)
        return num_new

    def use(self, keys: list[int]) -> None:
        self.now += 1
        for key in keys:
            self.used[key] = self.now

    def evictable(self) -> set[int]:
        return set(self.parent) - {key for lease in self.leases for key in lease}

    def evict_one(self) -> None:
        parents = set(self.parent.values())
        victim = min((key for key in self.evictable() if key not in parents), key=self.used.__getitem__)
        del self.parent[victim], self.used[victim]


class NaiveReplica:
    """One replica, a step at a time, a token at a time."""

    def __init__(self, policies: NaivePolicies, num_pages: int, page_size: int) -> None:
        self.policies, self.num_pages, self.page_size = policies, num_pages, page_size
        self.cache = NaiveCache()
        self.waiting: list[Naive] = []
        self.preempted: list[Naive] = []
        self.running: list[Naive] = []
        self.computed_tokens = 0
        self.service: Counter[str] = Counter()

    def free(self) -> int:
        num_free = self.num_pages - len(self.cache.parent) - sum(r.private for r in self.running)
        assert num_free >= 0
        return num_free

    def available(self) -> int:
        return self.free() + len(self.cache.evictable())

    def pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def grow(self, request: Naive, num_tokens: int) -> bool:
        num_lacking = self.pages(num_tokens) - self.held(request)
        if num_lacking > self.available():
            return False
        for _ in range(num_lacking):
            if not self.free():
                self.cache.evict_one()
            request.private += 1
        return True

    def held(self, request: Naive) -> int:
        return len(request.leased) + request.private - request.twins

    def publish(self, request: Naive) -> None:
        keys = request.keys[: request.computed // self.page_size]
        if len(keys) > len(request.leased):
            num_new = self.cache.insert(keys)
            request.private -= num_new
            request.twins += len(keys) - len(request.leased) - num_new
            self.unlease(request)
            request.leased = keys
            self.cache.leases.append(keys)

    def unlease(self, request: Naive) -> None:
        if request.leased:
            self.cache.leases.remove(request.leased)
            self.cache.use(request.leased)
        request.leased = []

    def release(self, request: Naive) -> None:
        self.publish(request)
        request.private = request.twins = 0
        self.unlease(request)
        self.running.remove(request)
        request.is_decoding = False

    def leave(self, request: Naive) -> None:
        request.priority = request.own_priority
        self.policies.order.stop(request)
        self.policies.deferral.stop(request)

    def preempt(self, candidates: list[Naive]) -> None:
        victim = choose_victim(candidates, rank=self.policies.victim)
        assert victim is not None
        self.release(victim)
        victim.num_preemptions += 1
        self.preempted.append(victim)

    def requeue(self) -> None:
        for victim in self.preempted:
            self.leave(victim)
            victim.num_matched = self.page_size * self.match(victim)
            self.waiting.append(victim)
            self.policies.order.add(victim)
        self.preempted = []

    def lend(self) -> None:
        """Give every running request the highest of its own priority and those of the requests parked on it."""
        parked = self.policies.deferral.parked
        for request in self.running:
            lent = [other.priority for other, leader in parked if leader is request]
            request.priority = max([request.own_priority, *lent])

    def candidates(self) -> list[Naive]:
        parked = [one for one, _ in self.policies.deferral.parked]
        return [request for request in self.waiting if not any(request is one for one in parked)]

    def match(self, request: Naive) -> int:
        return min(self.cache.match(request.keys), (request.num_tokens - 1) // self.page_size)

    def step(self, now_s: float) -> float:
        """Run one step from `now_s`, and return its end, which is `now_s` if the step must be planned again."""
        limits = self.policies.budget
        budget = limits.open(len(self.running))
        decodes: list[Naive] = []
        prefills: list[tuple[Naive, int]] = []
        preempted = [False]
        begun = list(self.running)

        def get_pages(request: Naive, num_tokens: int) -> bool:
            """Preempt requests without a grant until a running one has pages; return whether it still runs."""
            while request in self.running and not self.grow(request, num_tokens):
                granted = [*decodes, *(r for r, _ in prefills)]
                candidates = [r for r in self.running if r not in granted]
                if choose_victim(candidates, rank=self.policies.victim) is request:  # rather one of lower priority
                    candidates = [r for r in granted if r.priority < request.priority] or candidates
                self.preempt(candidates)
                decodes[:] = [r for r in decodes if r in self.running]
                prefills[:] = [(r, num) for r, num in prefills if r in self.running]
                preempted[0] = True
            return request in self.running

        def decode() -> None:
            for request in sorted(self.running, key=deserving):
                if request.num_tokens - request.computed == 1 and get_pages(request, request.computed + 1):
                    assert budget.take_decode()
                    decodes.append(request)

        room = [0]
        left: list[Naive] = []

        def open_prompts() -> None:
            room[0] = budget.offer_prefill(1000)
            if self.candidates() and len(self.running) < limits.max_running and limits.max_prefills > 1:
                room[0] -= room[0] // 8
            for request in sorted(self.running, key=deserving):
                is_last = request.num_tokens - request.computed == 1
                if not is_last or (limits.prefill_first and request.computed < request.num_prompt):
                    left.append(request)

        def continue_prompts(least: float) -> None:
            for request in [one for one in left if one.priority >= least]:
                left.remove(request)
                num = min(room[0], budget.offer_prefill(request.num_tokens - request.computed))
                if num and get_pages(request, request.computed + num):
                    room[0] -= budget.take_prefill(num)
                    prefills.append((request, num))

        def note() -> None:
            if preempted[0]:
                self.policies.reserve.on_preempt()
            else:
                self.policies.reserve.on_step()

        def admit() -> None:
            had_preempted = preempted[0]
            if not had_preempted and self.waiting and budget.can_admit:

                def goes_on(request: Naive) -> bool:
                    continue_prompts(request.priority)
                    return not preempted[0] and budget.can_admit

                self.admit(budget, prefills, now_s, goes_on)
            continue_prompts(-inf)
            if preempted[0] and not had_preempted and not limits.prefill_first:
                self.policies.reserve.on_preempt()

        if self.waiting:
            for request in self.policies.deferral.ready():
                request.num_matched = self.page_size * self.match(request)
                self.policies.order.add(request)
        self.lend()
        top_priority = max((request.priority for request in self.candidates()), default=-inf)
        if not limits.prefill_first:
            decode()
        open_prompts()
        continue_prompts(top_priority)
        if not limits.prefill_first:
            note()
        self.requeue()
        admit()
        if limits.prefill_first:
            if not prefills:
                decode()
            note()
        self.requeue()
        if not prefills and not decodes:
            # All requests that could run were preempted; plan again at once.
            assert preempted[0]
            return now_s
        last = [r for r, _ in prefills if r in begun and r.num_tokens - r.computed == 1]
        prompts = [(r, num) for r, num in prefills if r not in last]
        singles = [*decodes, *last]
        end_s = now_s + MODEL.step_s(
            num_prefill=sum(num for _, num in prompts),
            num_decode=len(singles),
            num_kv=sum(r.num_tokens for r in singles),
            num_pairs=sum(position + 1 for r, num in prompts for position in range(r.computed, r.computed + num)),
        )
        for request in decodes:
            if request.is_decoding:
                request.computed += 1
                self.get_token(request, end_s)
            else:
                self.get_computed(request, 1, end_s)
        for request, num in prefills:
            self.get_computed(request, num, end_s)
        return end_s

    def get_computed(self, request: Naive, num: int, now_s: float) -> None:
        is_in_prompt = request.computed < request.num_prompt
        request.computed += num
        self.computed_tokens += num
        self.service[request.tenant] += num
        is_complete = request.computed == request.num_tokens
        if is_in_prompt or not is_complete:
            self.publish(request)
        if is_complete:
            request.is_decoding = True
            if not request.num_generated:
                request.first_token_s = now_s
            self.get_token(request, now_s)

    def get_token(self, request: Naive, now_s: float) -> None:
        request.num_generated += 1
        request.token_s.append(now_s)
        self.service[request.tenant] += 2
        if request.num_generated == request.spec.num_output:
            self.end(request, now_s)

    def admit(
        self,
        budget: StepBudget,
        prefills: list[tuple[Naive, int]],
        now_s: float,
        goes_on: Callable[[Naive], bool],
    ) -> None:
        order, skip_ahead, deferral = self.policies.order, self.policies.skip_ahead, self.policies.deferral
        for request in self.waiting:
            if not any(parked is request for parked, _ in deferral.parked):
                request.num_matched = self.page_size * self.match(request)
        skip_ahead.begin_step(self.waiting)
        admitted: list[Naive] = []
        deferred: list[Naive] = []
        for request in order.ordered(now_s):
            if not goes_on(request) or skip_ahead.is_barred(request):
                break
            if deferral.defer(request):
                deferred.append(request)
                continue
            claimants = [parked for parked, _ in deferral.parked if parked.priority > request.priority]
            if len(self.running) + len(claimants) >= self.policies.budget.max_running:
                if skip_ahead.pass_over(request):
                    continue
                break
            reserve = self.policies.reserve.open(
                [*self.running, *claimants], page_size=self.page_size, num_to_complete=0
            )
            before = request.num_matched
            num_matched = self.match(request)
            lease = request.keys[:num_matched]
            if lease:
                self.cache.leases.append(lease)
            request.leased = lease
            request.num_matched = num_matched * self.page_size
            num = budget.offer_prefill(request.num_tokens - request.num_matched)
            wanted = self.pages(request.num_tokens) - num_matched
            if self.running:
                wanted += sum(self.pages(r.num_tokens) - self.held(r) for r in self.running)
                wanted += sum(self.pages(r.num_tokens) - deferral.num_awaited(r) // self.page_size for r in claimants)
                wanted += reserve.num_reserved(request)
            if num and wanted <= self.available():
                self.running.append(request)
                assert self.grow(request, request.num_matched + num)
                prefills.append((request, budget.take_prefill(num)))
                budget.admit()
                skip_ahead.admitted(request)
                admitted.append(request)
                request.computed = request.num_matched
                deferral.start(request)
            else:
                self.unlease(request)
                request.num_matched = before
                if not skip_ahead.pass_over(request):
                    break
        for request in deferred:
            order.park(request)
        for request in admitted:
            order.admit(request)
            self.waiting.remove(request)
            if request.num_hit < 0:
                request.num_hit = request.num_matched

    def end(self, request: Naive, now_s: float) -> None:
        request.finished_s = now_s
        self.policies.reserve.on_end(request)
        self.release(request)
        self.leave(request)


def names_of_pages(trace: Trace, number: int, page_size: int) -> list[int]:
    """Return the keys of the pages of a request, then names that no other page has."""
    spec = trace.requests[number]
    keys = list(trace.page_keys(spec, page_size))
    num_own = (spec.num_prompt + spec.num_output - 1) // page_size - len(keys)
    return keys + [-1_000 * (number + 1) - place for place in range(num_own)]


def run_naively(
    trace: Trace, policies: NaivePolicies, num_pages: int, page_size: int
) -> tuple[list[Naive], NaiveReplica]:
    replica = NaiveReplica(policies, num_pages, page_size)
    requests = [
        Naive(number, spec, names_of_pages(trace, number, page_size), page_size)
        for number, spec in enumerate(trace.requests)
    ]
    pending = list(requests)
    now_s = 0.0
    while pending or replica.waiting or replica.running:
        if not replica.waiting and not replica.running:
            now_s = max(now_s, pending[0].arrived_s)
        while pending and pending[0].arrived_s <= now_s:
            request = pending.pop(0)
            request.arrived_s = now_s
            if replica.pages(request.spec.num_prompt + request.max_new_tokens - 1) > num_pages:
                request.refused = True
                continue
            request.num_matched = page_size * replica.match(request)
            replica.waiting.append(request)
            policies.order.add(request)
        if replica.waiting or replica.running:
            now_s = replica.step(now_s)
    return requests, replica


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    block_size = draw(st.sampled_from([1, 2, 4]))
    requests: list[TraceRequest] = []
    now = 0
    for number in range(draw(st.integers(1, 12))):
        now += draw(st.sampled_from([0, 0, 1, 5, 40]))
        num_prompt, num_output = draw(st.integers(1, 24)), draw(st.integers(1, 12))
        num_keys = (num_prompt + num_output) // block_size
        num_shared = draw(st.integers(0, num_keys))
        family = draw(st.integers(1, 2))
        keys = [1000 * family + place for place in range(num_shared)]
        keys += [10_000 + 100 * number + place for place in range(num_shared, num_keys)]
        requests.append(
            TraceRequest(
                arrived_s=now / 2**6,
                num_prompt=num_prompt,
                num_output=num_output,
                max_new_tokens=num_output + draw(st.integers(0, 4)),
                keys=tuple(keys),
                tenant=draw(st.sampled_from(["a", "b"])),
                priority=draw(st.sampled_from([0, 0, 1])),
                tag=draw(st.sampled_from(["", "x"])),
                deadline_s=draw(st.sampled_from([None, 1.0, 4.0])),
            )
        )
    return Trace(name="random", requests=tuple(requests), block_size=block_size)


def compare(
    trace: Trace, naive_policies: NaivePolicies, policies: Policies, num_pages: int, page_size: int
) -> tuple[list[Naive], Observations]:
    naive, replica = run_naively(trace, naive_policies, num_pages, page_size)
    fleet = Fleet(machine=MACHINE, num_pages=num_pages, page_size=page_size)
    (observed,) = simulate(trace, fleet, make_policies=lambda _: policies)
    records = sorted(observed.records, key=lambda record: record.arrival)
    assert len(records) == len(trace.requests)
    for record, request in zip(records, naive, strict=True):
        assert (record.outcome is Outcome.REFUSED) == request.refused
        if request.refused:
            continue
        assert record.num_output == request.spec.num_output == len(request.token_s)
        assert (record.first_token_s, record.finished_s) == (request.first_token_s, request.finished_s)
        assert (record.num_hit, record.num_preemptions) == (request.num_hit, request.num_preemptions)
    assert observed.num_prefill_tokens == replica.computed_tokens
    num_uncached = sum(r.num_prompt - r.num_hit + r.num_recomputed for r in records if r.outcome is Outcome.FINISHED)
    # Tokens that were computed and lost before a prompt was finished are not in the records.
    assert observed.num_prefill_tokens <= num_uncached or any(r.num_preemptions for r in records)
    assert any(r.num_preemptions for r in records) or observed.num_prefill_tokens == num_uncached
    gaps = [b - a for r in naive for a, b in zip(r.token_s, r.token_s[1:], strict=False)]
    assert observed.gaps.num == len(gaps)
    assert observed.gaps.total_s == pytest.approx(sum(gaps))
    assert observed.gaps.longest_s == pytest.approx(max(gaps, default=0.0))
    assert observed.service.service_of() == {
        tenant: replica.service[tenant] for tenant in observed.service.service_of()
    }
    return naive, observed


@settings(max_examples=200)
@given(
    traces(),
    st.sampled_from(ORDERS),
    st.integers(20, 60),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 6),
    st.integers(0, 20),
    st.booleans(),
    st.sampled_from(["priority", "least-output"]),
    st.sampled_from([1.0, 0.02]),  # little is reserved: requests are preempted
    st.sampled_from([None, 1, 4]),
)
def test_every_time_hit_and_preemption_is_that_of_the_naive_simulator(
    trace: Trace,
    order: str,
    num_tokens: int,
    page_size: int,
    max_running: int,
    num_more: int,
    prefill_first: bool,
    victim: str,
    scale: float,
    min_shared: int | None,
):
    budget = Budget(
        max_step_tokens=max_running + num_more,
        max_chunk_tokens=4 if num_more % 2 else None,
        max_running=max_running,
        max_prefills=1 + num_more % 3,
        prefill_first=prefill_first,
    )

    both = policies_for(order, budget, victim, page_size, scale=scale, min_shared=min_shared)
    compare(trace, *both, num_tokens // page_size, page_size)


def test_a_decode_gives_its_pages_to_a_prompt_of_higher_priority() -> None:
    """Also if it has its grant in the step: the prompt rather takes that back than be preempted itself."""
    shapes = [(0, 8, 8, 0), *[(0, 1, 1, 0)] * 4, (5, 10, 1, 1), *[(5, 1, 1, 0)] * 4]
    requests = [
        TraceRequest(
            arrived_s=arrived / 2**6,
            num_prompt=num_prompt,
            num_output=num_output,
            max_new_tokens=num_output,
            keys=tuple(range(100 * number, 100 * number + num_prompt + num_output)),
            tenant="a",
            priority=priority,
        )
        for number, (arrived, num_prompt, num_output, priority) in enumerate(shapes)
    ]
    trace = Trace(name="crowded", requests=tuple(requests), block_size=1)
    budget = Budget(max_step_tokens=3, max_chunk_tokens=4, max_running=2, max_prefills=2)
    found, _ = compare(trace, *policies_for("fcfs", budget, "priority", 1, scale=0.02, min_shared=None), 23, 1)
    assert [request.num_preemptions for request in found] == [1, *[0] * 9]


def crowded_trace(rng: Random) -> Trace:
    """Draw requests of three families that arrive at once; memory holds two families, so much is evicted."""
    requests: list[TraceRequest] = []
    now = 0
    for number in range(rng.randint(4, 10)):
        now += rng.choice((0, 0, 0, 1, 2, 5))
        num_prompt, num_output = rng.randint(1, 24), rng.randint(1, 12)
        num_shared, family = rng.randint(0, num_prompt + num_output), rng.randint(1, 3)
        keys = [1000 * family + place for place in range(num_shared)]
        keys += [10_000 + 100 * number + place for place in range(num_shared, num_prompt + num_output)]
        requests.append(
            TraceRequest(
                arrived_s=now / 2**10,
                num_prompt=num_prompt,
                num_output=num_output,
                max_new_tokens=num_output,
                keys=tuple(keys),
            )
        )
    return Trace(name="crowded", requests=tuple(requests), block_size=1)


def run_crowded(seed: int) -> None:
    rng = Random(seed)
    order, max_running = rng.choice(("lpm", "dfs-weight", "shortest", "srtf")), rng.randint(2, 5)
    budget = Budget(
        max_step_tokens=max_running + rng.randint(8, 20), max_chunk_tokens=None, max_running=max_running, max_prefills=3
    )
    policies = policies_for(order, budget, "priority", 1, min_shared=rng.choice((None, 1, 4)))
    compare(crowded_trace(rng), *policies, rng.randint(36, 45), 1)


def test_matches_that_change_within_a_pass_are_reported_in_the_next():
    for seed in range(300):
        run_crowded(seed)


def test_a_changed_match_without_notification_of_the_order_is_noticed(monkeypatch: pytest.MonkeyPatch):
    source = textwrap.dedent(inspect.getsource(Replica._fit))  # pyright: ignore[reportPrivateUsage]
    assert "request.num_matched = known_matched" in source
    namespace: dict[str, Any] = {}
    function: FunctionType = Replica._fit  # pyright: ignore
    exec(source.replace("request.num_matched = known_matched", "pass"), function.__globals__, namespace)
    monkeypatch.setattr(Replica, "_fit", namespace["_fit"])
    with pytest.raises(AssertionError):
        test_matches_that_change_within_a_pass_are_reported_in_the_next()


def policies_for(
    order: str,
    budget: Budget,
    victim: str,
    page_size: int,
    *,
    scale: float = 1.0,
    min_shared: int | None = None,
) -> tuple[NaivePolicies, Policies]:
    """Return the same policies for both; `min_shared` is that of the deferral, None to defer nothing."""
    naive = NaivePolicies(
        order=order_named(order),
        budget=budget,
        reserve=NewTokenRatio(scale=scale),
        skip_ahead=SkipAhead(max_skipped=8, max_passes=16),
        victim=by_lowest_priority if victim == "priority" else by_least_output,
        deferral=NaiveDeferral(min_shared=min_shared or 10_000, page_size=page_size),
    )
    policies = replace(
        policies_named(order, page_size=page_size, budget=budget, victim=victim),
        reserve=NewTokenRatio(scale=scale),
        deferral=None if min_shared is None else InBatchDeferral(min_shared=min_shared, page_size=page_size),
    )
    return naive, policies


def burst(rng: Random) -> Trace:
    """Draw requests with long outputs, and after them a burst of requests that share a prefix of 20 to 40 tokens."""
    early = [
        TraceRequest(arrived_s=0.0, num_prompt=rng.randint(1, 8), num_output=40, max_new_tokens=40, keys=())
        for _ in range(rng.randint(0, 3))
    ]
    late = [
        TraceRequest(
            arrived_s=rng.randint(10, 30) / 2**6,
            num_prompt=rng.randint(30, 45),
            num_output=rng.randint(1, 20),
            max_new_tokens=20,
            keys=tuple(range(rng.randint(20, 40))),
        )
        for _ in range(5)
    ]
    late.sort(key=lambda request: request.arrived_s)
    return Trace(name="burst", requests=(*early, *late), block_size=1)


def test_repeats_in_a_burst_fare_as_in_the_naive_simulator():
    num_deferred = num_orphaned = 0
    for seed in range(150):
        rng = Random(seed)
        trace, order, num_pages = burst(rng), rng.choice(("fcfs", "lpm", "fair")), rng.randint(66, 130)
        victim = rng.choice(("priority", "least-output"))
        budget = Budget(max_step_tokens=80, max_chunk_tokens=rng.randint(2, 6), max_running=8, max_prefills=8)
        both = policies_for(order, budget, victim, 1, scale=0.02, min_shared=rng.choice((1, 4)))
        compare(trace, *both, num_pages, 1)
        num_deferred += both[0].deferral.num_parked
        num_orphaned += both[0].deferral.num_orphaned
    assert num_deferred > 100
    assert num_orphaned > 10, "leaders must be preempted while others are parked on them"


def test_it_preempts_and_recomputes_as_the_naive_simulator_does():
    requests = tuple(
        TraceRequest(arrived_s=0.0, num_prompt=8, num_output=30, max_new_tokens=30, keys=()) for _ in range(9)
    )
    budget = Budget(max_step_tokens=16, max_chunk_tokens=None, max_running=9, max_prefills=4)
    policies = policies_for("fcfs", budget, "priority", 2, scale=0.02)
    naive, observed = compare(Trace(name="tight", requests=requests, block_size=1), *policies, 60, 2)
    assert sum(request.num_preemptions for request in naive) >= 3
    assert observed.num_prefill_tokens > 9 * 8
