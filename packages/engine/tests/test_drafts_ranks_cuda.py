"""Drafts of ranks on CUDA devices without a GPU: each drafts with its part, and all verify the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from cuda_ranks import answered, small, use_stand_ins
from group_in_threads import ranks_are_threads
from pagewood.engine.api import Grammar, SamplingParams
from pagewood.engine.core.loop import RunnerLostError
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.offline.llm import LLM
from pagewood.engine.runner.cuda.drafts.verify import InexactRows
from ranked_engines import PROMPTS, mixed_sampling
from seeded_faults import Edit, seed_fault
from stand_ins import tiny_heads
from stand_ins.nccl_gloo import NCCLGroup
from stand_ins.recording_device import RecordingDevice

KINDS = ("ngram", "draft", "eagle", "mtp", "experts")


def drafting(kind: str) -> dict[str, Any]:
    """Return the options of an engine that drafts in each step."""
    options: dict[str, Any] = {"speculative": kind, "speculative_control": "fixed", "speculative_num_tokens": 3}
    if kind in ("eagle", "mtp", "experts"):
        target, head = tiny_heads.folders_of(kind)
        options |= {"model": str(target), "speculative": "eagle"}
        return options | ({"speculative_model": str(head)} if kind == "eagle" else {})
    return (
        options
        | {"model": str(model_folder(None))}
        | ({"speculative_model": str(model_folder(None))} if kind == "draft" else {})
    )


@pytest.mark.parametrize(
    "kind", [kind if kind in ("ngram", "eagle") else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_drafts_of_ranks_do_not_change_the_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options = drafting(kind)
    plain = {"speculative": "off", "speculative_model": None}
    expected = answered(small(Path(), **{**options, **plain, "speculative_control": "adaptive"}), vocab_size=50)
    for control in ("fixed", "adaptive"):
        config = small(Path(), **{**options, "speculative_control": control}, tensor_parallel_size=2)
        assert answered(config, vocab_size=50) == expected


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_drafts_are_verified_in_graphs_of_ranks(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", NCCLGroup, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = small(Path(), **drafting("eagle"), overlap=overlap)
    device = RecordingDevice()
    expected = answered(config, vocab_size=50)
    ranked = replace(config, tensor_parallel_size=2)
    assert answered(ranked, device=device, vocab_size=50) == expected
    assert device.num_replayed > 0


@pytest.mark.slow
def test_drafts_of_processes_with_grammars_and_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for their steps at times of their own."""
    use_stand_ins(monkeypatch)
    bound = SamplingParams(max_tokens=20, temperature=0.0, grammar=Grammar(kind="regex", text="[ab ]{60}"))
    found: list[list[Any]] = []
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024, "speculative": "ngram",
        "speculative_control": "fixed",
    }  # fmt: skip
    for count, num_steps in ((1, 1), (2, 1), (2, 3)):
        with LLM(**options, tensor_parallel_size=count, num_continuous_decode_steps=num_steps) as llm:
            answers = llm.generate(PROMPTS * 2, [*mixed_sampling(4), *[bound] * 4])
            found.append([one.tokens for one in answers])
            counts = llm.counters().speculation
            assert counts is not None
            assert counts.num_accepted > 0
    assert found[0] == found[1] == found[2]


def test_a_rank_that_drafts_with_another_seed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    use_stand_ins(monkeypatch, fault="other seed")
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float16", "max_running": 4, "max_total_tokens": 1024, "tensor_parallel_size": 2,
        "speculative": "ngram", "speculative_control": "fixed",
    }  # fmt: skip
    with LLM(**options) as llm, pytest.raises(RunnerLostError, match="rank 1 has other tokens"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=40, temperature=1.0, ignore_eos=True))


def test_a_rank_that_treats_its_rows_as_exact_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all ranks alike, so that the tokens are wrong, and not only the group ended."""
    use_stand_ins(monkeypatch)
    ranks_are_threads(monkeypatch)
    options = drafting("ngram")
    expected = answered(small(Path(), **options))
    edit: Edit = (InexactRows, "of", "self._num_launched - self._num_in_flight", "self._num_launched")
    seed_fault([edit], monkeypatch)
    assert answered(small(Path(), **options, tensor_parallel_size=2)) != expected
