"""Explains why a cached prefix is not longer."""

from dataclasses import dataclass
from enum import Enum

from pagewood.radixcache.arrays import Int32, as_key
from pagewood.radixcache.history import Ghost, History
from pagewood.radixcache.match import Match
from pagewood.radixcache.namespaces import Namespace
from pagewood.radixcache.snapshots import Snapshots
from pagewood.radixcache.tree import Tree


class Cause(Enum):
    """The reason why a cached prefix is not longer."""

    COMPLETE = "all of it is cached"
    SNAPSHOT_EVICTED = "more of it is cached, but the snapshot there has been evicted"
    NO_SNAPSHOT = "more of it is cached, but no snapshot of it was attached"
    PAGE_ROUNDING = "it continues within a page, and only whole pages are cached"
    EVICTED = "more of it was cached before and has been evicted"
    OTHER_NAMESPACE = "more of it is cached in another namespace"
    NEVER_SEEN = "no longer prefix of it is cached in any namespace, or remembered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why the cached prefix of a sequence is not longer.

    Attributes:
        cause: the first of these that applies: if a snapshot is needed and more pages are cached, `SNAPSHOT_EVICTED` or
            `NO_SNAPSHOT`; `COMPLETE`, `EVICTED`, `OTHER_NAMESPACE`, `PAGE_ROUNDING` (the next page agrees in part with
            a cached page, or the sequence ends within it), `NEVER_SEEN`.
        num_tokens: length of the cached prefix, whole pages; with a snapshot, if one is needed.
        first_difference: position of the first token after the cached pages that differs from everything cached there
            in the namespace; the number of tokens if none differs.
        num_possible_tokens: length of the prefix without the cause: had nothing been evicted, had a snapshot been
            attached at the end of the cached pages, in the other namespace, or with a page size of 1.
        namespace: the namespace that has more of the sequence; None for other causes.
        evicted_by: what evicted it: the name of the policy, `"clear"` or `"release"`, or `"evict_snapshots"`; None for
            other causes.
        evicted_at_s: time of the eviction, in seconds of the cache's clock; None for other causes.
    """

    cause: Cause
    num_tokens: int
    first_difference: int
    num_possible_tokens: int
    namespace: Namespace = None
    evicted_by: str | None = None
    evicted_at_s: float | None = None


def explain(
    tree: Tree, history: History | None, tokens: Int32, match: Match, *, searches_others: bool = True
) -> Explanation:
    """Return why `match`, the match of `tokens`, is not longer; `OTHER_NAMESPACE` only if it `searches_others`."""
    num_tokens, num_whole = match.num_tokens, len(tokens) // tree.page_size * tree.page_size
    partial = match.partial
    first_difference = num_tokens + (partial.num_tokens if partial else 0)
    if num_tokens == len(tokens):
        return Explanation(
            cause=Cause.COMPLETE, num_tokens=num_tokens, first_difference=num_tokens, num_possible_tokens=num_tokens
        )
    ghost, num_gone = _ghost(tree, history, tokens, match)
    if ghost is not None:
        return Explanation(
            cause=Cause.EVICTED,
            num_tokens=num_tokens,
            first_difference=first_difference,
            num_possible_tokens=num_tokens + num_gone * tree.page_size,
            evicted_by=ghost.cause,
            evicted_at_s=ghost.evicted_at_s,
        )
    elsewhere, namespace = _elsewhere(tree, tokens, match) if searches_others else (0, None)
    if elsewhere > num_tokens:
        return Explanation(
            cause=Cause.OTHER_NAMESPACE,
            num_tokens=num_tokens,
            first_difference=first_difference,
            num_possible_tokens=elsewhere,
            namespace=namespace,
        )
    is_rounded = partial is not None or num_tokens == num_whole
    return Explanation(
        cause=Cause.PAGE_ROUNDING if is_rounded else Cause.NEVER_SEEN,
        num_tokens=num_tokens,
        first_difference=first_difference,
        num_possible_tokens=first_difference,
    )


def explain_snapshot(tree: Tree, snapshots: Snapshots, match: Match) -> Explanation | None:
    """Return why the last snapshot of `match`, the match of its pages, is not at its end; None if it is there."""
    num_usable = snapshots.last(match.pages)
    if num_usable == len(match.pages):
        return None
    num_lost, evicted_at_s = snapshots.lost(match.pages)
    is_lost = num_lost > num_usable
    partial = match.partial
    return Explanation(
        cause=Cause.SNAPSHOT_EVICTED if is_lost else Cause.NO_SNAPSHOT,
        num_tokens=num_usable * tree.page_size,
        first_difference=match.num_tokens + (partial.num_tokens if partial else 0),
        num_possible_tokens=num_lost * tree.page_size if is_lost else match.num_tokens,
        evicted_by="evict_snapshots" if is_lost else None,
        evicted_at_s=evicted_at_s if is_lost else None,
    )


def _ghost(tree: Tree, history: History | None, tokens: Int32, match: Match) -> tuple[Ghost | None, int]:
    """Return the evicted run that continued the prefix, and how many further pages of the tokens were cached."""
    if history is None:
        return None, 0
    num_whole = len(tokens) // tree.page_size * tree.page_size
    place = int(match.pages[-1]) if match.num_tokens else match.node.namespace
    return history.find(place, tokens[match.num_tokens : num_whole].tobytes())


def _elsewhere(tree: Tree, tokens: Int32, match: Match) -> tuple[int, Namespace]:
    """Return the length of the longest prefix in any other namespace, and the name of that namespace."""
    key = as_key(tokens, len(tokens) // tree.page_size * tree.page_size)
    lengths = [
        (tree.descend(space.root, key)[1] * tree.page_size, name)
        for name, space in tree.spaces.items()
        if name != match.node.namespace
    ]
    return max(lengths, key=lambda found: found[0], default=(0, None))
