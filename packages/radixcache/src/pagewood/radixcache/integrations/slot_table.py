# pyright: basic
# (torch is not a dependency of this package)
"""The KV slots of cached pages, kept on the device, for engines that name KV by token slots."""

import numpy as np
import torch

from pagewood.radixcache.arrays import Int32


class SlotTable:
    """Gives numbers to pages, so that the tree can own pages whose slots are known to the device only.

    An engine keeps the slots of a request in a tensor on its device. Reading them to the host would wait for the
    device at every insertion. The tree holds the numbers of this table instead, and the slots are only copied from one
    tensor on the device to another.

    Invariant: a number is either free, or it was returned by `add` and stands for one row of slots until `remove`.

    Args:
        num_pages: pages to make room for at first; the table doubles when it is full.
        page_size: slots per page.
        dtype: integer type of the slots.
        device: where the slots are kept.
    """

    def __init__(self, num_pages: int, page_size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        num_pages = max(1, num_pages)
        self._rows = torch.zeros((num_pages, page_size), dtype=dtype, device=device)
        self._free: Int32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)  # a stack: the last one is taken first
        self._num_free = num_pages

    @property
    def num_used(self) -> int:
        """Number of pages in the table."""
        return len(self._rows) - self._num_free

    def add(self, slots: torch.Tensor) -> Int32:
        """Copy the slots of whole pages into the table.

        Args:
            slots: `[num_pages * page_size]`, slots on any device.

        Returns:
            `[num_pages] int32`, the numbers of the pages.
        """
        rows = slots.reshape(-1, self._rows.shape[1])
        while self._num_free < len(rows):
            self._grow()
        self._num_free -= len(rows)
        numbers = self._free[self._num_free : self._num_free + len(rows)].copy()
        if len(rows):
            self._rows[self._on_device(numbers)] = rows.to(self._rows)
        return numbers

    def slots(self, numbers: Int32) -> torch.Tensor:
        """Return a copy of the slots of pages, `[len(numbers) * page_size]`, on the device."""
        return self._rows[self._on_device(numbers)].flatten()

    def remove(self, numbers: Int32) -> None:
        """Free the numbers of pages; they must be in the table."""
        self._free[self._num_free : self._num_free + len(numbers)] = numbers
        self._num_free += len(numbers)

    def _on_device(self, numbers: Int32) -> torch.Tensor:
        return torch.from_numpy(numbers.astype(np.int64)).to(self._rows.device, non_blocking=True)

    def _grow(self) -> None:
        num_pages = len(self._rows)
        self._rows = torch.cat((self._rows, torch.zeros_like(self._rows)))
        free = np.empty(2 * num_pages, np.int32)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + num_pages] = np.arange(2 * num_pages - 1, num_pages - 1, -1)
        self._free = free
        self._num_free += num_pages
