"""The planner and its search for pages, alone: real requests, KV memory and policies, and states made by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.queue.quota_queue import QuotaQueue
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.chunks import Chunks
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.plan import Planner
from pagewood.engine.core.steps.policies import Victim
from pagewood.engine.core.steps.shortage import Shortage
from pagewood.engine.core.steps.step_plan import StepPlan
from pagewood.schedpolicy import (
    NewTokenRatio,
    Quota,
    Quotas,
    SkipAhead,
    budget_named,
    choose_victim,
    deserving,
    order_named,
)
from parts import make_queue, make_request, make_space

PAGE = 4


class Bench:
    """A planner over empty KV memory."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        num_rows: int = 8,
        mixing: str = "decode-first",
        max_prefill_tokens: int = 16,
        max_prefills: int = 8,
        ratio: float = 0.01,
        defers: bool = False,
        quotas: Quotas | None = None,
        **options: Any,
    ) -> None:
        self.kv = make_space(num_pages=num_pages, page_size=PAGE, num_rows=num_rows)
        queue = make_queue(self.kv, defers=defers)
        if quotas is not None:
            queue = WaitingQueue(
                order=order_named("fcfs", notified=True), kv=self.kv, deferral=None, is_watching=False,
                quota_queue=QuotaQueue(quotas),
            )  # fmt: skip
        self.state = EngineState(waiting=queue, rank=deserving)
        self.reserve = NewTokenRatio(scale=ratio)
        self.planner = Planner(
            kv=self.kv,
            budget=budget_named(
                mixing, max_running=num_rows, max_prefill_tokens=max_prefill_tokens, max_prefills=max_prefills
            ),
            reserve=self.reserve,
            victim=choose_victim,
            skip_ahead=SkipAhead(max_skipped=2, max_passes=3),
            **options,
        )
        self.num_requests = 0

    def request(self, num_prompt: int, *, max_new: int = 8, priority: int = 0, **fields: Any) -> Request:
        """Return the next request; its prompt is like no other."""
        self.num_requests += 1
        number = self.num_requests
        request = make_request([number] * num_prompt, max_new=max_new, arrival=number, priority=priority)
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def wait(self, num_prompt: int, **fields: Any) -> Request:
        """Return a request that waits."""
        request = self.request(num_prompt, **fields)
        self.state.waiting.add(request)
        return request

    def run(self, num_prompt: int, *, num_computed: int, num_output: int = 0, **fields: Any) -> Request:
        """Return a request that runs: some of its tokens are computed, and no step is in flight."""
        request = self.request(num_prompt, **fields)
        assert self.kv.admit(request, max_tokens=num_computed, num_reserved=-999)
        request.num_known += num_output
        request.num_launched = request.num_computed = num_computed
        self.state.run(request)
        return request

    def decode(self, num_tokens: int, **fields: Any) -> Request:
        """Return a request that runs, of which only the last token is to be computed."""
        return self.run(num_tokens - 1, num_computed=num_tokens - 1, num_output=1, **fields)

    def plan(self, now_s: float = 0.0) -> StepPlan:
        plan = self.planner.plan(self.state, now_s)
        holders = self.state.running
        assert self.kv.violation(holders) is None
        assert len({id(grant.request) for grant in plan.grants}) == len(plan.grants)
        for grant in plan.grants:
            request = grant.request
            assert request in holders
            assert request.num_pages * PAGE >= grant.start + grant.num_tokens
            assert grant.start == request.num_launched or grant.is_admitted
        return plan


