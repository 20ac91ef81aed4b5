"""A drafting head: it reads the target's hidden states at the end of a step, and drafts at the start of the next one.

At the end of a step, the head computes the pairs of all positions of the step, and keeps for each row its hidden state
at the last accepted one. The next step draws the first draft from that, and each further draft costs a pass over one
pair.

Legend: G grants of a step, E elements of a hidden state of the head.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.runner.cpu.compiled.drafting import passes
from pagewood.engine.runner.cpu.compiled.drafting.chains import (
    Entry,
    Tally,
    lay_out_chains,
    lay_out_pairs,
    plan_head,
)
from pagewood.engine.runner.cpu.compiled.layout import Column, Outcome
from pagewood.engine.runner.cpu.drafts.drafting import DraftCounts, DrafterParts
from pagewood.engine.runner.cpu.drafts.valid_slots import ValidSlots
from pagewood.engine.runner.cpu.program.attention import attention_over
from pagewood.engine.runner.cpu.program.division import DividedPass, RequestDivision, add_pass
from pagewood.engine.runner.cpu.program.draws import draw, independent
from pagewood.engine.runner.cpu.program.passes import Accepted, Grants, HeldLogits, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer, Tape
from pagewood.engine.runner.storage import AnyStorage
from pagewood.kvpool.memory import PageMemory

PATIENCE = 2
"""Steps without drafts for which the head goes on to compute the pairs of rows that decode."""
_NOWHERE = np.empty(0, np.int32)
_MAX_DEPTH = 32
_STASH_BYTES = 64 << 20


class EagleDrafter:
    """`ProgramDrafter` with a head. Invariant: a row drafts only from the head's state at its last known token.

    While rows decode without drafts, the head is left out after some steps. The target's hidden states of the last
    positions of each row are remembered, so that a row that gets drafts again catches up first. If it has left out
    more positions, its context begins with those that it computes again.

    While batches need not be followed (`Batch.is_followed`), the head sleeps: not even hidden states are remembered.
    For a row that was computed meanwhile, context begins at the first step that is followed again; if that step wants
    drafts at once, the row gets none in it. The head cannot catch up on positions whose states were not kept.

    A slot's tag stands for the tokens up to its position, though the pair in it also has the token after it. So the
    last slot of a cached prefix counts as valid for a row that goes on differently: one key among many is out of date,
    which costs less than a shorter context.
    """

    __slots__ = (
        "_attention", "_catch_up", "_depth", "_division", "_entries", "_extension", "_firsts", "_has_state", "_head",
        "_held", "_hidden", "_indices", "_late", "_missing", "_num_entries", "_num_idle", "_num_late", "_rotations",
        "_rows", "_sleeps", "_slots", "_stashes", "_states", "_tally", "_token_map",
        "captures", "has_rest", "max_tokens",
    )  # fmt: skip

    def __init__(
        self,
        head: Head[Buffer],
        target: Decoder[Buffer],
        storage: AnyStorage,
        tags: PageMemory,
        rows: RowTables,
        *,
        max_tokens: int,
        root: int = 0,
        uses_rejection: bool = False,
        division: RequestDivision | None = None,
    ) -> None:
        """Draft for `target`.

        Args:
            head: to draft with.
            target: of the runner.
            storage: the KV memory of `head`, with the page ids of the target's.
            tags: of its slots, in the layout `tag_layout`.
            rows: of the runner.
            max_tokens: most drafts of a row in a step.
            root: stands for the weights of `head`, see `ValidSlots`.
            uses_rejection: whether drafts are verified by rejection sampling.
            division: of the rows among ranks, each of which has the memory and the states of its own; None: this rank
                has all.
        """
        self._division = division
        layer, num_rows = head.config.layer, len(rows.lengths)
        self._head = head  # written by: exchange
        self._rows = rows
        self._attention = attention_over(storage, [one.mixer for one in layer.layers])
        self._rotations = Rotations(head.ropes, num_rows=num_rows)
        self._slots = ValidSlots(tags, rows, root=root)
        self._states = np.zeros((num_rows, layer.hidden_size), np.float32)  # contents written by: the program
        self._has_state = np.zeros(num_rows, np.bool_)  # contents written by: plan
        tokens = head.token_map
        self._token_map = None if tokens is None else np.ascontiguousarray(tokens.numpy(), np.int32)
        self._held = HeldLogits.of(num_rows, layer.vocab_size, max_tokens) if uses_rejection else None
        self._hidden: Sequence[Buffer] = ()  # written by: record_target
        self._indices: NDArray[np.int64] = np.empty(0, np.int64)  # written by: record_drafts
        """Scope of each pass that drafts."""
        self._extension = -1  # written by: record_rest
        """Scope of the pass at the end of a step."""
        self._catch_up = -1  # written by: record_drafts
        """Scope of the pass over positions that the head has left out."""
        row_bytes = 4 * target.config.hidden_size * len(head.config.captured)
        self._depth = max(1, min(_MAX_DEPTH, _STASH_BYTES // (row_bytes * num_rows)))
        self._stashes = [  # contents written by: the program
            np.zeros((num_rows, self._depth, target.config.hidden_size), np.float32) for _ in head.config.captured
        ]
        """[rows, depth, size] of each state that the head reads, of the last positions of a row."""
        self._missing: Int32 = np.full(num_rows, -1, np.int32)  # contents written by: plan
        """First position of each row that the head has left out; -1: none."""
        self._num_idle = 0  # written by: plan
        """Steps in succession in which rows decoded without drafts."""
        self._sleeps = False
        """Whether steps since the last one with the head were not followed."""  # written by: plan
        self._late: Int32 = np.zeros((3, num_rows), np.int32)  # contents written by: plan
        """Rows that catch up in a step, their first positions, and how many they are."""
        self._num_late: NDArray[np.int64] = np.zeros(1, np.int64)  # contents written by: plan
        self.has_rest = False  # written by: plan
        self.captures = False  # written by: plan
        self._firsts: Int32 = np.zeros(num_rows, np.int32)  # contents written by: plan
        self._entries: Int32 = np.zeros((num_rows, len(Entry)), np.int32)  # contents written by: plan
        self._num_entries = 0  # written by: plan
        self._tally: NDArray[np.int64] = np.zeros(len(Tally), np.int64)  # contents written by: plan
        self.max_tokens = max_tokens

    @property
    def counts(self) -> DraftCounts:
        """What was found until now."""
        return DraftCounts._make(self._tally.tolist())

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide how many tokens are drafted; see `ProgramDrafter`."""
        self._num_entries, self.has_rest, self.captures = 0, False, False
        if len(batch.admitted) > 0:
            admitted = batch.admitted_rows()
            for row in admitted:
                self._slots.begin(row)
                self._has_state[row] = False
                self._missing[row] = -1
        if grants is None:
            return
        if not grants.is_drafting and not batch.is_followed:
            self._sleeps = True
            return
        if self._sleeps:  # what is remembered of any row may have a gap
            self._sleeps, self._num_idle = False, PATIENCE + 1
            self._has_state[:] = False
            self._missing[:] = -1
        is_idle = not grants.is_drafting and self._num_idle > PATIENCE
        if grants.is_drafting:
            self._num_idle = 0
        elif not is_idle and 1 in grants.counts.tolist():
            self._num_idle += 1
            is_idle = self._num_idle > PATIENCE
            if is_idle:
                self._has_state[:] = False
        self.captures = True
        rows, slots, division = self._rows, self._slots, self._division
        pages, owners, rank = rows.pages, _NOWHERE, 0
        if division is not None:
            pages, owners, rank = division.own_pages, division.owners(grants.rows), division.exchange.rank
        num_entries = plan_head(
            grants.rows, grants.starts, grants.counts, grants.sampled, grants.promised, rows.lengths, rows.tokens,
            pages, slots.tags, slots.page_size, slots.positions, slots.chains, slots.begins, slots.work,
            self._has_state, self._missing, self._depth, is_idle, owners, rank, self._firsts, self._late,
            self._num_late, self._entries, self._tally,
        )  # fmt: skip
        self.has_rest = num_entries >= 0
        self._num_entries = max(num_entries, 0)
        if division is not None and self.has_rest:  # all ranks count the gaps of all rows
            self._tally[Tally.SHORT] += slots.gather_begins(grants.rows, division)

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write a draw from the kept states, and a pass for each further draft; see `ProgramDrafter`."""
        head, states, indices = self._head, self._states, []
        size = states.shape[1]
        self._record_catch_up(tape)
        for depth in range(self.max_tokens):
            one, own, divided = self._new_pass(tape)
            scope, shift, wanted = one.scope, min(depth, 1), own.wanted if divided is None else own.kept
            hidden = tape.buffer(wanted.rows if depth == 0 else own.scope.tokens, size)
            tape.write(passes.recall, own.scope.sampled, scope=own.scope, states=states, out=hidden, size=size)
            if depth == 0:
                logits = head.logits(hidden, division=divided)
            else:
                tape.write(passes.fill, scope.sampled, scope=scope, shift=shift)
                logits, fed = head(
                    one.tokens, hidden, own.rotated(), self._attention, wanted, division=divided
                )  # fmt: skip
                tape.write(passes.keep, own.scope.sampled, scope=own.scope, x=fed, states=states, size=size)
            if self._token_map is not None:
                part, vocab_size = logits, head.config.layer.vocab_size
                logits = tape.buffer(part.rows, vocab_size)
                tape.write(
                    passes.spread, scope.sampled, logits=part, size=part.size, token_map=self._token_map, out=logits,
                    vocab_size=vocab_size,
                )  # fmt: skip
            if self._held is not None:
                one.hold_logits(self._held, logits, depth)
            drawn = draw(logits, one.choices)
            tape.write(passes.note, scope.sampled, scope=scope, drawn=drawn, shift=shift)
            indices.append(scope.index)
        tape.write(passes.fill, verify.scope.sampled, scope=verify.scope, shift=0)
        self._indices = np.array(indices, np.int64)
        return self._held

    def exchange(self, parts: DrafterParts) -> DrafterParts:
        """Read the states of another target, whose requests get slots of their own; see `ProgramDrafter`."""
        assert isinstance(parts.model, Head)
        before = DrafterParts(model=self._head, root=self._slots.root)
        self._head, self._slots.root = parts.model, parts.root
        return before

    @property
    def captured(self) -> Sequence[int]:
        """See `ProgramDrafter`."""
        return self._head.config.captured

    def record_target(self, tape: Tape, verify: Pass, hidden: Sequence[Buffer]) -> None:
        """Write instructions that keep the hidden states that the head reads."""
        self._hidden, scope = hidden, verify.scope
        for state, stash in zip(self._hidden, self._stashes, strict=True):
            tape.write(
                passes.stash, scope.sampled, scope=scope, x=state, x_size=state.size, column=0, size=state.size,
                stash=stash, depth=self._depth,
            )  # fmt: skip

    def record_rest(self, tape: Tape, verify: Pass, accepted: Accepted) -> None:
        """Write the pass of the head over all positions of the step; see `ProgramDrafter`."""
        one, own, divided = self._new_pass(tape)
        scope = verify.scope
        tape.write(passes.last, scope.sampled, scope=one.scope, target=scope, counts=accepted.counts)
        if divided is not None:
            divided.keep_others(tape)
        self._record_pairs(tape, one, own, divided, self._hidden)
        self._extension = one.scope.index

    def lay_out(self, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        rotations, begins = self._rotations, self._slots.begins
        sampling = independent(grants.sampling) if self._held is not None else grants.sampling
        outcome = Outcome.DONE
        if self.has_rest:
            outcome = self._lay_out_pairs(scopes, counts, self._extension, grants.rows, self._firsts, grants.counts)
            if (num_late := int(self._num_late[0])) > 0:
                rows, firsts, nums = self._late[:, :num_late].copy()
                outcome = max(outcome, self._lay_out_pairs(scopes, counts, self._catch_up, rows, firsts, nums))
        while self._num_entries > 0:
            drafts = lay_out_chains(
                scopes, counts, self._indices, self._entries, self._num_entries, rotations.columns,
                sampling.words, begins, 1,
            )  # fmt: skip
            if drafts != Outcome.TOO_FAR:
                return max(outcome, drafts)
            rotations.reach(int(scopes[self._indices, Column.NUM_ROTATIONS].max()))
        return outcome

    def _record_catch_up(self, tape: Tape) -> None:
        """Write the pass over positions that the head has left out, from the states that are kept of them."""
        late, own, divided = self._new_pass(tape)
        self._catch_up, captured = late.scope.index, []
        for stash in self._stashes:
            out = tape.buffer(own.scope.tokens, stash.shape[2])
            tape.write(
                passes.unstash, own.scope.sampled, scope=own.scope, stash=stash, depth=self._depth, out=out,
                size=stash.shape[2],
            )  # fmt: skip
            captured.append(out)
        self._record_pairs(tape, late, own, divided, captured)

    def _record_pairs(
        self, tape: Tape, one: Pass, own: Pass, divided: DividedPass | None, captured: Sequence[Buffer]
    ) -> None:
        """Write a pass over pairs, with the target's states, that keeps the head's state at its wanted tokens."""
        scope, states, wanted = own.scope, self._states, own.wanted if divided is None else own.kept
        hidden = self._head.features(captured)
        tape.write(passes.fill, one.scope.sampled, scope=one.scope, shift=1)
        fed = self._head.advance(one.tokens, hidden, own.rotated(), self._attention, wanted, division=divided)
        self._slots.record(own)
        tape.write(passes.keep, scope.sampled, scope=scope, x=fed, states=states, size=states.shape[1])

    def _lay_out_pairs(
        self, scopes: NDArray[np.int64], counts: NDArray[np.int64], index: int, rows: Int32, firsts: Int32, nums: Int32
    ) -> Outcome:
        """Lay out a pass over pairs."""
        while True:
            outcome = lay_out_pairs(
                scopes, counts, index, self._rotations.columns, rows, firsts, nums, self._slots.begins
            )
            if outcome != Outcome.TOO_FAR:
                return outcome
            self._rotations.reach(int(scopes[index, Column.NUM_ROTATIONS]))

    def _new_pass(self, tape: Tape) -> tuple[Pass, Pass, DividedPass | None]:
        """Return what `add_pass` does, with a table of where attention begins."""
        vocab_size = self._head.config.layer.vocab_size
        one, own, divided = add_pass(
            tape, self._rows, self._attention, self._rotations, self._division, vocab_size=vocab_size
        )
        for each in dict.fromkeys((one.scope, own.scope)):
            tape.fill(each, {Column.BEGINS: tape.buffer(each.tokens, 1)})
        return one, own, divided
