"""All cases by name."""

from __future__ import annotations

from families import deepseek, gemma, llama, olmo, qwen
from families.case import Case

CASES: dict[str, Case] = {**llama.CASES, **qwen.CASES, **olmo.CASES, **gemma.CASES, **deepseek.CASES}
ROUNDED = ("llama", "llama-biases", "mistral-window", "qwen3", "olmo2", "gemma3", "qwen3-moe")
"""Cases whose keys and values, or activations, are also rounded: what depends on the parts, not on their numbers."""
