"""While nothing is drafted, an engine with a drafter takes the steps of one without, at the same cost."""

# pyright: basic
# It reads private parts of the engine.

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, SamplingParams, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.speculation import Speculation, StepsReport
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cpu.runner import CPURunner
from speculating import runner_of

DRAFTERS = ("ngram", "suffix", "draft", "eagle")


class Resting:
    """A policy that never drafts; satisfies `core.steps.speculation.Drafting`."""

    max_tokens = 5
    reason = "never"
    is_far = True

    def rests(self, num_requests: int) -> bool:
        """Return True."""
        return True

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Fail: nothing asks for it."""
        raise AssertionError("a step that rests asks for no lengths")

    def observe(self, report: StepsReport) -> None:
        """Do nothing."""

    def forget(self, request: Request) -> None:
        """Do nothing."""


def num_calls(function: Callable[[], None]) -> int:
    """Return how many functions are called, of Python and of C."""
    count = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def test_a_step_without_drafts_costs_the_host_the_same_for_any_number_of_requests() -> None:
    counts: list[list[int]] = []
    for num_requests in (2, 200):
        # The clock stands still, because the time of steps decides when they are reported.
        speculation = Speculation(drafting=Resting(), kv=None, clock=lambda: 1.0)  # type: ignore[arg-type]
        grants = tuple(Grant(None, 0, 1, 1) for _ in range(num_requests))  # type: ignore[arg-type]
        result = StepResult(tokens=np.zeros(num_requests, np.int32), counts=np.ones(num_requests, np.int32))

        def step(speculation: Speculation = speculation, grants: tuple[Grant, ...] = grants, result: Any = result):
            assert speculation.extend(grants) is grants
            speculation.settle(grants, result, is_drafting=False)

        step()
        counts.append([num_calls(step) for _ in range(28)])
    assert counts[0] == counts[1]
    assert max(counts[0]) <= 8  # with the two calls of this test


def request_named(name: str) -> Request:
    """Return a request with a prompt of 8 tokens, which may become 64 long."""
    return Request(
        request_id=name, sampling=SamplingParams(), stop_ids=frozenset(), num_prompt=8, max_length=64,
        tokens=np.zeros(64, np.int32), num_known=8, seed=0, priority=0, key=None, carry=b"", arrival=0,
        arrived_s=0.0,
    )  # fmt: skip


class Listening(Resting):
    """Never drafts, and keeps what is reported."""

    def __init__(self) -> None:
        self.kept: list[StepsReport] = []

    def observe(self, report: StepsReport) -> None:
        """Keep the report."""
        self.kept.append(report)

    def numbers(self) -> list[tuple[int, ...]]:
        """Return the numbers of the reports, with microseconds, and forget them."""
        found = [
            (one.num_steps, one.num_decoding, one.num_tokens, one.num_draft_tokens, round(1e6 * one.draft_s),
             round(1e6 * one.taken_s)) for one in self.kept
        ]  # fmt: skip
        self.kept.clear()
        return found


def test_steps_that_are_alike_are_reported_together_and_none_is_lost() -> None:
    """A report ends with four milliseconds, another number of requests, prompts, another kind of step, and at idle."""
    drafting, now = Listening(), 0.0
    speculation = Speculation(drafting=drafting, kv=None, clock=lambda: now)  # type: ignore[arg-type]
    first, second = request_named("a"), request_named("b")

    def settle(grants: list[Grant], counts: list[int], *, is_drafting: bool = True, seconds: float = 1.2e-3) -> None:
        nonlocal now
        now += seconds
        drafted = np.array([max(0, grant.num_promised - 1) for grant in grants], np.int32)
        result = StepResult(tokens=np.zeros(sum(counts), np.int32), counts=np.array(counts, np.int32),
                            num_drafted=drafted, draft_s=1e-4, verify_s=min(seconds, 1.2e-3) - 1e-4)  # fmt: skip
        speculation.settle(grants, result, is_drafting=is_drafting)

    def plain(num_requests: int, *, num_prompts: int = 0, seconds: float = 1.2e-3) -> None:
        decodes = [Grant(first, 9, 1, 1)] * num_requests
        prompts = [Grant(second, 0, 9, 1)] * num_prompts
        settle([*decodes, *prompts], [1] * (num_requests + num_prompts), is_drafting=False, seconds=seconds)

    pair = [Grant(first, 9, 4, 4), Grant(second, 9, 1, 1)]
    for _ in range(5):
        settle(pair, [3, 1])
    [four] = drafting.kept
    assert four.requests == [first] * 4
    assert (four.granted, four.drafted, four.accepted) == ([3] * 4, [3] * 4, [2] * 4)
    assert drafting.numbers() == [(4, 8, 20, 12, 400, 4800)]
    settle(pair[:1], [2])
    assert drafting.numbers() == [(1, 2, 5, 3, 100, 1200)]  # another number of requests
    settle([pair[0], Grant(second, 0, 8, 1)], [2, 1])
    assert drafting.numbers() == [(1, 1, 4, 3, 100, 1200), (1, 1, 12, 3, 100, 1200)]  # a prompt
    settle(pair, [4, 1])
    plain(2)
    assert drafting.numbers() == [(1, 2, 5, 3, 100, 1200)]  # a plain step
    plain(2, seconds=60.0)  # a pause does not count
    for _ in range(3):
        plain(7)
    plain(6, num_prompts=1)
    plain(0, num_prompts=7)
    assert drafting.numbers() == [
        (2, 4, 4, 0, 200, 2400), (3, 21, 21, 0, 300, 3600), (1, 6, 15, 0, 100, 1200), (1, 0, 63, 0, 100, 1200)
    ]  # fmt: skip
    settle(pair, [4, 0])  # the second has ended
    settle(pair, [0, 1])  # and the first
    speculation.report()
    speculation.report()
    assert drafting.kept[0].requests == [first]
    assert drafting.numbers() == [(2, 4, 10, 6, 200, 2400)]


class Full:
    """KV memory without a free page; satisfies as much of `KVSpace` as `extend` needs."""

    page_size = 4

    def grow(self, request: Request, num_tokens: int, *, num_reserved: int = 0) -> bool:
        """Decline what needs another page."""
        return num_tokens <= request.num_pages * self.page_size


class Wanting(Resting):
    """Wants five drafts in every step."""

    is_far = False

    def rests(self, num_requests: int) -> bool:
        """Return False."""
        return False

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return five for each request."""
        return [5] * len(requests)


