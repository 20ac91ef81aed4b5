"""`pagewood check`, on the embedded model, on a damaged copy of it, and on one that has no table."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewood.engine.model_folder.folder import model_folder
from pagewood.server.cli import main

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def healthy() -> Path:
    return model_folder(None)


def damaged(healthy: Path, folder: Path, name: str) -> Path:
    """Return a copy in which one number of a tensor is another one."""
    shutil.copytree(healthy, folder, dirs_exist_ok=True)
    tensors = load_file(healthy / WEIGHTS)
    tensors[name] = tensors[name].clone()
    tensors[name].view(-1)[5] += 8
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def test_a_healthy_model_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--prompt", "What is 12 + 7?"]) == 0
    shown = capsys.readouterr().out
    assert "tokens by the CPU program in float32" in shown
    assert shown.endswith("the same, with a tolerance of 0.001\n")
    assert main(["check", "--tokens", "3,1,4,1,5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_tokens"], found["first"], found["num_equal"]) == (5, None, 5)
    names = [one["what"] for one in found["states"]]
    assert names == ["embeddings", "layer 0", "layer 1", "layer 2", "layer 3 and the last norm"]


@pytest.mark.parametrize(
    ("tensor", "first"),
    [
        ("model.embed_tokens.weight", "embeddings"),
        ("model.layers.1.mlp.down_proj.weight", "layer 1"),
        ("model.layers.1.self_attn.q_proj.weight", "layer 1"),
        ("model.norm.weight", "layer 3 and the last norm"),
    ],
)
def test_the_first_layer_that_differs_is_named(
    healthy: Path, tmp_path: Path, tensor: str, first: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = damaged(healthy, tmp_path, tensor)
    tokens = ",".join(map(str, range(40)))
    assert main(["check", str(folder), "--reference", str(healthy), "--tokens", tokens]) == 1
    shown = capsys.readouterr().out
    assert f"differs first in {first}, by " in shown
    assert "<- differs" in shown
    assert main(["check", str(folder), "--reference", str(folder), "--tokens", tokens]) == 0


def test_a_model_that_transformers_computes_is_checked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config: Any = transformers.StableLmConfig(
        vocab_size=97, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    transformers.StableLmForCausalLM(config).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path)]) == 0
    assert "48 tokens by StableLmForCausalLM of transformers over our pages" in capsys.readouterr().out
    assert main(["check", str(tmp_path), "--dtype", "bfloat16", "--json"]) == 0
    assert 1e-4 < json.loads(capsys.readouterr().out)["logits"]["error"] < 0.1
    assert main(["check", str(tmp_path), "--dtype", "bfloat16", "--tolerance", "1e-5"]) == 1
    assert "differs first in logits" in capsys.readouterr().out


def test_models_over_a_cache_are_checked_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4
    }  # fmt: skip
    falcon = transformers.FalconConfig(**sizes, alibi=True, max_position_embeddings=128, eos_token_id=5)
    roberta = transformers.RobertaConfig(**sizes, intermediate_size=80, max_position_embeddings=128, is_decoder=True)
    for config, name in ((falcon, "FalconForCausalLM"), (roberta, "RobertaForCausalLM")):
        folder = str(tmp_path / name)
        getattr(transformers, name)(config).save_pretrained(folder)
        assert main(["check", folder]) == 0
        assert f"48 tokens by {name} of transformers over a cache in our pages" in capsys.readouterr().out
    folder = str(tmp_path / "FalconForCausalLM")
    assert main(["inspect", folder]) == 0
    shown = capsys.readouterr().out
    for part in (
        "FalconForCausalLM: folder, FalconForCausalLM, 0.1 million parameters",
        "computed by: transformers, over a cache, for one request after the other (there is no table for Falcon",
        "keys and values of 3 layers, at most 1 heads of 16",
        "longest text: 128 tokens",
        "keys and values: float32 384 bytes",
        "tokenizer: none",
    ):
        assert part in shown
    assert main(["inspect", folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_bytes_per_token"]["float32"] == 2 * 3 * 16 * 4
    assert found["weights_bytes"]["bfloat16"] == 2 * found["num_parameters"]
    assert main(["inspect", folder, "--weights", "int8"]) == 2
    assert "weights must be absent for a model that transformers computes, got int8" in capsys.readouterr().err


@pytest.mark.slow
def test_a_mixture_with_latents_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    config = transformers.DeepseekV2Config(
        vocab_size=60, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
        topk_method="greedy", n_group=None, topk_group=None, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.DeepseekV2ForCausalLM(config).save_pretrained(tmp_path)
    assert main(["check", str(tmp_path), "--tokens", "3,1,4,1,5,9,2,6"]) == 0
    assert capsys.readouterr().out.endswith("the same, with a tolerance of 0.001\n")


def test_an_encoder_is_inspected_and_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "60 tokens; an encoder, which makes vectors and no text\n" in capsys.readouterr().out
    assert main(["check", str(tmp_path)]) == 2
    assert "model must be a decoder, whose logits are compared, got the encoder BertModel" in capsys.readouterr().err


def test_a_model_without_attention_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.Mamba2Config(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_heads=4, head_dim=16, state_size=16, n_groups=2
    )
    transformers.Mamba2ForCausalLM(config).save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "no attention, 60 tokens" in out
    assert "recurrent layers: 2 of 2" in out


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--dtype", "float16"]) == 2
    assert "dtype must be float32 or bfloat16 on a CPU" in capsys.readouterr().err
    assert main(["check", "--tokens", "999999"]) == 2
    assert "tokens must be in [0, " in capsys.readouterr().err
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert main(["check", str(tmp_path / "model.gguf")]) == 2
    assert "reference must be the folder that a GGUF file was made from" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--tokens", "a,b"])
