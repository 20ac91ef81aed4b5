"""The images of rows on a CPU: where the rows of towers lie, the positions of their tokens, and which tokens they see.

Legend: T tokens of a step, E hidden_size, F elements of a head / 2 of all ropes together.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.overlay import overlay
from pagewood.engine.runner.cpu.program.passes import Grants, Rotations
from pagewood.engine.runner.cpu.program.tape import Buffer, floats_at, integers_at
from pagewood.engine.runner.row_images import ImagesOfRows

Int64 = NDArray[np.int64]


class CPUImages:
    """Writes instructions that replace embeddings, and fills the tables that they and attention read.

    Args:
        rows: the images of the runner's rows.
    """

    __slots__ = ("_own", "num_levels")

    def __init__(self, rows: ImagesOfRows) -> None:
        self._own = rows
        self.num_levels = rows.num_levels
        """See `ImagesOfRows`."""

    def replace(self, x: Buffer) -> None:
        """Write the instruction that puts rows in the place of the embeddings `x` `[T, E]` of their tokens."""
        x.tape.write(overlay, x.rows, scope=x.rows.scope, x=x, size=x.size, column=0, adds=0)

    def add(self, x: Buffer, level: int) -> None:
        """Write the instruction that adds the part of rows that belongs behind layer `level` to `x` `[T, E]`."""
        x.tape.write(overlay, x.rows, scope=x.rows.scope, x=x, size=x.size, column=(1 + level) * x.size, adds=1)

    def admit(self, batch: Batch, rotations: Rotations) -> None:
        """Take the images of admitted requests, and forget those that their rows had before."""
        for row in self._own.admit(batch):
            rotations.shifts[row] = 0  # `place` says where its tokens are

    def place(self, grants: Grants, rotations: Rotations) -> None:
        """Say where the tokens of grants behind prompts with images are rotated, before the grants are laid out."""
        if self._own.components is None:
            return
        for row, start in zip(grants.rows.tolist(), grants.starts.tolist(), strict=True):
            own = self._own.get(row)
            if own is not None:  # those of a prompt are rotated by `lay_out`
                rotations.shifts[row] = own.shift if start >= own.positions.shape[1] else 0

    def lay_out(self, scope: Int64, grants: Grants, rotations: Rotations) -> list[NDArray[np.generic]]:
        """Fill the scope of a step that has been laid out; return the arrays that must live until it is computed."""
        kept: list[NDArray[np.generic]] = []
        if not self._own.are_shown(grants.rows, grants.starts):
            return kept
        num_tokens, token = int(grants.counts.sum()), 0
        features = np.zeros(num_tokens, np.int64)
        ends: Int32 | None = None
        for row, start, count in zip(grants.rows.tolist(), grants.starts.tolist(), grants.counts.tolist(), strict=True):
            own = self._own.get(row)
            if own is not None and start < own.positions.shape[1]:
                self._rotate(scope, slice(token, token + count), own.components(start, count), rotations)
            for behind, rows, end in () if own is None else own.shown(start, count):
                places = slice(token + behind, token + behind + len(rows))
                features[places] = rows.ctypes.data + rows.strides[0] * np.arange(len(rows))
                kept.append(rows)
                if self._own.see_each_other:
                    ends = _ends(scope, grants) if ends is None else ends
                    ends[places] = end
            token += count
        if kept:
            kept.append(features)
            scope[Column.FEATURES] = features.ctypes.data
        if ends is not None:
            kept.append(ends)
            scope[Column.ENDS] = ends.ctypes.data
        return kept

    def _rotate(self, scope: Int64, tokens: slice, components: Int32, rotations: Rotations) -> None:
        """Write the rotations of tokens whose positions have these components, `[3, count]`."""
        assert self._own.components is not None
        places = components[self._own.components].T
        for column, table in zip((Column.COSINES, Column.SINES), rotations.of_places(places), strict=True):
            half = table.shape[1]
            floats_at(scope[column], tokens.stop * half).reshape(-1, half)[tokens] = table


def _ends(scope: Int64, grants: Grants) -> Int32:
    """Return for each token of a step that is laid out the end of the positions that it sees, behind its own."""
    nums = grants.counts
    shift = integers_at(scope[Column.STARTS], len(nums)) - (np.cumsum(nums) - nums)
    return (np.arange(1, int(nums.sum()) + 1) + np.repeat(shift, nums)).astype(np.int32)
