"""All cases by name."""

from __future__ import annotations

from families import (
    apertus,
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
    llama,
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
    **apertus.CASES,
    **deepseek.CASES,
    **exaone.CASES,
    **glm.CASES,
    **phi.CASES,
    **ernie.CASES,
}
ROUNDED = (
    "llama", "llama-biases", "mistral-window", "qwen3", "olmo2", "gemma2", "gemma3", "starcoder2", "qwen3-moe",
    "gemma4-small", "gemma4-large", "deepseek3-dense",
)  # fmt: skip
"""Cases whose keys and values, or activations, are also rounded: what depends on the parts, not on their numbers."""
DIVIDED = CASES
"""Cases that ranks can compute together: all."""
