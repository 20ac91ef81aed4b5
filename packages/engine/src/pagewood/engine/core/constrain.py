"""Requests whose output must match a grammar: when their grammars are compiled, and the masks of their draws.

A step's forward pass is launched before the host knows the last tokens. Only the draws of requests with a grammar wait:
when the step before has been retired, their matchers know the text, and `constrain` gives the runner their masks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.core.arrays import Int32
from pagewood.engine.grammar.matcher import Matcher


class Compiling(Protocol):
    """A grammar that is being compiled in another thread."""

    def done(self) -> bool:
        """Return whether there is a result."""
        ...

    def result(self) -> Matcher | Refusal:
        """Return a matcher at the start of the grammar, or why there is none; only when it is done."""
        ...


class Compiler(Protocol):
    """Compiles grammars in threads of its own."""

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int]) -> Compiling:
        """Begin to compile a grammar.

        Args:
            grammar: of a request.
            end_tokens: tokens that end the request.
        """
        ...

    def close(self) -> None:
        """End the threads; what is being compiled is dropped."""
        ...


class Constrained(Protocol):
    """The attributes of a request that `fill_masks` reads."""

    @property
    def matcher(self) -> Matcher | None:
        """Its state in its grammar."""
        ...

    @property
    def foreseen(self) -> int | None:
        """The token that the latest launched step will draw, if it is known already."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether its last answer has been made."""
        ...


def fill_masks(requests: Iterable[Constrained], masks: Int32) -> None:
    """Write the tokens that may be drawn next; all, for a request that has ended or whose matcher fails.

    A matcher that has failed does not go on either, so its request ends when the step is retired.

    Args:
        requests: whose draws wait.
        masks: `[requests, words of a mask]`, written.
    """
    for request, mask in zip(requests, masks, strict=True):
        matcher = request.matcher
        if matcher is None or request.has_ended:
            mask.fill(-1)
            continue
        foreseen = request.foreseen
        if foreseen is not None:  # the matcher is ahead of this draw
            mask.fill(0)
            mask.view(np.uint32)[foreseen // 32] = 1 << foreseen % 32
            continue
        matcher.fill(mask)
        if matcher.error is not None:
            mask.fill(-1)


def open_masks(num: int, vocab_size: int) -> Int32:
    """Return `num` masks that allow every token."""
    return np.full((num, (vocab_size + 31) // 32), -1, np.int32)
