"""What makes the numbers of a token independent of the batch that it is computed in.

Floating point sums depend on their order, and kernels choose an order by the shape of the whole step. In
batch-invariant mode no order of summation depends on the other tokens of a step:

- projections go through `linear_triton`, whose tiles depend on the weights only;
- attention goes through one wrapper for all steps, decodes too, in FlashInfer's fa2 kernels (one instantiation for
  graphs, mixed steps and prefills), which never split a grant (a split would follow the number of grants), and whose
  tiles are of one size: the kernel takes the tile by the average number of queries of a grant, and empty grants,
  which cost the device nothing, keep that average where it is for grants of one token (`num_empty_grants`);
- probabilities become whole numbers, whose sums have no order (`cuda.sampling`);
- norms, rotation, activation and embedding work row by row with a shape that depends on the model only.

So a token has the same numbers decoded or prefilled, alone or beside others, in a graph or not, however its prompt was
cut into chunks, and after a cache hit. But not beyond a sliding window: the kernel begins to add where the window of
the first query of a tile begins (`build_cuda.kernel_needs` refuses such lengths).

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
"""The most queries, times query heads of a KV head, that a grant may have on average for the smaller tiles."""


def num_empty_grants(num_tokens: int, num_grants: int, group: int) -> int:
    """Return how many empty grants make a step's attention use the tile of a step of single tokens.

    Args:
        num_tokens: of the step.
        num_grants: of the step, each with a token at least.
        group: query heads of a KV head.
    """
    limit = next((tile for tile in _TILES if group <= tile), None)
    if limit is None:  # single tokens use the largest tile, and so does everything else
        return 0
    return max(0, -(-num_tokens * group // limit) - num_grants)


def linear_by_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `[T, out]` of `x` `[T, in]`: what `linear_triton` is held to, slow and on any device."""
    return torch.cat([functional.linear(x[i : i + 1], weight, bias) for i in range(len(x))])
