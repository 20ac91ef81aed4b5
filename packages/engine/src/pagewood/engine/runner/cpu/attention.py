"""Paged attention on a CPU: planned once a step, written to the tape once a layer.

Legend: T tokens of a step, G grants, Q and K elements of all query and key heads of a token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pagewood.engine.core.arrays import Int32
from pagewood.engine.runner.cpu.compiled.attention import cut
from pagewood.engine.runner.cpu.compiled.step import Operation
from pagewood.engine.runner.cpu.tape import Buffer, StepTables
from pagewood.kvpool.storage import KVStorage

_UNLIMITED = 1 << 40  # a window that no sequence fills
_TILE_ROWS = 192  # query rows of an item: copying a block of keys costs little beside them


class CPUAttention:
    """Causal grouped-head attention over the pages of a `KVStorage`."""

    __slots__ = ("_memories", "_page_table", "_scales", "_storage", "_tile", "_windows")

    def __init__(self, storage: KVStorage, page_table: Int32, *, num_heads: int, windows: Sequence[int | None]) -> None:
        """Attend over `storage`, whose layout must have the order HND, in float32 or int8.

        Args:
            storage: the KV memory.
            page_table: `[rows, pages of a row]`, page ids; read in every step.
            num_heads: query heads.
            windows: per layer, see `ModelConfig.windows`.

        Raises:
            ValueError: the layout is a different one.
        """
        layout = storage.layout
        if layout.order != "HND" or layout.dtype not in ("float32", "int8"):
            raise ValueError(
                f"storage must have the layout HND in float32 or int8, got {layout.order} in {layout.dtype}"
            )
        self._storage = storage
        layers = range(layout.num_layers)
        self._memories = [storage.layer(i).view(-1).numpy() for i in layers]
        self._scales = [storage.scales(i).view(-1).numpy() if layout.dtype == "int8" else 0 for i in layers]
        self._page_table = page_table
        self._windows = [_UNLIMITED if window is None else window for window in windows]
        self._tile = max(1, _TILE_ROWS * layout.num_kv_heads // num_heads)

    def plan(self, rows: Int32, starts: Int32, counts: Int32) -> StepTables:
        """Return the tables of a step whose grant g computes `[starts[g], starts[g] + counts[g])` of row rows[g]."""
        num_kv_heads, tile = self._storage.layout.num_kv_heads, self._tile
        offsets = np.zeros(len(counts) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        num_items = num_kv_heads * int(((counts + tile - 1) // tile).sum())
        items = np.empty((num_items, 4), np.int32)
        cut(starts, counts, num_kv_heads, tile, items)
        return StepTables(
            page_table=self._page_table,
            rows=rows,
            starts=starts,
            offsets=offsets,
            items=items,
            memory_size=self._memories[0].size,
        )

    def run(self, q: Buffer, k: Buffer, v: Buffer, layer: int) -> Buffer:
        """Write `k` and `v` `[T, K]` to their pages in `layer` and return `[T, Q]`, what `q` `[T, Q]` attends to."""
        layout, memory, tape = self._storage.layout, self._memories[layer], q.tape
        out = tape.buffer(q.rows, q.size)
        heads, page_size = layout.num_kv_heads, layout.page_size
        scales = self._scales[layer]
        tape.emit(Operation.STORE, q.rows, k, v, memory, k.size, heads, page_size, scales)
        tape.emit(
            Operation.ATTEND, q.rows, q, memory, out, q.size, heads, page_size, self._windows[layer], scales,
            number=layout.head_dim**-0.5,
        )  # fmt: skip
        return out
