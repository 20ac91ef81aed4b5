"""A request of high priority waits for what a low one does no longer than that takes, whatever the middle ones want.

Three priorities, and in every step one more request of the middle one. What is bounded is the number of steps to the
first token: those of the work of the high one, those of the work of the low one that it waits for, and `SLACK`.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo_bench import PAGE, VOCAB, EchoBench, expected, submit
from pagewood.engine.api import Abort, Command, Grammar, PauseRequest, SetPriority, Submit, TenantQuota
from pagewood.engine.core.request import Request
from pagewood.engine.grammar import GrammarCompiler
from pagewood.engine.grammar.matcher import Matcher
from pagewood.engine.testing.echo_grammar import EchoMatcher
from pagewood.kvpool.tiers import ArrayPages, HostTier, Lanes, TieredIndex
from pagewood.kvpool.tiers.testing import ManualLane, manual_lanes
from pagewood.radixcache import RadixCache
from scale import scaled

LOW, MIDDLE, HIGH = 0, 10, 20
CHUNK = 8
SLACK = 3
"""Steps: one in which a request parks, one that is in flight when it may go on, and one for the answer of its last."""


def num_steps(num_tokens: int) -> int:
    """Return the steps of a prompt: requests that wait to start may take an eighth of each."""
    return -(-num_tokens // (CHUNK - CHUNK // 8))


SHARED = [1, 2, 3, 4] * 40
"""Tokens; 20 chunks, most of which are worth waiting for."""
MAX_LENGTH = 200
OVERLAPS = pytest.mark.parametrize("overlap", [False, True])


def middle_ones(num_prompt: int, **fields: Any) -> Iterator[Submit]:
    """Yield requests of the middle priority, no two alike."""
    for number in count():
        prompt = [10 + number % 30, 10 + number // 30] * (num_prompt // 2)
        yield submit(f"middle {number}", prompt, priority=MIDDLE, **fields)


def steps_to_first_token(
    bench: EchoBench, name: str, stream: Iterator[Submit], *, after_step: Callable[[], None] = lambda: None
) -> int:
    """Advance with one more request of a stream in each step, until a request has a token; return the steps."""
    for number in range(1, 120):
        bench.step(next(stream))
        after_step()
        if bench.tokens(name):
            return number
    raise AssertionError(f"{name} has no token after 120 steps: {bench.engine.counters()}")


def request(bench: EchoBench, name: str) -> Request:
    return bench.state.by_id[name]


def behind_a_low_leader(**options: Any) -> EchoBench:
    """Return a bench in which a high request is parked behind the prompt of a low one, of which a chunk is computed."""
    options = {"max_running": 64, "num_pages": 800, "max_length": MAX_LENGTH, "chunked_prefill_size": CHUNK, **options}
    bench = EchoBench(**options)
    bench.step(submit("low", [*SHARED, 7, 7], priority=LOW, max_tokens=4))
    bench.step(submit("high", [*SHARED, 8, 8], priority=HIGH, max_tokens=4))
    assert request(bench, "high") in bench.state.waiting
    assert bench.state.waiting.is_parked(request(bench, "high"))
    return bench


@OVERLAPS
@pytest.mark.parametrize("mixing", ["decode-first", "stall-free", "prefill-first"])
def test_a_leader_of_low_priority_goes_on_before_middle_ones(overlap: bool, mixing: str) -> None:
    bench = behind_a_low_leader(overlap=overlap, schedule_preset=mixing)
    assert steps_to_first_token(bench, "high", middle_ones(20)) <= num_steps(len(SHARED) + 4) + SLACK


@OVERLAPS
def test_a_leader_of_low_priority_does_not_lose_its_place_to_middle_ones(overlap: bool) -> None:
    bench = behind_a_low_leader(overlap=overlap, max_running=2, preemption_threshold=5)
    high, num_looks = request(bench, "high"), 0

    def look() -> None:
        nonlocal num_looks
        if bench.state.waiting.is_parked(high):
            num_looks += 1
            assert request(bench, "low") in bench.state.running
            assert not bench.engine.counters().num_preempted

    num = steps_to_first_token(bench, "high", middle_ones(20), after_step=look)
    assert num <= num_steps(len(SHARED) + 4) + SLACK
    assert num_looks > 10


@OVERLAPS
@pytest.mark.parametrize("retract", [False, True])
def test_a_parked_request_goes_on_by_itself_when_its_leader_is_paused(overlap: bool, retract: bool) -> None:
    bench = behind_a_low_leader(overlap=overlap)
    bench.step(PauseRequest(request_id="low", retract=retract))
    assert steps_to_first_token(bench, "high", middle_ones(20)) <= num_steps(len(SHARED) + 4) + SLACK


def test_a_leader_that_is_preempted_for_a_higher_one_loses_what_it_was_lent() -> None:
    bench = behind_a_low_leader(overlap=False, max_running=2, preemption_threshold=5)
    bench.step(submit("highest", [9] * 8, priority=HIGH + 20, max_tokens=9))
    bench.step(submit("as high", [11] * 8, priority=HIGH + 20, max_tokens=2))
    bench.until(lambda: request(bench, "low").row < 0)
    assert request(bench, "low").priority == LOW
    bench.until(lambda: bench.finish("high"))
    assert bench.finish("as high")
    assert not bench.tokens("low")  # the high one did not wait for it any more


def test_priority_is_lent_until_the_prefix_is_cached_and_counts_as_that_of_the_lender_nowhere_else() -> None:
    bench = behind_a_low_leader(overlap=False)
    bench.step()
    low, high = request(bench, "low"), request(bench, "high")
    assert (low.priority, low.own_priority) == (HIGH, LOW)
    (view,) = [one for one in bench.engine.view().requests if one.request_id == "low"]
    assert view.priority == LOW
    bench.until(lambda: not bench.state.waiting.is_parked(high) and high not in bench.state.waiting)
    bench.step()
    assert low.priority == LOW
    bench.until(lambda: bench.finish("high") and bench.finish("low"))
    assert bench.tokens("low") == expected([*SHARED, 7, 7], 4, max_length=MAX_LENGTH)
    assert bench.tokens("high") == expected([*SHARED, 8, 8], 4, max_length=MAX_LENGTH)


def test_the_highest_of_several_is_lent_and_changes_of_priorities_count() -> None:
    bench = behind_a_low_leader(overlap=False)
    bench.step(submit("higher", [*SHARED, 9, 9], priority=HIGH + 1, max_tokens=4))
    bench.step()
    low = request(bench, "low")
    assert low.priority == HIGH + 1
    bench.step(Abort(request_id="higher"))
    assert low.priority == HIGH
    bench.step(SetPriority(request_id="high", priority=HIGH - 5))
    assert low.priority == HIGH - 5
    bench.step(SetPriority(request_id="low", priority=HIGH + 5))
    assert low.priority == HIGH + 5
    bench.step(SetPriority(request_id="low", priority=LOW - 5))
    assert low.priority == HIGH - 5
    assert bench.state.running[0] is low


def test_nothing_is_lent_while_priorities_are_not_in_use() -> None:
    bench = EchoBench(chunked_prefill_size=CHUNK, max_length=MAX_LENGTH, num_pages=100, overlap=False)
    bench.step(submit("first", [*SHARED, 7, 7], max_tokens=4))
    bench.step(submit("second", [*SHARED, 8, 8], max_tokens=4))
    assert bench.state.waiting.is_parked(request(bench, "second"))
    for _ in range(4):
        assert not bench.state.waiting.begin_step()
        bench.step()


# Pages and quotas


@OVERLAPS
def test_middle_ones_do_not_take_the_pages_that_a_high_one_waits_for(overlap: bool) -> None:
    bench = EchoBench(chunked_prefill_size=CHUNK, num_pages=20, max_running=8, overlap=overlap)
    bench.step(submit("low", [7] * 32, priority=LOW, max_tokens=16))  # 12 pages in the end
    bench.steps(5)
    bench.step(submit("high", [8] * 48, priority=HIGH, max_tokens=4))  # 13 pages
    assert request(bench, "high") in bench.state.waiting
    assert steps_to_first_token(bench, "high", middle_ones(4, max_tokens=40)) <= 16 + num_steps(48) + SLACK


@OVERLAPS
def test_a_low_one_gives_its_pages_up_at_once_where_it_may_be_preempted(overlap: bool) -> None:
    bench = EchoBench(chunked_prefill_size=CHUNK, num_pages=20, max_running=8, overlap=overlap, preemption_threshold=5)
    bench.step(submit("low", [7] * 32, priority=LOW, max_tokens=30))
    bench.steps(5)
    bench.step(submit("high", [8] * 48, priority=HIGH, max_tokens=4))
    assert steps_to_first_token(bench, "high", middle_ones(4, max_tokens=40)) <= num_steps(48) + SLACK


@OVERLAPS
def test_middle_ones_of_a_tenant_do_not_take_the_quota_that_a_high_one_waits_for(overlap: bool) -> None:
    bench = EchoBench(
        chunked_prefill_size=CHUNK, num_pages=100, max_running=8, overlap=overlap,
        quotas=(TenantQuota("a", max_tokens_in_flight=60),),
    )  # fmt: skip
    bench.step(submit("low", [7] * 16, priority=LOW, max_tokens=4, tenant="a"))
    bench.step(submit("other low one", [6] * 16, priority=LOW, max_tokens=12, tenant="a"))
    bench.steps(3)
    bench.step(submit("high", [8] * 40, priority=HIGH, max_tokens=10, tenant="a"))
    stream = middle_ones(4, max_tokens=20, tenant="a")
    assert steps_to_first_token(bench, "high", stream) <= 12 + num_steps(40) + SLACK


# What a parked one will need


@OVERLAPS
@pytest.mark.parametrize("num_pages", [70, 200, 800])
@pytest.mark.parametrize("max_running", [8, 64])
@pytest.mark.parametrize("num_output", [4, 30, 100])
def test_middle_ones_do_not_take_the_memory_and_the_place_that_a_parked_one_will_need(
    overlap: bool, num_pages: int, max_running: int, num_output: int
) -> None:
    bench = behind_a_low_leader(overlap=overlap, num_pages=num_pages, max_running=max_running)
    num = steps_to_first_token(bench, "high", middle_ones(20, max_tokens=num_output))
    assert num <= num_steps(len(SHARED) + 4) + SLACK


@settings(max_examples=scaled(25), deadline=None)
@given(
    num_shared=st.integers(40, 160),
    tails=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    outputs=st.tuples(*[st.integers(1, 40)] * 3),
    num_middle=st.integers(2, 40),
    num_spare=st.integers(0, 200),
    num_later=st.integers(0, 3),
    max_running=st.integers(2, 12),
    conservativeness=st.sampled_from((1.0, 2.0)),
    overlap=st.booleans(),
)
def test_no_stream_of_middle_ones_delays_a_parked_one(
    num_shared: int,
    tails: tuple[int, int],
    outputs: tuple[int, int, int],
    num_middle: int,
    num_spare: int,
    num_later: int,
    max_running: int,
    conservativeness: float,
    overlap: bool,
) -> None:
    """All limits fit in memory for the two that share a prompt, with or without room for others."""
    alone = 2 * -(-(num_shared + max(tails) + max(outputs)) // PAGE)
    bench = EchoBench(
        chunked_prefill_size=CHUNK, max_length=300, num_pages=alone + num_spare, max_running=max_running,
        overlap=overlap, schedule_conservativeness=conservativeness,
    )  # fmt: skip
    shared = [1 + number % 4 for number in range(num_shared)]
    stream = middle_ones(num_middle, max_tokens=outputs[2])
    bench.step(submit("low", [*shared, *[7] * tails[0]], priority=LOW, max_tokens=outputs[0]))
    bench.steps(num_later)
    bench.step(
        submit("high", [*shared, *[8] * tails[1]], priority=HIGH, max_tokens=outputs[1]), next(stream), next(stream)
    )
    assume("high" in bench.state.by_id and bench.state.waiting.is_parked(request(bench, "high")))
    num = steps_to_first_token(bench, "high", stream)
    assert num <= num_steps(num_shared + tails[1]) + SLACK


def test_middle_ones_start_in_what_is_left_beside_a_parked_one() -> None:
    """Only pages for the part that it does not share with its leader stay free: 8 of 41, and one for output."""
    bench = behind_a_low_leader(overlap=False, num_pages=70, max_running=64)
    stream = middle_ones(4, max_tokens=4)  # 2 pages each
    for _ in range(15):
        bench.step(next(stream))
    assert bench.state.waiting.is_parked(request(bench, "high"))
    assert len(bench.state.running) == 1 + (70 - 42 - 9) // 2


def test_equal_ones_do_not_wait_for_a_parked_one() -> None:
    bench = behind_a_low_leader(overlap=False, max_running=2)
    bench.step(submit("equal", [9] * 20, priority=HIGH))
    assert request(bench, "equal") in bench.state.running


@OVERLAPS
@pytest.mark.parametrize(
    "command",
    [
        Abort(request_id="high"),
        PauseRequest(request_id="high"),
        SetPriority(request_id="high", priority=MIDDLE),
    ],
    ids=lambda command: type(command).__name__,
)
def test_middle_ones_go_on_when_the_parked_one_has_no_claim_any_longer(overlap: bool, command: Command) -> None:
    bench = behind_a_low_leader(overlap=overlap, max_running=2)
    bench.step(submit("middle", [9] * 20, priority=MIDDLE))
    bench.steps(3)
    assert request(bench, "middle") in bench.state.waiting
    bench.step(command)
    assert request(bench, "middle") in bench.state.running


@OVERLAPS
@pytest.mark.parametrize(
    "command",
    [Abort(request_id="low"), PauseRequest(request_id="low"), PauseRequest(request_id="low", retract=True)],
    ids=["aborted", "paused", "retracted"],
)
def test_a_parked_one_keeps_its_place_when_its_leader_goes(overlap: bool, command: Command) -> None:
    bench = behind_a_low_leader(overlap=overlap, max_running=2, num_pages=100)
    bench.step(submit("middle", [9] * 20, priority=MIDDLE))
    bench.step(command)
    num = steps_to_first_token(bench, "high", middle_ones(20))
    assert num <= num_steps(len(SHARED) + 4) + SLACK


@pytest.mark.parametrize("num_high", [1, 70])
def test_a_parked_one_that_is_raised_leaves_no_place_to_those_that_it_outranks_now(num_high: int) -> None:
    bench = behind_a_low_leader(overlap=False, max_running=2)
    bench.step(SetPriority(request_id="high", priority=MIDDLE))
    assert not bench.state.waiting.claims_above(MIDDLE)
    bench.step(*(submit(f"one {number}", [*SHARED, 8, 9], priority=LOW) for number in range(num_high)))
    bench.step(SetPriority(request_id=f"one {num_high - 1}", priority=HIGH))
    ((claimant, num_pages),) = bench.state.waiting.claims_above(MIDDLE)
    assert claimant.request_id == f"one {num_high - 1}"
    assert num_pages == -(-162 // PAGE) - (160 - 32 + PAGE) // PAGE
    bench.step(submit("middle", [9] * 20, priority=MIDDLE))
    assert request(bench, "middle") in bench.state.waiting


@OVERLAPS
def test_middle_ones_of_its_tenant_leave_the_quota_that_a_parked_one_will_need(overlap: bool) -> None:
    bench = EchoBench(
        chunked_prefill_size=CHUNK, num_pages=800, max_length=MAX_LENGTH, max_running=64, overlap=overlap,
        quotas=(TenantQuota("a", max_running=3),),
    )  # fmt: skip
    bench.step(submit("low", [*SHARED, 7, 7], priority=LOW, max_tokens=30, tenant="a"))
    bench.step(submit("high", [*SHARED, 8, 8], priority=HIGH, max_tokens=30, tenant="a"))
    stream = middle_ones(20, tenant="a", max_tokens=100)
    assert steps_to_first_token(bench, "high", stream) <= num_steps(len(SHARED) + 4) + SLACK
    assert request(bench, "middle 0") in bench.state.running  # there was room for one


# Grammars and recalls


@dataclass
class Prototype:
    """The echo model's form of a compiled grammar."""

    grammar: Grammar
    is_spoiled: bool = False

    def matcher(self, end_tokens: frozenset[int]) -> Matcher:
        return EchoMatcher(self.grammar, end_tokens, VOCAB)


