"""A whole CPU engine with adapters: tokens of each request are those of PEFT, whatever else the engine does.

Greedy tokens are compared with those of PEFT's model, and with those of the engine when it computes one request.
"""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from adapter_bench import NAMES, PROMPTS, START, Bench, greedy_tokens, write_models
from pagewood.engine.api import (
    EngineConfig,
    FinishReason,
    Flush,
    LoadAdapter,
    PoolingParams,
    SamplingParams,
    UnloadAdapter,
)
from pagewood.engine.observe.cache_events import CacheEvents
from pagewood.radixcache.events.hashing import block_hashes
from pagewood.radixcache.events.router import router_hash
from pagewood.radixcache.namespaces import CacheKey


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str | None, Any]]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_models(folder)


@pytest.fixture(scope="module")
def folder(models: tuple[Path, Mapping[str | None, Any]]) -> Path:
    return models[0]


@pytest.fixture(scope="module")
def expected(models: tuple[Path, Mapping[str | None, Any]]) -> Mapping[tuple[str | None, int], list[int]]:
    return greedy_tokens(models[1])


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks and a small pool": {
        "chunked_prefill_size": 8, "page_size": 4, "max_total_tokens": 256, "max_running": 9,
    },
    "drafts from the text": {"speculative": "ngram", "speculative_num_tokens": 4},
    "one slot": {"max_adapters": 1},
}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
def test_tokens_are_those_of_peft(
    kind: str, folder: Path, expected: Mapping[tuple[str | None, int], list[int]]
) -> None:
    """All prompts with all adapters and without, twice, so that the second time finds a cached prefix."""
    bench = Bench(folder, **OPTIONS[kind])
    for time in range(2):
        keys = {f"{time} {name} {number}": (name, number) for number in range(len(PROMPTS)) for name in NAMES}
        for request_id, (name, number) in keys.items():
            bench.ask(request_id, PROMPTS[number], name)
        bench.run(*keys)
        for request_id, key in keys.items():
            assert bench.outputs[request_id] == expected[key], request_id
    assert bench.ends["1 a 1"].num_cached_tokens > 0 or OPTIONS[kind].get("max_total_tokens") == 256
    bench.engine.close()


def test_prefixes_of_adapters_come_back_from_host_and_disk(
    folder: Path, expected: Mapping[tuple[str | None, int], list[int]], tmp_path: Path
) -> None:
    """Each prompt with each adapter, in a device memory that holds few of them, and then in another engine."""
    lower: dict[str, Any] = {"host_cache_gb": 0.02, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.05}
    for is_warm in (False, True):
        bench = Bench(folder, page_size=4, max_total_tokens=128, max_length=64, max_running=1, **lower)
        for time in range(2):
            for number in range(len(PROMPTS)):
                for name in NAMES:
                    request_id = f"{time} {name} {number}"
                    bench.ask(request_id, PROMPTS[number], name)
                    bench.run(request_id)
                    assert bench.outputs[request_id] == expected[name, number], request_id
                    num_cached = bench.ends[request_id].num_cached_tokens
                    if is_warm or time:
                        assert num_cached >= len(PROMPTS[number]) - 4, request_id
                    elif name != "c":  # "c" shares what lies before its activation
                        assert num_cached == 0, request_id
        bench.engine.close()


@pytest.mark.slow
def test_one_engine_computes_prompts_of_adapters_for_another(
    folder: Path, expected: Mapping[tuple[str | None, int], list[int]], tmp_path: Path
) -> None:
    """Through a shared store; the first token is that of the engine that computes prompts."""
    shared: dict[str, Any] = {
        "host_cache_gb": 0.02, "remote_cache": str(tmp_path), "remote_cache_gb": 0.05, "page_size": 4,
    }  # fmt: skip
    prefill, decode = Bench(folder, role="prefill", **shared), Bench(folder, role="decode", **shared)
    for name in NAMES:
        request_id = str(name)
        for bench in (prefill, decode):
            bench.ask(request_id, PROMPTS[1], name)
            bench.run(request_id)
        assert prefill.outputs[request_id] == expected[name, 1][:1]
        assert decode.outputs[request_id] == expected[name, 1]
        assert decode.ends[request_id].num_cached_tokens >= len(PROMPTS[1]) - 4
    prefill.engine.close()
    decode.engine.close()


def test_events_name_adapters_and_the_names_of_their_pages_are_known_before(folder: Path) -> None:
    """A router makes the names of a prompt's pages from its tokens, the adapter and the version that runs."""
    bench = Bench(folder, page_size=4)
    events = CacheEvents(lambda: bench.engine.prefix_cache)
    names: dict[str | None, list[int]] = {}
    for name in (None, "a", "b"):
        bench.ask(str(name), PROMPTS[1], name)
        bench.run(str(name))
        version = None if name is None else bench.engine.adapter_versions()[name]
        key = CacheKey.of(None, adapter=name, adapter_version=version)
        names[name] = [router_hash(one) for one in block_hashes(np.array(PROMPTS[1], np.int32), 4, key)]
        read: list[Any] = events.read()
        stored = [event for event in read if event["type"] == "BlockStored"]
        assert {event["lora_name"] for event in stored} == {name}
        assert {one for event in stored for one in event["block_hashes"]} >= {*names[name]}
    assert len({one for each in names.values() for one in each}) == 3 * len(names[None])
    bench.engine.close()


