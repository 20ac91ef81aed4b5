"""Folders of Llamas with random weights, written a tensor at a time, so that they need no memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from end_to_end.model import FULL, QUICK, ModelShape

SHAPES = {
    "110M": FULL,
    "500M": ModelShape(
        num_layers=24, hidden_size=896, num_heads=14, num_kv_heads=2, intermediate_size=4864, vocab_size=151_936,
        tied=True,
    ),
    "1.5B": ModelShape(
        num_layers=28, hidden_size=1536, num_heads=12, num_kv_heads=2, intermediate_size=8960, vocab_size=151_936,
        tied=True,
    ),
    "tiny": QUICK,
}  # fmt: skip
"""The second and the third have the sizes of Qwen2's 0.5B and 1.5B."""
SEVEN_B = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, intermediate_size=14_336, vocab_size=32_000,
    tied=False,
)  # fmt: skip
"""The sizes of Mistral's 7B."""
GROUP = 128
"""Inputs that share a scale in the checkpoint of 4 bits."""
_RANDOM_BYTES = 32 << 20  # that are repeated
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
    }}},
}  # fmt: skip

Bytes = NDArray[np.uint8]
Tensor = tuple[str, str, tuple[int, ...]]
"""Name, dtype as safetensors names it, shape."""


def write_folder(shape: ModelShape, folder: Path, *, is_int4: bool = False) -> int:
    """Write config.json and model.safetensors, and return the number of weights in matrices.

    Args:
        shape: of the model.
        folder: to create.
        is_int4: projections are codes of 4 bits in the format of compressed-tensors; otherwise all is bfloat16.
    """
    folder.mkdir(parents=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size, "tie_word_embeddings": shape.tied, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    if is_int4:
        config["quantization_config"] = _INT4
    (folder / "config.json").write_text(json.dumps(config))
    tensors = list(_tensors(shape, is_int4=is_int4))
    _write(folder / "model.safetensors", tensors)
    return sum(math.prod(size) * (8 if kind == "I32" else 1) for _, kind, size in tensors if kind != "I64")


def _tensors(shape: ModelShape, *, is_int4: bool) -> Iterator[Tensor]:
    hidden, wide, kv = shape.hidden_size, shape.intermediate_size, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", "BF16", (shape.vocab_size, hidden)
    sizes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }  # fmt: skip
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{name}.weight", "BF16", (hidden,)
        for name, (rows, columns) in sizes.items():
            if is_int4:
                yield f"{prefix}.{name}.weight_packed", "I32", (rows, columns // 8)
                yield f"{prefix}.{name}.weight_scale", "BF16", (rows, columns // GROUP)
                yield f"{prefix}.{name}.weight_shape", "I64", (2,)
            else:
                yield f"{prefix}.{name}.weight", "BF16", (rows, columns)
    yield "model.norm.weight", "BF16", (hidden,)
    if not shape.tied:
        yield "lm_head.weight", "BF16", (shape.vocab_size, hidden)


def _write(file: Path, tensors: list[Tensor]) -> None:
    header: dict[str, object] = {}
    end, shapes = 0, {name: size for name, _, size in tensors}
    for name, kind, size in tensors:
        num_bytes = math.prod(size) * {"BF16": 2, "I32": 4, "I64": 8}[kind]
        header[name] = {"dtype": kind, "shape": size, "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    random = np.random.default_rng(0)
    normal = _bfloat16(random.standard_normal(_RANDOM_BYTES // 2, dtype=np.float32) * np.float32(0.02))
    scales = _bfloat16(random.uniform(0.004, 0.008, _RANDOM_BYTES // 2).astype(np.float32))
    codes = random.integers(0, 256, _RANDOM_BYTES, dtype=np.uint8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for number, (name, kind, size) in enumerate(tensors):
            if len(size) == 1 and kind == "BF16":
                out.write(_bfloat16(np.ones(size, np.float32)).tobytes())
            elif kind == "I64":
                rows, columns = shapes[name.replace("_shape", "_packed")]
                out.write(np.array([rows, 8 * columns], np.int64).tobytes())
            else:
                source = codes if kind == "I32" else scales if name.endswith("_scale") else normal
                _repeat(out, source, math.prod(size) * (4 if kind == "I32" else 2), start=4096 * number)


def _repeat(out: BinaryIO, source: Bytes, num_bytes: int, *, start: int) -> None:
    start %= len(source)
    while num_bytes:
        part = source[start : start + num_bytes]
        out.write(part.data)
        num_bytes -= len(part)
        start = 0


def _bfloat16(values: NDArray[np.float32]) -> Bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
