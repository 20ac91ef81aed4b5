"""Models with sliding windows give memory back on CUDA too: on a recording device, with a stand-in for the kernels."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from answered import answers_to, request, tokens_of
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda.build import build_on
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.runner.cuda import attention
from scratch import scratch_folder
from seeded_faults import seed_fault
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice
from tiny_models import head_folder, model_folder

pytestmark = pytest.mark.usefixtures("small_buffers")

VOCAB_SIZE, PAGE_SIZE, WINDOW = 50, 16, 24
TYPES: dict[str, tuple[str, ...]] = {
    "two of three": ("sliding_attention",) * 2 + ("full_attention",),
    "all": ("sliding_attention",) * 2,
}
WINDOWS: dict[str, tuple[int | None, ...]] = {"two of three": (None, WINDOW, WINDOW), "all": (WINDOW,)}


@cache
def folder_of(kind: str) -> Path:
    torch.manual_seed(3)
    types = TYPES[kind]
    config: Any = transformers.Gemma3TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=len(types), head_dim=64,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.5,
        query_pre_attn_scalar=8, sliding_window=WINDOW, layer_types=list(types), bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    folder = scratch_folder()
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def ask(engine: Engine, inbox: MemoryInbox, outbox: MemoryOutbox, prompts: list[np.ndarray]) -> list[list[int]]:
    """Return the tokens of greedy answers to prompts that arrive together, and end the engine."""
    requests = [request(name, prompt, max_tokens=30) for name, prompt in enumerate(prompts)]
    answers = answers_to(engine, inbox, outbox, requests)
    engine.close()
    return [tokens_of(answer) for answer in answers]


@pytest.mark.parametrize(
    "options", [{}, {"speculative": "ngram", "speculative_control": "fixed"}, {"cuda_graph": False}]
)
@pytest.mark.parametrize("kind", TYPES)
def test_requests_that_do_not_fit_whole_get_the_tokens_of_the_cpu(kind: str, options: dict[str, Any]) -> None:
    generator = np.random.default_rng(1)
    first, second = (generator.integers(1, VOCAB_SIZE, length) for length in (150, 70))
    prompts = [first, np.concatenate([first[:100], second]), np.tile(second[:20], 5)]
    found: list[Any] = []
    for num_tokens in (160, 2048):
        config = EngineConfig(
            model=str(folder_of(kind)), page_size=PAGE_SIZE, device="cuda", dtype="float32", max_running=3,
            max_length=208, chunked_prefill_size=32, max_total_tokens=num_tokens, **options,
        )  # fmt: skip
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)
        assert (engine.info.windows, engine.info.max_length) == (WINDOWS[kind], 208)
        found.append(ask(engine, inbox, outbox, prompts))
    inbox, outbox = MemoryInbox(), MemoryOutbox()
    config = EngineConfig(
        model=str(folder_of(kind)), page_size=PAGE_SIZE, max_total_tokens=2048, max_length=208, weights="float32",
        num_threads=1,
    )  # fmt: skip
    expected = ask(build_engine(config, inbox=inbox, outbox=outbox), inbox, outbox, prompts)
    assert found == [expected, expected]


def test_a_layer_that_reads_the_pages_of_another_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed_fault([(attention.Places, "indices_of", "if group", "if False")], monkeypatch)
    with pytest.raises(AssertionError):
        test_requests_that_do_not_fit_whole_get_the_tokens_of_the_cpu("two of three", {})


@pytest.mark.parametrize("kind", ["draft", "eagle"])
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_a_drafter_with_kv_of_its_own_leaves_the_windows_of_the_target(kind: Any, cuda_graph: bool) -> None:
    """A model that drafts for itself has all of its drafts accepted, so its KV is where it belongs."""
    folder = model_folder("gemma3")
    drafter = folder if kind == "draft" else head_folder("gemma3")
    generator = np.random.default_rng(2)
    prompts = [generator.integers(1, 60, length) for length in (60, 33, 47)]
    found: list[Any] = []
    for options in ({}, {"speculative": kind, "speculative_model": str(drafter), "speculative_control": "fixed"}):
        config = EngineConfig(
            model=str(folder), page_size=4, device="cuda", dtype="float32", max_running=3, max_length=96,
            chunked_prefill_size=16, max_total_tokens=100, cuda_graph=cuda_graph, **options,
        )  # fmt: skip
        inbox, outbox = MemoryInbox(), MemoryOutbox()
        engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=inbox, outbox=outbox)
        assert engine.info.windows == (None, 7)
        found.append(ask(engine, inbox, outbox, prompts))
        counts = engine.counters().speculation
        assert (counts is None) == (not options)
        assert counts is None or counts.num_drafted > 50
        assert counts is None or kind == "eagle" or counts.num_accepted == counts.num_drafted
    assert found[0] == found[1]


def test_with_lower_tiers_layers_keep_all_positions_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model=str(folder_of("two of three")), page_size=PAGE_SIZE, device="cuda", dtype="float32", max_running=3,
        max_length=96, max_total_tokens=160, host_cache_gb=0.01,
    )  # fmt: skip
    with caplog.at_level("INFO"):
        engine = build_on(RecordingDevice(), flashinfer_torch, config, inbox=MemoryInbox(), outbox=MemoryOutbox())
    assert engine.info.windows == (None,)
    assert "keep the KV of all positions, because lower tiers copy whole pages" in caplog.text
    engine.close()
