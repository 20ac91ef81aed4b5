# pyright: basic, reportMissingImports=false
# (Dynamo is not a dependency of this package)
"""Dynamo's router, the real one, scores prompts by the events of a cache; it subscribes late, and catches up."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

dynamo = pytest.importorskip("dynamo.llm", reason="needs ai-dynamo-runtime; nox -s integrations installs it")

from pagewood.engine.observe.cache_events import CacheEvents  # noqa: E402
from pagewood.kvpool.tiers import ArrayPages, DiskTier, HostTier, TieredIndex  # noqa: E402
from pagewood.radixcache import RadixCache  # noqa: E402
from pagewood.server.processes.kv_events import EventPump, Publisher  # noqa: E402

PAGE = 16
FORMS = pytest.mark.parametrize("form", ["map", "array"])
LONG, SHORT = np.arange(64, dtype=np.int32), np.arange(1000, 1032, dtype=np.int32)


async def connected(publisher: Publisher) -> Any:
    """Return a router that knows of one worker, whose events a publisher sends."""
    router = dynamo.SelectionService(indexer_threads=1)
    worker = {"worker_id": 1, "model_name": "model", "tenant_id": "default", "endpoint": "http://unused"}
    worker |= {"block_size": PAGE, "max_num_batched_tokens": 8192}
    worker |= {"data_parallel_start_rank": 0, "data_parallel_size": 1}
    worker |= {"kv_events_endpoints": {0: publisher.endpoint}, "replay_endpoint": publisher.replay_endpoint}
    await router.upsert_worker(worker)
    return router


async def until(router: Any, tokens: Any, **blocks: int) -> None:
    """Wait until the router has these numbers of blocks of a prompt."""
    query = {"model_name": "model", "tenant_id": "default", "token_ids": tokens.tolist()}
    found: Any = None
    for _ in range(100):
        found = (await router.overlap_scores(query))["workers"]
        if found and all(found[0][name] == number for name, number in blocks.items()):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"expected {blocks}, got {found}")


@FORMS
def test_a_prompt_is_scored_by_what_is_cached(form: Any) -> None:
    async def follow() -> None:
        cache = RadixCache(PAGE)
        publisher = Publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", heartbeat_s=0.2)
        pump = EventPump(CacheEvents(lambda: cache, form=form).read, publisher)
        cache.insert(LONG, np.arange(4, dtype=np.int32))
        pump.turn()
        cache.insert(SHORT, np.arange(4, 6, dtype=np.int32))
        pump.turn()
        router = await connected(publisher)
        await until(router, LONG, device_blocks=4)
        await until(router, SHORT, device_blocks=2)
        cache.evict(3)
        pump.turn()
        await until(router, LONG, device_blocks=1)
        cache.clear()
        pump.turn()
        await until(router, SHORT, device_blocks=0)
        publisher.close()

    asyncio.run(follow())


@FORMS
def test_a_prompt_is_scored_by_what_the_tiers_hold(form: Any, tmp_path: Path) -> None:
    async def follow() -> None:
        index = TieredIndex(
            RadixCache(PAGE),
            device=ArrayPages([[np.zeros((8, 8), np.uint8)]]),
            host=HostTier(page_bytes=8, num_pages=8),
            disk=DiskTier(tmp_path / "pages", page_bytes=8, num_bytes=64),
            page_size=PAGE,
        )
        publisher = Publisher("tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", heartbeat_s=0.2)
        pump = EventPump(CacheEvents(lambda: index, form=form).read, publisher)
        index.insert(LONG, np.arange(4, dtype=np.int32))
        index.flush()
        pump.turn()
        index.evict(3)
        pump.turn()
        router = await connected(publisher)
        await until(router, LONG, device_blocks=1, host_pinned_extension_blocks=3, disk_extension_blocks=0)
        index.clear()
        pump.turn()
        await until(router, LONG, device_blocks=0, host_pinned_extension_blocks=0, disk_extension_blocks=4)
        publisher.close()
        index.close()

    asyncio.run(follow())
