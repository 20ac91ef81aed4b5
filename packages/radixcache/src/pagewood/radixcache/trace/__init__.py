"""Replay a recorded trace into a prefix cache: `python -m pagewood.radixcache.trace TRACE.jsonl`.

The same in Python:

    requests = read_trace(path)
    num_hits = replay(requests, RadixCache(1), num_blocks=10_000)
    print(num_hits / num_blocks_of(requests))
"""

from pagewood.radixcache.trace.bound import num_best_hits, num_unbounded_hits
from pagewood.radixcache.trace.recording import num_blocks_of, read_trace
from pagewood.radixcache.trace.replay import replay

__all__ = ["num_best_hits", "num_blocks_of", "num_unbounded_hits", "read_trace", "replay"]
