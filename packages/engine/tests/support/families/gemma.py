"""Gemma."""

from __future__ import annotations

from dataclasses import replace

from families.case import Case

_GEMMA3 = {
    "head_dim": 16,
    "sliding_window": 9,
    "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 24,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
}
_CASE3 = Case(kind="Gemma3", config="Gemma3TextConfig", extra=_GEMMA3, norms_from_zero=True)
_ENDS = {"eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
_GEMMA2 = {
    **_ENDS,
    "head_dim": 16,
    "sliding_window": 9,
    "query_pre_attn_scalar": 24,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 4.0,
}
CASES = {
    "gemma": Case(kind="Gemma", extra={**_ENDS, "head_dim": 16}, norms_from_zero=True),
    "gemma2": Case(kind="Gemma2", extra=_GEMMA2, norms_from_zero=True),
    "gemma2-no-caps": Case(
        kind="Gemma2",
        extra={**_GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        norms_from_zero=True,
    ),
    "gemma3": _CASE3,
    "gemma3-in-a-model-of-images": replace(_CASE3, is_inside=True),
}
