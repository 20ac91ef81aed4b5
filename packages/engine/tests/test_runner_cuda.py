"""The CUDA runner without a GPU: with stand-ins, on a device that records waits, against the CPU runner."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.ops import LatentShape
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.parts.norm import NormConfig
from pagewood.engine.models.parts.rope import RopeConfig
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cuda.graphs import graph_sizes
from pagewood.engine.runner.cuda.latent_attention import attention_over
from pagewood.engine.runner.cuda.ops import CUDAOps
from pagewood.engine.runner.cuda.runner import CUDARunner
from pagewood.engine.runner.storage import storage_for
from pagewood.kvpool import LatentLayout, MultiHeadLayout
from row_driver import DrivenSequence, RowDriver
from stand_ins import flashinfer_torch
from stand_ins.recording_device import RecordingDevice

pytestmark = pytest.mark.usefixtures("small_buffers")

PAGE_SIZE, NUM_PAGES, DIM = 4, 200, 8
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [2, 7, 1, 8, 2, 8], [1, 6, 1, 8, 0, 3, 3, 9, 8]]
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-window": ("Mistral", {"sliding_window": 9, "head_dim": DIM}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": DIM,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "eos_token_id": 0,
            "bos_token_id": 0,
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": DIM,
            "sliding_window": 5,
            "query_pre_attn_scalar": 12,
            "eos_token_id": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "deepseek2": ("DeepseekV2", LATENT),
    "deepseek3": (
        "DeepseekV3",
        {
            **LATENT,
            "rope_interleave": False,
            "num_mtp_layers": 0,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": DIM,
            "global_head_dim": 2 * DIM,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 50,
            "eos_token_id": 0,
        },
    ),
    "gemma4-experts": (
        "Gemma4",
        {
            "num_key_value_heads": 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "head_dim": DIM,
            "global_head_dim": 2 * DIM,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "eos_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2", {"eos_token_id": 0}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 0.3, "eos_token_id": 0, "bos_token_id": 0, "sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "gpt-neox": ("GPTNeoX", {"hidden_size": 8, "num_attention_heads": 1, "eos_token_id": 0, "rotary_pct": 0.5}),
    "gpt2": ("GPT2", {"hidden_size": 8, "num_attention_heads": 1, "n_inner": 48, "eos_token_id": 0, "bos_token_id": 0}),
    "nemotron": ("Nemotron", {"eos_token_id": 0, "bos_token_id": 0}),
    "starcoder2": ("Starcoder2", {"eos_token_id": 0, "bos_token_id": 0}),
    "apertus": ("Apertus", {"eos_token_id": 0, "pad_token_id": 0}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "mlp_only_layers": [0],
        },
    ),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "llama4": (
        "Llama4",
        {
            "head_dim": DIM,
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 64,
            "floor_scale": 5,
            "attn_scale": 0.3,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
        },
    ),
    "phi3-longrope": (
        "Phi3",
        {
            "max_position_embeddings": 64,
            "original_max_position_embeddings": 20,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 20,
                "short_factor": [1.1] * 4,
                "long_factor": [1.0, 2.0, 4.0, 8.0],
            },
            "eos_token_id": 0,
            "bos_token_id": 0,
            "pad_token_id": 0,
        },
    ),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": DIM,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    kind, extra = MODELS[request.param]
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "initializer_range": 0.2}
    config_class = f"{kind}TextConfig" if kind in ("Gemma3", "Gemma4", "Llama4") else f"{kind}Config"
    config = getattr(transformers, config_class)(**{**sizes, **heads, **extra})
    model_class = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    getattr(transformers, model_class)(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Return a runner all of whose calls are recorded, and its device."""

    runner: CUDARunner
    device: RecordingDevice

    def launch(self, batch: Any) -> Any:
        with self.device.watching():
            return self.runner.launch(batch)


