"""Weights that a kernel quantises and lays out are those of `weights.forms`, but for scales that are equally good."""

# pyright: basic
# torch and numba are typed in part only.

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file

from pagewood.engine.models.stored.mapped_memory import give_back
from pagewood.engine.models.stored.stacked_rows import StackedRows
from pagewood.engine.runner.cpu.compiled.products.quantise_weights import quantise_int4_panels, quantise_int8_panels
from pagewood.engine.runner.cpu.weights.packer import Packer
from pagewood.engine.runner.cpu.weights.packing import PackedWeight, pack
from pagewood.engine.weights.matrix_forms import quantise_int4, quantise_int8

Array = NDArray[np.float32]


def numbers(*shape: int) -> Array:
    """Rows of any size, with groups of zeros and with numbers that are not finite."""
    values = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    values *= np.logspace(-20, 20, len(values), dtype=np.float32)[:, None]
    values[3, :40], values[4, 5], values[5, 50], values[6], values[7] = 0, np.nan, -np.inf, 0, 1e-40
    values[8, 1], values[8, 9] = np.abs(values[8]).max() * 2 * np.array([1, -1], np.float32)  # the first of two decides
    return values


def packed(values: Array, form: str, *, dtype: torch.dtype = torch.float32) -> PackedWeight:
    made = Packer(form, num_threads=2).pack(torch.from_numpy(values).to(dtype))  # pyright: ignore[reportArgumentType]
    assert isinstance(made, PackedWeight)
    return made


def test_the_kernels_can_be_compiled_twice() -> None:
    for quantise in (quantise_int4_panels, quantise_int8_panels):
        quantise.compile()
        quantise.compile()


@pytest.mark.parametrize("shape", [(9, 64), (70, 100), (300, 4097)])
def test_int8(shape: tuple[int, int]) -> None:
    values = numbers(*shape)
    expected, found = pack(quantise_int8(values)), packed(values, "int8")
    assert found.shape == expected.shape
    assert found.scales is not None
    assert expected.scales is not None
    assert np.array_equal(found.scales, expected.scales, equal_nan=True)
    difference = np.abs(found.panels.astype(np.int32) - expected.panels)
    assert difference.max() <= 1  # of two equally near codes
    assert difference.mean() < 1e-3


@pytest.mark.parametrize("shape", [(9, 64), (70, 100), (300, 4097)])
def test_int4(shape: tuple[int, int]) -> None:
    values = numbers(*shape)
    weight = quantise_int4(np.pad(values, ((0, 0), (0, -shape[1] % 32))))
    expected, found = pack(weight), packed(values, "int4")
    assert (found.shape.kind, found.shape.depth) == (expected.shape.kind, expected.shape.depth)
    blocks = [one.memory.reshape(-1, 320) for one in (found, expected)]
    own, wanted = (np.ascontiguousarray(block[:, :64]).view(np.float32) for block in blocks)
    alike = np.isclose(own, wanted, rtol=1e-6, atol=0, equal_nan=True)
    assert alike.mean() > 0.999
    codes, known = (block[:, 64:].reshape(-1, 4, 16, 4).transpose(0, 2, 1, 3) for block in blocks)
    different = (codes != known)[alike].mean()
    assert different < 1e-3


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_a_part_of_the_inputs_has_the_codes_and_scales_of_the_whole(form: str) -> None:
    """Of four bits if it begins with a group of 32; the largest number of most rows is in one of the parts."""
    values = numbers(70, 256)
    values[40:] *= 0.01  # rows that the first part alone would give other scales
    values[40:, 200] = 1
    whole = packed(values, form)
    parts = [
        Packer(form, num_threads=2).pack(StackedRows([torch.from_numpy(values)], columns=columns))  # pyright: ignore[reportArgumentType]
        for columns in (range(96), range(96, 256))
    ]
    width = whole.shape.panel_bytes // (256 // 32)  # panels hold groups of inputs one after the other
    if form == "int4":
        width //= 2  # of half a panel
    blocks = whole.panels.reshape(-1, 8, width)
    for part, groups in zip(parts, (slice(3), slice(3, 8)), strict=True):
        assert isinstance(part, PackedWeight)
        assert np.array_equal(part.panels.reshape(-1, groups.stop - (groups.start or 0), width), blocks[:, groups])
        if whole.scales is not None:
            assert part.scales is not None
            assert np.array_equal(part.scales, whole.scales, equal_nan=True)


def test_bfloat16_checkpoints_are_quantised_like_their_numbers() -> None:
    values = torch.randn(64, 96).bfloat16()
    for form in ("int8", "int4"):
        whole = packed(values.float().numpy(), form)
        assert np.array_equal(packed(values.float().numpy(), form, dtype=torch.bfloat16).memory, whole.memory)


@pytest.mark.parametrize("symmetric", [True, False])
def test_slices_of_a_form_are_written_as_the_whole_is(symmetric: bool) -> None:
    weight = quantise_int4(numbers(500, 4096), symmetric=symmetric)  # several slices for each thread
    found = Packer("auto", num_threads=2).pack(weight)
    assert isinstance(found, PackedWeight)
    assert np.array_equal(found.memory, pack(weight).memory)


def resident_bytes() -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssFile")]
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="only Linux gives memory of files back")
def test_memory_of_files_is_given_back_and_can_be_read_again(tmp_path: Path) -> None:
    values = torch.randn(1024, 4096)
    save_file({"a": values, "b": values + 1}, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        read = file.get_tensor("a")
        assert read.equal(values)
        before = resident_bytes()
        give_back(read)
        assert before - resident_bytes() > 0.9 * values.nbytes
        assert read.equal(values)
        before = resident_bytes()
        packed_bytes = Packer("int4", num_threads=2).pack(read)
        assert isinstance(packed_bytes, PackedWeight)
        assert before - resident_bytes() > 0.9 * values.nbytes
        assert read.equal(values)
    own = values.clone()
    give_back(own)
    give_back(own[:, ::2])
    assert own.equal(values)
