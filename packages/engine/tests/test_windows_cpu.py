"""Models with sliding windows give memory back while a request runs, and compute the same bits as with more memory."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from answered import answers_to, request
from pagewood.engine import LLM, BeamSearchParams
from pagewood.engine.api import Delta, EngineConfig, FinishReason, SamplingParams
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.folder import model_folder as embedded_folder
from scratch import scratch_folder

VOCAB_SIZE, PAGE_SIZE = 50, 16
TYPES: dict[str, tuple[str, ...]] = {
    "five of six": ("sliding_attention",) * 5 + ("full_attention",),
    "all": ("sliding_attention",) * 2,
    "two sizes": ("sliding_attention",) * 4 + ("full_attention", "sliding_attention", "full_attention"),
}
WINDOWS: dict[str, tuple[bool, ...]] = {
    "five of six": (False, *[True] * 5), "all": (True,), "two sizes": (False, True, True)
}  # fmt: skip
"""Whether each group has the window."""


@cache
def folder_of(kind: str, window: int) -> Path:
    """Write a model of the Gemma 3 family with some layers that have windows.

    "two sizes" is one of Gemma 4, whose layers that see all positions have larger heads; its last two layers read what
    earlier ones keep.
    """
    torch.manual_seed(3)
    types, folder = TYPES[kind], scratch_folder()
    if kind == "two sizes":
        config_of: Any = transformers.Gemma4TextConfig
        sizes = config_of(
            vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=len(types), head_dim=8,
            global_head_dim=16, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1 << 16,
            initializer_range=0.5, sliding_window=window, layer_types=list(types), bos_token_id=None, eos_token_id=0,
            num_kv_shared_layers=2, hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB_SIZE,
        )  # fmt: skip
        transformers.Gemma4ForCausalLM(sizes).save_pretrained(folder)
        return folder
    config: Any = transformers.Gemma3TextConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=len(types), head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1 << 16, initializer_range=0.5,
        query_pre_attn_scalar=8, sliding_window=window, layer_types=list(types), bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


class Bench:
    """An engine, and what it has answered."""

    def __init__(self, kind: str, window: int, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(
            model=str(folder_of(kind, window)), page_size=PAGE_SIZE, num_threads=1, max_running=4, weights="float32",
            **options,
        )  # fmt: skip
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)

    def ask(self, *prompts: np.ndarray, max_tokens: int = 8, explain: bool = False) -> list[list[Delta]]:
        """Return the answers to prompts that arrive together; the accounting is checked at the end."""
        requests = [
            request(i, prompt, max_tokens=max_tokens, logprobs=3, fields={"explain": explain})
            for i, prompt in enumerate(prompts)
        ]
        answers = answers_to(self.engine, self.inbox, self.outbox, requests)
        self.engine.step()
        assert self.engine.violation() is None
        return answers

    def reported(self, *prompts: np.ndarray, **options: Any) -> list[list[Any]]:
        """Return the tokens of each answer, with their log probabilities and those of three more."""
        answers = self.ask(*prompts, **options)
        assert all(answer[-1].finish is FinishReason.LENGTH for answer in answers), answers
        return [[one for delta in answer for one in delta.logprobs] for answer in answers]

    @property
    def info(self) -> Any:
        return self.engine.info


def prompts_of(seed: int, *lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, VOCAB_SIZE, length) for length in lengths]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_request_that_does_not_fit_whole_gives_the_same_bits(kind: str, dtype: Any) -> None:
    options: dict[str, Any] = {"kv_cache_dtype": dtype, "chunked_prefill_size": 64}
    small = Bench(kind, 64, max_total_tokens=448, max_length=1024, **options)
    large = Bench(kind, 64, max_total_tokens=8192, max_length=1024, **options)
    assert small.info.num_pages * PAGE_SIZE < 512 < small.info.max_length == 1024
    assert small.info.windows == tuple(64 if has_window else None for has_window in WINDOWS[kind])
    (prompt,) = prompts_of(0, 900)
    assert small.reported(prompt, max_tokens=124) == large.reported(prompt, max_tokens=124)
    small.engine.close()
    large.engine.close()


@pytest.mark.parametrize("kind", TYPES)
def test_requests_that_share_prompts_and_lack_memory_give_the_same_bits(kind: str) -> None:
    small = Bench(kind, 40, max_total_tokens=400, max_length=600, chunked_prefill_size=48)
    large = Bench(kind, 40, max_total_tokens=1 << 14, max_length=600, chunked_prefill_size=48)
    first, second = prompts_of(1, 300, 200)
    rounds = [
        [first, second],
        [np.concatenate([first, second]), second[:150], first[:190]],
        [first, first, np.concatenate([first[:100], second])],
    ]
    for prompts in rounds:
        assert small.reported(*prompts, max_tokens=30) == large.reported(*prompts, max_tokens=30)
    small.engine.close()
    large.engine.close()


def test_a_model_whose_windows_are_longer_than_its_sequences_has_one_group() -> None:
    bench = Bench("five of six", 64, max_total_tokens=448, max_length=64)
    assert bench.info.windows == (None,)
    bench.engine.close()


@pytest.mark.usefixtures("patient_requests")
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("kind", TYPES)
def test_what_a_hit_needs_comes_back_from_lower_tiers(kind: str, policy: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_length": 600, "chunked_prefill_size": 48}
    tiers: dict[str, Any] = {
        "max_total_tokens": 400, "host_cache_gb": 0.01, "disk_cache_path": str(tmp_path), "disk_cache_gb": 0.01,
        "cache_write_policy": policy,
    }  # fmt: skip
    prompts = prompts_of(4, 300, 310, 320, 330)
    longer = np.concatenate([prompts[0], prompts[1][:50]])
    large = Bench(kind, 40, max_total_tokens=1 << 14, **options)
    expected = [large.reported(prompt) for prompt in (*prompts, longer)]
    large.engine.close()
    small = Bench(kind, 40, **tiers, **options)
    assert None not in small.info.windows[1:]
    assert [small.reported(prompt) for prompt in prompts] == expected[:-1]
    for is_restarted in (False, True):
        bench = Bench(kind, 40, **tiers, **options) if is_restarted else small
        ((*answer, last),) = bench.ask(longer)
        assert [[one for delta in (*answer, last) for one in delta.logprobs]] == expected[-1]
        assert last.num_cached_tokens == (336 if is_restarted else 288)
        bench.engine.close()


def test_with_a_decision_log_over_lower_tiers_layers_keep_all_positions(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level("INFO"):
        bench = Bench("five of six", 64, max_total_tokens=448, host_cache_gb=0.001, decision_log=str(tmp_path / "log"))
    assert (bench.info.windows, bench.info.max_length) == ((None,), 448)
    assert "keep the KV of all positions, because a replay of the decision log" in caplog.text
    bench.engine.close()


@pytest.mark.parametrize(
    ("speculative", "kind"), [("ngram", "five of six"), ("suffix", "five of six"), ("ngram", "two sizes")]
)
def test_drafts_that_are_looked_up_change_nothing(speculative: Any, kind: str) -> None:
    options: dict[str, Any] = {"max_total_tokens": 400, "max_length": 600, "chunked_prefill_size": 48}
    plain = Bench(kind, 40, **options)
    drafting = Bench(kind, 40, speculative=speculative, speculative_control="fixed", **options)
    assert drafting.info.windows == tuple(40 if has_window else None for has_window in WINDOWS[kind])
    (prompt,) = prompts_of(2, 100)
    prompts = [np.tile(prompt, 4)]
    assert plain.reported(*prompts, max_tokens=100) == drafting.reported(*prompts, max_tokens=100)
    plain.engine.close()
    drafting.engine.close()


def test_a_drafter_with_kv_of_its_own_leaves_the_windows_of_the_target(caplog: pytest.LogCaptureFixture) -> None:
    """Its memory lies beside the frames, under the ids of pages. Of the second one's drafts, most are rejected."""
    options: dict[str, Any] = {"max_length": 600, "chunked_prefill_size": 48}
    plain = Bench("five of six", 40, max_total_tokens=1 << 14, **options)
    prompts = prompts_of(2, 300, 220)
    expected = plain.reported(*prompts, max_tokens=100)
    plain.engine.close()
    for kind in TYPES:
        drafter = {"speculative": "draft", "speculative_model": str(folder_of(kind, 40))}
        drafter |= {"speculative_control": "fixed"}
        bench = Bench("five of six", 40, max_total_tokens=400, **drafter, **options)
        assert bench.info.windows == (None, *[40] * 5)
        assert bench.info.max_length == 600
        assert bench.reported(*prompts, max_tokens=100) == expected
        counts = bench.engine.counters().speculation
        assert counts is not None
        assert counts.num_drafted > 100
        assert (counts.num_accepted == counts.num_drafted) == (kind == "five of six")
        bench.engine.close()
    with caplog.at_level("INFO"):
        bench = Bench("all", 40, max_total_tokens=640, speculative="draft", speculative_model=str(folder_of("all", 40)))
    assert bench.info.windows == (None,)
    assert "keep the KV of all positions, because a drafter has its own of all of them" in caplog.text
    bench.engine.close()


