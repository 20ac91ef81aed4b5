"""Paged attention on a CPU, written to the tape once a layer; `compiled.layout` plans it once a step.

Legend: T tokens of a scope, Q and K elements of all query and key heads of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.runner.cpu.compiled.step import Operation
from pagewood.engine.runner.cpu.program.tape import Buffer

if TYPE_CHECKING:
    from pagewood.engine.runner.cpu.program.passes import Accepted, Pass
from pagewood.kvpool import LayerGroups
from pagewood.kvpool.storage import KVStorage

_UNLIMITED = 1 << 40  # a window that no sequence fills
_TILE_ROWS = 192  # query rows of an item: copying a block of keys costs little beside them


class CPUAttention:
    """Causal grouped-head attention over the pages of a `KVStorage`."""

    __slots__ = ("_layers", "_memories", "_places", "_scales", "_storage", "tile")

    def __init__(
        self,
        storage: KVStorage,
        layers: Sequence[AttentionConfig],
        *,
        groups: LayerGroups | None = None,
        num_rows: int = 0,
    ) -> None:
        """Attend over `storage`, whose layout must have the order HND, in float32 or int8.

        Args:
            storage: the KV memory.
            layers: the attention of each layer.
            groups: of the layers, each with a page table of its own; None: all layers are one group.
            num_rows: rows of the page table of a group.

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
        groups = groups or LayerGroups.whole(layout.num_layers)
        self._places = [(group * num_rows, number) for group, number in groups.places]
        """First row of the page table of each layer, and its number in the memory."""
        numbers = range(layout.num_layers)
        self._memories = [storage.layer(i).view(-1).numpy() for i in numbers]
        self._scales = [storage.scales(i).view(-1).numpy() if layout.dtype == "int8" else 0 for i in numbers]
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
        for first_row, number in self._places:
            for array in (self._memories[number], self._scales[number]):
                if not isinstance(array, int):
                    pages = array.reshape(self._storage.num_pages, -1)
                    one.compact(accepted, pages, groups=groups, page_size=layout.page_size, first_row=first_row)

    def run(self, q: Buffer, k: Buffer, v: Buffer, layer: int) -> Buffer:
        """Write `k` and `v` `[T, K]` to their pages in `layer` and return `[T, Q]`, what `q` `[T, Q]` attends to.

        Positions and pages are those of the scope of `q`.
        """
        first_row, number = self._places[layer]
        layout, memory, tape, own = self._storage.layout, self._memories[number], q.tape, self._layers[layer]
        out = tape.buffer(q.rows, q.size)
        heads, page_size = layout.num_kv_heads, layout.page_size
        scales = self._scales[number]
        scope, size = q.rows.scope, memory.size
        tape.emit(Operation.STORE, q.rows, k, v, memory, k.size, heads, page_size, scales, scope, size, first_row)
        tape.emit(
            Operation.ATTEND, q.rows, q, memory, out, q.size, heads, page_size,
            _UNLIMITED if own.window is None else own.window, scales, scope, size, first_row,
            own.head_dim, number=own.scale,
        )  # fmt: skip
        return out
