"""Random numbers of draft tokens, like those of any control of drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.speculation import StepsReport


class RandomDrafting:
    """Gives requests random numbers of draft tokens; satisfies `core.steps.speculation.Drafting`.

    Now and then it rests for some steps, and drafters may stop to follow for any part of these.
    """

    reason = "random"

    def __init__(self, *, max_tokens: int, seed: int, is_exact: bool = False) -> None:
        self.max_tokens = max_tokens
        self._is_exact = is_exact
        """Whether every draft of a request without a grammar must be accepted."""
        self.is_far = False
        """Whether drafters need not follow."""  # written by: rests, lengths
        self._rng = random.Random(seed)
        self._num_rests = 0  # written by: rests

    def rests(self, num_requests: int) -> bool:
        """Return True for some steps in succession, and False for others."""
        if not self._num_rests:
            self._num_rests = self._rng.choice((0, 0, 0, 0, 0, 0, 3, 12))
            self.is_far = False
            return False
        self._num_rests -= 1
        self.is_far = self._rng.random() < 0.8
        return True

    def lengths(self, requests: Sequence[Request], num_other_tokens: int) -> Sequence[int]:
        """Return random numbers; often 0, often the largest."""
        largest = self._rng.choice((0, self.max_tokens, self.max_tokens, self.max_tokens))
        return [self._rng.choice((self._rng.randint(0, largest), largest)) for _ in requests]

    def observe(self, report: StepsReport) -> None:
        """Check that the numbers are possible."""
        for some in zip(report.accepted, report.drafted, report.granted, strict=True):
            assert list(some) == sorted(some), f"(accepted, drafted, granted) are {some}"
        if self._is_exact:
            for request, num_drafted, num_accepted in zip(
                report.requests, report.drafted, report.accepted, strict=True
            ):
                assert request.matcher is not None or num_accepted == num_drafted, (
                    f"{num_accepted} of {num_drafted} drafts were accepted, which are all right"
                )
        assert len(report.requests) <= report.num_decoding <= report.num_tokens - report.num_draft_tokens

    def forget(self, request: Request) -> None:
        """Check that the request has ended."""
        assert request.finish is not None
