"""Drafts of models with recurrent layers: states are taken back by computing accepted tokens again.

A grant with drafts leaves no state, because how many of its tokens stay is known only behind the last layer. So its
row's place keeps the state before the grant, and the inputs of the recurrence at its positions are remembered, which
are small. The next step first computes from these the state behind the tokens that stayed, by the same instructions in
the same order. So the bits of a state depend on the text alone, and a step writes a state once, as without drafts.

Legend: T tokens of a scope, G grants.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cpu.compiled.drafting import passes
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, Column, Outcome
from pagewood.engine.runner.cpu.program.passes import Grants
from pagewood.engine.runner.cpu.program.tape import Buffer, Scope, Tape, integers_at

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


class DraftedRuns:
    """How far the state in the place of each row has got, and the inputs of the positions behind.

    Invariant: a row's place has the state behind `_reached` tokens, and the inputs of what the row has computed since
    are remembered.
    """

    __slots__ = ("_depth", "_inputs", "_passing", "_reached")

    def __init__(self, *, num_rows: int, max_drafts: int) -> None:
        """Remember nothing, for rows that have at most `max_drafts` drafts in a step."""
        self._depth = 1 + max_drafts
        self._reached: Int32 = np.zeros(num_rows, np.int32)  # contents written by: admit, lay_out
        self._inputs: dict[tuple[int, str], Float32] = {}
        """[rows, depth, size] of each input of each layer."""  # contents written by: again
        self._passing: Float32 | None = None  # written by: passing

    def scope(self, tape: Tape) -> Scope:
        """Return the scope of the tokens that are computed again."""
        return tape.shared(DraftedRuns, partial(_add_scope, tape))

    def again(self, x: Buffer, column: int, size: int, *, layer: int, name: str) -> Buffer:
        """Write the instructions that remember columns of `x` `[T, n]`; return the remembered ones `[T, size]`.

        The latter are those of the tokens that are computed again. `name` distinguishes the inputs of a layer.
        """
        scope, target, depth = self.scope(x.tape), x.rows.scope, self._depth
        if (layer, name) not in self._inputs:
            self._inputs[layer, name] = np.zeros((len(self._reached), depth, size), np.float32)
        inputs, out = self._inputs[layer, name], x.tape.buffer(scope.tokens, size)
        x.tape.write(
            passes.unstash, scope.sampled, scope=scope, stash=inputs, depth=depth, out=out, size=size
        )  # fmt: skip
        x.tape.write(
            passes.stash, target.sampled, scope=target, x=x, x_size=x.size, column=column, size=size, stash=inputs,
            depth=depth,
        )  # fmt: skip
        return out

    def passing(self, size: int) -> Float32:
        """Return memory for the states of a layer, `[rows, size]`, that no grant leaves; layers share it."""
        if self._passing is None:
            self._passing = np.empty((len(self._reached), size), np.float32)
        assert self._passing.shape[1] == size
        return self._passing

    def witness(self) -> Int32:
        """Return how far the states of rows have got, which is the same on all ranks. Sums of states differ by rank."""
        return self._reached.copy()

    def admit(self, batch: Batch) -> None:
        """Note where the rows of admitted requests begin; nothing of their last requests is computed again."""
        if len(batch.admitted):
            self._reached[batch.admitted_rows()] = batch.starts[batch.admitted]

    def lay_out(
        self,
        scopes: Int64,
        counts: Int64,
        grants: Grants,
        *,
        main: Scope,
        own: Scope,
        kept: NDArray[np.intp] | slice,
        again: Scope | None,
        is_forward: bool,
    ) -> Outcome:
        """Lay out the tokens that are computed again, and change which states the grants of a step read and leave.

        Args:
            scopes: of the run; that of the grants is complete.
            counts: of the run, written.
            grants: of the step.
            main: the scope of the grants.
            own: that of the grants of this rank.
            kept: which of the grants these are.
            again: the scope of `scope`; None: this stage has no recurrent layer, and follows those that have.
            is_forward: whether no token is rejected.

        Returns:
            DONE, or TOO_LARGE after writing to `counts` how much is needed; it is then called again.
        """
        rows, num_grants = grants.rows, len(grants.rows)
        starts = integers_at(scopes[main.index, Column.STARTS], num_grants)
        drafts = np.zeros(num_grants, np.bool_)
        if grants.is_drafting and not is_forward:
            drafts[grants.sampled] = (grants.promised > 1) & (grants.counts[grants.sampled] > 1)
        reached = np.where(drafts, starts, starts + grants.counts)
        if again is None:
            self._reached[rows] = reached
            return Outcome.DONE
        nums = starts - self._reached[rows]
        assert nums.min() >= 0
        assert nums.max() <= self._depth
        of_rank, nums, drafts = rows[kept], nums[kept], drafts[kept]
        states = integers_at(scopes[own.index, Column.STATES], 2 * len(of_rank)).reshape(-1, 2)
        found = np.flatnonzero((nums > 0) | (drafts & (states[:, 0] != states[:, 1])))
        num, nums = len(found), nums[found]
        first = NUM_KINDS * again.index
        counts[first : first + NUM_KINDS] = nums.sum(), num, num, num
        scope = scopes[again.index]
        if counts[first] > scope[Column.MOST_TOKENS] or num > scope[Column.MOST_WANTED]:
            return Outcome.TOO_LARGE
        scope[Column.NUM_GRANTS] = num
        if num:
            integers_at(scope[Column.ROWS], num)[:] = of_rank[found]
            integers_at(scope[Column.STARTS], num)[:] = self._reached[of_rank[found]]
            integers_at(scope[Column.SAMPLED], num)[:] = np.arange(num)
            integers_at(scope[Column.OFFSETS], num + 1)[:] = np.cumsum([0, *nums])
            integers_at(scope[Column.STATES], 2 * num)[:] = states[found].ravel()
            integers_at(scope[Column.SAVES], int(counts[first]))[:] = -1
            states[found, 0] = states[found, 1]
        states[drafts, 1] = -1
        self._reached[rows] = reached
        return Outcome.DONE


def _add_scope(tape: Tape) -> Scope:
    """Add the scope, whose "wanted tokens" are grants: a grant may have no tokens, and only pass its state on."""
    scope = tape.scope()
    tape.fill(
        scope,
        {
            Column.ROWS: tape.buffer(scope.sampled, 1),
            Column.STARTS: tape.buffer(scope.sampled, 1),
            Column.SAMPLED: tape.buffer(scope.sampled, 1),
            Column.OFFSETS: tape.buffer(scope.sampled, 2),
            Column.STATES: tape.buffer(scope.sampled, 2),
            Column.SAVES: tape.buffer(scope.tokens, 1),
        },
    )
    return scope
