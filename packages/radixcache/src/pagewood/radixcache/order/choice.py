"""Creates the eviction order for a policy."""

from collections.abc import Callable
from typing import TypeAlias

from pagewood.radixcache.arrays import ITEM_BYTES
from pagewood.radixcache.node import Edge
from pagewood.radixcache.order import Order
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.order.scored import Scored, Scoring
from pagewood.radixcache.order.small_main import SmallMain
from pagewood.radixcache.order.watched_recency import WatchedRecency
from pagewood.radixcache.policies import LRU, S3FIFO, Policy, QueueInformed, Retained

AnyPolicy: TypeAlias = Policy | S3FIFO | Retained | QueueInformed
"""The policies that `RadixCache` accepts."""


def order_for(policy: AnyPolicy, *, page_size: int, watched_end: Callable[[Edge], int]) -> Order:
    """Return an empty eviction order.

    Args:
        policy: the policy that defines the order.
        page_size: tokens per page.
        watched_end: returns the end of the longest watched part of an edge.

    Raises:
        ValueError: `policy`, or the policy that it wraps, is not a policy, but for instance its name or its class.
    """
    _require_policy(policy)
    if isinstance(policy, S3FIFO):
        return SmallMain(policy.small_share, page_bytes=page_size * ITEM_BYTES)
    if type(policy) is LRU:
        return RecencyList()
    if isinstance(policy, QueueInformed) and type(policy.policy) is LRU:
        return WatchedRecency(watched_end)
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


def _require_policy(policy: object) -> None:
    """Check at run time that `policy` is one, because callers may not use a type checker."""
    inner = policy.policy if isinstance(policy, QueueInformed) else policy
    is_wrapped = inner is not policy
    if isinstance(inner, Retained):
        inner, is_wrapped = inner.policy, True
    if isinstance(inner, S3FIFO) and not is_wrapped:
        return
    if isinstance(inner, type) or not all(
        callable(getattr(inner, name, None)) for name in ("score", "used", "evicted")
    ):
        hint = f", so write {inner.__name__}()" if isinstance(inner, type) else ""
        raise ValueError(
            f"policy must be an object with the methods of Policy, such as LRU(){hint}, got {inner!r}"
            + (f" in {type(policy).__name__}" if is_wrapped else "")
        )