class OneByOne:
    """A grammar library that compiles a grammar whenever the test lets it."""

    def __init__(self) -> None:
        self.turns = threading.Semaphore(0)
        self.num_begun = 0

    def compile(self, grammar: Grammar) -> Prototype:
        self.num_begun += 1
        assert self.turns.acquire(timeout=10)
        return Prototype(grammar)


def test_a_grammar_of_a_high_request_is_compiled_before_those_of_lower_ones() -> None:
    library = OneByOne()
    compiler = GrammarCompiler(lambda: library, num_threads=1)
    bench = EchoBench(compiler=compiler, max_running=64, num_pages=400, overlap=False)

    def compile_one() -> None:
        """Let a grammar be compiled, and wait until the thread has taken the next."""
        num_begun = library.num_begun
        library.turns.release()
        until = time.monotonic() + 10
        while library.num_begun == num_begun and time.monotonic() < until:
            time.sleep(0.001)

    def constrained(name: str, number: int, priority: int) -> Submit:
        return submit(name, [number] * 4, priority=priority, grammar=Grammar.lark(f"0 6 999 {2 * number}"))

    bench.step(*(constrained(f"low {number}", number, LOW) for number in range(1, 9)))
    bench.step(constrained("high", 20, HIGH))
    bench.step(constrained("raised", 21, LOW), constrained("shared", 1 + 21, LOW))
    bench.step(SetPriority(request_id="raised", priority=HIGH - 1), constrained("shares it", 1 + 21, HIGH - 2))
    stream = (constrained(f"middle {number}", 23 + number, MIDDLE) for number in count())
    try:
        # The one that the thread is at is finished first.
        assert steps_to_first_token(bench, "high", stream, after_step=compile_one) <= 2 + SLACK
        assert steps_to_first_token(bench, "raised", stream, after_step=compile_one) <= 2
        assert steps_to_first_token(bench, "shares it", stream, after_step=compile_one) <= 2
        assert bench.tokens("shared")  # it was the same grammar
    finally:
        for _ in range(200):
            library.turns.release()
        bench.engine.close()


