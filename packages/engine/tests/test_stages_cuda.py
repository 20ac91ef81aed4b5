"""Stages on CUDA devices without a GPU: stand-ins and gloo, in threads and in processes, against one rank."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from cuda_ranks import answered, small, use_stand_ins
from families.case import build
from families.registry import CASES
from group_in_threads import ranks_are_threads
from pagewood.engine.api import Grammar, LogitsProcessor, PoolingParams, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.offline.calls import EngineFailedError
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda import stage_relay
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.cuda.stage_relay import GlooChannel
from ranked_engines import PROMPTS, generate_for, group_of, is_alive, mixed_sampling
from seeded_faults import Edit, seed_fault, slow_ones
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

WAIT_S = 60
NAMES = ("llama", "gemma3", "gemma4-small", "qwen3-moe", "deepseek3")
"""Plain, with windows, with inputs of layers, with experts, with latents and experts."""
FEW = ("llama", "gemma4-small")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines for CUDA, and their other ranks, use the stand-ins."""
    use_stand_ins(monkeypatch)


def on_cuda(**options: Any) -> LLM:
    whole: dict[str, Any] = {"device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024}
    return LLM(**{**whole, **options})


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_tokens_are_those_of_one_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    assert answered(small(tmp_path, pipeline_parallel_size=2)) == expected
    if name in FEW:
        return
    if len(ModelConfig.from_folder(tmp_path).cuts) > 1:
        assert answered(small(tmp_path, pipeline_parallel_size=3)) == expected
    assert answered(small(tmp_path, pipeline_parallel_size=2, tensor_parallel_size=2)) == expected


@pytest.mark.parametrize("name", FEW)
def test_stages_with_a_device_each_pass_states_around_graphs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    """The groups of torch are stand-ins too, with the same methods."""
    build(CASES[name], tmp_path)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    expected = answered(small(tmp_path))
    device = RecordingDevice()
    num_ranks = 2 if name == "llama" else 1
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": num_ranks}
    assert answered(small(tmp_path, **options), device=device) == expected
    assert device.num_replayed > 0


def test_what_the_last_stage_makes_is_the_same(stand_ins: None) -> None:
    """Grammars, log probabilities of outputs and prompts, vectors, and processors; the stages are processes."""
    bound = SamplingParams(max_tokens=12, temperature=1.0, seed=3, grammar=Grammar(kind="regex", text="(ab|cd)+ef"))
    reported = SamplingParams(max_tokens=5, temperature=0.0, logprobs=2, prompt_logprobs=1)
    changed = SamplingParams(max_tokens=8, logits_processors=(LogitsProcessor(name="follow"),), ignore_eos=True)
    found: list[Any] = []
    pids: list[int] = []
    for count in (1, 2):
        options: dict[str, Any] = {"logits_processors": (("follow", "logits_functions:follow_text"),)}
        with on_cuda(pipeline_parallel_size=count, **options) as llm:
            pids += group_of(llm).pids() if count > 1 else []
            sampling = [*mixed_sampling(3), bound, reported, changed]
            answers = llm.generate((PROMPTS * 2)[:6], sampling)
            again = llm.generate((PROMPTS * 2)[:6], sampling)
            found.append(
                (
                    [one.tokens for one in (*answers, *again)],
                    [(one.logprobs, one.prompt_logprobs) for one in answers],
                    llm.embed(PROMPTS, PoolingParams(kind="mean")),
                )
            )
    assert found[0][:2] == found[1][:2]
    np.testing.assert_array_equal(found[0][2], found[1][2])
    assert pids
    assert not any(map(is_alive, pids))


NGRAM: dict[str, Any] = {"speculative": "ngram", "speculative_control": "fixed", "speculative_num_tokens": 3}


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "options"),
    [
        (2, 1, {}),
        pytest.param(3, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, {}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"overlap": True}, marks=pytest.mark.slow),
        pytest.param(2, 1, {"speculative_control": "adaptive"}, marks=pytest.mark.slow),
    ],
)
def test_each_stage_finds_the_same_ngrams(
    num_stages: int, num_ranks: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    stand_ins: None,
) -> None:  # fmt: skip
    build(CASES["llama"], tmp_path)
    ranks_are_threads(monkeypatch)
    expected = answered(small(tmp_path))
    ranked: dict[str, Any] = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_ranks}
    assert answered(small(tmp_path, **{**NGRAM, **options}, **ranked)) == expected


def test_drafts_of_stages_are_accepted_also_with_grammars(stand_ins: None) -> None:
    """Beside requests that are sampled; the stages are processes."""
    bound = SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar(kind="regex", text="[ab ]{60}"))
    found: list[Any] = []
    for options in ({}, {**NGRAM, "pipeline_parallel_size": 2}):
        with on_cuda(**options) as llm:
            answers = llm.generate(PROMPTS * 2, [*mixed_sampling(4), *[bound] * 4])
            found.append([one.tokens for one in answers])
            counts = llm.counters().speculation
    assert found[0] == found[1]
    assert counts is not None
    assert counts.num_accepted > 0


