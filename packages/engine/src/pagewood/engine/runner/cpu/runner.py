"""The runner of a CPU: one worker thread computes batches in the order in which they are launched.

A thread that waits for a step helps to compute it. So the engine's thread is one of the compute threads; while it
plans, the others continue without it.

Legend: G grants, S sampled grants, W wanted tokens, V vocab_size, E elements of a hidden state.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from operator import sub
from time import perf_counter
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.core.messages.result import EXCLUDED, StepResult
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.observe.profiling import Span
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, Column, Outcome, collect, find_live, open_gate, update
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.drafts import drafting
from pagewood.engine.runner.cpu.drafts.ahead import HeldDrafts, drafts_of, grants_ahead
from pagewood.engine.runner.cpu.drafts.row_lookup import RowLookup
from pagewood.engine.runner.cpu.program import reports
from pagewood.engine.runner.cpu.program.adapters import CPUAdapters
from pagewood.engine.runner.cpu.program.adjustments import RowAdjustments
from pagewood.engine.runner.cpu.program.attention import attention_over
from pagewood.engine.runner.cpu.program.division import RequestDivision
from pagewood.engine.runner.cpu.program.drafted_runs import DraftedRuns
from pagewood.engine.runner.cpu.program.exchange import Exchange, StepWatch
from pagewood.engine.runner.cpu.program.images import CPUImages
from pagewood.engine.runner.cpu.program.passes import Grants, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.processing import Processing
from pagewood.engine.runner.cpu.program.recurrence import CPURecurrence
from pagewood.engine.runner.cpu.program.spans import RunnerSpans
from pagewood.engine.runner.cpu.program.step_program import StepWriter
from pagewood.engine.runner.cpu.program.tape import Buffer, MeasuredRun, Program, Run, integers_at
from pagewood.engine.runner.processors import Process, RowProcessors
from pagewood.engine.runner.worker import Later, Worker
from pagewood.kvpool import LayerGroups
from pagewood.kvpool.latent_storage import LatentStorage
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.storage import KVStorage

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
Array = TypeVar("Array", bound=NDArray[Any])
Result = TypeVar("Result")
_NOTHING = drafting.DraftCounts()
_NONE = np.empty(0, np.int32)
_PREPARED_BYTES = 64 << 20  # of logits, at most
_MAX_PREPARED = 256
"""Tokens of a step for which the program is written at start, at most; writing it anew takes milliseconds."""


class CPUStepHandle(Generic[Result]):
    """A launched step."""

    __slots__ = ("_constraint", "_has_next", "_result", "_runs")

    def __init__(
        self,
        runs: Sequence[Later[Run | MeasuredRun | None]],
        constraint: _Constraint | None,
        result: Later[Result],
        has_next: Callable[[], bool],
    ) -> None:
        """Make `wait` compute `runs` one after the other, and then return `result`.

        Args:
            runs: of the step.
            constraint: what some draws wait for.
            result: of the step.
            has_next: returns whether another step has been launched behind it.
        """
        self._has_next = has_next
        self._runs = runs
        self._constraint = constraint
        self._result = result

    def drafts(self) -> Sequence[Sequence[int]]:
        """Help to compute the drafts of the grants of `Batch.constrained`, and return them."""
        if self._constraint is None:
            return ()
        if self._constraint.is_drafting and self._runs:
            run = self._runs[0].take()
            if run is not None:
                run.help()
        return self._constraint.drafts.take()

    def constrain(self, masks: Int32) -> None:
        """Let the tokens of `Batch.constrained` be drawn.

        Args:
            masks: `[>= M and drafts, words of a mask]`; they are not copied.

        Raises:
            RuntimeError: the step has no such tokens.
        """
        if self._constraint is None:
            raise RuntimeError("no token of this step is constrained")
        self._constraint.open(masks)

    def wait(self) -> Result:
        """Help to compute the step until it is done, and return its result.

        Raises:
            Exception: the step failed.
        """
        for later in self._runs:
            run = later.take()
            if run is not None:
                # If there is a step behind this one, the worker first begins it; only then does this thread go on.
                run.help(follows=later is self._runs[-1] and self._has_next())
        return self._result.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Constraint:
    """What the worker and the engine exchange about the constrained grants of a step."""

    num: int
    """M, the number of constrained grants."""
    is_drafting: bool
    """Whether any of them may have drafts."""
    drafting: Later[Run | MeasuredRun | None] = field(default_factory=Later)
    """The instructions that draft, if `is_drafting`; None: nothing runs."""
    drafts: Later[Sequence[Sequence[int]]] = field(default_factory=Later)
    """The drafts of each grant."""
    gate: Int64
    """[1 + rows], where the program waits for their masks; see `Column.GATE`."""  # written by: cpu.runner
    masks: list[Int32] = field(default_factory=list)
    """The masks, once they are there; the gate has their address."""  # written by: cpu.runner

    @classmethod
    def of(cls, batch: Batch, *, num_rows: int) -> _Constraint | None:
        """Return the constraint of a batch, or None if no grant is constrained."""
        if len(batch.constrained) == 0:
            return None
        num, is_drafting = len(batch.constrained), int(batch.num_promised[batch.constrained].max()) > 1
        constraint = cls(num=num, is_drafting=is_drafting, gate=np.zeros(1 + num_rows, np.int64))
        if not is_drafting:
            constraint.gate[1 + batch.rows[batch.sampled[batch.constrained]]] = np.arange(1, num + 1)
            constraint.drafts.give([()] * num)
        return constraint

    def give_drafts(self, batch: Batch, drafts: Sequence[Sequence[int]]) -> None:
        """Give the engine the drafts of each grant, to fill their masks; the program does not read the gate yet."""
        nums = np.array([1 + len(own) for own in drafts])
        self.gate[1 + batch.rows[batch.sampled[batch.constrained]]] = np.cumsum(nums) - nums + 1
        self.drafts.give(drafts)

    def open(self, masks: Int32) -> None:
        """Give the program the masks, so that it goes on with the draws."""
        self.masks.append(masks)
        open_gate(self.gate, masks.ctypes.data)


@dataclass(slots=True, kw_only=True)
class _Step:
    """A batch that is ready for the worker."""

    batch: Batch
    grants: Grants
    """The grants that are computed."""  # written by: _leave_out
    kept: Int32 | None = None
    """[<= S], which of the batch's sampled grants are computed; None: all."""  # written by: _leave_out
    samples: bool
    """Whether tokens are drawn; otherwise the logits of all tokens of sampled grants are computed."""
    run: Later[Run | MeasuredRun | None] = field(default_factory=Later)
    """The instructions to compute, once their inputs are in place; None: nothing runs."""
    constraint: _Constraint | None = None
    """What some draws wait for; None: no draw waits."""
    processing: Processing | None = None
    """Functions that change logits before tokens are drawn; None: no functions."""
    kept_alive: Sequence[NDArray[Any]] = ()
    """Arrays whose addresses are in its scopes."""  # written by: cpu.runner

    def give_up(self) -> None:
        """Release all waiters; nothing runs."""
        self.run.give(None)
        if self.processing is not None:
            self.processing.rest.give(None)
        if self.constraint is not None and self.constraint.is_drafting:
            self.constraint.drafting.give(None)
            self.constraint.drafts.give([()] * self.constraint.num)

    def runs(self) -> tuple[Later[Run | MeasuredRun | None], ...]:
        """Return the runs of its instructions, in their order."""
        runs = (self.run,)
        if self.constraint is not None and self.constraint.is_drafting:
            runs = (self.constraint.drafting, self.run)
        return runs if self.processing is None else (*runs, self.processing.rest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KnownRows:
    """What a stage knows after a step of the rows that have yielded tokens. Legend: S such rows."""

    tokens: Int32
    """The new ones, as they stand in the table."""
    lengths: Int32
    """[S]"""
    pages: Int32
    """[S, pages of a row]"""


class CPURunner:
    """Computes batches on a worker thread, and owns the KV memory and the tables of tokens, lengths and pages.

    The model is recorded on a tape once, for steps up to some number of tokens; a step only fills in its numbers.

    Invariant: the worker starts steps and keeps their results in the order of the launches, so a step can read tokens
    that the step before it samples. Use it from one thread.
    """

    __slots__ = (
        "_adapters", "_adjustments", "_attention", "_clock", "_division", "_drafter", "_finder", "_full", "_held",
        "_helpers", "_images", "_is_stage", "_latest", "_lookup", "_lookups", "_max_drafts", "_model", "_now",
        "_num_helpers", "_num_threads", "_page_size", "_plain", "_processors", "_reported", "_rotations", "_rows",
        "_runs", "_spans", "_watch", "_worker", "_writer",
    )  # fmt: skip

    def __init__(
        self,
        model: Decoder[Buffer],
        storage: KVStorage | LatentStorage,
        kernel: StepKernel,
        *,
        max_rows: int,
        max_length: int,
        num_threads: int,
        make_lookup: Callable[[Int32], drafting.LookupDrafter] | None = None,
        make_drafter: Callable[[RowTables, RequestDivision | None], drafting.ProgramDrafter] | None = None,
        max_drafts: int = 0,
        drafts_ahead: bool = False,
        processors: Mapping[str, Process] | None = None,
        groups: LayerGroups | None = None,
        exchange: Exchange | None = None,
        watch: StepWatch | None = None,
        adapters: CPUAdapters | None = None,
        states: PageMemory | None = None,
        images: CPUImages | None = None,
    ) -> None:
        """Allocate the tables and start the worker.

        Args:
            model: to compute.
            storage: its KV memory; keys and values have the order HND.
            kernel: compiled for the model's memory.
            max_rows: requests that can hold a row at the same time.
            max_length: longest sequence of a row.
            num_threads: threads that compute: the worker, the thread that waits for the step, and helpers beyond two.
            make_lookup: called with the table of tokens `[rows, positions]`; returns what drafts before the program
                runs.
            make_drafter: called with the tables of rows, and their division; returns what drafts in the program.
                Without either, the drafts of a grant are what the token table happens to hold.
            max_drafts: most drafts of a row in a step, if it is known; memory for them is prepared at start. A model
                with recurrent layers has no more, and none if it is 0.
            drafts_ahead: whether drafts for the next step of a row are made by the last stage, at the end of a step,
                and go with its result; see `drafts.ahead`. The other stages then make none.
            processors: functions that requests name to change their logits; None: no functions.
            groups: of the layers, which share `storage`; None: all layers are one group. If there are several, the
                drafter of `make_drafter` has memory of its own, by page id, and batches must announce pages.
            exchange: with the other ranks, if rows are divided among them by request: each has `storage.num_pages`
                pages, see `RequestDivision`. None: this rank has the pages of all requests, or its part of them.
            watch: gets what each step has computed, if the model is divided among ranks.
            adapters: of the model's projections; None: there are none.
            states: memory of recurrent layers; None: there are none.
            images: what the model, which is whole, sees of images; None: it takes none.
        """
        self._adapters = adapters
        self._images = images
        config, page_size = model.config, storage.layout.page_size
        self._model = model
        self._is_stage = not (model.stage.is_first and model.stage.is_last)
        self._num_threads = num_threads
        num_pages = -(-(max_length + 1) // page_size)
        num_tables = len(groups.windows) if groups else 1
        if make_drafter is not None and num_tables > 1:
            num_tables += 1
        self._rows = RowTables.allocate(  # contents written by: the worker
            num_rows=max_rows, num_tokens=max_length + 1, num_pages=num_pages, num_groups=num_tables
        )
        self._adjustments = RowAdjustments(self._rows.adjustments)
        self._processors = RowProcessors(processors, max_rows=max_rows)
        self._attention = attention_over(
            storage, [layer.mixer for layer in config.layers], groups=groups, num_rows=max_rows
        )
        self._rotations = Rotations(  # contents written by: the worker
            model.ropes, num_rows=max_rows, short_length=model.short_length
        )
        self._max_drafts = max_drafts
        self._page_size = page_size
        self._held = HeldDrafts(self._rows.tokens) if drafts_ahead else None
        """Drafts that have come with results; None: each step makes its own."""
        self._finder: RowLookup | None = None
        """What looks up drafts for next steps; None: nothing is looked up, or steps make their own."""
        lookup = make_lookup(self._rows.tokens) if make_lookup and (model.stage.is_last or not drafts_ahead) else None
        if self._held is not None:
            self._finder = RowLookup(lookup, self._rows) if lookup else None
            lookup = self._held
        self._lookup = RowLookup(lookup, self._rows) if lookup else None
        self._lookups = [one for one in (self._finder, self._lookup) if one is not None]
        self._division = None  # contents written by: the worker
        if exchange is not None:
            num_states = 0 if states is None else states.num_pages
            self._division = RequestDivision.over(
                exchange, self._rows, num_pages=storage.num_pages, num_states=num_states
            )
        # The last table has the pages themselves, under whose ids a drafter has its memory.
        own = replace(self._rows, pages=self._rows.pages[-max_rows:])
        self._drafter = make_drafter(own, self._division) if make_drafter else None
        self._reported = _NOTHING  # written by: the worker
        self._clock: Int64 = np.zeros((4, 2), np.int64)  # written by: the program
        """Seconds and nanoseconds before and after the instructions that draft, and those of `record_rest`."""
        prepared = min(_MAX_PREPARED, max(1, _PREPARED_BYTES // (4 * config.vocab_size)))
        num_tokens = min(max_rows * (1 + max_drafts), prepared) if max_drafts > 0 else 1
        has_drafts = self._lookup is not None or self._drafter is not None
        self._runs, recurrence = None, None
        if model.whole.states is not None and max_drafts > 0:
            self._runs = DraftedRuns(num_rows=max_rows, max_drafts=max_drafts)
        if states is not None:
            recurrence = CPURecurrence(states, [layer.mixer for layer in config.layers], runs=self._runs)
        self._writer = StepWriter(
            model=model,
            kernel=kernel,
            rows=self._rows,
            attention=self._attention,
            rotations=self._rotations,
            clock=self._clock,
            division=self._division,
            recurrence=recurrence,
            images=images,
            witness=None if watch is None else watch.states,
            token_witness=watch.states[2:] if watch is not None and self._is_stage and has_drafts else None,
        )
        self._watch = watch
        drafter = self._drafter
        self._plain = self._writer.write([num_tokens if drafter is None else 1] * NUM_KINDS)
        """Program of steps without a drafter."""  # written by: the worker
        self._full = self._plain if drafter is None else self._writer.write([num_tokens] * NUM_KINDS, drafter=drafter)
        """Program of steps with a drafter."""  # written by: the worker
        self._now = self._full
        """Program of the step that is computed, or was computed last."""  # written by: the worker
        self._spans: RunnerSpans | None = None
        """What a profile records; None: no profile is taken."""  # written by: start_spans, take_spans
        self._worker = Worker("runner", begin=partial(torch.set_num_threads, 1))  # torch computes little here
        self._num_helpers = num_threads - 1 if self._is_stage else num_threads - 2
        """Threads that help beside the one that waits for a step. In a stage it does not help: the step may have ended
        here, and the thread waits for others while the next one is computed."""
        self._helpers = ThreadPoolExecutor(max(1, self._num_helpers), "runner-helper")
        self._latest: Later[StepResult] | None = None
        """The result of the latest step; None before the first."""  # written by: launch

    def launch(self, batch: Batch) -> CPUStepHandle[StepResult]:
        """Queue a step and return at once."""
        is_drafting = len(batch.num_promised) > 0 and int(batch.num_promised.max()) > 1
        grants = Grants(
            rows=_writable(batch.rows),
            starts=_writable(batch.starts),
            counts=batch.counts.copy() if is_drafting else _writable(batch.counts),  # drafts may be fewer than granted
            sampled=_writable(batch.sampled),
            promised=_writable(batch.num_promised),
            sampling=SamplingArrays(words=_writable(batch.sampling.words)),
            is_drafting=is_drafting,
            scored=_writable(batch.scored),
            pooled=_writable(batch.pooled),
            routed=batch.routed,
            stated=batch.stated,
            states=batch.states,
            state_copies=batch.state_copies,
        )
        self._processors.admit(batch)
        calls = self._processors.of_batch(batch) if self._model.stage.is_last else {}
        step = _Step(
            batch=batch,
            grants=grants,
            samples=True,
            constraint=_Constraint.of(batch, num_rows=len(self._rows.lengths)),
            processing=Processing(calls=calls) if calls else None,
        )
        was_idle = self._latest is None or self._latest.is_known
        self._latest = self._worker.submit(partial(self._step if self._watch is None else self._watched, step))
        if was_idle:
            self._let_begin(step)
        return self._handle(step, self._latest)

    def _let_begin(self, step: _Step) -> None:
        """Wait until the worker computes a step without the interpreter's lock.

        Otherwise an idle worker would get the lock only when the caller next waits for a step, after planning another
        one.
        """
        step.runs()[0].take()

    def forward(self, batch: Batch) -> Float32:
        """Compute a step without sampling, wait for it, and return the logits `[T, V]` of all its T tokens."""
        num_grants = len(batch.rows)
        promised = np.ones(num_grants, np.int32)
        promised[batch.sampled] = batch.num_promised
        grants = Grants(
            rows=batch.rows.copy(),
            starts=batch.starts.copy(),
            counts=batch.counts.copy(),
            sampled=np.arange(num_grants, dtype=np.int32),
            promised=promised,
            sampling=SamplingArrays.of([SamplingParams(temperature=0.0)] * num_grants, [0] * num_grants),
            is_drafting=int(promised.max(initial=0)) > 1,
            states=batch.states,
            state_copies=batch.state_copies,
        )
        step = _Step(batch=batch, grants=grants, samples=False)
        return self._handle(step, self._worker.submit(partial(self._all_logits, step))).wait()

    def exchange_model(self, model: Decoder[Buffer], parts: drafting.DrafterParts | None) -> None:
        """Compute later steps with a model that differs in its weights only, and wait until it is so.

        No step may be in flight. Nothing changes if there is no memory for its program. A drafter gets `parts`.

        Raises:
            MemoryError: that is so.
        """
        self._worker.submit(partial(self._exchange, model, parts)).take()

    def _exchange(self, model: Decoder[Buffer], parts: drafting.DrafterParts | None) -> None:
        writer = replace(self._writer, model=model)
        plain = full = writer.write(self._plain.program.capacity)
        if self._drafter is not None and parts is not None:
            write = partial(writer.write, self._full.program.capacity, drafter=self._drafter)
            full = drafting.exchanged(self._drafter, parts, write)
        self._model, self._writer, self._plain = model, writer, plain
        self._full = self._now = full

    def _keep_inner(self) -> None:
        """Keep the inner rows of this step and of all later ones to its end."""
        self._writer = replace(self._writer, keeps_inner=True)
        plain, full = self._plain, self._full
        self._plain = self._full = self._writer.write(plain.program.capacity)
        if self._drafter is not None:
            self._full = self._writer.write(full.program.capacity, drafter=self._drafter)

    def start_spans(self) -> None:
        """Record steps and the time of each of their instructions, from the next step on; steps become slower."""
        self._spans = RunnerSpans()

    def take_spans(self) -> tuple[Sequence[Span], int]:
        """Return what was recorded, and how many spans there was no room for; record no more."""
        spans, self._spans = self._spans, None
        return ((), 0) if spans is None else spans.taken()

    def learn(self, batch: Batch, result: StepResult) -> KnownRows:
        """Take over the tokens and drafts of a step from the last stage, in whose table they are already.

        Args:
            batch: of the step, which has been waited for; no later one has any of its rows that yield tokens.
            result: of the step.
        """
        rows, is_last = self._rows, self._model.stage.is_last
        sampled = batch.sampled.astype(np.intp)
        own = batch.rows[sampled].astype(np.intp)
        starts = np.minimum(batch.starts[sampled], rows.lengths[own] - 1)  # see `Grants`
        ends = starts + np.where(batch.num_promised > 1, 1, batch.counts[sampled])
        found: list[Int32] = [np.empty(0, np.int32)]
        at = 0
        for i, (row, end, num) in enumerate(zip(own.tolist(), ends.tolist(), result.counts.tolist(), strict=True)):
            if num:
                first = int(rows.lengths[row]) - num if is_last else end
                places = rows.tokens[row, first : first + num]
                if not is_last:
                    places[:] = result.tokens[at : at + num]
                    rows.lengths[row] = first + num
                found.append(places)
                at += num
                if self._held is not None and result.ahead is not None:
                    self._held.hold(row, first + num, result.ahead[i])
        return KnownRows(tokens=np.concatenate(found), lengths=rows.lengths[own], pages=rows.pages[own])

    def close(self) -> None:
        """Finish the launched steps and end the threads; a second call does nothing."""
        self._worker.close()
        self._helpers.shutdown()

    def _handle(self, step: _Step, result: Later[Result]) -> CPUStepHandle[Result]:
        runs = step.runs() if self._num_threads > 1 and not self._is_stage else ()
        return CPUStepHandle(runs, step.constraint, result, lambda: self._latest is not result)

    def _watched(self, step: _Step) -> StepResult:
        assert self._watch is not None
        result: StepResult | None = None
        rows = self._rows
        try:
            result = self._step(step)
            return result
        finally:
            more = tuple(one.witness() for one in (self._adapters, self._runs) if one is not None)
            self._watch.note(result, (rows.lengths, rows.pages, *more))

    def _step(self, step: _Step) -> StepResult:
        computed = self._compute(step)
        if computed is None:
            self._writer.kernel.pass_by()
            return _nothing(step.batch)
        if not self._model.stage.is_last:
            return _nothing(step.batch)
        scopes, counts, draft_s, verify_s = computed
        now, grants = self._now, step.grants
        scope = now.main.scope
        num_wanted, num_sampled = counts[scope.wanted.index], len(grants.sampled)
        tokens, yielded = np.empty(num_wanted, np.int32), np.empty(num_sampled, np.int32)
        num_drafted = np.empty(num_sampled if grants.is_drafting else 0, np.int32)
        num_tokens = collect(
            scopes, scope.index, now.found, now.num_found, grants.counts, grants.promised, tokens, yielded,
            num_drafted,
        )  # fmt: skip
        inner = now.inner
        experts = None if inner is None else inner.experts_of(grants, yielded)
        hidden = None if inner is None else inner.states_of(grants, yielded)
        sums = now.sums[: len(grants.pooled)].copy() if len(grants.pooled) else None
        excluded: list[int] = [] if yielded.all() else self._excluded(step, scopes, yielded)
        logprobs, prompt_logprobs = None, None
        if scopes[scope.index, Column.NUM_REPORTED] > 0:
            found = tokens[:num_tokens]
            logprobs = reports.of_drawn(now.reports, now.logits, found, yielded, grants, self._rows)
            prompt_logprobs = reports.of_prompts(now.reports, grants, self._rows)
        ahead: Int32 | None = None
        if self._held is not None and step.batch.is_followed:
            began = perf_counter()
            ahead = self._draft_ahead(step, yielded)
            draft_s += perf_counter() - began
        if step.kept is not None:
            num_all = len(step.batch.sampled)
            yielded = _spread(yielded, step.kept, num_all)
            num_drafted = _spread(num_drafted, step.kept, num_all) if grants.is_drafting else num_drafted
        drafted = _NOTHING
        if self._drafter is not None and grants.is_drafting:
            counted = self._drafter.counts
            drafted = drafting.DraftCounts._make(map(sub, counted, self._reported))
            self._reported = counted
        return StepResult(
            tokens=tokens[:num_tokens],
            counts=yielded,
            excluded=excluded,
            num_drafted=num_drafted if grants.is_drafting else None,
            draft_s=draft_s,
            verify_s=verify_s,
            num_rebuilt=drafted.num_rebuilt,
            num_postponed=drafted.num_postponed,
            num_short=drafted.num_short,
            ahead=ahead,
            vectors=sums,
            experts=experts,
            states=hidden,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _draft_ahead(self, step: _Step, yielded: Int32) -> Int32:
        """Return drafts for the next step of each row, see `StepResult.ahead`; outputs of this step are overwritten.

        Args:
            step: that has been computed.
            yielded: `[<= S]`, tokens of each of its sampled grants.
        """
        page_size = None if self._drafter is None else self._page_size
        grants, places = grants_ahead(step.grants, yielded, self._rows, most=self._max_drafts, page_size=page_size)
        num_sampled = len(step.batch.sampled)
        ahead = _Step(batch=replace(step.batch, admitted=_NONE), grants=grants, samples=True)
        if len(places) == 0 or not self._leave_out(ahead):
            return np.full((num_sampled, self._max_drafts), -1, np.int32)
        grants = ahead.grants
        if ahead.kept is not None:
            places = places[ahead.kept]
        if self._finder is not None:
            self._finder.draft(ahead.batch, grants)
        if self._drafter is not None:
            self._now = self._full
            self._drafter.plan(ahead.batch, grants)
            scopes, counts = self._lay_out(ahead)
            self._work_through(ahead, scopes, counts, 0, self._now.target_lines.start)
        if step.kept is not None:
            places = step.kept[places]
        return drafts_of(grants, places, self._rows, num_sampled=num_sampled, most=self._max_drafts)

    def _excluded(self, step: _Step, scopes: Int64, yielded: Int32) -> list[int]:
        """Return those of the batch's sampled grants without a token whose logits are all minus infinity."""
        firsts = integers_at(scopes[self._pass.scope.index, Column.FIRSTS], len(yielded))
        places = np.flatnonzero((yielded == 0) & (self._now.found[firsts, 0] == EXCLUDED))
        return (places if step.kept is None else step.kept[places]).tolist()

    def _all_logits(self, step: _Step) -> Float32:
        computed = self._compute(step)
        assert computed is not None
        counts = computed[1]
        return self._program.outputs[0][: counts[self._pass.scope.wanted.index]].copy()

    def _compute(self, step: _Step) -> tuple[Int64, Int64, float, float] | None:
        """Compute a step; return its scopes and counts, and the seconds of the drafter and of all else.

        None: the rows of all of its grants have ended.

        The next step overwrites the outputs of the program.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        try:
            self._update(step.batch)
            if step.samples and not self._leave_out(step):
                step.give_up()
                return None
            if (len(step.grants.routed) or len(step.grants.stated)) and not self._writer.keeps_inner:
                self._keep_inner()
            began = perf_counter()
            if self._lookup is not None and step.samples:
                self._lookup.draft(step.batch, step.grants)
            own, drafts_now = step.grants, step.grants.is_drafting
            if self._held is not None:  # its drafts have been made
                own, drafts_now = replace(own, promised=np.ones_like(own.promised), is_drafting=False), False
            if self._finder is not None and step.samples:
                self._finder.draft(step.batch, own)
            self._now, drafter = self._plain, self._drafter
            if drafter is not None:
                drafter.plan(step.batch, own if step.samples else None)
                if drafts_now or drafter.has_rest or drafter.captures:
                    self._now = self._full
                else:
                    drafter = None  # the step runs without it
            drafted = perf_counter()
            scopes, counts = self._lay_out(step)
            first, last = 0, None
            if drafter is not None:  # without what the step does not need
                first = 0 if drafts_now else self._now.target_lines.start
                last = None if drafter.has_rest else self._now.target_lines.stop
        except Exception:
            step.give_up()
            raise
        self._work_through(step, scopes, counts, first, last)
        ended = perf_counter()
        if step.samples:
            for lookup in self._lookups:
                lookup.after_step(step.grants)
        draft_s = drafted - began if step.grants.is_drafting or drafter is not None else 0.0
        if self._drafter is not None and (drafts_now or self._drafter.has_rest):
            draft_began, draft_ended, rest_began, rest_ended = (s + ns * 1e-9 for s, ns in self._clock.tolist())
            draft_s += draft_ended - draft_began if drafts_now else 0.0
            draft_s += rest_ended - rest_began if self._drafter.has_rest else 0.0
        return scopes, counts, draft_s, ended - began - draft_s

    def _work_through(self, step: _Step, scopes: Int64, counts: Int64, first: int, last: int | None) -> None:
        """Compute instructions [first, last), interrupted where the host needs drafts or calls processors."""

        spans = self._spans

        def run(first: int, last: int | None) -> Run | MeasuredRun:
            if spans is None:
                return self._program.start(counts, scopes, first=first, last=last)
            return spans.begin(self._program, counts, scopes, first=first, last=last)

        constraint, processing, later = step.constraint, step.processing, step.run
        if constraint is not None:
            scopes[self._pass.scope.index, Column.GATE] = constraint.gate.ctypes.data
            if constraint.is_drafting:
                target = max(first, self._now.target_lines.start)
                self._work(run(first, target), constraint.drafting)
                first = target
                constraint.give_drafts(step.batch, self._drafts(step))
        if processing is not None:
            self._work(run(first, self._now.first_draw), later)
            first, later = self._now.first_draw, processing.rest
            try:
                scope = scopes[self._pass.scope.index]
                processing.change(self._program.outputs[0], scope, step.grants, step.kept, self._rows.tokens)
            except BaseException:
                later.give(None)
                raise
        self._work(run(first, last), later)

    def _drafts(self, step: _Step) -> list[tuple[int, ...]]:
        """Return the drafts of the constrained grants; none for one that is left out."""
        grants, tokens = step.grants, self._program.inputs[0].view(np.int32)[:, 0]
        firsts = np.cumsum(grants.counts) - grants.counts + 1
        kept = range(len(grants.sampled)) if step.kept is None else step.kept.tolist()
        places = {index: place for place, index in enumerate(kept)}
        drafts: list[tuple[int, ...]] = []
        for index in step.batch.constrained.tolist():
            place = places.get(index)
            if place is None or grants.promised[place] == 1:
                drafts.append(())
                continue
            grant = grants.sampled[place]
            first = firsts[grant]
            drafts.append(tuple(tokens[first : first + grants.counts[grant] - 1].tolist()))
        return drafts

    def _work(self, run: Run | MeasuredRun, later: Later[Run | MeasuredRun | None]) -> None:
        """Compute a run, together with the threads that help."""
        later.give(run)
        for _ in range(self._num_helpers):
            self._helpers.submit(run.help)
        if isinstance(run, MeasuredRun):
            run.measure()
        else:
            run.work()

    def _update(self, batch: Batch) -> None:
        """Apply what the batch says about rows."""
        rows = self._rows
        for lookup in self._lookups:
            lookup.before_update(batch)
        if len(batch.page_ids) > 0 or len(batch.token_ids) > 0:
            updates = (batch.page_rows, batch.page_columns, batch.page_ids)
            tokens = (batch.token_rows, batch.token_positions, batch.token_ids)
            update(*map(_writable, (*updates, *tokens)), rows.pages, rows.tokens, rows.lengths)
            if self._division is not None:
                self._division.note_pages(*updates)
        if len(batch.admitted) > 0:
            self._adjustments.begin(batch)
            self._rotations.admit(batch)
            if self._images is not None:
                self._images.admit(batch, self._rotations)
        if self._adapters is not None:
            self._adapters.admit(batch)
        if self._runs is not None:
            self._runs.admit(batch)
        if len(batch.limits) > 0:
            for row, limit, stop_ids in zip(batch.admitted_rows(), batch.limits, batch.stop_ids, strict=True):
                rows.checked[row], rows.limits[row], rows.stop_ids[row] = rows.lengths[row], limit, stop_ids

    def _leave_out(self, step: _Step) -> bool:
        """Leave out the grants of rows that have ended; return whether any is left."""
        rows, grants = self._rows, step.grants
        num_grants, num_sampled = len(grants.rows), len(grants.sampled)
        kept, kept_sampled, places = np.empty((3, num_grants), np.int32)
        num_kept = find_live(
            grants.rows, grants.sampled, rows.tokens, rows.lengths, rows.checked, rows.limits, rows.stop_ids, kept,
            kept_sampled, places,
        )  # fmt: skip
        if 0 < num_kept < num_grants:
            num_sampled -= num_grants - num_kept  # only sampled grants can have ended
            step.kept = kept_sampled[:num_sampled]
            step.grants = grants.take(kept[:num_kept], step.kept, places[:num_sampled])
        return num_kept > 0

    @property
    def _pass(self) -> Pass:
        """The target's pass in the present program."""
        return self._now.main

    @property
    def _program(self) -> Program:
        """The present program."""
        return self._now.program

    def _enlarge(self, sizes: Sequence[int]) -> None:
        """Write the present program anew, for steps up to these sizes."""
        larger = self._writer.write(sizes, drafter=self._now.drafter)
        if self._now is self._full:
            self._full = larger
        if self._now is self._plain:
            self._plain = larger
        self._now = larger

    def _lay_out(self, step: _Step) -> tuple[Int64, Int64]:
        """Fill in the inputs of the program, with memory for more tokens if needed; return its scopes and counts."""
        if self._images is not None:
            self._images.place(step.grants, self._rotations)
        while True:
            program = self._program
            scopes, counts = program.scopes.copy(), np.zeros(len(program.capacity), np.int64)
            outcome = self._now.lay_out(scopes, counts, step.grants, self._runs, all_wanted=not step.samples)
            if outcome != Outcome.TOO_LARGE:
                break
            needed = zip(counts.tolist(), program.capacity, strict=True)
            self._enlarge([max(pair) for pair in needed])
        scope = self._pass.scope
        if outcome == Outcome.BAD_TOKEN:
            tokens = program.inputs[0].view(np.int32)[: counts[scope.tokens.index], 0]
            raise IndexError(f"tokens must be in [0, {self._model.config.vocab_size}), got {tokens.tolist()}")
        if self._images is not None:
            step.kept_alive = self._images.lay_out(scopes[scope.index], step.grants, self._rotations)
        return scopes, counts


def _nothing(batch: Batch) -> StepResult:
    """Return the result of a step that yields nothing here."""
    return StepResult(tokens=np.empty(0, np.int32), counts=np.zeros(len(batch.sampled), np.int32))


def _spread(values: Int32, places: Int32, size: int) -> Int32:
    """Return `values` at their places among `size` numbers, the others 0."""
    spread = np.zeros(size, np.int32)
    spread[places.astype(np.intp)] = values
    return spread


def _writable(array: Array) -> Array:
    """Return `array`, or a copy if it is read-only; kernels are compiled for writable arrays."""
    return array if array.flags.writeable else array.copy()