def over_tiers(lanes: Lanes, **options: Any) -> EchoBench:
    """Return a bench whose cache moves evicted pages to host memory; copies are made when the lanes are run."""

    def make_caches(memory: NDArray[np.uint64]) -> Callable[[], TieredIndex]:
        return lambda: TieredIndex(
            RadixCache(PAGE),
            device=ArrayPages([[memory.view(np.uint8).reshape(-1, PAGE * 8)]]),
            host=HostTier(page_bytes=PAGE * 8, num_pages=800),
            page_size=PAGE,
            lanes=lanes,
        )

    return EchoBench(make_caches=make_caches, **options)


def run_all(lanes: Lanes) -> None:
    """Make all copies that are pending."""
    for lane in (lanes.demote, lanes.load, lanes.store):
        assert isinstance(lane, ManualLane)
        lane.run(lane.num_pending)


def fill(bench: EchoBench, lanes: Lanes, prompts: Sequence[Sequence[int]]) -> None:
    """Compute prompts one after another; the last ones move the first ones to the host."""
    for number, prompt in enumerate(prompts):
        bench.answer(submit(f"before {number}", prompt, max_tokens=1))
        run_all(lanes)


def others(number: int) -> list[list[int]]:
    """Return prompts that no other test request repeats; they fill the cache."""
    return [[30 + index % 20, 49 - index // 20] * 40 for index in range(number)]


def test_a_prefix_of_a_high_request_is_copied_back_before_those_of_lower_ones() -> None:
    lanes = manual_lanes(max_pending=100)
    load = lanes.load
    assert isinstance(load, ManualLane)

    bench = over_tiers(lanes, num_pages=120, max_running=32, overlap=False)
    prompts = [[number, number + 1] * 10 for number in range(1, 40)]
    fill(bench, lanes, prompts)
    assert bench.kv.num_free < 20
    bench.step(*(submit(f"low {number}", prompts[number], priority=LOW) for number in range(6)))
    assert load.num_pending >= 4
    bench.step(submit("high", prompts[7], priority=HIGH))
    stream = (submit(f"middle {number}", prompts[8 + number % 4], priority=MIDDLE) for number in count())
    assert steps_to_first_token(bench, "high", stream, after_step=load.run) <= 1 + SLACK
    load.run(100)
    bench.engine.close()


@OVERLAPS
@pytest.mark.parametrize("num_back", [0, 40, 120])
def test_a_leader_lends_and_goes_on_where_a_part_of_its_prompt_is_copied_back(overlap: bool, num_back: int) -> None:
    lanes = manual_lanes(max_pending=100)
    bench = over_tiers(
        lanes, overlap=overlap, num_pages=400, max_length=MAX_LENGTH, chunked_prefill_size=CHUNK, max_running=64
    )
    first = [SHARED[:num_back]] if num_back else []
    fill(bench, lanes, [*first, *others(30)])
    bench.step(submit("low", [*SHARED, 7, 7], priority=LOW, max_tokens=4))
    bench.until(lambda: run_all(lanes) or request(bench, "low").row >= 0)
    assert request(bench, "low").num_cached == num_back
    bench.step(submit("high", [*SHARED, 8, 8], priority=HIGH, max_tokens=4))
    bench.until(lambda: run_all(lanes) or bench.state.waiting.is_parked(request(bench, "high")))
    stream = middle_ones(20)
    num = steps_to_first_token(bench, "high", stream, after_step=lambda: run_all(lanes))
    assert num <= num_steps(len(SHARED) - num_back + 4) + SLACK
    bench.until(lambda: run_all(lanes) or (bench.finish("high") and bench.finish("low")))
    assert bench.tokens("low") == expected([*SHARED, 7, 7], 4, max_length=MAX_LENGTH)
    assert bench.tokens("high") == expected([*SHARED, 8, 8], 4, max_length=MAX_LENGTH)
    bench.engine.close()


@OVERLAPS
@pytest.mark.parametrize("num_low", [1, 6])
def test_a_high_request_does_not_wait_for_the_copies_of_low_ones_with_its_prompt(overlap: bool, num_low: int) -> None:
    lanes = manual_lanes(max_pending=100)
    bench = over_tiers(
        lanes, overlap=overlap, num_pages=300, max_length=MAX_LENGTH, chunked_prefill_size=CHUNK, max_running=64
    )
    fill(bench, lanes, [SHARED, *others(30)])
    bench.step(*(submit(f"low {number}", [*SHARED, 7, number], priority=LOW) for number in range(num_low)))
    bench.step(submit("high", [*SHARED, 8, 8], priority=HIGH, max_tokens=4))
    load = lanes.load
    assert isinstance(load, ManualLane)
    assert load.num_pending > 1
    assert steps_to_first_token(bench, "high", middle_ones(20), after_step=load.run) <= 1 + SLACK
    run_all(lanes)
    bench.engine.close()


@OVERLAPS
@pytest.mark.parametrize("num_held", [1, 4])
def test_middle_ones_do_not_take_the_pages_that_a_high_one_needs_after_its_copies(overlap: bool, num_held: int) -> None:
    """Its copies take some steps; what it needs beside the copied prefix must be free then."""
    lanes = manual_lanes(max_pending=100)
    bench = over_tiers(
        lanes, overlap=overlap, num_pages=60, max_length=MAX_LENGTH, chunked_prefill_size=CHUNK, max_running=16
    )
    fill(bench, lanes, [SHARED[:80], *others(8)])
    bench.step(submit("high", SHARED[:120], priority=HIGH, max_tokens=4))  # 31 pages, of which 20 are copied
    num_left = num_held

    def copy_later() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left <= 0:
            run_all(lanes)

    stream = middle_ones(4, max_tokens=60)  # 16 pages each
    num = steps_to_first_token(bench, "high", stream, after_step=copy_later)
    assert num <= num_held + num_steps(120 - 80) + SLACK
    run_all(lanes)
    bench.engine.close()


@OVERLAPS
def test_middle_ones_do_not_take_the_place_of_a_high_one_that_waits_for_copies(overlap: bool) -> None:
    lanes = manual_lanes(max_pending=100)
    bench = over_tiers(
        lanes, overlap=overlap, num_pages=100, max_length=MAX_LENGTH, chunked_prefill_size=CHUNK, max_running=2
    )
    fill(bench, lanes, [SHARED[:80], *others(8)])
    bench.step(submit("low", [9] * 4, priority=LOW, max_tokens=30))
    bench.step(submit("high", SHARED[:120], priority=HIGH, max_tokens=4), submit("first", [8] * 4, priority=MIDDLE))
    assert bench.state.waiting.is_recalling(request(bench, "high"))
    num_left = 4

    def copy_later() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left <= 0:
            run_all(lanes)

    num = steps_to_first_token(bench, "high", middle_ones(4), after_step=copy_later)
    assert num <= 4 + num_steps(120 - 80) + SLACK
    run_all(lanes)
    bench.engine.close()
