"""Folders that other tools quantised: their weights are what other code reads from them, and wrong ones are refused."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import quantised_folders as made
from pagewood.engine.model_folder.load import check_weights, load_model
from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.parts.feed_forward import in_halves
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.weights.integers import Packed
from pagewood.engine.weights.quantisation import METHODS, read_quantisation


@dataclass(frozen=True, kw_only=True)
class Case:
    make: made.Maker
    config: Mapping[str, Any]
    form: str
    """How most matrices are kept; the others have 96 inputs, which few groups divide."""
    metadata: Callable[..., str] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def _compressed(form: str, weights: Mapping[str, Any], kept: str) -> Case:
    groups = {"group_0": {"targets": ["Linear"], "weights": dict(weights)}}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}
    return Case(make=made.compressed(weights, form), config=config, form=kept)


def _integers(num_bits: int, strategy: str, *, symmetric: bool = True, group: int | None = None) -> dict[str, Any]:
    return {"num_bits": num_bits, "type": "int", "strategy": strategy, "symmetric": symmetric, "group_size": group}


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_INT4 = "int4 in groups of 32"
CASES = {
    "gptq": Case(make=made.gptq(num_bits=4, group=32), config=_GPTQ, form=_INT4),
    "gptq symmetric": Case(make=made.gptq(num_bits=4, group=32, symmetric=True), config=_GPTQ, form=_INT4),
    "gptq v2": Case(
        make=made.gptq(num_bits=4, group=32, is_v2=True), config={**_GPTQ, "checkpoint_format": "gptq_v2"}, form=_INT4
    ),
    "gptq desc_act": Case(
        make=made.gptq(num_bits=4, group=32, desc_act=True), config={**_GPTQ, "desc_act": True}, form="float16"
    ),
    "gptq 8 bits": Case(
        make=made.gptq(num_bits=8, group=32, is_v2=True),
        config={**_GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"},
        form="int8group in groups of 32",
    ),
    "gptq 8 bits by output": Case(
        make=made.gptq(num_bits=8, group=-1, symmetric=True),
        config={**_GPTQ, "bits": 8, "group_size": -1},
        form="int8",
    ),
    "gptq 2 bits": Case(make=made.gptq(num_bits=2, group=32), config={**_GPTQ, "bits": 2}, form=_INT4),
    "gptq 3 bits": Case(make=made.gptq(num_bits=3, group=32), config={**_GPTQ, "bits": 3}, form=_INT4),
    "gptq 3 bits desc_act": Case(
        make=made.gptq(num_bits=3, group=32, is_v2=True, desc_act=True),
        config={**_GPTQ, "bits": 3, "checkpoint_format": "gptq_v2", "desc_act": True},
        form="float16",
    ),
    "gptq by output": Case(
        make=made.gptq(num_bits=4, group=-1), config={**_GPTQ, "group_size": -1}, form="int4 in groups of 64"
    ),
    "gptq groups of 16": Case(
        make=made.gptq(num_bits=4, group=16), config={**_GPTQ, "group_size": 16}, form="int8group in groups of 16"
    ),
    "awq": Case(
        make=made.awq(group=32),
        config={"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        form=_INT4,
    ),
    "fp8 blocks": Case(
        make=made.float8_blocks(high=40, wide=24, scale=".weight_scale_inv"),
        config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 24]},
        form="float16",
    ),
    "fp8": Case(
        make=made.float8_whole(scale=".weight_scale", activations=".input_scale"),
        config={"quant_method": "fp8", "activation_scheme": "static"},
        form="float16",
    ),
    "fp8 inverse": Case(
        make=made.float8_whole(scale=".weight_scale_inv"), config={"quant_method": "fp8"}, form="float16"
    ),
    "fbgemm": Case(
        make=made.float8_blocks(high=1, wide=1 << 20, scale=".weight_scale"),
        config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
        form="float16",
    ),
    "mxfp4": Case(make=made.mxfp4, config={"quant_method": "mxfp4"}, form="float4 in groups of 32"),
    "modelopt fp8": Case(
        make=made.float8_whole(scale=".weight_scale", activations=".input_scale"),
        config={"quant_method": "modelopt", "quant_algo": "FP8"},
        form="float16",
    ),
    "modelopt nvfp4": Case(
        make=made.modelopt_nvfp4,
        config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        form="float4 in groups of 16",
    ),
    "torchao int8": Case(
        make=made.torchao_int8,
        config={"quant_method": "torchao"},
        form="int8",
        metadata=made.torchao_header("Int8Tensor"),
    ),
    "torchao intx": Case(
        make=made.torchao_intx,
        config={"quant_method": "torchao"},
        form=_INT4,
        metadata=made.torchao_header("IntxUnpackedToInt8Tensor", "int4"),
    ),
    "torchao int4": Case(
        make=made.torchao_int4(symmetric=False),
        config={"quant_method": "torchao"},
        form="float16",
        metadata=made.torchao_header("Int4Tensor"),
    ),
    "torchao int4 symmetric": Case(
        make=made.torchao_int4(symmetric=True),
        config={"quant_method": "torchao"},
        form=_INT4,
        metadata=made.torchao_header("Int4Tensor"),
    ),
    "torchao float8": Case(
        make=made.torchao_float8,
        config={"quant_method": "torchao"},
        form="float16",
        metadata=made.torchao_header("Float8Tensor"),
    ),
    "packed": _compressed("pack-quantized", _integers(4, "group", group=32), _INT4),
    "packed with zeros": _compressed("pack-quantized", _integers(4, "group", group=32, symmetric=False), _INT4),
    "packed by output": _compressed("pack-quantized", _integers(4, "channel"), "int4 in groups of 64"),
    "packed 8 bits": _compressed("pack-quantized", _integers(8, "channel"), "int8"),
    "packed 8 bits with zeros": _compressed(
        "pack-quantized", _integers(8, "group", group=32, symmetric=False), "int8group in groups of 32"
    ),
    "packed 3 bits": _compressed("pack-quantized", _integers(3, "group", group=32), _INT4),
    "packed 6 bits": _compressed("pack-quantized", _integers(6, "group", group=32), "int8group in groups of 32"),
    "int8": _compressed("int-quantized", _integers(8, "channel"), "int8"),
    "int8 with zeros": _compressed(
        "int-quantized", _integers(8, "channel", symmetric=False), "int8group in groups of 64"
    ),
    "int8 one scale": _compressed("int-quantized", _integers(8, "tensor"), "int8"),
    "int4 in bytes": _compressed("naive-quantized", _integers(4, "group", group=32), _INT4),
    "float8 by output": _compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}, "float16"
    ),
    "float8 in blocks": _compressed(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 32], "symmetric": True},
        "float16",
    ),
    "float8 one scale": _compressed(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}, "float16"
    ),
    "nvfp4": _compressed(
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True},
        "float4 in groups of 16",
    ),
    "mxfp4 packed": _compressed(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True},
        "float4 in groups of 32",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    made.write_model(folder)
    return folder


@pytest.fixture
def folder(plain: Path, tmp_path: Path) -> Path:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def compare(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Compare every matrix with what it must be: to rounding of float32, or of float16 where it is kept so."""
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    for name, weight in expected.items():
        if weight.ndim == 1:
            found = checkpoint.stack([(name, len(weight))])
            assert found.equal(weight), name
            continue
        [form] = checkpoint.forms([(name, len(weight))], weight.shape[1])
        values = torch.from_numpy(form.dequantised())
        assert values.isfinite().all()
        error = (values - weight).abs().amax(dim=1)
        allowed = 2.0**-11 if type(form).__name__ == "Float16" and name.endswith("_proj.weight") else 2.0**-22
        assert bool((error <= allowed * weight.abs().amax(dim=1)).all()), (name, float(error.max()))
    checkpoint.finish(ignored=lambda name: False)


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_that_other_code_reads(name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    expected = made.quantise(folder, case.make, case.config, metadata=case.metadata)
    with caplog.at_level(logging.INFO):
        compare(folder, expected)
    assert f" as {case.form}" in caplog.text
    assert len([record for record in caplog.records if "matrices of" in record.message]) <= 3  # not one for each
    check_weights(folder, ModelConfig.from_folder(folder))


FUSED: dict[str, dict[str, Any]] = {
    "Phi3": {"pad_token_id": 0},
    "Glm4": {"pad_token_id": 0},
    "GraniteMoeHybrid": {
        "layer_types": ["full_attention"] * 2, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": made.WIDTH, "mamba_n_heads": 4, "position_embedding_type": "rope",
    },
}  # fmt: skip
"""Architectures whose checkpoints have several projections in one matrix, and their fields."""


FORMS = ("gptq", "awq", "packed with zeros", "int8", "float8 in blocks")


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(architecture, name, marks=() if (place - 2 * row) % 5 in (0, 1) else pytest.mark.slow)
        for row, architecture in enumerate(FUSED)
        for place, name in enumerate(FORMS)
    ],
)
def test_fused_projections_compute_what_plain_ones_do(architecture: str, name: str, tmp_path: Path) -> None:
    case, plain, quantised = CASES[name], tmp_path / "plain", tmp_path / "quantised"
    made.write_model(quantised, architecture=architecture, **FUSED[architecture])
    config = json.loads((quantised / "config.json").read_text())
    expected = made.quantise(quantised, case.make, case.config)
    plain.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in expected.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text(json.dumps(config))
    found, wanted = logits(quantised), logits(plain)
    allowed = 5e-3 if case.form == "float16" else 1e-5  # numbers of float8 are rounded to it
    assert torch.linalg.vector_norm(found - wanted) < allowed * torch.linalg.vector_norm(wanted)


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    """Return the logits of a text."""
    model, positions = load_model(folder, TorchOps()), torch.arange(20)
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(positions))
    return model(positions * 7 % 60, [rope(positions) for rope in model.ropes], attention, positions)


