"""Drafting heads and draft models that do not fit are refused by name, before memory is taken."""

# pyright: basic
# torch and safetensors are typed in part only.

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from pagewood.engine.model_folder.folder import FoundDrafter, find_drafter
from pagewood.engine.model_folder.load import check_draft, check_head, load_draft, load_head, load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.head_config import HeadConfig
from stand_ins.torch_decoding import torch_ops

TARGET: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
HEAD = {**TARGET, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 7}


def layer_tensors(prefix: str, *, inputs: int = 8) -> dict[str, Tensor]:
    shapes = {
        "self_attn.q_proj": (8, inputs),
        "self_attn.k_proj": (4, inputs),
        "self_attn.v_proj": (4, inputs),
        "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (12, 8),
        "mlp.up_proj": (12, 8),
        "mlp.down_proj": (8, 12),
        "input_layernorm": (8,),
        "post_attention_layernorm": (8,),
    }
    return {f"{prefix}.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}


def target_tensors() -> dict[str, Tensor]:
    tensors = {"model.embed_tokens.weight": torch.randn(12, 8), "lm_head.weight": torch.randn(12, 8)}
    tensors["model.norm.weight"] = torch.randn(8)
    for i in range(4):
        tensors |= layer_tensors(f"model.layers.{i}")
    return tensors


def head_tensors() -> dict[str, Tensor]:
    return {
        "fc.weight": torch.randn(8, 24),
        "midlayer.hidden_norm.weight": torch.randn(8),
        "norm.weight": torch.randn(8),
        "lm_head.weight": torch.randn(7, 8),
        "d2t": torch.tensor([0, 0, 1, 1, 5, 5, 5]),
        "t2d": torch.zeros(12, dtype=torch.bool),
        **layer_tensors("midlayer", inputs=16),
    }


def mtp_tensors() -> dict[str, Tensor]:
    names = {"enorm": (8,), "hnorm": (8,), "eh_proj": (8, 16), "shared_head.norm": (8,)}
    own = {f"model.layers.4.{name}.weight": torch.randn(shape) for name, shape in names.items()}
    return own | layer_tensors("model.layers.4")


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write(tmp_path / "target", TARGET, target_tensors())


def load(folder: Path, target: Path) -> None:
    ops = torch_ops()
    load_head(folder, load_model(target, ops), ops)


def test_a_head_with_a_part_of_the_vocabulary(tmp_path: Path, target: Path) -> None:
    folder = write(tmp_path / "head", HEAD, head_tensors())
    ops = torch_ops()
    reports: list[tuple[str, int, int]] = []
    head = load_head(folder, load_model(target, ops), ops, progress=lambda *step: reports.append(step))
    assert (head.config.output_size, head.config.captured, head.config.layer.num_layers) == (7, (2, 2, 1), 1)
    assert head.token_map is not None
    assert head.token_map.tolist() == [0, 1, 3, 4, 9, 10, 11]
    assert reports == [("reading weights", i + 1, 15) for i in range(14)]  # t2d is not read


def test_captured_states_can_be_replaced(tmp_path: Path, target: Path) -> None:
    folder = write(tmp_path / "head", HEAD, head_tensors())
    config = ModelConfig.from_folder(target)
    assert HeadConfig.from_folder(folder, config, captured=[1, 3, 4]).captured == (1, 3, 4)
    with pytest.raises(ValueError, match=r"captured states must be in \[0, 4\], got 6"):
        HeadConfig.from_folder(folder, config, captured=[1, 3, 6])
    with pytest.raises(ValueError, match=r"fc\.weight must have shape \(8, 16\), got \(8, 24\)"):
        check_head(folder, HeadConfig.from_folder(folder, config, captured=[1, 3]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 13}, "vocab_size must be the target's 12, got 13"),
        ({"target_hidden_size": 16}, "target_hidden_size must be 8, got 16"),
        (
            {"hidden_size": 16},
            r"hidden_size must be the target's 8 because the head has no embed_tokens\.weight, got 16",
        ),
        ({"draft_vocab_size": 13}, r"draft_vocab_size must be in \[1, 12\], got 13"),
        ({"draft_vocab_size": 6}, r"lm_head\.weight must have shape \(6, 8\), got \(7, 8\)"),
        ({"intermediate_size": 16}, r"gate_proj\.weight must have shape \(16, 8\)"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1, got 2"),
        ({"num_aux_hidden_states": 4}, "eagle_aux_hidden_state_layer_ids must name 4 layers, got none"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 4]}, r"captured states must be in \[0, 4\], got 5"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, r"fc\.weight must have shape \(8, 16\)"),
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc must be false because the head has no such norm"),
        (
            {"norm_output": True, "eagle_config": {"norm_output": False}},
            "norm_output and eagle_config.norm_output must say the same, got True and False",
        ),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]},
            },
            "eagle_aux_hidden_state_layer_ids must say the same",
        ),
        ({"speculators_model_type": "dflash"}, "speculators_model_type must be eagle3, got 'dflash'"),
        ({"quantization_config": {"bits": 4}}, "quant_method must be one of gptq, awq, .* got 'none'"),
    ],
)
def test_a_configuration_that_does_not_fit(tmp_path: Path, target: Path, change: dict[str, Any], message: str) -> None:
    folder = write(tmp_path / "head", {**HEAD, **change}, head_tensors())
    with pytest.raises(ValueError, match=message):
        load(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lm_head.weight": None}, r"draft_vocab_size must be 12 because the head has no lm_head\.weight, got 7"),
        ({"d2t": None}, "draft_vocab_size must be 12 because the head has no d2t, got 7"),
        ({"d2t": torch.zeros(7)}, r"d2t must hold whole numbers \(I64, I32\), got F32"),
        ({"d2t": torch.zeros(8, dtype=torch.int64)}, r"d2t must have shape \(7,\), got \(8,\)"),
        ({"d2t": torch.full((7,), 6)}, r"d2t must lead to tokens in \[0, 12\), got \[6, 12\]"),
        ({"d2t": torch.full((7,), -1)}, r"d2t must lead to tokens in \[0, 12\), got \[-1, 5\]"),
        ({"norm.weight": None}, r"lacks the tensor norm\.weight"),
        ({"fc.bias": torch.zeros(8)}, r"1 unexpected tensors, the first is fc\.bias"),
        ({"midlayer.hidden_norm.weight": None}, "must hold an EAGLE-3 head or layers for multi-token prediction"),
        ({"fc_norm.0.weight": torch.ones(8), "fc_norm.1.weight": torch.ones(8)}, "captured states must be 2, one for"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(4)}, r"lacks the tensor midlayer\.self_attn\.k_norm"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, target: Path, change: dict[str, Tensor | None], message: str) -> None:
    tensors = {name: value for name, value in {**head_tensors(), **change}.items() if value is not None}
    folder = write(tmp_path / "head", HEAD, tensors)
    with pytest.raises(ValueError, match=message):
        load(folder, target)
    with pytest.raises(ValueError, match=message):  # found by the headers alone
        check_head(folder, HeadConfig.from_folder(folder, ModelConfig.from_folder(target)))