OF_DRAFTS: dict[str, list[Edit]] = {
    "other drafts in the last stage": [
        (CUDARunner, "_draft", "drafts.flatten()", "(drafts + int(self._is_last)).flatten()"),
    ],
    "only the first token is fed back": [
        (CUDARunner, "learn", "counts = result.counts", "counts = np.minimum(result.counts, 1)"),
        (CUDARunner, "learn", "result.tokens))", "result.tokens[np.cumsum(result.counts) - result.counts]))"),
        (CUDARunner, "learn", "len(result.tokens)", "counts.sum()"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", slow_ones(OF_DRAFTS, "other drafts in the last stage"))
def test_stages_with_other_drafts_end_their_group(name: str, monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
    ranks_are_threads(monkeypatch)
    seed_fault(OF_DRAFTS[name], monkeypatch)
    bound = SamplingParams(max_tokens=40, temperature=0.0, grammar=Grammar(kind="regex", text="[ab ]{60}"))
    message = "rank 1 has (other tokens or drafts than rank 0 in step|received other hidden states)"
    with on_cuda(**NGRAM, pipeline_parallel_size=2) as llm, pytest.raises(RunnerLostError, match=message):
        llm.generate(PROMPTS, bound)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_stage_ends_the_group_with_a_typed_error(number: signal.Signals, stand_ins: None) -> None:
    with on_cuda(pipeline_parallel_size=2) as llm:
        (pid,) = group_of(llm).pids()
        threading.Timer(0.5, os.kill, (pid, number)).start()
        with pytest.raises(RunnerLostError, match=r"rank 1"):
            generate_for(llm, WAIT_S)
        with pytest.raises(EngineFailedError, match="rank 1"):
            llm.generate(PROMPTS)
    assert not is_alive(pid)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("skips", "rank 1 .*(another batch|other hidden states|does not take part|not computed step)"),
        ("old tables", "rank 1 has other tables of rows than rank 0 after step 16"),
    ],
)
def test_a_stage_that_follows_wrongly_ends_its_group(fault: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch, fault=fault)
    with on_cuda(pipeline_parallel_size=2) as llm, pytest.raises(RunnerLostError, match=message):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 60))


@pytest.mark.slow
def test_another_seed_on_one_rank_of_the_last_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch, fault="3:other seed")
    options: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    with on_cuda(**options) as llm, pytest.raises(RunnerLostError, match="rank 3 has other tokens"):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 40))


_TABLES = "rank 1 has other tables of rows than rank 0 after"
FAULTS: dict[str, tuple[list[Edit], str]] = {
    "tokens are not fed back": (
        [(CUDARunner, "learn", "if self._relay is None or self._relay.is_last:", "if True:")], _TABLES
    ),
    "tokens are fed back to the position before": (
        [(CUDARunner, "learn", "np.repeat(places, counts)", "np.repeat(places - 1, counts)")], _TABLES
    ),
    "states have another sign": (
        [(GlooChannel, "receive", "x.copy_(found)", "x.copy_(-found)")],
        "rank 1 has received other hidden states than rank 0 sent in step",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", slow_ones(FAULTS, "tokens are fed back to the position before"))
def test_a_stage_that_differs_ends_its_group(name: str, monkeypatch: pytest.MonkeyPatch, stand_ins: None) -> None:
    edits, message = FAULTS[name]
    ranks_are_threads(monkeypatch)
    seed_fault(edits, monkeypatch)
    with on_cuda(pipeline_parallel_size=2) as llm, pytest.raises(RunnerLostError, match=message):
        llm.generate(PROMPTS, mixed_sampling(len(PROMPTS), 40))


def test_a_graph_that_reads_the_states_of_the_step_before_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_ins: None
) -> None:
    """The seeded fault changes tokens: what is witnessed is what has been received."""
    build(CASES["llama"], tmp_path)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    expected = answered(small(tmp_path))
    edit: Edit = (
        stage_relay.StageRelay, "fill_graph", "self._take(memory[:num_tokens])",
        "self._take(torch.empty_like(memory[:num_tokens]))",
    )  # fmt: skip
    seed_fault([edit], monkeypatch)
    assert answered(small(tmp_path, pipeline_parallel_size=2)) != expected


def test_more_stages_than_layers_are_refused_before_a_process_is_started(stand_ins: None) -> None:
    with pytest.raises(ValueError, match=r"pipeline_parallel_size must be at most .* got 50"):
        on_cuda(pipeline_parallel_size=50)
