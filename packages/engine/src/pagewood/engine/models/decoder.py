"""One decoder for Llama, Mistral, Qwen2, Qwen3 and MiMo: their differences are data in `ModelConfig`.

Legend: T tokens of a step, W tokens whose hidden state is wanted, E hidden_size, Q q_size, K kv_size, I
intermediate_size, F head_dim / 2, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.rope import Rope

A = TypeVar("A")
"""What a device computes with: a tensor, or the name of a tensor that will be computed."""


class Linear(Protocol[A]):
    """A projection that holds its weights, in the form that is fastest on its device."""

    def __call__(self, x: A) -> A:
        """Return `[T, out]` of `[T, in]`."""
        ...


class Embedding(Protocol[A]):
    """A table that holds the embedding of every token."""

    def __call__(self, tokens: A) -> A:
        """Return `[T, E]` of token ids `[T] int32`, each in [0, V)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSplit:
    """How a layer's fused projection is split into heads, and how they are normalised before they are rotated."""

    q_size: int
    kv_size: int
    q_norm: Tensor | None
    """`[head_dim]`, weights of the norm of each query head; None: no norm."""
    k_norm: Tensor | None
    epsilon: float


class Ops(Protocol[A]):
    """The arithmetic of a device.

    `residual` is written in place. A result may lie in the memory of the first argument, which the caller does not read
    again; `rms_norm`, `take`, `concat` and projections leave theirs unchanged.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear[A]:
        """Take over `weight` `[out, in]` and `bias` `[out]`; the caller must drop both."""
        ...

    def embedding(self, table: Tensor) -> Embedding[A]:
        """Take over `table` `[V, E]`; the caller must drop it."""
        ...

    def tied_embedding(self, table: Tensor) -> tuple[Embedding[A], Linear[A]]:
        """Take over `table` `[V, E]`, which is also the weight of a projection; the caller must drop it."""
        ...

    def rms_norm(self, x: A, weight: Tensor, epsilon: float) -> A:
        """Return `x` `[T, E]` over its root mean square, times `weight` `[E]`."""
        ...

    def add_rms_norm(self, x: A, residual: A, weight: Tensor, epsilon: float) -> A:
        """Add `x` `[T, E]` to `residual` in place and return the norm of the sum."""
        ...

    def split_heads(self, qkv: A, rotation: tuple[A, A], split: HeadSplit) -> tuple[A, A, A]:
        """Return q `[T, Q]`, k and v `[T, K]` of `qkv` `[T, Q + 2K]`; q and k normed (if `split` has norms), rotated.

        Args:
            qkv: all query heads, then all key heads, then all value heads.
            rotation: two operands that say how far each token is rotated, the same in every layer; element i of a
                head is rotated with element i + F. Their contents depend on the device: see its `Ops`.
            split: sizes and norms.
        """
        ...

    def silu_mul(self, gate_up: A) -> A:
        """Return `[T, I]`: silu of the first half of `gate_up` `[T, 2I]` times the second half."""
        ...

    def take(self, x: A, wanted: A) -> A:
        """Return `[W, n]`, the rows of `x` `[T, n]` at `wanted` `[W] int32`."""
        ...

    def concat(self, parts: Sequence[A]) -> A:
        """Return `[T, sum of n]` in new memory: the columns of all `parts` `[T, n]`, side by side."""
        ...

    def clear_first(self, x: A, rotation: tuple[A, A]) -> A:
        """Return `x` `[T, E]` with zeros in the rows of tokens at position 0; `rotation` as in `split_heads`."""
        ...


class Attention(Protocol[A]):
    """Attention of one step. It knows the request and the position of each of the T tokens."""

    def run(self, q: A, k: A, v: A, layer: int) -> A:
        """Store `k` and `v` `[T, K]` in the KV memory of `layer`, and return the attention `[T, Q]` of `q` `[T, Q]`."""
        ...


class Weights(Protocol):
    """Where parameters come from."""

    def stack(self, parts: Sequence[tuple[str, int]], *columns: int) -> Tensor:
        """Return the named tensors, each `[rows, *columns]`, one below the other in one new tensor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer(Generic[A]):
    """The parameters of one layer."""

    input_norm: Tensor
    qkv: Linear[A]
    split: HeadSplit
    output: Linear[A]
    mlp_norm: Tensor
    gate_up: Linear[A]
    down: Linear[A]