@pytest.mark.parametrize("kind", TYPES)
def test_several_answers_and_beams_are_those_of_a_large_pool(kind: str) -> None:
    folder = scratch_folder() / "model"
    shutil.copytree(folder_of(kind, 40), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # of other tokens, which are not read
        shutil.copy(embedded_folder(None) / name, folder)
    sampling = SamplingParams(temperature=1.0, seed=5, max_tokens=60, ignore_eos=True)
    params = BeamSearchParams(beam_width=4, max_tokens=40, ignore_eos=True)
    prompts = [prompt.tolist() for prompt in prompts_of(3, 150, 90)]
    found: list[Any] = []
    for num_tokens in (256, 1 << 14):
        options: dict[str, Any] = {"max_total_tokens": num_tokens, "max_length": 256, "chunked_prefill_size": 48}
        options |= {"schedule_conservativeness": 0.05, "max_running": 8, "max_prefills": 8}
        with LLM(folder, page_size=PAGE_SIZE, num_threads=1, weights="float32", **options) as llm:
            answers = [[one.tokens for one in each] for each in llm.generate(prompts, sampling, n=5)]
            beams = [[(one.tokens, one.score) for one in each.sequences] for each in llm.beam_search(prompts, params)]
            found.append((answers, beams))
            assert (llm.counters().num_preempted > 0) == (num_tokens < 1000)
            assert llm._engine.violation() is None
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["five of six", "all"])
def test_a_request_of_32k_tokens_with_windows_of_4k_runs_in_a_third_of_its_memory(kind: str) -> None:
    num_tokens = 11_264 if kind == "five of six" else 5120
    small = Bench(kind, 4096, max_total_tokens=num_tokens, max_length=32_768)
    large = Bench(kind, 4096, max_total_tokens=65_536, max_length=32_768)
    assert small.info.max_length == 32_768
    (prompt,) = prompts_of(0, 32_700)
    assert small.reported(prompt, max_tokens=60) == large.reported(prompt, max_tokens=60)
    small.engine.close()
    large.engine.close()
