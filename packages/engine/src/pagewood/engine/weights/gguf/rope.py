"""The stretching of positions in a GGUF file: keys, as llama.cpp reads them, or a tensor of factors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagewood.engine.json_fields import Fields
from pagewood.engine.weights.gguf.file import GGUFFile

FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = frozenset({FACTORS, _LONG, _SHORT})
"""Tensors that `rope_scaling_of` reads."""
_LARGEST = 1 << 28
_LLAMA3_LENGTH, _LLAMA3_LOW = 8192, 1.0
_LLAMA3_HIGH = (4.0, 1.0)
"""The scalings of all models that store the factors of their rope as a tensor: that of Llama 3, and that of Llama 4."""


def rope_scaling_of(
    file: GGUFFile,
    fields: Fields,
    name: str,
    length: int,
    head_dim: int,
    *,
    has_latents: bool = False,
    has_growth: bool = False,
) -> dict[str, Any] | None:
    """Return `rope_scaling` of config.json; None: positions are not stretched.

    Args:
        file: with the tensor.
        fields: the keys.
        name: of the architecture.
        length: the longest sequence.
        head_dim: elements of a head.
        has_latents: whether attention is that of DeepSeek, whose scale grows with the stretching.
        has_growth: see `Architecture`.

    Raises:
        ValueError: a key or the tensor asks for something that is not supported.
    """
    if file.tensors.keys() & {_LONG, _SHORT}:
        return _longrope(file, fields, name)
    stretched = _scaling(file, fields, name, length, has_latents=has_latents, has_growth=has_growth)
    if FACTORS not in file.tensors:
        return stretched
    factors = _llama3_scaling(file, fields, name, head_dim)
    if stretched is not None and factors is not None:
        raise ValueError(
            f"{file.path}: keys {name}.rope.scaling.* and {name}.rope.scale_linear must not stretch positions beside "
            f"the tensor {FACTORS}, got {stretched['rope_type']} by {stretched['factor']}"
        )
    return stretched or factors


def _scaling(
    file: GGUFFile, fields: Fields, name: str, length: int, *, has_latents: bool, has_growth: bool
) -> dict[str, Any] | None:
    """Return the scaling in the keys. Without a type it is linear; without a factor the older key counts, or 1."""
    own = f"{name}.rope.scaling."
    kind = fields.text(f"{own}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"{file.path}: {own}type must be none, linear or yarn, got {kind[:80]!r}")
    ext = -1.0 if kind == "none" else 1.0 if kind == "yarn" else 0.0
    growth = 0.0
    if has_latents and kind == "yarn":
        growth = fields.number(f"{own}yarn_log_multiplier", low=1e-3, high=1e3)
    if has_growth and kind == "yarn":
        growth = fields.number(f"{own}yarn_log_multiplier", 0.0, low=0, high=1e3)
    for key, plain in (
        ("attn_factor", (1.0,)),
        ("yarn_attn_factor", (1.0,)),
        ("yarn_log_multiplier", (growth,)),
        ("yarn_ext_factor", (-1.0, ext)),  # negative: the default of the type
    ):
        value = fields.number(f"{own}{key}", plain[0], low=-1e3, high=1e3)
        if value not in plain:
            raise ValueError(f"{file.path}: {own}{key} must be absent or {plain[-1]:g}, got {value:g}")
    key = f"{own}factor" if f"{own}factor" in file.metadata else f"{name}.rope.scale_linear"
    factor = fields.number(key, 0.0, low=0, high=4096)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if factor < 1:
        raise ValueError(f"{file.path}: {key} must be 0 or in [1, 4096], got {factor:g}")
    original = fields.integer(f"{own}original_context_length", length, low=1, high=_LARGEST)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    if growth and has_growth:
        scaling |= {"mscale": 1.0, "mscale_all_dim": growth}
    elif growth:  # llama.cpp assumes that both multipliers are the same; files have a tenth of them
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), growth * 10)
    if kind == "yarn":
        for name_here in ("beta_fast", "beta_slow"):
            if f"{own}yarn_{name_here}" in file.metadata:
                scaling[name_here] = fields.number(f"{own}yarn_{name_here}", low=1e-3, high=1e6)
    return scaling


def _longrope(file: GGUFFile, fields: Fields, name: str) -> dict[str, Any]:
    """Return the scaling of a model with two sets of factors, which stand in tensors, as Phi-3 has them.

    Raises:
        ValueError: one set is missing, or something else stretches positions too.
    """
    own = f"{name}.rope.scaling."
    kind = fields.text(f"{own}type", "longrope")
    if kind != "longrope":
        raise ValueError(f"{file.path}: {own}type must be absent or longrope beside {_LONG}, got {kind[:80]!r}")
    for key in (f"{own}factor", f"{name}.rope.scale_linear"):
        factor = fields.number(key, 1.0, low=0, high=4096)
        if factor not in (0.0, 1.0):
            raise ValueError(f"{file.path}: {key} must be absent or 1 beside {_LONG}, got {factor:g}")
    return {
        "rope_type": "longrope",
        "short_factor": _factors(file, _SHORT),
        "long_factor": _factors(file, _LONG),
        "attention_factor": fields.number(f"{own}attn_factor", 1.0, low=1e-3, high=1e3),
        "original_max_position_embeddings": fields.integer(f"{own}original_context_length", low=1, high=_LARGEST),
    }


def _factors(file: GGUFFile, name: str) -> list[float]:
    stored = file.tensors.get(name)
    if stored is None:
        raise ValueError(f"{file.path} must have the tensors {_SHORT} and {_LONG}, or neither, got none of name {name}")
    if stored.kind != "F32" or len(stored.shape) != 1:
        raise ValueError(f"{file.path}: {name} must be F32 of one axis, got {stored.kind} of {stored.shape}")
    return file.raw(name).view("<f4").tolist()


def _llama3_scaling(file: GGUFFile, fields: Fields, name: str, head_dim: int) -> dict[str, Any] | None:
    """Return the parameters that produce the factors of the tensor rope_freqs.weight.

    Raises:
        ValueError: neither the parameters of Llama 3 nor those of Llama 4 produce them.
    """
    stored = file.tensors[FACTORS]
    if stored.kind != "F32" or stored.shape != (head_dim // 2,):
        raise ValueError(
            f"{file.path}: rope_freqs.weight must be F32 of shape {(head_dim // 2,)}, "
            f"got {stored.kind} of {stored.shape}"
        )
    factors = file.raw(FACTORS).view("<f4").astype(np.float64)
    if (factors == 1).all():
        return None
    base = fields.number(f"{name}.rope.freq_base", 10000.0, low=2, high=1e12)
    factor = float(factors.max())
    wavelengths = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_LENGTH / wavelengths
    for high in _LLAMA3_HIGH:
        width = high - _LLAMA3_LOW
        share = np.clip((turns - _LLAMA3_LOW) / width, 0, 1) if width else (turns >= _LLAMA3_LOW).astype(np.float64)
        with np.errstate(all="ignore"):
            expected = 1 / ((1 - share) / factor + share)
        if np.allclose(factors, expected, rtol=1e-3, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": high,
                "original_max_position_embeddings": _LLAMA3_LENGTH,
            }
    raise ValueError(f"{file.path}: rope_freqs.weight must hold the factors of Llama 3's scaling or of 4's, got others")
