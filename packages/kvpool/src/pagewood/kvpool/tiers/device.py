"""The device's side of a copy: pages that lie scattered over the layers, to and from page images."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pagewood.kvpool.tiers.arrays import Bytes

# Copies from this size on are worth a call of their own; smaller ones go through a buffer that stays in the L2 cache.
_RUN_BYTES = 32 * 1024
_BUFFER_BYTES = 256 * 1024


class DevicePages(Protocol):
    """The KV memory of a pool, as the tiers see it.

    Calls come from worker threads and return when the copy is done. The pages and slots of a call are nobody else's
    while it runs.
    """

    @property
    def num_layers(self) -> int:
        """Parts of a page that can be loaded one after the other."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        ...

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: page `pages[i]`, all layers, to `memory[slots[i]]`; `memory` is `[n, page_bytes] uint8`."""
        ...

    def write(self, layer: int, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy one layer of pages in: from `memory[slots[i]]` to page `pages[i]`."""
        ...


class ArrayPages:
    """KV memory that numpy can see: one array per layer, of any engine.

    Invariant: a page image is the page's rows of all layers, in order.

    Args:
        layers: `[num_pages, layer_bytes] uint8` each, rows contiguous; `layer_bytes` may differ between layers.

    Raises:
        ValueError: there is no layer, or one has another dtype or number of dimensions.
    """

    __slots__ = ("_layers", "_starts")

    def __init__(self, layers: Sequence[Bytes]) -> None:
        if not layers:
            raise ValueError("layers must not be empty")
        for layer in layers:
            if layer.dtype != np.uint8 or layer.ndim != 2:
                raise ValueError(f"layers must be uint8 of 2 dimensions, got {layer.dtype} of shape {layer.shape}")
        self._layers = list(layers)
        self._starts = [0, *np.cumsum([layer.shape[1] for layer in layers]).tolist()]

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self._layers)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        return self._starts[-1]

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: page `pages[i]`, all layers, to `memory[slots[i]]`."""
        source, target = np.asarray(pages, np.intp), np.asarray(slots, np.intp)
        for layer, array in enumerate(self._layers):
            copy_rows(array, source, self._part(memory, layer), target)

    def write(self, layer: int, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy one layer of pages in: from `memory[slots[i]]` to page `pages[i]`."""
        source, target = np.asarray(slots, np.intp), np.asarray(pages, np.intp)
        copy_rows(self._part(memory, layer), source, self._layers[layer], target)

    def _part(self, memory: Bytes, layer: int) -> Bytes:
        return memory[:, self._starts[layer] : self._starts[layer + 1]]


def copy_rows(
    source: Bytes, source_rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    target: Bytes, target_rows: np.ndarray[tuple[int], np.dtype[np.intp]],
) -> None:  # fmt: skip
    """Copy `source[source_rows[i]]` to `target[target_rows[i]]`, in as few and as large pieces as the rows allow.

    numpy scatters in one pass but gathers in two, through a temporary array; and every call takes the interpreter's
    lock once.
    """
    n, row_bytes = len(source_rows), source.shape[1]
    if not n:
        return
    if (np.diff(source_rows) == 1).all():
        target[target_rows] = source[source_rows[0] : source_rows[0] + n]
        return
    breaks = np.flatnonzero((np.diff(source_rows) != 1) | (np.diff(target_rows) != 1)) + 1
    if row_bytes * n >= _RUN_BYTES * (len(breaks) + 1):
        starts = [0, *breaks.tolist()]
        for start, end in zip(starts, [*starts[1:], n], strict=True):
            a, b = int(source_rows[start]), int(target_rows[start])
            target[b : b + end - start] = source[a : a + end - start]
        return
    step = max(1, _BUFFER_BYTES // row_bytes)
    for start in range(0, n, step):
        target[target_rows[start : start + step]] = source[source_rows[start : start + step]]
