"""Mixtures in folders that other tools quantised: their experts stay in codes, and compute as what the codes say."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantised_folders as made
from pagewood.engine.model_folder.load import load_model
from pagewood.engine.models.expert_division import divided_by_expert
from pagewood.engine.models.ops import ExpertMatrices
from pagewood.engine.models.scaled_codes import ScaledCodes
from pagewood.engine.models.shard import Shard
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind
from pagewood.engine.runner.cpu.program.ops import CPUOps
from rank_threads import ranks_logits

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_COMPRESSED = {
    "num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32,
}  # fmt: skip
CASES: dict[str, tuple[made.Maker, Mapping[str, Any], WeightKind]] = {
    "gptq": (made.gptq(num_bits=4, group=32), _GPTQ, WeightKind.INT4_ZEROS),
    "gptq 8 bits": (
        made.gptq(num_bits=8, group=32, symmetric=True), {**_GPTQ, "bits": 8}, WeightKind.INT8_GROUP
    ),
    "awq": (
        made.awq(group=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"},
        WeightKind.INT4_ZEROS,
    ),
    "compressed-tensors": (
        made.compressed(_COMPRESSED, "pack-quantized"),
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*mlp.gate$"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _COMPRESSED}},
        },
        WeightKind.INT4,
    ),
    "fp8 blocks": (
        made.float8_blocks(high=40, wide=24, scale=".weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [40, 24]},
        WeightKind.FLOAT16,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    made.write_model(
        folder, architecture="Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
        norm_topk_prob=True,
    )  # fmt: skip
    return folder


def quantised(plain: Path, folder: Path, make: made.Maker, config: Mapping[str, Any], **options: Any) -> Any:
    """Quantise a copy of a folder; return its logits by the numbers that other code reads from the codes."""
    for file in plain.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = made.quantise(folder, make, config, **options)
    (folder / "read").mkdir()
    save_file(weights, folder / "read" / "model.safetensors")
    (folder / "read" / "config.json").write_bytes((plain / "config.json").read_bytes())
    return logits(folder / "read")


@torch.inference_mode()
def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder, TorchOps())
    positions = torch.arange(30)
    attention = WholeTexts([layer.mixer for layer in model.config.layers], len(positions))
    return model(positions, [rope(positions) for rope in model.ropes], attention, positions)


@pytest.mark.parametrize("name", CASES)
def test_experts_stay_in_codes(name: str, plain: Path, tmp_path: Path) -> None:
    make, config, kind = CASES[name]
    expected = quantised(plain, tmp_path, make, config)
    torch.testing.assert_close(logits(tmp_path), expected, atol=2e-2 if kind is WeightKind.FLOAT16 else 1e-3, rtol=1e-3)
    ops = CPUOps()
    load_model(tmp_path, ops, dtype=None)
    assert {found for found, _ in ops.variants} == {kind}
    torch.testing.assert_close(ranks_logits(tmp_path, torch.arange(30), 2)[1], logits(tmp_path), atol=1e-4, rtol=0)
    by_expert = [partial(divided_by_expert, num_ranks=2)] * 2
    found = ranks_logits(tmp_path, torch.arange(30), 2, changes=by_expert)[1]
    torch.testing.assert_close(found, logits(tmp_path), atol=1e-4, rtol=0)


FLOAT8: dict[str, tuple[made.Maker, Mapping[str, Any], set[int | None]]] = {
    "blocks": (
        made.float8_blocks(high=40, wide=32, scale=".weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [40, 32]},
        {32},
    ),
    "blocks that ranks cut": (
        made.float8_blocks(high=24, wide=48, scale=".weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [24, 48]},
        {48, 16, 32},
    ),
    "blocks for which there are no sums": (
        made.float8_blocks(high=40, wide=24, scale=".weight_scale_inv"),
        {"quant_method": "fp8", "weight_block_size": [40, 24]},
        {None},
    ),
    "one scale": (made.float8_whole(scale=".weight_scale_inv"), {"quant_method": "fp8"}, {64, 32}),
    "outputs": (
        made.float8_blocks(high=1, wide=1 << 20, scale=".weight_scale"), {"quant_method": "fbgemm_fp8"}, {64, 32}
    ),
}  # fmt: skip
"""Makers, configurations, and the groups in which a rank keeps the matrices; None: they are widened."""


def kept_experts(monkeypatch: pytest.MonkeyPatch) -> list[ExpertMatrices]:
    """Return the list to which experts are added that are read from now on."""
    found: list[ExpertMatrices] = []

    def keep(self: TorchOps, matrices: ExpertMatrices, *_: Any, **__: Any) -> None:
        if matrices.down.shape[0]:  # otherwise only headers are read
            found.append(matrices)

    monkeypatch.setattr(TorchOps, "experts", keep)
    return found


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_of_each_rank_stays_as_it_is_stored(
    name: str, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those that other code has read, to the last bit."""
    make, config, groups = FLOAT8[name]
    quantised(plain, tmp_path, make, config)
    found = kept_experts(monkeypatch)
    parts: list[dict[str, Any]] = [{}, *({"shard": Shard(rank, 2)} for rank in range(2))]
    parts += [{**one, "change": partial(divided_by_expert, num_ranks=2)} for one in parts[1:]]
    seen: set[int | None] = set()
    for options in parts:
        found.clear()
        load_model(tmp_path, TorchOps(), keeps_float8=True, **options)
        kept = list(found)
        load_model(tmp_path / "read", TorchOps(), **options)
        for mine, theirs in zip(kept, found[len(kept) :], strict=True):
            for matrix, expected in ((mine.gate_up, theirs.gate_up), (mine.down, theirs.down)):
                seen.add(getattr(matrix, "group", None))
                if not isinstance(matrix, ScaledCodes):
                    continue
                assert matrix.codes.dtype == torch.float8_e4m3fn
                scales = matrix.scales.repeat_interleave(matrix.group, 1)[:, : expected.shape[1]]
                assert torch.equal(matrix.codes.float() * scales, expected)
    assert seen == groups


