"""Matrices of 8-bit floating point numbers with a scale for each block, output, group of inputs, or for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pagewood.engine.weights.checkpoint_formats import FLOAT8, HALVES, Array, Kept, Part, inputs, outputs
from pagewood.engine.weights.matrix_forms import F32
from pagewood.engine.weights.nearest import kept_values
from pagewood.engine.weights.small_floats import E4M3, powers_of_two


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8:
    """A matrix of E4M3 numbers: value = number * scale.

    Source: DeepSeek-AI, DeepSeek-V3, 2024, for blocks of 128 x 128, which Qwen's FP8 checkpoints have too.
    """

    name: str
    block: tuple[int, int] | None
    """(outputs, inputs) that share a scale, the last ones may be fewer; 0 stands for all of them; None: one scale."""
    scale: str
    """Suffix of the scales."""
    codes: str = ".weight"
    """Suffix of the numbers."""
    is_power: bool = False
    """Whether scales are bytes, exponents of two."""

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return the numbers `[N, K]` and their scales; scales of activations are not needed."""
        shapes: list[tuple[int, ...]] = [(), (1,), (1, 1)]
        if self.block is not None:
            shapes = [self._blocks(rows, columns)]
            if self.block == (1, 0):
                shapes.append((rows,))
        high, wide = self.block or (0, 0)
        axes = (
            () if self.block is None else (outputs(high if high < rows else 0), inputs(wide if wide < columns else 0))
        )
        dtypes = ("U8", "F8_E8M0") if self.is_power else HALVES
        return [
            Part(suffix=self.codes, shape=(rows, columns), dtypes=FLOAT8, axes=(outputs(1), inputs(1))),
            Part(suffix=self.scale, shape=shapes, dtypes=dtypes, axes=axes),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        stored, codes = found[self.scale], found[self.codes]
        scales, wide = self.scales_by_row(stored, rows, columns), self.inputs_of_scale(columns)

        def decode(run: slice) -> F32:
            own: F32 = scales[run]
            if own.shape[1] > 1:
                own = np.repeat(own, wide, axis=1)[:, :columns]
            values: F32 = E4M3.take(codes[run])
            values *= own
            return values

        return kept_values(rows, columns, decode, why="its numbers are of 8 bits with exponents")

    def scales_by_row(self, stored: Array, rows: int, columns: int) -> F32:
        """Return `[N, G] float32`, the scales of each row of a matrix `[N, K]`; `stored` is the tensor of its scales.

        Raises:
            ValueError: a scale is NaN.
        """
        scales: F32 = powers_of_two(stored) if self.is_power else stored
        shape = (1, 1) if self.block is None else self._blocks(rows, columns)
        high = (self.block[0] if self.block is not None else 0) or rows
        return scales.reshape(shape)[np.arange(rows) // high]

    def inputs_of_scale(self, columns: int) -> int:
        """Return how many of the `columns` inputs of a row share a scale."""
        return (self.block[1] if self.block is not None else 0) or columns

    def _blocks(self, rows: int, columns: int) -> tuple[int, int]:
        assert self.block is not None
        high, wide = self.block[0] or rows, self.block[1] or columns
        return -(-rows // high), -(-columns // wide)
