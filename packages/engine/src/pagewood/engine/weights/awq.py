"""AWQ as AutoAWQ's GEMM version stores it: codes of four bits packed along the outputs, in an order of their own.

Source: Lin et al., AWQ, 2023; the files of AutoAWQ. Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.checkpoint_formats import HALVES, WORDS, Array, Kept, Part, divided, inputs, outputs
from pagewood.engine.weights.matrix_forms import F32
from pagewood.engine.weights.nearest import kept_int4
from pagewood.engine.weights.words import unpack_words

_NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word with the code of each of eight outputs: the word holds outputs 0, 2, 4, 6, 1, 3, 5, 7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AWQ:
    """A matrix of AWQ."""

    group: int
    """Inputs that share a scale; -1: all."""

    @property
    def name(self) -> str:
        """Name for messages."""
        return "awq with 4 bits"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return qweight `[K, N/8]`, qzeros `[G, N/8]` and scales `[G, N]`."""
        groups = divided(columns, self.group, "group_size")
        if rows % 8 or columns % 2:
            raise ValueError(
                f"a matrix of awq must have a multiple of 8 outputs and of 2 inputs, got {(rows, columns)}"
            )
        grouped, words = inputs(max(self.group, 0)), outputs(8)
        return [
            Part(suffix=".qweight", shape=(columns, rows // 8), dtypes=WORDS, axes=(inputs(2), words)),
            Part(suffix=".qzeros", shape=(groups, rows // 8), dtypes=WORDS, axes=(grouped, words)),
            Part(suffix=".scales", shape=(groups, rows), dtypes=HALVES, axes=(grouped, outputs(1))),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        scales: F32 = np.ascontiguousarray(found[".scales"].T)
        zeros = unpack_words(found[".qzeros"], 4, axis=1).reshape(len(scales.T), -1, 8)[:, :, _NIBBLE_OF]
        return kept_int4(_paired(found[".qweight"]), scales, zeros.reshape(len(zeros), -1).T)


def _paired(words: Array) -> NDArray[np.uint8]:
    """Return the codes of words `[K, N/8]` as `Int4.codes` `[N, K/2]`: two inputs of an output in a byte."""
    planes = np.ascontiguousarray(words.T.astype("<i4", copy=False)).view(np.uint8).reshape(*words.T.shape, 4)
    packed = np.empty((words.shape[1], 8, words.shape[0] // 2), np.uint8)
    for output, nibble in enumerate(_NIBBLE_OF):
        plane = planes[:, :, nibble // 2]
        first, second = plane[:, ::2], plane[:, 1::2]
        if nibble % 2:
            packed[:, output] = first >> np.uint8(4) | second & np.uint8(0xF0)
        else:
            packed[:, output] = first & np.uint8(0x0F) | second << np.uint8(4)
    return packed.reshape(8 * len(packed), -1)
