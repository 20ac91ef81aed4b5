"""When device pages are copied to the host, and how long a request waits for pages from a store."""

from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any

from pagewood.kvpool.arrays import require_whole


class WritePolicy(Enum):
    """When a device page is copied to the host.

    Attributes:
        WRITE_THROUGH: As soon as it is cached. Eviction is free and a crash loses little, but every page is copied.
        WRITE_THROUGH_SELECTIVE: When it has been used often enough. Pages that were used less are lost at eviction.
        WRITE_BACK: When it is evicted. Only evicted pages are copied, but eviction waits for a copy in memory.
    """

    WRITE_THROUGH = "write_through"
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    WRITE_BACK = "write_back"


class PrefetchMode(Enum):
    """What a request does while its pages are being copied from a store.

    Attributes:
        BEST_EFFORT: It uses the pages that have arrived when its turn comes.
        WAIT: It waits for all pages.
        TIMEOUT: It waits for a time that grows with the number of tokens, then uses the pages that have arrived.
    """

    BEST_EFFORT = "best_effort"
    WAIT = "wait"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPolicy:
    """How long a request may wait for pages from a store.

    Source: the prefetch policies of SGLang's HiCache.

    Attributes:
        mode: Best effort, wait or timeout.
        base_s: Base of the time limit under TIMEOUT, in seconds, >= 0.
        per_1024_tokens_s: Additional time for every 1,024 tokens that are fetched, in seconds, >= 0.
        min_tokens: Fewest tokens that are brought back, >= 0; computing fewer is faster than waiting for copies. A
            remote store is queried if it may have that many tokens.
    """

    mode: PrefetchMode = PrefetchMode.TIMEOUT
    base_s: float = 1.0
    per_1024_tokens_s: float = 0.25
    min_tokens: int = 0

    def __post_init__(self) -> None:
        require_whole("min_tokens", self.min_tokens)
        for name in ("base_s", "per_1024_tokens_s", "min_tokens"):
            value: Any = getattr(self, name)
            if not isinstance(value, Real) or not float(value) >= 0:
                raise ValueError(f"{name} must be >= 0, got {value!r}")

    def patience_s(self, num_tokens: int) -> float:
        """Return how long to wait for `num_tokens` tokens, in seconds."""
        match self.mode:
            case PrefetchMode.BEST_EFFORT:
                return 0.0
            case PrefetchMode.WAIT:
                return float("inf")
            case PrefetchMode.TIMEOUT:
                return self.base_s + self.per_1024_tokens_s * num_tokens / 1024
