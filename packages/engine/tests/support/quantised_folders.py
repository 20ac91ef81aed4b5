"""Folders of a tiny model with random weights, quantised in the formats of other tools, and what these weights are.

A `Maker` stores one matrix `[rows, columns]` and returns its tensors, by what their names have in place of `.weight`,
with the matrix as other code than ours computes it: a library, or a loop over single numbers in the words of the
format's description.
"""

# pyright: basic
# torch and transformers are typed in part only.

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

Random = np.random.Generator
Maker = Callable[[Random, int, int], tuple[dict[str, Tensor], Tensor]]

SIZE, WIDTH = 64, 96
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def write_model(folder: Path, *, architecture: str = "Llama", head_dim: int = 16, **options: Any) -> None:
    """Write a model with random weights in float32, whose linear layers have 32, 64 or 96 inputs and outputs."""
    config: Any = getattr(transformers, f"{architecture}Config")(
        vocab_size=60, hidden_size=SIZE, intermediate_size=WIDTH, num_hidden_layers=2, head_dim=head_dim,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2,
        bos_token_id=None, eos_token_id=0, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)


def quantise(
    folder: Path,
    make: Maker,
    quantization_config: Mapping[str, Any],
    *,
    seed: int = 0,
    excluded: tuple[str, ...] = (),
    metadata: Callable[[str, dict[str, Tensor]], str] | None = None,
) -> dict[str, Tensor]:
    """Replace the linear layers of `write_model`, except the output projection and `excluded` ones.

    Returns:
        All weights in float32.
    """
    random = np.random.default_rng(seed)
    weights = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    headers: dict[str, str] = {}
    for name, tensor in list(weights.items()):
        is_linear = name.endswith(("_proj.weight", "put_linear.weight")) and not name.endswith(excluded)
        if not is_linear:
            stored[name] = tensor
            continue
        tensors, weights[name] = make(random, *tensor.shape)
        module = name.removesuffix(".weight")
        stored |= {module + suffix: part.contiguous() for suffix, part in tensors.items()}
        if metadata is not None:
            headers[name] = metadata(name, tensors)
    if metadata is not None:
        headers["tensor_names"] = json.dumps(list(headers))
    save_file(stored, folder / "model.safetensors", metadata=headers or None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": dict(quantization_config)}))
    return weights


def gptq(*, num_bits: int, group: int, is_v2: bool = False, desc_act: bool = False, symmetric: bool = False) -> Maker:
    """Return a maker of GPTQ's tensors, built and read number by number."""

    def make(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        size = columns if group == -1 else group
        groups, high = columns // size, 1 << num_bits
        g_idx = [k // size for k in range(columns)]
        if desc_act:
            random.shuffle(g_idx)
        scales = torch.from_numpy(random.uniform(0.01, 0.1, (groups, rows))).to(torch.float16)
        lowest = 0 if is_v2 else 1
        zeros = [
            [high // 2 if symmetric else int(random.integers(lowest, high)) for _ in range(rows)] for _ in range(groups)
        ]
        # Each is one long number without gaps, which is cut into words of 32 bits: with three bits codes lie in two.
        qweight = [[0] * rows]
        qzeros = [[0] for _ in range(groups)]
        for g in range(groups):
            for n in range(rows):
                stored = zeros[g][n] - (0 if is_v2 else 1)
                qzeros[g][0] += stored * 2 ** (num_bits * n)
        values = torch.zeros(rows, columns)
        codes = random.integers(0, high, (rows, columns)).tolist()
        wide = scales.double().tolist()
        for n in range(rows):
            for k in range(columns):
                qweight[0][n] += codes[n][k] * 2 ** (num_bits * k)
        result = [[wide[g_idx[k]][n] * (codes[n][k] - zeros[g_idx[k]][n]) for k in range(columns)] for n in range(rows)]
        values = torch.tensor(result, dtype=torch.float32)
        return {
            ".qweight": _words([_cut(one, columns * num_bits) for one in qweight[0]]).T.contiguous(),
            ".qzeros": _words([_cut(one, rows * num_bits) for (one,) in qzeros]),
            ".scales": scales,
            ".g_idx": torch.tensor(g_idx, dtype=torch.int32),
        }, values

    return make


def awq(*, group: int) -> Maker:
    """Return a maker of AWQ's tensors: a word holds outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, lowest bits first."""

    def make(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        size = columns if group == -1 else group
        groups = columns // size
        scales = torch.from_numpy(random.uniform(0.01, 0.1, (groups, rows))).to(torch.float16)
        wide = scales.double().tolist()
        zeros, codes = random.integers(0, 16, (groups, rows)).tolist(), random.integers(0, 16, (columns, rows)).tolist()

        def packed(numbers: list[list[int]]) -> Tensor:
            return _words(
                [
                    [
                        sum(line[first + output] << 4 * place for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
                        for first in range(0, rows, 8)
                    ]
                    for line in numbers
                ]
            )

        values = [
            [(codes[k][n] - zeros[k // size][n]) * wide[k // size][n] for k in range(columns)] for n in range(rows)
        ]
        tensors = {".qweight": packed(codes), ".qzeros": packed(zeros), ".scales": scales}
        return tensors, torch.tensor(values, dtype=torch.float32)

    return make


def float8_blocks(*, high: int, wide: int, scale: str) -> Maker:
    """Return a maker of E4M3 numbers with a scale for each block, the last of which may be cut."""

    def make(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.from_numpy(random.normal(0, 60, (rows, columns))).to(torch.float8_e4m3fn)
        shape = (-(-rows // high), -(-columns // wide))
        scales = torch.from_numpy(random.uniform(1e-4, 1e-2, shape)).to(torch.float32)
        values = codes.to(torch.float32)
        for i in range(shape[0]):
            for j in range(shape[1]):
                values[i * high : (i + 1) * high, j * wide : (j + 1) * wide] *= scales[i, j]
        return {".weight": codes, scale: scales}, values

    return make


def float8_whole(*, scale: str, activations: str | None = None) -> Maker:
    """Return a maker of E4M3 numbers with one scale."""

    def make(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.from_numpy(random.normal(0, 60, (rows, columns))).to(torch.float8_e4m3fn)
        factor = torch.tensor(random.uniform(1e-4, 1e-2), dtype=torch.float32)
        more = {} if activations is None else {activations: torch.tensor(0.5)}
        return {".weight": codes, scale: factor, **more}, codes.to(torch.float32) * factor

    return make


def mxfp4(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make gpt-oss's blocks of 32 inputs, low four bits first."""
    codes = random.integers(0, 16, (rows, columns)).tolist()
    exponents = random.integers(118, 126, (rows, columns // 32)).tolist()
    values = [[_e2m1(codes[n][k]) * 2.0 ** (exponents[n][k // 32] - 127) for k in range(columns)] for n in range(rows)]
    packed = [[codes[n][k] + 16 * codes[n][k + 1] for k in range(0, columns, 2)] for n in range(rows)]
    blocks = torch.tensor(packed, dtype=torch.uint8).reshape(rows, columns // 32, 16)
    return {"_blocks": blocks, "_scales": torch.tensor(exponents, dtype=torch.uint8)}, torch.tensor(values)


def modelopt_nvfp4(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make ModelOpt's groups of 16 inputs, whose scales are multiplied by another."""
    codes = random.integers(0, 16, (rows, columns)).tolist()
    scales = torch.from_numpy(random.uniform(1, 400, (rows, columns // 16))).to(torch.float8_e4m3fn)
    whole = torch.tensor(random.uniform(1e-4, 1e-3), dtype=torch.float32)
    wide = scales.double().tolist()
    values = [[_e2m1(codes[n][k]) * wide[n][k // 16] * float(whole) for k in range(columns)] for n in range(rows)]
    packed = [[codes[n][k] + 16 * codes[n][k + 1] for k in range(0, columns, 2)] for n in range(rows)]
    return {
        ".weight": torch.tensor(packed, dtype=torch.uint8),
        ".weight_scale": scales,
        ".weight_scale_2": whole,
        ".input_scale": torch.tensor(0.5),
    }, torch.tensor(values, dtype=torch.float32)


def compressed(weights: Mapping[str, Any], form: str, *, g_idx: bool = False) -> Maker:
    """Return a maker that lets the compressed-tensors library round and store a random matrix, and read it again."""

    def make(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.lifecycle.forward import dequantize

        args: Any = QuantizationArgs(**weights)
        scheme: Any = QuantizationScheme(targets=["Linear"], weights=args)
        matrix = torch.from_numpy(random.normal(0, 0.2, (rows, columns))).to(torch.float32)
        state = {"weight": matrix, **_scales(args, matrix, random)}
        compressor: Any = BaseCompressor.get_value_from_registry(form)
        stored: dict[str, Any] = compressor.compress(state, scheme)
        if "nvfp4" in form:  # which the library reads in bfloat16 unless it is asked for more
            numbers = unpack_fp4_from_uint8(stored["weight_packed"], rows, columns, dtype=torch.float32)
            scale, whole = stored["weight_scale"].to(torch.float32), stored["weight_global_scale"]
            read = dequantize(numbers, scale, args=args, global_scale=whole, dtype=torch.float32)
        else:
            read = compressor.decompress(dict(stored), scheme)["weight"].to(torch.float32)
        return {f".{name}": tensor for name, tensor in stored.items() if isinstance(tensor, Tensor)}, read

    return make


def _scales(args: Any, matrix: Tensor, random: Random) -> dict[str, Tensor]:
    """Return scales (and zeros) that a matrix could have been calibrated to."""
    rows, columns = matrix.shape
    strategy = str(getattr(args.strategy, "value", args.strategy))
    shape: tuple[int, ...] = {
        "tensor": (1,),
        "channel": (rows, 1),
        "group": (rows, columns // (args.group_size or 1)),
        "tensor_group": (rows, columns // (args.group_size or 1)),
        "block": tuple(
            -(-size // block) for size, block in zip(matrix.shape, args.block_structure or (1, 1), strict=True)
        ),
    }[strategy]
    largest = (
        240.0
        if args.type == "float" and args.num_bits == 8
        else 6.0
        if args.type == "float"
        else 2.0 ** (args.num_bits - 1)
    )
    scales = torch.from_numpy(random.uniform(0.5, 1.0, shape) * 0.8 / largest).to(torch.float32)
    if strategy == "tensor_group":
        return {
            "weight_scale": (scales * 1000).to(torch.float8_e4m3fn).float(),
            "weight_global_scale": torch.tensor([1000.0]),
        }
    if args.type == "float" and args.num_bits == 4:
        return {"weight_scale": torch.exp2(torch.log2(scales).round())}
    if args.symmetric:
        return {"weight_scale": scales}
    low, high = -(1 << args.num_bits - 1), (1 << args.num_bits - 1) - 1
    return {
        "weight_scale": scales,
        "weight_zero_point": torch.from_numpy(random.integers(low, high, shape)).to(torch.int8),
    }


def torchao_int8(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make the parts of torchao's Int8Tensor."""
    codes = torch.from_numpy(random.integers(-128, 128, (rows, columns))).to(torch.int8)
    scales = torch.from_numpy(random.uniform(1e-3, 1e-2, (rows, 1))).to(torch.float32)
    zeros = torch.zeros((rows, 1), dtype=torch.int8)
    return {"._weight_qdata": codes, "._weight_scale": scales, "._weight_zero_point": zeros}, codes.float() * scales


def torchao_intx(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make the parts of torchao's IntxUnpackedToInt8Tensor with 4 bits in groups of 32."""
    codes = torch.from_numpy(random.integers(-8, 8, (rows, columns))).to(torch.int8)
    scales = torch.from_numpy(random.uniform(1e-3, 1e-2, (rows, columns // 32))).to(torch.bfloat16)
    zeros = torch.from_numpy(random.integers(-8, 8, (rows, columns // 32))).to(torch.int8)
    values = (codes.float() - zeros.float().repeat_interleave(32, 1)) * scales.float().repeat_interleave(32, 1)
    return {"._weight_qdata": codes, "._weight_scale": scales, "._weight_zero_point": zeros}, values


def torchao_int4(*, symmetric: bool) -> Maker:
    """Return a maker of the parts of torchao's Int4Tensor in groups of 32, packed as FBGEMM's `pack_int4` does."""

    def make(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
        codes = torch.from_numpy(random.integers(-8, 8, (rows, columns))).to(torch.int8)
        scales = torch.from_numpy(random.uniform(1e-3, 1e-2, (columns // 32, rows))).to(torch.bfloat16)
        zeros = torch.from_numpy(random.normal(0, 0.02, (columns // 32, rows))).to(torch.bfloat16)
        zeros = torch.zeros_like(zeros) if symmetric else zeros
        packed = torch.bitwise_or(codes[:, ::2] & 0xF, codes[:, 1::2] << 4)
        wide, moved = (one.float().T.repeat_interleave(32, 1) for one in (scales, zeros))
        parts = {"._weight_qdata": packed, "._weight_scale": scales.contiguous(), "._weight_zero_point": zeros}
        return parts, codes.float() * wide + moved

    return make


def torchao_float8(random: Random, rows: int, columns: int) -> tuple[dict[str, Tensor], Tensor]:
    """Make the parts of torchao's Float8Tensor with a scale for each output."""
    codes = torch.from_numpy(random.normal(0, 60, (rows, columns))).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(random.uniform(1e-4, 1e-2, (rows, 1))).to(torch.float32)
    return {"._weight_qdata": codes, "._weight_scale": scales}, codes.float() * scales


def torchao_header(kind: str, target: str | None = None) -> Callable[[str, dict[str, Tensor]], str]:
    """Return a function that says, as torchao does, what the parts of a tensor make."""

    def header(name: str, tensors: dict[str, Tensor]) -> str:
        columns = tensors["._weight_qdata"].shape[1] * (2 if kind == "Int4Tensor" else 1)
        groups = tensors["._weight_scale"].shape[0 if kind == "Int4Tensor" else 1]
        data: dict[str, Any] = {
            "block_size": [1, columns // groups],
            "dtype": {"_type": "torch.dtype", "_data": "bfloat16"},
        }
        if target is not None:
            data["target_dtype"] = {"_type": "torch.dtype", "_data": target}
        parts = [suffix.removeprefix("._weight_") for suffix in tensors]
        return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": parts})

    return header


def _e2m1(code: int) -> float:
    return -_E2M1[code - 8] if code >= 8 else _E2M1[code]


def _cut(number: int, num_bits: int) -> list[int]:
    """Return the words of 32 bits of a number, lowest first."""
    return [number // 2**at % 2**32 for at in range(0, num_bits, 32)]


def _words(numbers: list[list[int]]) -> Tensor:
    """Return int32 with the bits of numbers below 2^32."""
    return torch.from_numpy(np.array(numbers, dtype=np.uint32).view(np.int32))
