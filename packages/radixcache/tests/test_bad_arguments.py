"""Every public function answers numbers of a wrong type with the ValueError that it documents, and changes nothing."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagewood.radixcache import (
    GDSF,
    LRU,
    S3FIFO,
    SLRU,
    RadixCache,
    Retained,
    TailOptimizedLRU,
    with_extra_keys,
)
from pagewood.radixcache.events import EventBatch, EventLog, Position, Snapshot, block_hashes, from_plain, to_plain
from pagewood.radixcache.trace import num_best_hits, replay
from pagewood.radixcache.trace.__main__ import main

NOT_WHOLE: list[Any] = [1.0, 2.5, float("nan"), True, None, "2", np.float32(2), np.bool_(True), [2], -1]
TOKENS = np.arange(8, dtype=np.int32)


def filled(policy: Any = None) -> RadixCache:
    cache = RadixCache(2, policy=policy or Retained(LRU()))
    cache.insert(TOKENS, np.arange(4, dtype=np.int32))
    return cache


CALLS: dict[str, Callable[[Any], object]] = {
    "RadixCache": lambda n: RadixCache(n),
    "RadixCache history": lambda n: RadixCache(2, history_tokens=n),
    "limit floor": lambda n: filled().limit("a", floor=n),
    "limit quota": lambda n: filled().limit("a", quota=n),
    "retain start": lambda n: (cache := filled()).retain(cache.peek(TOKENS).node, priority=1, start=n),
    "evict": lambda n: filled().evict(n),
    "evict namespace": lambda n: filled().evict(n, "a"),
    "attach": lambda n: (cache := filled()).attach(cache.peek(TOKENS).node, n),
    "evict_snapshots": lambda n: filled().evict_snapshots(n),
    "outline branches": lambda n: filled().outline(max_branches=n),
    "outline visited": lambda n: filled().outline(max_visited=n),
    "SLRU": lambda n: SLRU(protected_uses=n),
    "TailOptimizedLRU threshold": lambda n: TailOptimizedLRU(threshold_tokens=n),
    "TailOptimizedLRU next": lambda n: TailOptimizedLRU(threshold_tokens=2, next_prompt_tokens=n),
    "GDSF": lambda n: GDSF(attention_tokens=n),
    "EventLog": lambda n: EventLog(filled(), max_pages=n),
    "block_hashes": lambda n: block_hashes(TOKENS, n),
    "with_extra_keys start": lambda n: with_extra_keys(TOKENS, [(n, 8, b"image")]),
    "with_extra_keys end": lambda n: with_extra_keys(TOKENS, [(0, n, b"image")]),
    "replay": lambda n: replay([TOKENS], RadixCache(1), num_blocks=n),
    "replay waiting": lambda n: replay([TOKENS], RadixCache(1), num_blocks=4, num_waiting=n),
    "num_best_hits": lambda n: num_best_hits([TOKENS], num_blocks=n),
}  # fmt: skip
MAY_BE_NONE = ("limit quota",)


@pytest.mark.parametrize("name", CALLS)
def test_a_number_that_is_not_whole_or_negative_is_a_value_error(name: str) -> None:
    for value in NOT_WHOLE:
        if value is None and name in MAY_BE_NONE:
            CALLS[name](value)
            continue
        with pytest.raises(ValueError, match=r"^\w+ must "):
            pytest.fail(f"{value!r} was taken: {CALLS[name](value)}")
    CALLS[name](np.int64(2))


@pytest.mark.parametrize("value", [1.5, True, None, "1", [1]], ids=repr)
def test_a_priority_or_a_deadline_that_is_no_number_is_a_value_error(value: Any) -> None:
    cache = filled()
    node = cache.peek(TOKENS).node
    with pytest.raises(ValueError, match="priority must be an integer"):
        cache.retain(node, priority=value)
    if not isinstance(value, (float, bool)):
        with pytest.raises(ValueError, match="until must be a number"):
            cache.retain(node, priority=1, until=value)
    cache.retain(node, priority=np.int64(-3), until=np.float64(5))  # pyright: ignore[reportArgumentType]
    cache.check()


@pytest.mark.parametrize("value", [None, "0.5", [0.5], 0, 1.0, float("nan")], ids=repr)
def test_a_share_that_is_no_number_between_0_and_1_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"small_share must be in \(0, 1\)"):
        S3FIFO(small_share=value)


@pytest.mark.parametrize("ts", [0, 7, 1.5, 1_800_000_000])
def test_a_time_without_a_fraction_is_read_back(ts: float) -> None:
    position = Position(log_id="a", epoch=3)
    for update in (
        EventBatch(start=position, events=[], ts=ts),
        Snapshot(end=position, events=[], ts=ts, block_size=2),
    ):
        plain = json.loads(json.dumps(to_plain(update)))
        assert from_plain(plain) == update
        assert isinstance(from_plain(plain).ts, float)


@pytest.mark.parametrize("ts", [10**400, None, "1", True, float("nan")])
def test_a_time_that_is_none_is_refused(ts: Any) -> None:
    plain = to_plain(EventBatch(start=Position(log_id="a", epoch=3), events=[], ts=0.0))
    with pytest.raises(ValueError, match="update must have log_id"):
        from_plain(plain | {"ts": ts})


@pytest.mark.parametrize("requests", [1, 3])
def test_a_trace_of_empty_requests_is_refused(
    requests: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "hash_ids": []}\n' * requests)
    with pytest.raises(SystemExit) as stopped:
        main([str(path)])
    assert stopped.value.code == 2
    assert f"must have at least one block, got none in {requests} requests" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"timestamp": 1e999, "hash_ids": []}', '{"timestamp": 0, "hash_ids": "ab"}'])
def test_a_line_with_other_types_is_refused(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(SystemExit):
        main([str(path)])
    assert "trace.jsonl:1 must be a JSON object" in capsys.readouterr().err
