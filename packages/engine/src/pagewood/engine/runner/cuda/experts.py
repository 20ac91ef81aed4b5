"""Mixtures of experts on a CUDA device; nothing waits for the device, and no shape depends on the choice.

A pair of a token and one of its experts is a slot.

Legend: T tokens, N experts, K chosen experts of a token, S slots, T times K, E hidden_size, I and O columns of the
input and of the output of a product.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pagewood.engine.models.ops import ChosenExperts, ExpertMatrices
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import Activation
from pagewood.engine.runner.cuda.adapters import AdaptedExperts


class ExpertKernels(Protocol):
    """The kernels of a device: the module `kernels.experts_triton`."""

    def choose(self, logits: Tensor, router: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """See `models.ops.Ops.choose`."""
        ...

    def TritonExperts(
        self,
        matrices: ExpertMatrices,
        activation: Activation,
        *,
        weighs_inputs: bool = False,
        adapted: AdaptedExperts | None = None,
    ) -> ChosenExperts[Tensor]:
        """See `models.ops.Ops.experts`; `adapted` adds to their products."""
        ...


def local_experts(chosen: Tensor, first: int, count: int) -> Tensor:
    """Return placed experts `[T, K] int32` as those of a rank, which has `count` from `first` on; `count`: others."""
    local = chosen - first
    return local.masked_fill((local < 0) | (local >= count), count)


def grouped_by_row(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor) -> Tensor:
    """Multiply each row by a copy of its expert's matrix.

    Args:
        x: `[S, I]`.
        weight: `[N, O, I]`, maybe in codes.
        bias: `[N, O]`, or None.
        experts: `[S]`, the expert of each slot.

    Returns:
        `[S, O]`.
    """
    products = (weight.index_select(0, experts).to(x.dtype) @ x[:, :, None])[:, :, 0]
    return products if bias is None else products + bias.index_select(0, experts)


class CUDAExperts:
    """`models.ops.ChosenExperts` in plain torch: the reference for `kernels.experts_triton`, slow, for any device.

    Invariant: a token's bits do not depend on the other tokens.
    """

    __slots__ = (
        "_activate",
        "_adapted",
        "_down",
        "_down_bias",
        "_first",
        "_gate_up",
        "_gate_up_bias",
        "_is_part",
        "_weighs_inputs",
    )

    def __init__(
        self,
        matrices: ExpertMatrices,
        activate: Callable[[Tensor], Tensor],
        *,
        weighs_inputs: bool = False,
        adapted: AdaptedExperts | None = None,
    ) -> None:
        """Take `matrices`; `activate` computes `[S, I]` of `[S, 2I]`, and `adapted` adds to both products."""

        def apart(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.view(matrices.count, -1, *tensor.shape[1:])

        self._gate_up = matrices.gate_up.view(matrices.count, -1, matrices.gate_up.shape[1])
        self._down = matrices.down.view(matrices.count, -1, matrices.down.shape[1])
        self._gate_up_bias = apart(matrices.gate_up_bias)
        self._down_bias = apart(matrices.down_bias)
        self._first, self._is_part = matrices.first, matrices.is_part
        self._activate = activate
        self._adapted = adapted
        self._weighs_inputs = weighs_inputs

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return `[T, E]`; the results of a token are added in the order of `chosen`, in float32."""
        num_tokens, num_chosen = chosen.shape
        if self._is_part:
            chosen = local_experts(chosen, self._first, len(self._down))
        pairs = None if self._adapted is None else self._adapted.pairs(chosen)
        experts = chosen.flatten()
        is_elsewhere = experts >= len(self._down) if self._is_part else None
        if is_elsewhere is not None:
            experts = experts.clamp(max=len(self._down) - 1)
        rows = x.repeat_interleave(num_chosen, 0)
        if self._weighs_inputs:
            rows = rows * shares.flatten()[:, None].to(x.dtype)
        gate_up = grouped_by_row(rows, self._gate_up, self._gate_up_bias, experts)
        if self._adapted is not None and pairs is not None:
            self._adapted.to_first(rows, gate_up, pairs)
        inner = self._activate(gate_up)
        results = grouped_by_row(inner, self._down, self._down_bias, experts)
        if self._adapted is not None and pairs is not None:
            self._adapted.to_second(inner, results, pairs)
        if is_elsewhere is not None:
            results = results.masked_fill(is_elsewhere[:, None], 0)
        results = results.view(num_tokens, num_chosen, -1)
        total = torch.zeros(num_tokens, results.shape[2], dtype=torch.float32, device=x.device)
        for rank in range(num_chosen):
            own = results[:, rank].float()
            total = total + own if self._weighs_inputs else torch.addcmul(total, own, shares[:, rank, None])
        return total.to(x.dtype)
