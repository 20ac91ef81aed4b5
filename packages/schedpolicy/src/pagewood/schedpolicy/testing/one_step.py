"""A report of one step, for tests of draft lengths."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class OneStep:
    """A `StepsReport` of one step, made from the drafts of each request."""

    requests: Sequence[Any]
    """Requests with drafts; the next three have the same entries."""
    granted: Sequence[int]
    drafted: Sequence[int]
    accepted: Sequence[int]
    num_requests: int
    num_decoding: int
    num_tokens: int
    num_draft_tokens: int
    draft_s: float = 0.0
    taken_s: float = 0.0
    num_steps: int = 1

    @classmethod
    def of(
        cls,
        requests: Sequence[Any],
        granted: Sequence[int],
        drafted: Sequence[int],
        accepted: Sequence[int],
        *,
        num_tokens: int,
        num_prompts: int = 0,
        draft_s: float = 0.0,
        taken_s: float = 0.0,
    ) -> "OneStep":
        """Return the report of a step that decodes these requests and computes `num_prompts` prompts.

        Requests with a grant of 0 decode without drafts.
        """
        some = [index for index, length in enumerate(granted) if length]
        return cls(
            requests=[requests[index] for index in some],
            granted=[granted[index] for index in some],
            drafted=[drafted[index] for index in some],
            accepted=[accepted[index] for index in some],
            num_requests=len(requests) + num_prompts,
            num_decoding=len(requests),
            num_tokens=num_tokens,
            num_draft_tokens=sum(drafted),
            draft_s=draft_s,
            taken_s=taken_s,
        )
