"""Two processes share KV: the first computes a prompt, the second finds its KV.

Usage: python shared_kv.py /tmp/kv                     through a folder
       python shared_kv.py lm://127.0.0.1:65432        through LMCache, here its server: lmcache_server 127.0.0.1 65432
"""

import multiprocessing
import sys
import time

import numpy as np

from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import (
    ArrayPages,
    HostTier,
    PageStore,
    PrefetchMode,
    PrefetchPolicy,
    SharedFolder,
    TieredIndex,
)
from pagewood.kvpool.tiers.plain_cache import PlainCache  # or pagewood.radixcache.RadixCache

PAGE_SIZE, NUM_LAYERS, LAYER_BYTES, NUM_PAGES = 16, 4, 4096, 64
PROMPT = np.arange(100, 260, dtype=np.int32)  # ten pages


def open_store(place: str, page_bytes: int) -> PageStore:
    """Return the store that the processes share."""
    if "://" in place:
        from pagewood.kvpool.integrations.lmcache import LMCacheStore

        return LMCacheStore(place, page_bytes=page_bytes, fingerprint=b"my model")
    return SharedFolder(place, page_bytes=page_bytes, num_bytes=1_000_000, fingerprint=b"my model")


def serve(place: str, name: str) -> None:
    """Answer one prompt, as a server does in its own process."""
    layers = [np.zeros((NUM_PAGES, LAYER_BYTES), np.uint8) for _ in range(NUM_LAYERS)]
    page_bytes = NUM_LAYERS * LAYER_BYTES
    allocator = PageAllocator(NUM_PAGES)
    index = TieredIndex(
        PlainCache(PAGE_SIZE),
        device=ArrayPages([[layer] for layer in layers]),
        host=HostTier(page_bytes=page_bytes, num_pages=NUM_PAGES),
        remote=open_store(place, page_bytes),
        page_size=PAGE_SIZE,
        fingerprint=b"my model",
        prefetch=PrefetchPolicy(mode=PrefetchMode.WAIT),  # by default it waits about a second
    )

    recall = index.recall(PROMPT)
    while recall is not None and index.advance(recall, allocator.alloc):
        time.sleep(0.001)  # an engine computes other requests in the meantime

    match = index.match(PROMPT)
    lease = index.lock(match.node)
    pages = allocator.alloc((len(PROMPT) - match.num_tokens) // PAGE_SIZE)
    for layer in layers:
        layer[pages] = PROMPT[match.num_tokens :: PAGE_SIZE, None] % 251  # a model writes keys and values here
    index.insert(PROMPT[match.num_tokens :], pages, after=lease)
    index.unlock(lease)

    found = index.peek(PROMPT).pages
    is_right = all((layer[found] == PROMPT[::PAGE_SIZE, None] % 251).all() for layer in layers)
    print(f"{name}: {match.num_tokens} tokens found, {len(PROMPT) - match.num_tokens} computed, KV right: {is_right}")
    index.close()


if __name__ == "__main__":
    for name in ("first", "second"):
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(sys.argv[1], name))
        process.start()
        process.join()
        assert process.exitcode == 0
