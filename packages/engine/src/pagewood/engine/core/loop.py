"""The engine's loops, plain, overlapped, of several steps and of stages: the same calls in a different order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

from pagewood.engine.api import Command, Delta, EngineConfig, FinishReason, Inbox, Outbox, Refusal
from pagewood.engine.core.intake import Intake
from pagewood.engine.core.masks.constrain import fill_masks, open_masks
from pagewood.engine.core.masks.shared_work import SharedWork
from pagewood.engine.core.memory.caches import PrefixCache
from pagewood.engine.core.memory.divided_kv import AnyKV, DividedKV
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch, num_masks
from pagewood.engine.core.messages.result import StepResult
from pagewood.engine.core.messages.result_rules import check_drafts, check_result
from pagewood.engine.core.observe.expert_load import ExpertRows
from pagewood.engine.core.observe.measures import (
    BUILD,
    CONSTRAIN,
    INTAKE,
    LAUNCH,
    PLAN,
    RETIRE,
    WAIT,
    AdapterUse,
    Measurement,
    Measures,
    Stage,
    counts_of,
)
from pagewood.engine.core.observe.step_record import StepRecord
from pagewood.engine.core.observe.viewing import view_pool, view_requests, view_tree
from pagewood.engine.core.observe.watchdog import Watchdog
from pagewood.engine.core.queue.publishing import Publishing
from pagewood.engine.core.queue.state import EngineState
from pagewood.engine.core.reasons import Notes
from pagewood.engine.core.request import Request
from pagewood.engine.core.rest import Rest
from pagewood.engine.core.retire import end, release_drained, retire
from pagewood.engine.core.steps.batch_builder import BatchBuilder
from pagewood.engine.core.steps.equal_chunks import EqualChunks
from pagewood.engine.core.steps.grant import Grant
from pagewood.engine.core.steps.launched import count_launched, num_top_of
from pagewood.engine.core.steps.pacing import Pacing
from pagewood.engine.core.steps.plan import Planner
from pagewood.engine.core.steps.speculation import Speculation, SpeculationCounts
from pagewood.engine.core.steps.stage_turns import StageTurns
from pagewood.engine.core.steps.step_plan import StepPlan
from pagewood.engine.observe.view import EngineView
from pagewood.engine.weight_commands import SleepTag

_log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5
"""How long an idle engine waits for commands before it checks again whether to stop."""

_RECALL_WAIT_S = 0.001
"""How long the engine sleeps when it can only wait: for KV from a lower tier, a grammar, or room for a request."""

_BARREN_PASSES = 16
"""After this many passes in a row that plan nothing though requests wait and none runs, the engine sleeps between
them."""


class RunnerLostError(RuntimeError):
    """A runner can compute nothing more: its device, or a process that computes with it, is lost.

    It ends the engine, and no request with an error: the caller of `Engine.advance` gets it, and may start another
    engine, which computes the requests again.
    """


class StepHandle(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Wait for the result and return it; a second call returns it again.

        The arrays of the result belong to the caller: no later step may write to them.

        Raises:
            RunnerLostError: no step can be computed any more.
            Exception: the step failed; the engine ends its requests, as it does if the result breaks a rule of
                `result_rules`.
        """
        ...


@runtime_checkable
class ConstrainedHandle(StepHandle, Protocol):
    """A launched step some of whose tokens are drawn later. A runner that can follow grammars returns it."""

    def drafts(self) -> Sequence[Sequence[int]]:
        """Wait for the drafts of the M grants of `Batch.constrained`, and return them; called before `constrain`."""
        ...

    def constrain(self, masks: Int32) -> None:
        """Let the tokens of `Batch.constrained` be drawn; called once, before the next launch, if there are any.

        Args:
            masks: `[>= M + drafts, words of a mask]`, one for each of the M grants, followed by one for each of its
                drafts: bit `i % 32` of word `i // 32` is set if token i may be drawn there. Further masks are not read.
        """
        ...


class Runner(Protocol):
    """Computes batches in the order in which they are launched."""

    def launch(self, batch: Batch) -> StepHandle:
        """Hand a batch to the device and return without waiting for it.

        Raises:
            RunnerLostError: no step can be computed any more.
            Exception: the step was not launched; the engine ends its requests.
        """
        ...

    def close(self) -> None:
        """Release threads and memory; no step may be in flight, unless the runner is lost."""
        ...


