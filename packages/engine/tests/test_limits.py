"""Limits of the operator: quotas of tenants, deadlines that cannot be met, requests in the queue; and random traffic.

The faults in `FAULTS` are seeded one at a time, and `run_scenario` finds each of them.
"""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo_bench import echo_engine
from pagewood.engine.api import (
    Abort,
    Command,
    Delta,
    EngineConfig,
    FinishReason,
    SamplingParams,
    SetPriority,
    Submit,
    TenantQuota,
)
from pagewood.engine.core.loop import Engine, Pending, StepHandle
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.queue.quota_queue import QuotaQueue
from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.testing import EchoRunner
from scale import scaled
from scenarios.drawing import random_scenario, with_interruptions, with_limits
from scenarios.running import run_scenario
from scenarios.scenario import Scenario
from seeded_faults import Edit, assert_found, slow_ones

MAX_LENGTH, NUM_PAGES, PAGE = 256, 256, 4


class TimedRunner:
    """An echo runner whose steps take 5 ms, and 1 ms for each position, on a clock of its own."""

    def __init__(self, num_rows: int) -> None:
        self.echo = EchoRunner(
            num_rows=num_rows, max_length=MAX_LENGTH, num_pages=NUM_PAGES, page_size=PAGE, vocab_size=50
        )
        self.close = self.echo.close
        self.now_s = self.end_s = 0.0

    def launch(self, batch: Batch) -> StepHandle:
        self.end_s = max(self.now_s, self.end_s) + 0.005 + 0.001 * int(batch.counts.sum())
        return _TimedHandle(self, self.echo.launch(batch), self.end_s)


class _TimedHandle:
    def __init__(self, runner: TimedRunner, handle: StepHandle, end_s: float) -> None:
        self.runner, self.handle, self.end_s = runner, handle, end_s

    def wait(self) -> StepResult:
        self.runner.now_s = max(self.runner.now_s, self.end_s)
        return self.handle.wait()


class Bench:
    """An engine with the echo model, its answers by request, and the order in which requests have started."""

    def __init__(self, *, max_running: int = 8, **options: Any) -> None:
        self.runner = TimedRunner(max_running)
        self.engine, self.inbox, self.outbox = echo_engine(
            num_pages=NUM_PAGES, max_length=MAX_LENGTH, max_running=max_running, make_runner=lambda kv: self.runner,
            parts={"clock": lambda: self.runner.now_s}, **options,
        )  # fmt: skip
        self.pending: Pending | None = None
        self.deltas: dict[str, list[Delta]] = {}
        self.running: list[set[str]] = []

    def step(self, *commands: Command) -> None:
        for command in commands:
            self.inbox.put(command)
        self.pending = self.engine.advance(self.pending)
        for delta in self.outbox.take():
            self.deltas.setdefault(delta.request_id, []).append(delta)
        assert self.engine.violation() is None
        self.running.append(running(self.engine))

    def until_done(self, *names: str) -> None:
        for _ in range(2000):
            if all(self.finish(name) is not None for name in names):
                return
            self.step()
        raise AssertionError(f"{names} have not ended: {self.engine.counters()}")

    def finish(self, name: str) -> FinishReason | None:
        return self.deltas[name][-1].finish if name in self.deltas else None

    def refusal(self, name: str) -> tuple[str | None, str]:
        refusal = self.deltas[name][-1].refusal
        assert refusal is not None
        assert len(self.deltas[name]) == 1
        return refusal.code, refusal.message

    @property
    def started(self) -> list[str]:
        return list(dict.fromkeys(name for names in self.running for name in sorted(names)))


def running(engine: Engine) -> set[str]:
    return {request.request_id for request in engine._state.running}  # pyright: ignore[reportPrivateUsage]


def submit(name: str, tenant: str | None = None, *, num_tokens: int = 8, max_tokens: int = 8, **fields: Any) -> Submit:
    tokens = (np.arange(num_tokens, dtype="<i4") + 7 * sum(map(ord, name))) % 50
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Submit(request_id=name, tokens=tokens.tobytes(), sampling=sampling, tenant=tenant, **fields)