def brief(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (arrival, number of tokens, promised tokens) of each grant."""
    return [(grant.request.arrival, grant.num_tokens, grant.num_promised) for grant in plan.grants]


# What a step contains


def test_nothing_to_do_is_an_empty_plan() -> None:
    plan = Bench().plan()
    assert (plan.grants, plan.num_preempted) == ((), 0)


def test_decodes_come_first_then_prompts_in_progress_then_admissions() -> None:
    bench = Bench()
    bench.wait(4)
    bench.run(12, num_computed=4)
    bench.decode(5)
    plan = bench.plan()
    assert brief(plan) == [(3, 1, 1), (2, 8, 1), (1, 4, 1)]
    assert [grant.is_admitted for grant in plan.grants] == [False, False, True]
    assert not plan.is_decode


def test_a_step_of_decodes_alone_says_so_and_follows_the_rank() -> None:
    bench = Bench()
    for priority in (0, 2, 1):
        bench.decode(6, priority=priority)
    plan = bench.plan()
    assert brief(plan) == [(2, 1, 1), (3, 1, 1), (1, 1, 1)]
    assert plan.is_decode


def test_a_chunk_that_ends_before_the_prompt_promises_nothing() -> None:
    bench = Bench(max_prefill_tokens=6)
    bench.run(12, num_computed=4)
    assert brief(bench.plan()) == [(1, 6, 0)]


def test_a_request_with_all_positions_launched_gets_no_grant() -> None:
    bench = Bench()
    last = bench.decode(10, max_new=1)  # its last token has no successor to be computed for
    last.num_unseen = 0
    assert last.num_known == last.max_length
    assert bench.plan().grants == ()


def test_a_request_with_tokens_in_flight_decodes_the_promised_one() -> None:
    bench = Bench()
    request = bench.decode(6)
    request.num_launched, request.num_unseen, request.num_in_flight = 6, 1, 1
    (grant,) = bench.plan().grants
    assert (grant.start, grant.num_tokens, grant.num_promised) == (6, 1, 1)


def test_prompts_in_progress_leave_an_eighth_only_if_one_waits() -> None:
    bench = Bench(max_prefill_tokens=16)
    bench.run(40, num_computed=4)
    assert brief(bench.plan()) == [(1, 16, 0)]
    bench = Bench(max_prefill_tokens=16)
    bench.run(40, num_computed=4)
    bench.wait(2)
    assert brief(bench.plan()) == [(1, 14, 0), (2, 2, 1)]


@pytest.mark.parametrize(
    ("mixing", "expected"),
    [
        ("decode-first", [(1, 1, 1), (2, 1, 1), (3, 14, 0), (4, 2, 1)]),
        ("stall-free", [(1, 1, 1), (2, 1, 1), (3, 13, 0), (4, 1, 0)]),
        ("prefill-first", [(3, 14, 0), (4, 2, 1)]),
    ],
)
def test_each_preset_makes_another_plan(mixing: str, expected: list[tuple[int, int, int]]) -> None:
    bench = Bench(mixing=mixing)
    bench.decode(5)
    bench.decode(5)
    bench.run(40, num_computed=4)
    bench.wait(2)
    assert brief(bench.plan()) == expected


def test_prompts_of_a_step_are_limited_in_number() -> None:
    bench = Bench(max_prefills=2)
    for _ in range(4):
        bench.wait(3)
    assert brief(bench.plan()) == [(1, 3, 1), (2, 3, 1)]


def test_a_pace_cuts_prompts_and_no_decodes() -> None:
    class Pace:
        def max_prefill_tokens(self, state: EngineState) -> int:
            return 2 * len(state.running)

    bench = Bench(pace=Pace())
    bench.decode(5)
    bench.decode(5)
    bench.wait(10)
    assert brief(bench.plan()) == [(1, 1, 1), (2, 1, 1), (3, 4, 0)]


def test_prompts_whose_log_probabilities_are_wanted_are_cut() -> None:
    bench = Bench(chunks=Chunks(max_scored=3))
    bench.wait(10, num_unscored=9)
    bench.run(10, num_computed=2, num_unscored=7)
    assert brief(bench.plan()) == [(2, 3, 0), (1, 3, 0)]


# Admission


def test_rows_limit_admissions() -> None:
    bench = Bench(num_rows=2)
    for _ in range(3):
        bench.wait(2)
    assert brief(bench.plan()) == [(1, 2, 1), (2, 2, 1)]
    assert len(bench.state.waiting) == 1


def test_memory_is_kept_for_the_outputs_of_others_but_not_of_one_that_runs_alone() -> None:
    bench = Bench(num_pages=8, ratio=1.0)
    bench.wait(8, max_new=24)
    bench.wait(4, max_new=4)
    assert brief(bench.plan()) == [(1, 8, 1)]  # the second would take what the first may need
    bench = Bench(num_pages=8, ratio=0.01)
    bench.wait(8, max_new=24)
    bench.wait(4, max_new=4)
    assert brief(bench.plan()) == [(1, 8, 1), (2, 4, 1)]


def test_a_small_request_passes_one_that_does_not_fit_a_bounded_number_of_times() -> None:
    bench = Bench(num_pages=8)
    running = bench.decode(5, max_new=1)
    large = bench.wait(28)
    for _ in range(3):
        small = bench.wait(2, max_new=1)
        assert small in [grant.request for grant in bench.plan().grants]
        bench.kv.release(small)
        bench.state.stop(small)
    blocked = bench.wait(2, max_new=1)
    assert blocked not in [grant.request for grant in bench.plan().grants]
    bench.kv.release(running)
    bench.state.stop(running)
    assert large in [grant.request for grant in bench.plan().grants]


def test_nothing_is_admitted_while_a_running_request_lacks_memory() -> None:
    bench = Bench(num_pages=4)
    victim = bench.decode(8, priority=-1)
    victim.num_launched, victim.num_in_flight = 8, 1
    prompt = bench.run(12, num_computed=4)  # needs two pages, of which one is free
    bench.wait(1)
    plan = bench.plan()
    assert (brief(plan), plan.num_preempted, bench.kv.num_available) == ([], 0, 1)
    victim.num_in_flight = 0
    assert [grant.request for grant in bench.plan().grants] == [prompt]
    assert victim in bench.state.waiting


def test_a_repeat_of_a_prompt_in_progress_is_parked() -> None:
    bench = Bench(defers=True, num_pages=64, max_prefill_tokens=32)
    bench.wait(60)
    bench.plan()
    repeat = make_request([1] * 60, arrival=9)
    bench.state.waiting.add(repeat)
    bench.state.running[0].num_launched = 32
    assert brief(bench.plan()) == [(1, 28, 1)]
    assert bench.state.waiting.num_candidates == 0


def test_a_tenant_at_its_quota_is_passed_over_and_returns_when_one_of_its_requests_stops() -> None:
    bench = Bench(quotas=Quotas({"a": Quota(max_running=1)}))
    first, second, other = bench.wait(2, tenant="a"), bench.wait(2, tenant="a"), bench.wait(2, tenant="b")
    assert [grant.request for grant in bench.plan().grants] == [first, other]
    assert bench.state.waiting.num_candidates == 0
    bench.kv.release(first)
    bench.state.stop(first)
    assert second in [grant.request for grant in bench.plan().grants]


# When memory runs out


def test_the_worst_ranked_request_is_preempted_and_keeps_its_arrival() -> None:
    bench = Bench(num_pages=6)
    best, middle, worst = (bench.decode(9, priority=priority) for priority in (2, 1, 0))
    assert bench.kv.num_available == 0
    best.num_computed = best.num_launched = 8
    plan = bench.plan()
    assert plan.num_preempted == 1
    assert [grant.request for grant in plan.grants] == [best, middle]
    assert worst in bench.state.waiting
    assert worst.arrival == 3


def test_the_reserve_learns_of_a_preemption() -> None:
    short = make_request([1], max_new=8)
    bench, calm = Bench(num_pages=6), Bench()
    for one in (bench, calm):
        one.reserve.on_end(short)
        assert one.reserve.ratio < 1.0
    for _ in range(3):
        bench.decode(9, max_new=2)
    assert bench.plan().num_preempted
    assert bench.reserve.ratio == 1.0
    calm.plan()
    assert calm.reserve.ratio < 1.0


def test_a_prompt_takes_the_page_of_a_request_of_lower_priority_that_was_to_decode() -> None:
    """It takes that of no other before, nor does it give way itself."""
    bench = Bench(num_pages=7)
    prompt = bench.run(12, num_computed=4, priority=1)
    bench.decode(8, priority=1)
    others = [bench.decode(8, priority=priority) for priority in (0, 0)]
    for other in others:
        other.num_launched = other.num_computed = 7
    plan = bench.plan()
    assert prompt in bench.state.running
    assert prompt in [grant.request for grant in plan.grants]
    assert others[1] in bench.state.waiting
    assert others[1] not in [grant.request for grant in plan.grants]
    assert plan.num_preempted == 1


def test_prefill_first_lets_no_victim_decode() -> None:
    bench = Bench(num_pages=6, mixing="prefill-first")
    prompt = bench.run(16, num_computed=4, priority=1)
    for _ in range(2):
        bench.decode(9)
    plan = bench.plan()
    assert [grant.request for grant in plan.grants] == [prompt]
    assert plan.num_preempted == 1


# Shortage


def shortage(bench: Bench, *, victim: Victim = choose_victim) -> Shortage:
    return Shortage(bench.state, bench.kv, victim)


def test_a_request_that_has_its_pages_preempts_nothing() -> None:
    bench = Bench(num_pages=2)
    request = bench.decode(8)
    one = shortage(bench)
    assert one.grow(request, 8, [])
    assert (one.excluded, one.preempted) == ([], [])


def test_a_victim_without_a_step_in_flight_gives_its_pages_at_once() -> None:
    bench = Bench(num_pages=4)
    best, worst = bench.decode(9, priority=1), bench.decode(4)
    one = shortage(bench)
    assert one.grow(best, 13, [])
    assert (one.preempted, one.excluded) == ([worst], [worst])
    assert worst.row == -1
    assert best.num_pages == 4


def test_several_victims_are_taken_if_one_is_not_enough() -> None:
    bench = Bench(num_pages=6)
    best, *others = (bench.decode(5, max_new=40, priority=-number) for number in range(3))
    one = shortage(bench)
    assert one.grow(best, 24, [])
    assert one.preempted == others[::-1]
    assert best.num_pages == 6


def test_a_victim_in_flight_leaves_in_the_next_step_and_neither_gets_a_grant() -> None:
    bench = Bench(num_pages=3)
    best, middle, worst = bench.decode(5, priority=2), bench.decode(4, priority=1), bench.decode(4)
    worst.num_in_flight = 1
    one = shortage(bench)
    assert not one.grow(best, 9, [])
    assert one.excluded == [worst, best]
    assert not one.grow(middle, 5, [])  # relief is coming: no further victim
    assert one.excluded == [worst, best, middle]
    assert one.preempted == []
    assert worst.row >= 0


def test_a_request_with_a_grant_is_a_victim_of_higher_priority_only() -> None:
    for priority in (-1, 0, 1):
        bench = Bench(num_pages=2)
        growing, granted = bench.decode(5, priority=priority), bench.decode(5)
        one = shortage(bench)
        assert one.grow(growing, 8, [Grant(granted, 4, 1, 1)]) == (priority > 0)
        victim = granted if priority > 0 else growing  # which continues on the cache's copy
        assert one.preempted == one.excluded == [victim]
        assert one.revoked == ([granted] if priority > 0 else [])
        assert victim.row == -1


def test_a_grant_is_taken_back_from_a_victim_whose_step_is_in_flight() -> None:
    bench = Bench(num_pages=3)
    prompt, lower = bench.run(12, num_computed=4, priority=1), bench.decode(8)
    lower.num_in_flight = 1
    plan = bench.plan()
    assert (brief(plan), plan.num_preempted) == ([], 0)
    assert bench.state.running == [prompt, lower]
    lower.num_in_flight = 0
    plan = bench.plan()
    assert [grant.request for grant in plan.grants] == [prompt]
    assert lower in bench.state.waiting


def test_the_request_itself_waits_if_its_own_step_is_in_flight() -> None:
    bench = Bench(num_pages=2)
    request = bench.decode(5)
    request.num_in_flight = 1
    one = shortage(bench)
    assert not one.grow(request, 9, [])
    assert (one.excluded, one.preempted) == ([request], [])


def test_the_victim_is_chosen_by_the_policy() -> None:
    bench = Bench(num_pages=4)
    growing, *others = (bench.decode(4) for _ in range(3))
    seen: list[Sequence[Request]] = []

    def first_of_others(running: Sequence[Request]) -> Request | None:
        seen.append(running)
        return others[0]

    one = shortage(bench, victim=first_of_others)
    assert bench.kv.num_available == 1
    assert one.grow(growing, 12, [])
    assert one.preempted == [others[0]]
    assert seen == [bench.state.running]


def test_kv_of_a_victim_stays_cached() -> None:
    bench = Bench(num_pages=4)
    best, worst = bench.decode(5, priority=1), bench.decode(8)
    one = shortage(bench)
    assert one.grow(best, 9, [])
    kv: KVSpace = bench.kv
    assert one.preempted == [worst]
    assert kv.peek(worst) == 0 or kv.peek(worst) == PAGE  # what was not needed is still there
    assert kv.num_cached + kv.num_free == 1
