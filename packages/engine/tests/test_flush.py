"""`Flush` drops the cached KV that no request uses, in every memory but the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_bench import EchoBench, expected, submit
from pagewood.engine.api import Delta, EngineConfig, FinishReason, Flush
from pagewood.engine.assembly.tiers.lower_caches import TieredCaches
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.kvpool import MultiHeadLayout, PageAllocator
from pagewood.kvpool.storage import KVStorage
from parts import make_queue, make_request

PAGE = 4
NUM_PAGES = 32


class Echo:
    """An engine with the echo model, which is flushed."""

    def __init__(self, **options: Any) -> None:
        self.bench = EchoBench(max_running=4, **options)
        self.num_flushes = 0

    def answer(self, name: str, tokens: list[int]) -> Delta:
        return self.bench.answer(submit(name, tokens, max_tokens=4))

    def flush(self) -> Delta:
        self.num_flushes += 1
        name = f"flush {self.num_flushes}"
        self.bench.step(Flush(request_id=name))
        self.bench.until(lambda: self.bench.finish(name))
        return self.bench.deltas[name][-1]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_is_answered_and_the_prompt_is_computed_again(overlap: bool) -> None:
    echo = Echo(overlap=overlap)
    prompt = list(range(20))
    assert echo.answer("a", prompt).num_cached_tokens == 0
    assert echo.answer("b", prompt).num_cached_tokens == 16
    flushed = echo.flush()
    assert (flushed.finish, flushed.first, flushed.tokens) == (FinishReason.STOP, True, ())
    assert flushed.num_cached_tokens == 20, flushed
    assert echo.bench.engine.counters().num_free_pages == NUM_PAGES
    assert echo.answer("c", prompt).num_cached_tokens == 0
    assert echo.flush().num_cached_tokens > 0
    assert echo.flush().num_cached_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_keeps_what_running_requests_use(overlap: bool) -> None:
    echo = EchoBench(max_running=4, overlap=overlap)
    echo.step(submit("a", list(range(20))))
    echo.until(lambda: len(echo.tokens("a")) >= 5)
    echo.step(Flush(request_id="flush"))
    echo.until(lambda: echo.finish("a"))
    assert echo.tokens("a") == expected(list(range(20)))
    assert [delta.num_cached_tokens for delta in echo.deltas["flush"]] == [0]


def test_an_engine_without_a_prefix_cache_has_nothing_to_drop() -> None:
    echo = Echo(prefix_cache=False)
    echo.answer("a", list(range(20)))
    assert echo.flush().num_cached_tokens == 0


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("has_disk", [False, True])
def test_a_flush_empties_the_host_and_keeps_the_disk(has_disk: bool, policy: str, tmp_path: Path) -> None:
    layout = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_size=PAGE)
    memory = KVStorage(layout, 16).memory
    disk: dict[str, Any] = {"disk_cache_path": str(tmp_path), "disk_cache_gb": 0.001} if has_disk else {}
    config = EngineConfig(host_cache_gb=0.001, cache_write_policy=policy, **disk)  # type: ignore[arg-type]
    caches = TieredCaches(config, memory=memory, page_size=PAGE, fingerprint=b"")
    kv = KVSpace(make_cache=caches.make, allocator=PageAllocator(16), page_size=PAGE, num_rows=2)
    tokens = list(range(12))

    def publish() -> None:
        request = make_request(tokens)
        assert kv.admit(request, max_tokens=100, num_reserved=0)
        request.num_computed = 12
        kv.release(request)

    def can_recall() -> bool:
        waiting = make_request(tokens, arrival=1)
        queue = make_queue(kv)
        queue.add(waiting)
        found = queue.recall(waiting, num_reserved=0)
        queue.remove(waiting)
        return found

    publish()
    assert kv.tiers is not None
    kv.poll()
    assert kv.flush() == 3
    assert (kv.num_free, kv.num_cached, kv.violation(())) == (16, 0, None)
    if not has_disk:
        assert not can_recall()
        publish()
        kv.cache.evict(0)  # the cache goes on as before
        assert kv.flush() == 3
        assert not can_recall()
    kv.close()