@pytest.mark.parametrize(
    ("start", "num_pages", "expected"), [(8, 4, 5), (8, 3, 3), (11, 3, 0), (57, 16, 5), (60, 16, 2), (62, 16, 0)]
)
def test_drafts_have_as_much_room_as_pages_and_the_limit_leave(start: int, num_pages: int, expected: int) -> None:
    """Without room for any, the step is the plain one."""
    speculation = Speculation(drafting=Wanting(), kv=Full())  # type: ignore[arg-type]
    request = request_named("a")
    request.num_pages = num_pages
    grants = (Grant(request, start, 1, 1),)
    extended = speculation.extend(grants)
    assert extended[0].num_tokens == extended[0].num_promised == 1 + expected
    assert (extended is grants) == (not expected)


def built(**fields: Any) -> tuple[Engine, MemoryInbox, MemoryOutbox]:
    """Return an engine for the embedded model that never drafts."""
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(num_threads=1, max_running=8, max_total_tokens=4096, **fields)
    engine = build_engine(config, inbox=inbox, outbox=outbox)
    if engine._speculation is not None:
        engine._speculation._drafting = Resting()
    return engine, inbox, outbox


def answers(engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox) -> tuple[dict[str, list[int]], list[int]]:
    """Return the answers to four requests, and how many calls each step of their decoding makes."""
    for number in range(4):
        tokens = np.array([40 + number, 50, 60, 50, 60], "<i4").tobytes()
        sampling = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
        inbox.put(Submit(request_id=str(number), tokens=tokens, sampling=sampling))
    found: dict[str, list[int]] = {}
    calls: list[int] = []
    pending, num_open = None, 4
    while num_open or pending is not None:

        def advance() -> None:
            nonlocal pending
            pending = engine.advance(pending)

        if pending is not None:
            pending.handle.wait()  # so the runner is always idle: then a launch makes a few calls more
        calls.append(num_calls(advance))
        for delta in outbox.take():
            found.setdefault(delta.request_id, []).extend(delta.tokens)
            num_open -= delta.finish is not None
    return found, calls


@pytest.mark.parametrize("kind", DRAFTERS)
def test_an_engine_that_rests_takes_plain_steps(kind: str) -> None:
    plain, resting = built(), built(speculative=kind)
    try:
        expected, plain_calls = answers(*plain)
        found, calls = answers(*resting)
        assert found == expected
        runners: list[CPURunner] = [runner_of(engine) for engine, _, _ in (plain, resting)]
        assert runners[1]._now is runners[1]._plain
        programs = [runner._program for runner in runners]
        assert programs[0].names == programs[1].names
        assert len(programs[0].scopes) == len(programs[1].scopes) == 1
        # Of 26 steps in the middle, each makes at most eight calls more.
        assert sorted(calls)[13] <= sorted(plain_calls)[13] + 8
        assert resting[0].counters().speculation is not None
        assert resting[0].counters().speculation.draft_s == 0.0  # type: ignore[union-attr]
    finally:
        for engine, _, _ in (plain, resting):
            engine.close()


class Following(Resting):
    """Never drafts, and lets drafters follow the text."""

    is_far = False


@pytest.mark.parametrize("kind", DRAFTERS)
def test_what_drafters_take_to_follow_the_text_is_measured(kind: str) -> None:
    """Those that look tokens up have nothing to do, and a draft model reads what it lacks when it drafts."""
    engine, inbox, outbox = built(speculative=kind)
    try:
        assert engine._speculation is not None
        engine._speculation._drafting = Following()
        answers(engine, inbox, outbox)
        counts = engine.counters().speculation
        assert counts is not None
        assert (counts.draft_s > 0.0) == (kind == "eagle")
        assert counts.draft_s < counts.verify_s
    finally:
        engine.close()
