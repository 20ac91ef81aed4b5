"""What a launched step changes in its requests, and what its result must have for them."""

from __future__ import annotations

from collections.abc import Sequence

from pagewood.engine.core.request import Request
from pagewood.engine.core.steps.grant import Grant


def count_launched(grants: Sequence[Grant], *, is_decode: bool) -> None:
    """Count a launched step in its requests; `is_decode`: every grant computes one position and promises one token."""
    if is_decode:
        for grant in grants:
            request = grant.request
            request.num_launched = grant.start + 1
            request.num_in_flight += 1
            request.num_unseen += 1
    else:
        for grant in grants:
            request = grant.request
            request.num_launched = grant.start + grant.num_tokens
            request.num_in_flight += 1
            request.num_unseen += grant.num_promised


def num_top_of(request: Request) -> int:
    """Return how many alternatives are reported with each output token; -1: it needs no report."""
    return -1 if request.sampling.logprobs is None else request.sampling.logprobs
