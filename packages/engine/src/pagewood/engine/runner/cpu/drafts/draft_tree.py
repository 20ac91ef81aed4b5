"""Trees of drafts: the drafters of `draft_model` and `eagle`, which here compute a beam instead of a chain.

The nodes of a beam lie in slots behind the text of their row, and attend to the text and to their ancestors. Nothing of
them is kept: the slots lose their tags, and the next step computes the accepted tokens of the row again, in the pass
that it needs for the last one anyway.
"""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.arrays import Int32
from pagewood.engine.core.batch import Batch
from pagewood.engine.core.tree_shape import TreeShape
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.head import Head
from pagewood.engine.runner.cpu.compiled.drafting import passes, tree
from pagewood.engine.runner.cpu.compiled.drafting.chains import Entry
from pagewood.engine.runner.cpu.compiled.drafting.passes import adjust
from pagewood.engine.runner.cpu.compiled.drafting.tree import NUM_NODE_COLUMNS, shape
from pagewood.engine.runner.cpu.compiled.layout import Outcome
from pagewood.engine.runner.cpu.compiled.rows import take
from pagewood.engine.runner.cpu.drafts.draft_model import DraftModel
from pagewood.engine.runner.cpu.drafts.eagle import EagleDrafter
from pagewood.engine.runner.cpu.drafts.valid_slots import ValidSlots
from pagewood.engine.runner.cpu.program.passes import Accepted, Grants, HeldLogits, Pass, RowTables
from pagewood.engine.runner.cpu.program.tape import Buffer, Tape
from pagewood.kvpool.memory import PageMemory
from pagewood.kvpool.storage import KVStorage

Int64 = NDArray[np.int64]


class Trees:
    """The trees of all rows, and the instructions that grow them; see `compiled.drafting.tree`."""

    __slots__ = ("_beams", "_firsts", "_nodes", "_slots", "size")

    def __init__(self, size: TreeShape, slots: ValidSlots, num_rows: int) -> None:
        """Allocate them.

        Args:
            size: of the largest tree.
            slots: of the drafter; those of a beam lose their tags.
            num_rows: of the runner.
        """
        topk, depth = size.topk, size.depth
        self.size = size
        self._slots = slots
        num_candidates = topk + (depth - 1) * topk * topk
        ends = 1 + np.cumsum((0, *size.widths))
        self._firsts = np.array([*ends, ends[-1]], np.int32)
        # contents of both written by: the program
        self._nodes = np.zeros((num_rows, num_candidates, NUM_NODE_COLUMNS), np.int32)
        self._beams = np.full((num_rows, depth, topk), -1, np.int32)

    def expand(self, one: Pass, logits: Buffer, level: int) -> None:
        """Write the instructions that turn logits `[W, V]` of a pass into the candidates and the beam of a level."""
        tape, scope, topk = logits.tape, one.scope, self.size.topk
        tokens, scores = tape.buffer(scope.wanted, topk), tape.buffer(scope.wanted, topk)
        tape.write(
            tree.expand, scope.wanted, logits=logits, choices=one.choices, tokens=tokens, scores=scores,
            vocab_size=logits.size, topk=topk,
        )  # fmt: skip
        tape.write(
            tree.select, scope.sampled, scope=scope, tokens=tokens, scores=scores, nodes=self._nodes,
            beams=self._beams, topk=topk, num_levels=self.size.depth, level=level, firsts=self._firsts,
        )  # fmt: skip

    def climb(self, one: Pass, level: int) -> None:
        """Write the instruction that makes the beam of a level the tokens of a pass."""
        one.tokens.tape.write(
            tree.climb, one.scope.sampled, scope=one.scope, nodes=self._nodes, beams=self._beams, topk=self.size.topk,
            num_levels=self.size.depth, level=level, tags=self._slots.tags, page_size=self._slots.page_size,
            firsts=self._firsts,
        )  # fmt: skip

    def inherit(self, one: Pass, states: NDArray[np.float32], held: NDArray[np.float32], level: int) -> Buffer:
        """Write the instruction that returns the hidden states `[T, E]` of the parents of a beam."""
        tape, scope, size = one.tokens.tape, one.scope, states.shape[1]
        hidden = tape.buffer(scope.tokens, size)
        tape.write(
            tree.inherit, scope.sampled, scope=scope, states=states, held=held, nodes=self._nodes, beams=self._beams,
            topk=self.size.topk, num_levels=self.size.depth, level=level, out=hidden, size=size, firsts=self._firsts,
        )  # fmt: skip
        return hidden

    def graft(self, verify: Pass) -> None:
        """Write the instructions that make the best candidates the drafts of the target."""
        tape, scope = verify.tokens.tape, verify.scope
        tape.write(passes.fill, scope.sampled, scope=scope, shift=0)
        tape.write(
            tree.graft, scope.sampled, scope=scope, nodes=self._nodes, topk=self.size.topk, num_levels=self.size.depth
        )  # fmt: skip

    def plan(self, grants: Grants, entries: Int32, lengths: Int32) -> list[Grants]:
        """Return the passes of the beams, one for each level but the last.

        Args:
            grants: of the target's pass.
            entries: `[n, columns of Entry]`, rows of this step.
            lengths: `[rows]`, how many tokens of each row are known.
        """
        drafting = entries[entries[:, Entry.NUM_DRAFTS] > 0]
        depths = np.minimum(grants.promised[drafting[:, Entry.SAMPLED]] - 1, self.size.depth)
        planned: list[Grants] = []
        for level in range(1, int(depths.max(initial=0))):
            deeper = drafting[depths > level]
            rows, count = deeper[:, Entry.ROW].copy(), np.full(len(deeper), self.size.widths[level - 1], np.int32)
            planned.append(
                Grants(
                    rows=rows,
                    starts=lengths[rows] - 1,
                    counts=count,
                    sampled=np.arange(len(deeper), dtype=np.int32),
                    promised=count,
                    sampling=grants.sampling.take(deeper[:, Entry.SAMPLED].copy()),
                )
            )
        return planned

    def lay_out(self, one: Pass, scopes: Int64, counts: Int64, grants: Grants, *, level: int, shift: int) -> Outcome:
        """Lay out the pass of a beam; see `Pass.lay_out`.

        Args:
            one: the pass.
            scopes: of the run.
            counts: of the run.
            grants: from `plan`.
            level: of the beam.
            shift: how many positions the root of the drafter's tree lies before the last known token.
        """
        outcome = one.lay_out(scopes, counts, grants, ahead=level - shift)
        if outcome == Outcome.DONE:
            first = int(self._firsts[level - 1])
            shape(scopes, one.scope.index, len(grants.rows), self.size.widths[level - 1], first, level, shift)
        return outcome


