"""GGUF files of every architecture: their logits are those of `transformers`, and experts stay in blocks."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gguf_files
from families.case import build
from families.registry import CASES
from gguf_cases import FILES, LATENTS, MOE, File, logits, rewrite, write
from pagewood.engine.model_folder.folder import default_sampling, model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import divided_by_expert
from pagewood.engine.models.head_config import find_head_names
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.checkpoint_files import tensor_names
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.weights.gguf import folder, mixtures
from pagewood.engine.weights.gguf.architectures import ARCHITECTURES
from pagewood.engine.weights.gguf.tensors import GGUFTensors
from rank_threads import ranks_logits


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, _ = write(FILES[name], tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"))
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


def test_the_second_set_of_factors_is_that_of_long_texts(tmp_path: Path) -> None:
    reference, _ = write(FILES["phi3 with longrope"], tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"), 90)
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({}, {"rope_factors_long.weight": [1.0] * 6}, "must have the tensors .* or neither, got none of .*_short"),
        ({"rope.scaling.type": "yarn"}, {}, "rope.scaling.type must be absent or longrope .*, got 'yarn'"),
        ({"rope.scaling.factor": 2.0}, {}, "rope.scaling.factor must be absent or 1 .*, got 2"),
        ({}, {"rope_factors_long.weight": [1.0], "rope_factors_short.weight": [1.0]}, "short_factor must"),
    ],
)
def test_factors_that_are_not_a_longrope(
    keys: dict[str, Any], tensors: dict[str, list[float]], message: str, tmp_path: Path
) -> None:
    file = FILES["phi3 with longrope"]
    write(replace(file, keys={**file.keys, **keys}, tensors=tensors or file.tensors), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(model_folder(tmp_path / "m.gguf"), TorchOps())


def test_chunks_and_temperature_of_llama4_are_those_of_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixtures, "_LLAMA4_CHUNK", 13)  # 8192 would need long texts
    file = FILES["llama4"]
    reference, _ = write(replace(file, extra={**file.extra, "attention_chunk_size": 13, "floor_scale": 13}), tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"))
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("count", "has_norms"), [(16, True), (128, False)])
def test_llama4_with_128_experts_has_no_norms_of_queries(count: int, has_norms: bool, tmp_path: Path) -> None:
    file = FILES["llama4"]
    write(replace(file, keys={**file.keys, "expert_count": count}), tmp_path)
    config = json.loads((model_folder(tmp_path / "m.gguf") / "config.json").read_text())
    assert config["use_qk_norm"] == has_norms


def assert_same(first: Path, second: Path) -> None:
    """Check that two files have the same tensors, by Hugging Face's names, bit for bit."""
    expected, found = GGUFTensors(first), GGUFTensors(second)
    assert set(found.names()) == set(expected.names())
    for name in expected.names():
        assert found.header(name) == expected.header(name)
        assert np.array_equal(found.array(name), expected.array(name)), name


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_one_tensor_for_queries_keys_and_values_is_the_same_as_three(kind: str, tmp_path: Path) -> None:
    """As newer converters may write them for every architecture; rows of Llama's queries and keys are reordered too."""
    write(replace(FILES["llama"], extra={"intermediate_size": 96}), tmp_path, kinds=[kind])
    apart, together = tmp_path / "m.gguf", tmp_path / "together.gguf"
    rewrite(apart, together, ("attn_q.", "attn_k.", "attn_v."), "attn_qkv.")
    assert_same(apart, together)


def test_gates_and_the_others_of_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """As newer converters may write them for every mixture: of each expert, the gate above the other."""
    write(FILES["qwen3moe"], tmp_path)
    apart, together = tmp_path / "m.gguf", tmp_path / "together.gguf"
    rewrite(apart, together, ("ffn_gate_exps.", "ffn_up_exps."), "ffn_gate_up_exps.", axis=1)
    assert_same(apart, together)


def test_tokens_that_a_file_suppresses_are_said_not_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = FILES["gemma4"]
    write(file, tmp_path)
    keys = {f"gemma4.{key}": value for key, value in file.keys.items()} | {"tokenizer.ggml.suppress_tokens": [3, 4]}
    gguf_files.write_gguf(
        tmp_path / "model", tmp_path / "m.gguf", architecture="gemma4", keys=keys, tensors=file.tensors
    )
    default_sampling(model_folder(tmp_path / "m.gguf"))
    assert "not followed: suppress_tokens" in caplog.text


