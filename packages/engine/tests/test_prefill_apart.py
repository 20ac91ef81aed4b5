"""Engines that share KV: one computes prompts, another goes on with them, and either may be lost at any moment."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from threading import Event
from typing import Any, Literal

import numpy as np
import pytest

from pagewood.engine import EngineConfig, SamplingParams
from pagewood.engine.api import Abort, FinishReason, PoolingParams, RequestOptions
from pagewood.engine.assembly.tiers.lower_caches import TieredCaches
from pagewood.engine.core.queue import publishing, waiting
from pagewood.kvpool import MultiHeadLayout
from pagewood.kvpool.storage import KVStorage
from pagewood.kvpool.tiers import SharedFolder
from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.stores.segments import read_table
from sides import GREEDY, Side

PAGE = 16
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=8, ignore_eos=True)
LENGTH = 150
NUM_WHOLE = (LENGTH - 1) // PAGE * PAGE


def prompt(seed: int, n: int = LENGTH) -> list[int]:
    return [5 + (seed * 7919 + i * i * 31 + i) % 200 for i in range(n)]


@pytest.fixture
def place() -> Generator[str]:
    """A store in shared memory."""
    name = f"test-{os.getpid()}-{time.monotonic_ns()}"
    yield f"shm:{name}"
    shutil.rmtree(folder_of(f"shm:{name}"), ignore_errors=True)


@pytest.fixture
def sides(place: str) -> Generator[Callable[..., Side]]:
    """Make engines that share the store of `place`; they are closed at the end."""
    made: list[Side] = []

    def make(**options: Any) -> Side:
        shared = {"host_cache_gb": 0.02, "remote_cache": place, "remote_cache_gb": 0.05}
        made.append(Side(**{**shared, **options}))
        return made[-1]

    yield make
    for side in made:
        side.engine.close()


def folder_of(place: str) -> Path:
    return Path("/dev/shm") / f"pagewood-{os.geteuid()}-{place.removeprefix('shm:')}"


def segments(place: str) -> list[Path]:
    return sorted(folder_of(place).rglob("*.pages"))


def pages_in(folder: Path) -> dict[bytes, bytes]:
    """Return the contents of all pages of a store, by key."""
    found: dict[bytes, bytes] = {}
    for path in folder.rglob("*.pages"):
        page_bytes = int(path.parent.name.rsplit("-", 1)[1])
        with path.open("rb") as file:
            table = read_table(file.fileno(), page_bytes)
            assert table is not None
            found |= {key: file.read(page_bytes) for key in table[0]}
    return found


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_two_engines_give_the_tokens_of_one(sides: Callable[..., Side], dtype: str, sampling: SamplingParams) -> None:
    alone = sides(remote_cache=None, remote_cache_gb=None, kv_cache_dtype=dtype)
    prefill, decode = sides(role="prefill", kv_cache_dtype=dtype), sides(role="decode", kv_cache_dtype=dtype)
    for seed in range(3):
        expected = alone.answer(f"{seed}", prompt(seed), sampling)
        assert prefill.answer(f"{seed}", prompt(seed), sampling) == expected[:1]
        assert prefill.ends[f"{seed}"].finish is FinishReason.LENGTH
        before = decode.num_computed
        assert decode.answer(f"{seed}", prompt(seed), sampling) == expected
        assert decode.num_computed - before == LENGTH - NUM_WHOLE + 8 - 1  # no copy was still under way
        assert decode.ends[f"{seed}"].num_cached_tokens == NUM_WHOLE
        resumed = prompt(seed) + expected + prompt(9, 40)
        turn = alone.answer(f"{seed} again", resumed, sampling)
        assert decode.answer(f"{seed} again", resumed, sampling) == turn
        assert prefill.answer(f"{seed} again", resumed, sampling) == turn[:1]


@pytest.mark.slow
def test_ranks_hand_over_to_ranks(sides: Callable[..., Side]) -> None:
    """A page is in the store when it has the parts of all ranks; engines with another number of ranks do not use it."""
    ranks: dict[str, Any] = {"tensor_parallel_size": 2, "num_threads": 2}
    alone = sides(remote_cache=None, remote_cache_gb=None, **ranks)
    prefill, decode, other = sides(role="prefill", **ranks), sides(role="decode", **ranks), sides(role="decode")
    expected = alone.answer("a", prompt(1), SAMPLED)
    assert prefill.answer("a", prompt(1), SAMPLED) == expected[:1]
    assert decode.answer("a", prompt(1), SAMPLED) == expected
    assert decode.ends["a"].num_cached_tokens == NUM_WHOLE
    other.answer("a", prompt(1), SAMPLED)
    assert other.ends["a"].num_cached_tokens == 0


def test_a_prefill_engine_publishes_each_chunk(sides: Callable[..., Side], place: str) -> None:
    prefill = sides(role="prefill")
    prefill.submit("a", prompt(1, 900))
    prefill.until(lambda: len(segments(place)) >= 3)
    assert "a" not in prefill.ends
    prefill.until(lambda: "a" in prefill.ends)


def test_a_lost_prefill_engine_is_a_cache_miss(sides: Callable[..., Side], place: str) -> None:
    expected = sides(remote_cache=None, remote_cache_gb=None).answer("a", prompt(1, 900))
    prefill, decode = sides(role="prefill"), sides(role="decode")
    prefill.submit("a", prompt(1, 900))
    prefill.until(lambda: len(segments(place)) >= 3)  # and never goes on
    assert decode.answer("a", prompt(1, 900)) == expected
    assert 0 < decode.ends["a"].num_cached_tokens < 896
    prefill.inbox.put(Abort(request_id="a"))
    prefill.until(lambda: "a" in prefill.ends)


def test_pages_of_a_lost_engine_are_those_of_a_recomputation(sides: Callable[..., Side], tmp_path: Path) -> None:
    """To the last bit, although the second engine computes them in other chunks."""
    prefill = sides(role="prefill")
    again = sides(remote_cache=str(tmp_path), chunked_prefill_size=256)
    prefill.answer("b", prompt(2, 300))
    prefill.submit("a", prompt(1, 900))
    num_before = len(segments(prefill.place))
    prefill.until(lambda: len(segments(prefill.place)) >= num_before + 5)
    assert "a" not in prefill.ends  # here it is lost
    for name, tokens in (("a", prompt(1, 900)), ("b", prompt(2, 300))):
        again.answer(name, tokens, handover="publish")
    lost, whole = pages_in(folder_of(prefill.place)), pages_in(tmp_path)
    assert len(lost) > 300 // PAGE
    assert all(whole[key] == page for key, page in lost.items())


@pytest.mark.parametrize("damage", ["flip", "cut", "swap"])
def test_damaged_pages_are_computed_again(sides: Callable[..., Side], place: str, damage: str) -> None:
    expected = sides(remote_cache=None, remote_cache_gb=None).answer("a", prompt(1))
    prefill = sides(role="prefill")
    prefill.answer("a", prompt(1))
    prefill.answer("b", prompt(2))
    paths = segments(place)
    contents = [bytearray(path.read_bytes()) for path in paths]
    for path, content, other in zip(paths, contents, contents[1:] + contents[:1], strict=True):
        match damage:
            case "flip":
                for at in range(1000, len(content), 30_000):  # in every page
                    content[at] ^= 16
                path.write_bytes(content)
            case "cut":
                path.write_bytes(content[: len(content) // 2])
            case _:
                path.write_bytes(other)
    decode = sides(role="decode")
    assert decode.answer("a", prompt(1)) == expected


def test_pages_of_other_layouts_and_namespaces_are_not_used(sides: Callable[..., Side]) -> None:
    sides(role="prefill").answer("a", prompt(1), namespace="mine")
    assert sides(role="decode").answer("a", prompt(1), namespace="yours")
    for options, namespace, is_found in (
        ({"page_size": 8}, "mine", False),
        ({"kv_cache_dtype": "int8"}, "mine", False),
        ({}, None, False),
        ({}, "mine", True),
    ):
        side = sides(role="decode", **options)
        side.answer("a", prompt(1), namespace=namespace)
        assert (side.ends["a"].num_cached_tokens > 0) == is_found, (options, namespace)


def test_pages_of_another_layout_of_the_same_size_are_not_used(tmp_path: Path) -> None:
    layouts = [MultiHeadLayout(num_layers=n, num_kv_heads=2 // n, head_dim=4, page_size=4) for n in (1, 2)]
    assert len({layout.bytes_per_page for layout in layouts}) == 1
    config = EngineConfig(host_cache_gb=0.001, remote_cache=str(tmp_path), remote_cache_gb=0.001)
    tokens = np.arange(12, dtype=np.int32)
    for layout, num_found in ((layouts[0], 0), (layouts[1], 0), (layouts[0], 12)):
        memory = KVStorage(layout, 16).memory
        cache = TieredCaches(config, memory=memory, page_size=4, fingerprint=b"the model").make()
        assert cache.locate(tokens).num_remote == num_found
        cache.insert(tokens, np.arange(3, dtype=np.int32))
        cache.close()


def test_a_request_waits_for_pages_that_another_engine_publishes(sides: Callable[..., Side]) -> None:
    expected = sides(remote_cache=None, remote_cache_gb=None).answer("a", prompt(1, 900))
    prefill, decode = sides(role="prefill"), sides(role="decode")
    decode.submit("a", prompt(1, 900), handover="await")
    decode.submit("b", prompt(2, 20))
    decode.until(lambda: "b" in decode.ends)  # it keeps no other request waiting
    prefill.submit("a", prompt(1, 900))

    def both() -> bool:
        prefill.step()
        return "a" in decode.ends

    decode.until(both)
    assert decode.tokens["a"] == expected
    assert decode.ends["a"].num_cached_tokens == 896
    prefill.until(lambda: "a" in prefill.ends)
    assert decode.engine.violation() is None


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_request_does_not_wait_for_ever(
    sides: Callable[..., Side], place: str, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    monkeypatch.setattr(waiting, "_NEXT_PAGE_S", 0.2)
    expected = sides(remote_cache=None, remote_cache_gb=None).answer("a", prompt(1, 900))
    prefill, decode = sides(role="prefill"), sides(role="decode")
    if has_begun:
        prefill.submit("a", prompt(1, 900))
        prefill.until(lambda: len(segments(place)) >= 2)
    assert decode.answer("a", prompt(1, 900), handover="await") == expected
    assert (decode.ends["a"].num_cached_tokens > 0) == has_begun
    decode.submit("b", prompt(3, 900), handover="await")
    for _ in range(3):
        decode.step()
    assert decode.engine.counters().num_waiting == 1
    decode.inbox.put(Abort(request_id="b"))
    decode.until(lambda: "b" in decode.ends)
    assert (decode.engine.counters().num_waiting, decode.engine.violation()) == (0, None)


def test_a_request_below_its_threshold_ends_at_once(sides: Callable[..., Side]) -> None:
    prefill, decode, third = sides(role="prefill"), sides(role="decode", max_running=1), sides()
    decode.submit("long", prompt(5, 40), SamplingParams(max_tokens=500, ignore_eos=True))
    decode.until(lambda: bool(decode.tokens.get("long")))  # nothing else may run
    decode.submit("a", prompt(1), cache_hit_threshold=0.1)
    decode.until(lambda: "a" in decode.ends)
    end = decode.ends["a"]
    assert (end.finish, end.tokens, end.first) == (FinishReason.CACHE_THRESHOLD, (), True)
    assert (end.num_prompt_tokens, end.num_output_tokens, decode.tokens["a"]) == (LENGTH, 0, [])
    decode.inbox.put(Abort(request_id="long"))
    decode.until(lambda: "long" in decode.ends)
    prefill.answer("a", prompt(1), cache_hit_threshold=0.0)
    assert decode.answer("b", prompt(1), cache_hit_threshold=1.0)  # all whole pages
    assert decode.ends["b"].finish is FinishReason.LENGTH
    half = prompt(1)[:80] + prompt(2, 75)  # 5 of 9 pages
    third.answer("c", half, cache_hit_threshold=5.01 / 9)
    third.answer("d", half, cache_hit_threshold=5 / 9)
    assert [third.ends[name].finish for name in "cd"] == [FinishReason.CACHE_THRESHOLD, FinishReason.LENGTH]
    third.answer("e", half, cache_hit_threshold=1.0)  # its own now
    third.answer("short", [7, 8], cache_hit_threshold=1.0)  # nothing could come
    assert [third.ends[name].finish for name in ("e", "short")] == [FinishReason.LENGTH] * 2


def test_an_engine_without_lower_tiers_has_thresholds() -> None:
    side = Side()
    side.answer("a", prompt(1), cache_hit_threshold=0.5)
    side.answer("b", prompt(1))
    side.answer("c", prompt(1), cache_hit_threshold=0.5)
    assert [side.ends[name].finish for name in "abc"] == [
        FinishReason.CACHE_THRESHOLD, FinishReason.LENGTH, FinishReason.LENGTH,
    ]  # fmt: skip
    side.engine.close()


@pytest.mark.slow
def test_ranks_that_divide_attention_by_request_have_thresholds() -> None:
    side = Side(tensor_parallel_size=2, enable_dp_attention=True, num_threads=2)
    side.answer("a", prompt(1), cache_hit_threshold=0.5)
    side.answer("b", prompt(1))
    side.answer("c", prompt(1), cache_hit_threshold=1.0)
    assert [side.ends[name].finish for name in "abc"] == [
        FinishReason.CACHE_THRESHOLD, FinishReason.LENGTH, FinishReason.LENGTH,
    ]  # fmt: skip
    side.engine.close()


class Gate:
    """Lets a store write when it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open, self.fails = Event(), False
        put = SharedFolder.put

        def wait(store: SharedFolder, keys: Sequence[bytes], pages: Sequence[Bytes]) -> None:
            self.is_open.wait(60)
            if self.fails:
                raise OSError("no room")
            put(store, keys, pages)

        monkeypatch.setattr(SharedFolder, "put", wait)


