# pyright: basic, reportMissingImports=false
# (mini-sglang and torch are not dependencies of this package)
"""The prefix cache as a cache type of mini-sglang: call `register()`, then start it with `--cache-type pagewood`.

Written for mini-sglang of 2026-03-13.
"""

from dataclasses import dataclass

import numpy as np
import torch
from minisgl.core import get_global_ctx
from minisgl.kvcache import SUPPORTED_CACHE_MANAGER
from minisgl.kvcache.base import BaseCacheHandle, BasePrefixCache, InsertResult, MatchResult, SizeInfo

from pagewood.radixcache import RadixCache
from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.integrations.slot_table import SlotTable
from pagewood.radixcache.node import Node

NAME = "pagewood"


def register() -> None:
    """Register the cache type; calling it again changes nothing."""
    if NAME not in SUPPORTED_CACHE_MANAGER.supported_names():
        SUPPORTED_CACHE_MANAGER.register(NAME)(PagewoodPrefixCache)


@dataclass(frozen=True)
class PagewoodHandle(BaseCacheHandle):
    """A cached prefix of `cached_len` tokens, which stays valid while it is locked."""

    node: Node
    pages: Int32
    slots: SlotTable

    def get_matched_indices(self) -> torch.Tensor:
        """Return the slots of the prefix, `[cached_len] int32`, on the device."""
        return self.slots.slots(self.pages)


class PagewoodPrefixCache(BasePrefixCache):
    """A `pagewood.radixcache.RadixCache` behind mini-sglang's interface.

    Invariant: the tree holds one page number for each page of slots that mini-sglang has inserted and not got back; the
    slots are in a `SlotTable` on the device, so that no call waits for the device.

    Args:
        device: where mini-sglang keeps its page table.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.page_size = get_global_ctx().page_size
        self.reset()

    def reset(self) -> None:
        """Forget everything; the slots are not returned."""
        self.tree = RadixCache(self.page_size)
        self._slots = SlotTable(1024, self.page_size, dtype=torch.int32, device=self.device)

    def match_prefix(self, input_ids: torch.Tensor) -> MatchResult:
        """Return the longest cached prefix of `[num_tokens] int32` token ids on the host, and count it as used."""
        match = self.tree.match(_on_host(input_ids))
        return MatchResult(PagewoodHandle(match.num_tokens, match.node, match.pages, self._slots))

    def lock_handle(self, handle: BaseCacheHandle, unlock: bool = False) -> None:
        """Lock a handle, or undo one lock of it.

        Raises:
            ValueError: The prefix was evicted before it was locked, or `handle` is not locked.
        """
        assert isinstance(handle, PagewoodHandle)
        (self.tree.unlock if unlock else self.tree.lock)(handle.node)

    def insert_prefix(self, input_ids: torch.Tensor, indices: torch.Tensor) -> InsertResult:
        """Insert whole pages; the slots of pages that were cached already still belong to the caller."""
        num_tokens = len(input_ids) // self.page_size * self.page_size
        numbers = self._slots.add(indices[:num_tokens])
        insertion = self.tree.insert(_on_host(input_ids), numbers)
        self._slots.remove(numbers[: insertion.num_existing])
        handle = PagewoodHandle(num_tokens, insertion.node, insertion.pages, self._slots)
        return InsertResult(insertion.num_existing * self.page_size, handle)

    def evict(self, size: int) -> torch.Tensor:
        """Evict the least recently used pages; return their slots, `[>= size] int32`, in whole pages.

        Raises:
            RuntimeError: `size` is more than can be evicted.
        """
        if size > self.size_info.evictable_size:
            raise RuntimeError(f"size must be <= {self.size_info.evictable_size} evictable tokens, got {size}")
        pages = self.tree.evict(-(-size // self.page_size))
        slots = self._slots.slots(pages)
        self._slots.remove(pages)
        return slots

    @property
    def size_info(self) -> SizeInfo:
        """The numbers of tokens in unlocked and in locked pages."""
        num_locked = self.tree.num_locked
        return SizeInfo((self.tree.num_pages - num_locked) * self.page_size, num_locked * self.page_size)

    def check_integrity(self) -> None:
        """Verify every invariant of the tree, and that each of its pages has one row of slots.

        Raises:
            AssertionError: an invariant does not hold.
        """
        self.tree.check()
        assert self._slots.num_used == self.tree.num_pages, (self._slots.num_used, self.tree.num_pages)


def _on_host(input_ids: torch.Tensor) -> Int32:
    return input_ids.numpy().astype(np.int32, copy=False)
