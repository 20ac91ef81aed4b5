"""What `inspect_model` says is what loading the model does."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import gguf_files
import quantised_folders
from pagewood.engine.api import ActivationFormat, WeightFormat
from pagewood.engine.model_folder.inspection import inspect_model
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.shard import Shard
from pagewood.engine.quantise import Scheme, quantise_model
from pagewood.engine.runner.cpu.program.ops import CPUOps, PackedLinear, PanelLinear
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.kvpool import MultiHeadLayout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("plain")
    quantised_folders.write_model(made, attention_bias=True)
    file = made / "model.safetensors"
    weights = load_file(file)
    save_file({name: one.bfloat16() if "mlp" in name else one for name, one in weights.items()}, file)
    return made


class _Counted(CPUOps):
    """Adds up the bytes of what it lays out."""

    num_bytes = 0

    def linear(self, weight, bias):
        made = super().linear(weight, bias)
        assert isinstance(made, PackedLinear | PanelLinear)
        self.num_bytes += made.weight.memory.nbytes if isinstance(made, PackedLinear) else made.panels.nbytes
        return made

    def embedding(self, table):
        self.linear(table, None)  # a table of its own has no panels if it is float32
        return super().embedding(table)


@pytest.mark.parametrize("form", get_args(WeightFormat))
def test_bytes_are_those_that_loading_takes(form: WeightFormat, folder: Path, tmp_path: Path) -> None:
    quantise_model(folder, tmp_path / "q", Scheme(format="int4", group_size=64))
    for model in (folder, tmp_path / "q"):
        found = inspect_model(model)
        ops = _Counted(Packer(form))
        load_model(model, ops, dtype=torch.float32 if form == "float32" else None)
        vectors = sum(one.nbytes for one in load_file(folder / "model.safetensors").values() if one.ndim == 1)
        assert found.weights_bytes[form] == ops.num_bytes + vectors, model


@pytest.mark.parametrize("form", get_args(WeightFormat))
@pytest.mark.parametrize("count", [2, 4])
def test_bytes_of_a_rank_are_those_that_loading_takes(form: WeightFormat, count: int, folder: Path) -> None:
    found, whole = inspect_model(folder, tensor_parallel_size=count), inspect_model(folder)
    ops = _Counted(Packer(form))
    load_model(folder, ops, dtype=torch.float32 if form == "float32" else None, shard=Shard(count - 1, count))
    weights = load_file(folder / "model.safetensors")
    biases = {"q_proj.bias": count, "k_proj.bias": 2, "v_proj.bias": 2}  # there are two key heads
    vectors = sum(
        one.nbytes // next((parts for end, parts in biases.items() if name.endswith(end)), 1)
        for name, one in weights.items()
        if one.ndim == 1
    )
    assert found.weights_bytes[form] == ops.num_bytes + vectors
    assert (found.num_parameters, found.model) == (whole.num_parameters, whole.model)
    assert found.kv_bytes_per_token["float32"] == whole.kv_bytes_per_token["float32"] // 2


def test_a_model_that_cannot_be_divided(folder: Path) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size must be >= 1, got 0"):
        inspect_model(folder, tensor_parallel_size=0)
    with pytest.raises(ValueError, match="num_attention_heads must be a multiple of tensor_parallel_size 3, got 4"):
        inspect_model(folder, tensor_parallel_size=3)


def test_what_a_folder_is(folder: Path) -> None:
    found = inspect_model(folder)
    assert (found.kind, found.name, found.tokenizer) == ("folder", folder.name, None)
    assert found.num_parameters == sum(one.numel() for one in load_file(folder / "model.safetensors").values())
    assert [(one.stored, one.loaded, one.count) for one in found.matrices] == [
        ("BF16", "bfloat16", 6),
        ("F32", "float32", 10),
    ]
    layout = MultiHeadLayout(num_layers=2, num_kv_heads=2, head_dim=16, page_size=16, dtype="float32", order="HND")
    assert found.kv_bytes_per_token["float32"] == layout.bytes_per_page // 16 == 2 * 2 * 2 * 16 * 4
    num_pages = -(-found.model.max_position // 16)
    assert found.kv_bytes_of_longest["float32"] == num_pages * layout.bytes_per_page
    assert found.errors == []


def test_layers_with_windows_need_memory_for_the_last_part_of_the_longest_text(tmp_path: Path) -> None:
    config: Any = transformers.Gemma3TextConfig(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=6, head_dim=16, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 14, sliding_window=1024,
    )  # fmt: skip
    transformers.Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    found = inspect_model(tmp_path)
    of_layer = 2 * 2 * 16 * 4  # keys and values, heads, elements, bytes
    assert found.kv_bytes_per_token["float32"] == 6 * of_layer
    in_window = 1024 + 512 + 16  # the window, the tokens of a step, and pages that are not full
    assert found.kv_bytes_of_longest["float32"] == (16384 + 5 * in_window) * of_layer


def test_the_embedded_model_and_its_templates() -> None:
    found = inspect_model(None)
    own = found.tokenizer
    assert own is not None
    assert (own.kind, own.num_tokens, own.end_tokens) == ("BPE", 512, ["<|end|>"])
    assert own.has_chat_template
    assert own.has_response_template


def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWOOD_CACHE", str(tmp_path / "cache"))
    quantised_folders.write_model(tmp_path)
    gguf_files.write_gguf(tmp_path, tmp_path / "m.gguf", architecture="llama", kinds=["Q4_0"])
    found = inspect_model(tmp_path / "m.gguf")
    assert (found.kind, [name for name, _ in found.files]) == ("GGUF", ["m.gguf"])
    assert [(one.stored, one.loaded, one.count) for one in found.matrices] == [
        ("gguf Q4_0", "int4 in groups of 32", 16)
    ]
    assert inspect_model(tmp_path / "m.gguf", form="int8").errors == []


def test_errors_are_those_of_the_packed_weights(folder: Path) -> None:
    found = inspect_model(folder, form="int4")
    assert len(found.errors) == 16
    assert [one.output_error for one in found.errors] == sorted(
        (one.output_error for one in found.errors), reverse=True
    )
    weights = load_file(folder / "model.safetensors")
    for one in found.errors:
        assert one.shape == tuple(weights[one.name].shape)
        assert 0.04 < one.weight_error < 0.12, one
        assert 0.04 < one.output_error < 0.15, one
    by_name = {
        form: {one.name: one for one in inspect_model(folder, form=form, activations=activations).errors}
        for form, activations in _FORMS.items()
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    eight, sixteen, whole = (by_name[form][name] for form in _FORMS)
    assert 1e-3 < sixteen.weight_error < 2.0**-8
    assert sixteen.output_error < 2 * sixteen.weight_error  # its activations are not rounded
    assert 2.0**-8 < eight.weight_error < 0.02
    assert eight.output_error > 1.2 * eight.weight_error  # those of int8 are
    widened = {one.name: one for one in inspect_model(folder, form="int8", activations="float32").errors}[name]
    assert widened.weight_error == eight.weight_error
    assert widened.output_error < 0.9 * eight.output_error
    assert whole.weight_error == whole.output_error == 0
    rounded = {one.name: one for one in inspect_model(folder, form="bfloat16", activations="bfloat16").errors}[name]
    assert rounded.weight_error == sixteen.weight_error
    assert 1.2 * sixteen.output_error < rounded.output_error < 2 * sixteen.output_error
    mlp = by_name["bfloat16"]["model.layers.0.mlp.up_proj.weight"]
    assert mlp.weight_error == 0  # it is bfloat16 already


_FORMS: dict[WeightFormat, ActivationFormat] = {"int8": "auto", "bfloat16": "float32", "auto": "auto"}


def test_a_form_that_does_not_exist(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"form must be one of auto, .*, got 'int3'"):
        inspect_model(folder, form="int3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"activations must be auto or float32 unless .*, got 'bfloat16'"):
        inspect_model(folder, form="int8", activations="bfloat16")
    with pytest.raises(ValueError, match="activations must be one of auto, float32, bfloat16, got 'int8'"):
        inspect_model(folder, form="auto", activations="int8")  # pyright: ignore[reportArgumentType]