def test_matrices_that_are_not_quantised(folder: Path) -> None:
    config = {**_GPTQ, "dynamic": {"-:.*o_proj": {}, r"+:.*\.1\.mlp\..*": {"bits": 8}}}
    four, eight = made.gptq(num_bits=4, group=32), made.gptq(num_bits=8, group=32)
    calls: list[int] = []

    def make(random: Any, rows: int, columns: int) -> Any:
        calls.append(len(calls))
        return (eight if names[calls[-1]].startswith("model.layers.1.mlp") else four)(random, rows, columns)

    names = [
        name
        for name in load_file(folder / "model.safetensors")
        if name.endswith("_proj.weight") and not name.endswith("o_proj.weight")
    ]
    compare(folder, made.quantise(folder, make, config, excluded=("o_proj.weight",)))


@pytest.mark.parametrize(
    ("ignored", "excluded"),
    [
        (["lm_head", "re:.*self_attn.*"], ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")),
        (["lm_head", "model.layers.0.mlp.up_proj"], ("0.mlp.up_proj.weight",)),
    ],
)
def test_modules_that_a_configuration_ignores(folder: Path, ignored: list[str], excluded: tuple[str, ...]) -> None:
    case = CASES["int8"]
    config = {**case.config, "ignore": ignored}
    compare(folder, made.quantise(folder, case.make, config, excluded=excluded))


def test_biases_of_zeros_that_tools_add_are_ignored(folder: Path) -> None:
    case = CASES["gptq"]
    expected = made.quantise(folder, case.make, case.config)
    file = folder / "model.safetensors"
    name = "model.layers.0.mlp.up_proj.bias"
    save_file({**load_file(file), name: torch.zeros(made.WIDTH)}, file)
    compare(folder, expected)
    save_file({**load_file(file), name: torch.ones(made.WIDTH)}, file)
    with pytest.raises(ValueError, match=r"1 unexpected tensors, the first is .*up_proj\.bias"):
        compare(folder, expected)


@pytest.mark.parametrize("num_bits", [3, 4, 8])
@pytest.mark.parametrize("is_v2", [False, True])
@pytest.mark.parametrize(
    "label",
    [
        {},
        {"checkpoint_format": "gptq"},
        {"format": "gptq"},
        {"checkpoint_format": "gptq_v2"},
        {"format": "gptq_v2"},
        {"checkpoint_format": "gptq_v2", "format": "gptq_v2"},
    ],
)
def test_stored_zeros_of_symmetric_codes_outweigh_the_label(
    folder: Path, num_bits: int, is_v2: bool, label: dict[str, str]
) -> None:
    make = made.gptq(num_bits=num_bits, group=32, is_v2=is_v2, symmetric=True)
    compare(folder, made.quantise(folder, make, {**_GPTQ, "bits": num_bits, "sym": True, **label}))


@pytest.mark.parametrize("field", ["checkpoint_format", "format"])
@pytest.mark.parametrize("is_v2", [False, True])
def test_either_field_says_how_zeros_are_stored(folder: Path, field: str, is_v2: bool) -> None:
    make = made.gptq(num_bits=4, group=32, is_v2=is_v2)
    label = {field: "gptq_v2" if is_v2 else "gptq"}
    compare(folder, made.quantise(folder, make, {**_GPTQ, "sym": False, **label}))


def test_zeros_that_are_not_symmetric_contradict_sym(folder: Path) -> None:
    expected = made.quantise(folder, made.gptq(num_bits=4, group=32), {**_GPTQ, "sym": True})
    with pytest.raises(
        ValueError, match=r"_proj\.weight: \.qzeros must all be 7, or 8 in gptq_v2, if sym is true, got "
    ):
        compare(folder, expected)


def test_the_target_that_names_a_module_most_exactly_decides(folder: Path) -> None:
    """A name comes before expressions, in the order of their text, and these before the class, in whatever group."""
    schemes = {"first": 8, "second": 8, "third": 4, "fourth": 8}
    targets = {
        "first": ["Linear"],
        "second": ["re:.*proj"],
        "third": ["re:.*down_proj", "model.layers.0.mlp.up_proj"],
        "fourth": ["model.layers.1.mlp.down_proj"],
    }
    groups = {
        name: {"targets": targets[name], "weights": _integers(num_bits, "group", group=32)}
        for name, num_bits in schemes.items()
    }
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    found = read_quantisation(folder, (), {})
    assert found is not None

    def bits(module: str) -> int:
        form = found.format_of(f"model.layers.{module}.weight")
        assert isinstance(form, Packed)
        return form.num_bits

    assert bits("0.mlp.up_proj") == 4  # its name
    assert bits("1.mlp.down_proj") == 8
    assert bits("0.mlp.down_proj") == 4  # "re:.*down_proj" is before "re:.*proj"
    assert bits("0.mlp.gate_proj") == 8


DOWN = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq", {".qweight": None}, r"lacks the tensor .*\.qweight of shape \(12, 64\); gptq with 4 bits makes "),
        ("gptq", {".scales": torch.zeros(2, 64)}, r"down_proj\.scales must have shape \(3, 64\), got \(2, 64\)"),
        ("gptq", {".qweight": torch.zeros(12, 64)}, r"qweight must hold numbers \(I32, U32\), got F32"),
        (
            "gptq",
            {".g_idx": torch.full((96,), 3, dtype=torch.int32)},
            r"down_proj\.weight: \.g_idx must be in \[0, 3\), got 3",
        ),
        ("mxfp4", {"_scales": torch.full((64, 3), 255, dtype=torch.uint8)}, r"powers of two, got a byte 255"),
        ("mxfp4", {"_blocks": torch.zeros(64, 3, 8, dtype=torch.uint8)}, r"must have shape \(64, 3, 16\)"),
        ("packed", {".weight_shape": torch.tensor([64, 95])}, r"weight_shape must hold \(64, 96\), got \(64, 95\)"),
        ("int4 in bytes", {".weight": torch.full((64, 96), 9, dtype=torch.int8)}, r"must be in \[-8, 8\), got 9 to 9"),
        ("fp8", {".weight": torch.zeros(64, 96, dtype=torch.uint8)}, r"weight must hold numbers \(F8_E4M3\), got U8"),
        ("nvfp4", {".weight_global_scale": torch.zeros(1)}, "weight_global_scale must not be 0"),
    ],
)  # fmt: skip
def test_inconsistent_tensors(folder: Path, case: str, change: dict[str, Any], message: str) -> None:
    expected = made.quantise(folder, CASES[case].make, CASES[case].config)
    tensors = load_file(folder / "model.safetensors")
    for suffix, tensor in change.items():
        del tensors[DOWN + suffix]
        if tensor is not None:
            tensors[DOWN + suffix] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        compare(folder, expected)


_GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method must be one of gptq, awq, .*, torchao, got 'bitsandbytes'"),
        ({"quant_method": 3}, "quant_method must be a string"),
        ({**_GPTQ, "bits": 5}, "bits must be 2, 3, 4 or 8 for gptq, got 5"),
        ({**_GPTQ, "bits": None}, "bits is missing"),
        ({**_GPTQ, "group_size": 0}, r"group_size must be in \[1, 16777216\], got 0"),
        ({**_GPTQ, "group_size": 48}, "group_size must divide the 64 inputs, got 48"),
        ({**_GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2, got 'marlin'"),
        ({**_GPTQ, "format": "marlin"}, "format must be gptq or gptq_v2, got 'marlin'"),
        (
            {**_GPTQ, "format": "gptq_v2", "checkpoint_format": "gptq"},
            "checkpoint_format and format must say the same, got 'gptq' and 'gptq_v2'",
        ),
        ({**_GPTQ, "dynamic": {"-:(": {}}}, "must be an expression of RE2"),
        ({"quant_method": "awq", "bits": 8}, "bits must be 4 for awq, got 8"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be gemm for awq, got 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "w_bit": 8}, "bits and w_bit must say the same, got 4 and 8"),
        (
            {"quant_method": "awq", "group_size": 32, "q_group_size": 64},
            "group_size and q_group_size must say the same, got 32 and 64",
        ),
        ({"quant_method": "awq", "version": "GEMM", "format": "gemv"}, "same, got 'gemm' and 'gemv'"),
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["lm_head"], "ignored_layers": ["a", "lm_head"]},
            r"modules_to_not_convert and ignored_layers must say the same, got \['lm_head'\] and \['a', 'lm_head'\]",
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["a"], "exclude_modules": []},
            r"ignore and exclude_modules must say the same, got \['a'\] and \[\]",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must have 2 entries, got 1"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo must be FP8 or NVFP4, got 'W4A8'"),
        ({"quant_method": "torchao"}, "headers without tensor_names"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": _GROUPS},
            "format must be one of pack-quantized, .* got 'marlin-24'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "format must be dense, got 'sparse-24-bitmask'",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 9}}},
            },
            r"group|num_bits must be in \[1, 8\], got 9",
        ),
    ],
)
def test_configurations_that_are_not_supported(folder: Path, config: dict[str, Any], message: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    with pytest.raises(ValueError, match=message):
        check_plain(folder)


def check_plain(folder: Path) -> None:
    """Check the headers of a folder whose matrices are removed, so that its configuration decides."""
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if not n.endswith("_proj.weight")}, folder / "model.safetensors")
    check_weights(folder, ModelConfig.from_folder(folder))


