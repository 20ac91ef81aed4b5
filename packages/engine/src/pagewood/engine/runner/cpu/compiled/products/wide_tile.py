"""A tile of a few rows of float32 activations times a panel of codes, which are widened in registers.

A code becomes the number that `weights.matrix_forms` says, with the same rounding, and the sums have the order of
`tile`. So the result has the bits of a product with the dequantised weights.

Legend: D inputs, a multiple of 32; G inputs of a group; R rows of a tile.
"""

# pyright: basic
# numba and llvmlite have no types.

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from pagewood.engine.runner.cpu.compiled.machine.vectors import (
    INDEX,
    load,
    multiply_add,
    prefetch,
    spread,
    store,
    vector_of,
    with_pointers,
)
from pagewood.engine.runner.cpu.compiled.products.float4 import doubled_floats, half_scales
from pagewood.engine.runner.cpu.compiled.products.tile import LOW, WIDTH, by_height
from pagewood.engine.runner.cpu.compiled.products.weight_kind import HALF, WeightKind

_FLOATS, _WORDS = vector_of(HALF), ir.VectorType(ir.IntType(32), HALF)
_BYTES = ir.VectorType(ir.IntType(8), HALF)
_STARTS = range(0, WIDTH, HALF)
"""First outputs of the vectors of a row."""
_LINE = 4 * HALF  # bytes of a cache line, and of four codes of eight bits for each output of half a panel


class _Scale:
    """What turns the codes of one group and half a panel into numbers."""

    __slots__ = ("_builder", "_kind", "_offset", "_scale", "_zero")

    def __init__(self, builder: Any, kind: WeightKind, scale: Any, *, zero: Any = None, offset: Any = None) -> None:
        """Keep vectors: `scale` and `offset` of float32, `zero` of int32; None: the zero of the kind, no offset."""
        self._builder = builder
        self._kind = kind
        self._scale = scale
        self._zero = _all(kind.zero) if zero is None else zero
        self._offset = offset

    def widened(self, words: Any, shift: int) -> Any:
        """Return the numbers of one input, `<16 x float>`, whose codes begin at bit `shift` of `words`."""
        builder = self._builder
        if self._kind.is_float4:
            return builder.fmul(doubled_floats(builder, words, shift), self._scale)
        codes = builder.and_(builder.lshr(words, _all(shift)), _all((1 << self._kind.bits) - 1))
        value = builder.fmul(builder.sitofp(builder.sub(codes, self._zero), _FLOATS), self._scale)
        return value if self._offset is None else builder.fadd(value, self._offset)


