"""What no policy can beat: the hits of a cache that knows the future, and of one that never evicts."""

import heapq
from collections.abc import Iterable, Sequence

from pagewood.radixcache.arrays import Int32

_NEVER = 1 << 62


def num_unbounded_hits(requests: Iterable[Int32]) -> int:
    """Return how many blocks hit in a cache that never has to evict."""
    paths = _number_prefixes(requests)
    return sum(map(len, paths)) - len(set[int]().union(*paths))


def num_best_hits(requests: Sequence[Int32], *, num_blocks: int) -> int:
    """Return how many blocks hit if every eviction takes the leaf whose next use is farthest away.

    For the rules of `replay` (one request after the other, all of its blocks in memory while it is served) that greedy
    choice is the best: repeat every request's blocks for as long as you like, and these are the rules of paging, for
    which Belady's choice is optimal; it never takes a block of the request itself, whose next use is at once. And it
    always is a leaf, because whoever uses a block uses all blocks before it too, so that none of them is used later.
    With several requests at once, or with a look at the queue, the numbers of an engine may differ.

    Args:
        requests: of each the blocks, `[num_blocks] int32`, in the order of their arrival.
        num_blocks: memory, as for `replay`.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    paths = _number_prefixes(requests, num_blocks)
    cached: dict[int, int] = {}  # prefix -> when it is used next
    farthest: list[tuple[int, int]] = []  # (-next use, -prefix): deeper ones first; with entries that no longer hold
    num_hits = 0
    for path, uses in zip(paths, _next_uses(paths), strict=True):
        num_missing = sum(prefix not in cached for prefix in path)
        num_hits += len(path) - num_missing
        num_victims = len(cached) + num_missing - num_blocks
        while num_victims > 0:  # what the request hits is used now, so all else is farther
            next_use, prefix = heapq.heappop(farthest)
            if cached.get(-prefix) == -next_use:
                del cached[-prefix]
                num_victims -= 1
        for prefix, use in zip(path, uses, strict=True):
            cached[prefix] = use
            heapq.heappush(farthest, (-use, -prefix))
    return num_hits


def _number_prefixes(requests: Iterable[Int32], num_blocks: int | None = None) -> list[list[int]]:
    """Return, for each request and each of its blocks, the number of the prefix that ends with that block."""
    numbers: dict[tuple[int, int], int] = {}
    paths: list[list[int]] = []
    for request in requests:
        prefix, path = -1, list[int]()
        for block in request[:num_blocks].tolist():
            prefix = numbers.setdefault((prefix, block), len(numbers))
            path.append(prefix)
        paths.append(path)
    return paths


def _next_uses(paths: list[list[int]]) -> list[list[int]]:
    """Return, for each place in `paths`, the index of the next path that has the same prefix."""
    last: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for now in range(len(paths) - 1, -1, -1):
        next_uses.append([last.get(prefix, _NEVER) for prefix in paths[now]])
        last.update(dict.fromkeys(paths[now], now))
    return next_uses[::-1]
