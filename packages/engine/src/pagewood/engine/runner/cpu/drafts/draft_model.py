"""A draft model: it computes each row's last tokens and then one draft after the other, before the target verifies.

Its keys and values lie in the pages of the target. A draft is drawn with the target's parameters, seed and position, so
that it equals the target's token wherever the two distributions are alike. For rejection sampling, drafts are drawn
with independent noise instead, and the logits that they are drawn from are held.

Legend: S grants with drafts.
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
from pagewood.engine.runner.cpu.compiled.drafting import passes
from pagewood.engine.runner.cpu.compiled.drafting.chains import Entry, Tally, lay_out_chains, plan_model
from pagewood.engine.runner.cpu.compiled.layout import Column, Outcome
from pagewood.engine.runner.cpu.drafts.drafting import DraftCounts, DrafterParts
from pagewood.engine.runner.cpu.drafts.valid_slots import ValidSlots
from pagewood.engine.runner.cpu.program.attention import attention_over
from pagewood.engine.runner.cpu.program.division import RequestDivision, add_pass
from pagewood.engine.runner.cpu.program.draws import draw, independent
from pagewood.engine.runner.cpu.program.passes import Accepted, Grants, HeldLogits, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer, Tape
from pagewood.engine.runner.storage import AnyStorage
from pagewood.kvpool.memory import PageMemory

_NOWHERE = np.empty(0, np.int32)


class DraftModel:
    """`ProgramDrafter` with a whole model. Invariant: the slots that a pass reads are valid, or written before."""

    __slots__ = (
        "_attention", "_division", "_entries", "_held", "_indices", "_last", "_max_rebuilt", "_model", "_num_entries",
        "_rotations", "_rows", "_slots", "_tally", "captures", "has_rest", "max_tokens",
    )  # fmt: skip

    captured = ()

    def __init__(
        self,
        model: Decoder[Buffer],
        storage: AnyStorage,
        tags: PageMemory,
        rows: RowTables,
        *,
        max_tokens: int,
        max_rebuilt: int = 512,
        root: int = 0,
        uses_rejection: bool = False,
        division: RequestDivision | None = None,
    ) -> None:
        """Draft with `model`.

        Args:
            model: its vocabulary is the target's.
            storage: the KV memory of `model`, with the page ids of the target's.
            tags: of its slots, in the layout `tag_layout`.
            rows: of the runner.
            max_tokens: most drafts of a row in a step.
            max_rebuilt: most positions of a row that a step computes again; a row that needs more gets no drafts until
                it is done.
            root: stands for the weights of `model`, see `ValidSlots`.
            uses_rejection: whether drafts are verified by rejection sampling.
            division: of the rows among ranks, each of which has the memory of its own; None: this rank has all.
        """
        self._division = division
        self._model = model
        self._rows = rows
        self._attention = attention_over(storage, [layer.mixer for layer in model.config.layers])
        self._rotations = Rotations(model.ropes, num_rows=len(rows.lengths))
        self._slots = ValidSlots(tags, rows, root=root)
        self._held = HeldLogits.of(len(rows.lengths), model.config.vocab_size, max_tokens) if uses_rejection else None
        self._max_rebuilt = max_rebuilt
        self._indices: NDArray[np.int64] = np.empty(0, np.int64)  # written by: record_drafts
        """Scope of each pass."""
        self._entries: Int32 = np.zeros((len(rows.lengths), len(Entry)), np.int32)  # contents written by: plan
        self._num_entries = 0  # written by: plan
        self._tally: NDArray[np.int64] = np.zeros(len(Tally), np.int64)  # contents written by: plan
        self._last: Int32 = np.full(len(rows.lengths), -1, np.int32)  # contents written by: plan
        """First position that each row had not computed when it was planned last; -1: not planned yet."""
        self.captures = self.has_rest = False
        self.max_tokens = max_tokens

    @property
    def counts(self) -> DraftCounts:
        """What was found until now."""
        return DraftCounts._make(self._tally.tolist())

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide which positions are computed and how many tokens are drafted; see `ProgramDrafter`."""
        self._num_entries = 0
        if len(batch.admitted) > 0:
            for row in batch.admitted_rows():
                self._slots.begin(row)
                self._last[row] = -1
        if grants is None or not grants.is_drafting:
            return
        rows, slots, division = self._rows, self._slots, self._division
        if division is not None:
            slots.follow(grants.rows[grants.sampled[grants.promised > 1]], rows, division)
        self._num_entries = plan_model(
            grants.rows, grants.counts, grants.sampled, grants.promised, rows.lengths, rows.tokens, rows.pages,
            slots.tags, slots.page_size, slots.positions, slots.chains, slots.begins, slots.work, self._last,
            self._max_rebuilt, int(division is None), self._entries, self._tally,
        )  # fmt: skip

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write a pass for the known tokens and for each draft but the last; see `ProgramDrafter`."""
        config, indices = self._model.config, []
        for depth in range(self.max_tokens):
            one, own, divided = add_pass(
                tape, self._rows, self._attention, self._rotations, self._division, vocab_size=config.vocab_size
            )
            scope = one.scope
            if depth > 0:
                tape.write(passes.fill, scope.sampled, scope=scope, shift=0)
            wanted = one.wanted if divided is None else own.kept
            states = self._model.states(one.tokens, own.rotated(), self._attention, wanted, division=divided)[0]
            logits = self._model.head(states)
            self._slots.record(own)
            one.adjust_drafts(logits)
            if self._held is not None:
                one.hold_logits(self._held, logits, depth)
            drawn = draw(logits, one.choices)
            tape.write(passes.note, scope.sampled, scope=scope, drawn=drawn, shift=0)
            indices.append(scope.index)
        tape.write(passes.fill, verify.scope.sampled, scope=verify.scope, shift=0)
        self._indices = np.array(indices, np.int64)
        return self._held

    def exchange(self, parts: DrafterParts) -> DrafterParts:
        """Draft with the same weights as before; see `ProgramDrafter`."""
        return parts

    def record_target(self, tape: Tape, verify: Pass, hidden: Sequence[Buffer]) -> None:
        """Do nothing: a draft model reads tokens only."""

    def record_rest(self, tape: Tape, verify: Pass, accepted: Accepted) -> None:
        """Do nothing: a draft model needs nothing from the target."""

    def lay_out(self, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        if self._num_entries == 0:
            return Outcome.DONE
        rotations = self._rotations
        sampling = independent(grants.sampling) if self._held is not None else grants.sampling
        while True:
            outcome = lay_out_chains(
                scopes, counts, self._indices, self._entries, self._num_entries, rotations.columns,
                sampling.words, _NOWHERE, 0,
            )  # fmt: skip
            if outcome != Outcome.TOO_FAR:
                return outcome
            rotations.reach(int(scopes[self._indices, Column.NUM_ROTATIONS].max()))