def test_an_adapter_with_an_activation_shares_the_prefix_of_the_model(
    folder: Path, expected: Mapping[tuple[str | None, int], list[int]]
) -> None:
    """Both ways, up to the page in which it is activated; from there on it has a prefix of its own."""
    for first, second in ((None, "c"), ("c", None)):
        bench = Bench(folder, page_size=4)
        for request_id, name in (("first", first), ("second", second), ("third", second), ("fourth", first)):
            bench.ask(request_id, PROMPTS[2], name)
            bench.run(request_id)
            assert bench.outputs[request_id] == expected[name, 2]
        cached = [bench.ends[one].num_cached_tokens for one in ("first", "second", "third", "fourth")]
        assert cached == [0, START // 4 * 4, 32, 32]
        bench.engine.close()
    assert expected["c", 0] == expected[None, 0]  # nothing activates it
    assert expected["c", 2] != expected[None, 2]


def test_loading_while_requests_run(folder: Path, expected: Mapping[tuple[str | None, int], list[int]]) -> None:
    """A name gets other contents: the running request ends as it began, later ones get the new adapter, and no prefix.

    The same contents again keep what is cached.
    """
    bench = Bench(folder, adapters="a")
    bench.ask("first", PROMPTS[0], "a")
    for _ in range(3):
        bench.step()
    bench.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "b"), replaces=True))
    bench.run("first", "load")
    assert bench.ends["load"].finish is FinishReason.STOP
    bench.ask("second", PROMPTS[0], "a")
    bench.run("second")
    assert (bench.outputs["first"], bench.outputs["second"]) == (expected["a", 0], expected["b", 0])
    assert bench.ends["second"].num_cached_tokens == 0
    bench.inbox.put(LoadAdapter(request_id="again", name="a", folder=str(folder / "b"), replaces=True))
    bench.run("again")
    bench.ask("third", PROMPTS[0], "a")
    bench.run("third")
    assert bench.outputs["third"] == expected["b", 0]
    assert bench.ends["third"].num_cached_tokens > 0
    bench.inbox.put(UnloadAdapter(request_id="unload", name="a"))
    bench.ask("fourth", PROMPTS[0], "a")
    bench.run("unload", "fourth")
    assert bench.ends["fourth"].refusal.code == "adapter_not_found"
    bench.engine.close()


def test_answers_to_commands_that_cannot_be_carried_out(folder: Path, tmp_path: Path) -> None:
    bench = Bench(folder, adapters="a")
    (tmp_path / "adapter_config.json").write_text("[]")
    commands = {
        "missing": LoadAdapter(request_id="missing", name="x", folder=str(tmp_path / "none")),
        "broken": LoadAdapter(request_id="broken", name="y", folder=str(tmp_path)),
        "there already": LoadAdapter(request_id="there already", name="a", folder=str(folder / "b")),
        "two pinned": LoadAdapter(request_id="two pinned", name="z", folder=str(folder / "b"), is_pinned=True),
        "unknown": UnloadAdapter(request_id="unknown", name="x"),
    }
    bench.inbox.put(LoadAdapter(request_id="pin", name="a", folder=str(folder / "a"), replaces=True, is_pinned=True))
    bench.run("pin")
    for command in commands.values():
        bench.inbox.put(command)
    bench.run(*commands)
    codes = [bench.ends[name].refusal.code for name in commands]
    assert codes == ["adapter_missing", "adapter_invalid", "adapter_exists", None, "adapter_not_found"]
    bench.engine.close()


def test_vectors_and_log_probabilities_depend_on_the_adapter(folder: Path) -> None:
    bench = Bench(folder)
    for name in NAMES:
        bench.ask(f"vector {name}", PROMPTS[2], name, pooling=PoolingParams(kind="mean"))
        sampling = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, prompt_logprobs=0)
        bench.ask(f"scores {name}", PROMPTS[2], name, sampling=sampling)
    bench.run(*(f"{kind} {name}" for name in NAMES for kind in ("vector", "scores")))
    assert len({bench.ends[f"vector {name}"].vector for name in NAMES}) == len(NAMES)
    bench.engine.close()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model_impl": "transformers"}, "max_adapters must be 0 with model_impl transformers"),
        ({"max_adapters": 0, "adapters": (("a", "x"),)}, "max_adapters must be >= 1 with adapters"),
        ({"adapters": (("a", "x"), ("a", "y"))}, "names of their own"),
        ({"max_adapter_rank": 0}, r"max_adapter_rank must be in \[1, 1024\], got 0"),
    ],
)
def test_what_does_not_go_together_is_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        EngineConfig(**{"max_adapters": 2, **fields})


def test_an_adapter_of_the_start_that_cannot_be_loaded_ends_it(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter a cannot be loaded: .*r must be in \[1, 2\], got 4"):
        Bench(folder, max_adapter_rank=2)


def test_an_engine_without_adapters_refuses_them(folder: Path) -> None:
    bench = Bench(folder, adapters="", max_adapters=0)
    bench.ask("one", PROMPTS[0], "a")
    bench.inbox.put(LoadAdapter(request_id="load", name="a", folder=str(folder / "a")))
    bench.inbox.put(Flush(request_id="flush"))
    bench.run("one", "load", "flush")
    assert bench.ends["one"].refusal.code == "adapter_not_found"
    assert bench.ends["load"].refusal.param == "name"
    bench.engine.close()
