# pyright: basic, reportMissingImports=false
# (Dynamo is not a dependency of this package)
"""Dynamo's router, the real one, scores prompts by the events of a cache; it subscribes late, and catches up."""

import asyncio
from typing import Any

import numpy as np
import pytest

dynamo = pytest.importorskip("dynamo.llm", reason="needs ai-dynamo-runtime; nox -s integrations installs it")

from pagewood.engine.cache_events import CacheEvents  # noqa: E402
from pagewood.radixcache import RadixCache  # noqa: E402
from pagewood.server.kv_events import EventPump, Publisher  # noqa: E402


@pytest.mark.parametrize("form", ["map", "array"])
def test_a_prompt_is_scored_by_what_is_cached(form: Any) -> None:
    asyncio.run(follow(form))


async def follow(form: Any) -> None:
    cache = RadixCache(16)
    publisher = Publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", heartbeat_s=0.2)
    pump = EventPump(CacheEvents(lambda: cache, form=form).read, publisher)
    long, short = np.arange(64, dtype=np.int32), np.arange(1000, 1032, dtype=np.int32)
    cache.insert(long, np.arange(4, dtype=np.int32))
    pump.turn()
    cache.insert(short, np.arange(4, 6, dtype=np.int32))
    pump.turn()
    router = dynamo.SelectionService(indexer_threads=1)
    worker = {"worker_id": 1, "model_name": "model", "tenant_id": "default", "endpoint": "http://unused"}
    worker |= {"block_size": 16, "max_num_batched_tokens": 8192}
    worker |= {"data_parallel_start_rank": 0, "data_parallel_size": 1}
    worker |= {"kv_events_endpoints": {0: publisher.endpoint}, "replay_endpoint": publisher.replay_endpoint}
    await router.upsert_worker(worker)

    async def until(tokens: Any, num_blocks: int) -> None:
        query = {"model_name": "model", "tenant_id": "default", "token_ids": tokens.tolist()}
        for _ in range(100):
            found = (await router.overlap_scores(query))["workers"]
            if found and found[0]["device_blocks"] == num_blocks:
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"expected {num_blocks} blocks, got {found}")

    await until(long, 4)
    await until(short, 2)
    cache.evict(3)
    pump.turn()
    await until(long, 1)
    cache.clear()
    pump.turn()
    await until(short, 0)
    publisher.close()