@runtime_checkable
class CheckedRunner(Protocol):
    """A runner that can be lost while it has nothing to compute."""

    def check(self) -> None:
        """Return if it can compute; called now and then while the engine is idle.

        Raises:
            RunnerLostError: it cannot.
        """
        ...


class Observer(Notes, Protocol):
    """Gets what the engine takes in and what it decides, in the engine's thread; must be quick, and must not raise."""

    def took(self, commands: Sequence[Command], answers: Sequence[Delta | None], now_s: float) -> None:
        """Note commands, with the answer of each that has one already.

        Args:
            commands: in the order in which they were carried out.
            answers: one for each.
            now_s: when they were taken, on the engine's clock.
        """
        ...

    def planned(self, plan: StepPlan, grants: Sequence[Grant], state: EngineState, num_free_pages: int) -> None:
        """Note a plan. It is launched next, unless it has no grants.

        Args:
            plan: as the planner made it.
            grants: the same with drafts; they may be kept, the state may not.
            state: after the plan.
            num_free_pages: after the plan.
        """
        ...

    def waited(self, result: StepResult | None, *, is_interrupted: bool = False) -> None:
        """Note the result of the oldest step in flight, before it is applied.

        Args:
            result: None: the step has failed, or its result breaks a rule.
            is_interrupted: whether the wait was interrupted, so that it is repeated.
        """
        ...


@dataclass(slots=True, kw_only=True)
class Pending:
    """A step in flight."""

    grants: tuple[Grant, ...]
    handle: StepHandle
    batch: Batch
    """What was launched."""
    constrained: Sequence[Request] = ()
    """Requests whose draws wait for masks."""  # written by: loop
    launched_s: float = 0.0
    """When it was handed to the runner, on the engine's clock; 0 if steps are not measured."""
    num_masks: int = 0
    """How many masks they need at most."""
    is_drafting: bool = False
    """Whether any of its grants was made longer by drafts."""
    is_decode: bool = False
    """Whether every grant is for one token, so that the same requests can decode again."""
    is_long: bool = False
    """Whether it has at least `EngineInfo.long_step_tokens`."""
    failure: Exception | None = None
    """Why filling its masks failed; the step then fails too."""  # written by: loop
    num_beside: int = 0
    """Steps that were in flight when it was launched, where there are stages."""  # written by: loop


@dataclass(slots=True, kw_only=True)
class Stages:
    """What the loop of a model that is cut into stages needs beside that of one."""

    turns: StageTurns
    chunks: EqualChunks
    in_flight: deque[Pending] = field(default_factory=deque[Pending])
    """The oldest first; at most `turns.most_in_flight`."""  # contents written by: loop


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about an engine that are fixed when it is built."""

    model_name: str
    max_length: int
    """Longest prompt plus output of one request, tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_pages: int
    """Pages that fit, with their memory in all layers."""
    page_size: int
    num_pools: int = 1
    """Ranks among which pages are divided by request, in the order of their ids: the first rank has the lowest. A
    request has pages of one rank only."""
    windows: tuple[int | None, ...] = (None,)
    """How many positions a token sees in each group of layers, itself included; None: all. Groups have equal sizes, and
    those without a window come first. One group without a window: a page is its memory in all layers."""
    short_length: int | None = None
    """A model with two sets of factors for rotations has the first for requests of at most this many tokens, prompt
    plus output, and the second for longer ones; `Batch.is_long` says which. None: it has one set."""
    announces_pages: bool = False
    """Whether a batch has the ids of pages too, as a table behind those of the frames in all groups: a runner needs
    them for memory that lies beside the frames. Without groups, page ids are all there is."""
    num_states: int = 0
    """Places for the states of recurrent layers, divided as pages are, at least one for each row; 0: no layer is
    recurrent."""
    state_interval: int = 0
    """Positions between the states that the cache keeps within a long prompt, a multiple of the page size."""
    vector_size: int = 0
    """Elements of a hidden state; 0: the runner makes no vectors."""
    expert_shape: tuple[int, int] | None = None
    """Layers of the model, and experts of a token in each, if the runner reports which; None: it does not."""
    reports_states: bool = False
    """Whether the runner reports hidden states."""
    reports_kept: bool = False
    """Whether it reports which tokens the filters leave."""
    generates: bool = True
    """Whether it generates tokens; an encoder makes vectors only."""
    takes_images: bool = False
    """Whether prompts may have images."""
    page_bytes: int = 0
    """Bytes of a page in all layers; 0: the runner has no KV memory."""
    long_step_tokens: int = 0
    """A step is long if it computes at least this many positions. The next step is then planned after it, because
    planning during it gains almost nothing. 0: no step is long."""
    rank_places: tuple[str, ...] = ()
    """The host of each rank, in words, where ranks are on several hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counts of an engine: steps, tokens, preemptions and violations since it was built, all others at this moment."""

    num_steps: int
    num_tokens: int
    """Positions computed or being computed."""
    num_preempted: int
    num_spared: int = 0
    """Waiting requests, since it was built, for which no running request was preempted because each candidate had been
    preempted before and had not grown enough since."""
    num_starved: int = 0
    """Waiting requests, since it was built, that did not fit and had been passed as often as is allowed; no request
    passes them any more."""
    num_violations: int
    """How often the invariant of KV memory was found broken while idle, and repaired."""
    num_waiting: int
    num_running: int
    num_draining: int
    num_held: int = 0
    """Requests that are paused alone."""
    num_stuck: int = 0
    """Waiting requests if admission stands still (none runs, memory is free, and nothing is planned), otherwise 0."""
    num_pages: int
    num_free_pages: int
    num_cached_pages: int
    free_pages_by_rank: tuple[int, ...] = ()
    """Where pages are divided among ranks by request, those that are free on each."""
    num_retained_pages: int = 0
    """Cached pages that are kept from eviction because they are likely to return."""
    speculation: SpeculationCounts | None = None
    """None: the engine does not speculate."""