class DraftModelTree(DraftModel):
    """`ProgramDrafter` with a whole model and trees."""

    __slots__ = ("_beams", "_passes", "_trees")

    def __init__(
        self,
        model: Decoder[Buffer],
        target: Decoder[Buffer],
        storage: KVStorage,
        tags: PageMemory,
        rows: RowTables,
        *,
        size: TreeShape,
        **options: Any,
    ) -> None:
        """Draft for `target`; see `DraftModel` for the arguments; `size` is that of the largest tree."""
        super().__init__(model, target, storage, tags, rows, max_tokens=size.depth, **options)
        self._trees = Trees(size, self._slots, len(rows.lengths))
        self._beams: list[Grants] = []  # written by: plan
        self._passes: list[Pass] = []  # written by: record_drafts
        """Of the beams."""
        self.max_nodes = 1 + size.num_nodes

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide which positions are computed, and which rows draft; see `ProgramDrafter`."""
        super().plan(batch, grants)
        self._beams = []
        if grants is not None:
            self._beams = self._trees.plan(grants, self._entries[: self._num_entries], self._rows.lengths)

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write a pass for the known tokens and one for each beam; see `ProgramDrafter`."""
        config, trees, self._passes = self._model.config, self._trees, []
        for level in range(self.max_tokens):
            one = Pass(
                tape, self._rows, self._attention, self._rotations, vocab_size=config.vocab_size,
                max_nodes=self.max_tokens,
            )  # fmt: skip
            if level > 0:
                trees.climb(one, level)
                self._passes.append(one)
            else:
                self._indices = np.array([one.scope.index], np.int64)
            logits = self._model(one.tokens, one.rotated(), self._attention, one.wanted)
            if level == 0:
                self._slots.record(one)
            trees.expand(one, logits, level + 1)
        trees.graft(verify)
        return None

    def lay_out(self, scopes: Int64, counts: Int64, grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        outcome = super().lay_out(scopes, counts, grants)
        for level, (one, planned) in enumerate(zip(self._passes, self._beams, strict=False), 1):
            outcome = max(outcome, self._trees.lay_out(one, scopes, counts, planned, level=level, shift=0))
        return outcome


class EagleTree(EagleDrafter):
    """`ProgramDrafter` with a head and trees."""

    __slots__ = ("_beams", "_held", "_passes", "_trees")

    def __init__(
        self,
        head: Head[Buffer],
        target: Decoder[Buffer],
        storage: KVStorage,
        tags: PageMemory,
        rows: RowTables,
        *,
        size: TreeShape,
        **options: Any,
    ) -> None:
        """Draft for `target`; see `EagleDrafter` for the arguments; `size` is that of the largest tree."""
        super().__init__(head, target, storage, tags, rows, max_tokens=size.depth, **options)
        self._trees = Trees(size, self._slots, len(rows.lengths))
        num_rows, state_size = self._states.shape
        self._held = np.zeros((num_rows, size.topk, state_size), np.float32)  # contents written by: the program
        self._beams: list[Grants] = []  # written by: plan
        self._passes: list[Pass] = []  # written by: record_drafts
        """Of the beams."""
        self.max_nodes = 1 + size.num_nodes

    def plan(self, batch: Batch, grants: Grants | None) -> None:
        """Decide which rows draft; see `ProgramDrafter`."""
        super().plan(batch, grants)
        self._beams = []
        if grants is not None:
            self._beams = self._trees.plan(grants, self._entries[: self._num_entries], self._rows.lengths)

    def record_drafts(self, tape: Tape, verify: Pass) -> HeldLogits | None:
        """Write the first level, from the kept states, and a pass for each beam; see `ProgramDrafter`."""
        head, states, trees, self._passes = self._head, self._states, self._trees, []
        size = states.shape[1]
        self._record_catch_up(tape)
        for level in range(self.max_tokens):
            one = self._new_pass(tape, max_nodes=self.max_tokens)
            scope = one.scope
            if level == 0:
                hidden = tape.buffer(scope.wanted, size)
                tape.write(passes.recall, scope.sampled, scope=scope, states=states, out=hidden, size=size)
                logits = head.logits(hidden)
                self._indices = np.array([scope.index], np.int64)
            else:
                self._passes.append(one)
                trees.climb(one, level)
                hidden = trees.inherit(one, states, self._held, level)
                logits, fed = head(one.tokens, hidden, one.rotated(), self._attention, one.wanted)
                num = trees.size.widths[level - 1]
                tape.write(
                    tree.keep_beam, scope.sampled, scope=scope, x=fed, held=self._held, topk=trees.size.topk, num=num,
                    size=size,
                )  # fmt: skip
            if self._token_map is not None:
                part, vocab_size = logits, head.config.layer.vocab_size
                logits = tape.buffer(part.rows, vocab_size)
                tape.write(
                    passes.spread, scope.wanted, logits=part, size=part.size, token_map=self._token_map, out=logits,
                    vocab_size=vocab_size,
                )  # fmt: skip
            trees.expand(one, logits, level + 1)
        trees.graft(verify)
        return None

    def record_rest(self, tape: Tape, verify: Pass, accepted: Accepted) -> None:
        """Write the pass of the head over all positions that the text now has; see `ProgramDrafter`."""
        assert accepted.nodes is not None
        one = self._new_pass(tape)
        scope, target, states = one.scope, verify.scope, self._states
        places, features = tape.buffer(scope.tokens, 1), self._head.features(self._hidden)
        tape.write(passes.fill, scope.sampled, scope=scope, shift=1)
        tape.write(tree.line_up, scope.sampled, scope=scope, target=target, places=places)
        tape.write(
            tree.trace, target.sampled, scope=scope, target=target, places=places, nodes=accepted.nodes,
            counts=accepted.counts,
        )  # fmt: skip
        hidden = tape.buffer(scope.tokens, features.size)
        tape.write(take, scope.tokens, x=features, places=places, out=hidden, size=features.size)
        fed = self._head.advance(one.tokens, hidden, one.rotated(), self._attention, one.wanted)
        self._slots.record(one)
        tape.write(passes.keep, scope.sampled, scope=scope, x=fed, states=states, size=states.shape[1])
        self._extension = scope.index

    def lay_out(self, scopes: Int64, counts: Int64, grants: Grants) -> Outcome:
        """Lay out the passes; see `ProgramDrafter`."""
        outcome = super().lay_out(scopes, counts, grants)
        for level, (one, planned) in enumerate(zip(self._passes, self._beams, strict=False), 1):
            grown = self._trees.lay_out(one, scopes, counts, planned, level=level, shift=1)
            if grown == Outcome.DONE:
                adjust(scopes, one.scope.index, 0, self._slots.begins, 0)
            outcome = max(outcome, grown)
        return outcome

    def _extended(self, grants: Grants) -> Int32:
        """Return how many positions of each grant the pass at the end of a step computes: of a tree, its depth."""
        computed = grants.counts.copy()
        which = grants.sampled[grants.promised > 1]
        computed[which] = np.minimum(computed[which], grants.promised[grants.promised > 1])
        return computed