class _Tile:
    """Emits the loops over one tile. Arguments are LLVM values: numbers and pointers, `panel` and `ahead` to bytes."""

    __slots__ = (
        "_ahead", "_ahead_step", "_bias", "_builder", "_depth", "_group", "_kind", "_out", "_panel", "_rows", "_scales",
        "_stride", "_vectors", "_x",
    )  # fmt: skip

    def __init__(self, builder: Any, kind: WeightKind, rows: int, args: Any) -> None:
        self._builder = builder
        self._kind = kind
        self._rows = rows
        self._vectors = [(row, h) for row in range(rows) for h in range(len(_STARTS))]
        (self._x, self._panel, self._scales, self._bias, self._out, self._stride, self._depth, self._group,
         self._ahead, self._ahead_step) = args  # fmt: skip

    def channels(self) -> None:
        """Emit a loop over D / 4 for all 32 outputs, whose scales do not depend on the input."""
        builder = self._builder
        scales = [_Scale(builder, self._kind, self._floats(self._scales, start)) for start in _STARTS]
        bias = [self._floats(self._bias, start) for start in _STARTS]
        before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(loop)

        builder.position_at_end(loop)
        quad = builder.phi(INDEX)
        sums = self._phis()
        self._prefetch(quad, 4 * WIDTH // _LINE)
        at = builder.gep(self._panel, [builder.mul(quad, INDEX(4 * WIDTH))])
        words = [self._vector(at, 4 * start, _WORDS) for start in _STARTS]
        new = sums
        for i in range(4):
            columns = [scale.widened(one, 8 * i) for scale, one in zip(scales, words, strict=True)]
            new = self._added(new, columns, builder.add(builder.mul(quad, INDEX(4)), INDEX(i)))
        following = builder.add(quad, INDEX(1))
        quad.add_incoming(INDEX(0), before)
        quad.add_incoming(following, loop)
        for row, h in self._vectors:
            sums[row][h].add_incoming(bias[h], before)
            sums[row][h].add_incoming(new[row][h], loop)
        builder.cbranch(builder.icmp_signed("<", following, builder.lshr(self._depth, INDEX(2))), loop, after)

        builder.position_at_end(after)
        self._write(new)

    def groups(self) -> None:
        """Emit a loop over the D / G blocks of both halves of the panel, with a loop over their steps in it."""
        builder, kind = self._builder, self._kind
        num_groups = builder.udiv(self._depth, self._group)
        block_bytes = builder.add(builder.mul(self._group, INDEX(HALF * kind.bits // 8)), INDEX(kind.head_bytes))
        halves = [self._panel, builder.gep(self._panel, [builder.mul(num_groups, block_bytes)])]
        num_steps = builder.udiv(self._group, INDEX(kind.step))
        bias = [self._floats(self._bias, start) for start in _STARTS]
        before, outer = builder.block, builder.append_basic_block("outer")
        inner, closing, after = (builder.append_basic_block(name) for name in ("inner", "closing", "after"))
        builder.branch(outer)

        builder.position_at_end(outer)
        group = builder.phi(INDEX)
        totals = self._phis()
        blocks = [builder.gep(half, [builder.mul(group, block_bytes)]) for half in halves]
        scales = [self._scale_of(block, start) for block, start in zip(blocks, _STARTS, strict=True)]
        builder.branch(inner)

        builder.position_at_end(inner)
        step = builder.phi(INDEX)
        sums = self._phis()
        whole_step = builder.add(builder.mul(group, num_steps), step)
        for place in range(2):
            self._prefetch(builder.add(builder.mul(whole_step, INDEX(2)), INDEX(place)), kind.lines_of_step)
        offset = builder.add(builder.mul(step, INDEX(kind.step * HALF * kind.bits // 8)), INDEX(kind.head_bytes))
        lines = [builder.gep(block, [offset]) for block in blocks]
        first = builder.mul(whole_step, INDEX(kind.step))
        new, words = sums, list[Any]()
        for i in range(kind.step):
            quad, place = divmod(i, 4)
            line, shift = divmod(quad * kind.bits, 8)  # of four bits, two quads share a line
            if shift == place == 0:
                words = [self._vector(one, line * _LINE, _WORDS) for one in lines]
            columns = [scale.widened(one, 8 * place + shift) for scale, one in zip(scales, words, strict=True)]
            new = self._added(new, columns, builder.add(first, INDEX(i)))
        following = builder.add(step, INDEX(1))
        step.add_incoming(INDEX(0), outer)
        step.add_incoming(following, inner)
        builder.cbranch(builder.icmp_signed("<", following, num_steps), inner, closing)

        builder.position_at_end(closing)
        next_group = builder.add(group, INDEX(1))
        group.add_incoming(INDEX(0), before)
        group.add_incoming(next_group, closing)
        for row, h in self._vectors:
            sums[row][h].add_incoming(totals[row][h], outer)
            sums[row][h].add_incoming(new[row][h], inner)
            totals[row][h].add_incoming(bias[h], before)
            totals[row][h].add_incoming(new[row][h], closing)
        builder.cbranch(builder.icmp_signed("<", next_group, num_groups), outer, after)

        builder.position_at_end(after)
        self._write(new)

    def _scale_of(self, block: Any, start: int) -> _Scale:
        """Return the scale of the group in `block`, whose first output in the panel is `start`."""
        builder, kind = self._builder, self._kind
        if kind.is_float4:
            scale = half_scales(builder, kind, self._vector(block, 0, _BYTES))
            apart = kind.has_scales_apart
            return _Scale(builder, kind, builder.fmul(scale, self._floats(self._scales, start)) if apart else scale)
        zero = builder.zext(self._vector(block, 4 * HALF, _BYTES), _WORDS) if kind.has_zeros else None
        offset = self._vector(block, 4 * HALF, _FLOATS) if kind.has_offsets else None
        return _Scale(builder, kind, self._vector(block, 0, _FLOATS), zero=zero, offset=offset)

    def _phis(self) -> list[list[Any]]:
        """Return sums `[R][2]` whose values depend on where the block is entered from."""
        return [[self._builder.phi(_FLOATS) for _ in _STARTS] for _ in range(self._rows)]

    def _added(self, sums: list[list[Any]], columns: list[Any], k: Any) -> list[list[Any]]:
        """Return `sums` `[R][2]` plus the products of input k with its weights `[2]`."""
        builder, rows = self._builder, self._rows
        step, stride = (INDEX(1), self._depth) if rows <= LOW else (INDEX(rows), INDEX(1))
        new: list[list[Any]] = []
        for row, of_row in enumerate(sums):
            place = builder.add(builder.mul(k, step), builder.mul(stride, INDEX(row)))
            value = spread(builder, builder.load(builder.gep(self._x, [place])), _FLOATS)
            new.append([multiply_add(builder, value, column, one) for column, one in zip(columns, of_row, strict=True)])
        return new

    def _write(self, sums: list[list[Any]]) -> None:
        """Write the sums `[R][2]`."""
        for row, h in self._vectors:
            place = self._builder.add(self._builder.mul(self._stride, INDEX(row)), INDEX(_STARTS[h]))
            store(self._builder, sums[row][h], self._builder.gep(self._out, [place]))

    def _prefetch(self, step: Any, lines: int) -> None:
        asked = self._builder.gep(self._ahead, [self._builder.mul(step, self._ahead_step)])
        for line in range(lines):
            prefetch(self._builder, self._builder.gep(asked, [INDEX(_LINE * line)]))

    def _floats(self, base: Any, start: int) -> Any:
        return load(self._builder, self._builder.gep(base, [INDEX(start)]), _FLOATS)

    def _vector(self, base: Any, offset: int, kind: Any) -> Any:
        """Return the vector some bytes behind `base`."""
        at = self._builder.gep(base, [INDEX(offset)])
        return self._builder.load(self._builder.bitcast(at, kind.as_pointer()), align=1)


def _all(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * HALF)


@cache
def multiply_widened(kind: WeightKind) -> Any:
    """Return the function that computes a tile, with int64 arguments, most of them addresses.

    (height, x, panel, scales, bias, out, stride, depth, group, ahead, ahead_step): R = `height` rows, at most TALL,
    `[R, D] float32` or, above LOW, packed `[D, R]`, times a panel of `kind`, plus `bias` `[32]`, to `out` with `stride`
    floats between rows; meanwhile prefetches as `code_tile.multiply_codes` does. `scales` `[32]` are those apart.
    """

    def tile(context: Any, height: Any, x: Any, panel: Any, scales: Any, bias: Any, out: Any, stride: Any, depth: Any,
             group: Any, ahead: Any, ahead_step: Any) -> Any:  # fmt: skip
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            byte, number = ir.IntType(8).as_pointer(), ir.FloatType().as_pointer()
            values = with_pointers(builder, args, {1: number, 2: byte, 3: number, 4: number, 5: number, 9: byte})

            def emit(rows: int) -> None:
                one = _Tile(builder, kind, rows, values[1:])
                if kind.has_groups:
                    one.groups()
                else:
                    one.channels()

            by_height(builder, args[0], emit)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 11), generate

    return intrinsic(tile)
