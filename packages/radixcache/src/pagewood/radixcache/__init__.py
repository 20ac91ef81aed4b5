"""A radix-tree prefix cache for LLM engines: token prefixes to KV page ids, with leases, eviction and namespaces."""

from pagewood.radixcache import tree
from pagewood.radixcache.cache import RadixCache
from pagewood.radixcache.explain import Cause, Explanation
from pagewood.radixcache.extra_keys import with_extra_keys
from pagewood.radixcache.insertion import Insertion
from pagewood.radixcache.match import Match, Partial
from pagewood.radixcache.namespaces import ANY, CacheKey, Namespace
from pagewood.radixcache.node import Node
from pagewood.radixcache.observer import Observer, Run
from pagewood.radixcache.outline import Branch, Outline
from pagewood.radixcache.policies import (
    FIFO,
    FILO,
    GDSF,
    LFU,
    LRU,
    MRU,
    S3FIFO,
    SLRU,
    Policy,
    QueueInformed,
    Retained,
    TailOptimizedLRU,
)
from pagewood.radixcache.usage import Usage
from pagewood.radixcache.watches import Watch, WatchGroup

__all__ = [
    "ANY",
    "FIFO",
    "FILO",
    "GDSF",
    "LFU",
    "LRU",
    "MRU",
    "S3FIFO",
    "SLRU",
    "Branch",
    "CacheKey",
    "Cause",
    "Explanation",
    "Insertion",
    "Match",
    "Namespace",
    "Node",
    "Observer",
    "Outline",
    "Partial",
    "Policy",
    "QueueInformed",
    "RadixCache",
    "Retained",
    "Run",
    "TailOptimizedLRU",
    "Usage",
    "Watch",
    "WatchGroup",
    "__version__",
    "is_compiled",
    "with_extra_keys",
]

__version__ = "0.1.0"

is_compiled: bool = not (tree.__file__ or "").endswith(".py")
"""Whether the tree was installed as compiled code, which answers the same in less time."""
