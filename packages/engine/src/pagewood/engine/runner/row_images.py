"""The images of rows: a runner keeps those of admitted requests while it computes their prompts.

Legend: W elements of a row of a tower, P tokens of a prompt, F frequencies of a rope.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.core.messages.batch import Batch

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The images of a row."""

    spans: Sequence[tuple[int, int, Float32]]
    """For each image, the positions [start, end) of its tokens and their rows `[end - start, W]`."""
    positions: Int32
    """[3, P], or [3, 0], see `BatchImages`."""
    shift: int
    """How far the place of a token behind the prompt lies behind its position, at most 0."""

    @property
    def end(self) -> int:
        """The position from which on a token is as others, but for its shift."""
        return max((self.positions.shape[1], *(end for _, end, _ in self.spans)))

    def components(self, start: int, count: int) -> Int32:
        """Return the components `[3, count]` of the positions of tokens from `start` on."""
        known = self.positions[:, start : start + count]
        behind = np.arange(start + known.shape[1], start + count, dtype=np.int32) + np.int32(self.shift)
        return np.concatenate([known, np.broadcast_to(behind, (3, len(behind)))], axis=1)

    def shown(self, start: int, count: int) -> Iterator[tuple[int, Float32, int]]:
        """Yield, of each image with tokens among `count` from `start` on, how far its first one there is behind
        `start`, the rows of its tokens there, and the end of its span."""
        for first, last, rows in self.spans:
            begin, end = max(first, start), min(last, start + count)
            if begin < end:
                yield begin - start, rows[begin - first : end - first], last


class ImagesOfRows:
    """Invariant: a row has the images of the request that was admitted to it last.

    Args:
        num_rows: of the runner.
        components: `[F]`, the component of a position that each frequency of the model's rope is multiplied by; None:
            the positions of images are as others.
        num_levels: of the model's first layers, behind which further parts of a tower's row are added.
        see_each_other: whether each token of an image sees all tokens of that image.
    """

    __slots__ = ("_ends", "_rows", "components", "num_levels", "see_each_other")

    def __init__(
        self, *, num_rows: int, components: Sequence[int] | None, num_levels: int, see_each_other: bool
    ) -> None:
        self.components = None if components is None else np.array(components, np.intp)
        """See the arguments."""
        self.num_levels = num_levels
        """See the arguments."""
        self.see_each_other = see_each_other
        """See the arguments."""
        self._rows: dict[int, RowImages] = {}  # written by: admit
        self._ends = np.zeros(num_rows, np.int32)
        """[rows], see `RowImages.end`; 0 without images."""  # contents written by: admit

    def get(self, row: int) -> RowImages | None:
        """Return the images of a row; None: it has none."""
        return self._rows.get(row)

    def are_shown(self, rows: Int32, starts: Int32) -> bool:
        """Return whether images change any token of grants that begin at `starts`, other than by a shift."""
        return bool(self._rows) and bool((starts < self._ends[rows]).any())

    def admit(self, batch: Batch) -> Mapping[int, int]:
        """Take the images of admitted requests, and forget those that their rows had before; return the shift of each
        row that has others now."""
        shifts: dict[int, int] = {}
        if self._rows:
            for row in batch.admitted_rows():
                if self._rows.pop(row, None) is not None:
                    shifts[int(row)] = self._ends[row] = 0
        images = batch.images
        if images is None:
            return shifts
        ends = np.cumsum(images.num_positions)
        used = 0
        spans: list[list[tuple[int, int, Float32]]] = [[] for _ in range(len(images.grants))]
        found: list[tuple[int, int, int]] = images.spans.tolist()
        for index, start, end in found:
            spans[index].append((start, end, images.features[used : used + end - start]))
            used += end - start
        for index, grant in enumerate(images.grants.tolist()):
            row, num = int(batch.rows[grant]), int(images.num_positions[index])
            positions = images.positions[:, int(ends[index]) - num : int(ends[index])]
            shifts[row] = int(positions.max()) + 1 - num if num else 0
            own = RowImages(spans=spans[index], positions=positions, shift=shifts[row])
            self._rows[row], self._ends[row] = own, own.end
        return shifts
