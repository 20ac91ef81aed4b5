"""Rows of images: in place of the embeddings of their tokens, and added behind the first layers."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import First, InScope, Last, Unit, instruction
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import longs, vector

_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values


@inlined
def _blocks_with_images(scope: Any, num_rows: Any, part_rows: Any) -> Any:
    """Return the parts; none if no token of the step stands for an image."""
    return (num_rows + part_rows - 1) // part_rows if scope[Column.FEATURES] != 0 else 0


@instruction(_blocks_with_images)
@inlined
def overlay(scope: InScope, x_at: Any, size: Any, column: Any, adds: Any, first: First, last: Last) -> None:
    """Write rows of images, from `column` on, to the rows of their tokens in `x` `[T, size]`; or add them if `adds`."""
    places = longs(scope[Column.FEATURES], 0)
    for row in range(first, last):
        at = places[row]
        if at != 0:
            source, out = vector(at + 4 * column, size), vector(x_at + 4 * row * size, size)
            if adds != 0:
                for i in range(_U(size)):
                    out[i] += source[i]
            else:
                for i in range(_U(size)):
                    out[i] = source[i]


OVERLAY = Unit("overlay", overlay)
"""For models that take images."""
