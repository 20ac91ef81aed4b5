"""What ranks compute a part of the columns of, each.

Legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import numpy as np

from pagewood.engine.models.ops import A, Embedding, Linear, Ops
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.stored.head_order import RowOrder


class Gathered(Generic[A]):
    """An embedding or a projection whose result is put together from the parts of all ranks."""

    __slots__ = ("_ops", "_part", "_size")

    def __init__(self, part: Callable[[A], A], ops: Ops[A], size: int) -> None:
        """Take the function that computes this rank's part of `size` columns."""
        self._part = part
        self._ops = ops
        self._size = size

    def __call__(self, x: A) -> A:
        """Return `[T, size]`."""
        return self._ops.gather_ranks(self._part(x), self._size)


def read_embedding(
    source: Source[A],
    name: str,
    size: int,
    hidden_size: int,
    *,
    change: Callable[[Embedding[A], RowOrder | None], Embedding[A]] | None = None,
) -> Embedding[A]:
    """Take the table `name` of `size` tokens, of which a rank of several has some columns.

    `change` makes the embedding compute more, given these columns; None: all.
    """
    columns = source.shard.inputs("hidden_size", hidden_size)
    embedding = source.ops.embedding(source.weights.stack([(f"{name}.weight", size)], hidden_size, inputs=columns))
    if change is not None:
        embedding = change(embedding, None if columns is None else np.asarray(columns))
    return embedding if columns is None else Gathered(embedding, source.ops, hidden_size)


def read_gathered(
    source: Source[A],
    name: str,
    size: int,
    inputs: int,
    *,
    bias: str | None = None,
    change: Callable[[Linear[A], RowOrder | None], Linear[A]] | None = None,
) -> Linear[A]:
    """Take the matrix `name` of `size` outputs, of which a rank of several computes some.

    `bias` is the name of a tensor with a number for each output; `change` makes the projection compute more, given
    the outputs that it has; None: all.
    """
    weights, ops, shard = source.weights, source.ops, source.shard
    order = None if shard.is_whole else shard.padded_part(size)
    projection = ops.linear(
        weights.stack([(f"{name}.weight", size)], inputs, order=order),
        None if bias is None else weights.stack([(bias, size)], order=order),
    )
    projection = projection if change is None else change(projection, order)
    return projection if shard.is_whole else Gathered(projection, ops, size)