def names(prefix: str, number: int) -> list[str]:
    return [f"{prefix}{index:03}" for index in range(number)]


# Quotas


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("quota", "most"),
    [
        (TenantQuota("a", max_running=2), 2),
        (TenantQuota("a", max_tokens_in_flight=55), 3),
        (TenantQuota("*", max_kv_tokens=16), 2),
    ],
)
def test_a_tenant_at_its_limit_waits_and_no_other_does(quota: TenantQuota, most: int, overlap: bool) -> None:
    bench = Bench(quotas=(quota,), overlap=overlap)
    flood = names("a", 20)
    bench.step(*(submit(name, "a") for name in flood), submit("b", "b"))
    bench.step()
    assert "b" in bench.running[0] | bench.running[1]
    bench.until_done(*flood, "b")
    num_running = [sum(name[0] == "a" for name in names) for names in bench.running]
    assert max(num_running) == most
    assert bench.started.index("a019") > bench.started.index("a000")


def test_what_a_quota_holds_back_is_counted_apart_from_repeats() -> None:
    bench = Bench(quotas=(TenantQuota("a", max_running=1),), chunked_prefill_size=16)
    bench.engine.measure(clock=lambda: 0.0)
    bench.step(submit("a1", "a"), submit("a2", "a"), submit("a3", "a"), submit("b", "b", num_tokens=60))
    again = submit("b", "b", num_tokens=60)
    bench.step(msgspec.structs.replace(again, request_id="b2"))
    bench.step()
    found = bench.engine.measurement()
    assert found is not None
    assert (found.num_at_quota, found.num_parked) == (2, 1)
    bench.until_done("a1", "a2", "a3", "b", "b2")


def test_the_tenant_is_the_namespace_unless_it_is_given() -> None:
    bench = Bench(quotas=(TenantQuota("a", max_running=1),))
    bench.step(
        submit("one", namespace="a"), submit("two", namespace="a"), submit("three", "b", namespace="a"),
        submit("four", "a"),
    )  # fmt: skip
    assert running(bench.engine) == {"one", "three"}
    assert Bench(quotas=()).engine._state.waiting._quota_queue is None  # pyright: ignore[reportPrivateUsage]


def test_a_flood_does_not_keep_the_pass_from_others() -> None:
    bench = Bench(quotas=(TenantQuota("a", max_running=1),), max_running=4)
    flood = names("a", 900)
    bench.step(*(submit(name, "a", max_tokens=2) for name in flood), submit("b", "b"))
    assert "b" in bench.running[0]  # although a pass examines 256 requests
    bench.step(submit("c", "c"), submit("late", "a"))
    assert "c" in bench.running[-1]
    assert len(bench.engine._state.waiting._quota_queue or ()) > 890  # pyright: ignore[reportPrivateUsage]
    bench.step(*(Abort(request_id=name) for name in flood))
    bench.until_done("b", "c", "late")


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "fair", "shortest"])
def test_small_requests_of_a_tenant_do_not_pass_its_large_one_for_ever(policy: str) -> None:
    bench = Bench(quotas=(TenantQuota("a", max_tokens_in_flight=100),), schedule_policy=policy)
    bench.step(submit("s000", "a"), submit("large", "a", num_tokens=70, max_tokens=20))
    for name in names("t", 300):  # 16 tokens each, one in each step
        bench.step(submit(name, "a"))
        if bench.finish("large") is not None:
            break
    assert bench.finish("large") is FinishReason.LENGTH


