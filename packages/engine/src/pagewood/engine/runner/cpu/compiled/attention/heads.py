"""The instructions of attention: the split into heads, the keys and values of new tokens, and attending to them.

Legend: T tokens, H query heads, G key heads, D head_dim.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from functools import cache
from typing import Any

from pagewood.engine.runner.cpu.compiled import rows
from pagewood.engine.runner.cpu.compiled.attention import pages
from pagewood.engine.runner.cpu.compiled.instruction import (
    First,
    Following,
    InScope,
    Instruction,
    Last,
    NumRows,
    Part,
    Real,
    Unit,
    blocks_of_rows,
    instruction,
)
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import codes, floats, vector


@instruction(blocks_of_rows)
@inlined
def store(
    scope: InScope, k_at: Any, v_at: Any, memory_at: Any, scales_at: Any, first_row: Any, size: Any, kv_heads: Any,
    page_size: Any, stride: Any, scale_stride: Any, first: First, last: Last,
) -> None:  # fmt: skip
    """Write keys and values `[T, G D]` to their pages in `memory`; with `scales`, as int8. `size` is G D.

    Tables of groups of layers lie behind each other; `first_row` is the first row of the one to use. For the strides
    see `pages`.
    """
    k, v = floats(k_at, 0, size), floats(v_at, 0, size)
    if scales_at != 0:
        pages.store_codes(
            codes(memory_at, 0), vector(scales_at, 0), k, v, scope, first_row, kv_heads, page_size, stride,
            scale_stride, first, last,
        )  # fmt: skip
    else:
        pages.store(
            vector(memory_at, 0), vector(0, 0), k, v, scope, first_row, kv_heads, page_size, stride, scale_stride,
            first, last,
        )  # fmt: skip


@cache
def split(dim: int) -> Instruction:
    """Return the instruction that splits rows into rotated heads of `dim` elements, a constant in its loops."""

    @instruction(blocks_of_rows)
    @inlined
    def split(
        qkv_at: Any, cosines_at: Any, sines_at: Any, q_norm_at: Any, k_norm_at: Any, q_at: Any, k_at: Any, v_at: Any,
        q_size: Any, k_size: Any, v_column: Any, size: Any, epsilon: Real, first: First, last: Last,
    ) -> None:  # fmt: skip
        """Write `q` `[T, H D]`, `k` and `v` `[T, G D]` of `qkv`; see `rows.split_heads`. A norm may be 0."""
        rows.split_heads(
            floats(qkv_at, 0, size), floats(cosines_at, 0, dim // 2), floats(sines_at, 0, dim // 2),
            vector(q_norm_at, dim if q_norm_at != 0 else 0), vector(k_norm_at, dim if k_norm_at != 0 else 0), epsilon,
            floats(q_at, 0, q_size), floats(k_at, 0, k_size), floats(v_at, 0, k_size), v_column, first, last,
        )  # fmt: skip

    return split


@inlined
def _num_items(scope: Any) -> Any:
    return scope[Column.NUM_ITEMS]


@cache
def attend(dim: int, *, int8: bool, sees_later: bool, sees_images: bool) -> Instruction:
    """Return the instruction that attends to pages, for heads of `dim` elements, in float32 or int8.

    `sees_later` and `sees_images`: whether tokens see later ones of their grant, too, or of their image.
    """
    attend_item = pages.attend_item(dim, codes=int8, sees_later=sees_later, sees_images=sees_images)
    numbers_at = codes if int8 else vector

    @instruction(_num_items)
    @inlined
    def attend(
        scope: InScope, q_at: Any, memory_at: Any, scales_at: Any, first_row: Any, out_at: Any, size: Any,
        kv_heads: Any, page_size: Any, stride: Any, scale_stride: Any, window: Any, scale: Real, sinks_at: Any,
        biases_at: Any, soft_cap: Real, num_rows: NumRows, item: Part, following: Following,
    ) -> None:  # fmt: skip
        """Write to `out` `[T, H D]` what `q` attends to; `size` is H D.

        For the strides, `window`, `sinks` `[H]` and `biases` `[H, NUM_DISTANCES]`, which may be 0, see `pages`; scores
        have the soft cap `soft_cap`, or none if it is 0. For `first_row` see `store`.
        """
        attend_item(
            numbers_at(memory_at, 0), vector(scales_at, 0), floats(q_at, num_rows, size),
            floats(out_at, num_rows, size), scope, first_row, item, following, kv_heads, page_size, stride,
            scale_stride, window, scale, sinks_at, biases_at, soft_cap,
        )  # fmt: skip

    return attend


@cache
def heads_unit(dim: int, *, int8: bool, sees_later: bool, sees_images: bool) -> Unit:
    """Return the instructions for heads of `dim` elements."""
    variant = dim * 2 + int8 + (sees_later << 32) + (sees_images << 33)
    own = attend(dim, int8=int8, sees_later=sees_later, sees_images=sees_images)
    return Unit("heads", split(dim), own, variant=variant)
