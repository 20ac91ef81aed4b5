"""One timed run: the answer to each request, and the time of each token."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol

from end_to_end.cases import Case, Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The answers to a case's prompts, in order. Invariant: each request has as many times as tokens."""

    submitted_s: float
    tokens: tuple[tuple[int, ...], ...]
    times_s: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """Seconds from the submission of all requests to the last token."""
        return max(times[-1] for times in self.times_s) - self.submitted_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the whole time."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def first_token_s(self) -> float:
        """Median over the requests of the seconds to the first token."""
        return median(times[0] for times in self.times_s) - self.submitted_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after every request has its first token, when no prompt is being computed."""
        start = max(times[0] for times in self.times_s)
        after = [time for times in self.times_s for time in times if time > start]
        return len(after) / (max(after) - start) if after else 0.0


class System(Protocol):
    """A system that answers a batch of prompts greedily and never stops early."""

    @property
    def name(self) -> str:
        """Name in the report."""
        ...

    def run(self, case: Case, prompts: Prompts) -> Run:
        """Answer all prompts; any error is raised."""
        ...

    def close(self) -> None:
        """Release memory and threads."""
        ...
