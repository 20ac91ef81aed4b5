"""Checkpoints that store the experts of a layer together, in every orientation, are read as if each had its own."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from families.case import build
from families.registry import CASES
from pagewood.engine.model_folder.load import check_weights, load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.expert_division import divided_by_expert
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.tensor_files import open_tensors
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.kernels import warm_up
from pagewood.engine.runner.cpu.program.ops import CPUOps
from pagewood.engine.runner.cpu.runner import CPURunner
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.storage import storage_for
from pagewood.engine.weights.matrix_forms import Float4
from rank_threads import ranks_logits, text_logits
from row_driver import RowDriver

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
        assert isinstance(form, Float4)
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
    check_by_expert(tmp_path)
    fused["model.layers.0.mlp.experts.down_proj"] = torch.zeros(5, 64, 48)
    save_file({**tensors, **fused}, file)
    with pytest.raises(ValueError, match=r"lacks the tensor model.layers.0.mlp.experts.5.down_proj.weight of shape"):
        check_weights(tmp_path, config)


@pytest.mark.slow
def test_a_whole_model_in_mxfp4_computes_with_its_numbers(tmp_path: Path) -> None:
    """The CPU keeps them as they are stored, and what it computes is what plain torch does with the widened numbers."""
    case = CASES["gpt-oss"]
    build(replace(case, extra={**case.extra, "intermediate_size": 64}), tmp_path)
    file, config_file = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, generator = load_file(file), torch.Generator().manual_seed(3)
    for layer in range(3):
        for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
            place = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[place]
            tensors |= {
                f"{place}_blocks": torch.randint(256, (5, rows, 2, 16), dtype=torch.uint8, generator=generator),
                f"{place}_scales": torch.randint(122, 126, (5, rows, 2), dtype=torch.uint8, generator=generator),
            }
    save_file(tensors, file)
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    values = json.loads(config_file.read_text())
    values["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    config_file.write_text(json.dumps(values))
    model, tokens = load_model(tmp_path, TorchOps()), torch.arange(30)
    ops = CPUOps(Packer("auto", activations="float32"))
    attention = WholeTexts([layer.mixer for layer in model.config.layers], 30)
    with torch.inference_mode():
        exact = model(tokens, [rope(tokens) for rope in model.ropes], attention, tokens)
    compiled = load_model(tmp_path, ops, dtype=None)
    assert {kind for kind, _ in ops.variants} == {WeightKind.MXFP4}
    layout = compiled.config.memory_layout(page_size=4, dtype="float32", order="HND")
    kernel = warm_up(layout, packed=ops.variants, others=ops.units)
    runner = CPURunner(compiled, storage_for(layout, 16), kernel, max_rows=1, max_length=64, num_threads=1)
    driver = RowDriver(runner, num_pages=16, page_size=4)
    found = torch.from_numpy(runner.forward(driver.batch([(driver.add(tokens.tolist()), 30)])))
    torch.testing.assert_close(found, exact, atol=2e-4, rtol=1e-4)
    runner.close()
    check_by_expert(tmp_path)


def check_by_expert(folder: Path) -> None:
    """Compare the model on two ranks, each of which reads its own experts, with the same one whole."""
    tokens, changes = torch.arange(30), [partial(divided_by_expert, num_ranks=2)] * 2
    whole = text_logits(load_model(folder, TorchOps()), tokens)
    torch.testing.assert_close(ranks_logits(folder, tokens, 2, changes=changes)[1], whole, atol=1e-4, rtol=0)
