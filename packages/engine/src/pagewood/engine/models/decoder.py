"""A decoder or an encoder: embeddings, a list of layers made of parts, a last norm and an output projection.

Legend: T tokens of a step, W tokens whose hidden state is wanted, E hidden_size, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import numpy as np
import torch

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.ops import (
    A,
    Attention,
    Embedding,
    Linear,
    Norm,
    Ops,
    Projection,
    Recurrence,
    RowDivision,
    Step,
    Visual,
    Weights,
)
from pagewood.engine.models.parts.gathered import read_embedding, read_gathered
from pagewood.engine.models.parts.layer import Layer, add_and_norm
from pagewood.engine.models.parts.layer_inputs import LayerInputs
from pagewood.engine.models.parts.norm import read_norm
from pagewood.engine.models.parts.output import make_output
from pagewood.engine.models.parts.rope import PositionNumbers
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.rope import position_table
from pagewood.engine.models.shard import WHOLE, Shard
from pagewood.engine.models.stage import NO_HEAD, Relay, Stage
from pagewood.engine.models.stored.head_order import RowOrder


class Decoder(Generic[A]):
    """A transformer that is a decoder alone, or an encoder alone.

    Invariant: a call does not change it; all state is in the attention's memory.

    One description serves every device. If A is a tensor, a call computes. If A is the name of a future result, a call
    writes the instructions that compute it.
    """

    __slots__ = (
        "_embedding_norm", "_inputs", "_layers", "_needs", "_norm", "_positions", "config", "embedding", "head", "ops",
        "relay", "ropes", "shard", "short_length", "stage", "whole",
    )  # fmt: skip

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops[A],
        *,
        device: torch.device,
        shard: Shard = WHOLE,
        stage: Stage | None = None,
        relay: Relay[A] | None = None,
    ) -> None:
        """Take every parameter from `weights`, layer by layer, and hand it to `ops`, which keeps it.

        Args:
            config: of the whole model.
            weights: where the parameters come from.
            ops: the arithmetic of the device.
            device: of the rotations.
            shard: the rank whose part this is.
            stage: its layers; None: all.
            relay: between the stages; None: there is one.

        Raises:
            ValueError: a number of the model cannot be divided among the ranks, or the layers not among the stages.
        """
        self.shard = shard
        self.stage = Stage(0, config.num_layers, config.num_layers) if stage is None else stage
        """The layers that this is; all if the model is not cut into stages."""
        self.relay = relay
        """What passes values between the stages; None: there is one."""
        self._needs = NO_HEAD if relay is None else relay.needs
        self.whole = config
        """The model, of which this may be a part."""
        self.config = config.for_stage(stage).for_shard(shard)
        """The part of this rank, which is what has a memory and an attention here."""
        self.ropes = [position_table(one, device=device) for one in config.position_configs]
        """What computes the values of positions that layers need: rotations, and the factors of temperatures."""
        self.short_length = config.short_length
        """See `ModelConfig.short_length`."""
        self.ops = ops
        """The arithmetic of the device."""
        self.embedding: Embedding[A]
        self.head: Linear[A]
        """The output projection, from the hidden state `[T, E]` after the last norm to logits `[T, V]`, which it scales
        and caps as the model does."""
        embeds = self.stage.is_first or (self.stage.is_last and self._needs.embeds)
        source = Source(weights=weights, ops=ops, hidden_size=config.hidden_size, shard=shard)
        self.embedding, self.head = _read_ends(config, source, self.stage, embeds=embeds)
        self._positions: Embedding[A] | None = None
        if config.has_learned_positions and self.stage.is_first:
            first, count = config.first_position, config.max_position
            order = np.arange(first, first + count) if first else None
            table = [("model.embed_positions.weight", first + count)]
            self._positions = ops.embedding(weights.stack(table, config.hidden_size, order=order))
        self._embedding_norm: Norm | None = None
        if config.has_embedding_norm and self.stage.is_first:
            self._embedding_norm = read_norm(config.norm, source, "model.embed_norm", config.hidden_size)
        self._inputs: LayerInputs[A] | None = None
        if config.inputs is not None and self.stage.is_first:
            self._inputs = LayerInputs(config.inputs, source, num_layers=config.num_layers)
        self._layers = [
            Layer(layer, source.below(f"model.layers.{index}"), index=index)
            for index, layer in enumerate(config.layers)
            if self.stage.first <= index < self.stage.stop
        ]
        self._norm: Norm | None = None
        if config.has_last_norm and self.stage.is_last:
            self._norm = read_norm(config.norm, source, "model.norm", config.hidden_size)

    def __call__(
        self,
        tokens: A,
        rotations: Sequence[tuple[A, A]],
        attention: Attention[A],
        wanted: A,
        *,
        recurrence: Recurrence[A] | None = None,
        visual: Visual[A] | None = None,
    ) -> A:
        """Compute a step.

        Args:
            tokens: `[T] int32`, token ids.
            rotations: for each of `ropes`, its values for the position of each token, in the form of `ops`.
            attention: the attention of this step.
            wanted: `[W] int32`, the tokens whose logits are wanted.
            recurrence: what recurrent layers do in this step; None: there are none.
            visual: the rows of images; None: there are none.

        Returns:
            `[W, V]`, logits.
        """
        states, _ = self.states(tokens, rotations, attention, wanted, recurrence=recurrence, visual=visual)
        return self.head(states)

    def states(
        self,
        tokens: A,
        rotations: Sequence[tuple[A, A]],
        attention: Attention[A],
        wanted: A,
        *,
        recurrence: Recurrence[A] | None = None,
        captured: Sequence[int] = (),
        division: RowDivision[A] | None = None,
        visual: Visual[A] | None = None,
    ) -> tuple[A, list[A]]:
        """Compute a step up to the input of the output projection, and keep hidden states of all its tokens.

        The last layer computes only the `wanted` tokens, unless a state after it is captured. A stage begins with what
        the one before it has sent, and all but the last one send the residual stream to the next, and the states that a
        head behind the last one reads.

        Args:
            tokens: see `__call__`, also for the next three.
            rotations: of each token.
            attention: of this step.
            wanted: tokens whose last state is wanted.
            recurrence: see `__call__`.
            captured: numbers of states: i in [0, num_layers] is the residual stream after the first i layers (0: the
                embeddings), and num_layers + 1 is the input of the output projection, after the last norm. In stages,
                only the last one captures, and numbers are those of the whole model.
            division: of tokens among ranks: `tokens` are then those of all, and the other arguments those of this rank.
                None: this rank has all.
            visual: see `__call__`; the model is whole then, and has more layers than levels.

        Returns:
            `[W, E]`, the states after the last norm, of all ranks; and `[T, E]` for each of `captured`, in its order,
            of this rank's tokens.
            If this is not the last stage: `[T, E]`, the residual stream that it has sent.
        """
        ops, last, is_last = self.ops, self.stage.stop - 1, self.stage.is_last
        narrows = is_last and all(state <= last for state in captured)  # the last layer's other tokens are not needed
        kept = captured if is_last else self._needs.relayed(self.stage.stop)
        residual, inputs = self._begin(tokens)
        if visual is not None:
            visual.replace(residual)
        states = {state: self._received(tokens) for state in self._needs.relayed(self.stage.first)}
        pending: A | None = None
        if division is not None:
            residual = division.own(residual)
            inputs = None if inputs is None else division.own(inputs)
        step = Step(
            rotations=dict(zip(self.whole.position_configs, rotations, strict=True)),
            attention=attention,
            recurrence=recurrence,
            inputs=inputs,
            division=division,
        )
        if self._positions is not None:
            numbers = step.rotations[PositionNumbers(length=self.config.max_position)]
            ops.add(self._positions(ops.positions(numbers)), residual)
        if self._embedding_norm is not None:
            residual = ops.norm(residual, self._embedding_norm)
        for index, layer in enumerate(self._layers, self.stage.first):
            x = layer.enter(pending, residual)
            if index in kept:
                states[index] = ops.concat([residual])  # copied, because the layer adds to it
            number = index - self.stage.first
            pending, residual = layer(x, residual, step, number, wanted if index == last and narrows else None)
            if visual is not None and index < visual.num_levels:
                visual.add(residual, index)
        if not is_last:
            return self._hand_over(pending, residual, inputs, [states[state] for state in kept]), []
        x = add_and_norm(ops, pending, residual, self._norm)
        if not narrows:
            states[last + 1], states[last + 2] = residual, x
            x = ops.take(x, wanted)
        if division is not None:
            x = division.kept.gather(x)
        return x, [states[state] for state in captured]

    def _begin(self, tokens: A) -> tuple[A, A | None]:
        """Return the residual stream `[T, E]` before the first layer here, and the inputs of all layers, if any."""
        config = self.whole
        if self.stage.is_first:
            residual = self.embedding(tokens)
            if config.embedding_multiplier != 1:
                residual = self.ops.scale(residual, config.embedding_multiplier)
            return residual, None if self._inputs is None else self._inputs(tokens, residual)
        assert self.relay is not None
        inputs = None
        if config.inputs is not None:
            inputs = self.relay.receive(tokens, config.num_layers * config.inputs.size)
        return self._received(tokens), inputs

    def _received(self, tokens: A) -> A:
        """Return a residual stream of the stage before, `[T, E]`."""
        assert self.relay is not None
        return self.relay.receive(tokens, self.config.hidden_size)

    def _hand_over(self, pending: A | None, residual: A, inputs: A | None, states: Sequence[A]) -> A:
        """Send what the next stage begins with; return the residual stream `[T, E]`."""
        assert self.relay is not None
        if pending is not None:
            self.ops.add(pending, residual)
        if inputs is not None:
            self.relay.send(inputs)
        for x in (residual, *states):
            self.relay.send(x)
        return residual


def _read_ends(config: ModelConfig, source: Source[A], stage: Stage, *, embeds: bool) -> tuple[Embedding[A], Linear[A]]:
    """Return the embedding of tokens, if the stage `embeds`, and the output projection, if it is the last one."""
    weights, ops, shard = source.weights, source.ops, source.shard
    table, vocab_size, hidden_size = "model.embed_tokens", config.vocab_size, config.hidden_size
    bias = "lm_head.bias" if config.has_logits_bias else None

    def adapted(embedding: Embedding[A], columns: RowOrder | None = None) -> Embedding[A]:
        own = Projection(parts=[(table, hidden_size)], inputs=vocab_size, order=columns, takes_tokens=True)
        return ops.adaptable(embedding, own)

    def finished(head: Linear[A], rows: RowOrder | None = None) -> Linear[A]:
        own = Projection(
            parts=[("lm_head", vocab_size)],
            inputs=hidden_size,
            order=rows,
            has_bias=bias is not None,
            table=table if config.tied_embeddings else None,
        )
        return make_output(config.output, ops.adaptable(head, own), ops)

    if config.num_token_types:
        return ops.tied_embedding(_with_types(config, weights))
    if config.tied_embeddings and shard.is_whole and embeds and stage.is_last:
        numbers = None if bias is None else weights.stack([(bias, vocab_size)])
        embedding, head = ops.tied_embedding(weights.stack([(f"{table}.weight", vocab_size)], hidden_size), numbers)
        return adapted(embedding), finished(head)
    embedding: Embedding[A] = _elsewhere
    head: Linear[A] = _elsewhere
    if embeds:
        embedding = read_embedding(source, table, vocab_size, hidden_size, change=adapted)
    if stage.is_last:
        output = table if config.tied_embeddings else "lm_head"
        head = read_gathered(source, output, vocab_size, hidden_size, bias=bias, change=finished)
    return embedding, head


def _with_types(config: ModelConfig, weights: Weights) -> torch.Tensor:
    """Return the embeddings of tokens `[V, E]`, each with the embedding of its kind added."""
    num_kinds = config.num_token_types if config.has_typed_tokens else 1
    table = weights.exact("model.embed_tokens.weight", config.vocab_size // num_kinds, config.hidden_size)
    types = weights.exact("model.embed_types.weight", config.num_token_types, config.hidden_size)
    return torch.cat([table + types[kind : kind + 1] for kind in range(num_kinds)])


def _elsewhere(x: A) -> A:
    """Stand for what another stage has."""
    raise AssertionError(f"another stage computes this of {x}")
