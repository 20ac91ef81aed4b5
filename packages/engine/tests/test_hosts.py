"""A model on several hosts, which are groups of processes here: the tokens of one host, and what ends the group."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asked_twice import outputs
from families.case import build
from families.registry import DIVIDED
from node_threads import THREE_PARTS, free_port
from nodes import NodeProcess, Proxy
from pagewood.engine.api import EngineConfig, SamplingParams
from pagewood.engine.assembly.ranks.nodes import follow_node_0, gathered
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.model_digest import ModelDigest
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.hosts.meeting import RefusedError
from pagewood.engine.runner.ranks.hosts.relay import compile_frames
from pagewood.engine.runner.ranks.hosts.secret import WrongSecretError
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner

WAIT_S = 60
"""Then a process counts as hung."""
PROMPTS = ["Hello, my name is", "The capital of France is", "1 2 3 4 5 6", "Once upon a time, there was a king who"]
SAMPLING = [SamplingParams(max_tokens=30, temperature=2.0 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]
PROGRAM = Path(__file__).parent / "support" / "first_node.py"


def options_of(num_nodes: int = 2, per_node: int = 1, **others: Any) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "tensor_parallel_size": num_nodes * per_node,
        "nnodes": num_nodes,
        "num_threads": per_node,
        "master_addr": f"127.0.0.1:{free_port()}",
        "max_running": 4,
        "max_total_tokens": 4096,
    }
    return {**whole, **others}


StartNode = Callable[..., NodeProcess]


@pytest.fixture
def start(tmp_path: Path) -> Generator[StartNode]:
    """Return a function that starts a node; all are ended."""
    nodes: list[NodeProcess] = []

    def start(options: dict[str, Any], number: int = 1, **others: Any) -> NodeProcess:
        whole: dict[str, Any] = {**options, "node_rank": number, **others}
        nodes.append(NodeProcess(EngineConfig(**whole), tmp_path / f"node-{number}.log"))
        return nodes[-1]

    yield start
    for one in nodes:
        one.close()


def group_of(llm: LLM) -> Group:
    runner = llm._engine._engine.runner  # pyright: ignore[reportPrivateUsage]
    assert isinstance(runner, RankedRunner)
    group = runner._group  # pyright: ignore[reportPrivateUsage]
    assert isinstance(group, Group)
    return group


def tokens_of(llm: LLM) -> list[tuple[int, ...]]:
    return [one.tokens for one in llm.generate(PROMPTS, SAMPLING)]


def until(is_true: Callable[[], bool], *, limit_s: float = WAIT_S) -> None:
    ends_s = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < ends_s
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    return not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def answered(config: EngineConfig) -> list[list[int]]:
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    return outputs(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox)


def generate_for(llm: LLM, duration_s: float) -> None:
    ends_s = time.monotonic() + duration_s
    while time.monotonic() < ends_s:
        llm.generate(PROMPTS, SamplingParams(max_tokens=100, ignore_eos=True))


@pytest.mark.slow
def test_a_lost_rank_of_another_host_ends_the_group_with_a_typed_error(start: StartNode) -> None:
    with LLM(num_threads=1, max_running=4) as alone:
        expected = tokens_of(alone)
    options = options_of()
    node = start(options)
    with LLM(**options) as llm:
        assert tokens_of(llm) == expected
        (pid,) = node.ranks()
        assert group_of(llm).pids() == [pid]
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
        with pytest.raises(RunnerLostError, match=r"process of rank 1 has ended with code -9 \[rank 1 on node 1 \(127"):
            generate_for(llm, WAIT_S)
    until(lambda: "has ended: the process of rank 1 has ended with code -9" in node.log)
    assert not is_alive(pid)
    assert node.process.poll() is None


STAGES = {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}
BY_REQUEST = {"enable_dp_attention": True}


@pytest.mark.slow
@pytest.mark.parametrize("others", [{}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}])
def test_groups_follow_each_other(others: dict[str, Any], start: StartNode) -> None:
    """With the tokens of the same four ranks on one host; a rank, another node and then nobody is lost."""
    options = options_of(2, 2, **others)
    whole: dict[str, Any] = {name: value for name, value in options.items() if name not in ("nnodes", "master_addr")}
    whole["num_threads"] = 4
    with LLM(**whole) as llm:
        expected = tokens_of(llm)
    node = start(options)
    for turn in range(3):
        with LLM(**options) as llm:
            assert tokens_of(llm) == expected
            ranks = node.ranks()
            assert len(ranks) == 2
            if turn == 0:
                os.kill(ranks[1], signal.SIGKILL)
            elif turn == 1:
                node.process.kill()
            if turn < 2:
                with pytest.raises(RunnerLostError, match="on node 1"):
                    generate_for(llm, WAIT_S)
        for pid in ranks:
            until(partial(has_ended, pid))
        if turn == 1:
            node = start(options)
    until(lambda: "has ended: the group is closed" in node.log)


@pytest.mark.slow
def test_three_hosts(start: StartNode, tmp_path: Path) -> None:
    build(THREE_PARTS, tmp_path)
    options = options_of(3, model=str(tmp_path), page_size=4, chunked_prefill_size=16, max_total_tokens=1024)
    whole: dict[str, Any] = {name: value for name, value in options.items() if name not in ("nnodes", "master_addr")}
    whole["num_threads"] = 3
    expected = answered(EngineConfig(**whole))
    for number in (1, 2):
        start(options, number)
    for _ in range(2):
        assert answered(EngineConfig(**options)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "node", "node 0"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(
    ("others", "moment_s"),
    [
        pytest.param({}, 0.5, id="parts"),
        pytest.param(STAGES, 0.5, id="stages"),
        *(pytest.param(BY_REQUEST, random.Random(seed).uniform(0, 2), id=f"requests {seed}") for seed in range(3)),
    ],
)
def test_whoever_is_lost_ends_the_group_on_all_hosts(
    victim: str, number: signal.Signals, others: dict[str, Any], moment_s: float, start: StartNode
) -> None:
    """Ranks that are stopped end when they may go on."""
    options = options_of(**others)
    node = start(options)
    command = [sys.executable, str(PROGRAM), json.dumps(options)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        try:
            assert first.stdout.readline() == "ready\n"
            time.sleep(moment_s)
            (rank,) = node.ranks()
            pid = {"rank": rank, "node": node.process.pid, "node 0": first.pid}[victim]
            os.kill(pid, number)
            if victim == "node 0":
                until(lambda: "has ended: " in node.log)
                until(lambda: not is_alive(rank))
                assert "node 0 (127.0.0.1)" in node.log or "rank 0 " in node.log
            else:
                told = first.stdout.readline()
                assert told.endswith("on node 1 (127.0.0.1)]\n")
                assert first.wait(WAIT_S) == 0
            if victim == "node":
                if number == signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
                until(lambda: not is_alive(rank))
            else:
                until(lambda: "has ended: " in node.log)
                assert not is_alive(rank)
            if number == signal.SIGSTOP and victim == "node 0":
                os.kill(pid, signal.SIGCONT)
                told = first.stdout.readline()  # what the other node has told, or that it has gone
                assert "no sign of life" in told or "does not take part" in told or "node 1 (127.0.0.1)" in told
                assert first.wait(WAIT_S) == 0
        finally:
            first.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("is_idle", "others"), [(True, {}), (False, {}), (False, STAGES)])
def test_a_network_that_stops_to_forward_ends_the_group_on_both_sides(
    is_idle: bool, others: dict[str, Any], start: StartNode
) -> None:
    options = options_of(**others)
    proxy = Proxy(int(options["master_addr"].rpartition(":")[2]))
    node = start(options, master_addr=f"127.0.0.1:{proxy.port}")
    with LLM(**options) as llm:
        tokens_of(llm)
        (rank,) = node.ranks()
        threading.Timer(0.0 if is_idle else 0.5, proxy.is_silent.set).start()
        if is_idle:
            assert (group_of(llm).segment.wait_for_end(WAIT_S) or "").startswith("node 1 (127.0.0.1) has given")
        with pytest.raises(RunnerLostError, match=r"\[rank 1 on node 1"):
            generate_for(llm, WAIT_S)
        until(lambda: "has ended: " in node.log)  # by the node, or by its rank
        assert re.search("has ended: (node|rank) 0 .*(no sign of life|not take part)", node.log)
        until(lambda: not is_alive(rank))
    proxy.close()


def test_a_node_that_differs_is_refused_by_name(tmp_path: Path) -> None:
    """With the digests of real folders, and the fields of real configurations."""
    first, other = tmp_path / "first", tmp_path / "other"
    for folder in (first, other):
        build(DIVIDED["olmo2"], folder)
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(config + " ")
    options = options_of(model=str(first))
    is_over = threading.Event()

    def progress(what: str, done: int, total: int) -> None:
        if is_over.is_set():
            raise InterruptedError

    def wait_for_nodes() -> None:
        config = EngineConfig(**options).resolved()
        with pytest.raises(InterruptedError):
            gathered(config, ModelDigest(first), progress)

    thread = threading.Thread(target=wait_for_nodes, daemon=True)
    compile_frames()
    thread.start()
    for others, message in (
        ({"model": str(other)}, "model must have the same files on all nodes"),
        ({"weights": "int8"}, 'weights must be "auto" as on node 0, got "int8" on node 1'),
        ({"seed": 5}, "seed must be 0 as on node 0, got 5 on node 1"),
        ({"host_cache_gb": 1.0}, "host_cache_gb must be null as on node 0, got 1.0 on node 1"),
    ):
        wrong: dict[str, Any] = {**options, "node_rank": 1, **others}
        with pytest.raises(RefusedError, match=message):
            follow_node_0(EngineConfig(**wrong), has_stopped=lambda: False)
    secret = tmp_path / "secret"
    secret.write_text("a secret of some length")
    secret.chmod(0o600)
    with pytest.raises(WrongSecretError, match="node_secret_file must hold the same"):
        follow_node_0(EngineConfig(**options, node_rank=1, node_secret_file=str(secret)), has_stopped=lambda: False)
    is_over.set()
    thread.join(WAIT_S)
    assert not thread.is_alive()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"nnodes": 0}, "nnodes must be >= 1, got 0"),
    ({"nnodes": 3}, "tensor_parallel_size must be a multiple of nnodes 3, got 2"),
    (
        {"nnodes": 3, "pipeline_parallel_size": 2},
        "tensor_parallel_size times pipeline_parallel_size must be a multiple of nnodes 3, got 4",
    ),
    ({"node_rank": 2}, r"node_rank must be in \[0, 2\) with nnodes 2, got 2"),
    ({"node_rank": -1}, r"node_rank must be in \[0, 2\) with nnodes 2, got -1"),
    ({"master_addr": None}, "master_addr must be HOST:PORT with nnodes 2, got None"),
    ({"master_addr": "10.0.0.1"}, "master_addr must be like 10.0.0.1:29500"),
    ({"master_addr": "10.0.0.1:5"}, "node_secret_file must be given unless master_addr is a loopback address, got 10"),
    (
        {"node_secret_file": "x", "insecure_no_node_secret": True},
        "insecure_no_node_secret must be False with node_secret_file, got True",
    ),
    ({"model_impl": "transformers"}, "tensor_parallel_size must be 1 with model_impl transformers, got 2"),
    ({"tensor_parallel_size": 4}, "num_threads must be at least tensor_parallel_size 4 over nnodes 2, got 1"),
    ({"nnodes": 1, "master_addr": "127.0.0.1:5"}, "master_addr must be None with nnodes 1, got '127.0.0.1:5'"),
    ({"nnodes": 1, "master_addr": None, "node_rank": 1}, "node_rank must be 0 with nnodes 1, got 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {**options_of(), **options}
    with pytest.raises(ValueError, match=message):
        EngineConfig(**whole)


def test_an_engine_is_on_node_0_only() -> None:
    with pytest.raises(ValueError, match="node_rank must be 0 for an engine, got 1"):
        build_engine(EngineConfig(**options_of(node_rank=1)), inbox=MemoryInbox(), outbox=MemoryOutbox())
    with pytest.raises(ValueError, match="node_rank must be at least 1 for a node that follows, got 0"):
        follow_node_0(EngineConfig(**options_of()), has_stopped=lambda: False)
