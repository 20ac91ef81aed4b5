"""Folders whose files have been edited by hand: the logits are those of `transformers`, or an error names the fault.

The reference reads the same folder through its Auto classes, which decide by config.json what a model is.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewood.engine.json_fields import Fields
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.storage import storage_for
from row_driver import RowDriver

SMALL = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": 3,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "MiMo", "Gemma", "Granite", "Olmo", "Starcoder2", "Apertus",
            "Cohere2", "GPTNeoX", "Nemotron")  # fmt: skip
Edit = Callable[[dict[str, Any]], dict[str, Any]]


def write(folder: Path, family: str, edit: Edit = lambda values: values, **extra: Any) -> None:
    """Write a random model and edit its config.json. MiMo's decoder is Qwen2's, and `transformers` has no MiMo."""
    kind = "Qwen2" if family == "MiMo" else family
    torch.manual_seed(11)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **extra})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values["architectures"] = [f"{family}ForCausalLM"]
    (folder / "config.json").write_text(json.dumps(edit(values)))


def assert_same_logits(folder: Path) -> None:
    """Compare the logits of 40 tokens with those of `transformers`, which reads the same folder."""
    tokens = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(2)).tolist()
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = reference(torch.tensor(tokens)[None]).logits[0]
    model = load_model(folder, CPUOps())
    config = model.config
    layout = config.memory_layout(page_size=4, dtype="float32", order="HND")
    runner = CPURunner(model, storage_for(layout, 60), warm_up(layout), max_rows=2, max_length=64, num_threads=1)
    driver = RowDriver(runner, num_pages=60, page_size=4)
    logits = torch.from_numpy(runner.forward(driver.batch([(driver.add(tokens), 64)])))
    runner.close()
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=0)


def without(*names: str) -> Edit:
    return lambda values: {name: value for name, value in values.items() if name not in names}


def with_fields(**fields: Any) -> Edit:
    return lambda values: {**values, **fields}


ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]


@pytest.mark.parametrize(
    ("family", "edit", "extra"),
    [
        ("Mistral", with_fields(layer_types=ALTERNATING), {"sliding_window": 5}),
        ("Mistral", with_fields(layer_types=["full_attention"] * 3), {"sliding_window": 5}),
        (
            "Mistral",
            without("num_key_value_heads"),
            {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 16},
        ),
        ("Qwen2", with_fields(layer_types=["full_attention"] * 3), {"use_sliding_window": True, "sliding_window": 5}),
        (
            "Qwen3",
            with_fields(rope_scaling={**YARN, "rope_theta": 5e5}, rope_parameters=None, rope_theta=5e5),
            {"head_dim": 16},
        ),
        ("Llama", with_fields(rope_scaling={"type": "linear", "factor": 2}, rope_parameters=None, rope_theta=5e5), {}),
        (
            "Llama",
            with_fields(rope_scaling={**YARN, "rope_theta": 5e5}),
            {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        ),
        ("Llama", without("tie_word_embeddings", "rms_norm_eps", "hidden_act"), {}),
    ],
)
def test_edited_configurations(tmp_path: Path, family: str, edit: Edit, extra: dict[str, Any]) -> None:
    write(tmp_path, family, edit, **extra)
    assert_same_logits(tmp_path)


def test_a_tied_pair_stored_as_its_output_projection(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3", tie_word_embeddings=True, head_dim=16)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert_same_logits(tmp_path)


@pytest.mark.parametrize("family", ["Mistral", "Qwen2"])
def test_an_absent_window_is_that_of_the_family_and_null_is_none(tmp_path: Path, family: str) -> None:
    write(tmp_path, family, without("sliding_window"), use_sliding_window=True, max_window_layers=0)
    reference: Any = transformers.AutoConfig.from_pretrained(tmp_path)
    assert ModelConfig.from_folder(tmp_path).windows == (reference.sliding_window,) * 3 == (4096,) * 3
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps({**values, "sliding_window": None}))
    assert ModelConfig.from_folder(tmp_path).windows == (None,) * 3


PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        # One number in two places.
        ("Llama", {"rope_parameters": PLAIN, "rope_scaling": YARN}, "rope_parameters.factor and rope_scaling.factor"),
        (
            "Llama",
            {"rope_parameters": {**YARN, "rope_theta": 1e6}, "rope_scaling": YARN},
            r"rope_parameters.rope_theta and rope_scaling.rope_theta must say the same, got 1000000.0 and None",
        ),
        ("Qwen3", {"rope_parameters": PLAIN, "rope_theta": 1e4}, "rope_theta and rope_parameters.rope_theta must say"),
        ("Qwen3", {"rope_parameters": {**PLAIN, "type": "yarn"}}, "rope_type and type must say the same"),
        (
            "Qwen3",
            {"rope_parameters": {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 1e4}}},
            "full_attention and sliding_attention must say the same",
        ),
        ("Qwen3", {"rope_parameters": {"full_attention": PLAIN, "rope_theta": 1e4}}, "got 'rope_theta' beside"),
        (
            "Mistral",
            {"rope_parameters": YARN, "original_max_position_embeddings": 32},
            "original_max_position_embeddings and rope_parameters.original_max_position_embeddings must say the same",
        ),
        ("Llama", {"rope_parameters": {**PLAIN, "factor": 8.0}}, "factor must be absent or null or 1, got 8.0"),
        ("Llama", {"rope_parameters": {**YARN, "long_factor": [1.0]}}, "long_factor must be absent or null, got"),
        ("Llama", {"num_kv_heads": 4}, "num_key_value_heads and num_kv_heads must say the same, got 2 and 4"),
        ("Llama", {"hidden_activation": "gelu"}, "hidden_act and hidden_activation must say the same"),
        ("Llama", {"rms_norm_eps": None, "norm_eps": 1e-5}, "norm_eps must be named rms_norm_eps"),
        ("Llama", {"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype and torch_dtype must say the same"),
        ("MiMo", {"num_nextn_predict_layers": 1, "num_mtp_layers": 2}, "must say the same, got 1 and 2"),
        # Windows and layers.
        ("Mistral", {"sliding_window": None, "layer_types": ALTERNATING}, "sliding_attention only"),
        ("Qwen2", {"use_sliding_window": False, "layer_types": ALTERNATING}, "sliding_attention only"),
        ("Llama", {"layer_types": ALTERNATING}, "layer_types must not name sliding_attention"),
        ("Llama", {"sliding_window": 64}, "sliding_window must be absent or null, got 64"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types must have 3 entries, got 1"),
        # What the architecture fixes, or no supported architecture does.
        ("Mistral", {"attention_bias": True}, "attention_bias must be absent or null or False, got True"),
        ("Qwen2", {"attention_bias": False}, "attention_bias must be absent or null or True, got False"),
        ("Qwen3", {"mlp_bias": True}, "mlp_bias must be absent or null or False, got True"),
        ("Llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be absent or null or 0, got 50.0"),
        ("Llama", {"embedding_multiplier": 12.0}, "embedding_multiplier must be absent or null or 1, got 12.0"),
        ("Llama", {"partial_rotary_factor": 0.5, "rope_parameters": PLAIN}, "partial_rotary_factor must be 1, got 0.5"),
        ("Llama", {"head_dim": None, "hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads 4"),
    ],
)
def test_a_contradiction_is_an_error_that_names_it(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    write(tmp_path, family)
    ModelConfig.from_folder(tmp_path)
    edited = {**json.loads((tmp_path / "config.json").read_text()), **fields}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match=message) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


END = {"content": "</end>", "special": True}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, ()),
        ({"tokenizer_config.json": {"eos_token": "</end>"}}, (7,)),
        ({"tokenizer_config.json": {"eos_token": END, "added_tokens_decoder": {"9": END}}}, (9,)),
        ({"tokenizer_config.json": {"eos_token": "letter"}}, (4,)),
        ({"tokenizer_config.json": {"eos_token": "unknown"}}, ()),
        ({"tokenizer_config.json": {"eos_token": "large"}}, ()),
        ({"special_tokens_map.json": {"eos_token": END}}, (7,)),
        (
            {"tokenizer_config.json": {"eos_token": "letter"}, "special_tokens_map.json": {"eos_token": END}},
            (4,),
        ),
        ({"config.json": {"eos_token_id": 3}, "tokenizer_config.json": {"eos_token": END}}, (3, 7)),
        ({"config.json": {"eos_token_id": 3}, "generation_config.json": {"eos_token_id": [5, 7]}}, (5, 7)),
        (
            {"generation_config.json": {"eos_token_id": [5, 7]}, "tokenizer_config.json": {"eos_token": END}},
            (5, 7),
        ),
    ],
)
def test_end_tokens(tmp_path: Path, files: dict[str, dict[str, Any]], ends: tuple[int, ...]) -> None:
    """generation_config.json replaces config.json; the tokenizer's token ends a sequence too."""
    write(tmp_path, "Llama", eos_token_id=None)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    tokenizer = {
        "model": {"vocab": {"letter": 4, "large": 61}},
        "added_tokens": [{"id": 7, "content": "</end>", "special": True}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name, fields in files.items():
        known = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
        (tmp_path / name).write_text(json.dumps({**known, **fields}))
    assert ModelConfig.from_folder(tmp_path).eos_token_ids == ends


def test_one_rope_for_every_layer_type(tmp_path: Path) -> None:
    write(tmp_path, "Qwen3", with_fields(rope_parameters={"full_attention": PLAIN, "sliding_attention": PLAIN}))
    assert ModelConfig.from_folder(tmp_path).ropes[0].theta == 1e6


class Recorded(Mapping[str, object]):
    """The fields of a file; notes which of them are read."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> object:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


WITHOUT_EFFECT = {
    **dict.fromkeys(("attention_dropout", "initializer_range", "problem_type"), "training"),
    **dict.fromkeys(("classifier_dropout", "embedding_dropout", "hidden_dropout", "residual_dropout"), "training"),
    **dict.fromkeys(("chunk_size_feed_forward", "pretraining_tp", "use_cache"), "another way to the same numbers"),
    **dict.fromkeys(("id2label", "label2id"), "names of classes"),
    **dict.fromkeys(("output_hidden_states", "return_dict", "tie_last_hidden_states"), "what a call returns"),
    **dict.fromkeys(("bos_token_id", "pad_token_id"), "the tokenizer decides"),
    "is_decoder": "all are",
    "transformers_version": "who wrote the file",
}
"""Fields that change no logits, and why."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_of_the_family_is_read_or_has_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    write(tmp_path, family, head_dim=16, use_sliding_window=True, max_window_layers=1)
    values = json.loads((tmp_path / "config.json").read_text())
    values.pop("layer_types", None)  # with it, max_window_layers is not needed
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").unlink()  # with it, eos_token_id is not needed
    found: list[Recorded] = []
    from_file = Fields.from_file

    def recorded(path: Path) -> Fields:
        fields = from_file(path)
        if path.name != "config.json":
            return fields
        found.append(Recorded(fields.values))
        return replace(fields, values=found[-1])

    monkeypatch.setattr(Fields, "from_file", recorded)
    ModelConfig.from_folder(tmp_path)
    read = set[str]().union(*(one.read for one in found))
    config_class: Any = getattr(transformers, f"{'Qwen2' if family == 'MiMo' else family}Config")
    names = {field.name for field in dataclasses.fields(config_class)} | {"per_layer_config", "rope_scaling"}
    assert names - read - WITHOUT_EFFECT.keys() == set()
    assert names & read & WITHOUT_EFFECT.keys() == set()