def bench(folder: Path, *, sizes: list[int] | None = None, batch_invariant: bool = False) -> Bench:
    device = RecordingDevice()
    model = load_model(folder, CUDAOps(flashinfer_torch))
    storage = storage_for(model.config.memory_layout(page_size=PAGE_SIZE), NUM_PAGES + 1)
    for layer in range(storage.layout.num_layers):
        storage.layer(layer).fill_(1e3)  # unwritten positions must not count
    runner = CUDARunner(
        model,
        storage,
        flashinfer_torch,
        device,
        max_rows=8,
        max_length=64,
        batch_invariant=batch_invariant,
        graph_sizes=sizes or (),
    )
    device.waits.clear()
    return Bench(runner=runner, device=device)


def driver_of(runner: Any) -> RowDriver:
    return RowDriver(runner, num_pages=NUM_PAGES, page_size=PAGE_SIZE, short_length=runner._model.short_length)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[CPURunner]:
    ops = CPUOps()
    model = load_model(folder, ops)
    layout = model.config.memory_layout(page_size=PAGE_SIZE, order="HND")
    runner = CPURunner(
        model,
        storage_for(layout, NUM_PAGES),
        warm_up(layout, head_dims=model.config.head_dims, others=ops.units),
        max_rows=8,
        max_length=64,
        num_threads=1,
    )
    yield runner
    runner.close()


def expected(reference: CPURunner, sampling: SamplingParams | None = None) -> list[list[int]]:
    driver = driver_of(reference)
    sequences = [driver.add(p, sampling=sampling, seed=i, max_length=len(p) + 14) for i, p in enumerate(PROMPTS)]
    driver.generate(sequences, num_tokens=14, chunk=64)
    return [sequence.output for sequence in sequences]


def run_ahead(bench: Bench, sequences: list[DrivenSequence], *, num_tokens: int, chunk: int) -> None:
    """Launch every step before any token is known, mixed with prompts that are still being computed."""
    driver = driver_of(bench.runner)
    added = [
        driver.add(s.tokens, sampling=s.sampling, seed=s.seed, max_length=len(s.tokens) + num_tokens) for s in sequences
    ]
    steps = []
    while live := [s for s in added if len(s.output) < num_tokens]:
        batch = driver.batch([(s, chunk) for s in live])
        sampled = [live[i] for i in batch.sampled.tolist()]
        steps.append((bench.launch(batch), sampled, [len(s.tokens) for s in sampled]))
        for sequence in sampled:
            sequence.tokens.append(-1)
    assert bench.device.waits == []
    for handle, sampled, places in steps:
        for sequence, place, token in zip(sampled, places, handle.wait().tokens.tolist(), strict=True):
            sequence.tokens[place] = token
    assert bench.device.waits == ["event.synchronize"] * len(steps)
    for mine, theirs in zip(added, sequences, strict=True):
        theirs.tokens[:] = mine.tokens


FULLY = "llama"
"""The model with all combinations by default; combinations go round the others."""


def combined(*columns: dict[str, tuple[Any, ...]]) -> list[Any]:
    """Return parameters of every model with every combination of columns, whose values have names."""
    found: list[Any] = []
    for turn, name in enumerate(MODELS):
        combinations = [*product(*(column.items() for column in columns))]
        for place, chosen in enumerate(combinations):
            is_slow = name != FULLY and (turn - place) % len(combinations)
            values = [value for _, values in chosen for value in values]
            named = "-".join([name, *(of_value for of_value, _ in chosen)])
            found.append(pytest.param(name, *values, marks=[pytest.mark.slow] if is_slow else [], id=named))
    return found


@pytest.mark.parametrize(
    ("folder", "sizes", "chunk", "batch_invariant"),
    combined(
        {"eager": (None,), "graphs": ([1, 2, 4],), "graphs of six": ([6],)},
        {"chunks of 1": (1, False), "chunks of 5, invariant": (5, True), "chunks of 64": (64, False)},
    ),
    indirect=["folder"],
    scope="module",
)
def test_greedy_tokens_launched_ahead(
    folder: Path, reference: CPURunner, chunk: int, sizes: list[int] | None, batch_invariant: bool
) -> None:
    mine = bench(folder, sizes=sizes, batch_invariant=batch_invariant)
    driver = driver_of(mine.runner)
    sequences = [driver.add(prompt) for prompt in PROMPTS]
    run_ahead(mine, sequences, num_tokens=14, chunk=chunk)
    assert [sequence.output for sequence in sequences] == expected(reference)
    assert (mine.device.num_replayed > 0) == (sizes is not None)


