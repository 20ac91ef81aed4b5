"""The arithmetic of parts in plain torch: the oracle of every device, also used for calibration.

Legend: T tokens, E hidden_size, V vocab_size, F elements of a head / 2, B texts, L tokens of a text.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.expert_map import ExpertPlacement
from pagewood.engine.models.ops import (
    XIELU,
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
from pagewood.engine.models.parts.attention import AttentionConfig
from pagewood.engine.models.parts.choice import AnyMixer, paged_part
from pagewood.engine.models.parts.distances import MOST_DISTANCE
from pagewood.engine.models.parts.experts import RouterConfig
from pagewood.engine.models.parts.feed_forward import ExpertActivation
from pagewood.engine.models.parts.latent_attention import LatentAttentionConfig
from pagewood.engine.models.torch_experts import TorchExperts, TorchPlacing, choose, clamped_mul

Exchange: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""A function that returns the tensors that all ranks pass to it, in the order of ranks."""


class TorchLinear:
    """A projection."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, out]` of `[T, in]`."""
        return functional.linear(x, self._weight, self._bias)


class TorchEmbedding:
    """An embedding table `[V, E]`."""

    __slots__ = ("_table",)

    def __init__(self, table: Tensor) -> None:
        self._table = table

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return `[T, E]`."""
        return functional.embedding(tokens, self._table)


class TorchLatentHeads:
    """`models.ops.LatentHeads`; the rotated elements of pairs become two halves."""

    __slots__ = ("_shape", "_weight")

    def __init__(self, weight: Tensor, shape: LatentShape) -> None:
        self._weight = weight
        self._shape = shape

    def absorb(self, q: Tensor, x: Tensor, rotation: tuple[Tensor, Tensor], norm: Norm) -> tuple[Tensor, Tensor]:
        """Return absorbed queries, and latents."""
        shape = self._shape
        plain, rotated = q.unflatten(1, (shape.num_heads, -1)).split([shape.plain_dim, shape.rope_dim], dim=-1)
        absorbed = torch.einsum("thn,hnc->thc", plain, self._heads[:, : shape.plain_dim])
        queries = torch.cat([absorbed, self._rotated(rotated, rotation)], dim=-1).flatten(1)
        plain, rotated = x.split([shape.rank, shape.rope_dim], dim=-1)
        plain = functional.rms_norm(plain, (shape.rank,), norm.weight, norm.epsilon)
        return queries, torch.cat([plain, self._rotated(rotated[:, None], rotation)[:, 0]], dim=-1)

    def values(self, attended: Tensor) -> Tensor:
        """Return the values of sums of latents."""
        sums = attended.unflatten(1, (self._shape.num_heads, -1))
        return torch.einsum("thc,hvc->thv", sums, self._heads[:, self._shape.plain_dim :]).flatten(1)

    @property
    def _heads(self) -> Tensor:
        return self._weight.view(self._shape.num_heads, -1, self._shape.rank)

    def _rotated(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        cosines, sines = (one[:, None] for one in rotation)
        low, high = (x[..., ::2], x[..., 1::2]) if self._shape.has_pairs else x.chunk(2, dim=-1)
        return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)


class TorchOps:
    """`models.ops.Ops` on tensors of any device and dtype.

    The rotation of a step is (cosines, sines), each `[T, F]`.
    """

    __slots__ = ("_exchange", "_make_linear", "projections")

    def __init__(
        self,
        make_linear: Callable[[Tensor, Tensor | None], Linear[Tensor]] = TorchLinear,
        *,
        exchange: Exchange | None = None,
    ) -> None:
        """Choose how projections are made, and how ranks are connected.

        Args:
            make_linear: makes projections of a weight and a bias.
            exchange: with the other ranks of the model; None: it is whole.
        """
        self._make_linear = make_linear
        self._exchange = exchange
        self.projections: list[Projection] = []
        """Those that adapters could change, in the order in which they were made."""
        # contents written by: adaptable, experts

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear[Tensor]:
        """Return a projection with `weight` `[out, in]` and `bias` `[out]`."""
        return self._make_linear(weight, bias)

    def adaptable(self, linear: Linear[Tensor], projection: Projection) -> Linear[Tensor]:
        """Return `linear`: nothing is added."""
        self.projections.append(projection)
        return linear

    def exact_linear(self, weight: Tensor, bias: Tensor | None) -> Linear[Tensor]:
        """Return a projection of float32 numbers."""
        return TorchLinear(weight, bias)

    def embedding(self, table: Tensor) -> Embedding[Tensor]:
        """Return an embedding with `table` `[V, E]`."""
        return TorchEmbedding(table)

    def tied_embedding(self, table: Tensor, bias: Tensor | None = None) -> tuple[Embedding[Tensor], Linear[Tensor]]:
        """Return an embedding and an output projection that share `table` `[V, E]`."""
        return TorchEmbedding(table), self._make_linear(table, bias)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Return the norm of the last axis of `x`."""
        return normed(x, norm)

    def add_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """Add `x` to `residual` and return the norm of the sum."""
        return self.norm(residual.add_(x), norm)

    def norm_add(self, x: Tensor, residual: Tensor, norm: Norm) -> None:
        """Add the norm of `x` to `residual`."""
        residual.add_(self.norm(x, norm))

    def add(self, x: Tensor, residual: Tensor) -> None:
        """Add `x` to `residual`."""
        residual.add_(x)

    def norm_heads(self, x: Tensor, norm: Norm, size: int) -> Tensor:
        """Return `x`, every `size` elements normed on their own."""
        return self.norm(x.unflatten(-1, (-1, size)), norm).flatten(-2)

    def split_heads(
        self, qkv: Tensor, rotation: tuple[Tensor, Tensor] | None, split: HeadSplit
    ) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, None, None]:
        """Return rotated q and k, and v."""
        q, k, v = qkv.split(split.sizes, dim=-1)
        if split.norms_are_whole and split.num_ranks > 1:
            q, k = norm_over_ranks(q, k, split, self.sum_ranks)
            split = replace(split, q_norm=None, k_norm=None)

        def rotated(heads: Tensor) -> Tensor:
            if rotation is None:
                return heads
            cosines, sines = (one[:, None] for one in rotation)
            low, high = heads.chunk(2, dim=-1)
            return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)

        def finished(x: Tensor, norm: Norm | None) -> Tensor:
            if norm is not None and split.norms_are_whole:
                x = self.norm(x, norm)
            heads = x.unflatten(1, (-1, split.head_dim))
            if norm is None or split.norms_are_whole:
                return rotated(heads).flatten(1)
            if split.norms_follow:
                return self.norm(rotated(heads), norm).flatten(1)
            return rotated(self.norm(heads, norm)).flatten(1)

        if not split.kv_size:
            return finished(q, split.q_norm), None, None
        return finished(q, split.q_norm), finished(k, split.k_norm), k if split.values_are_keys else v

    def scale_rows(self, x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
        """Return each row times its factor."""
        return x * factors[0].to(x.dtype)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu of the first half times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu, with a hyperbolic tangent, of the first half times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up

    def erf_gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Return gelu of the first half times the second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate) * up

    def activate(self, x: Tensor, activation: PlainActivation) -> Tensor:
        """Return an activation of `x`."""
        return activated(x, activation)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Return `cap` times the hyperbolic tangent of `x` over `cap`."""
        return torch.tanh(x / cap) * cap

    def clamped_mul(self, gate_up: Tensor) -> Tensor:
        """Return the product of the two halves, which are limited first."""
        return clamped_mul(gate_up)

    def choose(self, logits: Tensor, router: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the chosen experts and their shares."""
        return choose(logits, router, bias)

    def experts(
        self, matrices: ExpertMatrices, activation: ExpertActivation, *, weighs_inputs: bool = False
    ) -> ChosenExperts[Tensor]:
        """Return experts, each with projections of its own."""
        self.projections += (*matrices.gate_up_parts, *matrices.down_parts)
        return TorchExperts(matrices, activation, self, weighs_inputs=weighs_inputs)

    def scale_chosen(self, shares: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        """Return `shares`, each times the factor of its expert."""
        return shares * factors[chosen.long()]

    def placing(self, placement: ExpertPlacement, *, near: Tensor) -> Placing[Tensor]:
        """Return what finds placed experts."""
        return TorchPlacing(placement, near.device)

    def multiply_columns(self, x: Tensor, y: Tensor, column: int, gate: Gate | None = None) -> Tensor:
        """Return `x` times as many columns of `y` from `column` on, or times a function of them."""
        return x * gated_columns(y[:, column : column + x.shape[1]], gate)

    def columns(self, x: Tensor, column: int, size: int) -> Tensor:
        """Return columns of `x` in new memory."""
        return x[:, column : column + size].clone()

    def norm_groups(self, x: Tensor, norm: Norm, size: int, shared: SharedGroup | None = None) -> Tensor:
        """Return `x`, every `size` elements normed on their own, with weights of all."""
        return norm_groups(x, norm, size) if shared is None else norm_shared(x, norm, size, shared, self.sum_ranks)

    def add_gated(self, x: Tensor, y: Tensor, gate: Tensor | None) -> Tensor:
        """Return `x` plus `y`, times the sigmoid of `gate` if there is one."""
        return x + y if gate is None else x + torch.sigmoid(gate) * y

    def positions(self, numbers: tuple[Tensor, Tensor]) -> Tensor:
        """Return the position of each token, whose bits stand in the place of cosines."""
        return numbers[0][:, 0].view(torch.int32)

    def convolution(self, weight: Tensor, bias: Tensor | None, *, activates: bool = True) -> Convolution:
        """Return a convolution with `weight` `[C, 1, W]`."""
        return convolution_of(weight, bias, activates=activates)

    def channel_heads(self, heads: RecurrentHeads) -> RecurrentHeads:
        """Return `heads`."""
        return heads

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """Return `x` times `factor`."""
        return x * torch.tensor(factor, dtype=x.dtype)

    def take(self, x: Tensor, wanted: Tensor) -> Tensor:
        """Return the rows of `x` at `wanted`."""
        return x.index_select(0, wanted)

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the columns of all `parts` side by side, in new memory."""
        return torch.cat(list(parts), dim=-1)

    def latent_heads(self, weight: Tensor, shape: LatentShape) -> LatentHeads[Tensor]:
        """Return the heads of a latent attention with `weight` `[H (N + V), C]`."""
        return TorchLatentHeads(weight, shape)

    def clear_first(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return `x` with zeros in the rows of tokens at position 0, whose sines are all zero."""
        return x.masked_fill((rotation[1] == 0).all(dim=-1, keepdim=True), 0)

    def sum_ranks(self, x: Tensor) -> Tensor:
        """Return the sum over ranks, in their order."""
        return sum_of_ranks(x, self._exchange)

    def gather_ranks(self, x: Tensor, size: int) -> Tensor:
        """Return the first columns of all ranks side by side."""
        return columns_of_ranks(x, size, self._exchange)


def sum_of_ranks(x: Tensor, exchange: Exchange | None) -> Tensor:
    """Return the sum of the `x` of all ranks, added in the order of ranks, in the memory of `x`."""
    assert exchange is not None, "a model of one rank has nothing to exchange"
    return x.copy_(functools.reduce(torch.add, exchange(x)))


def columns_of_ranks(x: Tensor, size: int, exchange: Exchange | None) -> Tensor:
    """Return the first `size` columns of the `x` of all ranks, side by side in new memory."""
    assert exchange is not None, "a model of one rank has nothing to exchange"
    return torch.cat(list(exchange(x)), dim=-1)[:, :size].contiguous()


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Return the norm of the last axis of `x`."""
    weight = norm.folded().weight
    if norm.is_centred:
        return functional.layer_norm(x, x.shape[-1:], weight, norm.bias, norm.epsilon)
    return functional.rms_norm(x, x.shape[-1:], weight, norm.epsilon)


def norm_over_ranks(
    q: Tensor, k: Tensor, split: HeadSplit, sum_ranks: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Return queries and keys `[T, n]` normed by the mean squares of the heads of all ranks."""
    means = torch.stack([x.float().square().mean(-1) for x in (q, k)], dim=-1)
    means = sum_ranks(means) / split.num_ranks
    found: list[Tensor] = []
    for x, mean, norm in zip((q, k), means.split(1, dim=-1), (split.q_norm, split.k_norm), strict=True):
        assert norm is not None
        own = (x * torch.rsqrt(mean + norm.epsilon)).to(x.dtype)
        found.append(own if norm.weight is None else own * norm.weight)
    return found[0], found[1]


def gated_columns(x: Tensor, gate: Gate | None) -> Tensor:
    """Return a function of `x`; None: `x` itself."""
    match gate:
        case None:
            return x
        case "silu":
            return functional.silu(x)
        case "sigmoid":
            return torch.sigmoid(x)


def convolution_of(weight: Tensor, bias: Tensor | None, *, activates: bool) -> Convolution:
    """Return a convolution with `weight` `[C, 1, W]`; C is 0 where only headers of files are read."""
    own = weight.reshape(-1, weight.shape[-1]).T.contiguous() if weight.ndim > 1 else weight[None]
    return Convolution(weight=own, bias=bias, activates=activates)


def norm_groups(x: Tensor, norm: Norm, size: int) -> Tensor:
    """Return `x` `[T, n]`, every `size` elements normed on their own, times the weights `[n]`."""
    normed_ = normed(x.unflatten(-1, (-1, size)), replace(norm, weight=None)).flatten(-2)
    return normed_ if norm.weight is None else normed_ * norm.weight


def norm_shared(x: Tensor, norm: Norm, size: int, shared: SharedGroup, sum_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `x` `[T, n]`, this rank's part of a group of `size` elements, normed by the squares of all of them."""
    squares = torch.zeros(len(x), shared.count, device=x.device)
    squares[:, shared.number] = x.float().square().sum(-1)
    mean = sum_ranks(squares)[:, shared.number, None] / size
    own = (x * torch.rsqrt(mean + norm.epsilon)).to(x.dtype)
    return own if norm.weight is None else own * norm.weight


def activated(x: Tensor, activation: PlainActivation) -> Tensor:
    """Return an activation of `x`."""
    match activation:
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "gelu_quick":
            return x * torch.sigmoid(1.702 * x)
        case "relu_squared":
            return functional.relu(x).square()
        case XIELU(positive=p, negative=n, beta=b, epsilon=e):
            return torch.where(x > 0, p * x * x, (torch.expm1(torch.minimum(x, e)) - x) * n) + b * x


class WholeTexts:
    """`models.ops.Attention` of texts of one length, one after the other, each from position 0; it needs no memory."""

    __slots__ = ("_layers", "_length", "_memory")

    def __init__(self, layers: Sequence[AnyMixer], length: int) -> None:
        """Attend in `layers` within texts of `length` tokens."""
        self._layers = [paged_part(layer) for layer in layers]
        self._length = length
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values of layers whose memory others read, by number."""  # written by: run

    def run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: int,
        sinks: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """Return the attention `[B * L, Q]` of `q` `[B * L, Q]` over `k` and `v` `[B * L, K]`, or over latents `k`."""
        config, length = self._layers[layer], self._length
        if isinstance(config, LatentAttentionConfig):
            assert k is not None
            return _attend_latents(config, q, k, length)
        assert isinstance(config, AttentionConfig)
        if config.source is not None:
            k, v = self._memory[config.source]
        assert k is not None
        assert v is not None
        if any(isinstance(one, AttentionConfig) and one.source == layer for one in self._layers):
            self._memory[layer] = k, v
        own, other = torch.arange(length, device=q.device)[:, None], torch.arange(length, device=q.device)
        window = config.window or length
        if config.sees_later:
            seen = (own - other).abs() <= (config.reach or length)
        else:
            in_window = own // window == other // window if config.is_chunked else own - other < window
            seen = (other <= own) & in_window
        shapes = (x.view(-1, length, x.shape[1] // config.head_dim, config.head_dim).transpose(1, 2) for x in (q, k, v))
        queries, keys, values = shapes
        if biases is not None:
            ahead = (other - own).clamp(-MOST_DISTANCE, MOST_DISTANCE) + MOST_DISTANCE
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=biases[ahead].permute(2, 0, 1), scale=config.scale, enable_gqa=True
            )
        elif config.soft_cap is None and sinks is None:
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=config.scale, enable_gqa=True
            )
        else:
            attended = _attend(queries, keys, values, seen, config, sinks)
        return attended.transpose(1, 2).reshape(len(q), -1)


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, config: AttentionConfig, sinks: Tensor | None) -> Tensor:
    """Return the attention `[B, heads, L, D]` step by step, with a soft cap and sinks."""
    k, v = (x.repeat_interleave(config.group, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * config.scale
    if config.soft_cap is not None:
        scores = config.soft_cap * torch.tanh(scores / config.soft_cap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, extra], -1).softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def _attend_latents(config: LatentAttentionConfig, q: Tensor, latents: Tensor, length: int) -> Tensor:
    """Return the attention `[B * L, H C]` of `q` `[B * L, H (C + R)]` over `latents` `[B * L, C + R]`."""
    queries = q.view(-1, length, config.shape.num_heads, config.shape.latent_size).transpose(1, 2)
    keys = latents.view(-1, 1, length, config.shape.latent_size).expand(-1, config.shape.num_heads, -1, -1)
    attended = functional.scaled_dot_product_attention(
        queries, keys, keys[..., : config.shape.rank], is_causal=True, scale=config.scale
    )
    return attended.transpose(1, 2).reshape(len(q), -1)
