"""GGUF files of models with recurrent layers: blocks, heads in another order, further layers, and what is refused.

`test_gguf_families` compares all of them in float32.
"""

# pyright: basic
# gguf, torch and transformers are typed in part only.

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

import gguf_files
from families.case import build
from families.registry import CASES
from gguf_cases import FILES, File, logits, rewrite, write
from pagewood.engine.api import SamplingParams
from pagewood.engine.model_folder.folder import model_folder
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.head_config import find_head_names
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.torch_ops import TorchOps
from pagewood.engine.offline.llm import LLM
from pagewood.engine.weights.gguf import folder
from pagewood.engine.weights.gguf.tensors import GGUFTensors

_DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4, "layer_types": None}
BLOCKS = {
    "qwen3next": {**_DELTA, "mlp_only_layers": []},
    "qwen35": {**_DELTA, "linear_num_value_heads": 6, "intermediate_size": 96},
    "granitehybrid": {"intermediate_size": 96, "shared_intermediate_size": 96},
    "falcon-h1 with norms": {"intermediate_size": 96},
    "nemotron_h": {"intermediate_size": 96},
    "lfm2": {"intermediate_size": 144, "block_multiple_of": 32},
    "kimi-linear": {"linear_num_heads": 4, "linear_head_dim": 32, "kv_lora_rank": 32},
    "mamba2": {},
}
"""Fields with which most matrices have whole blocks of 32 inputs."""
KEYS = {"kimi-linear": {"kda.head_dim": 32}}
"""Keys that follow from them, where config.json does not have them under these names."""


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "cache_root", lambda: tmp_path / "cache")


def rounded_model(file: File, made: Path) -> Any:
    """Save a model whose matrices hold what blocks of eight bits hold, so that a file has the same numbers."""
    case = CASES[file.case]
    built = build(replace(case, extra={**case.extra, **file.extra}), made)
    tensors = load_file(made / "model.safetensors")
    for name, tensor in tensors.items():
        if (
            tensor.ndim == 2
            and tensor.shape[1] % 32 == 0
            and not name.endswith(("mlp.gate.weight", "mixer.gate.weight"))
        ):
            codes = gguf.quantize(tensor.numpy(), Kind.Q8_0)
            tensors[name] = torch.from_numpy(gguf.dequantize(codes, Kind.Q8_0).copy())
    save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return type(built).from_pretrained(made, config=built.config, dtype=torch.float32).eval()


def write_rounded(name: str, path: Path) -> Any:
    """Write a file of Q8_0 to `m.gguf`, and return the model of `transformers` with the same numbers."""
    file = replace(FILES[name], extra={**FILES[name].extra, **BLOCKS[name]})
    reference = rounded_model(file, path / "model")
    keys = {f"{file.architecture}.{key}": value for key, value in {**file.keys, **KEYS.get(name, {})}.items()}
    gguf_files.write_gguf(path / "model", path / "m.gguf", architecture=file.architecture, keys=keys, kinds=["Q8_0"])
    return reference


@pytest.mark.parametrize("name", BLOCKS)
def test_logits_of_blocks_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_rounded(name, tmp_path)
    tokens, found = logits(model_folder(tmp_path / "m.gguf"))
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


FORMS = {
    "qwen35": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj"),
    "granitehybrid": ("mamba.in_proj", "mamba.out_proj"),
    "lfm2": ("conv.in_proj", "conv.out_proj"),
    "kimi-linear": ("self_attn.q_proj", "self_attn.o_proj"),
}


@pytest.mark.parametrize("name", FORMS)
def test_projections_of_recurrent_layers_stay_in_blocks(name: str, tmp_path: Path) -> None:
    write_rounded(name, tmp_path)
    checkpoint = Checkpoint(model_folder(tmp_path / "m.gguf"), dtype=None)
    for module in FORMS[name]:
        stored = f"model.layers.0.{module}.weight"
        rows, *width = checkpoint.header(stored)[0]
        [form] = checkpoint.forms([(stored, rows)], *width)
        assert (type(form).__name__, getattr(form, "group", 0)) == ("Int8Group", 32)


def test_answers_are_those_of_transformers_with_hits(tmp_path: Path) -> None:
    """Those of the CPU program, with plain weights."""
    file = FILES["qwen35"]
    reference, _ = write(file, tmp_path)
    prompt = [3, 17, 9, 41, 5, 28, 60, 11]
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path / "m.gguf"), max_running=1, max_total_tokens=128, max_length=64) as llm:
        first, again = (llm.generate([prompt], sampling)[0] for _ in range(2))
    assert list(first.tokens) == list(again.tokens) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0"])