@pytest.mark.parametrize(
    ("folder", "sampling", "batch_invariant"),
    combined(
        {
            "temperature": (SamplingParams(temperature=1.0),),
            "top-k": (SamplingParams(temperature=0.7, top_k=5),),
            "top-p": (SamplingParams(temperature=1.3, top_p=0.8),),
            "all": (SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.1),),
        },
        {"plain": (False,), "invariant": (True,)},
    ),
    indirect=["folder"],
    scope="module",
)
def test_seeded_tokens_equal_those_of_the_cpu(
    folder: Path, reference: CPURunner, sampling: SamplingParams, batch_invariant: bool
) -> None:
    mine = bench(folder, sizes=[4], batch_invariant=batch_invariant)
    driver = driver_of(mine.runner)
    sequences = [driver.add(prompt, sampling=sampling, seed=i) for i, prompt in enumerate(PROMPTS)]
    run_ahead(mine, sequences, num_tokens=14, chunk=64)
    assert [sequence.output for sequence in sequences] == expected(reference, sampling)


def test_logits_at_every_position(folder: Path, reference: CPURunner) -> None:
    mine = bench(folder)
    batches = []
    for runner in (mine.runner, reference):
        driver = driver_of(runner)
        batches.append(driver.batch([(driver.add(prompt), 64) for prompt in PROMPTS]))
    logits = torch.from_numpy(reference.forward(batches[1]))
    torch.testing.assert_close(mine.runner.forward(batches[0]), logits, atol=1e-4, rtol=1e-4)


def test_steps_in_flight_share_no_pinned_memory_and_later_steps_reuse_it(folder: Path) -> None:
    mine = bench(folder)
    pool = mine.runner._staging
    driver = driver_of(mine.runner)
    sequence = driver.add(PROMPTS[0])
    slots = []
    for _ in range(3):
        handles = []
        for _ in range(2):
            handles.append(mine.launch(driver.batch([(sequence, 64)])))
            sequence.tokens.append(-1)
        slots.append({id(handle._slot) for handle in handles})
        assert len(slots[-1]) == 2
        for handle in handles:
            assert handle.wait() is handle.wait()
    assert slots[0] == slots[1] == slots[2]
    assert len(pool._free) == 2


def test_a_step_that_cannot_be_queued_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = bench(folder)
    driver = driver_of(mine.runner)
    sequence = driver.add(PROMPTS[0])
    with monkeypatch.context() as broken:
        broken.setattr(type(mine.runner), "_logits", lambda *_, **__: torch.empty(1 << 60))
        for _ in range(3):
            with pytest.raises(RuntimeError, match="memory"):
                mine.runner.launch(driver.batch([(sequence, 2)]))
    assert len(mine.runner._staging._free) == 1


def test_a_step_that_samples_nothing(folder: Path) -> None:
    mine = bench(folder, sizes=[1])
    driver = driver_of(mine.runner)
    sequence = driver.add([1, 2, 3, 4, 5])
    for count in (1, 3):
        tokens = mine.launch(driver.batch([(sequence, count)])).wait().tokens
        assert tokens.shape == (0,)
        assert tokens.dtype == np.int32


def test_a_row_of_nan_yields_no_token_and_later_steps_continue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = bench(folder)
    model = mine.runner._model
    head = model.head
    driver = driver_of(mine.runner)
    sequence = driver.add([1, 2, 3])
    with monkeypatch.context() as replaced:
        replaced.setattr(model, "head", lambda x: head(x) * torch.nan)
        broken = mine.launch(driver.batch([(sequence, 8)]))
    sequence.tokens.append(-1)
    last = mine.launch(driver.batch([(sequence, 8)]))
    assert broken.wait().counts.tolist() == [0]
    assert last.wait().tokens.shape == (1,)


