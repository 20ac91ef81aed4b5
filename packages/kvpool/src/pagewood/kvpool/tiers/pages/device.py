"""Copies between device pages, which are scattered over the layers, and page images, which are contiguous."""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from pagewood.kvpool.tiers.pages.arrays import Bytes

# Runs of at least this size are copied by a call each; smaller ones go through a buffer that stays in the L2 cache.
_RUN_BYTES = 32 * 1024
_BUFFER_BYTES = 256 * 1024


class DevicePages(Protocol):
    """The KV memory of a pool, in the form that the tiers use.

    Worker threads make these calls, and a call returns when the copy is done. Nothing else accesses the pages and slots
    of a call while it runs.
    """

    @property
    def page_bytes(self) -> int:
        """Size of one page over all layers, in bytes."""
        ...

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: all layers of page `pages[i]` to `memory[slots[i]]`.

        `memory` is `[n, page_bytes] uint8`, and may be columns of wider memory.
        """
        ...

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in, the first layers first: from `memory[slots[i]]` to page `pages[i]`.

        Call `arrived(n)` when the first n layers of all pages have been copied, for increasing n up to all layers. If
        `arrived` raises, stop and let the exception pass: the copy was cancelled.
        """
        ...


class PageHolder(Protocol):
    """Knows pages that may lose a part of what they hold while they are cached, such as the KV behind a window.

    The thread that uses the index makes these calls. Their arguments are page ids.
    """

    def hold(self, pages: Sequence[int]) -> None:
        """Keep what cached pages hold now: a copy is going to read them."""
        ...

    def let_go(self, pages: Sequence[int]) -> None:
        """Undo one `hold`: the copy has ended."""
        ...

    def first_lacking(self, pages: Sequence[int], num_pages: int) -> int:
        """Return the first of some cached pages, the beginning of a prefix, that lacks what a hit of it needs.

        Args:
            pages: the cached ones.
            num_pages: of the prefix.

        Returns:
            Its place in the prefix; the number of `pages` if none lacks anything.
        """
        ...

    def adopt(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Note that the cache owns pages now that were given to a recall, and loaded from `memory[slots[i]]`."""
        ...

    def fill(self, cached: Sequence[int], pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> int:
        """Give cached pages what they lack of loaded ones for the same tokens; return how many lacked something.

        The loaded `pages` stay with the recall; the other arguments are those of `adopt`.
        """
        ...

    def give_back(self, pages: Sequence[int]) -> None:
        """Note that pages which were given to a recall are not needed: what they hold is worth nothing."""
        ...


class ArrayPages:
    """KV memory of any engine as numpy arrays: one or more arrays per layer.

    Invariant: a page image is the concatenation of the page's rows of all arrays of all layers, in order.

    Attributes:
        page_bytes: Size of one page over all layers, in bytes.
    """

    __slots__ = ("_parts", "page_bytes")

    def __init__(self, layers: Sequence[Sequence[Bytes]]) -> None:
        """Use existing memory.

        Args:
            layers: For each layer its arrays (K and V, for instance), `[num_pages, num_bytes] uint8` each, contiguous
                within a page; `num_bytes` may differ between arrays.

        Raises:
            ValueError: There is no layer, or an array has another dtype or number of dimensions.
        """
        if not layers:
            raise ValueError("layers must not be empty")
        # For each layer, its arrays and their offsets in a page image.
        self._parts: list[list[tuple[Bytes, int]]] = []
        self.page_bytes = 0  # written by: __init__
        for arrays in layers:
            parts: list[tuple[Bytes, int]] = []
            for array in arrays:
                if array.dtype != np.uint8 or array.ndim != 2:
                    raise ValueError(f"layers must be 2-dimensional uint8, got {array.dtype} of shape {array.shape}")
                parts.append((array, self.page_bytes))
                self.page_bytes += array.shape[1]
            self._parts.append(parts)

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: all layers of page `pages[i]` to `memory[slots[i]]`."""
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


class ChainedPages:
    """Several memories of one layout, one behind the other, as one.

    Invariant: page `p` is page `p % num_pages` of memory `p // num_pages`, and part `-1 - p` of all states is part
    `p % num_parts` of the states of memory `p // num_parts`.

    Attributes:
        page_bytes: Size of one page over all layers, in bytes.
    """

    __slots__ = ("_memories", "_num_pages", "_num_parts", "page_bytes")

    def __init__(self, memories: Sequence[DevicePages], *, num_pages: int, num_parts: int = 0) -> None:
        """Use existing memories.

        Args:
            memories: At least one, with images of the same format.
            num_pages: Pages of each.
            num_parts: Parts of states of each, if they are `StatePages`.
        """
        self._memories = tuple(memories)
        self._num_pages = num_pages
        self._num_parts = num_parts
        self.page_bytes = memories[0].page_bytes  # written by: __init__

    def read(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int]) -> None:
        """Copy pages out: all layers of page `pages[i]` to `memory[slots[i]]`."""
        for number, own, of_own in self._divided(pages, slots):
            self._memories[number].read(own, memory, of_own)

    def write(self, pages: Sequence[int], memory: Bytes, slots: Sequence[int], arrived: Callable[[int], None]) -> None:
        """Copy pages in; layers count as arrived when those of the last memory have."""
        *firsts, (number, own, of_own) = self._divided(pages, slots)
        for other, others, of_others in firsts:
            self._memories[other].write(others, memory, of_others, lambda _: arrived(0))
        self._memories[number].write(own, memory, of_own, arrived)

    def _divided(self, pages: Sequence[int], slots: Sequence[int]) -> list[tuple[int, list[int], list[int]]]:
        """Return the number of each memory that has some of the pages, its pages, and their slots."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for page, slot in zip(pages, slots, strict=True):
            number, own = divmod(page, self._num_pages)
            if page < 0:
                number, own = divmod(-1 - page, self._num_parts)
                own = -1 - own
            of_memory = found.setdefault(number, ([], []))
            of_memory[0].append(own)
            of_memory[1].append(slot)
        return [(number, *of_memory) for number, of_memory in found.items()]


def copy_rows(
    source: Bytes, source_rows: np.ndarray[tuple[int], np.dtype[np.intp]],
    target: Bytes, target_rows: np.ndarray[tuple[int], np.dtype[np.intp]],
) -> None:  # fmt: skip
    """Copy `source[source_rows[i]]` to `target[target_rows[i]]`, in as few and as large pieces as possible.

    numpy writes scattered rows in one pass, but reads them in two passes, through a temporary array. Each call to numpy
    takes the interpreter's lock once.
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
            if count == 1:  # copying 64 KiB takes 4 us; as a slice of one row it would take half as much again
                target[b] = source[a]
            else:
                target[b : b + count] = source[a : a + count]
        return
    step = max(1, _BUFFER_BYTES // row_bytes)
    for start in range(0, n, step):
        target[target_rows[start : start + step]] = source[source_rows[start : start + step]]