def test_every_architecture_has_a_file() -> None:
    assert {file.architecture for file in FILES.values()} | {"mistral"} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "MXFP4", "BF16"])
def test_latents_in_blocks_are_put_together(kind: str, tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 8}
    keys = {
        **LATENTS, "attention.kv_lora_rank": 32, "attention.key_length": 40, "attention.value_length": 32,
        "attention.key_length_mla": 40, "attention.value_length_mla": 32,
    }  # fmt: skip
    file = File(architecture="deepseek2", case="deepseek2", extra={**sizes, "moe_intermediate_size": 32}, keys=keys)
    file = replace(file, extra={**file.extra, "intermediate_size": 96})
    _, weights = write(file, tmp_path, kinds=[kind])
    checkpoint = Checkpoint(model_folder(tmp_path / "m.gguf"), dtype=None)
    place = "model.layers.1.self_attn."
    found = checkpoint.numbers(f"{place}kv_b_proj.weight", 4 * 64, 32)
    parts = [weights[f"{place}k_b_proj.weight"].transpose(1, 2), weights[f"{place}v_b_proj.weight"]]
    torch.testing.assert_close(found, torch.cat(parts, dim=1).flatten(0, 1), atol=2e-7, rtol=2**-20)


def test_layers_for_multi_token_prediction_stand_behind_the_decoder(tmp_path: Path) -> None:
    file = FILES["glm4moe"]
    case = CASES[file.case]
    reference = build(replace(case, extra={**case.extra, **file.extra}), tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    last = {name: one for name, one in tensors.items() if "layers.2." in name}
    extra = {name.replace("layers.2", "layers.3"): one.clone() for name, one in last.items()}
    place = "model.layers.3."
    extra |= {f"{place}{name}.weight": torch.randn(64) for name in ("enorm", "hnorm", "shared_head.norm")}
    extra[f"{place}eh_proj.weight"] = torch.randn(64, 128)
    save_file({**tensors, **extra}, tmp_path / "model" / "model.safetensors")
    keys = {f"glm4moe.{key}": value for key, value in file.keys.items()}
    keys |= {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    gguf_files.write_gguf(tmp_path / "model", tmp_path / "m.gguf", architecture="glm4moe", keys=keys)
    made = model_folder(tmp_path / "m.gguf")
    tokens, found = logits(made)
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)
    head = find_head_names(tensor_names(made))
    assert head is not None
    assert head.layers == ("model.layers.3",)
    assert ModelConfig.from_folder(made).num_mtp_layers == 1


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "MXFP4", "F16", "BF16"])
def test_experts_stay_in_their_blocks(kind: str, tmp_path: Path) -> None:
    file = File(architecture="qwen3moe", case="qwen3-moe", extra={**MOE, **_SIZES})
    _, weights = write(file, tmp_path, kinds=[kind])
    checkpoint = Checkpoint(model_folder(tmp_path / "m.gguf"), dtype=None)
    for expert in range(_SIZES["num_experts"]):
        for projection, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            name = f"model.layers.1.mlp.experts.{expert}.{projection}.weight"
            [form] = checkpoint.forms([(name, shape[0])], shape[1])
            assert type(form).__name__ == _FORMS[kind]
            torch.testing.assert_close(torch.from_numpy(form.dequantised()), weights[name], atol=2e-7, rtol=2**-20)
    tokens, whole = logits(model_folder(tmp_path / "m.gguf"))
    changes = [partial(divided_by_expert, num_ranks=2)] * 2
    found = ranks_logits(model_folder(tmp_path / "m.gguf"), tokens, 2, changes=changes)[1]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=0)


_SIZES = {"num_experts": 4, "moe_intermediate_size": 32, "intermediate_size": 96}
_FORMS = {
    "Q8_0": "Int8Group",
    "Q4_0": "Int4",
    "Q4_1": "Int4",
    "MXFP4": "Float4",
    "F16": "Float16",
    "BF16": "BFloat16",
}


