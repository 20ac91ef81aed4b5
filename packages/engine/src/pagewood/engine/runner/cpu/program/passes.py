"""Forward passes on a tape: their inputs, and how the grants of a step are laid out in them.

Legend: T tokens of a pass, W wanted tokens, K kept tokens, G grants, S sampled grants, P pooled grants, E
elements of a hidden state, F elements of a head / 2 of all ropes together.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import NUM_STOP_IDS, Batch
from pagewood.engine.core.messages.sampling_table import SamplingArrays
from pagewood.engine.models.rope import PositionTable, long_shift, values_by_place
from pagewood.engine.runner.cpu.compiled.drafting.accept import accept, reject
from pagewood.engine.runner.cpu.compiled.drafting.passes import hold_logits
from pagewood.engine.runner.cpu.compiled.drawing.adjust import adjust
from pagewood.engine.runner.cpu.compiled.drawing.choice import NUM_CHOICE_COLUMNS
from pagewood.engine.runner.cpu.compiled.drawing.report import NUM_REPORT_COLUMNS, report
from pagewood.engine.runner.cpu.compiled.layout import NUM_ADJUSTMENT_COLUMNS, Adjustment, Column, Outcome, lay_out
from pagewood.engine.runner.cpu.compiled.pool import pool
from pagewood.engine.runner.cpu.compiled.rows import columns, put
from pagewood.engine.runner.cpu.program.attention import AnyCPUAttention
from pagewood.engine.runner.cpu.program.tape import Buffer, Operand, Scope, Tape, integers_at
from pagewood.engine.runner.reported_places import Granted
from pagewood.engine.runner.state_saves import state_saves

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTables:
    """What the runner knows about every row."""

    tokens: Int32
    """[rows, positions], token ids."""  # written by: cpu.runner
    lengths: Int32
    """[rows], how many of them are known."""  # written by: cpu.runner
    pages: Int32
    """[groups * rows, pages of a row], page ids, the tables of all groups of layers, and behind them that of the pages
    themselves if a drafter needs it."""  # written by: cpu.runner
    checked: Int32
    """[rows], how many tokens do not end the row: at first those that were known when its request was admitted."""
    # written by: cpu.runner
    limits: Int32
    """[rows], how many tokens end the row."""  # written by: cpu.runner
    stop_ids: Int32
    """[rows, NUM_STOP_IDS], tokens that end the row; -1: no token."""  # written by: cpu.runner
    adjustments: Int64
    """[rows, NUM_ADJUSTMENT_COLUMNS], by `Adjustment`, how logits of the row are changed and tokens reported."""
    # written by: cpu.adjustments

    def is_reported(self, rows: Int32) -> NDArray[np.bool_]:
        """Return whether the tokens of each of some rows are reported."""
        return self.adjustments[rows, Adjustment.REPORTED] > 0

    def has_kept(self, rows: Int32) -> NDArray[np.bool_]:
        """Return whether the tokens of each of some rows are reported with what the filters have left."""
        return self.adjustments[rows, Adjustment.HAS_RANGE] > 0

    @classmethod
    def allocate(cls, *, num_rows: int, num_tokens: int, num_pages: int, num_groups: int = 1) -> RowTables:
        """Allocate tables for `num_rows` rows, each with room for `num_tokens` tokens and `num_pages` pages a group."""
        return cls(
            tokens=np.zeros((num_rows, num_tokens), np.int32),
            lengths=np.zeros(num_rows, np.int32),
            pages=np.zeros((num_groups * num_rows, num_pages), np.int32),
            checked=np.zeros(num_rows, np.int32),
            limits=np.full(num_rows, np.iinfo(np.int32).max, np.int32),
            stop_ids=np.full((num_rows, NUM_STOP_IDS), -1, np.int32),
            adjustments=np.zeros((num_rows, NUM_ADJUSTMENT_COLUMNS), np.int64),
        )


class Rotations:
    """The cosines and sines of places, up to the furthest that has been asked for; all ropes are side by side.

    Args:
        ropes: the tables of a model.
        num_rows: rows of the runner.
        short_length: the longest request that has the first of two sets of factors; None: all rows have the last set.
    """

    __slots__ = ("_ropes", "_short_length", "_tables", "columns", "shifts", "widths")

    def __init__(self, ropes: Sequence[PositionTable], *, num_rows: int, short_length: int | None = None) -> None:
        self._ropes = ropes
        self._short_length = short_length
        self.shifts: Int32 = np.zeros(num_rows, np.int32)
        """[rows], how far the place of a position is behind it, see `models.rope`; below 0 behind images, whose tokens
        have fewer positions."""  # contents written by: admit, program.images
        self.widths = [rope.width for rope in ropes]
        """Columns of each rope; F is their sum."""
        self._tables: tuple[Float32, Float32] | None = None  # written by: reach
        self.columns: Int64 = np.zeros(3, np.int64)
        """Addresses of the tables `[places, F]`, and the number of places, as in a scope."""  # written by: reach

    def admit(self, batch: Batch) -> None:
        """Note which set of factors each admitted request has."""
        if len(batch.is_long):
            self.shifts[batch.admitted_rows()] = batch.is_long * long_shift(self._short_length)

    def reach(self, num_places: int) -> None:
        """Grow the tables to at least `num_places`."""
        with torch.inference_mode():
            num = 1 << (num_places - 1).bit_length()
            tables = values_by_place(self._ropes, num, short_length=self._short_length)
            none = torch.empty(num, 0)  # a model may have no ropes
            cosines, sines = (torch.cat([none, *(table[kind] for table in tables)], -1).numpy() for kind in range(2))
        self._tables = cosines, sines
        self.columns = np.array([cosines.ctypes.data, sines.ctypes.data, len(cosines)], np.int64)

    def of_places(self, places: NDArray[np.intp] | Int32) -> tuple[Float32, Float32]:
        """Return cosines and sines `[n, F]`, each number at a place of its own, `places` `[n, F]`, which is reached."""
        assert self._tables is not None
        cosines, sines = self._tables
        columns = np.arange(places.shape[1])
        return cosines[places, columns], sines[places, columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """What a pass computes.

    Grant g computes `counts[g]` tokens of row `rows[g]`, from position `starts[g]` on, or from the row's last known
    token if that is earlier. All arrays are writable, because kernels are compiled for such.
    """

    rows: Int32
    """[G]"""
    starts: Int32
    """[G]"""
    counts: Int32
    """[G]"""  # written by: cpu.runner, draft_model, eagle
    sampled: Int32
    """[S], the grants after whose tokens others are drawn, ascending."""
    promised: Int32
    """[S], the most tokens that each yields; more than 1: all tokens of the grant are wanted, otherwise its last."""
    sampling: SamplingArrays
    """Sampling parameters of the S grants."""
    is_drafting: bool = False
    """Whether a grant promises more than one token."""
    scored: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[Q, 3], prompt tokens that are reported, see `Batch.scored`."""
    pooled: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[P, 3], prompt tokens whose states are added up, see `Batch.pooled`."""
    routed: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[n, 2], whose experts are reported, see `Batch.routed`."""
    stated: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[n, 2], whose states are reported, see `Batch.stated`."""
    states: Int32 = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """[G, 2], see `Batch.states`."""
    state_copies: Int32 = field(default_factory=lambda: np.empty((0, 3), np.int32))
    """[V, 3], see `Batch.state_copies`."""

    @property
    def granted(self) -> Granted:
        """What says where reported positions are."""
        return Granted(
            counts=self.counts, sampled=self.sampled, promised=self.promised, routed=self.routed, stated=self.stated
        )

    def take(self, grants: Int32, sampled: Int32, places: Int32) -> Grants:
        """Return some of the grants.

        Args:
            grants: which of the G grants, ascending.
            sampled: which of the S sampled ones.
            places: the place of each of these among `grants`.
        """
        # Indices of another type are converted while numpy gives the interpreter's lock away.
        grants_at, sampled_at = grants.astype(np.intp), sampled.astype(np.intp)
        promised = self.promised[sampled_at]
        return Grants(
            rows=self.rows[grants_at],
            starts=self.starts[grants_at],
            counts=self.counts[grants_at],
            sampled=places,
            promised=promised,
            sampling=self.sampling.take(sampled_at),
            is_drafting=self.is_drafting and any(num > 1 for num in promised.tolist()),
            scored=_moved(self.scored, grants),
            pooled=_moved(self.pooled, grants),
            routed=_moved(self.routed[np.isin(self.routed[:, 0], grants)], grants),
            stated=_moved(self.stated[np.isin(self.stated[:, 0], grants)], grants),
            states=self.states[grants_at] if len(self.states) else self.states,
            state_copies=_moved(self.state_copies[np.isin(self.state_copies[:, 0], grants)], grants),
        )


def _moved(entries: Int32, grants: Int32) -> Int32:
    """Return `entries` `[n, columns]`, whose first column is a grant, after only some of the grants are left."""
    if len(entries) == 0:
        return entries
    return np.column_stack([np.searchsorted(grants, entries[:, 0]), entries[:, 1:]]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What the program knows after the drafts have been verified."""

    tokens: Buffer
    """[W, 1] int32, the tokens that a grant yields, from its first wanted row on."""
    counts: Buffer
    """[S, 1] int32, how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldLogits:
    """The logits that drafts were drawn from, for rejection sampling, until a step has verified them.

    They are kept by row, because drafts may be made in the step before.
    """

    logits: NDArray[np.float32]
    """[rows, max_tokens, V]; contents written by: the program"""

    @classmethod
    def of(cls, num_rows: int, vocab_size: int, max_tokens: int) -> HeldLogits:
        """Return memory for at most `max_tokens` drafts of each row, which the system provides as it is used."""
        return cls(logits=np.zeros((num_rows, max_tokens, vocab_size), np.float32))


class Pass:
    """A forward pass of a model on a tape, in a scope of its own."""

    __slots__ = ("_has_states", "_rotations", "choices", "cosines", "kept", "scope", "sines", "tokens", "wanted")

    def __init__(
        self,
        tape: Tape,
        rows: RowTables,
        attention: AnyCPUAttention,
        rotations: Rotations,
        *,
        vocab_size: int,
        has_states: bool = False,
    ) -> None:
        """Add the scope and its inputs to `tape`.

        Args:
            tape: on which the model is then called, with `tokens`, `rotated()`, `attention` and `wanted`.
            rows: of the runner.
            attention: of the model.
            rotations: of the model.
            vocab_size: of the model.
            has_states: whether the model, or its part here, has recurrent layers.
        """
        scope, half = tape.scope(), sum(rotations.widths)
        self._rotations = rotations
        self._has_states = has_states
        self.scope: Scope = scope
        self.tokens: Buffer = tape.buffer(scope.tokens, 1)
        """[T, 1] int32, token ids."""
        self.cosines: Buffer = tape.buffer(scope.tokens, half)
        """[T, F]"""
        self.sines: Buffer = tape.buffer(scope.tokens, half)
        """[T, F]"""
        self.kept: Buffer = tape.buffer(scope.kept, 1)
        """[K, 1] int32, tokens whose last hidden state is wanted."""
        self.wanted: Buffer = self.kept.first(scope.wanted)
        """[W, 1] int32, tokens whose logits are wanted."""
        self.choices: Buffer = tape.buffer(scope.wanted, NUM_CHOICE_COLUMNS)
        """[W, NUM_CHOICE_COLUMNS], how to draw the token after each."""
        columns: dict[Column, Operand] = {
            Column.PAGE_TABLE: rows.pages,
            Column.PAGES_PER_ROW: rows.pages.shape[1],
            Column.TOKEN_TABLE: rows.tokens,
            Column.TOKENS_PER_ROW: rows.tokens.shape[1],
            Column.LENGTHS: rows.lengths,
            Column.ADJUSTMENTS: rows.adjustments,
            Column.VOCAB_SIZE: vocab_size,
            Column.NUM_KV_HEADS: attention.num_kv_heads,
            Column.TILE: attention.tile,
            Column.HALF: half,
            Column.ROTATION_SHIFTS: rotations.shifts,
            # at most as many grants as tokens, and one number more; tables are as large as their scope
            Column.ROWS: tape.buffer(scope.tokens, 1),
            Column.STARTS: tape.buffer(scope.tokens, 1),
            Column.OFFSETS: tape.buffer(scope.tokens, 2),
            Column.ITEMS: tape.buffer(scope.tokens, 4 * attention.num_kv_heads),
            Column.TOKENS: self.tokens,
            Column.COSINES: self.cosines,
            Column.SINES: self.sines,
            Column.WANTED: self.kept,
            Column.CHOICES: self.choices,
            Column.SAMPLED: tape.buffer(scope.wanted, 1),
            Column.FIRSTS: tape.buffer(scope.wanted, 2),
            Column.SCORED: tape.buffer(scope.wanted, 2),
            Column.POOLED: tape.buffer(scope.kept, 2),
        }
        if has_states:
            columns |= {Column.STATES: tape.buffer(scope.tokens, 2), Column.SAVES: tape.buffer(scope.tokens, 1)}
        tape.fill(scope, columns)

    def rotated(self) -> list[tuple[Buffer, Buffer]]:
        """Return the cosines and sines of each rope; if there are several, write instructions that separate them."""
        widths = self._rotations.widths
        if len(widths) == 1:
            return [(self.cosines, self.sines)]
        starts = [sum(widths[:index]) for index in range(len(widths))]
        return [
            (_columns(self.cosines, start, width), _columns(self.sines, start, width))
            for start, width in zip(starts, widths, strict=True)
        ]

    def pool(self, states: Buffer) -> Buffer:
        """Write the instruction that adds `states` `[K, E]` up; return `[>= P, E]`, the sums of pooled grants."""
        out = states.tape.buffer(states.rows, states.size)
        states.tape.write(pool, states.rows, scope=self.scope, states=states, size=states.size, out=out)
        return out

    def adjust(self, logits: Buffer) -> Buffer:
        """Write the instruction that changes `logits` `[W, V]` of rows with penalties or biases.

        Returns:
            `[W, V]`, the logits before the change, of rows that are reported by them.
        """
        raw = logits.tape.buffer(logits.rows, logits.size)
        self._adjust(logits, raw)
        return raw

    def adjust_drafts(self, logits: Buffer) -> None:
        """Write the instruction that changes the logits `[W, V]` of a drafter as `adjust` does those of the target.

        Drafts are then drawn as their verification draws, but for grammars. Nothing is reported.
        """
        self._adjust(logits, logits)

    def _adjust(self, logits: Buffer, raw: Buffer) -> None:
        logits.tape.write(
            adjust, self.scope.sampled, scope=self.scope, logits=logits, vocab_size=logits.size, raw=raw
        )  # fmt: skip

    def report(self, logits: Buffer, raw: Buffer, accepted: Accepted) -> Buffer:
        """Write the instruction that reports tokens; return the reports `[W, NUM_REPORT_COLUMNS]`.

        Args:
            logits: `[W, V]`, from which tokens were drawn.
            raw: from `adjust`.
            accepted: what was accepted in this pass.
        """
        out = logits.tape.buffer(logits.rows, NUM_REPORT_COLUMNS)
        logits.tape.write(
            report, logits.rows, scope=self.scope, logits=logits, vocab_size=logits.size, raw=raw,
            found=accepted.tokens, counts=accepted.counts, out=out,
        )  # fmt: skip
        return out

    def accept(self, drawn: Buffer) -> Accepted:
        """Write the instruction that accepts drafts.

        Args:
            drawn: `[W, 1] int32`, the token drawn at each wanted row.
        """
        tape, scope = drawn.tape, self.scope
        found, counts = tape.buffer(scope.wanted, 1), tape.buffer(scope.sampled, 1)
        tape.write(accept, scope.sampled, scope=scope, drawn=drawn, found=found, counts=counts)
        return Accepted(tokens=found, counts=counts)

    def hold_logits(self, held: HeldLogits, logits: Buffer, index: int) -> None:
        """Write the instruction that holds the logits of drafts of this pass, until `reject` reads them.

        Args:
            held: by row.
            logits: `[W, V]`.
            index: of the draft in its chain.
        """
        logits.tape.write(
            hold_logits, self.scope.sampled, scope=self.scope, logits=logits, held=held.logits,
            vocab_size=logits.size, num_drafts=held.logits.shape[1], index=index,
        )  # fmt: skip

    def reject(self, logits: Buffer, held: HeldLogits) -> Accepted:
        """Write the instruction that verifies drafts by rejection sampling, and draws all tokens.

        Args:
            logits: `[W, V]` of the target.
            held: of the drafts of its rows.
        """
        tape, scope = logits.tape, self.scope
        found, counts = tape.buffer(scope.wanted, 1), tape.buffer(scope.sampled, 1)
        scratch = tape.buffer(scope.sampled, 2 * logits.size)
        tape.write(
            reject, scope.sampled, scope=scope, logits=logits, held=held.logits, vocab_size=logits.size,
            num_drafts=held.logits.shape[1], found=found, counts=counts, scratch=scratch,
        )  # fmt: skip
        return Accepted(tokens=found, counts=counts)

    def lay_out(
        self, scopes: Int64, counts: Int64, grants: Grants, *, ahead: int = 0, all_wanted: bool = False
    ) -> Outcome:
        """Fill the inputs and the scope; see `compiled.layout.lay_out`.

        Args:
            scopes: of the run, written.
            counts: of the run, written.
            grants: what to compute.
            ahead: added to all positions.
            all_wanted: whether all tokens of sampled grants are wanted, and none is accepted.
        """
        index, rotations, kept = self.scope.index, self._rotations, grants.pooled
        if len(grants.routed) or len(grants.stated):
            kept = np.concatenate([kept, grants.granted.beside])
        while True:
            outcome = lay_out(
                scopes, index, counts, rotations.columns, grants.rows, grants.starts, grants.counts, grants.sampled,
                grants.promised, grants.sampling.words, ahead, all_wanted, grants.scored, kept,
            )  # fmt: skip
            scopes[index, Column.NUM_POOLED] = len(grants.pooled)  # the others are kept and not added up
            if outcome == Outcome.DONE and self._has_states and len(grants.states):
                _lay_out_states(scopes[index], grants)
            if outcome != Outcome.TOO_FAR:
                return outcome
            rotations.reach(int(scopes[index, Column.NUM_ROTATIONS]))


def _lay_out_states(scope: Int64, grants: Grants) -> None:
    """Fill the tables of states of a scope."""
    num_grants, num_tokens = len(grants.rows), int(grants.counts.sum())
    integers_at(scope[Column.STATES], 2 * num_grants)[:] = grants.states.ravel()
    starts = integers_at(scope[Column.STARTS], num_grants)
    integers_at(scope[Column.SAVES], num_tokens)[:] = state_saves(grants.state_copies, starts, grants.counts)


def _columns(x: Buffer, start: int, size: int) -> Buffer:
    """Write the instruction that copies `size` columns of `x` from `start` on; return the copy."""
    out = x.tape.buffer(x.rows, size)
    x.tape.write(columns, x.rows, x=x, out=out, size=x.size, out_size=size, column=start)
    return out


def side_by_side(parts: Sequence[Buffer]) -> Buffer:
    """Write the instructions that put the columns of all `parts` side by side, in new memory; return it."""
    tape = parts[0].tape
    out, start = tape.buffer(parts[0].rows, sum(part.size for part in parts)), 0
    for part in parts:
        tape.write(put, part.rows, x=part, out=out, size=part.size, out_size=out.size, column=start)
        start += part.size
    return out
