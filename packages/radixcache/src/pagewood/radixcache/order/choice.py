"""Creates the eviction order for a policy."""

from collections.abc import Callable
from typing import TypeAlias

from pagewood.radixcache.arrays import ITEM_BYTES
from pagewood.radixcache.node import Edge
from pagewood.radixcache.order import Order
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.order.scored import Scored, Scoring
from pagewood.radixcache.order.small_main import SmallMain
from pagewood.radixcache.policies import LRU, S3FIFO, Policy, QueueInformed, Retained

AnyPolicy: TypeAlias = Policy | S3FIFO | Retained | QueueInformed
"""The policies that `RadixCache` accepts."""


def order_for(policy: AnyPolicy, *, page_size: int, watched_end: Callable[[Edge], int]) -> Order:
    """Return an empty eviction order.

    Args:
        policy: the policy that defines the order.
        page_size: tokens per page.
        watched_end: returns the end of the longest watched part of an edge.
    """
    if isinstance(policy, S3FIFO):
        return SmallMain(policy.small_share, page_bytes=page_size * ITEM_BYTES)
    if type(policy) is LRU:
        return RecencyList()
    is_informed = isinstance(policy, QueueInformed)
    inner = policy.policy if isinstance(policy, QueueInformed) else policy
    clock = inner.clock if isinstance(inner, Retained) else None
    return Scored(
        Scoring(
            policy=inner.policy if isinstance(inner, Retained) else inner,
            page_size=page_size,
            clock=clock,
            watched_end=watched_end if is_informed else None,
        )
    )


def name_of(policy: AnyPolicy) -> str:
    """Return the name of a policy's class, followed by the name of a wrapped policy in brackets."""
    name = type(policy).__name__
    return f"{name}({name_of(policy.policy)})" if isinstance(policy, Retained | QueueInformed) else name