class Engine:
    """Takes commands, runs steps, sends answers.

    Invariant: at most one step is in flight between calls of `advance`; or, if the model is cut into stages, as many as
    there are stages, less one without overlap.

    Use it from one thread. A server calls `run`; a caller with a loop of its own calls `advance`.

    A step that fails ends its own requests with an error, and no others. A runner that is lost ends the engine with
    `RunnerLostError`: it can only be closed then. A `KeyboardInterrupt` (or any other exception
    that is not an `Exception`) from the runner reaches the caller of `advance` after the steps in flight have been
    waited for and retired. The engine can then be used again, with `advance(None)`. If it comes from `launch`, it ends
    the requests of that step with an error; in `wait` it ends none. An exception from any other place, such as a signal
    while a step is planned, leaves the engine in an unknown state; callers hold signals back, or run it in a thread of
    its own.
    """

    __slots__ = (
        "_builder", "_clock", "_expert_rows", "_inbox", "_intake", "_kv", "_mask_work", "_measures", "_num_preempted",
        "_num_steps", "_num_tokens", "_num_violations", "_observer", "_outbox", "_pacing", "_planner", "_publishing",
        "_record", "_rest", "_runner", "_speculation", "_stages", "_state", "_was_idle", "_watch_clock", "_watchdog",
        "config", "info",
    )  # fmt: skip

    def __init__(
        self,
        *,
        config: EngineConfig,
        info: EngineInfo,
        state: EngineState,
        intake: Intake,
        rest: Rest,
        planner: Planner,
        speculation: Speculation | None = None,
        kv: AnyKV,
        builder: BatchBuilder,
        runner: Runner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float],
        pacing: Pacing | None = None,
        num_mask_helpers: int = 0,
        observer: Observer | None = None,
        expert_rows: ExpertRows | None = None,
        publishing: Publishing | None = None,
        stages: Stages | None = None,
    ) -> None:
        self._publishing = publishing
        self.config = config
        """The configuration it was built from. Values replace every "auto", and every None that was resolved."""
        self.info = info
        self._state = state
        self._intake = intake
        self._rest = rest
        self._planner = planner
        self._speculation = speculation
        self._kv = kv
        self._builder = builder
        self._runner = runner
        self._inbox = inbox
        self._outbox = outbox
        self._clock = clock
        self._pacing = pacing
        self._observer = observer
        self._expert_rows = expert_rows
        self._stages = stages
        self._mask_work = SharedWork(num_mask_helpers)
        self._watchdog = Watchdog()
        self._measures: Measures | None = None
        """None: nothing is measured."""  # written by: loop
        self._record: StepRecord | None = None
        """The latest steps; None while the engine is not watched."""  # written by: loop
        self._watch_clock: Callable[[], float] = time.monotonic  # written by: loop
        self._was_idle = False
        """Whether the latest pass was idle and found no command."""  # written by: loop
        self._num_steps = 0  # written by: loop
        self._num_tokens = 0  # written by: loop
        self._num_preempted = 0  # written by: loop
        self._num_violations = 0  # written by: loop

    def run(self, stopped: Callable[[], bool]) -> None:
        """Run steps until `stopped()` is true, then abort the remaining requests."""
        pending: Pending | None = None
        while not stopped():
            pending = self.advance(pending)
        if self._stages is None:
            self._finish(pending)
        else:
            self._finish_all(self._stages)
        self._send([end(self._state, self._kv, r, FinishReason.ABORT) for r in list(self._state.by_id.values())])
        self._send(self._intake.drop_flushes())
        if self._publishing is not None:
            self._send(self._publishing.drop())

    def advance(self, last: Pending | None) -> Pending | None:
        """Do one step of the configured loop; pass its return value, a step in flight or None, to the next call."""
        if self._rest.has_new_weights:
            last = self._exchange_weights(last)
        if self._stages is not None:
            return self.step_staged(self._stages)
        if self.config.num_continuous_decode_steps > 1:
            return self.step_several()
        return self.step_overlapped(last) if self.config.overlap else self.step()

    def step(self) -> None:
        """Launch one step and retire it."""
        self._take_commands(None)
        pending = self._launch()
        self._finish(pending)

    def step_overlapped(self, last: Pending | None) -> Pending | None:
        """Launch one step, and retire the step before it while the new one computes.

        A long step is retired first, so that the new one can compute what has arrived meanwhile.
        """
        if last is not None and last.is_long:
            self._finish(last)
            last = None
        try:
            self._take_commands(last)
            pending = self._launch()
        except BaseException:
            self._finish(last)
            raise
        try:
            self._finish(last, following=pending)
            self._constrain(pending)
        except BaseException:  # the caller does not get the step that was just launched
            self._finish(pending)
            raise
        return pending

    def step_staged(self, stages: Stages) -> Pending | None:
        """Launch one step beside those in flight; retire the oldest if there may be no further one.

        The step that is launched next has requests of the one that has just been retired, or chunks of prompts.
        """
        in_flight = stages.in_flight
        try:
            self._take_commands(in_flight[0] if in_flight else None)
            pending = self._launch()
            if pending is not None:
                stages.turns.launched(grant.request for grant in pending.grants)
                pending.num_beside = len(in_flight)
                in_flight.append(pending)
                self._constrain(pending)
            if in_flight and (pending is None or len(in_flight) == stages.turns.most_in_flight):
                self._finish_oldest(stages)
        except RunnerLostError:
            raise
        except BaseException:
            self._finish_all(stages)
            raise
        return in_flight[0] if in_flight else None

    def _finish_oldest(self, stages: Stages) -> None:
        pending = stages.in_flight.popleft()
        try:
            self._finish(pending)
        finally:
            stages.turns.retired()
            stages.chunks.ended(
                pending.grants, num_beside=pending.num_beside, launched_s=pending.launched_s, now_s=self._clock()
            )

    def _finish_all(self, stages: Stages) -> None:
        """Retire all steps in flight; an interrupt is raised after that."""
        interrupt: BaseException | None = None
        while stages.in_flight:
            try:
                self._finish_oldest(stages)
            except RunnerLostError:
                raise
            except BaseException as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def step_several(self) -> None:
        """Plan one step, launch it and those in which the same requests decode on, then retire them all in order."""
        self._take_commands(None)
        launched: list[Pending] = []
        try:
            pending = self._launch()
            while pending is not None:
                launched.append(pending)
                if len(launched) == self.config.num_continuous_decode_steps:
                    break
                pending = self._launch_again(pending)
        finally:
            interrupts: list[BaseException] = []
            for pending in launched:
                try:
                    self._finish(pending)
                except BaseException as error:  # the others are in flight
                    interrupts.append(error)
            if interrupts:
                raise interrupts[-1]

    def _exchange_weights(self, last: Pending | None) -> None:
        """Retire what is in flight; later steps have the weights that have been read."""
        if self._stages is None:
            self._finish(last)
        else:
            self._finish_all(self._stages)
        answer, num_preempted = self._rest.exchange()
        self._num_preempted += num_preempted
        self._send([answer])

    @property
    def asleep(self) -> frozenset[SleepTag]:
        """What sleeps, see `Sleep`; weights that were dropped sleep until they are updated. Empty: steps go on."""
        return self._rest.asleep

    @property
    def weights(self) -> tuple[str, str | None]:
        """The name of the weights, and their part of the keys of prefixes; empty and None: those that it began with."""
        return self._state.weight_version, self._rest.keys.weights

    @property
    def prefix_cache(self) -> PrefixCache:
        """The current prefix cache, to be read in the engine's thread; it is replaced if it is found broken."""
        assert not isinstance(self._kv, DividedKV), "each rank has a cache"
        return self._kv.cache

    @property
    def frozen_s(self) -> float:
        """For how long requests wait although nothing runs and memory is free; 0 while admission goes on."""
        return self._watchdog.stuck_s

    def counters(self) -> Counters:
        """Return the counters, in constant time."""
        return Counters(
            num_steps=self._num_steps,
            num_tokens=self._num_tokens,
            num_preempted=self._num_preempted,
            num_spared=self._planner.num_spared,
            num_starved=self._planner.num_starved,
            num_violations=self._num_violations,
            num_waiting=len(self._state.waiting),
            num_running=len(self._state.running),
            num_draining=len(self._state.draining),
            num_held=len(self._state.held),
            num_stuck=len(self._state.waiting) if self._watchdog.is_stuck else 0,
            num_pages=self._kv.num_pages,
            num_free_pages=self._kv.num_free,
            num_cached_pages=self._kv.num_cached,
            free_pages_by_rank=self._kv.num_free_by_rank,
            num_retained_pages=self._kv.num_retained,
            speculation=None if self._speculation is None else self._speculation.counts(),
        )

    def measure(self, clock: Callable[[], float] = time.monotonic) -> Measures:
        """Measure steps from now on, and return what is counted; a second call changes nothing.

        `clock` must agree with the engine's clock, but be a separate one: readings of that are inputs of decisions.
        """
        if self._measures is None:
            self._measures = Measures(clock, low_priority_first=self.config.low_priority_first)
        return self._measures

    def measurement(self) -> Measurement | None:
        """Return what has been measured, or None if `measure` was not called."""
        measures, waiting = self._measures, self._state.waiting
        if measures is None:
            return None
        preempted: dict[str, int] = {}
        for priority, num in waiting.preempted.items():
            name = measures.priority(priority)
            preempted[name] = preempted.get(name, 0) + num
        return Measurement(
            stage_s={stage.name.lower(): measures.stage_s[stage] for stage in Stage},
            step_s=counts_of(measures.step_s),
            step_tokens=counts_of(measures.step_tokens),
            num_prefill_tokens=measures.num_prefill_tokens,
            num_decode_tokens=measures.num_decode_tokens,
            num_available_pages=self._kv.num_available,
            num_evicted_pages=self._kv.num_evicted,
            preempted=preempted,
            queue=measures.queue(self._state),
            num_parked=len(waiting) - waiting.num_candidates - waiting.num_at_quota,
            num_at_quota=waiting.num_at_quota,
            num_compiling=len(self._state.compiling),
            num_recalling=waiting.num_recalling,
            tiers=self._kv.tier_counts(),
            experts=None if self._expert_rows is None else self._expert_rows.load(),
            adapters=self._adapter_use(),
        )

    def adapter_versions(self) -> dict[str, str]:
        """Return the versions of the loaded adapters by name, which the keys of the cache have."""
        return {} if self._kv.adapters is None else self._kv.adapters.versions

    def _adapter_use(self) -> AdapterUse | None:
        if self._kv.adapters is None:
            return None
        running, waiting = set[str](), set[str]()
        for request in self._state.by_id.values():
            if request.adapter is not None:
                (waiting if request.row < 0 else running).add(request.adapter.name)
        return AdapterUse(
            num_slots=self._kv.adapters.num_slots, running=tuple(sorted(running)), waiting=tuple(sorted(waiting))
        )

    @property
    def runner(self) -> Runner:
        """What computes the steps."""
        return self._runner

    def watch(self, *, is_on: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to record steps for `view`, or stop; it costs some microseconds per step and request while it is on.

        `clock` is that of `measure`.
        """
        self._watch_clock = clock
        if not is_on:
            self._record = None
        elif self._record is None:
            self._record = StepRecord(num_pages=self._kv.num_ids, page_size=self._kv.page_size)

    def view(
        self,
        *,
        max_requests: int = 300,
        wanted: Sequence[str] = (),
        shows_tree: bool = False,
        shows_tokens: bool = False,
    ) -> EngineView:
        """Return what the engine shows of itself, with the steps since the last call if they are recorded.

        Args:
            max_requests: the most requests in it, those that run first.
            wanted: ids of requests that are in it even if they wait behind these.
            shows_tree: whether it has the largest branches of the prefix cache.
            shows_tokens: whether these have their first token ids.
        """
        began_s, state, record = time.perf_counter(), self._state, self._record
        now_s, sign = self._watch_clock(), -1 if self.config.low_priority_first else 1
        held_pages = self._kv.held_pages()
        steps, first_tokens_s = ((), ()) if record is None else record.take()
        tree = None
        if shows_tree:
            if record is not None:
                record.forget_free(held_pages)
            tree = view_tree(self._kv, None if record is None else record.hits, shows_tokens=shows_tokens)
        requests = view_requests(state, self._kv, now_s, max_requests=max_requests, sign=sign, wanted=wanted)
        pool = view_pool(state, self._kv, held_pages)
        return EngineView(
            now_s=now_s,
            paused=state.paused,
            num_rows=self.config.num_rows,
            num_steps=self._num_steps,
            num_preempted=self._num_preempted,
            num_requests=len(state.by_id) + len(state.draining),
            requests=tuple(requests),
            pool=pool,
            tree=tree,
            steps=steps,
            first_tokens_s=first_tokens_s,
            took_s=time.perf_counter() - began_s,
        )

    def violation(self) -> str | None:
        """Return what is wrong with the accounting of KV memory, or None; reads the whole pool, for tests."""
        return self._kv.violation(self._state.holders, is_recalling=bool(self._state.waiting.num_recalling))

    def close(self) -> None:
        """Release the runner's threads and memory, and store the KV that must survive the process."""
        self._intake.close()
        self._mask_work.close()
        try:
            self._kv.close()  # ranks on other hosts copy their parts of what must be stored
        finally:
            self._runner.close()

    def _take_commands(self, last: Pending | None) -> None:
        idle = last is None and self._state.is_resting
        timeout_s = 0.0
        if idle:
            if self._state.is_idle:
                if self._was_idle:  # a command that is there already does not wait for the check
                    self._check_invariant()
                    if isinstance(self._runner, CheckedRunner):
                        self._runner.check()
                    if self._speculation is not None:
                        self._speculation.report()
                self._send(self._intake.flush_idle())
            self._kv.poll()
            timeout_s = self._idle_wait_s if self._was_idle else 0.0
        elif last is None and not self._state.running:
            self._kv.poll()  # waiting requests may need pages that a cancelled copy still holds
            if self._can_only_wait():
                time.sleep(_RECALL_WAIT_S)  # an inbox in memory does not wait, and a busy loop would slow the copies
        elif self._publishing is not None:
            self._kv.poll()  # pages go on to the shared cache while others are computed
        if self._publishing is not None and self._publishing.is_holding:
            self._send(self._publishing.ready())
        commands = self._inbox.receive(timeout_s=timeout_s)
        self._was_idle = idle and not commands
        if idle and self._measures is not None:
            self._measures.skip()
        if commands:
            now_s = self._clock()
            answers = self._intake.take_all(commands, now_s)
            if self._observer is not None:
                self._observer.took(commands, [deltas[-1] if deltas else None for deltas in answers], now_s)
            self._send([delta for deltas in answers for delta in deltas])
        if self._state.compiling or self._state.num_loading:
            self._send(self._intake.poll())
        if self.config.max_queue_s is not None:
            self._send(self._intake.expire(self._clock()))

    @property
    def _idle_wait_s(self) -> float:
        """How long to wait for commands while nothing runs."""
        is_holding = self._publishing is not None and self._publishing.is_holding
        return _RECALL_WAIT_S if is_holding else _IDLE_WAIT_S

    def _can_only_wait(self) -> bool:
        """Return whether passes are useless now: a recall or a grammar must end first, or many have planned nothing."""
        state = self._state
        return (
            bool(state.waiting.num_recalling or state.compiling or state.num_loading)
            or self._watchdog.num_passes > _BARREN_PASSES
        )

    def _launch(self) -> Pending | None:
        state, measures = self._state, self._measures
        if state.held:
            self._num_preempted += self._planner.settle(state)
        if state.paused != "no" or not (len(state.waiting) or state.running):
            if self._watchdog.num_passes:
                self._watchdog.reset()
            if state.paused == "retract":
                self._num_preempted += self._planner.retract(state)
            if measures is not None:
                measures.skip()  # otherwise an idle engine would send a new pulse whenever it looks for commands
            return None
        if measures is not None:
            measures.mark(INTAKE)
        now_s = self._clock()
        plan = self._planner.plan(state, now_s)
        self._num_preempted += plan.num_preempted
        if not plan.grants:
            self._watchdog.nothing_planned(state, self._kv, now_s)
        elif self._watchdog.num_passes:
            self._watchdog.reset()
        return self._launch_plan(plan)

    def _launch_again(self, last: Pending) -> Pending | None:
        """Launch the step in which the requests of a step in flight decode on, if they can without another decision."""
        if not last.is_decode or last.constrained:
            return None
        plan = self._planner.plan_again(last.grants)
        return self._launch_plan(plan) if plan.grants else None

    def _launch_plan(self, plan: StepPlan) -> Pending | None:
        state, measures = self._state, self._measures
        if measures is not None:
            measures.mark(PLAN)
        grants, speculation, is_followed = plan.grants, self._speculation, True
        if speculation is not None and grants:
            grants = speculation.extend(grants)
            is_followed = speculation.is_followed
        if self._observer is not None:
            self._observer.planned(plan, grants, state, self._kv.num_free)
        if not grants:
            return None
        is_drafting = grants is not plan.grants
        is_decode = plan.is_decode and not is_drafting
        try:
            is_constraining = state.num_constrained > 0
            batch = self._builder.build(
                grants, is_constraining=is_constraining, is_decode=plan.is_decode, is_followed=is_followed
            )
            launched_s = 0.0 if self._pacing is None and self._stages is None else self._clock()
            if self._record is not None:
                launched_s = launched_s or self._watch_clock()
            if measures is not None:
                measures.mark(BUILD)
            handle = self._runner.launch(batch)
        except RunnerLostError:
            raise
        except Exception as error:
            _log.exception("a step could not be launched")
            self._send(self._fail(grants, error))
            return None
        except BaseException as error:  # the runner may not know the rows and pages of this plan
            self._send(self._fail(grants, error))
            raise
        self._num_steps += 1
        num_tokens = batch.num_tokens
        self._num_tokens += num_tokens
        is_long = 0 < self.info.long_step_tokens <= num_tokens
        if measures is not None:
            measures.mark(LAUNCH)
            measured_s = measures.launched(grants, num_tokens=num_tokens, is_decode=is_decode)
            launched_s = launched_s or measured_s
        count_launched(grants, is_decode=is_decode)
        constrained: Sequence[Request] = ()
        if is_constraining:
            for grant in grants:
                grant.request.num_untold = 0
            promising = [grant.request for grant in grants if grant.num_promised]
            waiting: list[int] = batch.constrained.tolist()
            constrained = [promising[index] for index in waiting]
        return Pending(
            grants=grants,
            handle=handle,
            batch=batch,
            constrained=constrained,
            launched_s=launched_s,
            num_masks=num_masks(batch) if constrained else 0,
            is_drafting=is_drafting,
            is_decode=is_decode,
            is_long=is_long,
        )

    def _constrain(self, pending: Pending | None) -> None:
        """Give a step the masks that its draws wait for; the step before it has been retired.

        If that fails, the step fails when it is retired.
        """
        if pending is None or not pending.constrained:
            return
        requests, pending.constrained = pending.constrained, ()
        try:
            handle, vocab_size = pending.handle, self.info.vocab_size
            if not isinstance(handle, ConstrainedHandle):
                name = type(handle).__name__
                raise TypeError(f"handles of steps with grammars must be ConstrainedHandles, got {name}")
            masks = open_masks(pending.num_masks, vocab_size)
            try:
                drafts = handle.drafts()
                check_drafts(drafts, pending.batch, vocab_size=vocab_size)
                fill_masks(requests, drafts, masks, work=self._mask_work)
            finally:  # otherwise the device would wait for ever
                handle.constrain(masks)
        except Exception as error:
            _log.exception("a step got no masks")
            pending.failure = error

    def _constrain_between(self, pending: Pending, errors: list[BaseException]) -> None:
        """Give a step its masks while the step before it is retired; an error waits in `errors` until that is done."""
        try:
            self._constrain(pending)
        except BaseException as error:
            errors.append(error)

    def _finish(self, pending: Pending | None, *, following: Pending | None = None) -> None:
        """Wait for a step and retire it; the next step gets its masks before answers without a grammar are made."""
        if pending is None:
            return
        measures = self._measures
        self._constrain(pending)
        if measures is not None:
            measures.mark(CONSTRAIN)
        result: StepResult | None = None
        failure: Exception | None = None
        interrupt: BaseException | None = None
        while result is None and failure is None:
            try:
                found = pending.handle.wait()
                failure = pending.failure
                if failure is None:
                    result = self._checked(found, pending)
            except RunnerLostError:
                raise
            except Exception as error:  # ends the requests of the step, not the engine
                _log.exception("a step failed")
                failure = error
            except BaseException as error:  # the device still uses the requests' pages: wait again, raise later
                interrupt = error
                if self._observer is not None:
                    self._observer.waited(None, is_interrupted=True)
        if self._observer is not None:
            self._observer.waited(result)
        if measures is not None:
            measures.mark(WAIT)
            measures.ended(launched_s=pending.launched_s)
        if self._pacing is not None:
            self._pacing.ended(pending.grants, launched_s=pending.launched_s, now_s=self._clock())
        if self._record is not None:
            self._record.ended(pending.grants, launched_s=pending.launched_s, now_s=self._watch_clock())
        if pending.is_decode and not self._state.num_constrained:  # so nothing was foreseen
            for grant in pending.grants:
                request = grant.request
                request.num_in_flight -= 1
                request.num_unseen -= 1
        else:
            for grant in pending.grants:
                request = grant.request
                request.num_in_flight -= 1
                request.num_unseen -= grant.num_promised - request.num_foreseen
        if result is not None:
            if self._speculation is not None:
                self._speculation.settle(pending.grants, result, is_drafting=pending.is_drafting)
            errors: list[BaseException] = []
            between = None
            if following is not None and 0 < following.num_masks == len(following.constrained):  # it has no drafts
                between = partial(self._constrain_between, following, errors)
            self._send(retire(self._state, self._kv, pending.grants, result, batch=pending.batch, between=between))
            interrupt = errors[0] if errors else interrupt
        elif failure is not None:
            self._send(self._fail(pending.grants, failure))
        if measures is not None:
            measures.mark(RETIRE)
        if interrupt is not None:
            raise interrupt

    def _checked(self, result: StepResult, pending: Pending) -> StepResult:
        """Return the result of a step if it keeps all rules; otherwise raise."""
        num_top = None
        if self._state.num_reported:
            requests = [grant.request for grant in pending.grants if grant.num_promised]
            num_top = [-1 if one.finish is not None else num_top_of(one) for one in requests]
        return check_result(
            result,
            pending.batch,
            vocab_size=self.info.vocab_size,
            vector_size=self.info.vector_size,
            num_top=num_top,
            expert_shape=self.info.expert_shape,
        )

    def _fail(self, grants: Sequence[Grant], failure: BaseException) -> list[Delta]:
        """End the requests of a step that failed."""
        reason = str(failure) or type(failure).__name__
        refusal = Refusal(message=f"the step of this request failed: {reason}", code="step_failed")
        alive = [grant.request for grant in grants if grant.request.finish is None]
        deltas = [end(self._state, self._kv, request, FinishReason.ERROR, refusal=refusal) for request in alive]
        release_drained(self._state, self._kv)
        return deltas

    def _send(self, deltas: Sequence[Delta]) -> None:
        if self._publishing is not None and self._publishing.is_active:
            deltas = self._publishing.pass_on(deltas)
        if deltas:
            self._outbox.send(deltas)

    def _check_invariant(self) -> None:
        violation = self._kv.violation(())
        if violation is not None:
            self._num_violations += 1
            _log.error("KV accounting is wrong while idle; the cache is cleared: %s", violation)
            self._kv.heal()
            self._state.waiting.watch_again()
