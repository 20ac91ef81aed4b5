"""The load of one replica: what it has reported, and what the router has sent and seen ending since."""

from collections import deque
from dataclasses import dataclass
from math import inf

from pagewood.schedpolicy.counts import require_count, require_real

_MAX_CHANGES = 1024
"""Changes that are remembered for the next report; a report is taken to contain older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a replica says about itself.

    Attributes:
        at_s: Time, on the router's clock, by which everything that the report contains had been sent: the time when the
            report was asked for, or earlier. What was sent later is added to it.
        num_requests: Requests there that have not ended, of all routers.
        num_prompt_tokens: Tokens of their prompts that are not computed yet.
        slowness: Time of its steps, as a multiple of that of a healthy replica, > 0 and finite.
        is_full: Whether it has no place whatever the counts say, for example because requests wait for memory there.
    """

    at_s: float
    num_requests: int
    num_prompt_tokens: int = 0
    slowness: float = 1.0
    is_full: bool = False

    def __post_init__(self) -> None:
        require_real("at_s", self.at_s)
        if not -inf < self.at_s < inf:
            raise ValueError(f"at_s must be finite, got {self.at_s}")
        require_count("num_requests", self.num_requests, least=0)
        require_count("num_prompt_tokens", self.num_prompt_tokens, least=0)
        require_real("slowness", self.slowness)
        if not 0 < self.slowness < inf:
            raise ValueError(f"slowness must be > 0 and finite, got {self.slowness}")


class ReplicaLoad:
    """Requests and prompt tokens of one replica.

    It is the sum of its own part, which the router sent and which is known exactly, and of a foreign part: what the
    last report had besides the own part at that time. So requests sent after an old report count at once, requests that
    ended count no longer, and a router that is alone needs no reports.

    Invariant: no number is negative.
    """

    __slots__ = (
        "_changes", "_reported_s", "num_foreign_requests", "num_foreign_tokens", "num_own_requests", "num_own_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        """Start without requests."""
        self.num_own_requests = 0  # written by: change
        self.num_own_tokens = 0  # written by: change
        self.num_foreign_requests = 0  # written by: report
        self.num_foreign_tokens = 0  # written by: report
        self._reported_s = -inf  # written by: report
        # Time, and change of requests and tokens, oldest first; written by: change, report.
        self._changes: deque[tuple[float, int, int]] = deque(maxlen=_MAX_CHANGES)

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return self.num_own_requests + self.num_foreign_requests

    @property
    def num_tokens(self) -> int:
        """Prompt tokens that are not computed yet."""
        return self.num_own_tokens + self.num_foreign_tokens

    def change(self, now_s: float, num_requests: int, num_tokens: int) -> None:
        """Add to the own part, or take from it."""
        self.num_own_requests += num_requests
        self.num_own_tokens += num_tokens
        self._changes.append((now_s, num_requests, num_tokens))

    def report(self, report: Report) -> bool:
        """Take over a report; return False, and change nothing, if it is older than the last."""
        if report.at_s < self._reported_s:
            return False
        self._reported_s = report.at_s
        changes = self._changes
        while changes and changes[0][0] <= report.at_s:
            changes.popleft()
        num_requests = self.num_own_requests - sum(change for _, change, _ in changes)
        num_tokens = self.num_own_tokens - sum(change for _, _, change in changes)
        self.num_foreign_requests = max(0, report.num_requests - num_requests)
        self.num_foreign_tokens = max(0, report.num_prompt_tokens - num_tokens)
        return True
