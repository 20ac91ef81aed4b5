"""Upper bounds for every policy: the hits of a cache that knows the future, and of one that never evicts."""

import heapq
from collections.abc import Iterable, Sequence

from pagewood.radixcache.arrays import Int32
from pagewood.radixcache.counts import require_count

_NEVER = 1 << 62


def num_unbounded_hits(requests: Iterable[Int32]) -> int:
    """Return the number of blocks that hit in a cache that never evicts."""
    paths = _number_prefixes(requests)
    return sum(map(len, paths)) - len(set[int]().union(*paths))


def num_best_hits(requests: Sequence[Int32], *, num_blocks: int) -> int:
    """Return the number of blocks that hit if every eviction takes the leaf whose next use is farthest in the future.

    Under the rules of `replay` (one request at a time, with all its blocks in memory while it is served), this greedy
    choice is optimal. Proof: imagine that each request's blocks are requested repeatedly, arbitrarily often. Then these
    are the rules of paging, for which Belady's choice is optimal, and it never evicts a block of the current request,
    because its next use is immediate. The chosen block is always a leaf: a request that uses a block also uses all
    blocks before it, so none of these is used later than the block. With several requests at once, or with knowledge of
    the queue, an engine may get other numbers.

    Args:
        requests: the blocks of each request, `[num_blocks] int32`, in order of arrival.
        num_blocks: size of the memory, as for `replay`.

    Raises:
        ValueError: `num_blocks` is not an integer >= 0.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
    """
    paths = _number_prefixes(requests, require_count("num_blocks", num_blocks, least=0))
    cached: dict[int, int] = {}  # prefix -> index of its next use
    farthest: list[tuple[int, int]] = []  # (-next use, -prefix): deeper first; some entries are outdated
    num_hits = 0
    for path, uses in zip(paths, _next_uses(paths), strict=True):
        num_missing = sum(prefix not in cached for prefix in path)
        num_hits += len(path) - num_missing
        num_victims = len(cached) + num_missing - num_blocks
        while num_victims > 0:  # never a hit of this request: its next use is now
            next_use, prefix = heapq.heappop(farthest)
            if cached.get(-prefix) == -next_use:
                del cached[-prefix]
                num_victims -= 1
        for prefix, use in zip(path, uses, strict=True):
            cached[prefix] = use
            heapq.heappush(farthest, (-use, -prefix))
    return num_hits


def _number_prefixes(requests: Iterable[Int32], num_blocks: int | None = None) -> list[list[int]]:
    """Return, for each block of each request, the number of the prefix that ends with that block."""
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
    """Return, for each position in `paths`, the index of the next path with the same prefix."""
    last: dict[int, int] = {}
    next_uses: list[list[int]] = []
    for now in range(len(paths) - 1, -1, -1):
        next_uses.append([last.get(prefix, _NEVER) for prefix in paths[now]])
        last.update(dict.fromkeys(paths[now], now))
    return next_uses[::-1]
