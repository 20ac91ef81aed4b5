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
"""The policies of this package that need nothing besides a trace.

A block counts as one token, so their parameters are in blocks: a block at position 16 costs twice as much as the first
one, and a conversation that must recompute at most 8 of its blocks meets its latency target.
"""


def uses_queue(policy: AnyPolicy) -> bool:
    """Return whether a policy uses the prompts of the waiting requests."""
    return isinstance(policy, QueueInformed)
