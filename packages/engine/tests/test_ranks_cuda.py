"""Ranks on CUDA devices without a GPU: stand-ins and gloo, in threads and in processes, against one rank."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from asked_twice import outputs
from cuda_ranks import use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from pagewood.engine.api import EngineConfig, Grammar, PoolingParams, SamplingParams
from pagewood.engine.assembly.cuda import build as build_cuda
from pagewood.engine.assembly.cuda import rank as cuda_rank
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.offline.calls import EngineFailedError
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.ranks import following
from pagewood.engine.runner.ranks.group import Group
from pagewood.engine.runner.ranks.ranked_runner import RankedRunner
from seeded_faults import seed_fault
from stand_ins import flashinfer_torch
from stand_ins.cuda_rank import spawn
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

NAMES = ("llama", "gemma3", "olmo2", "qwen3-moe", "deepseek3")
"""Plain, with windows, with norms of all heads, with experts, with latents and experts."""
TEXTS = ["Hello, my name is", "The capital of France is", "1 2 3 4 5 6"]


def next_of(devices: Iterator[RecordingDevice]) -> tuple[RecordingDevice, Any]:
    return next(devices), flashinfer_torch


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CUDA, and their other ranks, use the stand-ins."""
    use_stand_ins(monkeypatch)


@pytest.mark.parametrize(
    ("name", "batch_invariant"),
    [("llama", True), ("deepseek3", False), *(pytest.param(name, False, marks=pytest.mark.slow) for name in NAMES[:4])],
)
def test_tokens_are_those_of_one_rank(
    name: str, batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    found: list[list[list[int]]] = []
    for count in (1, 2):
        config = EngineConfig(
            model=str(tmp_path), device="cuda", dtype="float32", tensor_parallel_size=count, max_running=4,
            chunked_prefill_size=16, page_size=4, max_total_tokens=1024, batch_invariant=batch_invariant,
        )  # fmt: skip
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)
        assert isinstance(engine.runner, RankedRunner) == (count > 1)
        found.append(outputs(engine, inbox, outbox))
    assert found[1] == found[0]


def test_ranks_on_devices_divide_experts_as_wholes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    build(CASES["qwen3-moe"], tmp_path)
    ranks_are_threads(monkeypatch)
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"layers": {"0": [1, 0, [0, 1], 0, 1, 0]}}))
    found: list[list[list[int]]] = []
    whole: dict[str, Any] = {}
    divided: dict[str, Any] = {"tensor_parallel_size": 2, "expert_parallel": True, "expert_map": str(file)}
    for options in (whole, divided):
        config = EngineConfig(
            model=str(tmp_path), device="cuda", dtype="float32", max_running=4, chunked_prefill_size=16, page_size=4,
            max_total_tokens=1024, **options,
        )  # fmt: skip
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)
        found.append(outputs(engine, inbox, outbox))
    assert found[1] == found[0]


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ranks_with_a_device_each_exchange_in_graphs(
    batch_invariant: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    """The group of torch is a stand-in too, with the same methods."""
    build(CASES["llama"], tmp_path)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found: list[list[list[int]]] = []
    for count in (1, 2):
        config = EngineConfig(
            model=str(tmp_path), device="cuda", dtype="float32", tensor_parallel_size=count, max_running=4,
            chunked_prefill_size=16, page_size=4, max_total_tokens=1024, batch_invariant=batch_invariant,
        )  # fmt: skip
        device, inbox, outbox = RecordingDevice(), MemoryInbox(), MemoryOutbox()
        engine = build_on(device, flashinfer_torch, config, inbox=inbox, outbox=outbox)
        found.append(outputs(engine, inbox, outbox))
        assert device.num_replayed > 0
    assert found[1] == found[0]


@contextmanager
def on_cuda(**options: Any) -> Generator[LLM]:
    whole: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024}
    with LLM(**{**whole, **options}) as llm:
        yield llm


