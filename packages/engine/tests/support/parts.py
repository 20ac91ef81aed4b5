"""Makes small real objects of the core for tests of single modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from pagewood.engine.api import SamplingParams
from pagewood.engine.core.memory.divided_kv import AnyKV
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.core.queue.waiting import WaitingQueue
from pagewood.engine.core.request import Request
from pagewood.kvpool import PageAllocator
from pagewood.radixcache import RadixCache
from pagewood.schedpolicy import InBatchDeferral, Lending, order_named


def make_space(*, num_pages: int = 16, page_size: int = 4, num_rows: int = 4) -> KVSpace:
    """Return an empty KV space over a radix cache and a page allocator."""
    return KVSpace(
        make_cache=partial(RadixCache, page_size),
        allocator=PageAllocator(num_pages),
        page_size=page_size,
        num_rows=num_rows,
    )


def make_queue(kv: AnyKV, *, order: str = "fcfs", is_watching: bool = False, defers: bool = False) -> WaitingQueue:
    """Return an empty queue whose requests are matched in the cache of `kv`."""
    return WaitingQueue(
        order=order_named(order, notified=True),
        kv=kv,
        deferral=InBatchDeferral[Request](page_size=kv.page_size) if defers else None,
        is_watching=is_watching,
        lending=Lending[Request]() if defers else None,
    )


def make_request(prompt: Sequence[int], *, max_new: int = 8, arrival: int = 0, priority: int = 0) -> Request:
    """Return a request like those that intake makes."""
    tokens = np.zeros(len(prompt) + max_new, np.int32)
    tokens[: len(prompt)] = prompt
    return Request(
        request_id=str(arrival),
        sampling=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        priority=priority,
        key=None,
        carry=b"",
        arrival=arrival,
        arrived_s=0.0,
        num_prompt=len(prompt),
        max_length=len(tokens),
        tokens=tokens,
        num_known=len(prompt),
    )
