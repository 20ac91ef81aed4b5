"""Runs a scenario, with checks after every step and at the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from encoded_runner import EncodedRunner
from pagewood.engine.api import (
    Abort,
    Delta,
    EngineConfig,
    FinishReason,
    LoadAdapter,
    Pause,
    PauseRequest,
    PoolingParams,
    Resume,
    ResumeRequest,
    Retain,
    Rows,
    SetPriority,
    Submit,
    TokenLogprob,
    UnloadAdapter,
)
from pagewood.engine.assemble import assemble, page_allocator
from pagewood.engine.assembly.policies import Policies
from pagewood.engine.core.adapter import LoadedAdapter
from pagewood.engine.core.loop import Engine, EngineInfo, Pending, Runner, RunnerLostError
from pagewood.engine.core.memory.caches import PrefixCache
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.memory.page_groups import PageGroups
from pagewood.engine.core.request import Request
from pagewood.engine.core.weights import ReadWeights, ServedWeights
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.ranks.notes import StepNotes
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from pagewood.engine.runner.ranks.segment import Segment
from pagewood.engine.testing.echo import (
    EXPERT_SHAPE,
    STATE_SIZE,
    EchoRunner,
    echo_experts,
    echo_logprob,
    oracle_states,
    oracle_tokens,
    oracle_vector,
)
from pagewood.engine.testing.echo_grammar import EchoCompiler, allowed_tokens, text_inside
from pagewood.engine.testing.random_drafting import RandomDrafting
from pagewood.engine.weight_commands import Sleep, UpdateWeights, WakeUp, WeightCommand
from pagewood.schedpolicy import SlotShares
from scenarios.faulty import FaultyRunner
from scenarios.scenario import VOCAB_SIZE, Arrival, Scenario
from scenarios.updated_outputs import UpdatedOutputs
from thread_ranks import NotedRunner, ThreadRanks

T = TypeVar("T")
MakeCaches = Callable[[NDArray[np.uint64], int], Callable[[], PrefixCache]]
"""(KV memory `[num_pages * page_size] uint64`, page size) -> a function that makes prefix caches for that memory."""

MakeCachesOfStates = Callable[[NDArray[np.uint64], int, NDArray[np.uint64]], Callable[[], PrefixCache]]
"""The same with memory of states `[num_states, STATE_WORDS]`."""

MakeFramedCaches = Callable[[NDArray[np.uint64], int, PageGroups], Callable[[], PrefixCache]]
"""The same for memory of frames, and the groups that know them."""

_EOS = 0
STATE_WORDS = 5
"""Words of a state, so that it fills several pages if these are short."""
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


def run_scenario(
    scenario: Scenario,
    *,
    after_step: Callable[[Engine], None] | None = None,
    make_caches: MakeCaches | None = None,
    make_framed_caches: MakeFramedCaches | None = None,
    make_caches_of_states: MakeCachesOfStates | None = None,
    make_runner: MakeRunner | None = None,
) -> Report:
    """Run a scenario to its end; every answer must equal that of the sequential oracle.

    Args:
        scenario: the traffic.
        after_step: another check, called after every step.
        make_caches: for prefix caches that copy KV memory; None: the configured cache.
        make_framed_caches: the same for a scenario whose layers have windows.
        make_caches_of_states: the same for a scenario whose layers are recurrent.
        make_runner: makes another runner of the echo model, whose tokens must not depend on seeds; None: an
            `EchoRunner` with the faults of the scenario.

    A request that is hit by a fault of the runner must end with an error, and no other request may.

    Raises:
        AssertionError: a wrong token, a wrong end, broken accounting, or no progress.
        RunnerLostError: ranks differ.
    """
    run = _Run(scenario, make_caches, make_framed_caches, make_caches_of_states, make_runner)
    try:
        return run.to_the_end(after_step)
    except RunnerLostError:
        run.close()
        raise


def _few_passes(scenario: Scenario) -> Policies | None:
    """Let requests soon be owed a slot for their adapter; None: as the engine does, for a replay of its log."""
    if scenario.config.decision_log is not None or not scenario.config.max_adapters:
        return None
    return Policies(slots=SlotShares(scenario.config.max_adapters, max_passes=len(scenario.arrivals) % 5))


class _Loading(Generic[T]):
    """A folder that is read until some step."""

    def __init__(self, loaded: T, done: Callable[[], bool]) -> None:
        self._loaded = loaded
        self.done = done

    def result(self) -> T:
        """Return what was in it."""
        return self._loaded


class _Adapters:
    """A source of adapters that are numbers; a folder says until which step it is read, the number, and the tokens
    that activate it."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self.contents: dict[int, int] = {}
        """By number of the engine."""  # contents written by: keep

    def load(self, folder: str) -> _Loading[LoadedAdapter]:
        """Begin to read a folder."""
        until_step, content, *invocation = map(int, folder.split())
        loaded = LoadedAdapter(version=f"{content} {invocation}", weights=content, invocation=tuple(invocation))
        return _Loading(loaded, lambda: self._step() >= until_step)

    def keep(self, number: int, weights: object) -> None:
        """Keep what an adapter is made of."""
        assert isinstance(weights, int)
        self.contents[number] = weights

    def forget_unused(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class _Weights:
    """A source of weights that are numbers; a folder says until which step it is read, and the number."""

    def __init__(self, step: Callable[[], int], runner: Callable[[], object]) -> None:
        self._step = step
        self._runner = runner
        self._content = 0
        self._sleeps = False

    def read(self, command: WeightCommand) -> _Loading[ReadWeights]:
        """Begin to read."""
        self._sleeps = isinstance(command, Sleep) and "kv_cache" in command.tags
        if isinstance(command, Sleep | WakeUp):
            return _Loading(ReadWeights(digest=""), lambda: True)
        assert isinstance(command, UpdateWeights)
        assert command.folder is not None
        until_step, self._content = map(int, command.folder.split())
        return _Loading(ReadWeights(digest=str(self._content)), lambda: self._step() >= until_step)

    def exchange(self) -> str | None:
        """Let the echo model be made of the number that was read last."""
        runner = self._runner()
        assert isinstance(runner, FaultyRunner)
        runner.echo.weights = self._content
        if self._sleeps:
            runner.echo.forget_kv()
        return None

    def close(self) -> None:
        """Do nothing."""


class _Run:
    """One run of a scenario."""

    def __init__(
        self,
        scenario: Scenario,
        make_caches: MakeCaches | None,
        make_framed_caches: MakeFramedCaches | None,
        make_caches_of_states: MakeCachesOfStates | None,
        make_other_runner: MakeRunner | None,
    ) -> None:
        self._scenario = scenario
        self._make_other_runner = make_other_runner
        self._window = None if None in scenario.windows else scenario.windows[-1]
        """Positions that a token sees, itself included; None: all."""
        page_size = scenario.config.page_size
        self._memory = np.empty(scenario.num_pages * len(scenario.windows) * page_size, np.uint64)
        self._states = np.empty((scenario.num_states, STATE_WORDS), np.uint64)
        self._inbox = MemoryInbox()
        self._outbox = MemoryOutbox()
        self._runner: WatchedRunner | None = None
        self._step = 0
        self._outputs: dict[str, list[int]] = {}
        self._ends: dict[str, Delta] = {}
        self._logprobs: dict[str, list[TokenLogprob]] = {}
        self._prompt_logprobs: dict[str, list[TokenLogprob]] = {}
        self._rows: dict[str, list[tuple[Rows | None, Rows | None]]] = {}
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
        self._adapters = _Adapters(lambda: self._step)
        self._updates = UpdatedOutputs()
        self._drafting = RandomDrafting(
            max_tokens=scenario.max_drafts,
            seed=len(scenario.arrivals),
            is_exact=scenario.guess_quality == 1.0
            and not scenario.faults
            and not scenario.updates  # drafts do not know which KV is of which weights
            and make_other_runner is None,
        )
        info = EngineInfo(
            model_name="echo",
            max_length=scenario.max_length,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(_EOS,),
            num_pages=scenario.num_pages,
            page_size=scenario.config.page_size,
            num_pools=scenario.num_pools,
            windows=scenario.windows,
            num_states=scenario.num_states,
            state_interval=scenario.state_interval,
            vector_size=STATE_SIZE,
            expert_shape=EXPERT_SHAPE if make_other_runner is None else None,
            reports_states=make_other_runner is None,
            reports_kept=make_other_runner is None,
            long_step_tokens=scenario.long_step_tokens,
        )
        allocator = None if scenario.num_pools > 1 else page_allocator(scenario.config.resolved(), info)
        make_cache = None if make_caches is None else make_caches(self._memory, page_size)
        if make_framed_caches is not None:
            assert isinstance(allocator, PageGroups)
            make_cache = make_framed_caches(self._memory, page_size, allocator)
        if make_caches_of_states is not None:
            make_cache = make_caches_of_states(self._memory, page_size, self._states)
        self._engine = assemble(
            scenario.config,
            drafting=self._drafting if scenario.max_drafts else None,
            drafts_constrained=True,
            adapters=self._adapters if scenario.config.max_adapters else None,
            policies=_few_passes(scenario),
            weights=ServedWeights(_Weights(lambda: self._step, lambda: self._runner)) if scenario.updates else None,
            compiler=EchoCompiler(random.Random(scenario.num_pages), VOCAB_SIZE),
            info=info,
            make_runner=self._make_runner,
            make_cache=make_cache,
            allocator=allocator,
            inbox=self._inbox,
            outbox=self._outbox,
            clock=lambda: float(self._step),
        )
        self._engine.measure(lambda: float(self._step))

    def close(self) -> None:
        """End what is left of a run that has failed."""
        self._engine.close()

    def to_the_end(self, after_step: Callable[[Engine], None] | None) -> Report:
        scenario, engine = self._scenario, self._engine
        last_event = max(max(a.at_step, a.abort_at_step or 0) for a in scenario.arrivals)
        last_event = max(last_event, *(end for _, end, _ in scenario.pauses), 0)
        last_event = max(last_event, *(a.hold[1] for a in scenario.arrivals if a.hold is not None), 0)
        last_event = max(last_event, *(load.until_step for load in scenario.adapters), 0)
        last_event = max(last_event, *(update.until_step + 3 for update in scenario.updates), 0)
        last_event = max(last_event, *(step for step, _, _ in scenario.retains), (scenario.abort_all_at or 0) + 2)
        num_positions = sum(len(a.prompt) + (a.sampling.max_tokens or scenario.max_length) for a in scenario.arrivals)
        deadline = last_event + 20 * num_positions + 100
        pending: Pending | None = None
        while self._step <= last_event or len(self._ends) < len(scenario.arrivals) or pending is not None:
            assert self._step < deadline, f"no progress: {engine.counters()}"
            self._arrive()
            self._pause()
            if scenario.updates:
                self._updates.note_rows(self._requests_with_rows())
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
        num_free = counters.num_free_pages + counters.num_cached_pages
        # If all layers have windows, cached pages without memory may have the ids that free memory would need.
        assert num_free == scenario.num_pages or (self._window is not None and num_free < scenario.num_pages)
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

    def _make_runner(self, kv: AnyKV) -> Runner:
        if self._make_other_runner is not None:
            self._runner = self._make_other_runner(self._scenario)
            return self._runner
        make_echo = partial(
            EchoRunner,
            num_rows=self._scenario.config.num_rows,
            max_length=self._scenario.max_length,
            num_pages=self._scenario.num_pages * len(self._scenario.windows),
            num_pools=self._scenario.num_pools,
            windows=self._scenario.windows,
            page_size=self._scenario.config.page_size,
            vocab_size=VOCAB_SIZE,
            held_pages=kv.held_frames,
            memory=self._memory,
            guess_quality=self._scenario.guess_quality,
            leaves_out=self._scenario.leaves_out,
            requests=self._requests_with_rows,
            num_states=self._scenario.num_states,
            state_memory=self._states,
            adapters=self._adapters.contents.__getitem__ if self._scenario.config.max_adapters else None,
        )
        self._runner = FaultyRunner(
            lambda broken: make_echo(broken=broken),
            faults=self._scenario.faults,
            requests=self._requests_with_rows,
            failed=self._failed.add,
        )
        runner = EncodedRunner(self._runner) if self._scenario.is_encoded else self._runner
        if self._scenario.num_ranks == 1:
            return runner

        def make_noted(segment: Segment, rank: int) -> NotedRunner:
            own = runner if rank == 0 else make_echo(held_pages=None, memory=None, state_memory=None, requests=None)
            return NotedRunner(own, StepNotes(segment, rank))

        group = ThreadRanks(self._scenario.num_ranks, make_noted)
        return RankedRunner(group.runner, group)

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
                        adapter=arrival.adapter,
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
        for load in self._scenario.adapters:
            if load.at_step == self._step and load.content:
                folder = " ".join(map(str, (load.until_step, load.content, *load.invocation)))
                name = f"load {load.name}"
                self._inbox.put(
                    LoadAdapter(request_id=name, name=load.name, folder=folder, replaces=True, is_pinned=load.is_pinned)
                )
            if load.until_step == self._step and not load.content:
                self._inbox.put(UnloadAdapter(request_id=f"unload {load.name}", name=load.name))
        for number, update in enumerate(self._scenario.updates):
            if update.at_step == self._step:
                folder, name = f"{update.until_step} {update.content}", f"update {number}"
                self._inbox.put(
                    UpdateWeights(request_id=name, folder=folder, version=str(update.content), old_kv=update.old_kv)
                )
        for start, end, tag in self._scenario.naps:
            if start == self._step:
                self._inbox.put(Sleep(request_id=f"sleep {start}", tags=(tag,)))
            if end <= self._step and tag in self._engine.asleep:  # refused as long as it falls asleep
                self._inbox.put(WakeUp(request_id=f"wake {self._step}"))
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
        assert kept.num_retained <= kept.num_locked

    def _collect(self) -> None:
        for delta in self._outbox.take():
            if delta.request_id.startswith("unload"):
                continue  # it may be unloaded twice
            if delta.request_id.startswith("wake"):
                continue
            if not delta.request_id.isdecimal():
                refused = delta.refusal is not None and delta.refusal.code == "no_retention"
                assert (delta.finish, delta.first) == (FinishReason.REFUSED if refused else FinishReason.STOP, True)
                assert not refused or not self._scenario.config.retained_share
                if delta.request_id.startswith("update"):
                    update = self._scenario.updates[int(delta.request_id.split()[1])]
                    assert delta.weights == str(update.content)
                    self._updates.changed(update)
                continue
            if delta.tokens and self._scenario.updates:
                self._updates.add(delta)
            assert delta.request_id not in self._ends, f"request {delta.request_id} was answered after its end"
            assert delta.first == (delta.request_id not in self._outputs)
            assert delta.carry == (delta.request_id.encode() if delta.first else b"")
            self._check_times(delta)
            self._outputs.setdefault(delta.request_id, []).extend(delta.tokens)
            self._logprobs.setdefault(delta.request_id, []).extend(delta.logprobs)
            self._prompt_logprobs.setdefault(delta.request_id, []).extend(delta.prompt_logprobs)
            self._rows.setdefault(delta.request_id, []).append((delta.experts, delta.states))
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
        num_held = self._scenario.num_pages - found.num_available_pages
        assert num_held == counters.num_retained_pages or (self._scenario.windows[-1] and counters.num_retained_pages)
        assert found.num_parked == found.num_at_quota == found.num_compiling == found.num_recalling == 0

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
            adapter, adapter_start = self._adapter_of(arrival)
            if adapter is None:
                assert last.finish in (FinishReason.REFUSED, FinishReason.ABORT), f"request {name} was accepted"
                assert code in (None, "adapter_not_found", "context_length_exceeded"), f"request {name}: {code}"
                continue
            if arrival.pooling is not None:
                self._check_vector(name, arrival, arrival.pooling)
                continue
            assert not last.vector, f"request {name} has a vector"
            if len(arrival.prompt) + (arrival.sampling.max_tokens or 1) > self._scenario.max_length:
                assert last.finish in (FinishReason.REFUSED, FinishReason.ABORT), f"request {name} was accepted"
                continue
            stop_ids = frozenset(arrival.sampling.stop_token_ids + (() if arrival.sampling.ignore_eos else (_EOS,)))
            if self._scenario.updates:
                self._check_logprobs(name, arrival, output)
                assert last.finish is not FinishReason.ERROR
                self._updates.check(name, arrival.prompt, arrival.sampling, output)
                continue
            is_seeded = self._make_other_runner is None
            expected = oracle_tokens(
                arrival.prompt,
                arrival.sampling if is_seeded else replace(arrival.sampling, temperature=0.0),
                vocab_size=VOCAB_SIZE,
                stop_ids=stop_ids,
                max_length=self._scenario.max_length,
                window=self._window,
                adapter=adapter,
                adapter_start=adapter_start,
                has_states=self._scenario.num_states > 0,
            )
            self._check_logprobs(name, arrival, output)
            self._check_rows(name, arrival, adapter, adapter_start)
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

    def _adapter_of(self, arrival: Arrival) -> tuple[int | None, int]:
        """Return what the adapter of a request was made of when it arrived, and the first position that it computes;
        None: there was none of that name."""
        if arrival.adapter is None:
            return 0, 0
        loads = [load for load in self._scenario.adapters if load.name == arrival.adapter]
        # Within a step, loads end behind the requests that arrive, and unloads are sent behind them.
        before = [load for load in loads if load.until_step < arrival.at_step]
        load = max(before, key=lambda load: load.until_step) if before else None
        if load is None or not load.content:
            return None, 0
        if not load.invocation:
            return load.content, 0
        starts = range(len(arrival.prompt) - len(load.invocation), -1, -1)
        found = (at for at in starts if tuple(arrival.prompt[at : at + len(load.invocation)]) == load.invocation)
        start = next(found, None)
        return (0, 0) if start is None else (load.content, start)

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
        vector = np.frombuffer(last.vector, "<f4")
        adapter, start = self._adapter_of(arrival)
        expected = oracle_vector(
            prompt, pooling, window=self._window, adapter=adapter or 0, start=start,
            has_states=self._scenario.num_states > 0,
        )  # fmt: skip
        assert vector.shape == expected.shape
        assert np.allclose(vector, expected, rtol=1e-6, atol=0), f"request {name}: {pooling} of {len(prompt)} tokens"
        assert (last.num_prompt_tokens, last.num_output_tokens) == (len(prompt), 0)
        assert pooling.kind == "last" or not last.num_cached_tokens

    def _check_rows(self, name: str, arrival: Arrival, adapter: int, adapter_start: int) -> None:
        """Experts and states must be those of each position, in order, up to the one that the last token follows."""
        last, prompt, sampling = self._ends[name], arrival.prompt, arrival.sampling
        is_cut = last.finish in (FinishReason.ABORT, FinishReason.ERROR)
        states = oracle_states(
            [*prompt, *self._outputs[name]], window=self._window, adapter=adapter, start=adapter_start,
            has_states=self._scenario.num_states > 0,
        )  # fmt: skip
        asked = ((sampling.routed_experts_from, echo_experts(states)), (sampling.hidden_states_from, states))
        for (start, expected), parts in zip(asked, zip(*self._rows[name], strict=True), strict=True):
            rows = Rows.joined(parts)
            num = 0 if rows is None else rows.shape[0]
            first = len(prompt) - 1 if start == -1 else start or 0
            due = 0 if start is None else max(0, len(prompt) + last.num_output_tokens - 1 - first)
            assert num == due or (is_cut and (num >= due or not last.num_output_tokens)), (
                f"request {name}: {num} rows, not {due}"
            )
            assert rows is None or rows.data == expected[first : first + num].tobytes(), f"request {name}: its rows"

    def _check_logprobs(self, name: str, arrival: Arrival, output: Sequence[int]) -> None:
        """What was reported must be that of each token at its position, in order."""
        sampling, prompt = arrival.sampling, arrival.prompt
        expected: list[TokenLogprob] = []
        if sampling.logprobs is not None:
            num_top = sampling.logprobs
            most, num_kept = sampling.kept_tokens, 0
            for i, token in enumerate(output):
                entry = echo_logprob(token, len(prompt) + i, num_top, has_kept=most is not None)
                num_kept += len(entry.kept or b"") // 4
                expected.append(entry if most is None or num_kept <= most else entry._replace(kept=None))
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
