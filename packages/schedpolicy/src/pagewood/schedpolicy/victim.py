"""Who yields: whom to preempt when memory runs out, and when a waiting request is worth preempting others."""

from collections.abc import Sequence
from typing import TypeVar

from pagewood.schedpolicy.requests import Running, Waiting

R = TypeVar("R", bound=Running)


def choose_victim(running: Sequence[R]) -> R | None:
    """Return the request to preempt when memory has run out: of the lowest priority the newest; None if none runs.

    The oldest of the highest priority is thus never chosen before all others, so somebody always comes to an end.
    """
    return min(running, key=_yields_first, default=None)


def worth_preempting(candidate: Waiting, running: Sequence[R], threshold: int, *, num_missing: int = 1) -> list[R]:
    """Return the requests to preempt so that `candidate` can run, or none if preempting is not worth it.

    Only requests of a priority more than `threshold` below the candidate's are taken, and only if together they give
    enough. Of these the highest priorities are spared first, and among them the oldest; nobody is taken who could be
    spared. A request is counted with all its tokens; what it shares with others is not freed with it, so fewer may
    become free.

    Returns:
        The first to yield first.

    Args:
        candidate: The request that does not fit.
        running: Requests that can be preempted.
        threshold: >= 0.
        num_missing: Tokens of memory that the candidate lacks, >= 1; 1 where it lacks but a place.

    Raises:
        ValueError: `threshold` or `num_missing` is out of range.
    """
    if threshold < 0:
        raise ValueError(f"threshold must be >= 0, got {threshold}")
    if num_missing < 1:
        raise ValueError(f"num_missing must be >= 1, got {num_missing}")
    eligible = [request for request in running if candidate.priority - request.priority > threshold]
    num_spare = sum(request.num_tokens for request in eligible) - num_missing
    if num_spare < 0:
        return []
    victims: list[R] = []
    for request in sorted(eligible, key=_yields_first, reverse=True):
        if request.num_tokens <= num_spare:
            num_spare -= request.num_tokens
        else:
            victims.append(request)
    victims.reverse()
    return victims


def _yields_first(request: Running) -> tuple[int, int]:
    return request.priority, -request.arrival
