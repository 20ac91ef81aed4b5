"""Prefixes that are likely to return are kept under pressure, within a bound, and those that are done are dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from echo_bench import PAGE, EchoBench, expected, submit
from pagewood.engine.api import EngineConfig, FinishReason, Flush, Pause, Resume, Retain, Submit
from pagewood.engine.core.memory.retention import Retention
from pagewood.kvpool.tiers import ArrayPages, HostTier, TieredIndex
from pagewood.radixcache import CacheKey, RadixCache

TEXT = [*range(1, 25)]
"""24 tokens, 6 pages; with 8 tokens of output, 7 whole pages are cached."""


def pressure(bench: EchoBench, number: int = 6, **fields: Any) -> None:
    """Run requests one after the other that together need the memory several times."""
    for index in range(number):
        prompt = [(30 + index + place * 7) % 50 for place in range(40)]
        bench.answer(submit(f"pressure {index} {fields}", prompt, max_tokens=20, **fields))


def num_cached(bench: EchoBench, prompt: list[int], name: str = "again", **fields: Any) -> int:
    """Return how many tokens of a prompt are found in the cache."""
    return bench.answer(submit(name, prompt, max_tokens=1, **fields)).num_cached_tokens


def retain(name: str, tokens: list[int], seconds: float, namespace: str | None = None) -> Retain:
    return Retain(request_id=name, tokens=np.array(tokens, "<i4").tobytes(), seconds=seconds, namespace=namespace)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("retain_s", [None, 100.0])
def test_a_retained_prefix_survives_pressure_and_another_does_not(retain_s: float | None, overlap: bool) -> None:
    bench = EchoBench(retained_share=0.5, overlap=overlap)
    bench.answer(submit("first", TEXT, max_tokens=8, retain_s=retain_s))
    pressure(bench)
    found = num_cached(bench, TEXT + bench.tokens("first") + [3])
    assert found == (0 if retain_s is None else 28)


def test_without_a_share_nothing_is_retained() -> None:
    bench = EchoBench()
    bench.answer(submit("first", TEXT, max_tokens=8, retain_s=100.0))
    assert bench.engine.counters().num_retained_pages == 0
    pressure(bench)
    assert num_cached(bench, TEXT) == 0
    bench.step(retain("r", TEXT, 10.0))
    (delta,) = bench.deltas["r"]
    assert delta.refusal is not None
    assert (delta.finish, delta.refusal.code) == (FinishReason.REFUSED, "no_retention")


def test_retention_ends_with_its_time() -> None:
    bench = EchoBench(retained_share=0.5, max_retain_s=50.0)
    bench.answer(submit("first", TEXT, max_tokens=8, retain_s=10.0))
    bench.answer(submit("second", [9, *TEXT], max_tokens=8, retain_s=1e9))
    assert bench.engine.counters().num_retained_pages == 15
    bench.now_s = 9.0
    pressure(bench)
    assert bench.engine.counters().num_retained_pages == 15
    bench.now_s = 11.0
    pressure(bench, 3, tag="x")
    assert bench.engine.counters().num_retained_pages == 8
    assert num_cached(bench, TEXT) == 0
    bench.now_s = 51.0  # what a client asks for is cut
    pressure(bench, 3, tag="y")
    assert bench.engine.counters().num_retained_pages == 0


def test_the_bound_holds_against_a_client_that_retains_everything() -> None:
    bench = EchoBench(retained_share=0.5)
    bench.answer(submit("mine", TEXT, max_tokens=8, namespace="mine", retain_s=1e6))
    for number in range(40):
        prompt = [(number + place * 3) % 50 for place in range(20 + number % 9)]
        bench.answer(submit(f"greedy {number}", prompt, max_tokens=8, namespace="greedy", retain_s=1e6))
        assert bench.engine.counters().num_retained_pages <= 16
    assert bench.engine.counters().num_retained_pages > 10
    assert num_cached(bench, TEXT, namespace="mine") == 20  # whole pages before the last token
    bench.step(submit("large", [1] * 56, max_tokens=8))  # what requests need is more than what is not retained
    bench.step(submit("larger", [2] * 56, max_tokens=8))
    bench.until(lambda: bench.finish("large") and bench.finish("larger"))
    assert bench.tokens("larger") == expected([2] * 56, 8)


def test_the_bound_counts_by_namespace_whatever_else_a_key_says() -> None:
    """Two keys of "a" have 6 pages together, "b" has 5: the oldest prefix of "a" makes room."""
    cache = RadixCache(1)
    retention = Retention(num_pages=20, max_pages=11, max_s=100.0, page_size=1, clock=lambda: 0.0)
    long = CacheKey.of("a", rope="long")
    for first, (key, size) in {0: ("b", 5), 5: ("a", 3), 8: (long, 3), 11: (long, 1)}.items():
        tokens = np.arange(first, first + size, dtype=np.int32)
        cache.insert(tokens, tokens, key)
        retention.keep(cache, tokens, key, 10.0, of_request=False, ended=lambda _: None)
    cache.evict(20)
    assert [cache.num_pages_in(key) for key in ("b", "a", long)] == [5, 0, 4]


def test_more_than_the_bound_is_retained_in_part() -> None:
    bench = EchoBench(retained_share=0.25)  # 8 pages
    bench.answer(submit("first", [*range(1, 49)], max_tokens=8, retain_s=100.0))
    assert bench.engine.counters().num_retained_pages == 8
    pressure(bench)
    assert num_cached(bench, [*range(1, 49)]) == 32


def test_a_shared_beginning_counts_once() -> None:
    bench = EchoBench(retained_share=0.5)
    for number in range(3):
        bench.answer(submit(f"turn {number}", TEXT + [40 + number] * 4, max_tokens=1, retain_s=100.0))
    assert bench.engine.counters().num_retained_pages == 6 + 3


def test_requests_that_lack_memory_get_that_of_retained_prefixes() -> None:
    bench = EchoBench(retained_share=1.0)
    for number in range(4):
        bench.answer(submit(f"kept {number}", [number] * 24, max_tokens=8, retain_s=100.0))
    assert bench.engine.counters().num_retained_pages == 28
    bench.step(submit("a", [7] * 50, max_tokens=14), submit("b", [8] * 50, max_tokens=14))
    bench.until(lambda: bench.finish("a") and bench.finish("b"))
    assert (bench.tokens("a"), bench.tokens("b")) == (expected([7] * 50, 14), expected([8] * 50, 14))
    assert bench.engine.counters().num_retained_pages < 28


def test_a_preempted_request_is_neither_retained_nor_dropped_before_its_end() -> None:
    for retain_s in (0.0, 100.0):
        bench = EchoBench(retained_share=0.5)
        bench.step(submit("a", TEXT, max_tokens=12, retain_s=retain_s))
        bench.steps(4)
        bench.step(Pause(request_id="pause", retract=True))
        bench.steps(2)
        counters = bench.engine.counters()
        assert (counters.num_running, counters.num_retained_pages) == (0, 0)
        assert counters.num_cached_pages >= 6
        bench.step(Resume(request_id="resume"))
        bench.until(lambda bench=bench: bench.finish("a"))
        assert bench.tokens("a") == expected(TEXT, 12)
        bench.step()
        counters = bench.engine.counters()
        assert (counters.num_cached_pages, counters.num_retained_pages) == ((0, 0) if retain_s == 0 else (8, 8))


def test_a_conversation_that_is_done_leaves_what_others_need() -> None:
    bench = EchoBench(retained_share=0.5)
    bench.answer(submit("turn 1", TEXT, max_tokens=8, retain_s=100.0))
    bench.answer(submit("other", TEXT + [49] * 8, max_tokens=1))
    conversation = TEXT + bench.tokens("turn 1") + [5] * 4
    bench.answer(submit("turn 2", conversation, max_tokens=8, retain_s=0.0))
    bench.step()
    counters = bench.engine.counters()
    assert counters.num_retained_pages == 0
    assert counters.num_cached_pages == 8  # the six that the other shares, and its own two
    assert num_cached(bench, TEXT + [49] * 8 + [1]) == 32


def test_a_text_that_was_retained_by_itself_outlives_conversations_that_begin_with_it() -> None:
    bench = EchoBench(retained_share=0.5)
    bench.answer(submit("warm", TEXT, max_tokens=1))
    bench.step(retain("instructions", TEXT, 100.0))
    assert bench.deltas["instructions"][0].num_cached_tokens == 24
    bench.answer(submit("a", TEXT + [3] * 8, max_tokens=8, retain_s=0.0))
    bench.step()
    assert bench.engine.counters().num_retained_pages == 6
    pressure(bench)
    assert num_cached(bench, [*TEXT, 1]) == 24


def test_a_text_is_dropped_by_command() -> None:
    bench = EchoBench()
    bench.answer(submit("a", TEXT, max_tokens=8))
    bench.step(retain("shorter", TEXT[:12], 0.0))  # a longer one needs it
    assert bench.deltas["shorter"][0].num_cached_tokens == 0
    bench.step(retain("whole", TEXT + bench.tokens("a"), 0.0))
    assert bench.deltas["whole"][0].num_cached_tokens == 28
    assert bench.engine.counters().num_free_pages == 32
    bench.step(retain("unknown", [1, 2, 3], 0.0), retain("of another", TEXT, 0.0, namespace="other"))
    assert bench.deltas["unknown"][0].num_cached_tokens == 0
    bench.step(Retain(request_id="bad", tokens=b"123", seconds=1.0))
    assert bench.finish("bad") is FinishReason.REFUSED


def test_what_a_running_request_uses_is_not_dropped() -> None:
    bench = EchoBench()
    bench.step(submit("a", TEXT, max_tokens=30))
    bench.steps(3)
    bench.step(retain("whole", TEXT, 0.0))
    assert bench.deltas["whole"][0].num_cached_tokens == 0
    bench.until(lambda: bench.finish("a"))
    assert bench.tokens("a") == expected(TEXT)


def test_a_flush_drops_retained_prefixes() -> None:
    bench = EchoBench(retained_share=0.5)
    bench.answer(submit("a", TEXT, max_tokens=8, retain_s=100.0))
    bench.step(Flush(request_id="flush"))
    counters = bench.engine.counters()
    assert (counters.num_retained_pages, counters.num_free_pages) == (0, 32)
    bench.step()
    bench.check_empty()


def test_the_same_prefix_retained_again_holds_longer_and_takes_no_more() -> None:
    bench = EchoBench(retained_share=0.5)
    bench.answer(submit("warm", TEXT, max_tokens=1))
    for number in range(300):
        bench.step(retain(f"r{number}", TEXT, 10.0 + number))
    assert bench.engine.counters().num_retained_pages == 6
    retention = bench.kv._retention  # pyright: ignore[reportPrivateUsage]
    assert retention is not None
    assert len(retention._deadlines) < 100  # pyright: ignore[reportPrivateUsage]
    bench.now_s = 300.0
    pressure(bench)
    assert num_cached(bench, [*TEXT, 1]) == 24


def test_retention_over_lower_tiers() -> None:
    def make_caches(memory: NDArray[np.uint64]) -> Callable[[], TieredIndex]:
        device = ArrayPages([[memory.view(np.uint8).reshape(-1, PAGE * 8)]])
        host = HostTier(page_bytes=PAGE * 8, num_pages=64)
        return lambda: TieredIndex(RadixCache(PAGE), device=device, host=host, page_size=PAGE)

    bench = EchoBench(retained_share=0.5, make_caches=make_caches)
    bench.answer(submit("a", TEXT, max_tokens=8, retain_s=100.0))
    pressure(bench)
    assert bench.engine.counters().num_retained_pages == 7
    bench.now_s = 200.0
    pressure(bench, 3, tag="x")
    assert bench.engine.counters().num_retained_pages == 0
    num_pages = bench.engine.counters().num_cached_pages
    bench.answer(submit("b", [6] * 24, max_tokens=8, retain_s=0.0))
    bench.step()
    assert bench.engine.counters().num_cached_pages <= num_pages
    assert bench.kv.cache.peek(np.full(24, 6, np.int32)).num_tokens == 0
    bench.engine.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EngineConfig(retained_share=1.5), r"retained_share must be in \[0, 1\], got 1.5"),
        (lambda: EngineConfig(retained_share=float("nan")), "retained_share must be in"),
        (lambda: EngineConfig(retained_share=0.5, prefix_cache=False), "retained_share must come with the prefix"),
        (lambda: EngineConfig(max_retain_s=0.0), "max_retain_s must be > 0 and finite, got 0.0"),
        (lambda: Submit(request_id="a", tokens=b"", retain_s=-1.0), "retain_s must be >= 0 and finite, got -1.0"),
        (lambda: Retain(request_id="a", tokens=b"", seconds=float("inf")), "seconds must be >= 0 and finite, got inf"),
    ],
)
def test_wrong_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