def test_float8_beside_plain_numbers_is_widened(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, config, _ = FLOAT8["blocks"]
    quantised(plain, tmp_path, make, config, excluded=("0.mlp.experts.2.up_proj.weight",))
    found = kept_experts(monkeypatch)
    load_model(tmp_path, TorchOps(), keeps_float8=True)
    assert [getattr(one, "group", None) for one in (found[0].gate_up, found[0].down)] == [None, 32]


def test_experts_of_two_forms_are_widened_to_one(plain: Path, tmp_path: Path) -> None:
    """One expert has eight bits, and the others of its layer four: all have eight afterwards, with the same numbers."""
    config = {**_GPTQ, "dynamic": {r"+:.*\.0\.mlp\.experts\.1\..*": {"bits": 8}}}
    four, eight = made.gptq(num_bits=4, group=32), made.gptq(num_bits=8, group=32)
    names = iter([name for name in load_file(plain / "model.safetensors") if name.endswith("_proj.weight")])

    def make(random: Any, rows: int, columns: int) -> Any:
        return (eight if ".0.mlp.experts.1." in next(names) else four)(random, rows, columns)

    expected = quantised(plain, tmp_path, make, config)
    torch.testing.assert_close(logits(tmp_path), expected, atol=1e-3, rtol=1e-3)
    ops = CPUOps()
    load_model(tmp_path, ops, dtype=None)
    assert {kind for kind, _ in ops.variants} == {WeightKind.INT4_ZEROS, WeightKind.INT8_GROUP_ZEROS}


def test_an_expert_that_stays_plain_widens_its_layer(plain: Path, tmp_path: Path) -> None:
    config = {**_GPTQ, "dynamic": {r"-:.*\.0\.mlp\.experts\.2\..*": {}}}
    excluded = tuple(f"0.mlp.experts.2.{part}_proj.weight" for part in ("gate", "up", "down"))
    expected = quantised(plain, tmp_path, made.gptq(num_bits=4, group=32), config, excluded=excluded)
    torch.testing.assert_close(logits(tmp_path), expected, atol=1e-3, rtol=1e-3)
    load_model(tmp_path, CPUOps(), dtype=None)


def test_an_expert_that_lacks_its_codes_is_refused_by_name(plain: Path, tmp_path: Path) -> None:
    quantised(plain, tmp_path, made.gptq(num_bits=4, group=32), _GPTQ)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.experts.3.up_proj.scales"]
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"lacks the tensor model\.layers\.1\.mlp\.experts\.3\.up_proj\.scales"):
        load_model(tmp_path, CPUOps(), dtype=None)