class Decoder(Generic[A]):
    """A decoder-only transformer. Invariant: a call does not change it; all state is in the attention's memory.

    One description serves every device. If A is a tensor, a call computes. If A is the name of a future result, a call
    writes the instructions that compute it.
    """

    __slots__ = ("_layers", "_norm", "_ops", "config", "embedding", "head", "rope")

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops[A], *, device: torch.device) -> None:
        """Take every parameter from `weights`, layer by layer, and hand it to `ops`, which keeps it."""
        self.config = config
        self.rope = Rope(config.rope, device=device)
        self._ops = ops
        table = weights.stack([("model.embed_tokens.weight", config.vocab_size)], config.hidden_size)
        self.embedding: Embedding[A]
        self.head: Linear[A]
        """The output projection, from the hidden state `[T, E]` after the last norm to logits `[T, V]`."""
        if config.tied_embeddings:
            self.embedding, self.head = ops.tied_embedding(table)
        else:
            head = weights.stack([("lm_head.weight", config.vocab_size)], config.hidden_size)
            self.embedding, self.head = ops.embedding(table), ops.linear(head, None)
        self._layers = [read_layer(config, weights, ops, f"model.layers.{i}") for i in range(config.num_layers)]
        self._norm = weights.stack([("model.norm.weight", config.hidden_size)])

    def __call__(self, tokens: A, rotation: tuple[A, A], attention: Attention[A], wanted: A) -> A:
        """Compute a step.

        Args:
            tokens: `[T] int32`, token ids.
            rotation: the rotation of each token in the form of `ops`, made from what `rope` returns for its position.
            attention: the attention of this step.
            wanted: `[W] int32`, the tokens whose logits are wanted.

        Returns:
            `[W, V]`, logits.
        """
        return self.head(self.states(tokens, rotation, attention, wanted)[0])

    def states(
        self, tokens: A, rotation: tuple[A, A], attention: Attention[A], wanted: A, *, captured: Sequence[int] = ()
    ) -> tuple[A, list[A]]:
        """Compute a step up to what the output projection reads, and keep hidden states of all its tokens.

        The last layer computes only what `wanted` needs, unless a state behind it is captured.

        Args:
            tokens: see `__call__`, as the next three.
            rotation: of each token.
            attention: of this step.
            wanted: tokens whose last state is wanted.
            captured: which states: i in [0, num_layers] is the residual stream after the first i layers (0: the
                embeddings), and num_layers + 1 is what the output projection reads, after the last norm.

        Returns:
            `[W, E]`, the states after the last norm; and `[T, E]` for each of `captured`, in its order.
        """
        ops, epsilon, last = self._ops, self.config.norm_epsilon, len(self._layers) - 1
        narrows = all(state <= last for state in captured)  # the last layer's other tokens are not needed
        states: dict[int, A] = {}
        residual = self.embedding(tokens)
        x = ops.rms_norm(residual, self._layers[0].input_norm, epsilon)
        for index, layer in enumerate(self._layers):
            if index > 0:
                x = ops.add_rms_norm(x, residual, layer.input_norm, epsilon)
            if index in captured:
                states[index] = ops.concat([residual])  # copied, because the layer adds to it
            q, k, v = ops.split_heads(layer.qkv(x), rotation, layer.split)
            x = attention.run(q, k, v, index)
            if index == last and narrows:
                x, residual = ops.take(x, wanted), ops.take(residual, wanted)
            x = ops.add_rms_norm(layer.output(x), residual, layer.mlp_norm, epsilon)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
        x = ops.add_rms_norm(x, residual, self._norm, epsilon)
        if not narrows:
            states[last + 1], states[last + 2] = residual, x
            x = ops.take(x, wanted)
        return x, [states[state] for state in captured]


def read_layer(
    config: ModelConfig, weights: Weights, ops: Ops[A], prefix: str, *, attention_inputs: int | None = None
) -> Layer[A]:
    """Take the parameters of one layer from `weights`.

    Args:
        config: sizes, biases and norms of the layer.
        weights: where the parameters come from.
        ops: keeps them.
        prefix: of their names, without the dot at its end.
        attention_inputs: columns of the projections to q, k and v; None: hidden_size.
    """
    hidden, inner = config.hidden_size, config.intermediate_size

    def vector(name: str, size: int) -> Tensor:
        return weights.stack([(f"{prefix}.{name}.weight", size)])

    def linear(parts: Sequence[tuple[str, int]], columns: int, has_bias: bool) -> Linear[A]:
        weight = weights.stack([(f"{prefix}.{name}.weight", rows) for name, rows in parts], columns)
        bias = weights.stack([(f"{prefix}.{name}.bias", rows) for name, rows in parts]) if has_bias else None
        return ops.linear(weight, bias)

    qkv = [
        ("self_attn.q_proj", config.q_size),
        ("self_attn.k_proj", config.kv_size),
        ("self_attn.v_proj", config.kv_size),
    ]
    return Layer(
        input_norm=vector("input_layernorm", hidden),
        qkv=linear(qkv, attention_inputs or hidden, config.qkv_bias),
        split=HeadSplit(
            q_size=config.q_size,
            kv_size=config.kv_size,
            q_norm=vector("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
            k_norm=vector("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
            epsilon=config.norm_epsilon,
        ),
        output=linear([("self_attn.o_proj", hidden)], config.q_size, config.output_bias),
        mlp_norm=vector("post_attention_layernorm", hidden),
        gate_up=linear([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden, config.mlp_bias),
        down=linear([("mlp.down_proj", hidden)], inner, config.mlp_bias),
    )