@pytest.mark.parametrize("fails", [False, True])
def test_the_answer_of_a_prompt_waits_for_its_pages(
    sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    gate = Gate(monkeypatch)
    gate.fails = fails
    prefill, both = sides(role="prefill"), sides()
    prefill.submit("a", prompt(1))
    both.submit("a", prompt(2), handover="publish")
    for side in (prefill, both):
        side.until(lambda side=side: side.engine.counters().num_running == 0 and side.num_computed >= LENGTH)
        for _ in range(5):
            side.step()
        assert "a" not in side.ends
    gate.is_open.set()
    for side in (prefill, both):
        side.until(lambda side=side: "a" in side.ends)
    assert (len(prefill.tokens["a"]), len(both.tokens["a"])) == (1, 8)


def test_pages_go_on_while_other_requests_only_decode(
    sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "PUBLISH_WAIT_S", 1e9)
    both = sides()
    both.submit("long", prompt(5, 40), SamplingParams(max_tokens=700, ignore_eos=True))
    both.until(lambda: bool(both.tokens.get("long")))
    both.submit("a", prompt(1), handover="publish")
    both.until(lambda: "a" in both.ends or "long" in both.ends)
    assert "a" in both.ends
    assert "long" not in both.ends


def test_the_answer_does_not_wait_for_ever(sides: Callable[..., Side], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "PUBLISH_WAIT_S", 0.2)
    gate = Gate(monkeypatch)
    prefill = sides(role="prefill")
    prefill.answer("a", prompt(1))
    gate.is_open.set()


def test_a_prefill_engine_makes_vectors_and_aborts_as_others_do(sides: Callable[..., Side]) -> None:
    prefill = sides(role="prefill")
    prefill.submit("v", prompt(1), pooling=PoolingParams())
    prefill.until(lambda: "v" in prefill.ends)
    assert (prefill.ends["v"].finish, len(prefill.ends["v"].vector) > 0) == (FinishReason.STOP, True)
    prefill.submit("a", prompt(3, 900))
    prefill.step()
    prefill.inbox.put(Abort(request_id="a"))
    prefill.until(lambda: "a" in prefill.ends)
    assert prefill.ends["a"].finish is FinishReason.ABORT
    long = prompt(4, 1000)  # as long an answer as the decode engine would give does not fit, and is not asked for
    prefill.answer("long", long, SamplingParams(max_tokens=5000))
    assert prefill.ends["long"].finish in (FinishReason.LENGTH, FinishReason.STOP)


@pytest.mark.parametrize("handover", ["publish", "await"])
def test_engines_that_share_nothing_refuse_to_hand_over(handover: Literal["publish", "await"], tmp_path: Path) -> None:
    for config in ({}, {"host_cache_gb": 0.02}):
        side = Side(**config)
        side.answer("a", prompt(1), handover=handover)
        refusal = side.ends["a"].refusal
        assert refusal is not None
        assert (refusal.param, refusal.code) == ("handover", "no_shared_cache")
        side.engine.close()
    log = str(tmp_path / "log")
    shared = {"host_cache_gb": 0.02, "remote_cache": str(tmp_path / "kv"), "remote_cache_gb": 0.05}
    side = Side(**shared, decision_log=log)
    side.answer("a", prompt(1), handover=handover)
    side.answer("b", prompt(1), cache_hit_threshold=0.5)
    refusals = [side.ends[name].refusal for name in "ab"]
    assert [one and one.param for one in refusals] == ["handover", "cache_hit_threshold"]
    side.engine.close()


def test_what_contradicts_is_refused(sides: Callable[..., Side]) -> None:
    prefill = sides(role="prefill")
    prefill.answer("a", prompt(1), handover="await")
    prefill.answer("b", prompt(1), cache_hit_threshold=0.5, is_search=True)
    texts = [prefill.ends[name].refusal for name in "ab"]
    assert [one and one.message for one in texts] == [
        "handover must be None, because this engine computes prompts only, got 'await'",
        "cache_hit_threshold must be 0 for a step of a search, got 0.5",
    ]
    with pytest.raises(ValueError, match=r"cache_hit_threshold must be in \[0, 1\], got nan"):
        RequestOptions(cache_hit_threshold=float("nan"))
    with pytest.raises(ValueError, match="handover must be publish, await or None, got 'both'"):
        RequestOptions(handover="both")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "both ways"}, "role must be one of both, prefill, decode, got 'both ways'"),
        ({"role": "decode"}, "role must be both without remote_cache, got 'decode'"),
        ({"role": "prefill", "cache_write_policy": "write_back"}, "cache_write_policy must be write_through with role"),
        ({"role": "decode", "decision_log": "x"}, "role must be both with decision_log"),
        ({"remote_cache": "redis://h?user=u", "remote_cache_gb": 1.0}, "remote_cache_gb must be None with redis://h,"),
        ({"remote_cache": "shm:a", "remote_cache_gb": None}, "remote_cache and remote_cache_gb must be given together"),
    ],
)
def test_wrong_configurations_are_errors(options: dict[str, Any], message: str) -> None:
    if options["role" if "role" in options else "remote_cache"] != "decode" or "decision_log" in options:
        options = {"host_cache_gb": 1.0, "remote_cache": "x", "remote_cache_gb": 1.0, **options}
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("shm:a/b", "name must match"),
        ("redis://:secret@h", "a redis URL must have no password"),
        ("redis://h?x=1", "a redis URL may have each of"),
        ("mooncake://h?devices=x", "devices of a mooncake URL must come with protocol=rdma"),
        ("mooncake://h", r"needs a package: pip install 'pagewood-kvpool\[mooncake\]'"),
        ("nixl+redis://h/x", "a redis URL must be redis://HOST:PORT/DATABASE"),
        ("nixl+redis://h", r"needs a package: pip install 'pagewood-kvpool\[nixl\]'"),
        ("http://h", "remote_cache must be a folder, shm:NAME, redis://HOST:PORT"),
    ],
)
def test_wrong_places_are_errors_at_once(place: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mooncake", "nixl_cu12"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    size = {} if place.startswith("redis") else {"remote_cache_gb": 0.05}
    with pytest.raises(ValueError, match=message) as caught:
        Side(host_cache_gb=0.02, remote_cache=place, **size)
    assert "secret" not in str(caught.value)


def test_a_redis_server_that_is_away_costs_a_miss() -> None:
    side = Side(host_cache_gb=0.02, remote_cache="redis://127.0.0.1:1?timeout_s=0.5", role="decode")
    plain = Side()
    assert side.answer("a", prompt(1)) == plain.answer("a", prompt(1))
    side.answer("b", prompt(2), cache_hit_threshold=0.1)
    assert side.ends["b"].finish is FinishReason.CACHE_THRESHOLD
    for one in (side, plain):
        one.engine.close()


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
def test_two_engines_share_a_redis_server(sides: Callable[..., Side]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", "/", "--loglevel", "warning")
    with subprocess.Popen(["redis-server", "--port", str(port), *options], stdout=subprocess.DEVNULL) as process:
        shared = {"remote_cache": f"redis://127.0.0.1:{port}", "remote_cache_gb": None}
        try:
            deadline_s = time.monotonic() + 30
            while True:
                with socket.socket() as probe:
                    if not probe.connect_ex(("127.0.0.1", port)):
                        break
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            expected = sides(remote_cache=None, remote_cache_gb=None).answer("a", prompt(1))
            prefill, decode = sides(role="prefill", **shared), sides(role="decode", **shared)
            assert prefill.answer("a", prompt(1)) == expected[:1]
            assert decode.answer("a", prompt(1)) == expected
            assert decode.ends["a"].num_cached_tokens == NUM_WHOLE
        finally:
            process.kill()
        assert decode.answer("b", prompt(2)) == sides(remote_cache=None, remote_cache_gb=None).answer("b", prompt(2))