def test_held_requests_return_by_priority() -> None:
    bench = Bench(quotas=(TenantQuota("a", max_running=1),), prefix_cache=False)
    bench.step(submit("first", "a"))
    bench.step(*(submit(name, "a") for name in names("a", 12)), submit("high", "a", priority=1))
    bench.step(SetPriority(request_id="a007", priority=2), Abort(request_id="a001"))
    bench.until_done("first", "high", *(name for name in names("a", 12) if name != "a001"))
    assert bench.started[1:5] == ["a007", "high", "a000", "a002"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_new_priority_does_not_cost_a_held_request_its_turn(overlap: bool) -> None:
    """It comes after the end of the request that it waits for, and before the next pass."""
    bench = Bench(quotas=(TenantQuota("a", max_running=1),), overlap=overlap)
    bench.step(submit("first", "a"), submit("held", "a"))
    while bench.finish("first") is None:
        bench.step()
    bench.step(SetPriority(request_id="held", priority=2))
    bench.until_done("held")


def test_what_a_quota_never_allows_is_refused_on_arrival() -> None:
    quotas = (TenantQuota("a", max_tokens_in_flight=15), TenantQuota("*", max_kv_tokens=7))
    bench = Bench(quotas=quotas)
    bench.step(submit("a", "a"), submit("b", "b"), submit("c", "b", num_tokens=7))
    assert bench.refusal("a") == (
        "quota_exceeded",
        "the request exceeds the quota of its tenant even if it runs alone: max_tokens_in_flight: 16 wanted, 15 left",
    )
    assert bench.refusal("b")[1].endswith("max_kv_tokens: 8 wanted, 7 left")
    bench.until_done("c")
    assert bench.finish("c") is FinishReason.LENGTH


def test_a_preempted_request_that_has_outgrown_its_quota_goes_on() -> None:
    bench = Bench(quotas=(TenantQuota("a", max_kv_tokens=10),), max_running=1, preemption_threshold=0)
    bench.step(submit("a", "a", max_tokens=30))
    for _ in range(10):
        bench.step()
    bench.step(submit("urgent", "b", priority=1))
    bench.until_done("urgent")
    assert bench.engine.counters().num_preempted == 1
    bench.until_done("a")
    assert bench.finish("a") is FinishReason.LENGTH


# Deadlines


def loaded(*, num_warm: int = 40, **options: Any) -> Bench:
    """Return an engine that knows what its steps take, with two requests that decode."""
    bench = Bench(refuse_late=True, chunked_prefill_size=32, prefix_cache=False, **options)
    bench.step(*(submit(name, max_tokens=200) for name in ("x", "y")))
    for index in range(num_warm):
        bench.step(*([submit(f"warm{index}", num_tokens=10 + index, max_tokens=1)] if index % 3 == 0 else []))
    bench.until_done(*(f"warm{index}" for index in range(0, num_warm, 3)))
    return bench


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_that_will_miss_its_deadline_is_refused_and_one_that_meets_it_does(overlap: bool) -> None:
    bench = loaded(overlap=overlap)
    now_s = bench.runner.now_s
    # 64 tokens in two chunks of 32 beside two decodes: 2 * (5 + 32 + 2) ms; then 19 steps of 5 + 3 ms.
    needed_s = 2 * 0.039 + 19 * 0.008
    late = submit("late", num_tokens=64, max_tokens=20, deadline_s=now_s + needed_s - 0.005)
    early = submit("early", num_tokens=64, max_tokens=20, deadline_s=now_s + needed_s + 0.02)
    bench.step(late)
    code, message = bench.refusal("late")
    assert code == "deadline_infeasible"
    assert message == (
        "the request is expected to take 0.230 s, with 0 prompt tokens before its own, but its deadline is in 0.225 s"
    )
    bench.step(early)
    bench.until_done("early")
    assert bench.finish("early") is FinishReason.LENGTH
    assert bench.runner.now_s <= now_s + needed_s + 0.06  # it waited for the steps in flight when it came


def test_prompts_that_come_first_count_and_those_behind_do_not() -> None:
    def accepted(policy: str, priority: int, other_deadline_s: float) -> bool:
        bench = loaded(schedule_policy=policy)
        now_s = bench.runner.now_s
        others = (
            submit(name, num_tokens=200, max_tokens=1, deadline_s=now_s + other_deadline_s, priority=priority)
            for name in names("o", 5)
        )
        bench.step(*others, submit("one", num_tokens=8, max_tokens=1, deadline_s=now_s + 0.5))
        assert all(name not in bench.deltas for name in names("o", 5))
        bench.step()
        return "one" not in bench.deltas or bench.deltas["one"][0].refusal is None

    assert not accepted("fcfs", 0, 9.0)  # 1,000 tokens take more than a second
    assert not accepted("edf", 1, 9.0)
    assert accepted("edf", 0, 9.0)
    assert accepted("fcfs", -1, 9.0)


def test_without_measurements_only_a_deadline_that_is_over_is_refused() -> None:
    bench = Bench(refuse_late=True)
    bench.runner.now_s = 10.0
    bench.step(submit("over", deadline_s=9.75), submit("close", deadline_s=10.001))
    assert bench.refusal("over") == (
        "deadline_infeasible",
        "the deadline must be in the future, but it was 0.250 s ago",
    )
    assert "close" not in bench.deltas
    bench = Bench()
    bench.runner.now_s = 10.0
    bench.step(submit("over", deadline_s=9.75))
    assert "over" not in bench.deltas


def test_only_a_part_of_the_output_is_expected_if_a_token_may_end_it() -> None:
    bench = loaded()
    tokens = np.arange(8, dtype="<i4").tobytes()
    for name in names("short", 8):  # others have ended early
        sampling = SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=tuple(range(50)))
        bench.step(Submit(request_id=name, tokens=tokens, sampling=sampling))
        bench.step()
    now_s = bench.runner.now_s
    for name, stop in (("certain", ()), ("maybe", (3,))):
        sampling = SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=stop)
        bench.step(Submit(request_id=name, tokens=tokens, sampling=sampling, deadline_s=now_s + 0.75))
    assert bench.refusal("certain")[0] == "deadline_infeasible"
    bench.step()
    assert "maybe" not in bench.deltas or bench.deltas["maybe"][0].refusal is None