def test_an_error_while_queueing_is_raised_by_launch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = bench(folder)
    driver = driver_of(mine.runner)
    sequence = driver.add([1, 2, 3])
    with monkeypatch.context() as broken:
        broken.setattr(mine.runner._model, "head", lambda x: x @ x)
        with pytest.raises(RuntimeError):
            mine.launch(driver.batch([(sequence, 8)]))
    assert mine.launch(driver.batch([(driver.add([1]), 8)])).wait().tokens.shape == (1,)
    mine.runner.close()


def test_latents_that_no_kernel_takes_are_refused() -> None:
    layout = LatentLayout(num_layers=1, latent_dim=16, rope_dim=4, page_size=4)
    shape = LatentShape(num_heads=2, plain_dim=8, rope_dim=4, value_dim=8, rank=16)
    layer = LatentAttentionConfig(
        shape=shape, rope=RopeConfig(head_dim=4, theta=100.0), scale=1.0, norm=NormConfig(epsilon=1e-6)
    )
    storage, other = storage_for(layout, 2), storage_for(replace(layout, dtype="bfloat16"), 2)
    options: dict[str, Any] = {"dtype": "float32", "max_length": 8}
    with pytest.raises(ValueError, match="latents must have the dtype of queries, float32, on CUDA, got bfloat16"):
        attention_over(flashinfer_torch, other, [layer], **options)
    with pytest.raises(ValueError, match="layers must have the same shape and scale on CUDA"):
        attention_over(flashinfer_torch, storage, [layer, replace(layer, scale=0.5)], **options)
    heads = MultiHeadLayout(num_layers=1, num_kv_heads=1, head_dim=20, page_size=4)
    with pytest.raises(ValueError, match="memory must be a LatentStorage for layers of latents"):
        attention_over(flashinfer_torch, storage_for(heads, 2), [layer], **options)


def test_waits_are_recorded() -> None:
    device = RecordingDevice()
    with device.watching():
        numbers = torch.arange(3)
        numbers[numbers > 1]
        int(numbers[0])
        device.upload(numbers, numbers.clone())
        pinned = device.pinned(3, torch.int64)
        device.upload(pinned[1:], numbers[1:].clone())
        device.download(numbers, pinned).synchronize()
    assert device.waits == [
        "torch.index",
        "torch._local_scalar_dense",
        "upload of memory that is not pinned",
        "event.synchronize",
    ]


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == [1]
    assert graph_sizes(20) == [1, 2, 4, 8, 16, 20]
    assert graph_sizes(100)[-5:] == [56, 64, 80, 96, 100]
    with pytest.raises(ValueError, match="largest must be >= 1, got 0"):
        graph_sizes(0)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_states_of_prompts_are_added_up_in_mixed_steps(folder: Path, batch_invariant: bool) -> None:
    """Chunks of prompts, beside a prompt that yields a token and a row that decodes."""
    one = bench(folder, batch_invariant=batch_invariant, sizes=[1, 2])
    driver = driver_of(one.runner)
    states = transformers.AutoModel.from_pretrained(folder)
    first, second, third = (driver.add(PROMPTS[i]) for i in (0, 3, 2))
    driver.generate([third], num_tokens=1, chunk=64)
    steps = [([(first, 6), (third, 1), (second, 5)], [[0, 2, 4], [2, 0, 5]]), ([(first, 1), (second, 2)], [[0, 0, 1]])]
    for work, pooled in steps:
        chosen = [sequence for sequence, _ in work]
        found = [sequence.num_computed for sequence in chosen]
        batch = replace(driver.batch(work), pooled=np.array(pooled, np.int32))
        handle = one.launch(batch)
        result = handle.wait()
        assert result.vectors is not None
        assert len(result.tokens) == len(batch.sampled)
        for vector, (grant, skipped, count) in zip(result.vectors, pooled, strict=True):
            with torch.no_grad():
                hidden = states(torch.tensor([chosen[grant].tokens])).last_hidden_state[0]
            begin = found[grant] + skipped
            np.testing.assert_allclose(vector, hidden[begin : begin + count].sum(0).numpy(), atol=1e-4)
        for sequence, token in zip([chosen[i] for i in batch.sampled.tolist()], result.tokens.tolist(), strict=True):
            sequence.tokens.append(token)
    assert set(one.device.waits) <= {"event.synchronize", "device.finish"}
