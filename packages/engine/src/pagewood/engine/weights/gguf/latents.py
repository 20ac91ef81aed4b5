"""The projections of latents in a GGUF file, of which later converters store keys and values apart.

Legend: H heads, R elements of a latent, P elements of a head's key that are not rotated, V of its value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagewood.engine.weights.gguf.blocks import GGUFBlocks
from pagewood.engine.weights.gguf.file import GGUFFile
from pagewood.engine.weights.gguf.plain import PLAIN, as_float32
from pagewood.engine.weights.matrix_forms import F32


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProjection:
    """Two tensors `[H, R, P]` and `[H, V, R]`. Invariant: their shapes fit together."""

    keys: str
    values: str
    shape: tuple[int, int]
    """(H * (P + V), R)."""

    @classmethod
    def of(cls, file: GGUFFile, keys: str) -> SplitProjection:
        """Return that of a layer, by the name of its first tensor.

        Raises:
            ValueError: the second one is missing, or they do not fit together.
        """
        values = keys.replace("attn_k_b", "attn_v_b")
        if values not in file.tensors:
            raise ValueError(f"{file.path} lacks the tensor {values}")
        first, second = file.tensors[keys].shape, file.tensors[values].shape
        if len(first) != 3 or len(second) != 3 or first[0] != second[0] or first[1] != second[2]:
            raise ValueError(
                f"{file.path}: {keys} and {values} must have shapes (heads, latent, keys) and (heads, values, latent), "
                f"got {first} and {second}"
            )
        return cls(keys=keys, values=values, shape=(first[0] * (first[2] + second[1]), first[1]))

    def joined(self, file: GGUFFile) -> F32:
        """Return the projection `[H * (P + V), R]`, of each head first the keys, as Hugging Face's decoders have it."""
        parts = _numbers(file, self.keys).swapaxes(1, 2), _numbers(file, self.values)
        return np.concatenate(parts, axis=1).reshape(self.shape)


def _numbers(file: GGUFFile, name: str) -> F32:
    """Return a tensor of three dimensions as float32."""
    stored, raw = file.tensors[name], file.raw(name)
    if stored.kind in PLAIN:
        return as_float32(raw.view(PLAIN[stored.kind]).reshape(stored.shape))
    rows, columns = stored.shape[0] * stored.shape[1], stored.shape[2]
    kept = GGUFBlocks(kind=stored.kind).read({".weight": raw.reshape(rows, -1)}, rows, columns)
    return kept.weight.dequantised().reshape(stored.shape)
