"""The cases for every system: numbers of requests, their lengths, and shared prefixes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

Prompts = tuple[tuple[int, ...], ...]
"""Token ids of each request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Requests that arrive together; each prompt is the shared prefix followed by tokens of its own."""

    name: str
    num_requests: int
    num_shared: int
    num_own: int
    num_output: int

    @property
    def num_prompt(self) -> int:
        """Tokens of one prompt."""
        return self.num_shared + self.num_own

    @property
    def length(self) -> int:
        """Tokens of one request at its end, prompt and output."""
        return self.num_prompt + self.num_output


FULL = tuple(
    Case(name=f"concurrency {n}", num_requests=n, num_shared=0, num_own=128, num_output=64) for n in (1, 8, 32)
) + tuple(Case(name=f"shared 1024 x {n}", num_requests=n, num_shared=1024, num_own=32, num_output=64) for n in (8, 32))

QUICK = (
    Case(name="concurrency 1", num_requests=1, num_shared=0, num_own=16, num_output=8),
    Case(name="concurrency 4", num_requests=4, num_shared=0, num_own=16, num_output=8),
    Case(name="shared 64 x 4", num_requests=4, num_shared=64, num_own=8, num_output=8),
)


def choose_cases(names: Sequence[str], *, quick: bool) -> tuple[Case, ...]:
    """Return the named cases, or all cases if no name is given.

    Raises:
        ValueError: no case has this name.
    """
    known = {case.name: case for case in (QUICK if quick else FULL)}
    for name in names:
        if name not in known:
            raise ValueError(f"a case must be one of {list(known)}, got {name!r}")
    return tuple(known[name] for name in names or known)


def draw_prompts(case: Case, *, vocab_size: int, seed: int) -> Prompts:
    """Return random prompts; prompts of different seeds share no prefix, so no run profits from an earlier one."""
    rng = random.Random(f"{case.name}/{seed}")

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(vocab_size) for _ in range(count))

    shared = draw(case.num_shared)
    return tuple(shared + draw(case.num_own) for _ in range(case.num_requests))
