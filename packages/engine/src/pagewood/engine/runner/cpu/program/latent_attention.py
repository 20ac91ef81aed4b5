"""Latent attention on a CPU, written to the tape once a layer.

Legend: T tokens of a scope, H heads, N, R, V and C as in `models.ops.LatentShape`, D = C + R.
"""

# pyright: basic
# torch's conversions from and to numpy have no types.

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.ops import LatentShape, Norm
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.runner.cpu.compiled.attention.latents import (
    MOST_PARTIALS,
    attend_latents,
    make_latents,
    merge_segments,
    multiply_heads,
    rotate_queries,
    store_latents,
)
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH
from pagewood.engine.runner.cpu.program.norm_arrays import weight_of
from pagewood.engine.runner.cpu.program.tape import Buffer
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.kvpool.latent_storage import LatentStorage

Float32 = NDArray[np.float32]

_TILE_ROWS = 128  # query rows of an item: with their sums they fit into a second-level cache, beside some latents


class CPULatentHeads:
    """`models.ops.LatentHeads`, its matrices in panels of float32.

    Rotated elements of pairs become two halves. Weights of other forms are widened: they are few, and each half of them
    is needed with inputs and outputs exchanged.
    """

    __slots__ = ("_keys", "_shape", "_values")

    def __init__(self, weight: Tensor, shape: LatentShape, packer: Packer) -> None:
        """Lay out `weight` `[H (N + V), C]`; it is not kept."""
        heads = weight.float().view(shape.num_heads, -1, shape.rank)
        self._shape = shape
        self._keys = _panels(heads[:, : shape.plain_dim].transpose(1, 2), packer)
        self._values = _panels(heads[:, shape.plain_dim :], packer)

    def absorb(self, q: Buffer, x: Buffer, rotation: tuple[Buffer, Buffer], norm: Norm) -> tuple[Buffer, Buffer]:
        """Return absorbed queries, and latents."""
        tape, shape, has_pairs = q.tape, self._shape, int(self._shape.has_pairs)
        cosines, sines = rotation
        latents, queries = tape.buffer(x.rows, x.size), tape.buffer(q.rows, shape.num_heads * shape.latent_size)
        tape.write(
            make_latents, x.rows, x=x, cosines=cosines, sines=sines, weight=weight_of(norm, shape.rank), out=latents,
            size=x.size, rank=shape.rank, has_pairs=has_pairs, epsilon=norm.epsilon,
        )  # fmt: skip
        tape.write(
            rotate_queries, q.rows, q=q, cosines=cosines, sines=sines, out=queries, num_heads=shape.num_heads,
            plain_dim=shape.plain_dim, half=shape.rope_dim // 2, rank=shape.rank, has_pairs=has_pairs,
        )  # fmt: skip
        tape.write(
            multiply_heads, q.rows, x=q, panels=self._keys, out=queries, num_heads=shape.num_heads,
            x_size=shape.plain_dim + shape.rope_dim, depth=shape.plain_dim, out_size=shape.latent_size, size=shape.rank,
        )  # fmt: skip
        return queries, latents

    def values(self, attended: Buffer) -> Buffer:
        """Return the values of sums of latents."""
        shape = self._shape
        out = attended.tape.buffer(attended.rows, shape.num_heads * shape.value_dim)
        attended.tape.write(
            multiply_heads, attended.rows, x=attended, panels=self._values, out=out, num_heads=shape.num_heads,
            x_size=shape.rank, depth=shape.rank, out_size=shape.value_dim, size=shape.value_dim,
        )  # fmt: skip
        return out


class CPULatentAttention:
    """Causal attention over the latents of a `LatentStorage`."""

    __slots__ = ("_layers", "_memories", "_partials", "_scales", "_storage", "num_kv_heads", "tile")

    def __init__(self, storage: LatentStorage, layers: Mapping[int, LatentAttentionConfig]) -> None:
        """Attend in `layers`, by their numbers, over `storage`, which has a place for each in their order.

        Raises:
            ValueError: the memory is neither float32 nor int8.
        """
        if storage.layout.dtype not in ("float32", "int8"):
            raise ValueError(f"latents must be float32 or int8 on a CPU, got {storage.layout.dtype}")
        self._storage = storage
        self._layers = layers
        self._memories = {layer: storage.layer(place).view(-1).numpy() for place, layer in enumerate(layers)}
        is_int8 = storage.layout.dtype == "int8"
        self._scales = {
            layer: storage.scales(place).view(-1).numpy() if is_int8 else None for place, layer in enumerate(layers)
        }
        largest = max(layer.shape.num_heads for layer in layers.values())
        self._partials: Float32 = np.empty(MOST_PARTIALS * largest * (storage.layout.latent_dim + 2), np.float32)
        """Results of segments; a layer's are used up before the next one computes its own."""
        self.num_kv_heads = 1
        """Key heads: all query heads see the same latents."""
        self.tile = max(1, _TILE_ROWS // largest)
        """Query tokens of an item of work."""

    def run(
        self,
        q: Buffer,
        k: Buffer | None,
        v: Buffer | None,
        layer: int,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Buffer:
        """Write latents `k` `[T, D]` to their pages in `layer` and return `[T, H C]`, what `q` `[T, H D]` attends to.

        Positions and pages are those of the scope of `q`.
        """
        assert k is not None
        assert v is None, "latents are values too"
        assert sinks is None
        assert biases is None
        tape, own, memory, scope = q.tape, self._layers[layer], self._memories[layer], q.rows.scope
        shape, page_size, scales = own.shape, self._storage.layout.page_size, self._scales[layer]
        out = tape.buffer(q.rows, shape.num_heads * shape.rank)
        tape.write(
            store_latents, q.rows, scope=scope, latents=k, memory=memory, scales=scales, size=k.size, rank=shape.rank,
            page_size=page_size,
        )  # fmt: skip
        tape.write(
            attend_latents(k.size, shape.rank, int8=scales is not None), q.rows, scope=scope, q=q, memory=memory,
            scales=scales, partials=self._partials, out=out, num_heads=shape.num_heads, page_size=page_size,
            scale=own.scale,
        )  # fmt: skip
        tape.write(
            merge_segments, q.rows, scope=scope, partials=self._partials, out=out, num_heads=shape.num_heads,
            rank=shape.rank,
        )  # fmt: skip
        return out


def _panels(matrices: Tensor, packer: Packer) -> Float32:
    """Return the panels of matrices `[H, out, in]`, those of each head filled up."""
    size, inputs = matrices.shape[1:]
    padded = functional.pad(matrices, (0, 0, 0, -size % WIDTH)).reshape(-1, inputs)
    return packer.panels(padded.contiguous())
