"""One timed run: what each request was answered, and when each token came."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Protocol

from end_to_end.cases import Case, Prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The answers to a case's prompts, in order. Invariant: as many times as tokens, in each request."""

    submitted_s: float
    tokens: tuple[tuple[int, ...], ...]
    times_s: tuple[tuple[float, ...], ...]

    @property
    def seconds(self) -> float:
        """From the submission of all requests to the last token."""
        return max(times[-1] for times in self.times_s) - self.submitted_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over all the time."""
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def first_token_s(self) -> float:
        """Median over the requests of the wait for the first token."""
        return median(times[0] for times in self.times_s) - self.submitted_s

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second once every request has its first token: no prompt is being computed any more."""
        start = max(times[0] for times in self.times_s)
        after = [time for times in self.times_s for time in times if time > start]
        return len(after) / (max(after) - start) if after else 0.0


class System(Protocol):
    """Something that serves a batch of prompts, greedily, and never stops early."""

    @property
    def name(self) -> str:
        """For people."""
        ...

    def run(self, case: Case, prompts: Prompts) -> Run:
        """Answer all prompts. Raises whatever goes wrong."""
        ...

    def close(self) -> None:
        """Give back memory and threads."""
        ...
