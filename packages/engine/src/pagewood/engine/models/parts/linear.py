"""Projections of several matrices with the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pagewood.engine.models.ops import A, Linear, Projection
from pagewood.engine.models.parts.source import Source
from pagewood.engine.models.stored.head_order import RowOrder

if TYPE_CHECKING:
    from torch import Tensor


def read_linear(
    source: Source[A],
    parts: Sequence[tuple[str, int]],
    inputs: int | None = None,
    *,
    has_bias: bool = False,
    order: RowOrder | None = None,
    part: range | None = None,
    is_summed: bool = False,
) -> Linear[A]:
    """Take the matrices `parts`, one below the other, and their biases.

    Args:
        source: of the parameters.
        parts: name and number of outputs of each.
        inputs: number of inputs of all; None: E.
        has_bias: whether each has a bias.
        order: of the rows of all; see `Weights.stack`.
        part: the inputs that this rank has, whose results are then parts of a sum over ranks; None: all.
        is_summed: whether results are parts of a sum although the rank has all inputs. One rank adds the biases of a
            sum.
    """
    weights, ops, prefix, inputs = source.weights, source.ops, source.prefix, inputs or source.hidden_size
    adds_bias = source.shard.rank == 0 or (part is None and not is_summed)
    weight = weights.stack([(f"{prefix}{name}.weight", rows) for name, rows in parts], inputs, order=order, inputs=part)
    bias = weights.stack([(f"{prefix}{name}.bias", rows) for name, rows in parts], order=order) if has_bias else None
    projection = Projection(
        parts=[(f"{prefix}{name}", rows) for name, rows in parts],
        inputs=inputs,
        order=order,
        part=part,
        has_bias=has_bias,
        adds_bias=adds_bias,
    )
    return ops.adaptable(ops.linear(weight, bias if adds_bias else None), projection)


def read_exact_linear(
    source: Source[A],
    parts: Sequence[tuple[str, int]],
    inputs: int | None = None,
    *,
    bias: Tensor | None = None,
    order: RowOrder | None = None,
) -> Linear[A]:
    """Take the small matrices `parts`, one below the other, whose numbers are not rounded further.

    Args:
        source: of the parameters.
        parts: name and number of outputs of each.
        inputs: number of inputs of all; None: E.
        bias: `[out]`, in this order; None: zeros.
        order: of the rows of all, part by part; those that it does not name are not read.
    """
    import torch  # configurations are read without it

    prefix, inputs = source.prefix, inputs or source.hidden_size
    numbers: list[Tensor] = []
    start = 0
    for name, rows in parts:
        own = order_of_part(order, start, rows)
        numbers.append(source.weights.numbers(f"{prefix}{name}.weight", rows, inputs, order=own))
        start += rows
    names = [(f"{prefix}{name}", rows) for name, rows in parts]
    projection = Projection(parts=names, inputs=inputs, order=order, has_bias=bias is not None)
    return source.ops.adaptable(source.ops.exact_linear(torch.cat(numbers).float(), bias), projection)


def order_of_part(order: RowOrder | None, start: int, rows: int) -> RowOrder | None:
    """Return which of the `rows` of a part that begins at row `start` an order of the rows of all parts names."""
    return None if order is None else order[(order >= start) & (order < start + rows)] - start
