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
ROUNDED = ("llama", "llama-biases", "mistral-window", "qwen3", "olmo2", "gemma3")
"""Cases whose keys and values, or activations, are also rounded: what depends on the parts, not on their numbers."""
