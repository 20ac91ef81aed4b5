"""The engine's core against a sequential oracle: random traffic, both loops, and seeded faults that must be found.

The faults in `FAULTS` are seeded one at a time; `run_scenario` finds each of them within 600 random scenarios:

    missing lock               a lease does not protect its path from eviction
    release in flight          pages are freed while a launched step still writes to them
    preempt in flight          the same, through preemption
    publish before compute     pages are published by the plan that will compute them
    end announced too early    the runner leaves out a row that needs one more token
    end of the prompt          a stop token in a prompt ends the row
    freed duplicates           duplicates of published pages are freed while the request still reads them
    leaked duplicates          duplicates are never freed
    whole prompt from cache    no token is left to compute logits for
    page rounded down          a request grows one page too late
    pages not announced        the runner does not get a new page
    aliased batch              a batch in flight shares an array with the next one
    rows of other requests     a step that only decodes takes its rows from a step of other requests
    new page not announced     the runner does not get a new page of a step that only decodes
    answer after the end       a request that has ended accepts tokens of a step in flight
    forgotten lease            a released request leaves its path locked

Two more do not change the output; they are found by counting the steps that were launched ahead:

    finish then launch         the overlapped loop waits for a step before it launches the next
    unseen token forgotten     a request gets no grant before its last token is known

Others do not change the output but the queue; an audit of the queue finds them:

    change not reported        the order is not notified when more or less of a request is cached
    preempted not watched      a preempted request is not watched while it waits
    priority not reported      the order is not notified of a new priority
    running not sorted         a running request keeps the place of its old priority

Two more leave requests parked after the prompt that they repeat is done; the scenario then makes no progress:

    parked forever             parked requests never return to the order
    leader's end unnoticed     a request stays parked on one that was preempted or aborted

With a runner that fails, `run_scenario` also finds these:

    interrupted launch         the requests of a launch that was interrupted go on with rows that the runner ignores
    step in flight lost        the step before an interrupted launch is not retired
    innocent row               a row without a token ends all requests of its step
    broken KV published        the KV of a row without a token is given to other requests
    failed KV published        the same, of a step that failed

With an engine that speculates, it finds these:

    rejected page published    pages of rejected drafts are given to other requests
    length not corrected       tokens that a step promised and did not yield stay counted
    length corrected twice     they are subtracted twice
    one draft too many         a draft is accepted although it differs from the token
    draft after the end        tokens after a stop token are kept
    limit ignored              a run of tokens goes past max_tokens
    drafts past the limit      drafts are computed for positions that the request cannot have
    drafts without pages       drafts are computed although there are no pages for them
    start not lowered          a step begins where the host thought the row would end
    drafts from stale KV       a drafter that fell behind drafts from KV of another text
    drafts from the KV of the row before   the same, from that of the request that had the row
    drafts before the KV is computed       the same, from KV that is missing
    drafts not announced       the pages of drafts are not given to the runner

"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewood.engine.api import EngineConfig, Grammar, PoolingParams, SamplingParams
from pagewood.engine.core import intake, loop, retire
from pagewood.engine.core.inner_rows import InnerRows
from pagewood.engine.core.loop import Engine
from pagewood.engine.core.memory import kv
from pagewood.engine.core.memory.retention import Retention
from pagewood.engine.core.messages.logprobs import Logprobs
from pagewood.engine.core.pooling import Pool
from pagewood.engine.core.queue import priority_preemption, state, waiting
from pagewood.engine.core.request import Request
from pagewood.engine.core.steps import admission, batch_builder, plan, prompts, shortage, speculation
from pagewood.engine.testing.echo import EchoRunner
from pagewood.engine.testing.echo_drafts import EchoDrafts
from pagewood.engine.testing.echo_grammar import EchoMatcher
from pagewood.schedpolicy import MATCH_ORDERS, Order, deserving, order_named
from scale import scaled
from scenarios.drawing import (
    random_scenario,
    with_drafts,
    with_grammars,
    with_holds,
    with_interruptions,
    with_logprobs,
    with_pooling,
    with_urgency,
)
from scenarios.faulty import random_faults
from scenarios.running import run_scenario
from scenarios.scenario import Arrival, Scenario
from seeded_faults import Edit, assert_found, by_turns, seed_fault, slow_ones


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_output_equals_that_of_the_sequential_oracle(rng: random.Random, overlap: bool) -> None:
    run_scenario(random_scenario(rng, overlap=overlap))


@settings(max_examples=scaled(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), kind=st.sampled_from((None, with_logprobs)))
def test_aligned_chunks_give_the_same_output(
    rng: random.Random, overlap: bool, kind: Callable[[Scenario, random.Random], Scenario] | None
) -> None:
    scenario = random_scenario(rng, overlap=overlap)
    if kind is not None:
        scenario = kind(scenario, rng)
    config = replace(scenario.config, chunked_prefill_size=rng.choice((16, 64)), target_step_s=None)
    most = config.max_chunk_tokens // (8 if config.mixing == "stall-free" else 1)
    run_scenario(replace(scenario, config=replace(config, chunk_align=rng.randint(1, max(1, most - most // 8)))))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scenarios_exercise_what_they_claim(overlap: bool) -> None:
    reports = [run_scenario(random_scenario(random.Random(seed), overlap=overlap)) for seed in range(25)]
    assert sum(report.num_preempted for report in reports) > 3
    assert sum(report.num_cached_tokens for report in reports) > 80
    assert sum(report.num_aborted for report in reports) > 8
    assert sum(report.num_refused for report in reports) > 8


def scenario_with_faults(rng: random.Random, *, overlap: bool) -> Scenario:
    return replace(random_scenario(rng, overlap=overlap), faults=random_faults(rng))


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_a_fault_of_the_runner_ends_the_requests_that_it_hits_and_changes_no_other(
    rng: random.Random, overlap: bool
) -> None:
    run_scenario(scenario_with_faults(rng, overlap=overlap))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scenarios_with_faults_exercise_what_they_claim(overlap: bool) -> None:
    reports = [run_scenario(scenario_with_faults(random.Random(seed), overlap=overlap)) for seed in range(30)]
    assert sum(report.num_failed for report in reports) > 15
    assert sum(report.num_preempted for report in reports) > 1
    assert sum(report.num_aborted for report in reports) > 6


def scenario_with_interruptions(rng: random.Random, *, overlap: bool) -> Scenario:
    scenario = with_interruptions(random_scenario(rng, overlap=overlap), rng)
    return with_drafts(scenario, rng) if rng.random() < 0.3 else scenario


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_interruptions_do_not_change_the_output(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_with_interruptions(rng, overlap=overlap))


def scenario_with_urgency(rng: random.Random, *, overlap: bool) -> Scenario:
    scenario = with_urgency(with_interruptions(random_scenario(rng, overlap=overlap, bursts=0.9), rng), rng)
    for extend in (with_drafts, with_grammars, with_holds):
        scenario = extend(scenario, rng) if rng.random() < 0.4 else scenario
    return scenario


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_lent_priorities_do_not_change_the_output(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_with_urgency(rng, overlap=overlap), after_step=check_priorities)


def check_priorities(engine: Engine) -> None:
    """Only a running request has the priority of another one."""
    state = engine._state  # pyright: ignore[reportPrivateUsage]
    for request in state.by_id.values():
        is_lent = request in state.running and request.priority > request.own_priority
        assert is_lent or request.priority == request.own_priority


def test_priorities_are_lent_in_scenarios() -> None:
    num_lent = 0

    def count(engine: Engine) -> None:
        nonlocal num_lent
        running = engine._state.running  # pyright: ignore[reportPrivateUsage]
        num_lent += any(request.priority > request.own_priority for request in running)

    for seed in range(60):
        run_scenario(scenario_with_urgency(random.Random(seed), overlap=seed % 2 > 0), after_step=count)
    assert num_lent > 5


def scenario_with_holds(rng: random.Random, *, overlap: bool) -> Scenario:
    make = rng.choice((random_scenario, scenario_with_interruptions, scenario_with_grammars, scenario_with_faults))
    return with_holds(make(rng, overlap=overlap), rng)


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_pauses_of_single_requests_and_retention_do_not_change_the_output(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_with_holds(rng, overlap=overlap))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scenarios_with_holds_exercise_what_they_claim(overlap: bool) -> None:
    reports = [run_scenario(scenario_with_holds(random.Random(seed), overlap=overlap)) for seed in range(25)]
    assert sum(report.num_held for report in reports) > 150
    assert sum(report.num_aborted_held for report in reports) > 3
    assert sum(report.most_retained for report in reports) > 60
    assert sum(report.num_cached_tokens for report in reports) > 100


def scenario_with_drafts(rng: random.Random, *, overlap: bool) -> Scenario:
    return with_drafts(random_scenario(rng, overlap=overlap), rng)


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_drafts_do_not_change_the_output(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_with_drafts(rng, overlap=overlap))


def scenario_with_logprobs(rng: random.Random, *, overlap: bool) -> Scenario:
    make = rng.choice((random_scenario, scenario_with_drafts, scenario_with_faults))
    return with_logprobs(make(rng, overlap=overlap), rng)


@settings(max_examples=scaled(7), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_every_token_is_reported_once_with_its_own_log_probability(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_with_logprobs(rng, overlap=overlap))


def scenario_with_pooling(rng: random.Random, *, overlap: bool) -> Scenario:
    make = rng.choice((random_scenario, scenario_with_drafts, scenario_with_faults, scenario_with_grammars))
    return with_pooling(make(rng, overlap=overlap), rng)


def one_aborted() -> Scenario:
    """Return two requests for vectors in one step, the first of which is aborted while the step is in flight."""
    arrivals = [
        Arrival(
            at_step=0, abort_at_step=1 if index == 0 else None, prompt=(1 + index, 2, 3), priority=0, namespace=None,
            sampling=SamplingParams(), pooling=PoolingParams(kind="mean"),
        )
        for index in range(2)
    ]  # fmt: skip
    return Scenario(
        config=EngineConfig(overlap=True), num_pages=4, max_length=16, arrivals=tuple(arrivals), eager_steps=frozenset()
    )


@settings(max_examples=scaled(5), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_vectors_have_every_state_once_and_change_no_other_answer(rng: random.Random, overlap: bool) -> None:
    run_scenario(one_aborted())
    run_scenario(scenario_with_pooling(rng, overlap=overlap))


def scenario_with_grammars(rng: random.Random, *, overlap: bool) -> Scenario:
    make = rng.choice((random_scenario, random_scenario, scenario_with_drafts, scenario_with_faults))
    return with_grammars(make(rng, overlap=overlap), rng)


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_the_output_is_what_the_grammar_allows(rng: random.Random, overlap: bool) -> None:
    run_scenario(scenario_with_grammars(rng, overlap=overlap))


def failing_behind_a_draft() -> Scenario:
    """Return one request whose matcher fails behind a draft that is accepted.

    A token that was drawn there from all tokens would be one that the grammar allows, by chance.
    """
    sampling = SamplingParams(
        max_tokens=20, temperature=1.0, seed=50, ignore_eos=True, grammar=Grammar(kind="regex", text="50 20 2 0")
    )
    arrival = Arrival(at_step=0, abort_at_step=None, prompt=(1, 2, 3), priority=0, namespace=None, sampling=sampling)
    return Scenario(
        config=EngineConfig(page_size=4, max_running=1, overlap=False), num_pages=16, max_length=40,
        arrivals=(arrival,), eager_steps=frozenset(), max_drafts=2, guess_quality=1.0,
    )  # fmt: skip


def test_no_token_is_drawn_behind_a_draft_where_the_matcher_fails() -> None:
    assert run_scenario(failing_behind_a_draft()).num_failed == 1


@settings(max_examples=scaled(6), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans())
def test_a_fault_of_a_runner_that_drafts_ends_the_requests_that_it_hits(rng: random.Random, overlap: bool) -> None:
    run_scenario(with_drafts(scenario_with_faults(rng, overlap=overlap), rng))


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_scenarios_with_drafts_exercise_what_they_claim(overlap: bool) -> None:
    reports = [run_scenario(scenario_with_drafts(random.Random(seed), overlap=overlap)) for seed in range(25)]
    assert sum(report.num_accepted for report in reports) > 180
    assert sum(report.num_drafted - report.num_accepted for report in reports) > 180
    assert sum(report.num_preempted for report in reports) > 1
    assert sum(report.num_cached_tokens for report in reports) > 45
    assert sum(report.num_aborted for report in reports) > 4
    assert sum(report.num_rebuilt for report in reports) > 450


def steady_scenario(*, overlap: bool, num_output: int = 20) -> Scenario:
    """Three requests that arrive together and end together by length."""
    arrivals = [
        Arrival(
            at_step=0,
            abort_at_step=None,
            prompt=(index + 1, 2, 3),
            sampling=SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True),
            priority=0,
            namespace=None,
        )
        for index in range(3)
    ]
    return Scenario(
        config=EngineConfig(page_size=4, max_running=3, overlap=overlap),
        num_pages=64,
        max_length=64,
        arrivals=tuple(arrivals),
        eager_steps=frozenset(),
    )


def test_the_plain_loop_takes_one_step_per_token_and_never_launches_ahead() -> None:
    report = run_scenario(steady_scenario(overlap=False))
    assert (report.num_steps, report.num_launched_ahead) == (20, 0)


def test_the_overlapped_loop_launches_all_steps_but_the_first_ahead_and_wastes_none() -> None:
    report = run_scenario(steady_scenario(overlap=True))
    assert (report.num_steps, report.num_launched_ahead) == (20, 19)


class AuditedOrder:
    """An order that, whenever it is read, is compared with a new order of the same requests."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.queue, self.kv = engine._state.waiting, engine._kv  # pyright: ignore[reportPrivateUsage]
        self.order, self.name = self.queue._order, name  # pyright: ignore[reportPrivateUsage]
        self.requests = [request for request in engine._state.by_id.values() if self.is_ordered(request)]  # pyright: ignore[reportPrivateUsage]
        self.stop, self.update = self.order.stop, self.order.update

    def add(self, request: Request) -> None:
        self.order.add(request)
        self.requests.append(request)

    def remove(self, request: Request) -> None:
        self.order.remove(request)
        self.requests.remove(request)

    def park(self, request: Request) -> None:
        self.order.park(request)
        self.requests.remove(request)

    def admit(self, request: Request) -> None:
        self.order.admit(request)
        self.requests.remove(request)

    def ordered(self, now_s: float) -> Iterator[Request]:
        fresh: Order[Request] = order_named(self.name)
        for request in self.requests:
            if self.is_watched(request):
                assert request.num_matched == self.kv.peek(request)
            fresh.add(request)
        expected = list(fresh.ordered(now_s))
        assert list(self.order.ordered(now_s)) == expected
        return iter(expected)

    def is_ordered(self, request: Request) -> bool:
        return request in self.queue and not self.queue.is_parked(request)

    def is_watched(self, request: Request) -> bool:
        return self.queue._entries[request.arrival].watch is not None  # pyright: ignore[reportPrivateUsage]


