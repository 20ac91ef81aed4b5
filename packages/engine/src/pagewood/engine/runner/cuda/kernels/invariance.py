"""Batch invariance: the logits of a token do not depend on the batch in which it is computed.

Floating point sums depend on their order, and kernels choose an order by the shape of the whole step. In
batch-invariant mode no order of summation depends on the other tokens of a step:

- Projections use `linear_triton`, whose tiles depend on the weights only.
- Attention uses one wrapper for all steps, including decode steps, with FlashInfer's fa2 kernels: the same
  instantiation for graphs, mixed steps and prefills. It never splits a grant, because splits depend on the number of
  grants. All tiles have one size: the kernel chooses it by the average number of queries per grant, and empty grants,
  which cost the device nothing, keep the average as low as for grants of one token (`num_empty_grants`).
- Latents are attended to by kernels of ours, in pieces of a fixed size that are merged in order (`latents_triton`).
- Probabilities are converted to integers, whose sums do not depend on order (`cuda.sampling`).
- Norms, rotation, activation and embedding work row by row with a shape that depends on the model only.

So a token has the same logits whether it is decoded or prefilled, alone or with others, in a graph or not, for any
chunks, and after a cache hit. This does not hold beyond a sliding window, because the kernel starts to add where the
window of the first query of a tile begins (`assembly.cuda.build.kernel_needs` refuses such lengths).

Source: "Defeating Nondeterminism in LLM Inference" (Thinking Machines Lab, 2025); the tile rule is that of
`FA2DetermineCtaTileQ` and `PrefillSplitQOKVIndptr` in flashinfer-python 0.7.2.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

_TILES = (16, 64)
"""The smaller tiles, as the largest average per grant of queries times query heads per KV head that selects each."""


def num_empty_grants(num_tokens: int, num_grants: int, group: int) -> int:
    """Return how many empty grants make the attention of a step use the tile of a decode step.

    Args:
        num_tokens: tokens of the step.
        num_grants: grants of the step, each with at least one token.
        group: query heads per KV head.
    """
    limit = next((tile for tile in _TILES if group <= tile), None)
    if limit is None:  # single tokens use the largest tile, and so do all other steps
        return 0
    return max(0, -(-num_tokens * group // limit) - num_grants)


def linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[T, out]` of `x` `[T, in]`: the reference for `linear_triton`, slow, for any device."""
    return torch.cat([functional.linear(x[i : i + 1], weight, bias) for i in range(len(x))])


def heads_by_row(x: Tensor, weight: Tensor) -> Tensor:
    """Return `[T, H, O]` of `x` `[T, H, I]` and `weight` `[H, O, I]`: the reference for `heads_linear`."""
    if not len(x):
        return x.new_empty(0, *weight.shape[:2])
    return torch.stack([torch.bmm(row[:, None], weight.transpose(1, 2))[:, 0] for row in x])
