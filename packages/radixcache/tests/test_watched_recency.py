"""The linked lists of QueueInformed(LRU()) against the heap, with runs long enough for every way to find watches."""

from random import Random
from typing import Any

import numpy as np
import pytest

from pagewood.radixcache import LRU, QueueInformed, RadixCache


class HeapLRU(LRU):
    """LRU, but not the class for which the cache has lists: it is kept in a heap."""


@pytest.mark.parametrize("seed", range(6))
def test_the_lists_evict_what_the_heap_evicts(seed: int) -> None:
    rng = Random(seed)
    caches = [RadixCache(1, policy=QueueInformed(policy)) for policy in (LRU(), HeapLRU())]
    texts = [[family, *(rng.randrange(3) for _ in range(3)), *range(9, rng.choice((12, 60)))] for family in range(8)]
    free, watches, leases = list(range(600)), list[list[Any]](), list[list[Any]]()
    for _ in range(400):
        text = list(rng.choice(texts))
        if rng.random() < 0.5:
            text = text[: rng.randint(1, len(text))] + [rng.randrange(100)] * rng.randint(0, 3)
        tokens = np.array(text, np.int32)
        name = rng.choice((None, None, ("a", 1)))
        match rng.randrange(6):
            case 0 | 1 if len(free) >= len(text):
                pages = np.array([free.pop() for _ in text], np.int32)
                (count,) = {cache.insert(tokens, pages, name).num_existing for cache in caches}
                free += pages[:count].tolist()
            case 2:
                watches.append([cache.watch(tokens, name) for cache in caches])
            case 3 if watches:
                for watch in watches.pop(rng.randrange(len(watches))):
                    watch.close()
            case 4:
                leases.append([cache.lock(cache.match(tokens, name).node) for cache in caches])
                if rng.random() < 0.7:
                    for cache, lease in zip(caches, leases.pop(rng.randrange(len(leases))), strict=True):
                        cache.unlock(lease)
            case _:
                num_pages = rng.choice((1, 3, 40))
                first, second = (cache.evict(num_pages).tolist() for cache in caches)
                assert sorted(first) == sorted(second)
                free += first
        if rng.random() < 0.02:
            quota = rng.choice((None, 30))
            for cache in caches:
                cache.limit(("a", 1), quota=quota, floor=0)
        for cache in caches:
            cache.check()
