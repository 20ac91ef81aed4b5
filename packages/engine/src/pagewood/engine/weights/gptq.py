"""GPTQ: codes packed along the inputs, a scale and a zero for each group of inputs.

Source: Frantar et al., GPTQ, 2022; the files of AutoGPTQ (v1, whose zeros are stored minus one) and GPTQModel (v2).
Legend: N outputs, K inputs, G groups, b bits of a code. Codes lie in words of 32 bits without gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pagewood.engine.weights.checkpoint_formats import HALVES, WORDS, Array, Kept, Part, divided, inputs, outputs
from pagewood.engine.weights.integers import in_disorder, kept_out_of_order
from pagewood.engine.weights.matrix_forms import F32
from pagewood.engine.weights.nearest import kept_int4, kept_integers
from pagewood.engine.weights.words import unpack_dense, unpack_words


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTQ:
    """A matrix of GPTQ."""

    num_bits: int
    """2, 3, 4 or 8."""
    group: int
    """Inputs that share a scale; -1: all."""
    is_v2: bool
    """Whether zeros are stored unchanged, and not minus one, according to the configuration."""
    is_symmetric: bool = False
    """Whether every zero is the middle of the codes, according to the configuration."""

    def __post_init__(self) -> None:
        if self.num_bits not in (2, 3, 4, 8):
            raise ValueError(f"bits must be 2, 3, 4 or 8 for gptq, got {self.num_bits}")

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"gptq with {self.num_bits} bits"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return qweight `[K b/32, N]`, qzeros `[G, N b/32]`, scales `[G, N]` and, from desc_act, g_idx `[K]`."""
        groups = divided(columns, self.group, "group_size")
        multiple = 32 if self.num_bits == 3 else 32 // self.num_bits  # three bits fill words only 32 at a time
        for what, size in (("inputs", columns), ("outputs", rows)):
            if size % multiple:
                raise ValueError(f"the number of {what} must be a multiple of {multiple} for {self.name}, got {size}")
        grouped, words = inputs(max(self.group, 0)), columns * self.num_bits // 32
        zeros, inputs_of_group = (groups, rows * self.num_bits // 32), columns // groups
        return [
            Part(suffix=".qweight", shape=(words, rows), dtypes=WORDS, axes=(inputs(multiple), outputs(1))),
            Part(suffix=".qzeros", shape=zeros, dtypes=WORDS, axes=(grouped, outputs(multiple))),
            Part(suffix=".scales", shape=(groups, rows), dtypes=HALVES, axes=(grouped, outputs(1))),
            Part(
                suffix=".g_idx",
                shape=(columns,),
                dtypes=("I32", "I64"),
                is_optional=True,
                axes=(),
                group=inputs_of_group,
            ),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        scales: F32 = np.ascontiguousarray(found[".scales"].T)
        zeros = self._zeros(unpack_dense(found[".qzeros"], self.num_bits, rows).T.astype(np.int32))
        order = in_disorder(found.get(".g_idx"), columns, scales.shape[1], ".g_idx")
        if order is not None:  # desc_act
            codes = self._codes(found[".qweight"], columns)
            return kept_out_of_order(codes, scales, zeros, order)
        if self.num_bits == 4:  # the bytes of a word are already the pairs of codes of `Int4`
            words = np.ascontiguousarray(found[".qweight"].T.astype("<i4", copy=False))
            return kept_int4(words.view(np.uint8), scales, zeros)
        return kept_integers(self._codes(found[".qweight"], columns), scales, zeros, num_bits=self.num_bits)

    def _zeros(self, stored: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the zeros for stored zeros. If codes are symmetric, the values show whether 1 was subtracted; labels
        may err.

        Raises:
            ValueError: the codes should be symmetric, but are not with either reading.
        """
        if not self.is_symmetric:
            return stored if self.is_v2 else stored + 1
        middle = 1 << self.num_bits - 1
        if (stored == middle).all():
            return stored
        if (stored == middle - 1).all():
            return stored + 1
        least, most = int(stored.min()), int(stored.max())
        raise ValueError(
            f".qzeros must all be {middle - 1}, or {middle} in gptq_v2, if sym is true, got {least} to {most}"
        )

    def _codes(self, words: Array, columns: int) -> NDArray[np.uint8]:
        """Return the codes `[N, K]` of `[K b/32, N]` words, without gaps along the inputs."""
        if self.num_bits == 3:  # some codes lie in two words
            return unpack_dense(np.ascontiguousarray(words.T), 3, columns)
        return np.ascontiguousarray(unpack_words(words, self.num_bits, axis=0).T)
