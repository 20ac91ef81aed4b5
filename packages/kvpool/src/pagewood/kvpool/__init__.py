"""Paged KV memory: the list of free pages, the layout of a page, and groups of layers that give pages back separately.

The memory itself is in `storage`, `latent_storage` and `memory`. Only these modules need torch.
"""

from pagewood.kvpool.allocator import Moves, OutOfPages, PageAllocator
from pagewood.kvpool.arrays import PageArray
from pagewood.kvpool.groups import LayerGroups
from pagewood.kvpool.joint import JointLayout
from pagewood.kvpool.latent import LatentLayout
from pagewood.kvpool.layout import MultiHeadLayout, PageLayout
from pagewood.kvpool.state import StateLayout

__version__ = "0.1.0"

__all__ = [
    "JointLayout",
    "LatentLayout",
    "LayerGroups",
    "Moves",
    "MultiHeadLayout",
    "OutOfPages",
    "PageAllocator",
    "PageArray",
    "PageLayout",
    "StateLayout",
]
