"""A draft model: it computes each row's last tokens and then one draft after the other, before the target verifies.

Its keys and values lie in the pages of the target. A draft is drawn with the target's parameters, seed and position, so
that it equals the target's token wherever the two distributions are alike. For rejection sampling, drafts are drawn
with independent noise instead, and the logits that they are drawn from are held.

Legend: S grants with drafts.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.runner.cpu.attention import CPUAttention
from pagewood.engine.runner.cpu.compiled.layout import Outcome
from pagewood.engine.runner.cpu.compiled.step import Operation
from pagewood.engine.runner.cpu.passes import Accepted, Grants, HeldLogits, Pass, Rotations, RowTables
from pagewood.engine.runner.cpu.sampling import draw, independent
from pagewood.engine.runner.cpu.tape import Buffer, Tape
from pagewood.engine.runner.cpu.valid_slots import ValidSlots
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.storage import KVStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """What a drafter found in its KV memory, since it was made."""

    num_ready: int = 0
    """Drafts of a row that needed only tokens which no earlier step could compute."""
    num_rebuilt: int = 0
    """Positions that were computed again, or for the first time, because their slots were not valid."""
    num_postponed: int = 0
    """Times that a row got no drafts, because too many of its slots were not valid."""
    num_short: int = 0
    """Rows that started with a shorter context, because slots were not valid and could not be computed again."""


class DraftModel:
    """`ProgramDrafter` with a whole model. Invariant: the slots that a pass reads are valid, or written before."""

    __slots__ = (
        "_attention", "_last", "_max_rebuilt", "_model", "_passes", "_planned", "_rotations", "_rows", "_slots",
        "_target", "_uses_rejection", "counts", "max_nodes", "max_tokens",
    )  # fmt: skip

    def __init__(
        self,
        model: Decoder[Buffer],
        target: Decoder[Buffer],
        storage: KVStorage,
        tags: PageMemory,
        rows: RowTables,
        *,
        max_tokens: int,
        max_rebuilt: int = 512,
        root: int = 0,
        uses_rejection: bool = False,
    ) -> None:
        """Draft for `target`.

        Args:
            model: to draft with; its vocabulary is the target's.
            target: of the runner.
            storage: the KV memory of `model`, with the page ids of the target's.
            tags: of its slots, in the layout `tag_layout`.
            rows: of the runner.
            max_tokens: most drafts of a row in a step.
            max_rebuilt: most positions of a row that a step computes again; a row that needs more gets no drafts until
                it is done.
            root: stands for the weights of `model`, see `ValidSlots`.
            uses_rejection: whether drafts are verified by rejection sampling.
        """
        self._model = model
        self._target = target
        self._rows = rows
        self._attention = CPUAttention(storage, num_heads=model.config.num_heads, windows=model.config.windows)
        self._rotations = Rotations(model.rope)
        self._slots = ValidSlots(tags, rows, root=root)
        self._max_rebuilt = max_rebuilt
        self._passes: list[Pass] = []  # written by: record_drafts
        self._planned: list[Grants] = []  # written by: plan
        self._uses_rejection = uses_rejection
        self._last: Int32 = np.full(len(rows.lengths), -1, np.int32)  # contents written by: plan
        """First position that each row had not computed when it was planned last; -1: not planned yet."""
        self.max_nodes = 0
        self.max_tokens = max_tokens
        self.counts = DraftCounts()  # written by: plan

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide which positions are computed and how many tokens are drafted; see `ProgramDrafter`."""
        self._planned = []
        if len(batch.admitted) > 0:
            admitted = batch.rows[batch.admitted]
            self._slots.begin(admitted)
            self._last[admitted] = -1
        if grants is None:
            return
        drafting = np.flatnonzero(grants.promised > 1)
        if len(drafting) == 0:
            return
        which = grants.sampled[drafting]
        rows = grants.rows[which]
        ends = self._rows.lengths[rows] - 1
        self._slots.follow(rows, ends, passes_gaps=False)
        starts = self._slots.positions[rows]
        missing = ends - starts
        # A row that accepted all of its drafts lacks the last of them: no pass has computed it.
        expected = np.where(self._last[rows] == starts, np.minimum(missing, 1), 0)
        postponed = missing > self._max_rebuilt
        grants.counts[which[postponed]] = 1
        computed = np.where(postponed, self._max_rebuilt, missing + 1).astype(np.int32)
        self._last[rows] = starts + computed + grants.counts[which] - 2
        before = self.counts
        self.counts = DraftCounts(
            num_ready=before.num_ready + int(np.count_nonzero(missing <= expected)),
            num_rebuilt=before.num_rebuilt + int((computed - ~postponed - expected).sum()),
            num_postponed=before.num_postponed + int(np.count_nonzero(postponed)),
        )
        sampling = grants.sampling.take(drafting.astype(np.int32))
        if self._uses_rejection:
            sampling = independent(sampling)
        one = np.ones(len(rows), np.int32)
        every = np.arange(len(rows), dtype=np.int32)
        planned = Grants(rows=rows, starts=starts, counts=computed, sampled=every, promised=one, sampling=sampling)
        self._planned.append(planned)
        num_drafts = grants.counts[which] - 1
        for depth in range(1, int(num_drafts.max())):
            deeper = np.flatnonzero(num_drafts > depth).astype(np.int32)
            count = len(deeper)
            self._planned.append(
                Grants(
                    rows=rows[deeper],
                    starts=ends[deeper],
                    counts=one[:count],
                    sampled=every[:count],
                    promised=one[:count],
                    sampling=sampling if count == len(rows) else sampling.take(deeper),
                )
            )
        self._slots.start(rows)

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write a pass for the known tokens and for each draft but the last; see `ProgramDrafter`."""
        config, self._passes = self._model.config, []
        held = verify.held_logits(config.vocab_size, self.max_tokens) if self._uses_rejection else None
        for depth in range(self.max_tokens):
            one = Pass(
                tape, self._rows, self._attention, self._rotations, half=config.head_dim // 2,
                vocab_size=config.vocab_size,
            )  # fmt: skip
            scope = one.scope
            if depth > 0:
                tape.emit(Operation.FILL, scope.sampled, scope.index, 0)
            self._slots.record(one)
            logits = self._model(one.tokens, (one.cosines, one.sines), self._attention, one.wanted)
            if held is not None:
                verify.hold_logits(held, one, logits, depth)
            drawn = draw(logits, one.choices)
            tape.emit(Operation.NOTE, scope.sampled, scope.index, drawn, 0)
            self._passes.append(one)
        tape.emit(Operation.FILL, verify.scope.sampled, verify.scope.index, 0)
        return held

    def record_target(self, tape: Tape, verify: Pass, attention: CPUAttention) -> Buffer:
        """Write the instructions of the target; see `ProgramDrafter`."""
        return self._target(verify.tokens, (verify.cosines, verify.sines), attention, verify.wanted)

    def record_rest(self, tape: Tape, verify: Pass, accepted: Accepted) -> None:
        """Do nothing: a draft model needs nothing from the target."""

    def lay_out(self, scopes: NDArray[np.int64], counts: NDArray[np.int64], grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        outcome = Outcome.DONE
        for depth, (one, planned) in enumerate(zip(self._passes, self._planned, strict=False)):
            outcome = max(outcome, one.lay_out(scopes, counts, planned, ahead=depth))
        return outcome
