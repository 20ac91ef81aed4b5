"""The sentences of `why`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewood.engine.core.reasons import Reason

_MOST_SIZES = 8
"""Sizes of chunks that a sentence names."""


def tokens(num: int) -> str:
    """Return a number of tokens."""
    return "1 token" if num == 1 else f"{num:,} tokens"


def arrival(values: Mapping[str, Any], num_prompt: int) -> str:
    """Return what arrived; `values` are the fields of a `Submit` that are not as by default."""
    sampling: Mapping[str, Any] = values.get("sampling") or {}
    most = sampling.get("max_tokens", 128)
    wanted = f"at most {most:,} more" if most is not None else "as many more as fit"
    wanted = "a vector" if values.get("pooling") else wanted
    text = f"arrived with a prompt of {tokens(num_prompt)}, and asks for {wanted}"
    if values.get("priority"):
        text += f"; its priority is {values['priority']}"
    if sampling.get("grammar"):
        text += "; its grammar has to be compiled first"
    return text


def waiting(note: Sequence[int], names: Mapping[int, str]) -> str:
    """Return why a request waits."""
    reason, _, other, *numbers = note
    name = _name(other, names)
    match reason:
        case Reason.CLOSED_FOR_MEMORY:
            return f"request {name}, which runs, lacks a page, and then no request is admitted"
        case Reason.CLOSED_FOR_TOKENS:
            return "the prompts in progress took all prompt tokens of the step"
        case Reason.CLOSED_FOR_PLACES:
            return f"{_requests(numbers[0])} running, as many as may"
        case Reason.NO_TOKENS:
            return "the step had no prompt tokens left"
        case Reason.NO_PLACE if not numbers[1]:
            return f"{_requests(numbers[0])} running, as many as may"
        case Reason.NO_PLACE:
            return "the step computed as many prompts as it may"
        case Reason.PLACE_KEPT:
            return f"the free places were left to requests of higher priority, as {name}, that will go on before it"
        case Reason.NO_SLOT:
            return "as many adapters are used as may be, or its own leaves its slot to another"
        case Reason.NO_MEMORY | Reason.PASSED_OVER:
            num_wanted, num_reserved, num_available = numbers
            text = f"{_pages(num_wanted)} were needed and {num_reserved} reserved for other requests"
            text += f", but {num_available} were available"
            return text + (", so requests behind it could go first" if reason == Reason.PASSED_OVER else "")
        case Reason.PARKED:
            return f"it was parked, because request {name} was computing the prompt that it repeats"
        case Reason.HELD_BACK:
            return "its tenant ran as much as it may"
        case Reason.RECALLING:
            return "its prefix was being copied back from host memory or the disk"
        case _:
            return f"of {Reason(reason).name.lower()}"


def stall(reason: Reason, other: str) -> str:
    """Return why a running request got no grant."""
    match reason:
        case Reason.NO_CHUNK:
            return "the step had no prompt tokens left for the rest of its prompt"
        case Reason.NO_PAGE:
            return "it lacked a page, and another request was about to give one up"
        case Reason.MUST_LEAVE:
            return f"it was about to be preempted for request {other}" if other else "it was about to be preempted"
        case Reason.MASKS_OF_OTHERS:
            return "its grammar is slow, and requests with slow grammars take turns"
        case _:
            return "the step was spent on prompts"


def admission(num_cached: int, num_first: int, num_wanted: int, *, is_again: bool, adapter: str) -> str:
    """Return that a request was admitted, with the name of its adapter if it has one."""
    how = (" again" if is_again else "") + (f" with adapter {adapter}" if adapter else "")
    text = f"was admitted{how}: {tokens(num_cached)} of it were cached, and its first step "
    if num_first == num_wanted:
        return text + f"computes the other {num_wanted:,}"
    return text + f"computes {num_first:,} of the other {num_wanted:,}"


def cached(
    cause: str,
    *,
    num_cached: int,
    num_reusable: int,
    num_possible: int,
    first_difference: int,
    page_size: int,
    evicted_by: str | None,
    evicted_ago_s: float | None,
    evicted_for: str,
) -> str:
    """Return why no more of a prompt was cached; the arguments are those of `CachedPrefix`."""
    if cause == "complete":
        return f"the cache had all {tokens(num_reusable)} of its prompt that can be reused"
    if cause == "no_cache":
        return "the cache cannot say why no more of its prompt was cached"
    text = f"the cache had {num_cached:,} of {tokens(num_reusable)}: "
    if cause == "evicted":
        text += f"those from {num_cached:,} to {num_possible:,} had been evicted"
        text += "" if evicted_ago_s is None else f" {evicted_ago_s:.3f} s before"
        text += f" by {evicted_by}" if evicted_by else ""
        return text + (f", to make room for request {evicted_for}" if evicted_for else "")
    if cause == "window_evicted":
        return text + f"those up to {num_possible:,} lacked the windows before their end, which had been evicted"
    if cause == "snapshot_evicted":
        return text + f"the state of recurrent layers behind {num_possible:,} had been evicted"
    if cause == "no_snapshot":
        return text + f"those up to {num_possible:,} were cached without the state of recurrent layers at their end"
    if cause == "page_rounding" and num_possible == num_cached:
        return text + f"the rest is less than a page of {page_size}, and only whole pages can be used"
    if cause == "page_rounding":
        return text + f"the cached text goes on to {num_possible:,}, but only whole pages of {page_size} can be used"
    return text + f"from position {first_difference:,} on, its prompt differs from everything that is remembered"


def chunk(target: int) -> str:
    """Return why a prompt was cut, if `target` is the limit by the target for the duration of steps."""
    return f"the target for steps left {tokens(target)} for prompts" if target else ""


def prompt(sizes: Sequence[int], reason: str) -> str:
    """Return the steps that computed a prompt."""
    if len(sizes) == 1:
        return f"{tokens(sizes[0])} of its prompt were computed in one step"
    named = ", ".join(f"{size:,}" for size in sizes[:_MOST_SIZES]) + (", ..." if len(sizes) > _MOST_SIZES else "")
    text = f"{tokens(sum(sizes))} of its prompt were computed in {len(sizes)} steps, of {named} tokens"
    return f"{text}: {reason}" if reason else f"{text}: a step had no more for it"


def preemption(reason: Reason, other: str, *, is_own: bool) -> str:
    """Return why a request was preempted."""
    if reason is Reason.RETRACTED:
        return "was preempted, because the engine was paused and its memory wanted"
    if reason is Reason.GAVE_WAY:
        return f"was preempted for request {other}, which waited and has a much higher priority"
    if is_own:
        return "was preempted, because it lacked a page, and no other request could give one up"
    return f"was preempted, because request {other} lacked a page"


def end(kind: str, code: str, num_output: int, num_steps: int) -> str:
    """Return how a request ended."""
    match kind:
        case "refused":
            return f"was refused{f': {code}' if code else ''}"
        case "error":
            return f"ended with an error{f': {code}' if code else ''}"
        case "abort":
            how = "was aborted"
        case "length":
            how = "ended, because it was as long as it may be"
        case _:
            how = "ended, because its text was complete"
    return f"{how}, after {tokens(num_output)} of output" + (f" in {num_steps + 1:,} steps" if num_output > 1 else "")


def _name(arrival: int, names: Mapping[int, str]) -> str:
    return names.get(arrival, "of an unknown name")


def _requests(num: int) -> str:
    return "1 request was" if num == 1 else f"{num:,} requests were"


def _pages(num: int) -> str:
    return "1 page" if num == 1 else f"{num:,} pages"
