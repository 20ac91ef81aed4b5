"""Which page to give up first: one small class for each policy.

A policy gives each page a score, and the cache gives up the unlocked leaf page with the lowest. Ticks are distinct
where it matters, so a score that ends with `last_used` or `created` leaves no ties.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from pagewood.radixcache.usage import Usage


class Policy(Protocol):
    """Scores pages; derive from it to write one of your own, and define `score`.

    A score may depend on the usage, on the length of the prefix, and on what `used` noted in the usage. Between two
    usages alike it must rise with the length of the prefix, or fall with it, but not do both.
    """

    def score(self, usage: Usage, num_tokens: int) -> Any:
        """Return something comparable: the page with the lowest goes first.

        Args:
            usage: how the page has been used.
            num_tokens: length of the prefix that ends with the page.
        """
        ...

    def used(self, usage: Usage) -> None:
        """Note that pages have been adopted or used; `usage` says so already. By default nothing."""

    def evicted(self, score: Any) -> None:
        """Note the score of pages that are being evicted. By default nothing."""


class LRU(Policy):
    """The least recently used first; the default, and the only one whose every step is O(1)."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return when it was last used."""
        return usage.last_used


class MRU(Policy):
    """The most recently used first; for scans that come round again."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return when it was last used, negated."""
        return -usage.last_used


class FIFO(Policy):
    """The oldest first, however much it is used."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return when it was created."""
        return usage.created


class FILO(Policy):
    """The newest first."""

    def score(self, usage: Usage, num_tokens: int) -> int:
        """Return when it was created, negated."""
        return -usage.created


class LFU(Policy):
    """The least often used first; among equals, the least recently used."""

    def score(self, usage: Usage, num_tokens: int) -> tuple[int, int]:
        """Return how often it was used, and when last."""
        return usage.num_uses, usage.last_used


class SLRU(Policy):
    """Segmented LRU: what has been used `protected_uses` times goes after what has not; LRU within each segment.

    Source: Karedla, Love and Wherry, 1994; without their bound on the protected segment.
    """

    __slots__ = ("_protected_uses",)

    def __init__(self, *, protected_uses: int = 2) -> None:
        if protected_uses < 2:
            raise ValueError(f"protected_uses must be >= 2, got {protected_uses}")
        self._protected_uses = protected_uses

    def score(self, usage: Usage, num_tokens: int) -> tuple[bool, int]:
        """Return the segment, and when it was last used."""
        return usage.num_uses >= self._protected_uses, usage.last_used


class TailOptimizedLRU(Policy):
    """LRU, but what the tail latency does not need goes first.

    A conversation that comes back is expected with its history and `next_prompt_tokens` more. As long as its prefix is
    cached so far that at most `threshold_tokens` of it must be computed, it is in time; pages beyond that are free to
    take.

    Source: Tail-Optimized Caching for LLM Inference (arXiv 2510.15152).
    """

    __slots__ = ("_slack",)

    def __init__(self, *, threshold_tokens: int, next_prompt_tokens: int = 0) -> None:
        if threshold_tokens < 0 or next_prompt_tokens < 0:
            raise ValueError(
                f"threshold_tokens and next_prompt_tokens must be >= 0, got {threshold_tokens}, {next_prompt_tokens}"
            )
        self._slack = next_prompt_tokens - threshold_tokens

    def score(self, usage: Usage, num_tokens: int) -> tuple[bool, int]:
        """Return whether it is needed in time, and when it was last used."""
        return num_tokens <= usage.num_sequence_tokens + self._slack, usage.last_used


class GDSF(Policy):
    """Greedy dual: uses times the cost of computing a page again, on top of what had to be given up before.

    Pages are all of one size, but a later one costs more: attention reads all that is before it. The cost of the token
    at position n is `1 + n / attention_tokens`.

    Source: Cherkasova, GreedyDual-Size-Frequency, 1998; with size 1.
    """

    __slots__ = ("_attention_tokens", "_inflation")

    def __init__(self, *, attention_tokens: int = 8192) -> None:
        if attention_tokens < 1:
            raise ValueError(f"attention_tokens must be >= 1, got {attention_tokens}")
        self._attention_tokens = attention_tokens
        self._inflation = 0.0  # written by: evicted

    def score(self, usage: Usage, num_tokens: int) -> tuple[float, int]:
        """Return its value, and when it was last used."""
        return usage.age + usage.num_uses * (1 + num_tokens / self._attention_tokens), usage.last_used

    def used(self, usage: Usage) -> None:
        """Lift what is used by what has been evicted so far."""
        usage.age = self._inflation

    def evicted(self, score: tuple[float, int]) -> None:
        """Let everything that is used from now on count for more than this."""
        self._inflation = max(self._inflation, score[0])


class S3FIFO:
    """Three queues: newcomers pass through a small one, and only what is used again there gets into the main one.

    It is no score: `order/small_main.py` has the queues. Runs are its objects, and leaves its candidates.

    Args:
        small_share: part of the pages that newcomers may hold, in (0, 1).

    Source: Yang et al., FIFO queues are all you need for cache eviction, SOSP 2023.
    """

    __slots__ = ("small_share",)

    def __init__(self, *, small_share: float = 0.1) -> None:
        if not 0 < small_share < 1:
            raise ValueError(f"small_share must be in (0, 1), got {small_share}")
        self.small_share = small_share


class Retained:
    """Any policy, under the priorities of `RadixCache.retain`: lower ones go first, the policy decides among equals.

    A priority holds until its deadline and is 0 afterwards. Priorities delay an eviction, they never forbid it.

    Args:
        policy: decides among equal priorities.
        clock: seconds; deadlines are times of this clock.
    """

    __slots__ = ("clock", "policy")

    def __init__(self, policy: Policy, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.policy = policy
        self.clock = clock


class QueueInformed:
    """Any policy, but what a waiting request watches goes after all that none does.

    Args:
        policy: decides among what is watched, and among what is not.
    """

    __slots__ = ("policy",)

    def __init__(self, policy: Policy | Retained) -> None:
        self.policy = policy
