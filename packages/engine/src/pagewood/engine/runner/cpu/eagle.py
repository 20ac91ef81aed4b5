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

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.runner.cpu.attention import CPUAttention
from pagewood.engine.runner.cpu.compiled.chains import (
    Entry,
    Tally,
    lay_out_chains,
    lay_out_extension,
    plan_head,
)
from pagewood.engine.runner.cpu.compiled.layout import Column, Outcome
from pagewood.engine.runner.cpu.compiled.step import Operation
from pagewood.engine.runner.cpu.draft_model import DraftCounts
from pagewood.engine.runner.cpu.passes import Accepted, Grants, HeldLogits, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.sampling import draw, independent
from pagewood.engine.runner.cpu.tape import Buffer, Tape
from pagewood.engine.runner.cpu.valid_slots import ValidSlots
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.storage import KVStorage


class EagleDrafter:
    """`ProgramDrafter` with a head. Invariant: a row drafts only from a state that its own latest step has left.

    A slot's tag stands for the tokens up to its position, though the pair in it also has the token after it. So the
    last slot of a cached prefix counts as valid for a row that goes on differently: one key among many is out of date,
    which costs less than a shorter context.
    """

    __slots__ = (
        "_attention", "_entries", "_extension", "_firsts", "_has_state", "_head", "_hidden", "_indices", "_is_extended",
        "_num_entries", "_rotations", "_rows", "_slots", "_states", "_tally", "_target", "_token_map",
        "_uses_rejection", "max_nodes", "max_tokens",
    )  # fmt: skip

    def __init__(
        self,
        head: Head[Buffer],
        target: Decoder[Buffer],
        storage: KVStorage,
        tags: PageMemory,
        rows: RowTables,
        *,
        max_tokens: int,
        root: int = 0,
        uses_rejection: bool = False,
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
        """
        layer, num_rows = head.config.layer, len(rows.lengths)
        windows = layer.windows[: head.config.num_layers]
        self._head = head
        self._target = target
        self._rows = rows
        self._attention = CPUAttention(storage, num_heads=layer.num_heads, windows=windows)
        self._rotations = Rotations(head.rope)
        self._slots = ValidSlots(tags, rows, root=root)
        self._states = np.zeros((num_rows, layer.hidden_size), np.float32)  # contents written by: the program
        self._has_state = np.zeros(num_rows, np.bool_)  # contents written by: plan
        tokens = head.token_map
        self._token_map = None if tokens is None else np.ascontiguousarray(tokens.numpy(), np.int32)
        self._uses_rejection = uses_rejection
        self._hidden: Sequence[Buffer] = ()  # written by: record_target
        self._indices: NDArray[np.int64] = np.empty(0, np.int64)  # written by: record_drafts
        """Scope of each pass that drafts."""
        self._extension = -1  # written by: record_rest
        """Scope of the pass at the end of a step."""
        self._is_extended = False  # written by: plan
        """Whether the step has this pass."""
        self._firsts: Int32 = np.zeros(num_rows, np.int32)  # contents written by: plan
        self._entries: Int32 = np.zeros((num_rows, len(Entry)), np.int32)  # contents written by: plan
        self._num_entries = 0  # written by: plan
        self._tally: NDArray[np.int64] = np.zeros(len(Tally), np.int64)  # contents written by: plan
        self.max_nodes = 0
        self.max_tokens = max_tokens

    @property
    def counts(self) -> DraftCounts:
        """What was found until now."""
        return DraftCounts.of(self._tally)

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide how many tokens are drafted; see `ProgramDrafter`."""
        self._num_entries, self._is_extended = 0, False
        if len(batch.admitted) > 0:
            admitted = batch.rows[batch.admitted]
            self._slots.begin(admitted)
            self._has_state[admitted] = False
        if grants is None:
            return
        rows, slots = self._rows, self._slots
        self._is_extended = True
        self._num_entries = plan_head(
            grants.rows, grants.starts, grants.counts, grants.sampled, grants.promised, rows.lengths, rows.tokens,
            rows.pages, slots.tags, slots.page_size, slots.positions, slots.chains, slots.begins, slots.work,
            self._has_state, self._firsts, self._entries, self._tally,
        )  # fmt: skip

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write a draw from the kept states, and a pass for each further draft; see `ProgramDrafter`."""
        head, states, indices = self._head, self._states, []
        held = verify.held_logits(head.config.layer.vocab_size, self.max_tokens) if self._uses_rejection else None
        size = states.shape[1]
        for depth in range(self.max_tokens):
            one = self._new_pass(tape)
            scope, shift = one.scope, min(depth, 1)
            hidden = tape.buffer(scope.wanted if depth == 0 else scope.tokens, size)
            tape.emit(Operation.RECALL, scope.sampled, scope.index, states, hidden, size)
            if depth == 0:
                logits = head.logits(hidden)
            else:
                tape.emit(Operation.FILL, scope.sampled, scope.index, shift)
                logits, fed = head(one.tokens, hidden, (one.cosines, one.sines), self._attention, one.wanted)
                tape.emit(Operation.KEEP, scope.sampled, scope.index, fed, states, size)
            if self._token_map is not None:
                part, vocab_size = logits, head.config.layer.vocab_size
                logits = tape.buffer(part.rows, vocab_size)
                tape.emit(
                    Operation.SPREAD, scope.sampled, scope.index, part, part.size, self._token_map, logits, vocab_size
                )
            if held is not None:
                verify.hold(held, one, logits, depth)
            drawn = draw(logits, one.choices)
            tape.emit(Operation.NOTE, scope.sampled, scope.index, drawn, shift)
            indices.append(scope.index)
        tape.emit(Operation.FILL, verify.scope.sampled, verify.scope.index, 0)
        self._indices = np.array(indices, np.int64)
        return held

    def record_target(self, tape: Tape, verify: Pass, attention: CPUAttention) -> Buffer:
        """Write the instructions of the target, which keep the hidden states that the head reads."""
        logits, self._hidden = self._target.with_states(
            verify.tokens, (verify.cosines, verify.sines), attention, verify.wanted, captured=self._head.config.captured
        )
        return logits

    def record_rest(self, tape: Tape, verify: Pass, accepted: Accepted) -> None:
        """Write the pass of the head over all positions of the step; see `ProgramDrafter`."""
        one = self._new_pass(tape)
        scope, states = one.scope, self._states
        hidden = self._head.features(self._hidden)
        tape.emit(Operation.FILL, scope.sampled, scope.index, 1)
        tape.emit(Operation.LAST, verify.scope.sampled, scope.index, verify.scope.index, accepted.counts)
        self._slots.record(one)
        fed = self._head.advance(one.tokens, hidden, (one.cosines, one.sines), self._attention, one.wanted)
        tape.emit(Operation.KEEP, scope.sampled, scope.index, fed, states, states.shape[1])
        self._extension = scope.index

    def lay_out(self, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        rotations, begins = self._rotations, self._slots.begins
        sampling = independent(grants.sampling) if self._uses_rejection else grants.sampling
        outcome = Outcome.DONE
        while self._is_extended:
            outcome = lay_out_extension(
                scopes, counts, self._extension, rotations.columns, grants.rows, self._firsts, self._extended(grants),
                begins,
            )  # fmt: skip
            if outcome != Outcome.TOO_FAR:
                break
            rotations.reach(int(scopes[self._extension, Column.NUM_ROTATIONS]))
        while self._num_entries > 0:
            drafts = lay_out_chains(
                scopes, counts, self._indices, self._entries, self._num_entries, rotations.columns,
                sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps, sampling.seeds, begins, 1,
            )  # fmt: skip
            if drafts != Outcome.TOO_FAR:
                return max(outcome, drafts)
            rotations.reach(int(scopes[self._indices, Column.NUM_ROTATIONS].max()))
        return outcome

    def _extended(self, grants: Grants) -> Int32:
        """Return how many positions of each grant the pass at the end of a step computes."""
        return grants.counts

    def _new_pass(self, tape: Tape, *, max_nodes: int = 0) -> Pass:
        layer = self._head.config.layer
        one = Pass(
            tape, self._rows, self._attention, self._rotations, half=layer.head_dim // 2, vocab_size=layer.vocab_size,
            max_nodes=max_nodes,
        )  # fmt: skip
        tape.fill(one.scope, {Column.BEGINS: tape.buffer(one.scope.tokens, 1)})
        return one
