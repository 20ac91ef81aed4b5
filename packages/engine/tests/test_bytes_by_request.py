"""The memory of ranks that divide attention by request: the table in the README of ranks, for DeepSeek-V2-Lite."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.decoder import Decoder
from pagewood.engine.models.expert_division import divided_by_expert
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.runner import ranks

README = Path(ranks.__file__).parent / "README.md"
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "topk_method": "greedy", "n_group": 1, "topk_group": 1,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "tie_word_embeddings": False, "bos_token_id": 100000, "eos_token_id": 100001,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


class Sizes:
    """Satisfies `Weights`: adds up the elements that a rank reads, and returns tensors without memory."""

    def __init__(self) -> None:
        self.num_elements = 0

    def _sized(self, *shape: int) -> Tensor:
        found = torch.empty(shape, device="meta")
        self.num_elements += found.numel()
        return found

    def stack(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> Tensor:
        num_rows = sum(rows for _, rows in parts) if order is None else len(order)
        return self._sized(num_rows, *(columns if inputs is None else (len(inputs),)))

    def numbers(self, name: str, rows: int, columns: int, *, order: RowOrder | None = None) -> Tensor:
        return self._sized(rows if order is None else len(order), columns)

    def exact(self, name: str, rows: int, *columns: int, order: RowOrder | None = None) -> Tensor:
        return self._sized(rows if order is None else len(order), *columns)


def megabytes(config: ModelConfig, shard: Shard) -> tuple[float, float]:
    """Return what a rank holds: weights in bfloat16, and KV of 100,000 tokens in float32 if it had all requests."""
    sizes = Sizes()
    Decoder(config, sizes, TorchOps(), device=torch.device("meta"), shard=shard)
    layout = config.for_shard(shard).memory_layout(page_size=16, dtype="float32")
    return 2 * sizes.num_elements / 1e6, layout.bytes_per_page * (100_000 // 16) / 1e6


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_the_table_of_the_readme(count: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V2_LITE))
    config = ModelConfig.from_folder(tmp_path)
    if count > 1:
        config = divided_by_expert(config, count)
    by_heads, kv = megabytes(config, Shard(0, count))
    by_request, kv_of_all = megabytes(config, Shard(0, count, by_request=count > 1))
    assert kv == kv_of_all, "latents are whole on every rank"
    numbers = [by_heads, kv, by_request, kv_of_all / count]
    row = [count, *(round(number) for number in numbers)]
    assert re.search(r"\| ".join(rf"{number:,} " for number in row), README.read_text()), f"the README must have {row}"
