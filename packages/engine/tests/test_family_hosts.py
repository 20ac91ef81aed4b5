"""Every family on ranks and stages of two and three hosts: the tokens of one host, to the bit, with the same ranks."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asked_twice import answered, small
from families.case import build
from families.registry import DIVIDED
from group_in_threads import ranks_are_threads
from node_threads import THREE_PARTS, following, over_nodes
from pagewood.engine.api import EngineConfig, Submit
from pagewood.engine.build import build_engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.observe.profiling import Profile
from pagewood.engine.runner.ranks import following as following_ranks

FEW = ("olmo2",)


def compared(
    folder: Path,
    num_nodes: int,
    per_node: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_stages: int = 1,
    **options: Any,
) -> tuple[list[list[int]], list[list[int]]]:
    """Return what a model answers on one host, and on several, with as many ranks."""
    ranks_are_threads(monkeypatch)
    count = num_nodes * per_node
    config = small(
        folder, num_threads=count, tensor_parallel_size=count // num_stages, pipeline_parallel_size=num_stages,
        **options,
    )  # fmt: skip
    expected = answered(config)
    config = replace(over_nodes(num_nodes, config), num_threads=per_node)
    with following(config) as errors:
        found = answered(config)
    assert not errors
    return expected, found


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow)
                                  for name in DIVIDED])  # fmt: skip
def test_tokens_are_those_of_the_same_ranks_on_one_host(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(DIVIDED[name], tmp_path)
    expected, found = compared(tmp_path, 2, 1, monkeypatch)
    assert found == expected


@pytest.mark.parametrize(("num_nodes", "per_node"), [pytest.param(2, 2, marks=pytest.mark.slow), (3, 1)])
def test_more_ranks_and_more_hosts(
    num_nodes: int, per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(THREE_PARTS if num_nodes == 3 else DIVIDED["qwen3-moe"], tmp_path)
    expected, found = compared(tmp_path, num_nodes, per_node, monkeypatch)
    assert found == expected


@pytest.mark.parametrize(("name", "num_nodes", "per_node", "num_stages"), [
    ("olmo2", 2, 1, 2),
    pytest.param("olmo2", 2, 2, 2, marks=pytest.mark.slow),  # stages of two ranks, each on a host
    pytest.param("olmo2", 4, 1, 2, marks=pytest.mark.slow),  # stages that are on two hosts
    pytest.param("qwen3", 2, 3, 3, marks=pytest.mark.slow),  # the second stage is on both hosts
    pytest.param("qwen3-moe", 2, 2, 2, marks=pytest.mark.slow),
    pytest.param("gemma4-small", 2, 1, 2, marks=pytest.mark.slow),
    pytest.param("deepseek3", 2, 1, 2, marks=pytest.mark.slow),
])  # fmt: skip
def test_stages_over_hosts(
    name: str, num_nodes: int, per_node: int, num_stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(DIVIDED[name], tmp_path)
    expected, found = compared(tmp_path, num_nodes, per_node, monkeypatch, num_stages=num_stages)
    assert found == expected


def test_spans_of_other_hosts_are_moved_to_the_clock_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    ahead_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    config = EngineConfig(num_threads=2, tensor_parallel_size=2, max_running=4, max_total_tokens=1024)
    config = replace(over_nodes(2, config), num_threads=1)
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    with following(config):
        engine = build_engine(config, inbox=inbox, outbox=outbox)
        profile = Profile(engine)
        profile.start()
        inbox.put(Submit(request_id="1", tokens=np.arange(9, dtype="<i4").tobytes()))
        pending = None
        for _ in range(5):
            pending = engine.advance(pending)
        monkeypatch.setattr(following_ranks, "time", clock)
        spans = profile.stop().spans
        engine.close()
    first, second = (min(one.start_s for one in spans if one.details.get("rank", 0) == rank) for rank in (0, 1))
    assert abs(first - second - ahead_s) < ahead_s / 2  # as if the steps of rank 1 had been so much earlier


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3-moe", {"expert_parallel": True, "expert_load": "ranks"}),
        ("deepseek3", {"enable_dp_attention": True, "prefix_cache": True}),
        ("deepseek3", {"enable_dp_attention": True, "speculative": "draft", "speculative_control": "fixed"}),
        ("llama", {"speculative": "ngram"}),
        ("llama", {"speculative": "suffix", "overlap": False}),
        ("llama", {"weights": "int8"}),
        ("llama", {"kv_cache_dtype": "int8", "chunked_prefill_size": 7}),
        ("llama", {"num_stages": 2, "speculative": "ngram", "speculative_control": "fixed"}),
        ("llama", {"num_stages": 2, "speculative": "suffix", "speculative_control": "fixed"}),
        ("llama", {"num_stages": 2, "kv_cache_dtype": "int8", "chunked_prefill_size": 7}),
    ],
)
def test_everything_else_works_on_several_hosts(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(DIVIDED[name], tmp_path)
    if options.get("speculative") == "draft":
        options = {**options, "speculative_model": str(tmp_path)}
    of_ranks = ("expert_parallel", "enable_dp_attention", "num_stages")
    others: dict[str, Any] = {key: value for key, value in options.items() if key not in of_ranks}
    answered(
        EngineConfig(model=str(tmp_path), num_threads=1, max_total_tokens=1024, **others)
    )  # compiles by one thread
    expected, found = compared(tmp_path, 2, 1, monkeypatch, **options)
    assert found == expected
