"""All cases by name."""

from __future__ import annotations

from families import apertus, deepseek, gemma, granite, llama, olmo, qwen, starcoder
from families.case import Case

CASES: dict[str, Case] = {
    **llama.CASES,
    **qwen.CASES,
    **olmo.CASES,
    **gemma.CASES,
    **granite.CASES,
    **starcoder.CASES,
    **apertus.CASES,
    **deepseek.CASES,
}
ROUNDED = ("llama", "llama-biases", "mistral-window", "qwen3", "olmo2", "gemma2", "gemma3", "starcoder2", "qwen3-moe")
"""Cases whose keys and values, or activations, are also rounded: what depends on the parts, not on their numbers."""
