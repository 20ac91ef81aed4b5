"""A model with latent attention in an engine: chunks, hits, batches, preemption, drafts, lower tiers, its memory."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from answered import answers_to, request
from pagewood.engine.api import EngineConfig
from pagewood.engine.assembly.cuda.build import kernel_needs
from pagewood.engine.build import build_engine
from pagewood.engine.core.loop import Engine
from pagewood.engine.links import MemoryInbox, MemoryOutbox
from pagewood.engine.model_folder.inspection import inspect_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.experts import ExpertsConfig
from pagewood.engine.models.parts.feed_forward import FeedForwardConfig
from pagewood.kvpool import MultiHeadLayout
from scratch import scratch_folder

VOCAB_SIZE, PAGE_SIZE = 50, 4
LATENTS = {
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 2, "num_mtp_layers": 0,
}  # fmt: skip


@cache
def folder_of(kind: str) -> Path:
    torch.manual_seed(3)
    extra = LATENTS if kind.startswith("Deepseek") else {}
    config: Any = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=1024, initializer_range=0.3, bos_token_id=None, eos_token_id=0,
        **extra,
    )  # fmt: skip
    folder = scratch_folder()
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    return folder


def config_of(tmp_path: Path, **fields: Any) -> ModelConfig:
    """Return the configuration of a folder with some fields changed."""
    values = json.loads((folder_of("DeepseekV3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, **fields}))
    return ModelConfig.from_folder(tmp_path)


class Bench:
    """An engine, and what it has answered."""

    def __init__(self, **options: Any) -> None:
        self.inbox, self.outbox = MemoryInbox(), MemoryOutbox()
        config = EngineConfig(
            **{
                "model": str(folder_of("DeepseekV3")),
                "page_size": PAGE_SIZE,
                "num_threads": 2,
                "max_running": 4,
                "weights": "float32",
                "chunked_prefill_size": 48,
                **options,
            }
        )
        self.engine: Engine = build_engine(config, inbox=self.inbox, outbox=self.outbox)

    def reported(self, *prompts: np.ndarray, max_tokens: int = 24) -> list[list[Any]]:
        """Return the tokens of each answer, with their log probabilities; the prompts arrive together."""
        answers = answers_to(
            self.engine, self.inbox, self.outbox,
            [request(i, prompt, max_tokens=max_tokens, logprobs=2) for i, prompt in enumerate(prompts)],
        )  # fmt: skip
        self.engine.step()
        assert self.engine.violation() is None
        return [[one for delta in answer for one in delta.logprobs] for answer in answers]


def prompts_of(seed: int, *lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(1, VOCAB_SIZE, length) for length in lengths]


@cache
def expected(max_length: int = 600) -> list[list[list[Any]]]:
    """Return what an engine with much memory and no drafts answers to the rounds of prompts."""
    bench = Bench(max_total_tokens=1 << 13, max_length=max_length)
    answers = [bench.reported(*prompts) for prompts in rounds()]
    bench.engine.close()
    return answers


def rounds() -> list[list[np.ndarray]]:
    first, second, third = prompts_of(1, 300, 60, 270)
    return [[first], [first, second, third], [np.concatenate([first, second]), second[:50], first[:190], third]]


@pytest.mark.parametrize(
    "options",
    [
        {"max_total_tokens": 640},
        {"max_total_tokens": 640, "host_cache_gb": 0.001},
        {"max_total_tokens": 640, "speculative": "ngram", "speculative_control": "fixed"},
        {"max_total_tokens": 1 << 13, "speculative": "draft"},
        {"max_total_tokens": 1 << 13, "chunked_prefill_size": 512, "num_threads": 1},
    ],
    ids=["little-memory", "host-tier", "ngram", "draft-model", "one-thread"],
)
def test_answers_are_the_same_bits(options: dict[str, Any]) -> None:
    """Alone, after a hit, in a batch, after preemption, and with drafts."""
    if options.get("speculative") == "draft":
        options |= {"speculative_model": str(folder_of("Llama")), "speculative_control": "fixed"}
    bench = Bench(max_length=600, schedule_conservativeness=0.01, **options)
    assert [bench.reported(*prompts) for prompts in rounds()] == expected()
    if options["max_total_tokens"] == 640:
        assert bench.engine.counters().num_preempted > 0
    bench.engine.close()


@pytest.mark.slow
def test_int8_latents_have_the_same_bits_in_a_small_pool() -> None:
    options: dict[str, Any] = {"max_length": 600, "schedule_conservativeness": 0.01, "kv_cache_dtype": "int8"}
    small, large = (Bench(max_total_tokens=size, **options) for size in (640, 1 << 14))
    assert [small.reported(*prompts) for prompts in rounds()] == [large.reported(*prompts) for prompts in rounds()]
    assert small.engine.counters().num_preempted > 0
    small.engine.close()
    large.engine.close()


def test_what_cuda_has_no_kernels_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kv_lora_rank and qk_rope_head_dim must be \(512, 64\) on CUDA"):
        kernel_needs(EngineConfig(device="cuda"), config_of(tmp_path))
    model = config_of(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64, qk_head_dim=72)
    (needs,) = kernel_needs(EngineConfig(device="cuda"), model)
    assert (needs.head_dim, needs.latent_rope_dim, needs.verifies) == (512, 64, False)
    (needs,) = kernel_needs(EngineConfig(device="cuda", batch_invariant=True, speculative="ngram"), model)
    assert (needs.batch_invariant, needs.verifies) == (True, True)
    with pytest.raises(ValueError, match="kv_cache_dtype must be auto or bfloat16 for a model with latent attention"):
        kernel_needs(EngineConfig(device="cuda", kv_cache_dtype="fp8_e4m3"), model)


V2_LITE = {
    "num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "num_hidden_layers": 27,
    "first_k_dense_replace": 27,
}  # fmt: skip
V3 = {**V2_LITE, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
      "first_k_dense_replace": 61}  # fmt: skip


@pytest.mark.parametrize(("fields", "times"), [(V2_LITE, 8.8), (V3, 71.1)])
def test_latents_take_a_small_part_of_the_memory_of_heads(fields: dict[str, Any], times: float, tmp_path: Path) -> None:
    """Of heads as the model has them, their keys and values padded to 192 and 128 elements: 16 and 128 of each."""
    model = config_of(tmp_path, **fields)
    latents = model.memory_layout(page_size=16, dtype="bfloat16").bytes_per_page
    heads, layers = fields["num_attention_heads"], fields["num_hidden_layers"]
    assert latents == 16 * layers * 576 * 2
    exact = 16 * layers * heads * (192 + 128) * 2
    assert exact / latents == pytest.approx(times, abs=0.1)
    stored = MultiHeadLayout(num_layers=layers, num_kv_heads=heads, head_dim=192, page_size=16, dtype="bfloat16")
    assert stored.bytes_per_page / latents >= 10


def test_inspection_shows_the_memory_of_latents() -> None:
    found = inspect_model(folder_of("DeepseekV3"))
    assert found.kv_bytes_per_token == {"float32": 2 * (16 + 4) * 4, "int8": 2 * (16 + 4 + 2 * 4)}
    assert found.kv_bytes_of_longest == {"float32": 1024 * 2 * (16 + 4) * 4, "int8": 1024 * 2 * (16 + 4 + 2 * 4)}


KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2", "attention_bias": False,
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
}  # fmt: skip


def test_the_file_of_kimi_k2_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(KIMI_K2))
    model = ModelConfig.from_folder(tmp_path)
    assert (model.max_position, model.num_mtp_layers, model.eos_token_ids) == (131072, 0, (163585,))
    dense, *others = [layer.feed_forward for layer in model.layers]
    assert isinstance(dense, FeedForwardConfig)
    assert dense.size == 18432
    assert len({*others}) == 1
    experts = others[0]
    assert isinstance(experts, ExpertsConfig)
    assert (experts.size, experts.shared and experts.shared.size) == (2048, 2048)
    router = experts.router
    assert (router.num_experts, router.num_chosen, router.num_groups, router.factor) == (384, 8, 1, 2.827)
    assert (router.score, router.has_choice_bias, router.renormalises) == ("sigmoid", True, True)
    assert model.paged[0].scale == pytest.approx(192**-0.5 * (0.1 * math.log(32) + 1) ** 2)


def test_two_scales_of_yarn_change_the_scale_of_the_attention(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 0.707}
    absent = {"rope_parameters": None, "rope_theta": 10000.0}
    for scaling, multiplier in (
        ({**yarn, "mscale_all_dim": 0.707}, (0.0707 * math.log(40) + 1) ** 2),
        (yarn, 1.0),
        (None, 1.0),
    ):
        mixer = config_of(tmp_path, **absent, rope_scaling=scaling).paged[0]
        assert mixer.scale == pytest.approx(12**-0.5 * multiplier)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_lora_rank": 18}, "kv_lora_rank must be a multiple of 4, got 18"),
        ({"qk_rope_head_dim": 6, "qk_head_dim": 14}, "qk_rope_head_dim must be a multiple of 4, got 6"),
        ({"qk_head_dim": 16}, "qk_head_dim and qk_nope_head_dim . qk_rope_head_dim must say the same, got 16 and 12"),
        ({"v_head_dim": None}, "v_head_dim"),
        ({"q_lora_rank": 0}, "q_lora_rank"),
        ({"first_k_dense_replace": 1, "scoring_func": "softmax"}, "scoring_func must be absent or null or 'sigmoid'"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must call each of 2 layers dense or sparse"),
        ({"mlp_layer_types": ["dense", "wide"]}, "mlp_layer_types must call each of 2 layers dense or sparse"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **fields)


def test_layers_with_experts(tmp_path: Path) -> None:
    """Greedy choice ignores groups, as DeepSeek V2 Lite's does; a list of layers comes before a number of them."""
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    }
    v2 = {**experts, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": "greedy", "norm_topk_prob": False}
    kinds = [type(layer.feed_forward).__name__ for layer in config_of(tmp_path, **v2).layers]
    assert kinds == ["ExpertsConfig", "ExpertsConfig"]
    mixed = config_of(tmp_path, **experts, mlp_layer_types=["sparse", "dense"])
    assert [type(layer.feed_forward).__name__ for layer in mixed.layers] == ["ExpertsConfig", "FeedForwardConfig"]


def test_sequences_are_as_long_as_the_choice_of_tokens_is_all_of_them(tmp_path: Path) -> None:
    indexed = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 128}
    assert config_of(tmp_path, **indexed).max_position == 128
    assert config_of(tmp_path, **{**indexed, "index_topk": 4096}).max_position == 1024
    with pytest.raises(ValueError, match="index_topk"):
        config_of(tmp_path, architectures=["DeepseekV32ForCausalLM"])
