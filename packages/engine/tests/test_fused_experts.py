"""Checkpoints that store the experts of a layer together, in every orientation, are read as if each had its own."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families.case import build
from families.registry import CASES
from pagewood.engine.model_folder.load import check_weights
from pagewood.engine.models.checkpoint import Checkpoint
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.tensor_files import open_tensors
from pagewood.engine.weights.matrix_forms import Int8Group

N, SIZE, WIDTH = 3, 32, 64
PLACE = "model.layers.0.mlp."


def parts(*, seed: int = 0) -> dict[str, Tensor]:
    """Return the matrices of a layer, each expert's own."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate_proj": (SIZE, WIDTH), "up_proj": (SIZE, WIDTH), "down_proj": (WIDTH, SIZE)}
    return {
        f"{PLACE}experts.{expert}.{name}.weight": torch.randn(shape, generator=generator)
        for expert in range(N)
        for name, shape in shapes.items()
    }


def together(own: dict[str, Tensor], *names: str) -> Tensor:
    """Return `[N, rows, inputs]`, of each expert the matrices with these names."""
    return torch.stack(
        [torch.cat([own[f"{PLACE}experts.{expert}.{name}.weight"] for name in names]) for expert in range(N)]
    )


def read(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    files = open_tensors(folder)
    found = {name: files.read(name) for name in files.names()}
    assert all(files.header(name)[0] == tuple(tensor.shape) for name, tensor in found.items())
    return found


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("are_columns", [False, True])
def test_experts_whose_outputs_are_rows_or_columns(tmp_path: Path, are_columns: bool) -> None:
    own = parts()
    fused = {
        "gate_up_proj": together(own, "gate_proj", "up_proj"),
        "down_proj": together(own, "down_proj"),
    }
    fused = {f"{PLACE}experts.{name}": one.mT if are_columns else one for name, one in fused.items()}
    assert_same(read(tmp_path, {**fused, "other": torch.ones(2)}), {**own, "other": torch.ones(2)})


def test_gate_and_other_rows_take_turns_beside_biases(tmp_path: Path) -> None:
    own = parts()
    gate_up, down = together(own, "gate_proj", "up_proj"), together(own, "down_proj")
    in_turns = gate_up.unflatten(1, (2, SIZE)).transpose(1, 2).flatten(1, 2)
    biases, of_down = torch.randn(N, 2 * SIZE), torch.randn(N, WIDTH)
    found = read(
        tmp_path,
        {
            f"{PLACE}experts.gate_up_proj": in_turns.mT,
            f"{PLACE}experts.down_proj": down.mT,
            f"{PLACE}experts.gate_up_proj_bias": biases,
            f"{PLACE}experts.down_proj_bias": of_down,
        },
    )
    expected = dict(own)
    for expert in range(N):
        place = f"{PLACE}experts.{expert}"
        expected[f"{place}.gate_proj.bias"], expected[f"{place}.up_proj.bias"] = (
            biases[expert, ::2],
            biases[expert, 1::2],
        )
        expected[f"{place}.down_proj.bias"] = of_down[expert]
    assert_same(found, expected)


def test_granites_experts_and_shared_ones(tmp_path: Path) -> None:
    own = {name.replace(PLACE, "model.layers.0.block_sparse_moe."): one for name, one in parts().items()}
    shared = torch.randn(2 * SIZE, WIDTH), torch.randn(WIDTH, SIZE)
    layer = "model.layers.0."
    found = read(
        tmp_path,
        {
            f"{layer}block_sparse_moe.input_linear.weight": together(parts(), "gate_proj", "up_proj"),
            f"{layer}block_sparse_moe.output_linear.weight": together(parts(), "down_proj"),
            f"{layer}shared_mlp.input_linear.weight": shared[0],
            f"{layer}shared_mlp.output_linear.weight": shared[1],
        },
    )
    place = f"{layer}block_sparse_moe.shared_mlp."
    expected = {f"{place}gate_proj.weight": shared[0][:SIZE], f"{place}up_proj.weight": shared[0][SIZE:]}
    assert_same(found, {**own, **expected, f"{place}down_proj.weight": shared[1]})


def test_experts_in_mxfp4_as_gpt_oss_stores_them(tmp_path: Path) -> None:
    """Rows of the gate and of the other projection take turns in codes and in scales too."""
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    blocks = torch.randint(256, (N, 2 * SIZE, WIDTH // 32, 16), dtype=torch.uint8)
    scales = torch.randint(120, 134, (N, 2 * SIZE, WIDTH // 32), dtype=torch.uint8)
    stored = {
        "gate_up_proj_blocks": blocks,
        "gate_up_proj_scales": scales,
        "gate_up_proj_bias": torch.zeros(N, 2 * SIZE),
    }
    save_file({f"{PLACE}experts.{name}": one for name, one in stored.items()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, dtype=None)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).long()
    exact = torch.where(codes > 7, -1.0, 1.0) * values[codes % 8] * 2.0 ** (scales.float() - 127)[..., None]
    for number, name in enumerate(("gate_proj", "up_proj")):
        [form] = checkpoint.forms([(f"{PLACE}experts.1.{name}.weight", SIZE)], WIDTH)
        assert isinstance(form, Int8Group)
        assert torch.equal(torch.from_numpy(form.dequantised()), exact[1, number::2].flatten(1))


def test_a_whole_model_with_fused_experts_loads_and_a_wrong_shape_is_named(tmp_path: Path) -> None:
    build(CASES["qwen3-moe"], tmp_path)
    config, file = ModelConfig.from_folder(tmp_path), tmp_path / "model.safetensors"
    tensors, fused = load_file(file), dict[str, Tensor]()
    num_weights = check_weights(tmp_path, config)
    for layer in (0, 2):
        place = f"model.layers.{layer}.mlp.experts"
        own = [{name: tensors.pop(f"{place}.{e}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")}
               for e in range(6)]  # fmt: skip
        fused[f"{place}.gate_up_proj"] = torch.stack([torch.cat([one["gate_proj"], one["up_proj"]]) for one in own])
        fused[f"{place}.down_proj"] = torch.stack([one["down_proj"] for one in own])
    save_file({**tensors, **fused}, file)
    assert check_weights(tmp_path, config) == num_weights
    fused["model.layers.0.mlp.experts.down_proj"] = torch.zeros(5, 64, 48)
    save_file({**tensors, **fused}, file)
    with pytest.raises(ValueError, match=r"lacks the tensor model.layers.0.mlp.experts.5.down_proj.weight of shape"):
        check_weights(tmp_path, config)
