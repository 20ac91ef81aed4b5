"""All cases by name."""

from __future__ import annotations

from dataclasses import replace

from families import (
    apertus,
    bamba,
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    glm,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    kimi,
    liquid,
    llama,
    mamba,
    nemotron,
    olmo,
    phi,
    qwen,
    starcoder,
)
from families.case import Case

CASES: dict[str, Case] = {
    **llama.CASES,
    **qwen.CASES,
    **olmo.CASES,
    **gemma.CASES,
    **granite.CASES,
    **gpt_oss.CASES,
    **cohere.CASES,
    **gpt_neox.CASES,
    **gpt2.CASES,
    **starcoder.CASES,
    **nemotron.CASES,
    **mamba.CASES,
    **apertus.CASES,
    **deepseek.CASES,
    **exaone.CASES,
    **glm.CASES,
    **phi.CASES,
    **ernie.CASES,
    **liquid.CASES,
    **bamba.CASES,
    **kimi.CASES,
}
ROUNDED = (
    "llama", "llama-biases", "mistral-window", "qwen3", "olmo2", "gemma2", "gemma3", "starcoder2", "qwen3-moe",
    "gemma4-small", "gemma4-large", "deepseek3-dense",
)  # fmt: skip
"""Cases whose keys and values, or activations, are also rounded: what depends on the parts, not on their numbers."""
RECURRENT = (
    "lfm2", "lfm2-biases", "granite4-states", "granite4-groups", "granite4-moe", "qwen3-next", "qwen3.5",
    "qwen3.5-moe", "qwen3.5-vl", "qwen3.5-vl-moe", "olmo-hybrid", "olmo-hybrid-rotated", "lfm2-moe", "lfm2-moe-plain",
    "nemotron-h", "nemotron-h-moe", "nemotron-h-latents", *mamba.CASES, *bamba.CASES, *kimi.CASES,
)  # fmt: skip
"""Cases with recurrent layers."""
VARIANTS = (
    "bamba-groups", "falcon-h1-norm-first", "falcon-h1-norm-last", "lfm2-moe-plain", "kimi-linear-groups",
    "mamba2-codestral",
)  # fmt: skip
"""Cases that differ little from another one; their tests are slow ones."""
DIVIDED = {name: case for name, case in CASES.items() if name not in RECURRENT}
"""Cases that ranks can compute together in every way; for the others see `test_recurrent_ranks`."""


def deep(name: str, kinds: str = "rfrf") -> Case:
    """Return a case with recurrent layers and with full attention, by their first letters: stages can divide these."""
    case = CASES[name]
    if name == "mamba2":  # it has recurrent layers only
        return replace(case, extra={**case.extra, "num_hidden_layers": len(kinds)})
    names = {"r": "conv" if "lfm2" in name else "linear_attention", "f": "full_attention"}
    layers = [names[kind] for kind in kinds]
    return replace(case, extra={**case.extra, "num_hidden_layers": len(layers), "layer_types": layers}, file={})
