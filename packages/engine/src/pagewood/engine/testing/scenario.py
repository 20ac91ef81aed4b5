"""Random traffic for an engine with an echo model, with checks after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import (
    Abort,
    Delta,
    EngineConfig,
    FinishReason,
    Pause,
    PauseRequest,
    PoolingParams,
    Resume,
    ResumeRequest,
    Retain,
    SamplingParams,
    SetPriority,
    Submit,
    TenantQuota,
    TokenLogprob,
)
from pagewood.engine.assemble import assemble
from pagewood.engine.core.kv import KVSpace, PrefixCache
from pagewood.engine.core.loop import Engine, EngineInfo, Pending, Runner
from pagewood.engine.core.request import Request
from pagewood.engine.core.speculation import StepsReport
from pagewood.engine.core.tree_shape import TreeShape
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing.echo import STATE_SIZE, EchoRunner, echo_logprob, oracle_tokens, oracle_vector
from pagewood.engine.testing.echo_grammar import EchoCompiler, allowed_tokens, random_grammar, text_inside
from pagewood.engine.testing.faulty import Fault, FaultyRunner
from pagewood.schedpolicy import ORDERS

MakeCaches = Callable[[NDArray[np.uint64], int], Callable[[], PrefixCache]]
"""(KV memory `[num_pages * page_size] uint64`, page size) -> a function that makes prefix caches for that memory."""

VOCAB_SIZE = 40
_EOS = 0
_REFUSALS: Mapping[str | None, Callable[[EngineConfig], bool]] = {
    "queue_timeout": lambda config: config.max_queue_s is not None,
    "queue_full": lambda config: config.max_queued is not None,
    "quota_exceeded": lambda config: bool(config.quotas),
    "deadline_infeasible": lambda config: config.refuse_late,
}
"""Codes of refusals that depend on the load or on limits of the operator, and whether a configuration has them."""


class WatchedRunner(Runner, Protocol):
    """A runner of the echo model that counts steps for a scenario."""

    @property
    def num_in_flight(self) -> int:
        """Launched steps that no caller has waited for."""
        ...

    @property
    def num_launched_ahead(self) -> int:
        """Steps launched while another was in flight."""
        ...

    def catch_up(self) -> None:
        """Compute all launched steps, in a runner that otherwise delays them until a caller waits."""
        ...


MakeRunner = Callable[["Scenario"], WatchedRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A request of a scenario, with the steps at which it arrives and may be aborted."""

    at_step: int
    abort_at_step: int | None
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int
    namespace: str | None
    priority_from_step: tuple[int, int] | None = None
    """A new priority, and the step at which it is set."""
    pooling: PoolingParams | None = None
    """The vector that it asks for, instead of tokens."""
    hold: tuple[int, int, bool] | None = None
    """Steps at which it is paused alone and resumed, and whether it gives its memory back."""
    retain_s: float | None = None
    """See `Submit.retain_s`; the clock of a scenario counts steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Traffic, and the configuration and limits of the engine."""

    config: EngineConfig
    num_pages: int
    max_length: int
    arrivals: tuple[Arrival, ...]
    eager_steps: frozenset[int]
    """After these steps the runner computes everything launched; otherwise it computes as late as possible."""
    pauses: tuple[tuple[int, int, bool], ...] = ()
    """Steps before which the engine is paused and resumed, and whether the running requests leave."""
    deadline_after_s: float = 30.0
    """Time from the arrival to the deadline of every second request, in steps."""
    retains: tuple[tuple[int, int, float], ...] = ()
    """Steps before which a part of a prompt is retained or dropped, the index of its arrival, and the seconds."""
    abort_all_at: int | None = None
    """The step before which the engine is paused and all requests are aborted; it is resumed two steps later."""
    long_step_tokens: int = 0
    """Tokens of a step that is retired before the next one is launched; 0: none is."""
    max_drafts: int = 0
    """The most draft tokens of a request in one step; 0: the engine does not speculate."""
    tree: TreeShape | None = None
    """The shape of drafts, `max_drafts` deep; None: drafts are chains."""
    guess_quality: float = 0.5
    """Probability that a draft token is right; only for the runner that `run_scenario` makes."""
    leaves_out: bool = False
    """Whether the runner leaves out rows that have ended; only for the runner that `run_scenario` makes."""
    faults: Mapping[int, Fault] = field(default_factory=dict[int, Fault])
    """Faults of the runner, by number of the launch; only for the runner that `run_scenario` makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts of a finished scenario."""

    num_steps: int
    num_launched_ahead: int
    num_preempted: int
    num_cached_tokens: int
    num_aborted: int
    num_refused: int
    num_refused_by_code: Mapping[str, int]
    """Requests that were refused with a code, by the code."""
    num_failed: int
    num_held: int
    """Steps after which a request was paused alone, added up over requests."""
    num_aborted_held: int
    """Requests that were aborted while they were paused alone."""
    most_retained: int
    """The most pages that were retained after a step."""
    num_drafted: int
    num_accepted: int
    num_rebuilt: int
    """Positions that the drafter had to catch up with."""