def test_heads_get_their_order_back_where_blocks_have_several(kind: str, tmp_path: Path) -> None:
    """Blocks of 256 have inputs of several heads of 64, whose order of Qwen 3.5's files is another one."""
    kinds = ["linear_attention", "full_attention"]
    sizes = {"num_hidden_layers": 2, "layer_types": kinds, "linear_num_value_heads": 4}
    file = replace(FILES["qwen35"], extra={**sizes, "linear_value_head_dim": 64})
    write(file, tmp_path, kinds=["F32"])
    source, made = tmp_path / "m.gguf", tmp_path / "coded.gguf"
    name, rows, columns = "blk.0.ssm_out.weight", 64, 256
    random = np.random.default_rng(0)
    codes = gguf_files.blocks(random.normal(size=(rows, columns)).astype(np.float32), Kind[kind], random)
    replaced(source, made, name, codes, Kind[kind])
    stored = torch.from_numpy(gguf.dequantize(codes, Kind[kind]).copy())
    heads = [stored[:, head * 64 : (head + 1) * 64] for head in (0, 2, 1, 3)]  # two of keys have two of values each
    own = "model.layers.0.linear_attn.out_proj.weight"
    checkpoint = Checkpoint(model_folder(made), dtype=None)
    [form] = checkpoint.forms([(own, rows)], columns)
    torch.testing.assert_close(torch.from_numpy(form.dequantised()), torch.cat(heads, dim=1), atol=2e-7, rtol=2**-20)
    half = Checkpoint(model_folder(made), dtype=torch.float32).stack([(own, rows)], columns, inputs=range(128, 256))
    torch.testing.assert_close(half, torch.cat(heads, dim=1)[:, 128:], atol=2e-7, rtol=2**-20)


def replaced(source: Path, made: Path, name: str, data: Any, kind: Kind) -> None:
    """Write a file again with another tensor."""
    rewrite(source, made, (name, name), name, other={name: (data, kind)})


