"""When pages are copied out of the device, and how long a request waits for pages from a store."""

from dataclasses import dataclass
from enum import Enum


class WritePolicy(Enum):
    """When a page of the device is copied to the host."""

    WRITE_THROUGH = "write_through"
    """As soon as it is cached: eviction is free, and a crash loses little. Every page is copied once."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it has been used often enough; pages that were used less are forgotten when they are evicted."""
    WRITE_BACK = "write_back"
    """When it is evicted: nothing is copied in vain, and eviction waits for one copy in memory."""


class PrefetchMode(Enum):
    """What a request does whose pages are on their way from a store."""

    BEST_EFFORT = "best_effort"
    """It takes what has arrived when its turn comes."""
    WAIT = "wait"
    """It waits for all of them."""
    TIMEOUT = "timeout"
    """It waits for a time that grows with what is fetched, then takes what has arrived."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPolicy:
    """How long a request may wait for pages from a store.

    Attributes:
        mode: best effort, wait or timeout.
        base_s: patience under TIMEOUT, seconds.
        per_1024_tokens_s: more of it for each 1,024 tokens that are fetched.

    Raises:
        ValueError: a time is negative.

    Source: the prefetch policies of SGLang's HiCache.
    """

    mode: PrefetchMode = PrefetchMode.TIMEOUT
    base_s: float = 1.0
    per_1024_tokens_s: float = 0.25

    def __post_init__(self) -> None:
        for name in ("base_s", "per_1024_tokens_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")

    def patience_s(self, num_tokens: int) -> float:
        """Return how long to wait for `num_tokens` tokens."""
        match self.mode:
            case PrefetchMode.BEST_EFFORT:
                return 0.0
            case PrefetchMode.WAIT:
                return float("inf")
            case PrefetchMode.TIMEOUT:
                return self.base_s + self.per_1024_tokens_s * num_tokens / 1024
