"""Ranks on CUDA devices of two hosts without a GPU: stand-ins and gloo, both hosts on this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from cuda_ranks import answered, small, use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from node_threads import following, free_port, over_nodes
from nodes import NodeProcess
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.offline.llm import LLM
from ranked_engines import PROMPTS, generate_for, group_of, is_alive, mixed_sampling
from seeded_faults import seed_fault

WAIT_S = 60


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CUDA, and their other ranks, use the stand-ins."""
    use_stand_ins(monkeypatch)


@pytest.mark.parametrize(("name", "per_node"), [("llama", 1), pytest.param("qwen3-moe", 2, marks=pytest.mark.slow)])
def test_two_hosts_answer_as_one_rank(
    name: str, per_node: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    config = over_nodes(2, small(tmp_path, tensor_parallel_size=2 * per_node))
    with following(config) as errors:
        assert answered(config) == expected
        assert not errors


def test_hosts_that_would_exchange_in_different_ways_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other host says that it has a device for each rank."""
    build(CASES["llama"], tmp_path)
    ranks_are_threads(monkeypatch)
    seed_fault([(cuda_rank, "follower", "has_device=_has_devices(config)", "has_device=True")], monkeypatch)
    config = over_nodes(2, small(tmp_path, tensor_parallel_size=2))
    with following(config), pytest.raises(ValueError, match="ranks must have a device each on all hosts, or share"):
        answered(config)


@pytest.fixture
def other_node(tmp_path: Path) -> Generator[tuple[NodeProcess, dict[str, Any]]]:
    """Start the second of two hosts; yield it, and the options of both."""
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024, "tensor_parallel_size": 2,
        "nnodes": 2, "master_addr": f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    node = NodeProcess(EngineConfig(**options, node_rank=1), tmp_path / "node.log")
    yield node, options
    node.close()


@pytest.mark.slow
def test_a_lost_rank_of_another_host_ends_the_group_and_the_next_one_computes(
    other_node: tuple[NodeProcess, dict[str, Any]],
) -> None:
    node, options = other_node
    found: list[list[Any]] = []
    pid = 0
    for turn in range(2):
        with LLM(**options) as llm:
            found.append([one.tokens for one in llm.generate(PROMPTS, mixed_sampling(len(PROMPTS)))])
            (pid,) = node.ranks()
            assert group_of(llm).pids() == [pid]
            if turn == 0:
                threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
                with pytest.raises(RunnerLostError, match=r"rank 1 .*\[rank 1 on node 1 \(127"):
                    generate_for(llm, WAIT_S)
    assert found[0] == found[1]
    assert not is_alive(pid)


def test_threads_are_not_needed_on_a_host_with_devices() -> None:
    EngineConfig(device="cuda", tensor_parallel_size=2, nnodes=2, master_addr="127.0.0.1:29500")
