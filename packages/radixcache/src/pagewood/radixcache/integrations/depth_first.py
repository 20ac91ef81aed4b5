"""The depth-first order of requests by their cached prefixes."""

from collections.abc import Sequence

from pagewood.radixcache.arrays import ITEM_BYTES, Int32, num_common_items
from pagewood.radixcache.namespaces import Namespace


def depth_first_by_weight(prefixes: Sequence[tuple[Namespace, Int32]]) -> list[int]:
    """Return the indices of requests in the order of a depth-first walk over the tree of their cached prefixes.

    A branch comes before its siblings if more requests end in it, and the requests at a point come after those below
    it. So requests that share a prefix are neighbours, the largest groups first.

    Args:
        prefixes: for each request the namespace and the pages of its prefix.

    Source: `dfs-weight` of SGLang (arXiv 2312.07104).
    """
    by_namespace: dict[Namespace, list[int]] = {}
    for index, (namespace, pages) in enumerate(prefixes):
        if len(pages):
            by_namespace.setdefault(namespace, []).append(index)
    keys = [pages.tobytes() for _, pages in prefixes]
    # As under one root: the first pages of all namespaces compete, and the requests without a prefix come last.
    order: list[int] = []
    groups = [group for members in by_namespace.values() for group in _branches(members, keys, 0)[0]]
    stack: list[tuple[list[int], int]] = [(group, ITEM_BYTES) for group in _by_weight(groups)]
    while stack:
        members, start = stack.pop()
        if start < 0 or len(members) == 1:
            order += members
            continue
        first, last = min(keys[index] for index in members), max(keys[index] for index in members)
        start += num_common_items(first[start:], last, start) * ITEM_BYTES  # what all of them share
        branches, ended = _branches(members, keys, start)
        stack.append((ended, -1))
        stack += [(branch, start + ITEM_BYTES) for branch in _by_weight(branches)]
    return order + [index for index, key in enumerate(keys) if not key]


def _branches(members: list[int], keys: list[bytes], start: int) -> tuple[list[list[int]], list[int]]:
    """Split requests by their next page; return the groups, and the requests whose prefix ends here."""
    groups: dict[bytes, list[int]] = {}
    ended: list[int] = []
    for index in members:
        page = keys[index][start : start + ITEM_BYTES]
        if page:
            groups.setdefault(page, []).append(index)
        else:
            ended.append(index)
    return list(groups.values()), ended


def _by_weight(groups: list[list[int]]) -> list[list[int]]:
    """Return groups so that the last one has the most members, and the first of equals stands last."""
    return sorted(groups, key=len, reverse=True)[::-1]
