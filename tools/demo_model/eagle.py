"""An EAGLE-3 head: one layer that drafts tokens from the hidden states of the target.

A pair p joins the token p + 1 with the target's hidden states at position p. Its position is p, and its output predicts
the token p + 2. Drafting goes on with the drafted token and the head's own output in place of the target's.
Shapes as in `model.py`; S is the number of captured layers.

Source: Li et al., "EAGLE-3: Scaling up inference acceleration of large language models via training-time test", 2025.
"""

import torch
import torch.nn.functional as F
from model import Attention, FeedForward, Llama, Past, Rotations, Shape
from torch import Tensor, nn


class MidLayer(nn.Module):
    """The layer of the head; its attention reads the token and the hidden state side by side."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape, inputs=2 * shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(
        self, embedded_BTD: Tensor, x_BTD: Tensor, cos_TK: Tensor, sin_TK: Tensor, mask_TT: Tensor, *, past: Past
    ) -> Tensor:
        both = torch.cat((self.input_layernorm(embedded_BTD), self.hidden_norm(x_BTD)), dim=-1)
        x_BTD = x_BTD + self.self_attn(both, cos_TK, sin_TK, mask_TT, past=past)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Head(nn.Module):
    """The head for a target that has the same hidden size; embeddings and output weights are the target's.

    Args:
        shape: `vocab` and `hidden` are the target's; `layers` is 1.
        captured: the target's layers whose residual streams the head reads, each after the layer, counted from 0.
    """

    def __init__(self, shape: Shape, captured: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.captured = shape, captured
        self.fc = nn.Linear(len(captured) * shape.hidden, shape.hidden, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.rotations = Rotations(shape)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.data.mul_(2**-0.5)

    @torch.no_grad()
    def start_from(self, target: Llama) -> None:
        """Initialize `fc` to pass on mostly the last captured layer, and `norm` with the target's norm."""
        self.fc.weight.mul_(0.3)
        self.fc.weight[:, -self.shape.hidden :] += torch.eye(self.shape.hidden)
        self.norm.weight.copy_(target.norm.weight)

    def features(self, streams: list[Tensor]) -> Tensor:
        """Return the head's [B, T, D] view of the target's residual streams."""
        return self.fc(torch.cat([streams[layer] for layer in self.captured], dim=-1))

    def forward(self, embedded_BTD: Tensor, x_BTD: Tensor, *, start: int, past: Past) -> Tensor:
        """Return the output [B, T, D] of one pair at every position of the rows; it is the next step's hidden state.

        Args:
            embedded_BTD: embeddings of the tokens.
            x_BTD: `features` in the first step, then the output of the previous step.
            start: number of the step, which is the position of the first pair.
            past: empty in the first step; see `Attention.forward`.
        """
        return self.midlayer(embedded_BTD, x_BTD, *self.rotations(start, x_BTD.shape[1]), past=past)


def unrolled(head: Head, target: Llama, tokens_BT: Tensor, streams: list[Tensor], depth: int) -> list[Tensor]:
    """Return the outputs [B, T, D] of `depth` steps from every position, with the row's own tokens.

    Step j at position t reads token t + j + 1 and predicts token t + j + 2. Tokens past the end count as token 0.
    """
    x_BTD, past, outputs = head.features(streams), Past(), list[Tensor]()
    padded = F.pad(tokens_BT, (0, depth))
    for step in range(depth):
        embedded_BTD = target.embed_tokens(padded[:, step + 1 : step + 1 + tokens_BT.shape[1]])
        x_BTD = head(embedded_BTD, x_BTD, start=step, past=past)
        outputs.append(x_BTD)
    return outputs
