"""The layers of a decoder in torch, one after the other, so that a matrix can be replaced and its inputs observed.

Legend: B texts, T tokens of a text, E hidden_size, N outputs, K inputs.
"""

# pyright: basic
# torch is typed in part only.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pagewood.engine.models.config import ModelConfig
from pagewood.engine.models.ops import Step
from pagewood.engine.models.parts.layer import Layer
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.rope import position_table
from pagewood.engine.models.stored.checkpoint import Checkpoint
from pagewood.engine.models.stored.head_order import RowOrder
from pagewood.engine.models.torch_ops import TorchOps, WholeTexts
from pagewood.engine.models.torch_recurrence import WholeTextStates

_TOKENS_AT_ONCE = 2048


class Projection:
    """Several matrices of the same inputs, one below the other. Invariant: `weight` has rows of `parts` only."""

    __slots__ = ("_bias", "hessian", "num_inputs", "order", "parts", "weight")

    def __init__(
        self, parts: Sequence[tuple[str, int]], order: RowOrder | None, weight: Tensor, bias: Tensor | None
    ) -> None:
        self.parts = parts
        """Name and number of rows of each matrix."""
        self.order = order
        """The place of each row of `weight` among the rows of all matrices, some of which it may lack; None: the same
        place."""
        self.weight = weight
        """[N, K] float32"""  # written by: the caller, who rounds it
        self.hessian: Tensor | None = None  # written by: watch, unwatch
        """[K, K] float32, the sum of x x' over all inputs since `watch`."""
        self.num_inputs = 0  # written by: watch, __call__
        """Number of inputs since `watch`."""
        self._bias = bias

    def watch(self) -> None:
        """Begin to add up inputs."""
        self.hessian = torch.zeros(self.weight.shape[1], self.weight.shape[1])
        self.num_inputs = 0

    def unwatch(self) -> None:
        """Drop the sum."""
        self.hessian = None

    def __call__(self, x: Tensor) -> Tensor:
        """Return `[T, N]` of `[T, K]`."""
        if self.hessian is not None:
            self.hessian.addmm_(x.T, x)
            self.num_inputs += len(x)
        return functional.linear(x, self.weight, self._bias)


class _Recorded:
    """`models.ops.Weights` that remembers which matrices are in its results."""

    __slots__ = ("_checkpoint", "_stacked")

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stacked: dict[int, tuple[Sequence[tuple[str, int]], RowOrder | None]] = {}  # written by: stack, forget
        """The parts of each matrix that was read and the order of its rows, by the address of its memory."""

    def stack(
        self,
        parts: Sequence[tuple[str, int]],
        *columns: int,
        order: RowOrder | None = None,
        inputs: range | None = None,
    ) -> Tensor:
        assert inputs is None, "all of a model is quantised"
        stacked = self._checkpoint.stack(parts, *columns, order=order)
        if columns:
            self._stacked[stacked.untyped_storage().data_ptr()] = parts, order
        return stacked

    def parts(self, weight: Tensor) -> tuple[Sequence[tuple[str, int]], RowOrder | None]:
        """Return the parts of a matrix and the order of its rows.

        It may be a view of some rows of a matrix, in whole parts, if the rows of that one are in their own order. With
        an order it may lack rows of its parts.
        """
        first = int(weight.storage_offset()) // weight.shape[1]
        parts, order = self._stacked[weight.untyped_storage().data_ptr()]
        if order is not None:
            return parts, order
        found: list[tuple[str, int]] = []
        start = 0
        for name, rows in parts:
            if first <= start < first + len(weight):
                found.append((name, rows))
            start += rows
        return found, None

    def forget(self) -> None:
        """Forget all matrices, whose memory may be given to others."""
        self._stacked.clear()

    def numbers(self, name: str, rows: int, columns: int, *, order: RowOrder | None = None) -> Tensor:
        return self._checkpoint.numbers(name, rows, columns, order=order)

    def exact(self, name: str, rows: int, *columns: int, order: RowOrder | None = None) -> Tensor:
        return self._checkpoint.exact(name, rows, *columns, order=order)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadLayer:
    """A layer of a checkpoint."""

    index: int
    layer: Layer[Tensor]
    projections: Sequence[Projection]
    """All its matrices, in the order in which they are read."""


def read_layers(config: ModelConfig, checkpoint: Checkpoint) -> Iterator[ReadLayer]:
    """Yield the layers of a checkpoint that converts to float32; each is read on demand."""
    weights = _Recorded(checkpoint)
    for index, one in enumerate(config.layers):
        found: list[Projection] = []

        def projection(weight: Tensor, bias: Tensor | None, found: list[Projection] = found) -> Projection:
            found.append(Projection(*weights.parts(weight), weight, bias))
            return found[-1]

        source = Source(weights=weights, ops=TorchOps(projection), hidden_size=config.hidden_size)
        layer = Layer(one, source.below(f"model.layers.{index}"), index=index)
        weights.forget()
        yield ReadLayer(index=index, layer=layer, projections=found)


@torch.no_grad()
def run_layer(one: ReadLayer, states: Tensor, config: ModelConfig) -> Tensor:
    """Return the residual stream `[B, T, E]` after a layer, from the one before it.

    Args:
        one: the layer.
        states: `[B, T, E] float32`, of texts that begin at position 0.
        config: of the model.
    """
    length = states.shape[1]
    attention = WholeTexts([layer.mixer for layer in config.layers], length)
    ropes = {rope: position_table(rope, device=torch.device("cpu")) for rope in config.position_configs}
    is_short, parts = config.is_short(length), list[Tensor]()
    for texts in states.split(max(1, _TOKENS_AT_ONCE // length)):
        positions = torch.arange(length).repeat(len(texts))
        rotations = {one: rope(positions, is_short=is_short) for one, rope in ropes.items()}
        step = Step(rotations=rotations, attention=attention, recurrence=WholeTextStates(length))
        residual = texts.flatten(0, 1).clone()
        pending, residual = one.layer(one.layer.enter(None, residual), residual, step, one.index)
        parts.append((residual if pending is None else residual + pending).view(texts.shape))
    return torch.cat(parts)