def test_one_projection_of_earlier_converters_is_read(tmp_path: Path) -> None:
    """Qwen 3 Next's projection as its own checkpoints have it, under the name `ssm_in`."""
    reference, _ = write(FILES["qwen3next"], tmp_path)
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    whole = {
        f"blk.{layer}.ssm_in.weight": tensors[f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"].numpy()
        for layer in (0, 2)
    }
    dropped = [f"blk.{layer}.{name}.weight" for layer in (0, 2) for name in ("attn_qkv", "attn_gate")]
    other: dict[str, Any] = {**dict.fromkeys(dropped), **{name: (data, Kind.F32) for name, data in whole.items()}}
    rewrite(tmp_path / "m.gguf", tmp_path / "earlier.gguf", ("none", "none"), "none", other=other)
    tokens, found = logits(model_folder(tmp_path / "earlier.gguf"))
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


def test_layers_behind_the_decoder_predict_further_tokens(tmp_path: Path) -> None:
    reference, _ = write(FILES["qwen35"], tmp_path)
    own = {
        "nextn.eh_proj.weight": (64, 128), "nextn.enorm.weight": (64,), "nextn.hnorm.weight": (64,),
        "nextn.shared_head_norm.weight": (64,), "attn_norm.weight": (64,), "attn_q.weight": (128, 64),
    }  # fmt: skip
    random = np.random.default_rng(0)
    extra = {f"blk.4.{name}": random.normal(size=shape).astype(np.float32) for name, shape in own.items()}
    other = {name: (data, Kind.F32) for name, data in extra.items()}
    keys = {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1}
    rewrite(tmp_path / "m.gguf", tmp_path / "more.gguf", ("none", "none"), "none", other=other, keys=keys)
    made = model_folder(tmp_path / "more.gguf")
    tokens, found = logits(made)
    with torch.inference_mode():
        torch.testing.assert_close(found, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)
    assert ModelConfig.from_folder(made).num_mtp_layers == 1
    tensors = GGUFTensors(tmp_path / "more.gguf")
    assert find_head_names(tensors.names()) is not None
    for name, stored in (
        ("pre_fc_norm_embedding", "nextn.enorm"), ("pre_fc_norm_hidden", "nextn.hnorm"),
        ("norm", "nextn.shared_head_norm"), ("layers.0.input_layernorm", "attn_norm"),
    ):  # fmt: skip
        assert np.array_equal(tensors.array(f"mtp.{name}.weight"), extra[f"blk.4.{stored}.weight"] - np.float32(1))
    assert np.array_equal(tensors.array("mtp.layers.0.self_attn.q_proj.weight"), extra["blk.4.attn_q.weight"])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no state": ("qwen35", {"ssm.state_size": None}, "qwen35.ssm.state_size is missing"),
    "no heads": ("qwen35", {"ssm.time_step_rank": 0}, r"qwen35.ssm.time_step_rank must be in \[1, .*got 0"),
    "parts of heads": ("qwen35", {"ssm.inner_size": 121}, "time_step_rank must divide qwen35.ssm.inner_size, 121"),
    "parts of groups": ("qwen35", {"ssm.group_count": 4}, "ssm.group_count must divide .*time_step_rank, 6, got 4"),
    "all groups": ("qwen35", {"ssm.group_count": 1 << 27}, "ssm.group_count must divide .*time_step_rank, 6, got"),
    "wide filters": ("qwen35", {"ssm.conv_kernel": 99}, "linear_conv_kernel_dim"),
    "no interval": ("qwen35", {"full_attention_interval": 0}, "full_attention_interval must be in"),
    "only further layers": ("qwen35", {"nextn_predict_layers": 4}, "nextn_predict_layers must be in"),
    "two sizes": ("granitehybrid", {"attention.head_count_kv": [1, 2, 0]}, "head_count_kv must be one number in all"),
    "too few": ("granitehybrid", {"attention.head_count_kv": [0, 2]}, r"head_count_kv must be a number for each of 3"),
    "no head": ("granitehybrid", {"attention.head_count": None}, "attention.head_count is missing"),
    "no size": ("granitehybrid", {"feed_forward_length": None}, "feed_forward_length is missing"),
    "a layer of both": ("nemotron_h", {"feed_forward_length": [80] * 5}, "feed_forward_length must be 0 in layers"),
    "softmax": ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func must be absent or 2"),
    "no width": ("lfm2", {"shortconv.l_cache": None}, "shortconv.l_cache is missing"),
    "one norm more": ("mamba2", {"ssm.dt_b_c_rms": True}, "ssm.dt_b_c_rms must be absent or 0"),
    "no channels": ("kimi-linear", {"kda.head_dim": 0}, "kda.head_dim must be in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_lead_nowhere(name: str, tmp_path: Path) -> None:
    own, keys, message = REFUSED[name]
    file = FILES[own]
    write(replace(file, keys={**file.keys, **keys}), tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(model_folder(tmp_path / "m.gguf"), TorchOps())


_F32 = np.float32
DAMAGED: dict[str, tuple[str, str, Any, str]] = {
    "rates that grow": ("qwen35", "blk.0.ssm_a", np.ones(6, _F32), "blk.0.ssm_a must hold negative numbers, got 1"),
    "no rates": ("qwen35", "blk.0.ssm_a", np.full(6, -np.inf, _F32), "blk.0.ssm_a must hold negative numbers"),
    "fewer rates": ("qwen35", "blk.0.ssm_a", -np.ones(5, _F32), "blk.0.ssm_a must have 6 rows, got shape"),
    "more rates": ("granitehybrid", "blk.0.ssm_a", -np.ones((5, 1), _F32), r"mamba.A_log must have shape \(4,\)"),
    "absent rates": ("granitehybrid", "blk.0.ssm_a", None, "lacks the tensor model.layers.0.mamba.A_log"),
    "more rows": ("qwen3next", "blk.0.ssm_ba.weight", np.ones((9, 64), _F32), "blk.0.ssm_ba.weight must have 8 rows"),
    "fewer rows": ("qwen35", "blk.0.attn_qkv.weight", np.ones((9, 64), _F32), "blk.0.attn_qkv.weight must have 168"),
    "other heads": ("qwen35", "blk.0.ssm_out.weight", np.ones((64, 64), _F32), "ssm_out.weight must have inputs of 6"),
    "a flat filter": ("lfm2", "blk.0.shortconv.conv.weight", np.ones(192, _F32), "conv.conv.weight must have shape"),
    "codes of filters": (
        "lfm2", "blk.0.shortconv.conv.weight", np.zeros((64, 32), np.uint8), "shortconv.conv.weight must hold plain",
    ),
    "other rates": ("kimi-linear", "blk.0.ssm_a", -np.ones((1, 1, 5, 1), _F32), "self_attn.A_log must have shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_tensors_that_do_not_fit(name: str, tmp_path: Path) -> None:
    own, tensor, data, message = DAMAGED[name]
    write(FILES[own], tmp_path)
    stored = None if data is None else (data, Kind.F32)
    if data is not None and data.dtype == np.uint8:
        stored = gguf.quantize(np.zeros(data.shape, _F32), Kind.Q8_0), Kind.Q8_0
    rewrite(tmp_path / "m.gguf", tmp_path / "d.gguf", ("none", "none"), "none", other={tensor: stored})
    with pytest.raises(ValueError, match=message):
        load_model(model_folder(tmp_path / "d.gguf"), TorchOps())


def test_a_file_names_the_decoder_that_it_is_read_as(tmp_path: Path) -> None:
    write(FILES["qwen3next"], tmp_path)
    config = json.loads((model_folder(tmp_path / "m.gguf") / "config.json").read_text())
    assert config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    assert config["layer_types"] == ["linear_attention", "full_attention", "linear_attention"]


def test_marks_are_parts_of_words_for_qwen35(tmp_path: Path) -> None:
    """Two words with vowel signs, which Qwen 2 splits off."""
    write(FILES["qwen35"], tmp_path, tokenizer={**gguf_files.byte_tokens(97), "tokenizer.ggml.pre": "qwen35"})
    own = tokenizers.Tokenizer.from_file(str(model_folder(tmp_path / "m.gguf") / "tokenizer.json"))
    assert own.pre_tokenizer is not None
    assert len(own.pre_tokenizer.pre_tokenize_str("नमस्ते दुनिया!?")) == 3
