"""The program of a step, as the runner reads it: alone, or with the passes of a drafter around it."""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.compiled import exchange
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, Outcome
from pagewood.engine.runner.cpu.compiled.machine.clock import clock
from pagewood.engine.runner.cpu.compiled.step import StepKernel
from pagewood.engine.runner.cpu.drafts.drafting import ProgramDrafter
from pagewood.engine.runner.cpu.program.attention import AnyCPUAttention
from pagewood.engine.runner.cpu.program.division import DividedPass, RequestDivision, add_pass, divided_on
from pagewood.engine.runner.cpu.program.drafted_runs import DraftedRuns
from pagewood.engine.runner.cpu.program.draws import draw
from pagewood.engine.runner.cpu.program.experts import choices_on
from pagewood.engine.runner.cpu.program.images import CPUImages
from pagewood.engine.runner.cpu.program.inner_rows import Choices, InnerOutputs
from pagewood.engine.runner.cpu.program.passes import Grants, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.recurrence import CPURecurrence
from pagewood.engine.runner.cpu.program.tape import Buffer, Program, Scope, Tape

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgram:
    """A program for steps up to some size, with the places of what the runner reads and writes.

    Legend: W wanted tokens, S sampled grants, E elements of a hidden state; the views have rows for the largest step.
    """

    drafter: ProgramDrafter | None
    """What drafts in it; None: drafts come from elsewhere, or there are none."""
    main: Pass
    """Pass of the target."""
    program: Program
    first_draw: int
    """The first instruction behind those that change logits."""
    again: Scope | None
    """Tokens that recurrent layers compute again, see `DraftedRuns`; None: there are no drafts, or no such layers."""
    divided: Sequence[DividedPass]
    """All passes whose rows are divided among ranks; none if this rank has all rows."""
    target_lines: slice
    """Instructions of the target, with those that accept drafts."""
    found: Int32
    """[W, 1], the tokens that grants yield, see `collect`."""
    num_found: Int32
    """[S, 1], how many."""
    logits: Float32
    """[W, V], from which tokens were drawn."""
    reports: Float32
    """[W, NUM_REPORT_COLUMNS], reports of the wanted tokens."""
    sums: Float32
    """[S, E], sums of the hidden states of pooled grants."""
    inner: InnerOutputs | None = None
    """Inner rows; None: it does not keep them to the end."""

    def lay_out(
        self, scopes: Int64, counts: Int64, grants: Grants, runs: DraftedRuns | None, *, all_wanted: bool
    ) -> Outcome:
        """Fill the inputs and the scopes of a step, on the worker.

        Args:
            scopes: of the run, written.
            counts: of the run, written; if the result is TOO_LARGE, with how much is needed.
            grants: what to compute.
            runs: what is drafted with recurrent layers; None: nothing is.
            all_wanted: see `Pass.lay_out`.
        """
        outcome = self.main.lay_out(scopes, counts, grants, all_wanted=all_wanted)
        if self.drafter is not None and outcome != Outcome.BAD_TOKEN:
            outcome = max(outcome, self.drafter.lay_out(scopes, counts, grants))
        if outcome != Outcome.DONE:
            return outcome
        for divided in self.divided:
            divided.lay_out(scopes, counts)
        if runs is None or not len(grants.states):
            return outcome
        own, kept = self.main, slice(None)
        if self.divided:
            own, kept = self.divided[0].part, self.divided[0].division.own(grants.rows)
        return runs.lay_out(
            scopes,
            counts,
            grants,
            main=self.main.scope,
            own=own.scope,
            kept=kept,
            again=self.again,
            is_forward=all_wanted,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWriter:
    """Writes programs of one runner."""

    model: Decoder[Buffer]
    kernel: StepKernel
    rows: RowTables
    attention: AnyCPUAttention
    rotations: Rotations
    clock: Int64
    """[4, 2], written by programs with a drafter: see `CPURunner`."""
    division: RequestDivision | None = None
    """Division of rows among ranks by request; None: this rank has all rows."""
    recurrence: CPURecurrence | None = None
    """What recurrent layers do; None: there are none."""
    images: CPUImages | None = None
    """What replaces embeddings; None: nothing does."""
    witness: Int64 | None = None
    """[1], to which programs add the sum of the bits of the last hidden states; None: they do not."""
    keeps_inner: bool = False
    """Whether programs keep inner rows to the end of a step."""
    token_witness: Int64 | None = None
    """[1], to which programs add the sum of their tokens, because other stages have drafts too; None: they do not."""

    def write(self, sizes: Sequence[int], *, drafter: ProgramDrafter | None = None) -> StepProgram:
        """Write a program.

        Args:
            sizes: `[NUM_KINDS]` or more, rows of each kind for which it has memory, rounded up to powers of two.
            drafter: what drafts in it.
        """
        tape, config = Tape(), self.model.config
        one, own, divided = add_pass(
            tape,
            self.rows,
            self.attention,
            self.rotations,
            self.division,
            vocab_size=config.vocab_size,
            has_states=self.recurrence is not None,
        )

        def mark(moment: int) -> None:
            if drafter is not None:
                tape.write(clock, one.scope.tokens, out=self.clock[moment])

        mark(0)
        held = None
        if drafter is not None:
            held = drafter.record_drafts(tape, one)
        mark(1)
        first = tape.num_lines
        if self.token_witness is not None:
            tape.write(exchange.witness, one.tokens.rows, x=one.tokens, size=1, out=self.token_witness)
        if not self.model.stage.is_last:
            return self._written_for_stage(tape, one, sizes, drafter, first)
        num_before = len(choices_on(tape))
        states, hidden = self.model.states(
            one.tokens, own.rotated(), self.attention, own.kept, recurrence=self.recurrence,
            captured=() if drafter is None else drafter.captured, division=divided, visual=self.images,
        )  # fmt: skip
        if drafter is not None:
            drafter.record_target(tape, own, hidden)
        choices = None
        if self.keeps_inner:
            choices = Choices.written(self.model, one.tokens, choices_on(tape)[num_before:])
        if self.witness is not None:
            tape.write(exchange.witness, states.rows, x=states, size=states.size, out=self.witness)
        sums = one.pool(states)
        logits = self.model.head(states.first(one.scope.wanted))
        raw = one.adjust(logits)
        first_draw = tape.num_lines
        accepted = one.accept(draw(logits, one.choices)) if held is None else one.reject(logits, held)
        reported = one.report(logits, raw, accepted)
        target_lines = slice(first, tape.num_lines)
        if drafter is not None:
            mark(2)
            drafter.record_rest(tape, one, accepted)
            mark(3)
        outputs = (logits, accepted.tokens, accepted.counts, reported, sums)
        if choices is not None:
            outputs = (*outputs, states, *choices.buffers)
        program = tape.program(self.kernel, _capacity(tape, sizes), inputs=(one.tokens,), outputs=outputs)
        found, num_found = (output.view(np.int32) for output in program.outputs[1:3])
        return StepProgram(
            drafter=drafter,
            main=one,
            again=self._again(tape),
            divided=divided_on(tape),
            program=program,
            first_draw=first_draw,
            target_lines=target_lines,
            found=found,
            num_found=num_found,
            logits=program.outputs[0],
            reports=program.outputs[3],
            sums=program.outputs[4],
            inner=None if choices is None else InnerOutputs.of(program, states, choices, self.model.whole),
        )

    def _written_for_stage(
        self, tape: Tape, one: Pass, sizes: Sequence[int], drafter: ProgramDrafter | None, first: int
    ) -> StepProgram:
        """Return the program of a stage that sends hidden states, of drafts too; it yields nothing."""
        num_before = len(choices_on(tape))
        self.model.states(one.tokens, one.rotated(), self.attention, one.kept, recurrence=self.recurrence)
        if self.keeps_inner:
            Choices.written(self.model, one.tokens, choices_on(tape)[num_before:]).send(self.model)
        lines = slice(first, tape.num_lines)
        program = tape.program(self.kernel, _capacity(tape, sizes), inputs=(one.tokens,), outputs=())
        return StepProgram(
            drafter=drafter,
            main=one,
            again=self._again(tape),
            divided=(),
            program=program,
            first_draw=lines.stop,
            target_lines=lines,
            found=np.empty((0, 1), np.int32),
            num_found=np.empty((0, 1), np.int32),
            logits=np.empty((0, 0), np.float32),
            reports=np.empty((0, 0), np.float32),
            sums=np.empty((0, 0), np.float32),
        )

    def _again(self, tape: Tape) -> Scope | None:
        """Return the scope of tokens that are computed again; None: there are none."""
        runs = None if self.recurrence is None else self.recurrence.runs
        return None if runs is None else runs.scope(tape)


def _capacity(tape: Tape, sizes: Sequence[int]) -> list[int]:
    """Return the rows of each kind for which a program has memory."""
    capacity = [1 << (max(size, 1) - 1).bit_length() for size in sizes[: tape.num_row_kinds]]
    capacity += capacity[:NUM_KINDS] * (tape.num_row_kinds // NUM_KINDS - len(capacity) // NUM_KINDS)
    capacity[2::NUM_KINDS] = capacity[1::NUM_KINDS]  # a sampled grant has at least one wanted token
    capacity[3::NUM_KINDS] = map(max, capacity[1::NUM_KINDS], capacity[3::NUM_KINDS])  # a wanted token is kept
    for one in divided_on(tape):  # a rank may have all rows of a step
        whole, part = (NUM_KINDS * each.scope.index for each in (one.whole, one.part))
        capacity[part : part + NUM_KINDS] = capacity[whole : whole + NUM_KINDS]
    return capacity