# The length of the queue


def test_no_more_than_so_many_requests_are_queued() -> None:
    bench = Bench(max_running=2, max_queued=1)
    bench.step(*(submit(name) for name in "abcd"))
    code, message = bench.refusal("d")
    assert (code, message) == ("queue_full", "the engine already holds 3 requests, as many as may run and be queued")
    bench.until_done("a", "b", "c")
    bench.step(submit("e"))
    bench.until_done("e")
    assert bench.finish("e") is FinishReason.LENGTH


def test_a_preempted_request_is_exempt_from_the_limit() -> None:
    bench = Bench(max_running=1, max_queued=1, preemption_threshold=0)
    bench.step(submit("a", max_tokens=30))
    for _ in range(5):
        bench.step()
    bench.step(submit("urgent", priority=1))
    bench.until_done("urgent")
    assert bench.engine.counters().num_preempted == 1
    bench.until_done("a")
    assert bench.finish("a") is FinishReason.LENGTH


# Answers


def test_results_of_high_priority_are_sent_first_and_without_priorities_nothing_is_sorted() -> None:
    def order(*priorities: int) -> tuple[list[str], bool]:
        bench = Bench(overlap=False)
        bench.step(*(submit(name, priority=priority) for name, priority in zip("abc", priorities, strict=True)))
        bench.step()
        for one, priority in zip("abc", priorities, strict=True):  # d is admitted behind all decodes
            bench.inbox.put(SetPriority(request_id=one, priority=priority))
        bench.inbox.put(submit("d", priority=max(priorities)))
        bench.engine.step()
        has_priorities = bench.engine._state.has_priorities  # pyright: ignore[reportPrivateUsage]
        return [delta.request_id for delta in bench.outbox.take()], has_priorities

    assert order(0, 0, 0) == (["a", "b", "c", "d"], False)
    assert order(0, 2, 1) == (["b", "d", "c", "a"], True)


def test_priorities_are_forgotten_when_no_request_is_left() -> None:
    bench = Bench()
    bench.step(submit("a", priority=1))
    bench.until_done("a")
    bench.step(submit("b"))
    assert not bench.engine._state.has_priorities  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("interval", [1, 3])
