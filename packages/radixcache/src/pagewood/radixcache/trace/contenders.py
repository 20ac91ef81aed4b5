"""The policies that a trace can be replayed with, by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pagewood.radixcache.order.choice import AnyPolicy
from pagewood.radixcache.policies import (
    FIFO,
    FILO,
    GDSF,
    LFU,
    LRU,
    MRU,
    S3FIFO,
    SLRU,
    QueueInformed,
    TailOptimizedLRU,
)

POLICIES: Mapping[str, Callable[[], AnyPolicy]] = MappingProxyType(
    {
        "lru": LRU,
        "mru": MRU,
        "fifo": FIFO,
        "filo": FILO,
        "lfu": LFU,
        "slru": SLRU,
        "s3fifo": S3FIFO,
        "gdsf": lambda: GDSF(attention_tokens=16),
        "tail-lru": lambda: TailOptimizedLRU(threshold_tokens=8),
        "queue-lru": lambda: QueueInformed(LRU()),
    }
)
"""Those of this package that need no more than a trace. They take a block for a token, so these are blocks: a block at
position 16 costs twice the first one, and a conversation that has to compute 8 of its blocks again is in time."""


def looks_at_queue(policy: AnyPolicy) -> bool:
    """Return whether a policy wants to know what the waiting requests are going to ask for."""
    return isinstance(policy, QueueInformed)
