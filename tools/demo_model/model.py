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


class Attention(nn.Module):
    """Grouped-query causal attention with rotary positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor) -> Tensor:
        batch, length, _ = x_BTD.shape
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        heads_BTNK = F.linear(x_BTD, weight).view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads_BTNK.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotate(q, cos_TK, sin_TK), rotate(k, cos_TK, sin_TK)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1).flatten(0, 1), v.repeat_interleave(group, dim=1).flatten(0, 1)
        # For rows this short, two batched 16-bit products take a quarter of the time of torch's fused CPU attention.
        scores = torch.baddbmm(mask_TT, q.flatten(0, 1), k.transpose(1, 2), alpha=self.head_dim**-0.5)
        out = torch.bmm(torch.softmax(scores, -1), v).view(batch, self.heads, length, self.head_dim)
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

    def forward(self, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos_TK, sin_TK, mask_TT)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Llama(nn.Module):
    """The decoder with tied embeddings; `forward` returns the last hidden states, `logits` scores chosen rows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
        angles = torch.outer(torch.arange(shape.max_positions, dtype=torch.float64), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else shape.hidden**-0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_((2 * shape.layers) ** -0.5)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        length = tokens_BT.shape[1]
        x_BTD = self.embed_tokens(tokens_BT)
        dtype = torch.bfloat16 if torch.is_autocast_enabled("cpu") else torch.float32
        cos_TK, sin_TK = cast(Tensor, self.cos)[:length].to(dtype), cast(Tensor, self.sin)[:length].to(dtype)
        mask_TT = torch.full((length, length), -1e4, dtype=dtype).triu(1)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TK, sin_TK, mask_TT)
        return self.norm(x_BTD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return F.linear(hidden_ND, self.embed_tokens.weight)


def rotate(x_BHTK: Tensor, cos_TK: Tensor, sin_TK: Tensor) -> Tensor:
    """Rotate each pair (i, i + K/2) by the angle of its position, the order of Hugging Face checkpoints."""
    low, high = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TK + torch.cat((-high, low), dim=-1) * sin_TK
