"""LFM2."""

from __future__ import annotations

from families.case import Case

_SIZES = {"intermediate_size": 100, "block_multiple_of": 16, "layer_types": ["conv", "full_attention", "conv"]}
CASES = {
    "lfm2": Case(kind="Lfm2", extra=_SIZES),
    "lfm2-biases": Case(
        kind="Lfm2",
        extra={**_SIZES, "conv_bias": True, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False},
        file={"layer_types": None, "full_attn_idxs": [1]},
    ),
}
