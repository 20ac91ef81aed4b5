"""The arithmetic of a decoder on a CUDA device: projections by torch, fused operations by FlashInfer.

Legend: T tokens, E hidden_size, V vocab_size.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models import torch_experts
from pagewood.engine.models.expert_map import ExpertPlacement
from pagewood.engine.models.ops import (
    ChosenExperts,
    Convolution,
    Embedding,
    ExpertMatrices,
    Gate,
    HeadSplit,
    LatentHeads,
    LatentShape,
    Linear,
    Norm,
    Placing,
    PlainActivation,
    Projection,
    RecurrentHeads,
    SharedGroup,
)
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import ExpertActivation, gated
from pagewood.engine.models.torch_ops import (
    activated,
    convolution_of,
    gated_columns,
    norm_groups,
    norm_over_ranks,
    norm_shared,
    normed,
)
from pagewood.engine.runner.cuda.adapters import CUDAAdapters
from pagewood.engine.runner.cuda.exchange import Exchange
from pagewood.engine.runner.cuda.experts import CUDAExperts, ExpertKernels
from pagewood.engine.runner.cuda.kernels.experts_flashinfer import FusedKernels
from pagewood.engine.runner.cuda.kernels.flashinfer_api import FlashInfer
from pagewood.engine.runner.cuda.latent_attention import CUDALatentHeads, MultiplyHeads, multiply_heads

Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(x `[T, in]`, weight `[out, in]`, bias `[out]`) -> `[T, out]`."""


class DenseLinear:
    """A projection with dense weights."""

    __slots__ = ("_bias", "_multiply", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, multiply: Multiply) -> None:
        self._weight = weight
        self._bias = bias
        self._multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, out]` of `[T, in]`."""
        return self._multiply(x, self._weight, self._bias)


class ExactLinear:
    """A projection of float32 numbers."""

    __slots__ = ("_bias", "_multiply", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, multiply: Multiply) -> None:
        self._weight = weight
        self._bias = bias
        self._multiply = multiply

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, out] float32` of `[T, in]`."""
        return self._multiply(x.float(), self._weight, self._bias)


class DenseEmbedding:
    """An embedding table `[V, E]`."""

    __slots__ = ("_table",)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return `[T, E]`."""
        return functional.embedding(tokens, self._table)


