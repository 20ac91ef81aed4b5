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
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.sampling import SamplingArrays
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.runner.cpu.attention import CPUAttention
from pagewood.engine.runner.cpu.compiled.drafting import adjust
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
        "_attention", "_drafts", "_every", "_extension", "_greedy", "_has_state", "_head", "_hidden", "_passes",
        "_planned", "_rotations", "_rows", "_slots", "_states", "_target", "_token_map", "_uses_rejection", "counts",
        "max_nodes", "max_tokens",
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
        self._greedy = SamplingArrays.of([SamplingParams(temperature=0.0)] * num_rows, [0] * num_rows)
        self._every = np.arange(num_rows, dtype=np.int32)
        self._passes: list[Pass] = []  # written by: record_drafts
        self._extension: Pass | None = None  # written by: record_rest
        self._hidden: Sequence[Buffer] = ()  # written by: record_target
        self._drafts: list[Grants] = []  # written by: plan
        self._planned: Grants | None = None  # written by: plan
        self.max_nodes = 0
        self.max_tokens = max_tokens
        self.counts = DraftCounts()  # written by: plan

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide how many tokens are drafted; see `ProgramDrafter`."""
        self._drafts, self._planned = [], None
        admitted = batch.rows[batch.admitted]
        if len(admitted) > 0:
            self._slots.begin(admitted)
            self._has_state[admitted] = False
        if grants is None:
            return
        rows, lengths, before = grants.rows, self._rows.lengths, self.counts
        starts = np.maximum(np.minimum(grants.starts, lengths[rows] - 1), 0)
        self._slots.follow(rows, starts, passes_gaps=True)
        self._slots.start(rows)
        drafting = np.flatnonzero(grants.promised > 1)
        which = grants.sampled[drafting]
        ready = self._has_state[rows[which]]
        grants.counts[which[~ready]] = 1
        self.counts = replace(
            before,
            num_ready=before.num_ready + int(np.count_nonzero(ready)),
            num_postponed=before.num_postponed + int(np.count_nonzero(~ready)),
            num_short=before.num_short + int(np.count_nonzero(self._slots.begins[admitted])),
        )
        self._has_state[rows[grants.sampled]] = True  # after this step
        count = len(rows)
        self._planned = Grants(
            rows=rows,
            starts=starts,
            counts=grants.counts,
            sampled=self._every[:count],
            promised=np.ones(count, np.int32),
            sampling=SamplingArrays(**{name: array[:count] for name, array in self._greedy.fields().items()}),
        )
        num_drafts = np.where(ready, grants.counts[which] - 1, 0)
        for depth in range(int(num_drafts.max(initial=0))):
            deeper = np.flatnonzero(num_drafts > depth)
            chosen = rows[which[deeper]]
            one = np.ones(len(deeper), np.int32)
            sampling = grants.sampling.take(drafting[deeper].astype(np.int32))
            self._drafts.append(
                Grants(
                    rows=chosen,
                    starts=lengths[chosen] - 1,
                    counts=one,
                    sampled=self._every[: len(deeper)],
                    promised=one,
                    sampling=independent(sampling) if self._uses_rejection else sampling,
                )
            )

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write a draw from the kept states, and a pass for each further draft; see `ProgramDrafter`."""
        head, states, self._passes = self._head, self._states, []
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
                verify.hold_logits(held, one, logits, depth)
            drawn = draw(logits, one.choices)
            tape.emit(Operation.NOTE, scope.sampled, scope.index, drawn, shift)
            self._passes.append(one)
        tape.emit(Operation.FILL, verify.scope.sampled, verify.scope.index, 0)
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
        self._extension = one

    def lay_out(self, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        outcome = Outcome.DONE
        if self._planned is not None and self._extension is not None:
            outcome = self._lay_out(self._extension, scopes, counts, self._planned, ahead=0, shift=0)
        for depth, (one, planned) in enumerate(zip(self._passes, self._drafts, strict=False)):
            ahead, shift = max(depth - 1, 0), min(depth, 1)
            outcome = max(outcome, self._lay_out(one, scopes, counts, planned, ahead=ahead, shift=shift))
        return outcome

    def _lay_out(
        self, one: Pass, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants, *, ahead: int, shift: int
    ) -> Outcome:
        """Lay out a pass whose draws lie `shift` positions behind the one after its pair."""
        outcome = one.lay_out(scopes, counts, grants, ahead=ahead)
        if outcome == Outcome.DONE:
            adjust(scopes, one.scope.index, len(grants.sampled), self._slots.begins, shift)
        return outcome

    def _new_pass(self, tape: Tape) -> Pass:
        layer = self._head.config.layer
        one = Pass(
            tape, self._rows, self._attention, self._rotations, half=layer.head_dim // 2, vocab_size=layer.vocab_size
        )
        tape.fill(one.scope, {Column.BEGINS: tape.buffer(one.scope.tokens, 1)})
        return one