HOSTILE = (
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.sampled_from(["", "re:", "re:(", "re:.*", "int", "float", "group", "block", "none", "lm_head", "Linear"])
    | st.lists(st.integers(-1, 2**40) | st.text(max_size=4), max_size=3)
    | st.dictionaries(st.text(max_size=4), st.integers(), max_size=2)
)
OF_WEIGHTS = ("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic")
OF_METHODS = (
    "bits", "group_size", "checkpoint_format", "dynamic", "lm_head", "modules_in_block_to_quantize", "version", "w_bit",
    "zero_point", "modules_to_not_convert", "ignored_layers", "weight_block_size", "fmt", "quant_algo", "ignore",
    "format", "config_groups", "sparsity_config", "quantization_status", "is_marlin_format", "exclude_modules",
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(METHODS),
    values=st.dictionaries(st.sampled_from(OF_METHODS), HOSTILE, max_size=4),
    weights=st.none() | st.dictionaries(st.sampled_from(OF_WEIGHTS), HOSTILE, max_size=4),
    form=st.sampled_from(["pack-quantized", "int-quantized", "float-quantized", "mxfp8-quantized"]),
)
def test_any_configuration_is_followed_or_refused(
    tmp_path: Path, method: str, values: dict[str, Any], weights: dict[str, Any] | None, form: str
) -> None:
    config: dict[str, Any] = {"quant_method": method, **values}
    if weights is not None:
        config |= {"format": form, "config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with suppress(ValueError):
        found = read_quantisation(tmp_path, (), {"tensor_names": "[]", "a.weight": '{"_type": "Tensor"}'})
        assert found is not None
        for name in ("model.layers.0.mlp.up_proj", "lm_head", "model.embed_tokens"):
            stored = found.format_of(f"{name}.weight")
            if stored is not None:
                parts = stored.parts(64, 96)
                assert all(min(shape, default=1) >= 0 for part in parts for shape in part.shapes)


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "NVFP4Tensor", "os.system"])
def test_other_tensors_of_torchao_are_refused(folder: Path, kind: str) -> None:
    case = CASES["torchao int8"]
    made.quantise(folder, case.make, case.config, metadata=made.torchao_header(kind))
    with pytest.raises(ValueError, match=f"_type must be one of Tensor, Float8Tensor, .* got '?{kind}"):
        check_weights(folder, ModelConfig.from_folder(folder))


