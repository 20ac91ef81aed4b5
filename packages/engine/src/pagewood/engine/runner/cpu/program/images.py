"""The images of rows on a CPU: where the rows of towers lie, the positions of their tokens, and which tokens they see.

Legend: T tokens of a step, W elements of a row of a tower, E hidden_size, F elements of a head / 2 of all ropes
together, P tokens of a prompt.
"""

# pyright: basic
# numba's kernels have no types.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.overlay import overlay
from pagewood.engine.runner.cpu.program.passes import Grants, Rotations
from pagewood.engine.runner.cpu.program.tape import Buffer, floats_at

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """The images of a row."""

    spans: Sequence[tuple[int, int, Float32]]
    """Of each image the positions [start, end) of its tokens, and their rows `[end - start, W]`."""
    positions: Int32
    """[3, P], or [3, 0], see `BatchImages`."""
    shift: int
    """How far the place of a token behind the prompt lies behind its position, at most 0."""

    def components(self, start: int, count: int) -> Int32:
        """Return the components `[3, count]` of the positions of tokens from `start` on."""
        known = self.positions[:, start : start + count]
        behind = np.arange(start + known.shape[1], start + count, dtype=np.int32) + np.int32(self.shift)
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], axis=1)


class CPUImages:
    """Writes instructions that replace embeddings, and fills the tables that they and attention read.

    Invariant: a row has the images of the request that was admitted to it last.

    Args:
        components: `[F]`, the component of a position that each frequency of the model's rope is multiplied by; None:
            the positions of images are as others.
        num_levels: of the model's first layers, behind which further parts of a row are added.
        see_each_other: whether each token of an image sees all tokens of that image.
    """

    __slots__ = ("_components", "_rows", "num_levels", "see_each_other")

    def __init__(self, *, components: Sequence[int] | None, num_levels: int, see_each_other: bool) -> None:
        self._components = None if components is None else np.array(components, np.intp)
        self.num_levels = num_levels
        """See the arguments."""
        self.see_each_other = see_each_other
        """See the arguments."""
        self._rows: dict[int, _Row] = {}  # written by: admit

    def replace(self, x: Buffer) -> None:
        """Write the instruction that puts rows in the place of the embeddings `x` `[T, E]` of their tokens."""
        x.tape.write(overlay, x.rows, scope=x.rows.scope, x=x, size=x.size, column=0, adds=0)

    def add(self, x: Buffer, level: int) -> None:
        """Write the instruction that adds the part of rows that belongs behind layer `level` to `x` `[T, E]`."""
        x.tape.write(overlay, x.rows, scope=x.rows.scope, x=x, size=x.size, column=(1 + level) * x.size, adds=1)

    def admit(self, batch: Batch, rotations: Rotations) -> None:
        """Take the images of admitted requests, and forget those that their rows had before."""
        if self._rows:
            for row in batch.admitted_rows():
                if self._rows.pop(row, None) is not None:
                    rotations.shifts[row] = 0
        images = batch.images
        if images is None:
            return
        ends = np.cumsum(images.num_positions)
        used = 0
        spans: list[list[tuple[int, int, Float32]]] = [[] for _ in images.grants]
        for index, start, end in images.spans.tolist():
            spans[index].append((start, end, images.features[used : used + end - start]))
            used += end - start
        for index, grant in enumerate(images.grants.tolist()):
            num = int(images.num_positions[index])
            positions = images.positions[:, int(ends[index]) - num : int(ends[index])]
            shift = int(positions.max()) + 1 - num if num else 0
            self._rows[int(batch.rows[grant])] = _Row(spans=spans[index], positions=positions, shift=shift)

    def place(self, grants: Grants, rotations: Rotations) -> None:
        """Say where the tokens of grants behind prompts with images are rotated, before the grants are laid out."""
        if self._components is None or not self._rows:
            return
        for row, start in zip(grants.rows.tolist(), grants.starts.tolist(), strict=True):
            own = self._rows.get(row)
            if own is not None:  # those of a prompt are rotated by `lay_out`
                rotations.shifts[row] = own.shift if start >= own.positions.shape[1] else 0

    def lay_out(self, scope: Int64, grants: Grants, rotations: Rotations) -> list[NDArray[np.generic]]:
        """Fill the scope of a step that has been laid out; return the arrays that must live until it is computed."""
        kept: list[NDArray[np.generic]] = []
        if not self._rows:
            return kept
        num_tokens, token = int(grants.counts.sum()), 0
        features = np.zeros(num_tokens, np.int64)
        ends: Int32 | None = None
        for row, start, count in zip(grants.rows.tolist(), grants.starts.tolist(), grants.counts.tolist(), strict=True):
            own = self._rows.get(row)
            if own is not None and start < own.positions.shape[1]:
                self._rotate(scope, slice(token, token + count), own.components(start, count), rotations)
            for first, last, rows in () if own is None else own.spans:
                begin, end = max(first, start), min(last, start + count)
                if begin >= end:
                    continue
                places = slice(token + begin - start, token + end - start)
                features[places] = rows.ctypes.data + rows.strides[0] * np.arange(begin - first, end - first)
                kept.append(rows)
                if self.see_each_other:
                    ends = _ends(grants) if ends is None else ends
                    ends[places] = last
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
        assert self._components is not None
        places = components[self._components].T
        for column, table in zip((Column.COSINES, Column.SINES), rotations.of_places(places), strict=True):
            half = table.shape[1]
            floats_at(scope[column], tokens.stop * half).reshape(-1, half)[tokens] = table


def _ends(grants: Grants) -> Int32:
    """Return for each token of a step the end of the positions that it sees, which is behind its own."""
    nums = grants.counts
    shift = grants.starts - (np.cumsum(nums) - nums)
    return (np.arange(1, int(nums.sum()) + 1) + np.repeat(shift, nums)).astype(np.int32)