def test_layers_for_multi_token_prediction_do_not_disturb_their_target(tmp_path: Path) -> None:
    config, tensors = {**TARGET, "num_nextn_predict_layers": 1}, {**target_tensors(), **mtp_tensors()}
    folder = write(tmp_path / "model", config, tensors)
    load(folder, folder)
    with pytest.raises(ValueError, match=r"13 unexpected tensors, the first is model\.layers\.4\.eh_proj"):
        load_model(write(tmp_path / "other", TARGET, tensors), torch_ops())
    del tensors["model.layers.4.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks the tensor model\.layers\.4\.mlp\.up_proj"):
        load(write(tmp_path / "lacking", config, tensors), folder)
    target = ModelConfig.from_folder(folder)
    with pytest.raises(ValueError, match="the head must be layer 3, got layer 4"):
        HeadConfig.from_folder(folder, replace(target, layers=target.layers[:3]))
    with pytest.raises(ValueError, match="captured states of a layer for multi-token prediction must be 1, got 2"):
        HeadConfig.from_folder(folder, ModelConfig.from_folder(folder), captured=[1, 2])


@pytest.mark.parametrize(
    ("copy", "original"), [("embed_tokens", r"model\.embed_tokens"), ("shared_head.head", "lm_head")]
)
def test_a_head_must_not_have_another_copy_of_what_it_shares(tmp_path: Path, copy: str, original: str) -> None:
    config, tensors = {**TARGET, "num_nextn_predict_layers": 1}, {**target_tensors(), **mtp_tensors()}
    stored = tensors["model.embed_tokens.weight" if copy == "embed_tokens" else "lm_head.weight"].clone()
    tensors[f"model.layers.4.{copy}.weight"] = stored
    folder = write(tmp_path / "same", config, tensors)
    load(folder, folder)
    stored[5, 2] += 1
    folder = write(tmp_path / "other", config, tensors)
    with pytest.raises(ValueError, match=rf"layers\.4\.{copy}\.weight must equal {original}\.weight .* row 5 differs"):
        load(folder, folder)


def test_experts_are_refused(tmp_path: Path) -> None:
    tensors = {**target_tensors(), **mtp_tensors(), "model.layers.4.mlp.experts.0.up_proj.weight": torch.ones(1)}
    folder = write(tmp_path / "model", {**TARGET, "num_nextn_predict_layers": 1}, tensors)
    with pytest.raises(ValueError, match=r"1 unexpected tensors, the first is model\.layers\.4\.mlp\.experts\.0"):
        load(folder, folder)


def write_tokenizer(folder: Path, vocab: Any, added: dict[str, int] | None = None) -> None:
    tokens = [{"content": content, "id": i} for content, i in (added or {}).items()]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": tokens}))


