"""Why a prefix ended where it did."""

from dataclasses import dataclass
from enum import Enum

from pagewood.radixcache.arrays import Int32, as_key
from pagewood.radixcache.history import Ghost, History
from pagewood.radixcache.match import Match
from pagewood.radixcache.tree import Tree


class Cause(Enum):
    """What kept a prefix from being longer."""

    COMPLETE = "all of it is cached"
    PAGE_ROUNDING = "it goes on within a page, and only whole pages are cached"
    EVICTED = "it was cached once"
    OTHER_NAMESPACE = "another namespace has more of it"
    NEVER_SEEN = "nothing like it is cached or remembered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the cached prefix of a sequence ended where it did.

    Attributes:
        cause: the first of these that is true: all is cached; it was given up; another namespace has more; it agrees
            with something cached, or ends, within the next page; never seen.
        num_tokens: length of the cached prefix, whole pages.
        first_difference: position of the first token that differs from all that is cached in the namespace behind the
            prefix; the number of tokens if none does.
        could_be: length of the prefix if it were not for the cause: had nothing been given up, were it in the other
            namespace, or with pages of one token.
        namespace: that which has more of it, if that is the cause.
        evicted_by: the policy that gave it up, `"clear"`, or `"release"`; None if that is not the cause.
        evicted_at_s: when, in seconds of the cache's clock; None if that is not the cause.
    """

    cause: Cause
    num_tokens: int
    first_difference: int
    could_be: int
    namespace: str | None = None
    evicted_by: str | None = None
    evicted_at_s: float | None = None


def explain(tree: Tree, history: History | None, tokens: Int32, match: Match) -> Explanation:
    """Say why `match`, that of `tokens`, is no longer."""
    num_tokens, num_whole = match.num_tokens, len(tokens) // tree.page_size * tree.page_size
    partial = match.partial
    first_difference = num_tokens + (partial.num_tokens if partial else 0)
    if num_tokens == len(tokens):
        return Explanation(
            cause=Cause.COMPLETE, num_tokens=num_tokens, first_difference=num_tokens, could_be=num_tokens
        )
    ghost, num_gone = _ghost(tree, history, tokens, match)
    if ghost is not None:
        return Explanation(
            cause=Cause.EVICTED,
            num_tokens=num_tokens,
            first_difference=first_difference,
            could_be=num_tokens + num_gone * tree.page_size,
            evicted_by=ghost.cause,
            evicted_at_s=ghost.evicted_at_s,
        )
    elsewhere, namespace = _elsewhere(tree, tokens, match)
    if elsewhere > num_tokens:
        return Explanation(
            cause=Cause.OTHER_NAMESPACE,
            num_tokens=num_tokens,
            first_difference=first_difference,
            could_be=elsewhere,
            namespace=namespace,
        )
    is_rounded = partial is not None or num_tokens == num_whole
    return Explanation(
        cause=Cause.PAGE_ROUNDING if is_rounded else Cause.NEVER_SEEN,
        num_tokens=num_tokens,
        first_difference=first_difference,
        could_be=first_difference,
    )


def _ghost(tree: Tree, history: History | None, tokens: Int32, match: Match) -> tuple[Ghost | None, int]:
    """Return the run that was cached behind the prefix once, and how many pages of the tokens were in all."""
    if history is None:
        return None, 0
    num_whole = len(tokens) // tree.page_size * tree.page_size
    place = int(match.pages[-1]) if match.num_tokens else match.node.namespace
    return history.find(place, tokens[match.num_tokens : num_whole].tobytes())


def _elsewhere(tree: Tree, tokens: Int32, match: Match) -> tuple[int, str | None]:
    """Return the longest prefix in any other namespace, and which that is."""
    key = as_key(tokens, len(tokens) // tree.page_size * tree.page_size)
    lengths = [
        (tree.descend(space.root, key)[1] * tree.page_size, name)
        for name, space in tree.spaces.items()
        if name != match.node.namespace
    ]
    return max(lengths, key=lambda found: found[0], default=(0, None))