def test_tokens_are_sent_at_intervals(interval: int) -> None:
    bench = Bench(stream_interval=interval)
    bench.step(submit("a", max_tokens=9), submit("b", max_tokens=50))
    bench.until_done("a")
    bench.step(Abort(request_id="b"))
    bench.until_done("b")
    sizes = [len(delta.tokens) for delta in bench.deltas["a"]]
    assert sizes == ([1] * 9 if interval == 1 else [1, 3, 3, 2])
    plain = Bench()
    plain.step(submit("a", max_tokens=9))
    plain.until_done("a")
    assert [token for delta in bench.deltas["a"] for token in delta.tokens] == [
        token for delta in plain.deltas["a"] for token in delta.tokens
    ]
    assert [delta.num_output_tokens for delta in bench.deltas["a"]] == list(np.cumsum(sizes))
    assert bench.finish("b") is FinishReason.ABORT
    num_output = bench.deltas["b"][-1].num_output_tokens
    assert sum(len(delta.tokens) for delta in bench.deltas["b"]) == num_output


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queued": -1}, "max_queued must be >= 0, got -1"),
        ({"stream_interval": 0}, "stream_interval must be >= 1, got 0"),
        ({"schedule_preset": "fast"}, "schedule_preset must be one of decode-first, stall-free, prefill-first, got "),
        ({"schedule_preset": "stall-free", "prefill_first": True}, "schedule_preset must be prefill-first with"),
        ({"quotas": (TenantQuota("a", 0),)}, "quotas must have max_running >= 1, got 0 for 'a'"),
        ({"quotas": (TenantQuota("a", 1), TenantQuota("a", 2))}, "quotas must name each tenant once, got 'a' again"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


# Random traffic


def check_quotas(engine: Engine) -> None:
    """No tenant may have more running than its quota allows."""
    quotas = {quota.tenant: quota for quota in engine.config.quotas}
    state = engine._state  # pyright: ignore[reportPrivateUsage]
    tenants = {request.tenant for request in state.running}
    for tenant in tenants:
        quota = quotas.get(tenant) or quotas.get("*")
        if quota is None:
            continue
        mine = [request for request in state.running if request.tenant == tenant]
        assert len(mine) <= (quota.max_running or len(mine))
        num_at_end = sum(request.max_length for request in mine)
        assert num_at_end <= (quota.max_tokens_in_flight or num_at_end)


def limited(rng: random.Random, *, overlap: bool) -> Scenario:
    scenario = with_limits(random_scenario(rng, overlap=overlap), rng)
    return with_interruptions(scenario, rng) if rng.random() < 0.5 else scenario


@settings(max_examples=scaled(25), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_limits_do_not_change_the_output_and_are_kept(rng: random.Random, overlap: bool) -> None:
    run_scenario(limited(rng, overlap=overlap), after_step=check_quotas)


def test_scenarios_exercise_what_they_claim() -> None:
    reports = [run_scenario(limited(random.Random(seed), overlap=seed % 2 > 0)) for seed in range(45)]
    for code in ("quota_exceeded", "queue_full", "deadline_infeasible"):
        assert sum(report.num_refused_by_code.get(code, 0) for report in reports) > 3, code
    assert sum(report.num_preempted for report in reports) > 10


FAULTS: dict[str, Sequence[Edit]] = {
    "quota ignored": [(QuotaQueue, "take", "if not is_behind and self._fits(request, mine):", "if True:")],
    "stop not counted": [(QuotaQueue, "stop", "self._quotas.stop(request)", "pass")],
    "room not noticed": [(QuotaQueue, "_note_room", "tenant.has_room = True", "pass")],
    "ended request returns": [(WaitingQueue, "remove", "self._quota_queue.discard(request)", "pass")],
}


@pytest.mark.parametrize("name", slow_ones(FAULTS, "stop not counted", "room not noticed"))
def test_seeded_faults_are_found(name: str) -> None:
    assert_found(
        FAULTS[name],
        lambda seed: run_scenario(limited(random.Random(seed), overlap=seed % 3 > 0), after_step=check_quotas),
        range(300),
    )
