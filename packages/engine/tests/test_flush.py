"""`Flush` drops the cached KV that no request uses, in every memory but the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.engine.api import EngineConfig, FinishReason, Flush, SamplingParams, Submit
from pagewood.engine.assemble import assemble
from pagewood.engine.assembly.tiers.lower_caches import TieredCaches
from pagewood.engine.core.loop import Engine, EngineInfo, Pending
from pagewood.engine.core.memory.kv import KVSpace
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.testing import EchoRunner
from pagewood.kvpool import MultiHeadLayout, PageAllocator
from pagewood.kvpool.storage import KVStorage
from parts import make_queue, make_request

PAGE = 4
NUM_PAGES = 32


class Echo:
    """An engine with the echo model."""

    def __init__(self, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        self.engine: Engine = assemble(
            EngineConfig(max_running=4, page_size=PAGE, **options),
            info=EngineInfo(
                model_name="echo", max_length=64, vocab_size=100, eos_token_ids=(), num_pages=NUM_PAGES, page_size=PAGE
            ),
            make_runner=lambda kv: EchoRunner(
                num_rows=4, max_length=64, num_pages=NUM_PAGES, page_size=PAGE, vocab_size=100,
                held_pages=kv.held_pages,
            ),
            inbox=self.inbox,
            outbox=self.outbox,
        )  # fmt: skip
        self.pending: Pending | None = None

    def submit(self, name: str, tokens: list[int], *, max_tokens: int = 4) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.inbox.put(Submit(request_id=name, tokens=np.array(tokens, "<i4").tobytes(), sampling=sampling))

    def until(self, holds: Callable[[list[Any]], bool]) -> list[Any]:
        deltas: list[Any] = []
        for _ in range(200):
            if holds(deltas):
                return deltas
            self.pending = self.engine.advance(self.pending)
            deltas += self.outbox.take()
        raise AssertionError(f"not reached: {deltas}")

    def answer(self, name: str, tokens: list[int]) -> Any:
        self.submit(name, tokens)
        return self.until(lambda deltas: any(delta.request_id == name and delta.finish for delta in deltas))[-1]

    def flush(self) -> Any:
        self.inbox.put(Flush(request_id="flush"))
        deltas = self.until(lambda deltas: any(delta.request_id == "flush" for delta in deltas))
        return next(delta for delta in deltas if delta.request_id == "flush")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_is_answered_and_the_prompt_is_computed_again(overlap: bool) -> None:
    echo = Echo(overlap=overlap)
    prompt = list(range(20))
    assert echo.answer("a", prompt).num_cached_tokens == 0
    assert echo.answer("b", prompt).num_cached_tokens == 16
    flushed = echo.flush()
    assert (flushed.finish, flushed.first, flushed.tokens) == (FinishReason.STOP, True, ())
    assert flushed.num_cached_tokens == 20, flushed
    assert echo.engine.counters().num_free_pages == NUM_PAGES
    assert echo.answer("c", prompt).num_cached_tokens == 0
    assert echo.flush().num_cached_tokens > 0
    assert echo.flush().num_cached_tokens == 0
    assert echo.engine.violation() is None


@pytest.mark.parametrize("overlap", [False, True])
def test_a_flush_keeps_what_running_requests_use(overlap: bool) -> None:
    echo, alone = Echo(overlap=overlap), Echo()
    expected: list[int] = []
    for engine in (alone, echo):
        engine.submit("a", list(range(20)), max_tokens=30)
        deltas = engine.until(lambda deltas: sum(len(delta.tokens) for delta in deltas) >= 5)
        if engine is echo:
            engine.inbox.put(Flush(request_id="flush"))
        deltas += engine.until(lambda deltas: any(delta.request_id == "a" and delta.finish for delta in deltas))
        tokens = [token for delta in deltas if delta.request_id == "a" for token in delta.tokens]
        assert len(tokens) == 30
        expected = expected or tokens
        assert tokens == expected
        assert engine.engine.violation() is None
    assert [delta.num_cached_tokens for delta in deltas if delta.request_id == "flush"] == [0]


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
