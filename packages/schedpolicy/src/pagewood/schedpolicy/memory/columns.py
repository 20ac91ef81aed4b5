"""The lengths of many running requests as numpy columns, which is faster than a loop over the requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pagewood.schedpolicy.memory.lengths import MAX_EXPECTED_TOKENS, NUM_PARTS
from pagewood.schedpolicy.memory.look_ahead import LookAhead, moments_until
from pagewood.schedpolicy.requests import Running

_HALF = 0.5
"""Half a token, added before a quotient of whole numbers is rounded, so that no error of floats changes the result."""
_LIMIT_OF_NONE = 1e-4
"""Tokens that stand for a limit of 0, so that every quotient by the limit exceeds all parts."""

Column = NDArray[np.float64]
"""`[n]`, a number for each request."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FixedLengths:
    """Lengths that stay constant while requests run. Invariant: row i of each column is about the i-th request."""

    arrivals: list[int]
    page_size: int
    parts_per_token: Column
    """One token, in hundredths of the limit."""
    prompt_parts: Column
    """The prompt, in hundredths of the limit, less a small part of a token."""
    most_pages: Column
    """Pages of the prompt and the limit together, not rounded."""
    prompt_pages: Column
    num_prompt_pages: float
    """Sum of `prompt_pages`."""
    max_limit: int
    """The largest `max_new_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lengths:
    """The lengths of running requests in one step. Invariant: row i of each column is about the i-th request."""

    kept: FixedLengths
    parts: Column
    """Tokens generated so far, in hundredths of the limit; not rounded."""
    pages: Column
    """Pages of the tokens so far; rounded down, the pages that they need."""
    pages_left: Column
    """Pages of the tokens that may still be generated, not rounded; 0 or less at the limit."""
    num_pages: float
    """Sum of `pages`, each rounded down."""

    def num_at_parts(self) -> list[int]:
        """Return the number of requests at each part of their limit, from 0 to 100."""
        part = np.minimum(self.parts, float(NUM_PARTS)).astype(np.intp)
        return np.bincount(part, minlength=NUM_PARTS + 1).tolist()

    def num_most_pages(self) -> int:
        """Return the additional pages that the requests need together if each uses its whole limit."""
        most = np.minimum(self.pages_left, MAX_EXPECTED_TOKENS / self.kept.page_size)
        np.maximum(most, 0, out=most)
        most += self.pages
        return int(np.add.reduce(np.floor(most, out=most)) - self.num_pages)

    def growth(self, ahead: LookAhead) -> list[float]:
        """Return the sum of what `ahead.add` adds for each of these requests, up to float rounding."""
        kept = self.kept
        before, moment_pages = _moment_columns(ahead.num_most, ahead.number, kept.page_size)
        parts = before * kept.parts_per_token
        parts += self.parts
        chance = self._chance(parts, ahead.survival) if ahead.survival[-1] < 1 else parts < NUM_PARTS
        pages = np.minimum(moment_pages, self.pages_left)
        pages += self.pages
        np.floor(pages, out=pages)
        pages -= kept.prompt_pages  # prompt pages may stay cached after the end
        pages *= chance
        growth = np.add.reduce(pages, axis=1)
        growth -= self.num_pages - kept.num_prompt_pages
        return growth.tolist()

    def _chance(self, parts: Column, survival: Sequence[float]) -> Column:
        """Return `[moments, n]`, the chance that each request still runs at `parts` hundredths of its limit."""
        shares = np.array(survival)
        going_on = shares[1:][np.minimum(self.parts, NUM_PARTS - 1.0).astype(np.intp)]
        shares[NUM_PARTS] = 0.0  # a request that has reached its limit has ended
        chance = shares[np.minimum(parts, float(NUM_PARTS), out=parts).astype(np.intp)]
        chance /= going_on
        return np.minimum(chance, 1.0, out=chance)  # before the next part


class LengthReader:
    """Reads the lengths of running requests; reads constant values again only when other requests run.

    It recognises requests by their `arrival`, which is unique.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        """Start without requests."""
        self._kept: FixedLengths | None = None  # written by: read

    def read(self, running: Sequence[Running], *, page_size: int) -> Lengths:
        """Return the lengths of these requests, at least one."""
        num_tokens = np.fromiter([request.num_tokens for request in running], np.int64, len(running))
        arrivals = [request.arrival for request in running]
        kept = self._kept
        if kept is None or kept.arrivals != arrivals or kept.page_size != page_size:
            kept = self._kept = _read_kept(running, arrivals, num_tokens, page_size)
        parts = num_tokens * kept.parts_per_token
        parts -= kept.prompt_parts
        pages: Column = np.multiply(num_tokens, 1 / page_size)
        pages_left = kept.most_pages - pages
        pages += _rest_of_page(page_size)
        num_pages = float(np.add.reduce(np.floor(pages)))
        return Lengths(kept=kept, parts=parts, pages=pages, pages_left=pages_left, num_pages=num_pages)


def _read_kept(
    running: Sequence[Running], arrivals: list[int], num_tokens: NDArray[np.int64], page_size: int
) -> FixedLengths:
    num_prompt = num_tokens - np.fromiter([request.num_generated for request in running], np.int64, len(running))
    limits = [request.max_new_tokens for request in running]
    limit = np.fromiter(limits, np.float64, len(running))
    parts_per_token = NUM_PARTS / np.maximum(limit, _LIMIT_OF_NONE)
    prompt_pages = np.floor(num_prompt * (1 / page_size) + _rest_of_page(page_size))
    return FixedLengths(
        arrivals=arrivals,
        page_size=page_size,
        parts_per_token=parts_per_token,
        prompt_parts=(num_prompt - _HALF / NUM_PARTS) * parts_per_token,
        most_pages=(num_prompt + limit) * (1 / page_size),
        prompt_pages=prompt_pages,
        num_prompt_pages=float(np.add.reduce(prompt_pages)),
        max_limit=max(limits),
    )


def _rest_of_page(page_size: int) -> float:
    """Return the part of a page to add before rounding down, so that pages of tokens are rounded up."""
    return (page_size - _HALF) / page_size


@lru_cache(maxsize=64)
def _moment_columns(
    num_most: int, number: int | None, page_size: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return two `[moments, 1]` columns: steps to the previous moment, and steps to the moment itself as pages."""
    moments = np.array(moments_until(num_most, number), np.float64)
    return moments[:, 1:2], moments[:, 2:3] * (1 / page_size)
