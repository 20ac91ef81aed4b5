"""Eviction policies: which page to evict first, one small class per policy.

A policy gives each page a score, and the cache evicts the unlocked leaf page with the lowest score. Ticks are distinct
where it matters, so a score that ends with `last_used` or `created` has no ties.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Real
from typing import Any, Protocol

from pagewood.radixcache.counts import require_count
from pagewood.radixcache.usage import Usage


class Policy(Protocol):
    """Scores pages. To write a policy of your own, derive from this class and define `score`.

    A score may depend on the usage (including what `used` wrote into it) and on the length of the prefix. For equal
    usages it must be monotonic in the length of the prefix, rising or falling.
    """

    def score(self, usage: Usage, num_tokens: int) -> Any:
        """Return a comparable value: the page with the lowest score is evicted first.

        Args:
            usage: how the page has been used.
            num_tokens: length of the prefix that ends with the page.
        """
        ...

    def used(self, usage: Usage) -> None:
        """Called when pages have been adopted or used, after `usage` was updated. Does nothing by default."""

    def evicted(self, score: Any) -> None:
        """Called with the score of pages that are being evicted. Does nothing by default."""


class LRU(Policy):
    """Evicts the least recently used page first. The default, and the only policy whose every step is O(1)."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return the tick of the last use."""
        return usage.last_used


class MRU(Policy):
    """Evicts the most recently used page first; useful for repeated scans."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return the negated tick of the last use."""
        return -usage.last_used


class FIFO(Policy):
    """Evicts the oldest page first, however often it is used."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return the tick of creation."""
        return usage.created


class FILO(Policy):
    """Evicts the newest page first."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return the negated tick of creation."""
        return -usage.created


class LFU(Policy):
    """Evicts the least often used page first; among equals, the least recently used."""

    def score(self, usage: Usage, num_tokens: int) -> tuple[int, int]:
        """Return the number of uses, and the tick of the last one."""
        return usage.num_uses, usage.last_used


class SLRU(Policy):
    """Segmented LRU: evicts pages with fewer than `protected_uses` uses first, and by LRU within each segment.

    Source: Karedla, Love and Wherry, 1994; without their bound on the protected segment.
    """

    __slots__ = ("_protected_uses",)

    def __init__(self, *, protected_uses: int = 2) -> None:
        self._protected_uses = require_count("protected_uses", protected_uses, least=2)

    def score(self, usage: Usage, num_tokens: int) -> tuple[bool, int]:
        """Return the segment, and the tick of the last use."""
        return usage.num_uses >= self._protected_uses, usage.last_used


class TailOptimizedLRU(Policy):
    """LRU, except that pages which the tail latency does not need are evicted first.

    The next prompt of a conversation is expected to be its history plus `next_prompt_tokens`. It meets the latency
    target if at most `threshold_tokens` of it must be computed. Pages beyond what this requires are evicted first.

    Source: Tail-Optimized Caching for LLM Inference (arXiv 2510.15152).
    """

    __slots__ = ("_slack",)

    def __init__(self, *, threshold_tokens: int, next_prompt_tokens: int = 0) -> None:
        threshold_tokens = require_count("threshold_tokens", threshold_tokens, least=0)
        self._slack = require_count("next_prompt_tokens", next_prompt_tokens, least=0) - threshold_tokens

    def score(self, usage: Usage, num_tokens: int) -> tuple[bool, int]:
        """Return whether the page is needed to meet the target, and the tick of its last use."""
        return num_tokens <= usage.num_sequence_tokens + self._slack, usage.last_used


class GDSF(Policy):
    """Greedy dual: scores a page by its uses times its cost to recompute, plus an age that grows with evictions.

    All pages have the same size, but later pages cost more, because attention reads all tokens before them. The cost of
    the token at position n is `1 + n / attention_tokens`.

    Source: Cherkasova, GreedyDual-Size-Frequency, 1998; with size 1.
    """

    __slots__ = ("_attention_tokens", "_inflation")

    def __init__(self, *, attention_tokens: int = 8192) -> None:
        self._attention_tokens = require_count("attention_tokens", attention_tokens, least=1)
        self._inflation = 0.0  # written by: evicted

    def score(self, usage: Usage, num_tokens: int) -> tuple[float, int]:
        """Return the value of the page, and the tick of its last use."""
        return usage.age + usage.num_uses * (1 + num_tokens / self._attention_tokens), usage.last_used

    def used(self, usage: Usage) -> None:
        """Set the age of the used pages to the highest value evicted so far."""
        usage.age = self._inflation

    def evicted(self, score: tuple[float, int]) -> None:
        """Raise the age for all uses from now on to the value of the evicted pages."""
        self._inflation = max(self._inflation, score[0])


class S3FIFO:
    """Three queues: new runs enter a small queue, and only those used again while there enter the main queue.

    The third queue remembers the runs evicted from the small queue: if one returns, it enters the main queue directly.
    This policy does not score pages: `order/small_main.py` implements the queues. It evicts whole runs, and only
    leaves.

    Args:
        small_share: share of the pages that new runs may hold, in (0, 1).

    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023.
    """

    __slots__ = ("small_share",)

    def __init__(self, *, small_share: float = 0.1) -> None:
        if not isinstance(small_share, Real) or not 0 < small_share < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"small_share must be in (0, 1), got {small_share}")
        self.small_share = small_share


class Retained:
    """Any policy, with the priorities of `RadixCache.retain` above it: the policy decides among equal priorities.

    Lower priorities are evicted first. A priority holds until its deadline and is 0 afterwards. Priorities delay an
    eviction; they never prevent it.

    Args:
        policy: decides among equal priorities.
        clock: returns seconds; deadlines are times of this clock.
    """

    __slots__ = ("clock", "policy")

    def __init__(self, policy: Policy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.clock = clock


class QueueInformed:
    """Any policy, except that pages covered by an open watch are evicted after all other pages.

    Args:
        policy: decides among the watched pages, and among the others.
    """

    __slots__ = ("policy",)

    def __init__(self, policy: Policy | Retained) -> None:
        self.policy = policy