_OF_SEVERAL: dict[str, str] = {"llama": "mixtral", "mistral3": "mistral3 with a temperature"}
"""The file that is changed, of architectures with several."""
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a factor of experts": ("qwen3moe", {"expert_weights_scale": 2.5}, r"weights_scale must be absent or 1, got 2"),
    "sigmoid": ("qwen3moe", {"expert_gating_func": 2}, r"expert_gating_func must be absent or 1, got 2"),
    "dense layers": ("qwen3moe", {"leading_dense_block_count": 1}, r"dense_block_count must be absent or 0, got 1"),
    "groups": ("qwen3moe", {"expert_group_count": 2}, r"expert_group_count must be absent or 1, got 2"),
    "shared": ("qwen3moe", {"expert_shared_count": 1}, r"expert_shared_count must be absent or 0, got 1"),
    "another count": ("qwen3moe", {"expert_count": 5}, r"ffn_\w+_exps.weight must hold one part for each of 5 experts"),
    "nobody": ("qwen3moe", {"expert_count": 0}, r"qwen3moe.expert_count must be in \[1, 65536\], got 0"),
    "norm of Mixtral": ("llama", {"expert_weights_norm": False}, r"norm_topk_prob must be absent or .*, got False"),
    "softmax": ("glm4moe", {"expert_gating_func": 1}, r"expert_gating_func must be absent or 2, got 1"),
    "no groups chosen": ("glm4moe", {"expert_group_used_count": 0}, r"used_count must be in \[1, 268435456\], got 0"),
    "only extra layers": ("glm4moe", {"nextn_predict_layers": 3}, r"nextn_predict_layers must be in \[0, 2\], got 3"),
    "a step without experts": ("ernie4_5-moe", {"interleave_moe_layer_step": 0}, r"layer_step must be in .*, got 0"),
    "keys of another size": ("deepseek2", {"attention.key_length": 33}, r"must be 32, that of a latent, got 33"),
    "keys that are all rotated": ("deepseek2", {"attention.key_length_mla": 8}, r"must have more than 8 elements, .*8"),
    "a temperature": ("deepseek2", {"attention.temperature_scale": 0.1}, r"temperature_scale must be absent or 0"),
    "yarn that keeps the scale": ("deepseek2", {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
                                  r"deepseek2.rope.scaling.yarn_log_multiplier is missing"),
    "windows": ("olmoe", {"attention.sliding_window": 8}, r"sliding_window must be absent or 0, got 8"),
    "a temperature without yarn": ("mistral3", {"rope.scaling.factor": 1.0},
                                   r"mistral3.rope.scaling.type must be yarn beside mistral3.attention.temperature"),
    "values of another size": ("gemma4", {"attention.value_length_swa": 8}, r"value_length_swa must be 16, .* got 8"),
    "sizes that are not twice": ("gemma4", {"feed_forward_length": [80, 80, 80, 160, 160, 80]},
                                 r"feed_forward_length must be one number, or twice it in the last 3 layers"),
    "too few sizes": ("gemma4", {"attention.head_count_kv": [1, 1]}, r"head_count_kv must be a number >= 1 for each"),
    "no rope": ("granite", {"rope.scaling.finetuned": False}, r"scaling.finetuned must be true, got False"),
    "a long pattern": ("gemma3", {"attention.sliding_window_pattern": [True, False]},
                       r"sliding_window_pattern must be a number or have 3 items, got 2"),
    "a wrong pattern": ("gemma3", {"attention.sliding_window_pattern": "all"}, "must be whole numbers, got 'all'"),
    "too few parameters": ("apertus", {"xielu.beta": [0.5, 0.5]}, r"xielu.beta must be a number for each of 3 layers"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_change_the_computation(name: str, tmp_path: Path) -> None:
    architecture, keys, message = REFUSED[name]
    file = FILES[_OF_SEVERAL.get(architecture, architecture)]
    own = {**file.keys, **keys}
    named = {key if key.startswith("xielu") else f"{architecture}.{key}": value for key, value in own.items()}
    case = CASES[file.case]
    build(replace(case, extra={**case.extra, **file.extra}), tmp_path / "model")
    made = tmp_path / "m.gguf"
    gguf_files.write_gguf(tmp_path / "model", made, architecture=architecture, keys=named, tensors=file.tensors)
    with pytest.raises(ValueError, match=message):
        load_model(model_folder(made), TorchOps())


@pytest.mark.parametrize("factors", [[1.0] * 16 + [1e30], [1.0] * 8 + [2.0] * 8, [1e30] * 16, []])
def test_factors_that_do_not_say_what_is_rotated(factors: list[float], tmp_path: Path) -> None:
    write(replace(FILES["gemma4"], tensors={"rope_freqs.weight": factors} if factors else {}), tmp_path)
    with pytest.raises(ValueError, match=r"rope_freqs.weight must have 16 numbers, 1 and then at least 1e\+20"):
        load_model(model_folder(tmp_path / "m.gguf"), TorchOps())
