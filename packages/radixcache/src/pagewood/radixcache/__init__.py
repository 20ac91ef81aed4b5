"""A radix-tree prefix cache for LLM engines: token prefixes to KV page ids, with leases, eviction and namespaces."""

from pagewood.radixcache.cache import Insertion, Match, RadixCache
from pagewood.radixcache.node import Node

__all__ = ["Insertion", "Match", "Node", "RadixCache", "__version__"]

__version__ = "0.1.0"