def test_a_hostile_expression_takes_no_time(folder: Path) -> None:
    """A backtracking engine would need centuries for the names of modules here."""
    case = CASES["int8"]
    config = {**case.config, "ignore": ["re:(((((a|e|o|l|d|m|.)*)*)*)*)*$x", "lm_head"]}
    compare(folder, made.quantise(folder, case.make, config))


@pytest.mark.parametrize("case", ["gptq", "fp8", "packed with zeros"])
def test_matrices_without_a_dtype_are_joined_in_their_form(case: str, folder: Path) -> None:
    expected = made.quantise(folder, CASES[case].make, CASES[case].config)
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    whole = torch.cat([expected[name] for name in names])
    checkpoint = Checkpoint(folder, dtype=None)
    weight: Any = checkpoint.stack([(name, len(expected[name])) for name in names], made.SIZE)
    assert type(weight).__name__ == ("Float16" if case == "fp8" else "Int4")
    assert torch.allclose(torch.from_numpy(weight.dequantised()), whole, rtol=2.0**-10, atol=1e-6)


def test_matrices_of_different_forms_are_joined_as_float16(folder: Path) -> None:
    case = CASES["gptq"]
    expected = made.quantise(folder, case.make, case.config, excluded=("v_proj.weight",))
    names = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"]
    weight: Any = Checkpoint(folder, dtype=None).stack([(name, len(expected[name])) for name in names], made.SIZE)
    whole = torch.cat([expected[name] for name in names])
    assert type(weight).__name__ == "Float16"
    assert torch.allclose(torch.from_numpy(weight.dequantised()), whole, rtol=2.0**-10, atol=1e-4)


