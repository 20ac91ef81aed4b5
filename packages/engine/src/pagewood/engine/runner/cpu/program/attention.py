"""Paged attention on a CPU, written to the tape once a layer; `compiled.layout` plans it once a step.

Legend: T tokens of a scope, Q and K elements of all query and key heads of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.runner.cpu.compiled.attention.heads import attend, store
from pagewood.engine.runner.cpu.program.tape import Buffer

if TYPE_CHECKING:
    from pagewood.engine.runner.cpu.program.passes import Accepted, Pass
from pagewood.kvpool.storage import KVStorage

_UNLIMITED = 1 << 40  # a window that no sequence fills
_TILE_ROWS = 192  # query rows of an item: copying a block of keys costs little beside them


class CPUAttention:
    """Causal grouped-head attention over the pages of a `KVStorage`."""

    __slots__ = ("_layers", "_memories", "_scales", "_storage", "tile")

    def __init__(self, storage: KVStorage, layers: Sequence[AttentionConfig]) -> None:
        """Attend over `storage`, whose layout must have the order HND, in float32 or int8.

        Args:
            storage: the KV memory.
            layers: the attention of each layer.

        Raises:
            ValueError: the layout is a different one.
        """
        layout = storage.layout
        if layout.order != "HND" or layout.dtype not in ("float32", "int8"):
            raise ValueError(
                f"storage must have the layout HND in float32 or int8, got {layout.order} in {layout.dtype}"
            )
        self._storage = storage
        self._layers = layers
        numbers = range(layout.num_layers)
        self._memories = [storage.layer(i).view(-1).numpy() for i in numbers]
        self._scales = [storage.scales(i).view(-1).numpy() if layout.dtype == "int8" else None for i in numbers]
        self.tile = max(1, _TILE_ROWS // max(layer.group for layer in layers))
        """Query tokens of an item of work."""

    @property
    def num_kv_heads(self) -> int:
        """Key heads."""
        return self._storage.layout.num_kv_heads

    def compact(self, one: Pass, accepted: Accepted) -> None:
        """Move the keys and values of accepted nodes of trees to consecutive slots, in all layers."""
        layout = self._storage.layout
        groups = 2 * layout.num_kv_heads
        for arrays in zip(self._memories, self._scales, strict=True):
            for array in arrays:
                if array is not None:
                    pages = array.reshape(self._storage.num_pages, -1)
                    one.compact(accepted, pages, groups=groups, page_size=layout.page_size)

    def run(self, q: Buffer, k: Buffer, v: Buffer, layer: int) -> Buffer:
        """Write `k` and `v` `[T, K]` to their pages in `layer` and return `[T, Q]`, what `q` `[T, Q]` attends to.

        Positions and pages are those of the scope of `q`.
        """
        layout, memory, tape, own = self._storage.layout, self._memories[layer], q.tape, self._layers[layer]
        out = tape.buffer(q.rows, q.size)
        heads, page_size = layout.num_kv_heads, layout.page_size
        scales = self._scales[layer]
        scope = q.rows.scope
        tape.write(
            store, q.rows, scope=scope, k=k, v=v, memory=memory, scales=scales, size=k.size, kv_heads=heads,
            page_size=page_size, memory_size=memory.size,
        )  # fmt: skip
        tape.write(
            attend(own.head_dim, int8=scales is not None), q.rows, scope=scope, q=q, memory=memory, scales=scales,
            out=out, size=q.size, kv_heads=heads, page_size=page_size,
            window=_UNLIMITED if own.window is None else own.window, memory_size=memory.size, scale=own.scale,
        )  # fmt: skip
        return out
