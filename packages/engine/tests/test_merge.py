"""A model with a merged adapter against PEFT's own merge, for every arrangement of tensors."""

# pyright: basic
# torch and peft are typed in part only.

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantised_folders
from adapter_folders import EXPERTS, write_adapter
from families.case import build
from families.registry import CASES
from pagewood.engine.model_folder.adapter_modules import model_modules
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.model_folder.merge import merge_adapter
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.quantise import Scheme, quantise_model
from seeded_faults import slow_ones

TOKENS = [5, 9, 1, 44, 23, 90, 11, 3, 3, 71]
KINDS: dict[str, dict[str, Any]] = {
    "llama-biases": {"use_dora": True, "bias": "lora_only"}, "gpt2": {}, "gpt-neox": {"use_dora": True},
    "phi3-window": {"use_rslora": True}, "starcoder2": {"bias": "lora_only"}, "gemma3-in-a-model-of-images": {},
}  # fmt: skip
MIXTURES = ("gpt-oss", "mixtral", "granite-moe", "qwen3-moe")
"""Stored as parameters of all experts, of which the rows take turns; expert by expert; in modules of their own."""


@torch.inference_mode()
def logits_of(folder: Path) -> torch.Tensor:
    model = load_model(folder, TorchOps())
    positions = torch.arange(len(TOKENS))
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(TOKENS))
    return model(torch.tensor(TOKENS), [rope(positions) for rope in model.ropes], attention, positions)


@pytest.mark.parametrize("name", KINDS)
def test_a_merged_model_computes_what_peft_does(name: str, tmp_path: Path) -> None:
    reference = build(CASES[name], tmp_path / "model")
    modules = model_modules(tmp_path / "model")
    ends = {one for one, module in modules.modules.items() if module.takes_tokens or module.table}
    named = [one for one, module in reference.named_modules() if hasattr(module, "weight")]
    known = [one for one in named if (places := modules.places(one)) and not ends & places.keys()]
    fields = {"r": 4, "target_modules": known, **KINDS[name]}
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "adapter", **fields)
    num_changed = merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    assert num_changed == len(modules.modules) - len(ends)
    with torch.inference_mode():
        expected = changed(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, atol=1e-4, rtol=0)
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("model", "merged"))
    assert {key: (one.shape, one.dtype) for key, one in before.items()} == {
        key: (one.shape, one.dtype) for key, one in after.items()
    }


@pytest.mark.parametrize("name", slow_ones(MIXTURES, "qwen3-moe"))
def test_experts_are_merged(name: str, tmp_path: Path) -> None:
    reference = build(CASES[name], tmp_path / "model")
    fields = {"r": 3, "target_modules": ["q_proj"], "target_parameters": EXPERTS}
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "adapter", **fields)
    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    with torch.inference_mode():
        expected = changed(torch.tensor([TOKENS])).logits[0]
        assert not torch.allclose(expected, reference(torch.tensor([TOKENS])).logits[0], atol=1e-2)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, atol=1e-4, rtol=0)


ENDS: dict[str, dict[str, Any]] = {
    "low rank": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "embedding": {"r": 4, "target_modules": ["embed_tokens", "q_proj"]},
    "whole": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "up_proj"]},
    "whole head": {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "tokens": {"r": 4, "target_modules": ["q_proj"], "trainable_token_indices": [TOKENS[3], 7]},
}


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_both_ends_are_merged(name: str, kind: str, tmp_path: Path) -> None:
    """Also where they share a table, which they no longer do unless both are changed alike."""
    reference = build(CASES[name], tmp_path / "model")
    before = json.loads((tmp_path / "model" / "config.json").read_text())
    changed = write_adapter(copy.deepcopy(reference), tmp_path / "adapter", **ENDS[kind])
    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    after = json.loads((tmp_path / "merged" / "config.json").read_text())
    with torch.inference_mode():
        expected = changed(torch.tensor([TOKENS])).logits[0]
        assert not torch.allclose(expected, reference(torch.tensor([TOKENS])).logits[0], atol=1e-2)
    torch.testing.assert_close(logits_of(tmp_path / "merged"), expected, atol=1e-4, rtol=0)
    is_tied = reference.config.tie_word_embeddings
    assert is_tied == (name == "gemma3")
    has_head = any(one.endswith("lm_head.weight") for one in load_file(tmp_path / "merged" / "model.safetensors"))
    assert has_head == (not is_tied or kind != "tokens")
    assert after.get("tie_word_embeddings", before.get("tie_word_embeddings", is_tied)) == (not has_head)


def test_ends_of_a_family_with_one_table_must_stay_alike(tmp_path: Path) -> None:
    reference = build(CASES["gpt2"], tmp_path / "model")
    write_adapter(copy.deepcopy(reference), tmp_path / "adapter", r=2, target_modules=["wte"], fan_in_fan_out=True)
    with pytest.raises(ValueError, match="must be changed alike to be merged"):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")


def test_numbers_keep_their_dtype_and_quantised_ones_are_refused(tmp_path: Path) -> None:
    reference = build(CASES["llama"], tmp_path / "model")
    write_adapter(copy.deepcopy(reference), tmp_path / "adapter", r=2, target_modules=["q_proj"])
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: one.bfloat16() for name, one in load_file(file).items()}, file)
    merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    assert {one.dtype for one in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="OUT must be a new or empty folder"):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
    quantised_folders.write_model(tmp_path / "plain")
    quantise_model(tmp_path / "plain", tmp_path / "quantised", Scheme(format="int8"))
    with pytest.raises(ValueError, match="weights must be plain numbers for an adapter to be merged"):
        merge_adapter(tmp_path / "quantised", tmp_path / "adapter", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_bias_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    reference = build(CASES["llama"], tmp_path / "model")
    write_adapter(copy.deepcopy(reference), tmp_path / "adapter", r=2, target_modules=["q_proj"], lora_bias=True)
    with pytest.raises(ValueError, match="lora_bias must be false"):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"target_modules": ["q_proj"], "alora_invocation_tokens": [3]},
            r"alora_invocation_tokens must be null .*\[3\]",
        ),
    ],
)
def test_what_cannot_be_merged_is_refused(fields: dict[str, Any], error: str, tmp_path: Path) -> None:
    reference = build(CASES["llama"], tmp_path / "model")
    write_adapter(copy.deepcopy(reference), tmp_path / "adapter", r=2, **fields)
    with pytest.raises(ValueError, match=error):
        merge_adapter(tmp_path / "model", tmp_path / "adapter", tmp_path / "merged")