def test_what_is_kept_takes_less_memory_than_the_checkpoint_or_little_more(folder: Path) -> None:
    made.quantise(folder, CASES["packed"].make, CASES["packed"].config)
    checkpoint = Checkpoint(folder, dtype=torch.float32)
    rows, columns = made.SIZE, made.WIDTH
    [form] = checkpoint.forms([(f"{DOWN}.weight", rows)], columns)
    assert form.nbytes == rows * columns // 2 + 4 * rows * math.ceil(columns / 32)


def test_a_part_that_cuts_a_group_is_refused_by_name(folder: Path) -> None:
    case = CASES["gptq"]
    made.quantise(folder, case.make, case.config)
    message = (
        "model.layers.0.mlp.down_proj.weight: a rank's part must begin and end at a multiple of 32 inputs, because "
        "these share a scale, got 0 to 48"
    )
    with pytest.raises(ValueError, match=message):
        Checkpoint(folder, dtype=None).stack(
            [("model.layers.0.mlp.down_proj.weight", made.SIZE)], made.WIDTH, inputs=range(48)
        )


WHOLE_ONLY = {
    "outputs": ("fp8 blocks",),
    "inputs": (
        "fp8 blocks", "gptq desc_act", "gptq 3 bits desc_act"
    ),
}  # fmt: skip
"""Cases of which a part of 32 is cut from the numbers of the whole: it cuts blocks, or its groups are not in order."""