def group_of(llm: LLM) -> Group:
    runner = llm._engine._engine.runner  # pyright: ignore[reportPrivateUsage]
    assert isinstance(runner, RankedRunner)
    group = runner._group  # pyright: ignore[reportPrivateUsage]
    assert isinstance(group, Group)
    return group


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_processes_answer_as_one_rank(stand_ins: None) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True)
    bound = SamplingParams(max_tokens=12, temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(ab|cd)+ef"))
    found: list[tuple[list[Any], Any]] = []
    pids: list[int] = []
    for count in (1, 2):
        with on_cuda(tensor_parallel_size=count) as llm:
            if count > 1:
                pids = group_of(llm).pids()
                assert all(map(is_alive, pids))
            answers = llm.generate(TEXTS * 2, [greedy, greedy, bound, bound, greedy, greedy])
            found.append(([one.tokens for one in answers], llm.embed(TEXTS, PoolingParams(kind="mean"))))
    assert found[1][0] == found[0][0]
    np.testing.assert_allclose(found[1][1], found[0][1], atol=3e-2)
    assert pids
    assert not any(map(is_alive, pids))


def generate_for_ever(llm: LLM) -> None:
    while True:
        llm.generate(TEXTS, SamplingParams(max_tokens=200, ignore_eos=True))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_group_with_a_typed_error(number: signal.Signals, stand_ins: None) -> None:
    with on_cuda(tensor_parallel_size=2) as llm:
        (pid,) = group_of(llm).pids()
        timer = threading.Timer(0.5, os.kill, (pid, number))
        timer.start()
        with pytest.raises(RunnerLostError, match="rank 1"):
            generate_for_ever(llm)
        with pytest.raises(EngineFailedError, match="rank 1"):
            llm.generate(TEXTS)
    assert not is_alive(pid)


_OTHER_SEED = """assert isinstance(batch, Batch)
                batch.sampling.words[:, 0] += 1"""


def test_a_rank_that_draws_other_tokens_ends_the_group(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(following, "_follow", "assert isinstance(batch, Batch)", _OTHER_SEED)], monkeypatch)
    ranks_are_threads(monkeypatch)
    with on_cuda(tensor_parallel_size=2) as llm, pytest.raises(RunnerLostError, match="rank 1 has other tokens"):
        llm.generate(TEXTS, SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True))


def test_a_model_that_cannot_be_divided_is_refused_before_a_process_is_started(
    stand_ins: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(cuda_rank, "Group")
    with pytest.raises(ValueError, match="must be a multiple of tensor_parallel_size 3, got"):
        LLM(device="cuda", tensor_parallel_size=3)


@pytest.mark.slow
def test_what_a_rank_refuses_at_start_is_the_error(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has less memory than rank 0 here."""
    monkeypatch.setattr(cuda_rank, "Group", partial(Group, spawn=partial(spawn, free_bytes=1 << 20)))
    with pytest.raises(ValueError, match=r"rank 1: KV memory of .* lacks"):
        LLM(device="cuda", dtype="float16", tensor_parallel_size=2, max_running=4, max_total_tokens=1024)


def test_all_ranks_have_the_pages_of_the_smallest(stand_ins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_are_threads(monkeypatch)
    sizes: list[int] = []
    for own, other in ((1 << 28, 1 << 28), (1 << 30, 1 << 28), (1 << 28, 1 << 30)):
        devices = iter([RecordingDevice(free_bytes=own), RecordingDevice(free_bytes=other)])
        monkeypatch.setattr(build_cuda, "open_cuda", partial(next_of, devices))
        with on_cuda(tensor_parallel_size=2, max_total_tokens=None) as llm:
            sizes.append(llm._engine._engine.info.num_pages)  # pyright: ignore[reportPrivateUsage]
    assert sizes[0] > 0
    assert len(set(sizes)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("skips", "rank 1 (does not take part in a step|has other tokens)"),
        ("old tables", "rank 1 has other tables of rows than rank 0 after step 16"),
        ("other seed", "rank 1 has other tokens"),
    ],
)
def test_a_rank_that_follows_wrongly_ends_its_group(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch, fault=fault)
    with on_cuda(tensor_parallel_size=2) as llm, pytest.raises(RunnerLostError, match=message):
        llm.generate(TEXTS, SamplingParams(max_tokens=60, temperature=1.0, ignore_eos=True))
