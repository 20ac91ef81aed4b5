"""Greedy chains of drafts at every position of given rows, and the number of verifications that answers need."""

from typing import Protocol

import torch
import torch.nn.functional as F
from eagle import Head
from model import Llama, Past
from torch import Tensor


class Drafter(Protocol):
    """Drafts a chain after every token of the rows."""

    def __call__(self, tokens_BT: Tensor, depth: int) -> Tensor:
        """Return [B, T, depth] int64: the tokens that are drafted after token t, if the row ends there."""
        ...


@torch.no_grad()
def draft_model_chains(draft: Llama, tokens_BT: Tensor, depth: int) -> Tensor:
    """Return the chains of a draft model."""
    pasts = [Past() for _ in draft.layers]
    last, chains = tokens_BT, list[Tensor]()
    for step in range(depth):
        hidden = draft.norm(draft.streams(last, start=step, pasts=pasts)[-1])
        last = draft.logits(hidden).argmax(-1)
        chains.append(last)
    return torch.stack(chains, dim=-1)


@torch.no_grad()
def head_chains(head: Head, target: Llama, tokens_BT: Tensor, depth: int) -> Tensor:
    """Return the chains of a head; those after token 0 are -1, because a pair needs two tokens."""
    x_BTD, past = head.features(target.streams(tokens_BT[:, :-1])), Past()
    last, chains = tokens_BT[:, 1:], list[Tensor]()
    for step in range(depth):
        x_BTD = head(target.embed_tokens(last), x_BTD, start=step, past=past)
        last = target.logits(head.norm(x_BTD)).argmax(-1)
        chains.append(F.pad(last, (1, 0), value=-1))
    return torch.stack(chains, dim=-1)


def num_steps(row: list[int], start: int, chains: list[list[int]]) -> int:
    """Return how many verifications the tokens after `start` need.

    Each verification accepts the leading drafts that are equal to the row's next tokens, and adds one more token.

    Args:
        row: the prompt and the target's greedy answer.
        start: index of the answer's first token, which the prompt's own step yields.
        chains: drafts by index of the last known token.
    """
    known, steps = start, 0
    while known + 1 < len(row):
        accepted = 0
        for token, draft in zip(row[known + 1 :], chains[known], strict=False):
            if token != draft:
                break
            accepted += 1
        known += accepted + 1
        steps += 1
    return steps
