"""How far requests are in their output."""

from collections.abc import Iterable

from pagewood.schedpolicy.requests import Request

NUM_PARTS = 100
"""Progress of a request is counted in hundredths of its limit."""
MAX_EXPECTED_TOKENS = 4096
"""Limit on the tokens that one request is expected to generate from now on: few requests generate more."""


def part_of(request: Request) -> int:
    """Return the part of its limit that a request has generated, in hundredths, rounded down."""
    if request.num_generated >= request.max_new_tokens:
        return NUM_PARTS
    return request.num_generated * NUM_PARTS // request.max_new_tokens


def num_at_parts(requests: Iterable[Request]) -> list[int]:
    """Return the number of requests at each part of their limit, from 0 to 100."""
    found = [0] * (NUM_PARTS + 1)
    for request in requests:
        found[part_of(request)] += 1
    return found
