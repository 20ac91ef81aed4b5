"""A decoder or an encoder: embeddings, a list of layers made of parts, a last norm and an output projection.

Legend: T tokens of a step, W tokens whose hidden state is wanted, E hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np
import torch

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.ops import A, Attention, Embedding, Linear, Norm, Ops, RowDivision, Step, Weights
from pagewood.engine.models.parts.gathered import read_embedding, read_gathered
from pagewood.engine.models.parts.layer import Layer, add_and_norm
from pagewood.engine.models.parts.layer_inputs import LayerInputs
from pagewood.engine.models.parts.norm import read_norm
from pagewood.engine.models.parts.output import make_output
from pagewood.engine.models.parts.rope import PositionNumbers
from pagewood.engine.models.rope import position_table
from pagewood.engine.models.shard import WHOLE, Shard


class Decoder(Generic[A]):
    """A transformer that is a decoder alone, or an encoder alone.

    Invariant: a call does not change it; all state is in the attention's memory.

    One description serves every device. If A is a tensor, a call computes. If A is the name of a future result, a call
    writes the instructions that compute it.
    """

    __slots__ = (
        "_embedding_norm", "_inputs", "_layers", "_norm", "_ops", "_positions", "config", "embedding", "head", "ropes",
        "shard", "short_length", "whole",
    )  # fmt: skip

    def __init__(
        self, config: ModelConfig, weights: Weights, ops: Ops[A], *, device: torch.device, shard: Shard = WHOLE
    ) -> None:
        """Take every parameter from `weights`, layer by layer, and hand it to `ops`, which keeps it.

        Args:
            config: of the whole model.
            weights: where the parameters come from.
            ops: the arithmetic of the device.
            device: of the rotations.
            shard: the rank whose part this is.

        Raises:
            ValueError: a number of the model cannot be divided among the ranks.
        """
        self.shard = shard
        self.whole = config
        """The model, of which this may be a part."""
        self.config = config.for_shard(shard)
        """The part of this rank, which is what has a memory and an attention here."""
        self.ropes = [position_table(one, device=device) for one in config.position_configs]
        """What computes the values of positions that layers need: rotations, and the factors of temperatures."""
        self.short_length = config.short_length
        """See `ModelConfig.short_length`."""
        self._ops = ops
        self.embedding: Embedding[A]
        self.head: Linear[A]
        """The output projection, from the hidden state `[T, E]` after the last norm to logits `[T, V]`, which it scales
        and caps as the model does."""
        self.embedding, self.head = _read_ends(config, weights, ops, shard)
        self._positions: Embedding[A] | None = None
        if config.has_learned_positions:
            first, count = config.first_position, config.max_position
            order = np.arange(first, first + count) if first else None
            table = [("model.embed_positions.weight", first + count)]
            self._positions = ops.embedding(weights.stack(table, config.hidden_size, order=order))
        self._embedding_norm: Norm | None = None
        if config.has_embedding_norm:
            self._embedding_norm = read_norm(config.norm, weights, "model.embed_norm", config.hidden_size)
        self._inputs: LayerInputs[A] | None = None
        if config.inputs is not None:
            self._inputs = LayerInputs(
                config.inputs, weights, ops, hidden_size=config.hidden_size, num_layers=config.num_layers, shard=shard
            )
        self._layers = [
            Layer(
                layer, weights, ops, f"model.layers.{index}", hidden_size=config.hidden_size, index=index, shard=shard
            )
            for index, layer in enumerate(config.layers)
        ]
        self._norm: Norm | None = None
        if config.has_last_norm:
            self._norm = read_norm(config.norm, weights, "model.norm", config.hidden_size)

    def __call__(self, tokens: A, rotations: Sequence[tuple[A, A]], attention: Attention[A], wanted: A) -> A:
        """Compute a step.

        Args:
            tokens: `[T] int32`, token ids.
            rotations: for each of `ropes`, its values for the position of each token, in the form of `ops`.
            attention: the attention of this step.
            wanted: `[W] int32`, the tokens whose logits are wanted.

        Returns:
            `[W, V]`, logits.
        """
        return self.head(self.states(tokens, rotations, attention, wanted)[0])

    def states(
        self,
        tokens: A,
        rotations: Sequence[tuple[A, A]],
        attention: Attention[A],
        wanted: A,
        *,
        captured: Sequence[int] = (),
        division: RowDivision[A] | None = None,
    ) -> tuple[A, list[A]]:
        """Compute a step up to the input of the output projection, and keep hidden states of all its tokens.

        The last layer computes only the `wanted` tokens, unless a state after it is captured.

        Args:
            tokens: see `__call__`, also for the next three.
            rotations: of each token.
            attention: of this step.
            wanted: tokens whose last state is wanted.
            captured: numbers of states: i in [0, num_layers] is the residual stream after the first i layers (0: the
                embeddings), and num_layers + 1 is the input of the output projection, after the last norm.
            division: of tokens among ranks: `tokens` are then those of all, and the other arguments those of this rank;
                nothing may be captured. None: this rank has all.

        Returns:
            `[W, E]`, the states after the last norm, of all ranks; and `[T, E]` for each of `captured`, in its order.
        """
        ops, last = self._ops, len(self._layers) - 1
        narrows = all(state <= last for state in captured)  # the last layer's other tokens are not needed
        states: dict[int, A] = {}
        residual, pending = self.embedding(tokens), None
        if self.config.embedding_multiplier != 1:
            residual = ops.scale(residual, self.config.embedding_multiplier)
        inputs = None if self._inputs is None else self._inputs(tokens, residual)
        if division is not None:
            residual = division.own(residual)
            inputs = None if inputs is None else division.own(inputs)
        step = Step(
            rotations=dict(zip(self.config.position_configs, rotations, strict=True)),
            attention=attention,
            inputs=inputs,
            division=division,
        )
        if self._positions is not None:
            numbers = step.rotations[PositionNumbers(length=self.config.max_position)]
            ops.add(self._positions(ops.positions(numbers)), residual)
        if self._embedding_norm is not None:
            residual = ops.norm(residual, self._embedding_norm)
        for index, layer in enumerate(self._layers):
            x = layer.enter(pending, residual)
            if index in captured:
                states[index] = ops.concat([residual])  # copied, because the layer adds to it
            pending, residual = layer(x, residual, step, index, wanted if index == last and narrows else None)
        x = add_and_norm(ops, pending, residual, self._norm)
        if not narrows:
            states[last + 1], states[last + 2] = residual, x
            x = ops.take(x, wanted)
        if division is not None:
            x = division.gather(x)
        return x, [states[state] for state in captured]


def _read_ends(config: ModelConfig, weights: Weights, ops: Ops[A], shard: Shard) -> tuple[Embedding[A], Linear[A]]:
    """Return the embedding of tokens and the output projection."""
    table, vocab_size, hidden_size = "model.embed_tokens", config.vocab_size, config.hidden_size

    def finished(head: Linear[A]) -> Linear[A]:
        return make_output(config.output, head, ops)

    bias = "lm_head.bias" if config.has_logits_bias else None
    if config.num_token_types:
        return ops.tied_embedding(_with_first_type(config, weights))
    if config.tied_embeddings and shard.is_whole:
        numbers = None if bias is None else weights.stack([(bias, vocab_size)])
        embedding, head = ops.tied_embedding(weights.stack([(f"{table}.weight", vocab_size)], hidden_size), numbers)
        return embedding, finished(head)
    embedding = read_embedding(weights, ops, table, vocab_size, hidden_size, shard)
    output = table if config.tied_embeddings else "lm_head"
    return embedding, read_gathered(weights, ops, output, vocab_size, hidden_size, shard, bias=bias, change=finished)


def _with_first_type(config: ModelConfig, weights: Weights) -> torch.Tensor:
    """Return the embeddings of tokens `[V, E]`, each with that of the first kind of tokens added."""
    table = weights.exact("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
    types = weights.exact("model.embed_types.weight", config.num_token_types, config.hidden_size)
    return table + types[:1]