def run_audited(scenario: Scenario, name: str) -> None:
    """Run a scenario with an order that depends on requests and time only; audit the queue and the running requests."""
    config = replace(scenario.config, schedule_policy=name, schedule_weights=(), schedule_ageing_s=None)
    watches = config.prefix_cache and (name in MATCH_ORDERS or config.eviction_policy == "queue-lru")

    def audit(engine: Engine) -> None:
        state = engine._state  # pyright: ignore[reportPrivateUsage]
        order = state.waiting._order  # pyright: ignore[reportPrivateUsage]
        if not isinstance(order, AuditedOrder):
            order = AuditedOrder(engine, name)
            state.waiting._order = order  # pyright: ignore[reportPrivateUsage]
        assert state.running == sorted(state.running, key=deserving)
        assert all(order.is_watched(request) == watches for request in order.requests)

    run_scenario(replace(scenario, config=config), after_step=audit)


PURE_ORDERS = ("fcfs", "priority-low", "lpm", "lof", "shortest", "srtf", "dfs-weight")


@settings(max_examples=scaled(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rng=st.randoms(use_true_random=False), overlap=st.booleans(), name=st.sampled_from(PURE_ORDERS))
def test_the_queue_is_in_the_order_of_newly_matched_requests(rng: random.Random, overlap: bool, name: str) -> None:
    run_audited(random_scenario(rng, overlap=overlap), name)


UNCHECKED: Edit = (kv.KVSpace, "release", "assert request.num_in_flight == 0", "pass")

FAULTS: dict[str, list[Edit]] = {
    "missing lock": [
        (kv.KVSpace, "admit", "self.cache.lock(match.node)", "match.node"),
        (kv.KVSpace, "admit", "self.cache.unlock(lease)", "pass"),
        (kv.KVSpace, "_offer", "relock=True", "relock=False"),
        (kv.KVSpace, "release", "self.cache.unlock(request.lease)", "pass"),
    ],
    "release in flight": [UNCHECKED, (retire, "_leave", "if request.num_in_flight:", "if False:")],
    "preempt in flight": [UNCHECKED, (shortage.Shortage, "grow", "if victim.num_in_flight:", "if False:")],
    "publish before compute": [
        (
            admission.Admission,
            "_begin",
            "step.budget.admit()",
            "step.budget.admit(); request.num_computed += count; space.publish(request)",
        )
    ],
    "end announced too early": [
        (batch_builder.BatchBuilder, "build", "one.max_length for one", "one.max_length - 1 for one")
    ],
    "end of the prompt": [(EchoRunner, "_has_ended", "first, limit, stop_ids = ", "first, (_, limit, stop_ids) = 0, ")],
    "freed duplicates": [
        (
            kv.KVSpace,
            "_offer",
            "request.duplicates += ((first, first + insertion.num_existing),)",
            "self._allocator.free(request.pages[first : first + insertion.num_existing])",
        )
    ],
    "leaked duplicates": [
        (
            kv.KVSpace,
            "_offer",
            "request.duplicates += ((first, first + insertion.num_existing),)",
            "pass",
        )
    ],
    "whole prompt from cache": [(Request, "reusable_tokens", "num = self.num_known - 1", "num = self.num_known")],
    "page rounded down": [(kv.KVSpace, "grow", "-(-num_tokens // self.page_size)", "(num_tokens // self.page_size)")],
    "pages not announced": [(batch_builder.BatchBuilder, "build", "-(-start // page_size)", "start // page_size + 1")],
    "aliased batch": [
        (
            batch_builder.BatchBuilder,
            "build",
            "rows = np.array([grant.request.row for grant in grants], np.int32)",
            "rows = self._table.seeds.view(np.int32)[: len(grants)]; rows[:] = [grant.request.row for grant in grants]",
        )
    ],
    "rows of other requests": [
        (
            batch_builder.BatchBuilder,
            "_build_decode",
            "if requests != self._decoded:",
            "if len(requests) != len(self._decoded):",
        )
    ],
    "new page not announced": [
        (
            batch_builder.BatchBuilder,
            "_pages_of_tokens",
            "starts % page_size == 0",
            "starts % page_size == page_size - 1",
        )
    ],
    "answer after the end": [(retire, "_retire", "if request.finish is not None:", "if False:")],
    "forgotten lease": [(kv.KVSpace, "release", "self.cache.unlock(request.lease)", "pass")],
}

FAULTS_OF_GRAMMARS: dict[str, list[Edit]] = {
    "compiled while it waits": [(intake.Intake, "poll", "self._state.compiling.remove(request)", "pass")],
    "mask behind the forced tokens": [(loop, "fill_masks", "if foreseen is not None:", "if False:")],
    "forced tokens not sent": [(batch_builder, "_untold", "grant.request.num_untold and", "False and")],
    "foreseen token answered twice": [(retire, "_advance", "tokens[num_old:]", "tokens")],
    "foreseen token forgotten": [(Engine, "_finish", "- request.num_foreseen", "")],
    "forced tokens taken for computed": [
        (
            retire,
            "_follow",
            "return reason, tokens + forced",
            "request.num_computed += len(forced); return reason, tokens + forced",
        )
    ],
    "forced tokens without their log probabilities": [(retire, "_follow", "sampling.logprobs is not None or", "")],
    "not ended with its grammar": [(retire, "_append", "or matcher.is_finished", "or False")],
    "failure of a matcher not seen": [(retire, "_advance", "if failure is not None:", "if False:")],
    "draws not constrained": [(loop, "fill_masks", "matcher.fill(rows[0])", "pass")],
    "masks of drafts not filled": [(loop, "fill_masks", "matcher.fill_ahead(own, rows)", "matcher.fill(rows[0])")],
    "failure behind a draft taken for one of the text": [
        (
            EchoMatcher,
            "fill_ahead",
            "if state.error is not None or",
            "if setattr(self, 'error', state.error) or state.error is not None or",
        )
    ],
    "drafts behind forced tokens": [(retire, "_follow", "or request.num_unseen > 1", "")],
}

FAULTS_OF_LOGPROBS: dict[str, list[Edit]] = {
    "cached tokens not reported": [(Request, "reusable_tokens", "if self.num_unscored:", "if False:")],
    "computed again, reported again": [(retire, "_score", "max(0, num_known - start)", "0")],
    "reported without being asked": [(EchoRunner, "_update", "self._num_top.pop(row, None)", "pass")],
    "those of an ended request not skipped": [
        (
            retire,
            "_retire",
            "num_seen += len(tokens) if tokens else 0",
            "num_seen += len(tokens or ()) * (request.finish is None)",
        )
    ],
    "rows of cached positions missing": [(Request, "reusable_tokens", "if rows is not None:", "if False:")],
    "rows computed again, reported again": [(InnerRows, "add", "rows[self.num_done - start :]", "rows")],
    "rows of another request": [(retire, "_add_rows", "at += num", "at += max(num, 1)")],
    "rows behind the end": [(InnerRows, "take", "max(0, self.num_done - end)", "0")],
    "rows sent again": [(InnerRows, "take", "np.concatenate(self._new), []", "np.concatenate(self._new), self._new")],
    "kept tokens without a limit": [(retire, "_within_limit", "request.num_kept <= most", "True")],
    "kept tokens of another request": [
        (Logprobs, "_kept_of", "np.maximum(self.num_kept[:last], 0)", "abs(self.num_kept[:last])")
    ],
    "those of another grant": [(retire, "_retire", "num_scored += num_new", "num_scored += num_new * (num_new > 3)")],
}

FAULTS_OF_VECTORS: dict[str, list[Edit]] = {
    "states of cached tokens missing": [(Request, "reusable_tokens", "if self.pool is not None:", "if False:")],
    "computed again, added again": [(Pool, "wanted_in", "max(0, self.num_done - start)", "0")],
    "those of an ended request not skipped": [
        (retire, "_retire", "if num_pooled else None", "if num_pooled and request.finish is None else None")
    ],
    "states that are not numbers": [(retire, "_pool", "not pool.add(total, num)", "pool.add(total, num) is None")],
    "a token drawn": [(Request, "num_promised_at", "and self.pool is None", "")],
    "last token left to decoding": [(prompts, "is_in_progress", "> (request.pool is None)", "> 1")],
}

DEGENERATIONS: dict[str, list[Edit]] = {
    "finish then launch": [
        (
            loop.Engine,
            "step_overlapped",
            "pending = self._launch()\n",
            "self._finish(last)\n        last = None\n        pending = self._launch()\n",
        )
    ],
    "unseen token forgotten": [
        (loop, "count_launched", "request.num_unseen += grant.num_promised", "pass"),
        (loop, "count_launched", "request.num_unseen += 1", "pass"),
        (loop.Engine, "_finish", "request.num_unseen -= grant.num_promised - request.num_foreseen", "pass"),
        (loop.Engine, "_finish", "request.num_unseen -= 1", "pass"),
    ],
}


QUEUE_FAULTS: dict[str, list[Edit]] = {
    "change not reported": [(waiting.WaitingQueue, "examine", "self._order.update(request)", "pass")],
    "preempted not watched": [(waiting.WaitingQueue, "_enter", "if self._group is not None:", "if request.row == -2:")],
    "priority not reported": [(intake.Intake, "_set_priority", "self._state.waiting.update(request)", "pass")],
    "running not sorted": [(intake.Intake, "_set_priority", "self._state.sort_running()", "pass")],
    "parked forever": [(waiting.WaitingQueue, "_unpark", "self._deferral.ready()", "()")],
    "leader's end unnoticed": [(waiting.WaitingQueue, "suspended", "self._deferral.stop(request)", "pass")],
}
_RARE = {"leader's end unnoticed": 1150}
"""From which scenario on rare faults are looked for; it is rare that nothing else lets a parked request go."""


FAULTS_OF_FAILURES: dict[str, list[Edit]] = {
    "interrupted launch": [
        (loop.Engine, "_launch_plan", "except BaseException as error:", "except ZeroDivisionError as error:")
    ],
    "step in flight lost": [
        (loop.Engine, "step_overlapped", "self._finish(last)\n        raise", "raise"),
    ],
    "innocent row": [
        (retire, "_retire", "if tokens:", "if tokens and 0 not in result.counts:"),
    ],
    "broken KV published": [
        (
            retire,
            "_retire",
            "else:\n            index",
            "else:\n            request.num_computed = start + grant.num_tokens\n            index",
        ),
    ],
    "failed KV published": [
        (
            loop.Engine,
            "_fail",
            "alive = ",
            "for grant in grants: grant.request.num_computed = grant.start + grant.num_tokens\n    alive = ",
        ),
    ],
}


LAST_DRAFT = "if not is_draft:"

FAULTS_OF_SPECULATION: dict[str, list[Edit]] = {
    "rejected page published": [
        (
            retire,
            "_advance",
            "request.num_computed = request.num_known - 1",
            "request.num_computed = request.num_known",
        )
    ],
    "length not corrected": [
        (speculation.Speculation, "_settle_drafts", "request.num_launched -= num_promised - count", "pass")
    ],
    "length corrected twice": [
        (
            speculation.Speculation,
            "_settle_drafts",
            "request.num_launched -= num_promised - count",
            "request.num_launched -= 2 * (num_promised - count)",
        )
    ],
    "one draft too many": [(EchoRunner, "_compute", LAST_DRAFT, "if not is_draft and end > start + 1:")],
    "draft after the end": [
        (
            retire,
            "_append",
            "            num_answered += request.keeps_stop_token\n            break",
            "",
        )
    ],
    "limit ignored": [(retire, "_append", "reason = FinishReason.LENGTH\n            break", "pass")],
    "drafts past the limit": [
        (
            speculation.Speculation,
            "extend",
            "min(num_wanted, request.max_length - 2 - start)",
            "num_wanted",
        )
    ],
    "drafts without pages": [
        (
            speculation.Speculation,
            "_room",
            "return min(num_wanted, request.num_pages * kv.page_size - grant.start - 1)",
            "return num_wanted",
        )
    ],
    "start not lowered": [
        (
            EchoRunner,
            "_compute",
            "np.minimum(batch.starts, self._lengths[batch.rows] - 1).tolist()",
            "batch.starts.tolist()",
        )
    ],
    "drafts from stale KV": [(EchoDrafts, "catch_up", "!= tags[first:]", "== 0")],
    "drafts from the KV of the row before": [(EchoDrafts, "begin", "self._ends[rows] = 0", "pass")],
    "drafts before the KV is computed": [
        (EchoDrafts, "catch_up", "np.flatnonzero(is_stale)", "np.flatnonzero(is_stale[:0])")
    ],
    "drafts not announced": [
        (batch_builder.BatchBuilder, "build", "-(-(start + grant.num_tokens) // page_size)", "start // page_size + 1")
    ],
}


FAULTS_OF_INTERRUPTIONS: dict[str, list[Edit]] = {
    "give way in flight": [
        UNCHECKED,
        (plan.Planner, "plan", "if self._preemption is not None and (", "if False and ("),  # so they have grants
        (priority_preemption, "stop_all", "if not request.num_in_flight", ""),
        (retire, "_retire", "if request.finish is not None:", "if request.finish is not None or request.row < 0:"),
    ],
    "favoured for ever": [
        (priority_preemption.PriorityPreemption, "begin_step", "self.favoured not in state.waiting", "False")
    ],
    "expired while it runs": [
        (
            intake.Intake,
            "expire",
            "request.num_cached >= 0 or request.was_paused or request.is_resumed",
            "request.was_paused",
        )
    ],
}


FAULTS_OF_HOLDS: dict[str, list[Edit]] = {
    "retracted in flight": [
        UNCHECKED,
        (plan, "settle", "if not request.num_in_flight", ""),
        (retire, "_retire", "if request.finish is not None:", "if request.finish is not None or request.row < 0:"),
    ],
    "paused and computed": [(state.EngineState, "suspend", "self.running.remove(request)", "pass")],
    "memory never given back": [(plan, "settle", "kv.release(request)", "request.row = -1")],
    "resumed in the queue with its row": [(intake, "resume", "if request.row < 0:", "if True:")],
    "paused for too long": [(intake.Intake, "expire", "or request.was_paused", "")],
    "queued while its grammar waits": [(intake.Intake, "poll", 'if request.pause != "no":', "if False:")],
    "aborted from the wrong list": [(retire, "_leave", 'if request.pause != "no":', "if False:")],
    "bound not kept": [(Retention, "keep", "if num_over <= 0:", "if True:")],
    "retained for ever": [(Retention, "_end", "cache.unlock(kept.lease)", "pass")],
    "retained pages counted twice": [(Retention, "_add", "(self._num_held[kept.pages] == 0).sum()", "len(kept.pages)")],
    "retained while requests lack memory": [(kv.KVSpace, "_regain", "self.num_available < num_needed", "False")],
    "dropped in use": [(Retention, "keep", "lease = cache.lock(match.node)", "lease = cache.lock(cache.root())")],
}


def searched(make: Callable[..., Scenario]) -> Callable[[int], object]:
    """Return what runs the scenario of a seed."""
    return lambda seed: run_scenario(make(random.Random(seed), overlap=seed % 3 > 0))


def run_with_grammars(seed: int) -> None:
    rng, overlap = random.Random(seed), seed % 3 > 0
    run_scenario(failing_behind_a_draft())
    run_scenario(scenario_with_grammars(rng, overlap=overlap))
    run_scenario(with_grammars(with_drafts(random_scenario(rng, overlap=overlap), rng), rng))


def run_with_pooling(seed: int) -> None:
    searched(scenario_with_pooling)(seed)
    run_scenario(one_aborted())


SEARCHES: dict[str, tuple[dict[str, list[Edit]], Callable[[int], object]]] = {
    "core": (FAULTS, searched(random_scenario)),
    "failures": (FAULTS_OF_FAILURES, searched(scenario_with_faults)),
    "speculation": (FAULTS_OF_SPECULATION, searched(scenario_with_drafts)),
    "interruptions": (FAULTS_OF_INTERRUPTIONS, searched(scenario_with_interruptions)),
    "holds": (FAULTS_OF_HOLDS, searched(scenario_with_holds)),
    "grammars": (FAULTS_OF_GRAMMARS, run_with_grammars),
    "log probabilities": (FAULTS_OF_LOGPROBS, searched(scenario_with_logprobs)),
    "vectors": (FAULTS_OF_VECTORS, run_with_pooling),
}
SLOW = (
    "publish before compute",
    "whole prompt from cache",
    "broken KV published",
    "drafts behind forced tokens",
    "those of another grant",
)
"""Faults that take many or long scenarios to find."""


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param(kind, *fault.values, marks=fault.marks)
        for kind, (faults, _) in SEARCHES.items()
        for fault in by_turns(faults, *(name for name in SLOW if name in faults))
    ],
)
def test_a_seeded_fault_is_found(kind: str, fault: str) -> None:
    faults, run = SEARCHES[kind]
    assert_found(faults[fault], run, range(600))


@pytest.mark.parametrize("fault", DEGENERATIONS)
def test_overlap_that_degenerates_into_waiting_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault(DEGENERATIONS[fault], monkeypatch)
    assert run_scenario(steady_scenario(overlap=True)).num_launched_ahead < 19


@pytest.mark.parametrize("fault", slow_ones(QUEUE_FAULTS, "leader's end unnoticed", "parked forever"))
def test_a_queue_that_is_out_of_order_is_found(fault: str) -> None:
    def run(seed: int) -> None:
        scenario = random_scenario(random.Random(seed), overlap=seed % 3 > 0, bursts=seed % 2)
        run_audited(scenario, PURE_ORDERS[seed % len(PURE_ORDERS)])

    first = _RARE.get(fault, 0)
    assert_found(QUEUE_FAULTS[fault], run, range(first, first + 600))
