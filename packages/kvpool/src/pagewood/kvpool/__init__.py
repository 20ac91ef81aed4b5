"""Paged KV memory: the list of free pages, the layout of a page, and the page lists of requests.

The memory itself is in `storage`, `latent_storage`, `states` and `memory`. Only these modules need torch.
"""

from pagewood.kvpool.allocator import Moves, OutOfPages, PageAllocator
from pagewood.kvpool.arrays import PageArray
from pagewood.kvpool.groups import LayerGroups
from pagewood.kvpool.hybrid import HybridLayout
from pagewood.kvpool.joint import JointLayout
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.layout import KVLayout, MultiHeadLayout, PageLayout
from pagewood.kvpool.ragged import RaggedPages, ragged_pages
from pagewood.kvpool.rows import RowPool
from pagewood.kvpool.state import StateLayout
from pagewood.kvpool.tickets import OutOfRows, TicketPool
from pagewood.kvpool.windowed import WindowedLayout

__version__ = "0.1.0"

__all__ = [
    "HybridLayout",
    "JointLayout",
    "KVLayout",
    "LatentLayout",
    "LayerGroups",
    "Moves",
    "MultiHeadLayout",
    "OutOfPages",
    "OutOfRows",
    "PageAllocator",
    "PageArray",
    "PageLayout",
    "RaggedPages",
    "RowPool",
    "StateLayout",
    "TicketPool",
    "WindowedLayout",
    "ragged_pages",
]