@pytest.mark.parametrize("name", CASES)
def test_only_the_tensors_of_a_part_are_decoded(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    made.quantise(folder, case.make, case.config, metadata=case.metadata)
    checkpoint, cuts = Checkpoint(folder, dtype=None), list[str]()
    after = Checkpoint._cut  # pyright: ignore[reportPrivateUsage]

    def noted(self: Checkpoint, weight: Any, found: Any) -> Any:
        cuts.append(what)
        return after(self, weight, found)

    monkeypatch.setattr(Checkpoint, "_cut", noted)
    parts: dict[str, dict[str, Any]] = {"outputs": {"order": np.arange(32, 64)}, "inputs": {"inputs": range(32, 64)}}
    for what, part in parts.items():  # noqa: B007  # `noted` reads it
        checkpoint.stack([("model.layers.0.self_attn.o_proj.weight", made.SIZE)], made.SIZE, **part)
    assert cuts == [what for what in parts if name in WHOLE_ONLY[what]]


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("name", CASES)
def test_ranks_read_their_parts(name: str, folder: Path, dtype: torch.dtype | None) -> None:
    """Of several matrices together, by outputs and by inputs: the numbers are those of the whole."""
    case = CASES[name]
    made.quantise(folder, case.make, case.config, metadata=case.metadata)
    checkpoint = Checkpoint(folder, dtype=dtype)

    def stacked(parts: list[tuple[str, int]], columns: int, **part: Any) -> torch.Tensor:
        found: Any = checkpoint.stack(parts, columns, **part)
        return found if isinstance(found, torch.Tensor) else torch.from_numpy(found.dequantised())

    gate_up = [(f"model.layers.0.mlp.{one}_proj.weight", made.WIDTH) for one in ("gate", "up")]
    down = [("model.layers.0.mlp.down_proj.weight", made.SIZE)]
    outputs, inputs = stacked(gate_up, made.SIZE), stacked(down, made.WIDTH)
    for part in (range(32), range(32, 64), range(64, 96), range(32, 96)):
        order = in_halves(part, made.WIDTH)
        assert torch.equal(stacked(gate_up, made.SIZE, order=order), outputs[order])
        assert torch.equal(stacked(gate_up, made.SIZE, order=order[1::3]), outputs[order[1::3]])
        assert torch.equal(stacked(down, made.WIDTH, inputs=part), inputs[:, part.start : part.stop])
