"""The device's side of a copy: pages that lie scattered over the layers, to and from page images."""

from collections.abc import Callable, Sequence
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
    def page_bytes(self) -> int:
        """Bytes of one page over all layers."""
        ...

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: page `pages[i]`, all layers, to `memory[slots[i]]`; `memory` is `[n, page_bytes] uint8`."""
        ...

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in, the first layers first: from `memory[slots[i]]` to page `pages[i]`.

        `arrived(n)` is told when the first n layers of all pages are there, for some n up to all of them, and calls the
        rest off by raising.
        """
        ...


class ArrayPages:
    """KV memory that numpy can see: some arrays per layer, of any engine.

    Invariant: a page image is the page's rows of all arrays of all layers, in order.

    Args:
        layers: for each layer its arrays (say K and V), `[num_pages, num_bytes] uint8` each, contiguous in a page;
            `num_bytes` may differ.

    Raises:
        ValueError: there is no layer, or an array has another dtype or number of dimensions.
    """

    __slots__ = ("_parts", "page_bytes")

    def __init__(self, layers: Sequence[Sequence[Bytes]]) -> None:
        if not layers:
            raise ValueError("layers must not be empty")
        self._parts: list[list[tuple[Bytes, int]]] = []  # of each layer: its arrays, and where they lie in an image
        self.page_bytes = 0
        """Bytes of one page over all layers."""  # written by: __init__
        for arrays in layers:
            parts: list[tuple[Bytes, int]] = []
            for array in arrays:
                if array.dtype != np.uint8 or array.ndim != 2:
                    raise ValueError(f"layers must be uint8 of 2 dimensions, got {array.dtype} of shape {array.shape}")
                parts.append((array, self.page_bytes))
                self.page_bytes += array.shape[1]
            self._parts.append(parts)

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: page `pages[i]`, all layers, to `memory[slots[i]]`."""
        source, target = np.asarray(pages, np.intp), np.asarray(slots, np.intp)
        for parts in self._parts:
            for array, start in parts:
                copy_rows(array, source, memory[:, start : start + array.shape[1]], target)

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in, layer by layer: from `memory[slots[i]]` to page `pages[i]`."""
        source, target = np.asarray(slots, np.intp), np.asarray(pages, np.intp)
        for layer, parts in enumerate(self._parts):
            for array, start in parts:
                copy_rows(memory[:, start : start + array.shape[1]], source, array, target)
            arrived(layer + 1)


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
        starts = np.concatenate(([0], breaks))
        runs = (source_rows[starts].tolist(), target_rows[starts].tolist(), np.diff(starts, append=n).tolist())
        for a, b, count in zip(*runs, strict=True):
            if count == 1:  # 64 KiB cost 4 us, and slices of one row another half
                target[b] = source[a]
            else:
                target[b : b + count] = source[a : a + count]
        return
    step = max(1, _BUFFER_BYTES // row_bytes)
    for start in range(0, n, step):
        target[target_rows[start : start + step]] = source[source_rows[start : start + step]]
