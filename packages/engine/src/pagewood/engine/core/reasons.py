"""Why a plan gives a request less than it could use; the parts of the core report it where they decide it."""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

from pagewood.engine.core.request import Request


class Reason(IntEnum):
    """What was decided about a request. The numbers of a note are given in brackets; `other` is another request.

    Values are written to files, so they must not be changed.
    """

    CLOSED_FOR_MEMORY = 1
    """No request was admitted, because the running request `other` lacks pages."""
    CLOSED_FOR_TOKENS = 2
    """No request was admitted, because the prompts in progress took all prompt tokens of the step."""
    CLOSED_FOR_PLACES = 3
    """No request was admitted, because as many run as may [requests that run]."""
    NO_TOKENS = 4
    """The step had no prompt tokens left for it; those behind it were not examined."""
    NO_PLACE = 5
    """As many requests run as may, or the step has as many prompts as it may [requests that run, free rows]; those
    behind it were not examined."""
    NO_MEMORY = 6
    """It did not fit [pages that it needs, pages reserved for running requests and for claims of higher priority, pages
    available]; those behind it were not examined."""
    PASSED_OVER = 7
    """It did not fit [the same numbers]; those behind it could go first."""
    PARKED = 8
    """It repeats the prompt that `other` computes, and waits for it [tokens cached by now]."""
    RECALLING = 9
    """Its prefix is being copied back from a lower tier."""
    ADMITTED = 10
    """It got a row [tokens cached, tokens of its first step, tokens that it could use]."""
    CHUNKED = 11
    """It got a part of what is left of its prompt [tokens granted, tokens left, prompt tokens that the step had for all
    prompts in progress, or for those that were left]."""
    NO_CHUNK = 12
    """The step had no prompt tokens left for its prompt in progress [tokens left]."""
    NO_PAGE = 13
    """It got no grant, because it lacks a page and the request that gives one up leaves in the next step only."""
    PREEMPTED = 14
    """It lost its pages to `other`, which lacked one; itself, if no other could be preempted."""
    MUST_LEAVE = 15
    """It gets no grant, because it will be preempted for `other` when its step in flight has ended."""
    GAVE_WAY = 16
    """It was preempted for `other`, a waiting request of much higher priority."""
    RETRACTED = 17
    """It was preempted because the engine is paused and its memory is wanted."""
    NO_DECODE = 18
    """It got no token, because the step was spent on prompts."""
    EVICTED = 19
    """Cached pages were evicted to make room for it [pages]."""
    COMPILED = 20
    """Its grammar has been compiled, and it was queued."""
    UNPARKED = 22
    """It need not wait for another prompt or its tenant any longer, and is in its old place of the queue."""
    HELD_BACK = 23
    """Its tenant runs as much as it may; it waits apart until another request of the tenant stops."""
    MASKS_OF_OTHERS = 24
    """It got no token, because its grammar is slow, and those of others had the step [milliseconds of a token]."""
    PLACE_KEPT = 25
    """The free places are left to `other` and more requests of higher priority, which wait for a prompt or for copies
    and have a claim to a place and pages [free rows, these requests]."""
    NO_SLOT = 26
    """All slots are held by other adapters, or its own leaves its slot to another; those behind it could go first."""
    LIMITED_BY_TARGET = 21
    """The step's prompts were limited by the target for its duration [prompt tokens]; it concerns no single request."""


class Notes(Protocol):
    """Gets what was decided, in the engine's thread."""

    def note(self, reason: Reason, request: Request | None, other: Request | None = None, *numbers: int) -> None:
        """Take a note; must be quick, and must not raise.

        Args:
            reason: what was decided.
            request: about which request; None: about all that wait.
            other: the request that `reason` speaks of, if it does.
            numbers: those that `reason` names.
        """
        ...
