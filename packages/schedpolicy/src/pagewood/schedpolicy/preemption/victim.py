"""Which requests to preempt when memory runs out, and when a waiting request is worth preempting others."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from pagewood.schedpolicy.counts import require_count
from pagewood.schedpolicy.pages import round_up
from pagewood.schedpolicy.requests import Running, Waiting

R = TypeVar("R", bound=Running)
VictimRank = Callable[[R], tuple[float, ...]]
"""Rank of a running request: the smallest is preempted first."""

PREEMPTION_THRESHOLD = 10
"""A running request is preempted for a waiting one only if its priority is lower by more than this (SGLang's)."""
HEADROOM_STEPS = 20
"""Steps that the remaining requests should be able to make before memory runs out again, as in SGLang."""


def deserving(request: Running) -> tuple[int, int]:
    """Return the rank of a running request, most deserving first: highest priority, then earliest arrival.

    Use it as a sort key where running requests compete: the request that keeps its pages longest has its prompt
    continued first.
    """
    return -request.priority, request.arrival


def by_lowest_priority(request: Running) -> tuple[float, ...]:
    """Preempt the least `deserving` request first: lowest priority, then latest arrival.

    The most deserving request is preempted only after all others, so at least one request always makes progress.
    """
    rank, arrival = deserving(request)
    return -rank, -arrival


def by_least_output(request: Running) -> tuple[float, ...]:
    """Preempt the request with the least output first, then the one with the longest prompt, as SGLang does."""
    return request.num_generated, request.num_generated - request.num_tokens, -request.arrival


def choose_victim(running: Sequence[R], *, rank: VictimRank[R] = by_lowest_priority) -> R | None:
    """Return the request to preempt when memory has run out, or None if nothing is running."""
    return min(running, key=rank, default=None)


def choose_victims(
    running: Sequence[R],
    *,
    num_available: int,
    page_size: int,
    num_steps: int = HEADROOM_STEPS,
    rank: VictimRank[R] = by_lowest_priority,
    freed_by: Callable[[R], int] | None = None,
) -> list[R]:
    """Return the requests to preempt so that the others can generate `num_steps` tokens each, or all they may generate.

    One request always remains; if even that one does not fit, it is the only one that remains.

    Args:
        running: All running requests.
        num_available: Tokens of KV memory that are free or can be evicted now.
        page_size: Tokens of a page, >= 1.
        num_steps: Tokens that each remaining request must have room for, >= 1.
        rank: Requests with the smallest rank are preempted first.
        freed_by: Returns the tokens that become available when a request is preempted; by default those of its pages.
            If requests share pages, return what each one holds alone, or too few may be preempted.

    Returns:
        The requests to preempt, in this order.

    Raises:
        ValueError: `page_size` or `num_steps` is out of range or not an integer.
    """
    require_count("page_size", page_size, least=1)
    require_count("num_steps", num_steps, least=1)

    def held(request: R) -> int:
        return round_up(request.num_tokens, page_size)

    def wanted(request: R) -> int:
        num_new = max(0, min(num_steps, request.max_new_tokens - request.num_generated))
        return round_up(request.num_tokens + num_new, page_size) - held(request)

    num_missing = sum(map(wanted, running)) - num_available
    victims: list[R] = []
    for request in sorted(running, key=rank)[:-1]:
        if num_missing <= 0:
            break
        num_missing -= wanted(request) + (held if freed_by is None else freed_by)(request)
        victims.append(request)
    return victims


def worth_preempting(
    candidate: Waiting, running: Sequence[R], threshold: int = PREEMPTION_THRESHOLD, *, num_missing: int = 1
) -> list[R]:
    """Return the requests to preempt so that `candidate` can run, or an empty list if preempting is not worth it.

    Only requests whose priority is more than `threshold` below the candidate's are preempted, and only if together they
    free enough. The highest priorities are spared first, and among equals the oldest. No request is preempted if the
    others free enough. A request is counted with all its tokens; tokens that it shares with others are not freed, so
    less may become free.

    Args:
        candidate: The request that does not fit.
        running: Requests that can be preempted.
        threshold: Least difference of priority, exclusive, >= 0.
        num_missing: Tokens of memory that the candidate lacks, >= 1; 1 if it lacks only a place.

    Returns:
        The requests to preempt, in this order.

    Raises:
        ValueError: `threshold` or `num_missing` is out of range or not an integer.
    """
    require_count("threshold", threshold, least=0)
    require_count("num_missing", num_missing, least=1)
    eligible = [request for request in running if candidate.priority - request.priority > threshold]
    num_spare = sum(request.num_tokens for request in eligible) - num_missing
    if num_spare < 0:
        return []
    victims: list[R] = []
    for request in sorted(eligible, key=by_lowest_priority, reverse=True):
        if request.num_tokens <= num_spare:
            num_spare -= request.num_tokens
        else:
            victims.append(request)
    victims.reverse()
    return victims