def test_a_draft_model(tmp_path: Path, target: Path) -> None:
    draft = write(tmp_path / "draft", {**TARGET, "num_hidden_layers": 4}, target_tensors())
    assert load_draft(draft, target, torch_ops()).config.vocab_size == 12
    write_tokenizer(draft, {"a": 0, "b": 1}, {"<s>": 2})
    assert check_draft(draft, target).num_layers == 4  # only one of the two has a tokenizer.json
    write_tokenizer(target, {"b": 1, "a": 0}, {"<s>": 2})
    load_draft(draft, target, torch_ops())


@pytest.mark.parametrize(
    ("own", "others", "message"),
    [
        (({"a": 0, "b": 1}, {}), ({"a": 1, "b": 0}, {}), r"got 2 with other ids, the first is 'a': 0 and 1"),
        (({"a": 0}, {}), ({"a": 0, "b": 1}, {}), "got 1 with other ids, the first is 'b': None and 1"),
        (({"a": 0}, {"<s>": 2}), ({"a": 0}, {"<s>": 3}), "the first is '<s>': 2 and 3"),
        (([["a", -1.0], ["b", -2.0]], {}), ([["b", -1.0], ["a", -2.0]], {}), "the first is 'a': 0 and 1"),
        (({"a": 0}, {"<s>": -1}), ({"a": 0}, {}), r"added_tokens: id must be in \[0, 16777215\], got -1"),
    ],
)
def test_a_draft_model_with_other_tokens(tmp_path: Path, target: Path, own: Any, others: Any, message: str) -> None:
    draft = write(tmp_path / "draft", TARGET, target_tensors())
    write_tokenizer(draft, *own)
    write_tokenizer(target, *others)
    with pytest.raises(ValueError, match=message):
        load_draft(draft, target, torch_ops())


def test_a_draft_model_with_another_vocabulary_size(tmp_path: Path, target: Path) -> None:
    draft = write(tmp_path / "draft", {**TARGET, "vocab_size": 13}, {})
    with pytest.raises(ValueError, match=r"config\.json: vocab_size of a draft model must be the target's 12, got 13"):
        check_draft(draft, target)


def test_what_ships_with_a_model(tmp_path: Path, target: Path) -> None:
    assert find_drafter(target, "auto") == FoundDrafter(kind="ngram")
    draft = write(target / "draft", TARGET, target_tensors())
    assert find_drafter(target, "auto") == FoundDrafter(kind="draft", folder=draft)
    with pytest.raises(FileNotFoundError, match=r"target does not hold a folder eagle/ or layers"):
        find_drafter(target, "eagle")
    write(target, {**TARGET, "num_nextn_predict_layers": 1}, {**target_tensors(), **mtp_tensors()})
    assert find_drafter(target, "auto") == FoundDrafter(kind="eagle", folder=target)
    head = write(target / "eagle", HEAD, head_tensors())
    assert find_drafter(target, "auto") == find_drafter(target, "eagle") == FoundDrafter(kind="eagle", folder=head)
    assert find_drafter(target, "draft") == FoundDrafter(kind="draft", folder=draft)
    assert find_drafter(target, "suffix") == FoundDrafter(kind="suffix")


def test_a_folder_that_is_named(tmp_path: Path, target: Path) -> None:
    head = write(tmp_path / "head", HEAD, head_tensors())
    assert find_drafter(target, "auto", speculative_model=head) == FoundDrafter(kind="eagle", folder=head)
    assert find_drafter(head, "auto", speculative_model=str(target)) == FoundDrafter(kind="draft", folder=target)
    assert find_drafter(target, "eagle", speculative_model=head).folder == head
    with pytest.raises(FileNotFoundError, match=r"speculative_model must be a folder, got .*missing"):
        find_drafter(target, "auto", speculative_model=tmp_path / "missing")
    with pytest.raises(ValueError, match=r"must be None for speculative 'ngram', got '.*head'"):
        find_drafter(target, "ngram", speculative_model=head)
    with pytest.raises(FileNotFoundError, match="does not hold a folder draft/"):
        find_drafter(target, "draft")


HOSTILE = st.none() | st.booleans() | st.integers(-3, 2**40) | st.floats() | st.text(max_size=3) | st.lists(
    st.integers(-2, 9), max_size=5
)  # fmt: skip
FIELDS = [
    "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual", "norm_output", "fc_norm", "eagle_config", "speculators_model_type",
    "transformer_layer_config", "num_hidden_layers", "vocab_size", "hidden_size", "layer_types", "sliding_window",
]  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FIELDS), HOSTILE, max_size=4))
def test_any_configuration_is_read_or_refused(tmp_path: Path, target: Path, changes: dict[str, Any]) -> None:
    folder = tmp_path / "head"
    if not folder.exists():
        write(folder, HEAD, head_tensors())
    (folder / "config.json").write_text(json.dumps({**HEAD, **changes}))
    with suppress(ValueError):
        check_head(folder, HeadConfig.from_folder(folder, ModelConfig.from_folder(target)))
