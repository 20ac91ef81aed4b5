"""An idle engine rests, and an admission that stands still is noticed, logged once and reported."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest

from echo_bench import EchoBench, expected, submit
from pagewood.engine.api import Abort, EngineConfig, PauseRequest, ResumeRequest, TenantQuota
from pagewood.engine.assemble import assemble
from pagewood.engine.core.loop import EngineInfo
from pagewood.engine.core.observe.watchdog import STUCK_PASSES, STUCK_S
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.step_plan import StepPlan
from pagewood.engine.links import MemoryOutbox, ThreadInbox
from pagewood.engine.testing import EchoRunner

LONG = [1] * 20


class Frozen:
    """Stands in the way of admission until it thaws."""

    def __init__(self, bench: EchoBench, monkeypatch: pytest.MonkeyPatch, *, part: str) -> None:
        self.is_frozen = True
        planner, order = bench.engine._planner, bench.state.waiting._order  # pyright: ignore[reportPrivateUsage]
        plan, ordered = type(planner).plan, type(order).ordered

        def no_plan(*arguments: object) -> StepPlan:
            return StepPlan(grants=()) if self.is_frozen else plan(*arguments)  # pyright: ignore[reportArgumentType]

        def no_order(*arguments: object) -> Iterator[Request]:
            return iter(()) if self.is_frozen else ordered(*arguments)  # pyright: ignore

        if part == "planner":
            monkeypatch.setattr(type(planner), "plan", no_plan)
        else:
            monkeypatch.setattr(type(order), "ordered", no_order)


def until_stuck(bench: EchoBench) -> None:
    for _ in range(STUCK_PASSES + 1):
        bench.now_s += 2 * STUCK_S / STUCK_PASSES
        bench.step()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", ["order", "planner"])
def test_an_admission_that_stands_still_is_logged_once_and_reported(
    part: str, overlap: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = EchoBench(overlap=overlap)
    frozen = Frozen(bench, monkeypatch, part=part)
    bench.step(submit("a", LONG, max_tokens=3), submit("b", [2] * 8, max_tokens=3))
    bench.steps(10)
    assert bench.engine.counters().num_stuck == 0  # it may be short
    until_stuck(bench)
    assert bench.engine.counters().num_stuck == 2
    until_stuck(bench)
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage().startswith("admission stands still: 2 requests wait (0 of them parked, 0 recalled)")
    assert "32 pages are free" in record.getMessage()
    frozen.is_frozen = False
    bench.until(lambda: bench.finish("a") and bench.finish("b"))
    assert bench.engine.counters().num_stuck == 0
    assert bench.tokens("a") == expected(LONG, 3)


def test_a_request_that_leaves_ends_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EchoBench()
    Frozen(bench, monkeypatch, part="order")
    bench.step(submit("a", LONG))
    until_stuck(bench)
    assert bench.engine.counters().num_stuck == 1
    bench.step(Abort(request_id="a"))
    bench.step()
    assert bench.engine.counters().num_stuck == 0


def test_many_passes_in_a_short_time_and_a_long_time_with_few_are_no_freeze(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EchoBench()
    Frozen(bench, monkeypatch, part="order")
    bench.step(submit("a", LONG))
    bench.steps(STUCK_PASSES * 2)
    assert bench.engine.counters().num_stuck == 0
    other = EchoBench()
    Frozen(other, monkeypatch, part="order")
    other.step(submit("a", LONG))
    other.now_s = 100.0
    other.steps(STUCK_PASSES // 2)
    assert other.engine.counters().num_stuck == 0


def test_the_time_in_which_the_process_stood_still_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = EchoBench()
    Frozen(bench, monkeypatch, part="order")
    bench.step(submit("a", LONG))
    bench.steps(STUCK_PASSES)
    bench.now_s += 1000.0  # a suspended laptop
    bench.step()
    assert (bench.engine.counters().num_stuck, bench.engine.frozen_s) == (0, 0.0)
    until_stuck(bench)
    assert bench.engine.counters().num_stuck == 1
    assert STUCK_S < bench.engine.frozen_s < 3 * STUCK_S


def test_a_paused_engine_is_not_stuck() -> None:
    bench = EchoBench()
    bench.step(submit("a", LONG), PauseRequest(request_id="a"))
    until_stuck(bench)
    assert bench.engine.counters().num_stuck == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "quota",
    [TenantQuota("*", max_running=1), TenantQuota("*", max_kv_tokens=30), TenantQuota("*", max_tokens_in_flight=60)],
)
def test_what_waits_only_for_a_paused_request_is_not_stuck_and_the_loop_rests(
    quota: TenantQuota, overlap: bool
) -> None:
    bench = EchoBench(quotas=(quota,), overlap=overlap)
    bench.step(submit("a", LONG, tenant="t"))
    bench.step(submit("b", [2] * 20, tenant="t"), submit("c", [3] * 20, tenant="t"), PauseRequest(request_id="a"))
    bench.steps(5)
    until_stuck(bench)
    assert bench.engine.counters().num_stuck == 0
    assert (len(bench.state.waiting), bench.state.is_resting) == (2, True)
    bench.step(Abort(request_id="b"))  # c may return to the order now
    bench.steps(3)
    assert bench.state.is_resting
    bench.step(submit("d", [4] * 8, tenant="other", max_tokens=3))
    assert not bench.state.is_resting
    bench.until(lambda: bench.finish("d"))
    bench.step(ResumeRequest(request_id="a"))
    bench.until(lambda: bench.finish("a") and bench.finish("c"))
    assert bench.tokens("c") == expected([3] * 20)
    bench.step()
    bench.check_empty()


def test_an_admission_that_stands_still_behind_a_paused_request_of_another_tenant_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = EchoBench(quotas=(TenantQuota("t", max_running=1),))
    bench.step(submit("a", LONG, tenant="t"), submit("b", [2] * 20, tenant="t"))
    bench.step(PauseRequest(request_id="a"))
    bench.steps(5)
    Frozen(bench, monkeypatch, part="order")
    bench.step(submit("c", [3] * 20, tenant="other"))
    until_stuck(bench)
    assert bench.engine.counters().num_stuck == 2


class InThread:
    """An engine in a thread of its own."""

    def __init__(self) -> None:
        self.inbox, self.outbox = ThreadInbox(), MemoryOutbox()
        self.engine = assemble(
            EngineConfig(page_size=4, max_running=2),
            info=EngineInfo(
                model_name="echo", max_length=64, vocab_size=50, eos_token_ids=(), num_pages=32, page_size=4
            ),
            make_runner=lambda kv: EchoRunner(num_rows=2, max_length=64, num_pages=32, page_size=4, vocab_size=50),
            inbox=self.inbox,
            outbox=self.outbox,
        )
        self.is_stopped = False
        self.thread = threading.Thread(target=self.engine.run, args=(lambda: self.is_stopped,))

    def __enter__(self) -> InThread:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.is_stopped = True
        self.inbox.wake()
        self.thread.join(60)
        self.engine.close()

    def wait_for_tokens(self, number: int) -> None:
        end_s, num_tokens = time.monotonic() + 60, 0
        while num_tokens < number:
            assert time.monotonic() < end_s
            num_tokens += sum(len(delta.tokens) for delta in self.outbox.take())
            time.sleep(0.001)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["idle", "with a request that is paused alone"])
def test_an_idle_engine_uses_no_cpu(state: str) -> None:
    with InThread() as bench:
        bench.inbox.put(submit("a", LONG, max_tokens=4))
        bench.wait_for_tokens(4)
        if state != "idle":
            bench.inbox.put(submit("b", LONG, max_tokens=40))
            bench.wait_for_tokens(2)
            bench.inbox.put(PauseRequest(request_id="b", retract=True))
            time.sleep(0.2)
        before_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before_s < 0.02
        assert bench.engine.counters().num_violations == 0


@pytest.mark.slow
def test_an_engine_that_is_stuck_uses_little_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewood.schedpolicy.orders.ranked.RankedOrder.ordered", lambda *_: iter(()))  # pyright: ignore
    with InThread() as bench:
        bench.inbox.put(submit("a", LONG, max_tokens=4))
        while not bench.engine.counters().num_stuck:
            time.sleep(0.01)
        before_s = time.process_time()
        time.sleep(1.0)
        assert time.process_time() - before_s < 0.3
        assert bench.engine.counters().num_stuck == 1
