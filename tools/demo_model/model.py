"""A Llama small enough to train on a CPU, with the parameter names of Hugging Face checkpoints.

Shapes: B rows, T tokens of a row, D hidden, H query heads, G key/value heads, K head width, V vocabulary.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model; the model and its draft have the same `vocab`."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    max_positions: int = 2048
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


Past = list[tuple[Tensor, Tensor]]
"""Keys and values of one layer, [B*H, T, K] each: first those of the rows, then those of each step of the chains."""


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions; `inputs` is the width of the input, by default `hidden`."""

    def __init__(self, shape: Shape, *, inputs: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        inputs = inputs or shape.hidden
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor, *, past: Past | None = None
    ) -> Tensor:
        """Attend to the row up to each position and, with `past`, to the chain of drafts at that position.

        The first call, with an empty `past`, computes the rows. Each later call with the same `past` computes one more
        token of every chain: the chain at position t sees the row up to t, and its own tokens.
        """
        batch, length, _ = x_BTD.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        heads_BTNK = F.linear(x_BTD, weight).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads_BTNK.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos_TK, sin_TK), rotate(k, cos_TK, sin_TK)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1).flatten(0, 1), v.repeat_interleave(group, dim=1).flatten(0, 1)
        # For rows this short, two batched 16-bit products take a quarter of the time of torch's fused CPU attention.
        past = [] if past is None else past
        past.append((k, v))
        (k, v), *chain = past
        q, scale = q.flatten(0, 1), self.head_dim**-0.5
        scores = torch.baddbmm(mask_TT, q, k.transpose(1, 2), alpha=scale)
        if chain:
            own = torch.stack([(q * k).sum(-1) * scale for k, _ in chain], dim=-1)
            shares, own = torch.softmax(torch.cat((scores, own), dim=-1), -1).split((length, len(chain)), dim=-1)
            out = torch.bmm(shares, v)
            for at, (_, v) in enumerate(chain):
                out = out + own[..., at : at + 1] * v
        else:
            out = torch.bmm(torch.softmax(scores, -1), v)
        out = out.view(batch, self.heads, length, self.head_dim)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        both = F.linear(x_BTD, torch.cat((self.gate_proj.weight, self.up_proj.weight)))
        gate, up = both.chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """Attention and feed-forward, each with a norm before and a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor, *, past: Past | None = None
    ) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK, mask_TT, past=past)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Rotations(nn.Module):
    """The cosines and sines of rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, start: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines and sines [T, K] of `length` positions from `start`, and the causal mask [T, T]."""
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        cos, sin = cast(Tensor, self.cos), cast(Tensor, self.sin)
        mask_TT = torch.full((length, length), -1e4, dtype=dtype).triu(1)
        return cos[start : start + length].to(dtype), sin[start : start + length].to(dtype), mask_TT


class Llama(nn.Module):
    """The decoder with tied embeddings; `forward` returns the last hidden states, `logits` scores chosen rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.rotations = Rotations(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else shape.hidden**-0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_((2 * shape.layers) ** -0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.norm(self.streams(tokens_BT)[-1])

    def streams(self, tokens_BT: Tensor, *, start: int = 0, pasts: list[Past] | None = None) -> list[Tensor]:
        """Return the residual stream [B, T, D] after each layer.

        Args:
            tokens_BT: [B, T] int64.
            start: the position of the first token.
            pasts: a `Past` for each layer, to draft chains; see `Attention.forward`.
        """
        x_BTD = self.embed_tokens(tokens_BT)
        cos_TK, sin_TK, mask_TT = self.rotations(start, tokens_BT.shape[1])
        streams: list[Tensor] = []
        for at, layer in enumerate(self.layers):
            x_BTD = layer(x_BTD, cos_TK, sin_TK, mask_TT, past=None if pasts is None else pasts[at])
            streams.append(x_BTD)
        return streams

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return F.linear(hidden_ND, self.embed_tokens.weight)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) by the angle of its position, the order of Hugging Face checkpoints."""
    low, high = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-high, low), dim=-1) * sin_TK
