"""Logits processors for tests: what an operator would write."""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import torch


def add_biases(tokens: torch.Tensor, logits: torch.Tensor, *, biases: list[tuple[int, float]]) -> None:
    """Add numbers to the logits of some tokens, as `logit_bias` does."""
    del tokens
    for token, bias in biases:
        logits[token] += bias


def follow_text(
    tokens: torch.Tensor, logits: torch.Tensor, *, strength: float = 4.0, penalty: float = torch.inf
) -> None:
    """Forbid the last token, or make it less likely, and prefer one that is a hash of the text."""
    text: list[int] = tokens.tolist()
    logits[text[-1]] -= penalty
    key = 0
    for token in text:
        key = (key * 31 + token + 1) % 1_000_003
    logits[key % len(logits)] += strength


def fail_at(tokens: torch.Tensor, logits: torch.Tensor, *, length: int) -> None:
    """Fail at texts of a length, after a part of the logits has been changed."""
    if len(tokens) == length:
        logits[: len(logits) // 2] = 0.0
        raise ZeroDivisionError(f"a text of {length} tokens")
