"""Inputs of layers: what each layer adds of a token beside its embedding, gated by the residual stream.

A second table has a short vector of every token for every layer. A projection of the embedding is added to it, once a
step. A layer multiplies its own vector by a gate, and adds a projection of the product to the residual stream.

Legend: T tokens of a step, L layers, P elements of a vector, E hidden_size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from pagewood.engine.models.limits import check_size
from pagewood.engine.models.ops import A, Linear, Step
from pagewood.engine.models.parts.gathered import read_embedding, read_gathered
from pagewood.engine.models.parts.linear import read_linear
from pagewood.engine.models.parts.norm import NormConfig, read_norm
from pagewood.engine.models.parts.source import Source

_HALF_ROOT = 2.0**-0.5
_TABLE, _PROJECTION, _NORM = (
    "model.embed_tokens_per_layer", "model.per_layer_model_projection", "model.per_layer_projection_norm"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputsConfig:
    """The numbers of the inputs of all layers.

    Raises:
        ValueError: a size is out of its range.
    """

    vocab_size: int
    """Rows of the table; tokens of the model beyond them do not exist."""
    size: int
    """P."""
    norm: NormConfig
    """Norm of each vector of the projected embedding, and of what a layer adds."""

    def __post_init__(self) -> None:
        check_size("vocab_size", self.vocab_size)
        check_size("hidden_size", self.size)


class LayerInputs(Generic[A]):
    """The inputs of all layers, with their parameters."""

    __slots__ = ("_config", "_hidden_size", "_norm", "_ops", "_projection", "_table")

    def __init__(self, config: LayerInputsConfig, source: Source[A], *, num_layers: int) -> None:
        """Take the parameters. A rank of several has some columns of the table and of the projection."""
        size = num_layers * config.size
        self._config = config
        self._hidden_size = source.hidden_size
        self._ops = source.ops
        self._table = read_embedding(source, _TABLE, config.vocab_size, size)
        self._projection = read_gathered(source, _PROJECTION, size, source.hidden_size)
        self._norm = read_norm(config.norm, source, _NORM, config.size).folded()

    def __call__(self, tokens: A, embedded: A) -> A:
        """Return `[T, L P]` of tokens `[T] int32` and their embeddings `[T, E]`."""
        ops, size = self._ops, self._config.size
        projected = ops.scale(self._projection(embedded), self._hidden_size**-0.5)
        inputs = ops.norm_heads(projected, self._norm, size)
        ops.add(ops.scale(self._table(tokens), size**0.5), inputs)
        return ops.scale(inputs, _HALF_ROOT)


class LayerInput(Generic[A]):
    """What one layer does with its input, with its parameters."""

    __slots__ = ("_column", "_gate", "_norm", "_ops", "_projection")

    def __init__(self, config: LayerInputsConfig, source: Source[A], *, index: int) -> None:
        """Take the parameters from the source of the layer, which is number `index`; no rank divides them."""
        self._ops, hidden_size = source.ops, source.hidden_size
        self._column = index * config.size
        self._gate: Linear[A] = read_linear(source, [("per_layer_input_gate", config.size)])
        self._projection: Linear[A] = read_linear(source, [("per_layer_projection", hidden_size)], config.size)
        self._norm = read_norm(config.norm, source, "post_per_layer_input_norm", hidden_size)

    def __call__(self, residual: A, step: Step[A], wanted: A | None) -> None:
        """Add to the residual stream, `[T, E]`, or that of the `wanted` tokens of the step."""
        ops = self._ops
        assert step.inputs is not None
        inputs = step.inputs if wanted is None else ops.take(step.inputs, wanted)
        gate = ops.activate(self._gate(residual), "gelu_tanh")
        ops.norm_add(self._projection(ops.multiply_columns(gate, inputs, self._column)), residual, self._norm)
