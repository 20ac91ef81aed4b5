"""torchao: reads the parts of a tensor from the headers of safetensors; no code of the checkpoint is run.

Source: torchao 0.18, `prototype/safetensors`; for Int4Tensor `quantize.py` of FBGEMM's experimental gen_ai, which makes
its codes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.checkpoint_formats import HALVES, Array, Format, Kept, Part, divided, inputs, outputs
from pagewood.engine.weights.float8 import Float8
from pagewood.engine.weights.integers import Bytes, scales_of
from pagewood.engine.weights.matrix_forms import F32
from pagewood.engine.weights.nearest import kept_int4, kept_values
from pagewood.engine.weights.small_floats import nibbles

_READ = ("Float8Tensor", "Int4Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor")
_OF_DEVICES = ("Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "Int4PreshuffledTensor")
"""Tensor types with an order of codes that only the kernels of one kind of device know."""
_LARGEST = 1 << 24
_PARTS = "._weight"  # part of a module's weight, as in `q_proj._weight_qdata`


def torchao_formats(metadata: Mapping[str, str], source: str) -> dict[str, Format]:
    """Return the format of each quantised matrix by the name of its module.

    Args:
        metadata: of the headers of all safetensors.
        source: of the configuration, for errors.

    Raises:
        ValueError: the headers do not describe how tensors are stored, or a kind of tensor is not supported.
    """
    if "tensor_names" not in metadata:
        raise ValueError(
            f"{source}: quant_method torchao must come with safetensors whose headers describe their tensors "
            "(torchao 0.15 and later), got headers without tensor_names"
        )
    formats: dict[str, Format] = {}
    for name, text in metadata.items():
        if not name.endswith(".weight"):
            continue
        fields = _object(text, f"{source}: header of {name}")
        kind = fields.text("_type")
        if kind != "Tensor":
            formats[name.removesuffix(".weight")] = _format(kind, fields)
    return formats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Int4:
    """Two signed codes in a byte: value = code * scale + zero, for groups of inputs."""

    group: int
    name: str = "torchao Int4Tensor"

    def parts(self, rows: int, columns: int) -> Sequence[Part]:
        """Return codes `[N, K / 2]`, the first in the low four bits; scales and zeros `[G, N]`."""
        if columns % 2:
            raise ValueError(f"the number of inputs must be even for {self.name}, got {columns}")
        shape = (divided(columns, self.group, "block_size"), rows)
        axes = (inputs(self.group), outputs(1))
        return [
            Part(
                suffix=f"{_PARTS}_qdata",
                shape=(rows, columns // 2),
                dtypes=("I8",),
                axes=(outputs(1), inputs(2)),
            ),
            Part(suffix=f"{_PARTS}_scale", shape=shape, dtypes=HALVES, axes=axes),
            Part(suffix=f"{_PARTS}_zero_point", shape=shape, dtypes=HALVES, axes=axes),
        ]

    def read(self, found: Mapping[str, Array], rows: int, columns: int) -> Kept:
        """Return the matrix."""
        packed = found[f"{_PARTS}_qdata"].view(np.uint8) ^ np.uint8(0x88)  # codes 0 to 15
        scales, zeros = (np.ascontiguousarray(found[f"{_PARTS}_{name}"].T) for name in ("scale", "zero_point"))
        if not zeros.any():
            return kept_int4(packed, scales, None)

        def decode(run: slice) -> F32:
            codes = nibbles(packed[run]).reshape(-1, scales.shape[1], self.group).astype(np.float32) - 8
            return (codes * scales[run, :, None] + zeros[run, :, None]).reshape(-1, columns)

        return kept_values(rows, columns, decode, why="its groups have minima, not zeros")


def _format(kind: str, fields: Fields) -> Format:
    if kind in _OF_DEVICES:
        raise ValueError(
            f"{fields.source}: _type must be one of Tensor, {', '.join(_READ)}, got {kind}, whose codes are in the "
            "order of one kind of device: save the model in the plain packing format"
        )
    if kind not in _READ:
        raise ValueError(f"{fields.source}: _type must be one of Tensor, {', '.join(_READ)}, got {kind[:80]!r}")
    data = fields.section("_data") or fields.empty("_data")
    block = data.integers("block_size", low=1, high=_LARGEST)
    if len(block) != 2:
        raise ValueError(f"{data.source}: block_size must have 2 entries, got {len(block)}")
    parts = fields.texts("_tensor_data_names") or ()
    if "act_pre_scale" in parts:
        raise ValueError(f"{fields.source}: _tensor_data_names must not have act_pre_scale, which changes activations")
    if kind == "Float8Tensor":
        return Float8(
            name="torchao Float8Tensor", block=(block[0], block[1]), scale=f"{_PARTS}_scale", codes=f"{_PARTS}_qdata"
        )
    if block[0] != 1:
        raise ValueError(f"{data.source}: block_size must begin with 1, got {block[0]}")
    if kind == "Int4Tensor":
        return _Int4(group=block[1])
    num_bits = 8
    if kind == "IntxUnpackedToInt8Tensor":
        dtype = (data.section("target_dtype") or data.empty("target_dtype")).text("_data")
        if dtype not in [f"int{bits}" for bits in range(1, 9)]:
            raise ValueError(f"{data.source}: target_dtype must be int1 to int8, got {dtype[:80]!r}")
        num_bits = int(dtype.removeprefix("int"))
    return Bytes(
        name=f"torchao {kind}",
        num_bits=num_bits,
        scales=scales_of(block[1]),
        zeros="stored" if "zero_point" in parts else "none",
        prefix=_PARTS,
        codes=f"{_PARTS}_qdata",
    )


def _object(text: str, source: str) -> Fields:
    try:
        values: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{source} must hold JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{source} must hold a JSON object, got {type(values).__name__}")
    return Fields(source, cast("dict[str, object]", values))
