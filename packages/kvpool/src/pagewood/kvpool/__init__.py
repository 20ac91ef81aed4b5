"""Paged KV memory: which pages are free, and what a page looks like.

The memory itself is `pagewood.kvpool.storage`, which needs torch; nothing else here does.
"""

from pagewood.kvpool.allocator import Moves, OutOfPages, PageAllocator
from pagewood.kvpool.layout import KVLayout, MultiHeadLayout

__version__ = "0.1.0"

__all__ = ["KVLayout", "Moves", "MultiHeadLayout", "OutOfPages", "PageAllocator"]
