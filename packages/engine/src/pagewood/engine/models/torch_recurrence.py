"""Recurrent layers in plain torch, on whole texts: the oracle of every device.

Legend: B texts, L tokens of a text, T = B L, C channels of a convolution, W tokens that it reads, H heads of values
`[V]`, G heads of queries and keys `[K]`.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.ops import Convolution, RecurrentHeads

_LEAST_SQUARES = 1e-6
"""Added to sums of squares of queries and keys."""


class WholeTextStates:
    """`models.ops.Recurrence` of texts of one length, one after the other, each from position 0; it keeps no state."""

    __slots__ = ("_length",)

    def __init__(self, length: int) -> None:
        """Compute texts of `length` tokens."""
        self._length = length

    def convolve(self, x: Tensor, column: int, convolution: Convolution, layer: int) -> Tensor:
        """Return the convolution `[T, C]` of columns of `x` `[T, n]`."""
        del layer
        channels, bias, (width, _) = convolution.channels, convolution.bias, convolution.weight.shape
        texts = x[:, column : column + channels].view(-1, self._length, channels).transpose(1, 2)
        own = None if bias is None else bias.to(x.dtype)
        out = functional.conv1d(
            functional.pad(texts, (width - 1, 0)), convolution.weight.T.to(x.dtype)[:, None], own, groups=channels
        )
        out = out.transpose(1, 2).reshape(-1, channels)
        return functional.silu(out) if convolution.activates else out

    def recur(self, x: Tensor, gates: Tensor, heads: RecurrentHeads, layer: int) -> Tensor:
        """Return the results `[T, H V]` of `x` `[T, 2 G K + H V]`, token by token in float32."""
        del layer
        length, dim = self._length, (heads.num_key_heads, heads.key_dim)
        starts, sizes = heads.columns, (heads.key_size, heads.key_size, heads.value_size)
        q, k, v = (x[:, start : start + size].float() for start, size in zip(starts, sizes, strict=True))
        q, k = (one.view(-1, length, *dim) for one in (q, k))
        v = v.view(-1, length, heads.num_heads, heads.value_dim)
        decaying = gates[:, -len(heads.bias) :].float() + heads.bias
        steps = functional.softplus(decaying).view(-1, length, heads.num_heads, len(heads.bias) // heads.num_heads)
        strengths = steps[..., 0]
        if heads.corrects:
            q, k = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + _LEAST_SQUARES) for one in (q, k))
            q = q * heads.key_dim**-0.5
            strengths = torch.sigmoid(gates[:, : heads.num_heads].float()).view(-1, length, heads.num_heads)
            strengths = strengths * heads.most_strength
        decays = torch.exp(heads.rate[:, None] * steps)
        q, k = (one.repeat_interleave(heads.num_heads // heads.num_key_heads, 2) for one in (q, k))
        state = torch.zeros(len(q), heads.num_heads, heads.key_dim, heads.value_dim)
        found: list[Tensor] = []
        for i in range(length):
            state = state * decays[:, i, :, :, None]
            change = v[:, i]
            if heads.corrects:
                change = change - torch.einsum("bhkv,bhk->bhv", state, k[:, i])
            change = change * strengths[:, i, :, None]
            state = state + k[:, i, :, :, None] * change[:, :, None]
            found.append(torch.einsum("bhkv,bhk->bhv", state, q[:, i]))
        out = torch.stack(found, 1)
        if heads.skip is not None:
            out = out + heads.skip[:, None] * v
        return out.reshape(len(x), -1).to(x.dtype)