class RandomDrafting:
    """Gives requests random numbers of draft tokens; satisfies `core.speculation.Drafting`.

    Now and then it rests for some steps, and drafters may stop to follow for any part of these.
    """

    reason = "random"

    def __init__(self, *, max_tokens: int, seed: int, is_exact: bool = False) -> None:
        self.max_tokens = max_tokens
        self._is_exact = is_exact
        """Whether every draft of a request without a grammar must be accepted."""
        self.is_far = False
        """Whether drafters need not follow."""  # written by: rests, lengths
        self._rng = random.Random(seed)
        self._num_rests = 0  # written by: rests

    def rests(self, num_requests: int) -> bool:
        """Return True for some steps in succession, and False for others."""
        if not self._num_rests:
            self._num_rests = self._rng.choice((0, 0, 0, 0, 0, 0, 3, 12))
            self.is_far = False
            return False
        self._num_rests -= 1
        self.is_far = self._rng.random() < 0.8
        return True

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return random numbers; often 0, often the largest."""
        largest = self._rng.choice((0, self.max_tokens, self.max_tokens, self.max_tokens))
        return [self._rng.choice((self._rng.randint(0, largest), largest)) for _ in requests]

    def observe(self, report: StepsReport) -> None:
        """Check that the numbers are possible."""
        for some in zip(report.accepted, report.drafted, report.granted, strict=True):
            assert list(some) == sorted(some), f"(accepted, drafted, granted) are {some}"
        if self._is_exact:
            for request, num_drafted, num_accepted in zip(
                report.requests, report.drafted, report.accepted, strict=True
            ):
                assert request.matcher is not None or num_accepted == num_drafted, (
                    f"{num_accepted} of {num_drafted} drafts were accepted, which are all right"
                )
        assert len(report.requests) <= report.num_decoding <= report.num_tokens - report.num_draft_tokens

    def forget(self, request: Request) -> None:
        """Check that the request has ended."""
        assert request.finish is not None


def random_scenario(rng: random.Random, *, overlap: bool, bursts: float = 0.3) -> Scenario:
    """Draw a scenario: shared prefixes, bursts that repeat one, tiny pools, chunks, priorities that change, namespaces,
    aborts, and requests that can never fit.

    Args:
        rng: source of all choices.
        overlap: whether the engine launches a step before it retires the one before; if not, two thirds of the
            scenarios launch several steps in which the same requests decode.
        bursts: probability that the requests come almost at once, most of them with one of a few prompts.
    """
    page_size = rng.choice((1, 4, 16))
    is_burst = rng.random() < bursts
    max_length = rng.randint(60, 120) if is_burst else rng.randint(8, 90)
    fewest_pages = -(-max_length // page_size)
    num_pages = rng.randint(fewest_pages, fewest_pages * 3)
    longest_stem = max_length * 2 // 3 if is_burst else max_length
    stems = [[rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(1, longest_stem))] for _ in range(3)]
    arrivals: list[Arrival] = []
    for _ in range(rng.randint(1, 12)):
        stem = rng.choice(stems)
        tail = [rng.randrange(1, VOCAB_SIZE) for _ in range(rng.randint(0, 6))]
        prompt = (stem[: len(stem) if is_burst else rng.randint(0, len(stem))] + tail) or [1]
        at_step = rng.randint(0, 3 if is_burst else 25)
        arrivals.append(
            Arrival(
                at_step=at_step,
                abort_at_step=at_step + rng.randint(0, 20) if rng.random() < 0.2 else None,
                prompt=tuple(prompt),
                sampling=SamplingParams(
                    max_tokens=rng.choice((None, rng.randint(1, 40))),
                    temperature=rng.choice((0.0, 1.0)),
                    seed=rng.randrange(1000),
                    ignore_eos=rng.random() < 0.5,
                    stop_token_ids=(7,) if rng.random() < 0.2 else (),
                ),
                priority=rng.choice((0, 0, 1)),
                namespace=rng.choice((None, None, "tenant")),
                priority_from_step=(rng.randint(-1, 2), at_step + rng.randint(0, 20)) if rng.random() < 0.3 else None,
            )
        )
    return Scenario(
        config=EngineConfig(
            page_size=page_size,
            max_running=rng.randint(1, 6),
            chunked_prefill_size=rng.choice((48, 64, 128) if is_burst else (1, 3, 16, 64)),
            max_prefills=rng.randint(1, 3),
            joint_prefill_tokens=(None, 1, 8)[num_pages % 3],
            prefill_first=rng.random() < 0.2,
            schedule_policy=(policy := rng.choice([name for name in ORDERS if not name.startswith("priority")])),
            schedule_weights=(("tenant", 2.0), ("1", 3.0)) if num_pages % 2 and policy in ("fair", "wrr") else (),
            schedule_ageing_s=(None, None, 0.0, 10.0)[max_length % 4],
            target_step_s=(None, 1.0)[len(arrivals) % 2],
            schedule_conservativeness=rng.choice((0.05, 0.05, 1.0)),
            overlap=overlap,
            num_continuous_decode_steps=1 if overlap else (1, 2, 5)[max_length % 3],
            prefix_cache=rng.random() < 0.9,
            eviction_policy="queue-lru" if num_pages % 3 == 0 else "lru",
        ),
        num_pages=num_pages,
        max_length=max_length,
        arrivals=tuple(arrivals),
        eager_steps=frozenset(rng.sample(range(60), rng.randint(0, 30))),
        leaves_out=num_pages % 2 == 0,
        long_step_tokens=(0, 1, 6)[max_length % 3],
    )


def with_drafts(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario for an engine that speculates, with a drafter of random quality."""
    return replace(scenario, max_drafts=rng.choice((1, 2, 4, 8)), guess_quality=rng.choice((0.0, 0.5, 0.9, 1.0)))


