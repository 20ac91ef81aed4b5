"""Soak test of every policy and page size: `nox -s soak`, or `python packages/radixcache/tests/soak.py 1000000`."""

import sys
import time
from collections.abc import Callable

from pagewood.radixcache import (
    FIFO,
    FILO,
    GDSF,
    LFU,
    LRU,
    MRU,
    S3FIFO,
    SLRU,
    QueueInformed,
    RadixCache,
    Retained,
    TailOptimizedLRU,
)
from pagewood.radixcache.order.choice import AnyPolicy
from pagewood.radixcache.testing import ManualClock, conformance_machine, soak

CLOCK = ManualClock()
POLICIES: dict[str, Callable[[], AnyPolicy]] = {
    "LRU": LRU,
    "LFU": LFU,
    "FIFO": FIFO,
    "MRU": MRU,
    "FILO": FILO,
    "SLRU": SLRU,
    "tail-optimised": lambda: TailOptimizedLRU(threshold_tokens=5, next_prompt_tokens=2),
    "GDSF": lambda: GDSF(attention_tokens=3),
    "S3-FIFO": lambda: S3FIFO(small_share=0.3),
    "priority and TTL": lambda: Retained(LRU(), clock=CLOCK),
    "priority over LFU": lambda: Retained(LFU(), clock=CLOCK),
    "queue-informed": lambda: QueueInformed(LRU()),
    "queue-informed priority": lambda: QueueInformed(Retained(GDSF(), clock=CLOCK)),
}
PAGE_SIZES = (1, 3, 16)


def main(num_steps: int) -> None:
    """Divide `num_steps` among all policies and page sizes."""
    cases = [(name, page_size) for name in POLICIES for page_size in PAGE_SIZES]
    for seed, (name, page_size) in enumerate(cases):
        start = time.perf_counter()
        make_policy = POLICIES[name]
        machine = conformance_machine(
            lambda page_size, make_policy=make_policy: RadixCache(
                page_size, policy=make_policy(), history_tokens=500 * page_size
            ),
            page_size=page_size,
            make_policy=make_policy,
            clock=CLOCK if "priority" in name else None,
        )
        soak(machine, page_size=page_size, num_steps=-(-num_steps // len(cases)), seed=seed, check_every=50)
        print(f"{name}, pages of {page_size}: {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
