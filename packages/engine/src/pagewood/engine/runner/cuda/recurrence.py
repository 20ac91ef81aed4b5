"""What recurrent layers do with the states of a step, in plain torch: the reference for `kernels.recurrence_triton`.

Tokens of a grant are computed one after the other, in one order of operations. So a token's bits depend on the state
before it and on its own numbers, and neither on chunks nor on what else is in a step.

It is slow, for any device. Its functions and sums are computed in float64 and rounded once: how torch divides an array
among vector instructions then shows in no bit.

Legend: T tokens of a step, G grants with tokens, C channels of a convolution, W tokens that it reads, H heads of values
`[V]`, K elements of a key.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.ops import Convolution, RecurrentHeads

_log = logging.getLogger(__name__)

LEAST_SQUARES = 1e-6
"""Added to sums of squares of queries and keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStates:
    """Where the grants of a step find their states and leave them, on the device; all int32."""

    places: Tensor
    """[2 G], of each grant the place that it reads, -1: zeros, and the one that it writes; see `Batch.states`."""
    saves: Tensor
    """[T], the place that gets a copy of the state behind each token; -1: no place."""
    grants: Tensor
    """[T], the grant of each token."""
    offsets: Tensor
    """[>= G + 1], the first token of each grant."""
    longest: int
    """No grant has more tokens."""


class RecurrentKernels(Protocol):
    """Computes with states, and changes them. The last place is the runner's own, and what it holds has no meaning."""

    def convolve(self, x: Tensor, column: int, convolution: Convolution, tails: Tensor, step: StepStates) -> Tensor:
        """Return the convolution `[T, C]`, of the dtype of `x`, of columns of `x` `[T, n]` from `column` on.

        `tails` `[places, W - 1, C] float32` are the states.
        """
        ...

    def recur(self, x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, step: StepStates) -> Tensor:
        """Return the results `[T, H V]`, of the dtype of `x`; see `models.ops.Recurrence.recur`.

        `matrices` `[places, H, K, V] float32` are the states.
        """
        ...


def kernels_for(device: torch.device) -> RecurrentKernels:
    """Return the functions for a device: Triton's, if it has Triton."""
    if device.type != "cpu":
        try:
            kernels: Any = importlib.import_module("pagewood.engine.runner.cuda.kernels.recurrence_triton")
        except ImportError as error:
            _log.warning("recurrent layers are slow without Triton, which comes with torch for CUDA (%s)", error)
        else:
            return kernels
    return cast(RecurrentKernels, sys.modules[__name__])


def convolve(x: Tensor, column: int, convolution: Convolution, tails: Tensor, step: StepStates) -> Tensor:
    """Return the convolution of columns of `x`; see `RecurrentKernels`."""
    (width, channels), spare = convolution.weight.shape, len(tails) - 1
    own, grants = x[:, column : column + channels].float(), step.grants.long()
    sources, targets = step.places.view(-1, 2).long().unbind(1)
    old = _at(tails, sources).index_select(0, grants)
    tokens = torch.arange(len(x), device=x.device)
    index = tokens - step.offsets.long().index_select(0, grants)
    rows: list[Tensor] = []
    for back in range(width - 1, -1, -1):
        before = old[tokens, (width - 1 + index - back).clamp(0, width - 2)]
        rows.append(torch.where((index >= back)[:, None], own[(tokens - back).clamp(min=0)], before))
    out = torch.zeros_like(own) if convolution.bias is None else convolution.bias.expand_as(own)
    for weight, row in zip(convolution.weight, rows, strict=True):
        out = out + weight * row
    if convolution.activates:
        out = functional.silu(out.double()).float()
    kept = torch.stack(rows[1:], 1)
    tails.index_copy_(0, torch.where(step.saves < 0, spare, step.saves).long(), kept)
    last = step.offsets[1 : len(targets) + 1].long() - 1
    tails.index_copy_(0, targets, kept.index_select(0, last))
    return out.to(x.dtype)


def recur(x: Tensor, gates: Tensor, heads: RecurrentHeads, matrices: Tensor, step: StepStates) -> Tensor:
    """Return the results of heads; see `RecurrentKernels`."""
    num_tokens, spare = len(x), len(matrices) - 1
    sources, targets = step.places.view(-1, 2).long().unbind(1)
    offsets = step.offsets[: len(targets) + 1].long()
    firsts, counts = offsets[:-1], offsets.diff()
    state = _at(matrices, sources)
    out = x.new_empty(num_tokens + 1, heads.value_size)  # the last row is of grants that have ended
    for index in range(step.longest):
        is_inside = index < counts
        tokens = torch.where(is_inside, firsts + index, 0)
        changed, result = _token(state, x.index_select(0, tokens), gates.index_select(0, tokens), heads)
        state = torch.where(is_inside[:, None, None, None], changed, state)
        out.index_copy_(0, torch.where(is_inside, tokens, num_tokens), result.flatten(1).to(x.dtype))
        saves = step.saves.index_select(0, tokens)
        matrices.index_copy_(0, torch.where(is_inside & (saves >= 0), saves, spare).long(), state)
    matrices.index_copy_(0, targets, state)
    return out[:num_tokens]


def _token(state: Tensor, x: Tensor, gates: Tensor, heads: RecurrentHeads) -> tuple[Tensor, Tensor]:
    """Return the states `[G, H, K, V]` behind a token of each grant, and its results `[G, H, V]`."""
    dims = heads.key_dim, heads.key_dim, heads.value_dim
    sizes = heads.key_size, heads.key_size, heads.value_size
    q, k, v = (
        x[:, start : start + size].double().unflatten(1, (-1, dim))
        for start, size, dim in zip(heads.columns, sizes, dims, strict=True)
    )
    numbers = functional.softplus(gates[:, -len(heads.bias) :].double() + heads.bias)
    numbers = numbers.unflatten(1, (heads.num_heads, -1))
    strengths = numbers
    if heads.corrects:
        q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + LEAST_SQUARES) for one in (q, k))
        q = q * heads.key_dim**-0.5
        strengths = (torch.sigmoid(gates[:, : heads.num_heads].double()) * heads.most_strength)[..., None]
    q, k = (one.repeat_interleave(heads.num_heads // heads.num_key_heads, 1)[..., None] for one in (q, k))
    decayed = state.double() * torch.exp(heads.rate[:, None] * numbers)[..., None]
    change = v - (decayed * k).sum(2) if heads.corrects else v
    changed = decayed + k * (change * strengths)[:, :, None]
    result = (changed * q).sum(2)
    if heads.skip is not None:
        result = result + heads.skip[:, None] * v
    return changed.float(), result.float()


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Return the states at `places`; zeros where that is -1."""
    found = states.index_select(0, places.clamp(min=0))
    return found.masked_fill_((places < 0).view(-1, *[1] * (states.ndim - 1)), 0)