def with_trees(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario for an engine that speculates with trees, with a drafter of random quality."""
    topk = rng.randint(2, 4)
    tree = TreeShape(rng.randint(topk, 12), topk)
    return replace(scenario, max_drafts=tree.depth, tree=tree, guess_quality=rng.choice((0.0, 0.5, 0.9, 1.0)))


def with_interruptions(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with pauses, preemption by priority, and a limit on the time in the queue."""
    starts = rng.sample(range(40), rng.randint(0, 3))
    return replace(
        scenario,
        config=replace(
            scenario.config,
            preemption_threshold=rng.choice((None, 0, 0, 1)),
            low_priority_first=rng.random() < 0.3,
            max_queue_s=rng.choice((None, None, rng.randint(3, 60))),
        ),
        pauses=tuple((start, start + rng.randint(1, 12), rng.random() < 0.5) for start in starts),
    )


def with_urgency(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with three priorities, of which the higher ones come later, and prompts in small parts.

    In a burst, requests are then parked behind the prompts of others of lower priority.
    """
    arrivals = tuple(
        replace(arrival, priority=rng.choice((0, 10, 20)) if arrival.at_step else 0, namespace=None)
        for arrival in scenario.arrivals
    )
    config = replace(
        scenario.config, chunked_prefill_size=rng.choice((4, 8)), max_running=rng.randint(3, 6), prefix_cache=True
    )
    return replace(scenario, arrivals=arrivals, config=config)


def with_limits(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with quotas of tenants, refusals of late and of too many requests, and another mixing."""
    largest = scenario.max_length

    def limit(low: int, high: int) -> int | None:
        return rng.choice((None, rng.randint(low, high)))

    def quota(tenant: str) -> TenantQuota:
        return TenantQuota(tenant, limit(1, 3), limit(largest // 2, 2 * largest), limit(largest // 3, largest))

    presets = ("decode-first", "stall-free", "prefill-first") if not scenario.config.prefill_first else (None,)
    return replace(
        scenario,
        config=replace(
            scenario.config,
            quotas=rng.choice(((quota("*"),), (quota("tenant"),), (quota("tenant"), quota("*")))),
            schedule_preset=rng.choice((None, *presets)),
            refuse_late=rng.random() < 0.5,
            max_queued=limit(0, 5),
            stream_interval=rng.choice((1, 1, 2, 5)),
        ),
        deadline_after_s=rng.choice((-1.0, 10.0, 30.0)),
    )


def with_holds(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that are paused alone, retention under a small bound, and aborts.

    Some requests are aborted while they are paused; in some scenarios all are at once.
    """
    arrivals: list[Arrival] = []
    for arrival in scenario.arrivals:
        start = arrival.at_step + rng.randint(0, 15)
        hold = (start, start + rng.randint(1, 15), rng.random() < 0.5) if rng.random() < 0.6 else None
        aborts = hold is not None and rng.random() < 0.15
        arrivals.append(
            replace(
                arrival,
                hold=hold,
                abort_at_step=rng.randint(*hold[:2]) if hold is not None and aborts else arrival.abort_at_step,
                retain_s=rng.choice((None, None, 0.0, 3.0, 40.0, 1e6)),
            )
        )
    share = rng.choice((0.0, 0.3, 0.5, 1.0)) if scenario.config.prefix_cache else 0.0
    steps = rng.sample(range(50), rng.randint(0, 4))
    return replace(
        scenario,
        arrivals=tuple(arrivals),
        config=replace(scenario.config, retained_share=share, max_retain_s=rng.choice((5.0, 1e6))),
        retains=tuple((step, rng.randrange(len(arrivals)), rng.choice((0.0, 4.0, 1e6))) for step in steps),
        abort_all_at=rng.randint(1, 30) if rng.random() < 0.1 else None,
    )


def with_logprobs(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that ask for log probabilities of their output, their prompt, both or none."""
    arrivals = tuple(
        replace(
            arrival,
            sampling=replace(
                arrival.sampling,
                logprobs=rng.choice((None, 0, 2)),
                prompt_logprobs=rng.choice((None, None, 0, 1)),
                prompt_logprobs_start=rng.choice((1, 1, 2, 7)),
            ),
        )
        for arrival in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def with_pooling(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that ask for a vector, about half of them."""
    arrivals = tuple(
        replace(arrival, pooling=_random_pooling(rng) if rng.random() < 0.5 else None) for arrival in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def _random_pooling(rng: random.Random) -> PoolingParams:
    return PoolingParams(
        kind=rng.choice(("last", "mean", "mean", "cls")),
        normalize=rng.random() < 0.5,
        dimensions=rng.choice((None, None, 1, 3)),
    )


def with_grammars(scenario: Scenario, rng: random.Random) -> Scenario:
    """Return the scenario with requests that have a grammar, most of them, and sometimes log probabilities."""
    arrivals = tuple(
        replace(
            arrival,
            sampling=replace(
                arrival.sampling,
                grammar=random_grammar(rng) if rng.random() < 0.7 else None,
                logprobs=rng.choice((None, None, 1)),
            ),
        )
        for arrival in scenario.arrivals
    )
    return replace(scenario, arrivals=arrivals)


def run_scenario(
    scenario: Scenario,
    *,
    after_step: Callable[[Engine], None] | None = None,
    make_caches: MakeCaches | None = None,
    make_runner: MakeRunner | None = None,
) -> Report:
    """Run a scenario to its end; every answer must equal that of the sequential oracle.

    Args:
        scenario: the traffic.
        after_step: another check, called after every step.
        make_caches: for prefix caches that copy KV memory; None: the configured cache.
        make_runner: makes another runner of the echo model, whose tokens must not depend on seeds; None: an
            `EchoRunner` with the faults of the scenario.

    A request that is hit by a fault of the runner must end with an error, and no other request may.

    Raises:
        AssertionError: a wrong token, a wrong end, broken accounting, or no progress.
    """
    return _Run(scenario, make_caches, make_runner).to_the_end(after_step)


class _Run:
    """One run of a scenario."""

    def __init__(
        self, scenario: Scenario, make_caches: MakeCaches | None, make_other_runner: MakeRunner | None
    ) -> None:
        self._scenario = scenario
        self._make_other_runner = make_other_runner
        page_size = scenario.config.page_size
        self._memory = np.empty(scenario.num_pages * page_size, np.uint64)
        self._inbox = MemoryInbox()
        self._outbox = MemoryOutbox()
        self._runner: WatchedRunner | None = None
        self._step = 0
        self._outputs: dict[str, list[int]] = {}
        self._ends: dict[str, Delta] = {}
        self._logprobs: dict[str, list[TokenLogprob]] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self._aborted: set[str] = set()
        self._num_held = 0
        self._num_aborted_held = 0
        self._paused: set[str] = set()
        """Requests that were paused alone, so that they must not be refused for the time that they wait."""
        self._launched_before: dict[str, int] = {}
        """Launched positions of the requests that were paused alone after the last step."""
        self._most_retained = 0
        self._failed: set[str] = set()
        self._interrupted: set[int] = set()
        """Steps that a `KeyboardInterrupt` has ended."""
        self._num_preempted_known = 0
        self._drafting = RandomDrafting(
            max_tokens=scenario.max_drafts,
            seed=len(scenario.arrivals),
            is_exact=scenario.guess_quality == 1.0
            and scenario.tree is None
            and not scenario.faults
            and make_other_runner is None,
        )
        self._engine = assemble(
            scenario.config,
            drafting=self._drafting if scenario.max_drafts else None,
            tree=scenario.tree,
            drafts_constrained=True,
            compiler=EchoCompiler(random.Random(scenario.num_pages), VOCAB_SIZE),
            info=EngineInfo(
                model_name="echo",
                max_length=scenario.max_length,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(_EOS,),
                num_pages=scenario.num_pages,
                page_size=scenario.config.page_size,
                vector_size=STATE_SIZE,
                long_step_tokens=scenario.long_step_tokens,
            ),
            make_runner=self._make_runner,
            make_cache=None if make_caches is None else make_caches(self._memory, page_size),
            inbox=self._inbox,
            outbox=self._outbox,
            clock=lambda: float(self._step),
        )
        self._engine.measure(lambda: float(self._step))

    def to_the_end(self, after_step: Callable[[Engine], None] | None) -> Report:
        scenario, engine = self._scenario, self._engine
        last_event = max(max(a.at_step, a.abort_at_step or 0) for a in scenario.arrivals)
        last_event = max(last_event, *(end for _, end, _ in scenario.pauses), 0)
        last_event = max(last_event, *(a.hold[1] for a in scenario.arrivals if a.hold is not None), 0)
        last_event = max(last_event, *(step for step, _, _ in scenario.retains), (scenario.abort_all_at or 0) + 2)
        num_positions = sum(len(a.prompt) + (a.sampling.max_tokens or scenario.max_length) for a in scenario.arrivals)
        deadline = last_event + 20 * num_positions + 100
        pending: Pending | None = None
        while self._step <= last_event or len(self._ends) < len(scenario.arrivals) or pending is not None:
            assert self._step < deadline, f"no progress: {engine.counters()}"
            self._arrive()
            self._pause()
            pending = self._advance(pending)
            self._collect()
            violation = engine.violation()
            assert violation is None, violation
            self._check_bounds()
            if after_step is not None:
                after_step(engine)
            if self._step in scenario.eager_steps and self._runner is not None:
                self._runner.catch_up()
            self._step += 1
        engine.step()  # idle, so the engine checks its invariant
        self._check_ends()
        engine.close()
        counters = engine.counters()
        self._check_measurement()
        assert counters.num_violations == 0
        assert self._num_preempted_known <= counters.num_preempted
        assert counters.num_free_pages + counters.num_cached_pages == scenario.num_pages
        assert self._runner is not None
        assert self._runner.num_in_flight == 0
        return Report(
            num_steps=counters.num_steps,
            num_launched_ahead=self._runner.num_launched_ahead,
            num_preempted=counters.num_preempted,
            num_cached_tokens=sum(delta.num_cached_tokens for delta in self._ends.values()),
            num_aborted=sum(delta.finish is FinishReason.ABORT for delta in self._ends.values()),
            num_refused=sum(delta.finish is FinishReason.REFUSED for delta in self._ends.values()),
            num_refused_by_code=Counter(d.refusal.code or "" for d in self._ends.values() if d.refusal is not None),
            num_failed=len(self._failed),
            num_held=self._num_held,
            num_aborted_held=self._num_aborted_held,
            most_retained=self._most_retained,
            num_drafted=counters.speculation.num_drafted if counters.speculation else 0,
            num_accepted=counters.speculation.num_accepted if counters.speculation else 0,
            num_rebuilt=counters.speculation.num_rebuilt if counters.speculation else 0,
        )

    def _advance(self, pending: Pending | None) -> Pending | None:
        try:
            return self._engine.advance(pending)
        except KeyboardInterrupt:
            self._interrupted.add(self._step)
            return None  # no step is in flight

    def _make_runner(self, kv: KVSpace) -> Runner:
        if self._make_other_runner is not None:
            self._runner = self._make_other_runner(self._scenario)
            return self._runner
        make_echo = partial(
            EchoRunner,
            num_rows=self._scenario.config.num_rows,
            max_length=self._scenario.max_length,
            num_pages=self._scenario.num_pages,
            page_size=self._scenario.config.page_size,
            vocab_size=VOCAB_SIZE,
            held_pages=kv.held_pages,
            memory=self._memory,
            guess_quality=self._scenario.guess_quality,
            leaves_out=self._scenario.leaves_out,
            requests=self._requests_with_rows,
        )
        self._runner = FaultyRunner(
            lambda broken: make_echo(broken=broken),
            faults=self._scenario.faults,
            requests=self._requests_with_rows,
            failed=self._failed.add,
        )
        return self._runner

    def _requests_with_rows(self) -> list[Request]:
        return self._engine._state.holders  # pyright: ignore[reportPrivateUsage]

    def _arrive(self) -> None:
        for index, arrival in enumerate(self._scenario.arrivals):
            if arrival.at_step == self._step:
                self._inbox.put(
                    Submit(
                        request_id=str(index),
                        tokens=np.array(arrival.prompt, "<i4").tobytes(),
                        sampling=arrival.sampling,
                        pooling=arrival.pooling,
                        priority=arrival.priority,
                        deadline_s=arrival.at_step + self._scenario.deadline_after_s if index % 2 else None,
                        tenant=arrival.namespace if index % 4 else "shared",
                        service_class=str(arrival.priority),
                        tag=str(index % 3),
                        namespace=arrival.namespace,
                        carry=str(index).encode(),
                        retain_s=arrival.retain_s,
                        explain=index % 3 == 0,
                    )
                )
            priority, step = arrival.priority_from_step or (0, None)
            if step == self._step:
                self._inbox.put(SetPriority(request_id=str(index), priority=priority))
            start, end, retracts = arrival.hold or (-1, -1, False)
            if start == self._step:
                self._inbox.put(PauseRequest(request_id=str(index), retract=retracts))
                if str(index) not in self._ends:
                    self._paused.add(str(index))
            if end == self._step:
                self._inbox.put(ResumeRequest(request_id=str(index)))
            if arrival.abort_at_step == self._step:
                self._num_aborted_held += self._is_held(str(index))
                self._inbox.put(Abort(request_id=str(index)))
                self._aborted.add(str(index))

    def _pause(self) -> None:
        for start, end, retracts in self._scenario.pauses:
            if start == self._step:
                self._inbox.put(Pause(request_id=f"pause at {start}", retract=retracts))
            if end == self._step:
                self._inbox.put(Resume(request_id=f"resume at {end}"))
        abort_at = self._scenario.abort_all_at
        if abort_at == self._step:
            self._aborted.update(set(map(str, range(len(self._scenario.arrivals)))) - self._ends.keys())
            self._inbox.put(Pause(request_id="pause and abort", abort=True))
        if abort_at is not None and abort_at + 2 == self._step:
            self._inbox.put(Resume(request_id="resume after the abort"))
        for number, (step, index, seconds) in enumerate(self._scenario.retains):
            if step == self._step:
                arrival = self._scenario.arrivals[index]
                tokens = np.array(arrival.prompt, "<i4").tobytes()
                name = f"retain {number}"
                self._inbox.put(Retain(request_id=name, tokens=tokens, seconds=seconds, namespace=arrival.namespace))

    def _is_held(self, name: str) -> bool:
        request = self._engine._state.by_id.get(name)  # pyright: ignore[reportPrivateUsage]
        return request is not None and request.pause != "no"

    def _check_bounds(self) -> None:
        """A request that is paused alone gets no grant; retention keeps its bound."""
        state, scenario = self._engine._state, self._scenario  # pyright: ignore[reportPrivateUsage]
        self._num_held += len(state.held)
        for request in state.held:
            assert request not in state.running
            assert request not in state.waiting
            before = self._launched_before.get(request.request_id, request.num_launched)
            assert request.num_launched <= before, f"request {request.request_id} was computed while it was paused"
        self._launched_before = {request.request_id: request.num_launched for request in state.held}
        num_retained = self._engine.counters().num_retained_pages
        self._most_retained = max(self._most_retained, num_retained)
        assert num_retained <= scenario.num_pages * scenario.config.retained_share
        kept = self._engine._kv  # pyright: ignore[reportPrivateUsage]
        assert kept.num_retained <= kept.cache.num_locked

    def _collect(self) -> None:
        for delta in self._outbox.take():
            if not delta.request_id.isdecimal():
                refused = delta.refusal is not None and delta.refusal.code == "no_retention"
                assert (delta.finish, delta.first) == (FinishReason.REFUSED if refused else FinishReason.STOP, True)
                assert not refused or not self._scenario.config.retained_share
                continue
            assert delta.request_id not in self._ends, f"request {delta.request_id} was answered after its end"
            assert delta.first == (delta.request_id not in self._outputs)
            assert delta.carry == (delta.request_id.encode() if delta.first else b"")
            self._check_times(delta)
            self._outputs.setdefault(delta.request_id, []).extend(delta.tokens)
            self._logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            self._prompt_logprobs.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            if delta.finish is not None:
                self._ends[delta.request_id] = delta

    def _check_times(self, delta: Delta) -> None:
        """The last answer to a request that asks for its times must have them, and no other one."""
        timings = delta.timings
        is_refused_at_once = delta.finish is FinishReason.REFUSED and delta.first and timings is None
        is_wanted = delta.finish is not None and int(delta.request_id) % 3 == 0 and not is_refused_at_once
        assert (timings is not None) == is_wanted
        if timings is None:
            return
        arrived_s = self._scenario.arrivals[int(delta.request_id)].at_step
        chunks_s = [at_s for at_s, _ in timings.chunks]
        waited = range(arrived_s, int(timings.arrived_s))  # a step that was interrupted may have taken no commands
        assert timings.arrived_s >= arrived_s
        assert self._interrupted.issuperset(waited)
        assert timings.finished_s == self._step
        known = [timings.queued_s, timings.admitted_s, timings.first_token_s]
        times = [timings.arrived_s, *(at_s for at_s in known if at_s is not None), timings.finished_s]
        assert times == sorted(times)
        assert chunks_s == sorted(chunks_s)
        assert chunks_s[:1] == ([] if timings.admitted_s is None else [timings.admitted_s])
        assert timings.num_preempted == len(timings.preempted_s)
        assert timings.num_preempted == 0 or timings.admitted_s is not None
        self._num_preempted_known += timings.num_preempted

    def _check_measurement(self) -> None:
        """Check that what the engine measured agrees with its counters and with time."""
        counters, found = self._engine.counters(), self._engine.measurement()
        assert found is not None
        assert found.num_prefill_tokens + found.num_decode_tokens == counters.num_tokens
        assert sum(found.step_tokens[1]) == sum(found.step_s[1]) == counters.num_steps
        assert found.step_tokens[2] == counters.num_tokens
        assert sum(found.preempted.values()) == counters.num_preempted
        assert sum(found.stage_s.values()) + found.step_s[2] <= 2 * self._step
        assert (found.queue.waiting, found.queue.running, found.queue.oldest_s) == ({}, {}, 0.0)
        assert found.num_available_pages + counters.num_retained_pages == self._scenario.num_pages
        assert found.num_parked == found.num_held_back == found.num_compiling == found.num_recalling == 0

    def _check_ends(self) -> None:
        for index, arrival in enumerate(self._scenario.arrivals):
            name = str(index)
            output, last = self._outputs[name], self._ends[name]
            code = None if last.refusal is None else last.refusal.code
            if code in _REFUSALS:
                assert not output
                assert _REFUSALS[code](self._scenario.config), f"request {name}: {last.refusal}"
                assert code != "queue_timeout" or name not in self._paused, f"request {name} was refused though paused"
                continue
            if arrival.pooling is not None:
                self._check_vector(name, arrival, arrival.pooling)
                continue
            assert not last.vector, f"request {name} has a vector"
            if len(arrival.prompt) + (arrival.sampling.max_tokens or 1) > self._scenario.max_length:
                assert last.finish in (FinishReason.REFUSED, FinishReason.ABORT), f"request {name} was accepted"
                continue
            stop_ids = frozenset(arrival.sampling.stop_token_ids + (() if arrival.sampling.ignore_eos else (_EOS,)))
            is_seeded = self._make_other_runner is None
            expected = oracle_tokens(
                arrival.prompt,
                arrival.sampling if is_seeded else replace(arrival.sampling, temperature=0.0),
                vocab_size=VOCAB_SIZE,
                stop_ids=stop_ids,
                max_length=self._scenario.max_length,
            )
            self._check_logprobs(name, arrival, output)
            grammar = arrival.sampling.grammar
            if grammar is not None and grammar.text.endswith("1"):
                assert last.finish in (FinishReason.REFUSED, FinishReason.ABORT), f"request {name} was accepted"
                continue
            if grammar is not None and last.finish is FinishReason.ERROR and int(grammar.text.split()[2]) < 999:
                self._failed.add(name)
                if code == "grammar_failed":
                    inside = text_inside(grammar, output)
                    assert inside is not None, f"request {name} failed before its grammar began"
                    assert len(inside) >= int(grammar.text.split()[2]), f"request {name} failed behind {output}"
            assert (last.finish is FinishReason.ERROR) == (name in self._failed), f"request {name}: {last.finish}"
            if last.finish in (FinishReason.ABORT, FinishReason.ERROR):
                assert name in self._aborted or last.finish is FinishReason.ERROR
                assert output == expected[: len(output)], f"request {name}: {output} is not a prefix of {expected}"
                continue
            assert output == expected, f"request {name}: {output} is not {expected}"
            limit = arrival.sampling.max_tokens or self._scenario.max_length - len(arrival.prompt)
            stopped = len(expected) < limit
            is_complete = grammar is not None and not allowed_tokens(grammar, expected, frozenset(), VOCAB_SIZE)
            assert last.finish is (FinishReason.STOP if stopped or is_complete else FinishReason.LENGTH)
            assert 0 <= len(expected) + stopped - last.num_output_tokens <= (grammar is not None)
            assert last.num_prompt_tokens == len(arrival.prompt)
            assert last.num_output_tokens >= last.num_accepted_tokens or stopped
            assert last.num_accepted_tokens <= last.num_drafted_tokens

    def _check_vector(self, name: str, arrival: Arrival, pooling: PoolingParams) -> None:
        """A request for a vector must end with the right one, and have no tokens."""
        last, prompt = self._ends[name], arrival.prompt
        assert not self._outputs[name], f"request {name} has tokens"
        assert not self._logprobs[name]
        if len(prompt) > self._scenario.max_length:
            assert last.finish in (FinishReason.REFUSED, FinishReason.ABORT), f"request {name} was accepted"
            return
        assert (last.finish is FinishReason.ERROR) == (name in self._failed), f"request {name}: {last.finish}"
        if last.finish in (FinishReason.ABORT, FinishReason.ERROR):
            assert name in self._aborted or last.finish is FinishReason.ERROR
            assert not last.vector
            return
        assert last.finish is FinishReason.STOP
        vector, expected = np.frombuffer(last.vector, "<f4"), oracle_vector(prompt, pooling)
        assert vector.shape == expected.shape
        assert np.allclose(vector, expected, rtol=1e-6, atol=0), f"request {name}: {pooling} of {len(prompt)} tokens"
        assert (last.num_prompt_tokens, last.num_output_tokens) == (len(prompt), 0)
        assert pooling.kind == "last" or not last.num_cached_tokens

    def _check_logprobs(self, name: str, arrival: Arrival, output: Sequence[int]) -> None:
        """What was reported must be that of each token at its position, in order."""
        sampling, prompt = arrival.sampling, arrival.prompt
        expected: list[TokenLogprob] = []
        if sampling.logprobs is not None:
            num_top = sampling.logprobs
            expected = [echo_logprob(token, len(prompt) + i, num_top) for i, token in enumerate(output)]
        assert self._logprobs[name] == expected, f"request {name}: {self._logprobs[name]} is not {expected}"
        of_prompt: list[TokenLogprob] = []
        if sampling.prompt_logprobs is not None:
            num_top = sampling.prompt_logprobs
            first = sampling.prompt_logprobs_start
            of_prompt = [echo_logprob(token, i, num_top) for i, token in enumerate(prompt) if i >= first]
        found = self._prompt_logprobs[name]
        is_cut = self._ends[name].finish in (FinishReason.ABORT, FinishReason.ERROR) and not output
        assert found == (of_prompt[: len(found)] if is_cut else of_prompt), (
            f"request {name}: {found} is not {of_prompt}"
        )
