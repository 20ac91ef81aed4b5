"""Requests whose output must match a grammar: when their grammars are compiled, and the masks of their draws.

A step's forward pass is launched before the host knows the last tokens. Only the draws of requests with a grammar wait:
when the step before has been retired, their matchers know the text, and `constrain` gives the runner their masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.core.masks.shared_work import SharedWork
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.grammar.matcher import Matcher


class Compiling(Protocol):
    """A grammar that is being compiled in another thread."""

    def prefer(self, priority: int) -> None:
        """Note that its request has a new priority."""
        ...

    def done(self) -> bool:
        """Return whether there is a result."""
        ...

    def result(self) -> Matcher | Refusal:
        """Return a matcher at the start of the grammar, or why compilation failed; call it only when done."""
        ...


class Compiler(Protocol):
    """Compiles grammars in threads of its own."""

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int], priority: int = 0) -> Compiling:
        """Begin to compile a grammar.

        Args:
            grammar: of a request.
            end_tokens: tokens that end the request.
            priority: of the request; grammars of higher priority are compiled first.
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


def fill_masks(
    requests: Sequence[Constrained], drafts: Sequence[Sequence[int]], masks: Int32, *, work: SharedWork
) -> None:
    """Write which tokens may be drawn next, and which after each allowed draft.

    A mask allows every token where it does not matter: for a request that has ended, for one whose matcher has failed,
    and after a draft that is not allowed. A request whose matcher has failed ends when the step is retired.

    Args:
        requests: their draws wait.
        drafts: of each request.
        masks: `[>= requests + drafts, words of a mask]`, allowing every token; written: one mask for each request,
            followed by one for each of its drafts.
        work: shares the requests with other threads if they take long.
    """

    def fill(request: Constrained, own: Sequence[int], rows: Int32) -> None:
        matcher, foreseen = request.matcher, request.foreseen
        if matcher is None or request.has_ended:
            return
        if foreseen is not None:  # the matcher is ahead of this draw
            rows[0] = 0
            rows[0].view(np.uint32)[foreseen // 32] = 1 << foreseen % 32
        elif own:
            matcher.fill_ahead(own, rows)
        else:
            matcher.fill(rows[0])
        if matcher.error is not None:
            rows.fill(-1)

    jobs: list[Callable[[], None]] = []
    first = 0
    for request, own in zip(requests, drafts, strict=True):
        rows = masks[first : first + 1 + len(own)]
        first += len(rows)
        jobs.append(partial(fill, request, own, rows))
    work.run(jobs)


def open_masks(num: int, vocab_size: int) -> Int32:
    """Return `num` masks that allow every token."""
    return np.full((num, (vocab_size + 31) // 32), -1, np.int32)
