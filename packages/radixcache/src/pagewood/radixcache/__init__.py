"""A radix-tree prefix cache for LLM engines: token prefixes to KV page ids, with leases, eviction and namespaces."""

from pagewood.radixcache.cache import Insertion, Match, RadixCache
from pagewood.radixcache.node import Node
from pagewood.radixcache.observer import Observer, Run

__all__ = ["Insertion", "Match", "Node", "Observer", "RadixCache", "Run", "__version__"]

__version__ = "0.1.0"