class CUDAOps:
    """`models.ops.Ops` on tensors of one device and dtype; all calls are queued, none waits for the device.

    The rotation of a step is (places `[T] int32`, table `[length, head_dim] float32`): row i of the table holds the
    cosines of place i, then its sines. A place is a position, or one of a long request, see `models.rope`.
    """

    __slots__ = (
        "_adapters", "_exchange", "_expert_kernels", "_flashinfer", "_fused_experts", "_multiply", "_multiply_heads",
        "_silu_mul", "chosen",
    )  # fmt: skip

    def __init__(
        self,
        flashinfer: FlashInfer,
        multiply: Multiply = functional.linear,
        silu_mul: Callable[[Tensor], Tensor] | None = None,
        expert_kernels: ExpertKernels | None = None,
        exchange: Exchange | None = None,
        multiply_heads: MultiplyHeads = multiply_heads,
        fused_experts: FusedKernels | None = None,
        adapters: CUDAAdapters | None = None,
    ) -> None:
        """Compute with `flashinfer`, the module or an object with the same functions.

        Args:
            flashinfer: computes everything else.
            multiply: computes projections.
            silu_mul: computes the activation `[T, I]` of `[T, 2I]`; None: FlashInfer does.
            expert_kernels: compute mixtures of experts; None: torch does, slowly.
            exchange: with the other ranks of the model; None: the model is whole.
            multiply_heads: computes products of heads with matrices of their own.
            fused_experts: compute the mixtures that they take instead of `expert_kernels`.
            adapters: of the projections; None: there are none.
        """
        self._adapters = adapters
        self._exchange = exchange
        self._flashinfer = flashinfer
        self._expert_kernels = expert_kernels
        self._fused_experts = fused_experts
        self._multiply = multiply
        self._multiply_heads = multiply_heads
        self._silu_mul = silu_mul or flashinfer.silu_and_mul
        self.chosen: list[Tensor] | None = None
        """The experts `[T, K]` that layers choose, in their order; None: they are not kept."""
        # written by: inner_rows

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear[Tensor]:
        """Return a projection with `weight` `[out, in]` and `bias` `[out]`."""
        return DenseLinear(weight, bias, self._multiply)

    def adaptable(self, linear: Linear[Tensor], projection: Projection) -> Linear[Tensor]:
        """Return `linear`, or with adapters a projection to which they add."""
        return linear if self._adapters is None else self._adapters.add(linear, projection)

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear[Tensor]:
        """Return a projection with `weight` `[out, in]` and `bias` `[out]`, both float32."""
        return ExactLinear(weight, bias, self._multiply)

    def embedding(self, table: Tensor) -> Embedding[Tensor]:
        """Return an embedding with `table` `[V, E]`."""
        return DenseEmbedding(table)

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[Embedding[Tensor], Linear[Tensor]]:
        """Return an embedding and an output projection that share `table` `[V, E]`."""
        return DenseEmbedding(table), DenseLinear(table, bias, self._multiply)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of `x` `[T, E]`."""
        if norm.is_centred or norm.weight is None:
            return normed(x, norm)
        return self._rms_norm(norm)(x, norm.weight, norm.epsilon)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Add `x` to `residual` and return the norm of the sum, of FlashInfer's kernels in the memory of `x`."""
        if norm.is_centred or norm.weight is None:
            return normed(residual.add_(x), norm)
        kernel = self._flashinfer.gemma_fused_add_rmsnorm if norm.offset else self._flashinfer.fused_add_rmsnorm
        kernel(x, residual, norm.weight, norm.epsilon)
        return x

    def norm_add(self, x: Tensor, residual: Tensor, norm: Norm) -> None:
        """Add the norm of `x` to `residual`."""
        self._norm_inside(x, norm)
        residual.add_(x)

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Add `x` to `residual`."""
        residual.add_(x)

    def _norm_inside(self, x: Tensor, norm: Norm) -> None:
        """Replace `x` by its norm."""
        if norm.is_centred or norm.weight is None:
            x.copy_(normed(x, norm))
            return
        self._rms_norm(norm)(x, norm.weight, norm.epsilon, out=x)

    def _rms_norm(self, norm: Norm) -> Callable[..., Tensor]:
        """Return the kernel of a norm: Gemma's adds 1 to weights in float32."""
        return self._flashinfer.gemma_rmsnorm if norm.offset else self._flashinfer.rmsnorm

    def split_heads(
        self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None, split: HeadSplit
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, None, None]:
        """Return rotated q and k, and v, as views of `qkv`, or v as a copy of k.

        FlashInfer rotates queries and keys together. So a head of no meaning is rotated where there are no keys.
        """
        q, k, v = qkv.split(split.sizes, dim=-1)
        if split.values_are_keys:
            v = k.clone()
        if not split.kv_size:
            k = torch.zeros_like(q[:, : split.head_dim])
        if split.norms_are_whole and split.num_ranks > 1:
            for x, own in zip((q, k), norm_over_ranks(q, k, split, self.sum_ranks), strict=True):
                x.copy_(own)
        elif not split.norms_follow:
            self._norm_heads(q, k, split)
        if rotation is not None:
            positions, table = rotation
            self._flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, q, k, split.head_dim, table)
        if split.norms_follow:
            self._norm_heads(q, k, split)
        return (q, k, v) if split.kv_size else (q, None, None)

    def _norm_heads(self, q: Tensor, k: Tensor, split: HeadSplit) -> None:
        """Norm q and k in their memory, if they have norms."""
        for x, norm in ((q, split.q_norm), (k, split.k_norm)):
            if norm is not None:
                heads = x if split.norms_are_whole else x.view(x.shape[0], -1, split.head_dim)
                self._norm_inside(heads, norm)

    def norm_heads(self, x: Tensor, norm: Norm, size: int) -> Tensor:
        """Return `x`, every `size` elements normed on their own, in its memory."""
        self._norm_inside(x.view(x.shape[0], -1, size), norm)
        return x

    def scale_rows(self, x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        """Return each row times its factor, which is rounded to the dtype of `x`, in its memory."""
        positions, table = factors
        return x.mul_(table.index_select(0, positions)[:, :1].to(x.dtype))

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu of the first half times the second half."""
        return self._silu_mul(gate_up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu, with a hyperbolic tangent, of the first half times the second half."""
        return self._flashinfer.gelu_tanh_and_mul(gate_up)

    def erf_gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu of the first half times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return activated(gate, "gelu") * up

    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        """Return an activation of `x`."""
        return activated(x, activation)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Return `cap` times the hyperbolic tangent of `x` over `cap`, in its memory."""
        return x.div_(cap).tanh_().mul_(cap)

    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """Return the product of the two halves, which are limited first."""
        return torch_experts.clamped_mul(gate_up)

    def choose(self, logits: Tensor, router: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their shares."""
        chosen, shares = (self._expert_kernels or torch_experts).choose(logits, router, bias)
        if self.chosen is not None:
            self.chosen.append(chosen)
        return chosen, shares

    def experts(
        self, matrices: ExpertMatrices, activation: ExpertActivation, *, weighs_inputs: bool = False
    ) -> ChosenExperts[Tensor]:
        """Return experts whose matrices stay where they are, unless FlashInfer takes them, which has others first."""
        if self._fused_experts is not None and activation != "relu_squared":
            fused = self._fused_experts.experts(matrices, activation, weighs_inputs=weighs_inputs)
            if fused is not None:
                return fused
        adapted = None if self._adapters is None else self._adapters.add_experts(matrices)
        options: dict[str, Any] = {"weighs_inputs": weighs_inputs, "adapted": adapted}
        if self._expert_kernels is not None and activation != "relu_squared":
            return self._expert_kernels.TritonExperts(matrices, activation, **options)

        def activate(gate_up: Tensor) -> Tensor:
            return gated(self, activation, gate_up)

        return CUDAExperts(matrices, activate, **options)

    def scale_chosen(self, shares: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        """Return `shares`, each times the factor of its expert."""
        return shares * factors[chosen.long()]

    def placing(self, placement: ExpertPlacement, *, near: Tensor) -> Placing[Tensor]:
        """Return what finds placed experts."""
        return torch_experts.TorchPlacing(placement, near.device)

    def multiply_columns(self, x: Tensor, y: Tensor, column: int, gate: Gate | None = None) -> Tensor:
        """Return `x` times as many columns of `y` from `column` on, or times a function of them, in its memory."""
        return x.mul_(gated_columns(y[:, column : column + x.shape[1]], gate))

    def columns(self, x: Tensor, column: int, size: int) -> Tensor:
        """Return columns of `x` in new memory."""
        return x[:, column : column + size].clone()

    def norm_groups(self, x: Tensor, norm: Norm, size: int, shared: SharedGroup | None = None) -> Tensor:
        """Return `x`, every `size` elements normed on their own, with weights of all."""
        return norm_groups(x, norm, size) if shared is None else norm_shared(x, norm, size, shared, self.sum_ranks)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        """Return `x` plus `y`, times the sigmoid of `gate` if there is one, in the memory of `x`."""
        return x.add_(y) if gate is None else x.addcmul_(y, torch.sigmoid(gate).to(x.dtype))

    def positions(self, numbers: tuple[Tensor, Tensor]) -> Tensor:
        """Return the position of each token, from the table with the bits of those that have an embedding."""
        positions, table = numbers
        return table.index_select(0, positions)[:, 0].contiguous().view(torch.int32)

    def convolution(self, weight: Tensor, bias: Tensor | None, *, activates: bool = True) -> Convolution:
        """Return a convolution with `weight` `[C, 1, W]`."""
        return convolution_of(weight, bias, activates=activates)

    def channel_heads(self, heads: RecurrentHeads) -> RecurrentHeads:
        """Return `heads`."""
        return heads

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return `x` times `factor`; a tensor without axes on the host is an argument of the kernel, not a copy."""
        return x.mul_(torch.tensor(factor, dtype=x.dtype))

    def take(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Return the rows of `x` at `wanted`, of which alone there is more to compute."""
        if self._adapters is not None:
            self._adapters.narrow(wanted)
        return x.index_select(0, wanted)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the columns of all `parts` side by side, in new memory."""
        return torch.cat(list(parts), dim=-1)

    def latent_heads(self, weight: Tensor, shape: LatentShape) -> LatentHeads[Tensor]:
        """Return the heads of a latent attention with `weight` `[H (N + V), C]`."""
        return CUDALatentHeads(self._flashinfer, weight, shape, self._multiply_heads)

    def clear_first(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return `x` with zeros in the rows of tokens at position 0."""
        return x.masked_fill((rotation[0] == 0)[:, None], 0)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, in the memory of `x`; see `Exchange` for its order."""
        assert self._exchange is not None, "a model of one rank has nothing to exchange"
        return self._exchange.sum_ranks(x)

    def gather_ranks(self, x: Tensor, size: int) -> Tensor:
        """Return the first columns of all ranks side by side."""
        assert self._exchange is not None, "a model of one rank has nothing to exchange"
        parts = self._exchange.gather_ranks(x)
        return parts.transpose(0, 1).reshape(len(x), -1)[:, :size].contiguous()
