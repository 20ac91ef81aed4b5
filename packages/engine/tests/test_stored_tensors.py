"""Checkpoints whose tensors have other names, shapes or places than those of Llama's."""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families.case import build
from families.registry import CASES
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.families.stored_layout import StoredLayout
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.stacked_rows import StackedRows
from pagewood.engine.models.stored.stored_tensors import StoredTensors
from pagewood.engine.quantise import Scheme, quantise_model

LAYOUT = StoredLayout(
    prefix="decoder.",
    layers="h",
    outside={"wte": "model.embed_tokens"},
    in_layer={"ln": "input_layernorm"},
    fused={"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
    unneeded=(".mask",),
)


class Named:
    """`TensorFiles` of tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor], format: Any = None) -> None:
        self._tensors, self._format = tensors, format

    def names(self) -> set[str]:
        return set(self._tensors)

    def header(self, name: str) -> tuple[tuple[int, ...], str]:
        return tuple(self._tensors[name].shape), "F32"

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def format_of(self, name: str) -> Any:
        return self._format

    def is_unneeded(self, name: str) -> bool:
        return False

    def close(self) -> None:
        pass


def stored(tensors: dict[str, Tensor], **layout: Any) -> StoredTensors:
    arranged = StoredLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__slots__} | layout)
    return StoredTensors(Named(tensors), arranged, num_heads=4)


@pytest.mark.parametrize("prefix", ["decoder.", ""])
def test_names_outside_and_inside_of_layers(prefix: str) -> None:
    """With the prefix of the whole model, or as the decoder is stored alone."""
    names = ("wte.weight", "h.3.ln.weight", "h.3.ln.bias", "h.3.mlp.up_proj.weight", "h.0.attn.mask", "other.weight")
    files = stored({f"{prefix}{name}": torch.ones(2) for name in names})
    assert set(files.names()) == {
        "model.embed_tokens.weight", "model.layers.3.input_layernorm.weight", "model.layers.3.input_layernorm.bias",
        "model.layers.3.mlp.up_proj.weight", "model.layers.0.attn.mask", "other.weight",
    }  # fmt: skip
    assert files.is_unneeded("model.layers.0.attn.mask")
    assert not files.is_unneeded("other.weight")


@pytest.mark.parametrize("by_head", [False, True])
def test_fused_matrices_are_taken_apart(by_head: bool) -> None:
    whole = torch.randn(48, 8)
    files = stored({"h.1.qkv.weight": whole, "h.1.qkv.bias": whole[:, 0]}, fused_by_head=by_head)
    for part, name in enumerate(("q_proj", "k_proj", "v_proj")):
        own = f"model.layers.1.self_attn.{name}"
        rows = [slice(12 * head + 4 * part, 12 * head + 4 * part + 4) for head in range(4)]
        expected = torch.cat([whole[one] for one in rows]) if by_head else whole[16 * part : 16 * part + 16]
        assert files.header(f"{own}.weight")[0] == (16, 8)
        assert torch.equal(files.read(f"{own}.weight"), expected)
        assert torch.equal(files.read(f"{own}.bias"), expected[:, 0])


def test_matrices_of_layers_may_have_inputs_first() -> None:
    whole, table = torch.randn(8, 48), torch.randn(9, 8)
    files = stored({"h.1.qkv.weight": whole, "wte.weight": table}, has_inputs_first=True)
    assert files.header("model.layers.1.self_attn.k_proj.weight")[0] == (16, 8)
    assert torch.equal(files.read("model.layers.1.self_attn.k_proj.weight"), whole[:, 16:32].T)
    assert torch.equal(files.read("model.embed_tokens.weight"), table)


def test_what_cannot_be_arranged_is_an_error() -> None:
    files = stored({"h.0.qkv.weight": torch.ones(47, 8)})
    with pytest.raises(ValueError, match=r"h.0.qkv.weight must hold 3 matrices of one size, got shape \(47, 8\)"):
        files.header("model.layers.0.self_attn.q_proj.weight")
    quantised: Any = type("Format", (), {"name": "codes"})()
    packed = StoredTensors(Named({"h.0.qkv.weight": torch.ones(48, 8)}, quantised), LAYOUT, num_heads=4)
    with pytest.raises(ValueError, match=r"h\.0\.qkv must have plain numbers, because it is rearranged, got codes"):
        packed.format_of("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("case", ["gpt2", "gpt-neox"])
def test_mapped_rows_are_those_that_are_copied(case: str, tmp_path: Path) -> None:
    build(CASES[case], tmp_path)
    parts = [(f"model.layers.0.self_attn.{name}.weight", 64) for name in ("q_proj", "k_proj", "v_proj")]
    mapped: Any = Checkpoint(tmp_path, dtype=None).stack(parts, 64)
    assert isinstance(mapped, StackedRows)
    rows = torch.empty(100, 64)
    mapped.write_to(rows, 50)
    assert torch.equal(rows, Checkpoint(tmp_path, dtype=torch.float32).stack(parts, 64)[50:150])


def test_old_files_of_gpt2_have_no_prefix_and_hold_masks(tmp_path: Path) -> None:
    build(CASES["gpt2"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {name.removeprefix("transformer."): tensor.contiguous() for name, tensor in tensors.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)
    save_file(plain, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert check_weights(tmp_path, ModelConfig.from_folder(tmp_path)) > 0


def test_they_are_not_quantised_to_a_folder(tmp_path: Path) -> None:
    build(CASES["starcoder2"], tmp_path / "in")
    with pytest.raises(ValueError, match="must have the names and the arrangement of Llama's to be quantised"):
        quantise_model(tmp_path / "in", tmp_path / "out", Scheme(format="int8"))
