# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# (vLLM is not a dependency of this package)
"""vLLM's own classes decode the batches that are published."""

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vLLM; nox -s integrations installs it")

from vllm.distributed import kv_events

from pagewood.radixcache import RadixCache
from pagewood.radixcache.events import EventLog, router_events, router_hash


def test_maps_are_those_of_vllm() -> None:
    cache = RadixCache(2)
    log = EventLog(cache)
    start = log.read().end
    cache.insert(np.arange(6, dtype=np.int32), np.arange(3, dtype=np.int32), ("salt", "adapter"))
    cache.evict(1)
    events = log.read(start).events
    payload = msgspec.msgpack.encode([1.5, router_events(events), 0])
    batch = msgspec.msgpack.decode(payload, type=kv_events.KVEventBatch)
    stored, removed = batch.events
    assert type(stored) is kv_events.BlockStored
    assert stored.block_hashes == [router_hash(name) for name in events[0].block_hashes]
    assert (stored.parent_block_hash, stored.token_ids, stored.block_size) == (None, [0, 1, 2, 3, 4, 5], 2)
    assert (stored.medium, stored.lora_name, stored.extra_keys) == ("GPU", "adapter", [("adapter", "salt")] * 3)
    assert removed == kv_events.BlockRemoved(block_hashes=stored.block_hashes[2:], medium="GPU")
    cache.clear(("salt", "adapter"))
    last = router_events(log.read(log.position).events or log.read(start).events)[-1]
    assert msgspec.convert(last, type=kv_events.AllBlocksCleared) == kv_events.AllBlocksCleared()
