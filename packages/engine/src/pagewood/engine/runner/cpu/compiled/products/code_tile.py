"""A tile of a few rows of eight-bit activations times a panel of codes, with its sums in vector registers.

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
    multiply_add,
    prefetch,
    spread,
    vector_of,
    with_pointers,
)
from pagewood.engine.runner.cpu.compiled.products.dot import ByteDot, DotLevel, nibbles
from pagewood.engine.runner.cpu.compiled.products.float4 import doubled_bytes, half_scales
from pagewood.engine.runner.cpu.compiled.products.tile import WIDTH, by_height
from pagewood.engine.runner.cpu.compiled.products.weight_kind import HALF, WeightKind

_BYTE, _WORD, _FLOAT = ir.IntType(8), ir.IntType(32), ir.FloatType()
_LINE = 64  # bytes of a cache line
_WIDEST = 512  # bits of a vector, with which there are 32 registers
_FEW = 3  # rows whose sums fit into 16 registers


class _Tile:
    """Emits the loops over one tile, or some of its rows. Arguments are LLVM values: numbers and pointers to bytes."""

    def __init__(self, builder: Any, kind: WeightKind, level: DotLevel, rows: int, height: Any, args: Any) -> None:
        """Compute `rows` rows of a tile of `height` rows."""
        self._builder = builder
        self._kind = kind
        self._level = level
        self._dot = ByteDot(builder, level)
        self._rows = rows
        self._row_bytes = builder.mul(height, INDEX(4))
        """Bytes of one four-byte number, or of four codes, for each row of the tile."""
        (self._x, self._sums, self._row_scales, self._panel, self._scales, self._bias, self._out,
         self._stride, self._depth, self._group, self._ahead, self._ahead_step) = args  # fmt: skip

    def _at(self, base: Any, offset: Any, kind: Any) -> Any:
        """Return a pointer to a value of type `kind`, some bytes behind `base`."""
        return self._builder.bitcast(self._builder.gep(base, [offset]), kind.as_pointer())

    def _load(self, base: Any, offset: Any, kind: Any) -> Any:
        return self._builder.load(self._at(base, offset, kind), align=1)

    def _scaled(self, value: Any, factor: int) -> Any:
        return self._builder.mul(value, INDEX(factor))

    def _prefetch(self, step: Any, lines: int) -> None:
        builder = self._builder
        asked = builder.gep(self._ahead, [builder.mul(step, self._ahead_step)])
        for line in range(lines):
            prefetch(builder, builder.gep(asked, [INDEX(_LINE * line)]))

    def _activation(self, quad: Any, row: int) -> Any:
        """Return 4 codes of a row as an int32."""
        place = self._builder.add(self._builder.mul(quad, self._row_bytes), INDEX(4 * row))
        return self._load(self._x, place, _WORD)

    def _finish(self, row: int, h: int, total: Any, scale: Any, offset: int) -> None:
        """Write `total * scale + bias` of one vector."""
        builder, vector = self._builder, vector_of(self._dot.lanes)
        column = INDEX(4 * (offset + h * self._dot.lanes))
        value = multiply_add(builder, total, scale, self._load(self._bias, column, vector))
        at = builder.add(self._scaled(builder.mul(self._stride, INDEX(row)), 4), column)
        builder.store(value, self._at(self._out, at, vector), align=4)

    def _all(self, value: int) -> Any:
        return ir.Constant(self._dot.sums, [value] * self._dot.lanes)

    def _first(self, total: Any) -> Any:
        """Return what a sum starts from, without zeros of groups; `total` is the sum of activations, times a factor."""
        zero = self._kind.zero - self._dot.shift(self._kind.bits)
        if not zero:
            return self._all(0)
        if self._kind.has_offsets:  # the factor is 1; otherwise it is minus the zero
            return self._builder.mul(total, self._all(-zero))
        return total

    def _first_with_zeros(self, total: Any, block: Any, h: int) -> Any:
        """Return what a sum starts from; `total` is the sum of activations, times -1."""
        builder, dot = self._builder, self._dot
        stored = self._load(block, INDEX(4 * HALF + h * dot.lanes), ir.VectorType(_BYTE, dot.lanes))
        zeros = builder.zext(stored, dot.sums)
        shift = dot.shift(self._kind.bits)
        return builder.mul(builder.sub(zeros, self._all(shift)) if shift else zeros, total)

    def _group_scale(self, block: Any, h: int) -> Any:
        """Return the scales of a group in one vector."""
        lanes = self._dot.lanes
        if self._kind.is_float4:
            stored = self._load(block, INDEX(lanes * h), ir.VectorType(_BYTE, lanes))
            return half_scales(self._builder, self._kind, stored)
        return self._load(block, INDEX(4 * lanes * h), vector_of(lanes))

    def _codes(self, loaded: Any) -> list[Any]:
        """Return the unsigned bytes that a vector of codes stands for, as vectors."""
        if self._kind.bits == 8:
            return [loaded]
        parts = nibbles(self._builder, loaded)
        return [doubled_bytes(self._builder, part, self._level) for part in parts] if self._kind.is_float4 else parts

    def channels(self) -> None:
        """Emit a loop over D / 4 for all 32 outputs, whose scales do not depend on the input."""
        builder, dot = self._builder, self._dot
        count, vector = WIDTH // dot.lanes, vector_of(dot.lanes)
        first = [self._first(spread(builder, self._load(self._sums, INDEX(4 * row), _WORD), dot.sums))
                 for row in range(self._rows)]  # fmt: skip
        before, loop, after = builder.block, builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        quad = builder.phi(INDEX)
        sums = [[builder.phi(dot.sums) for _ in range(count)] for _ in range(self._rows)]
        self._prefetch(quad, 4 * WIDTH // _LINE)
        start = self._scaled(quad, 4 * WIDTH)
        codes = ir.VectorType(_BYTE, 4 * dot.lanes)
        weights = [
            dot.prepare(self._load(self._panel, builder.add(start, INDEX(4 * dot.lanes * h)), codes), bits=8)
            for h in range(count)
        ]
        new: list[list[Any]] = []
        for row in range(self._rows):
            activation = self._activation(quad, row)
            new.append([dot.add(sums[row][h], weights[h], activation) for h in range(count)])
        following = builder.add(quad, INDEX(1))
        quad.add_incoming(INDEX(0), before)
        quad.add_incoming(following, loop)
        for row in range(self._rows):
            for h in range(count):
                sums[row][h].add_incoming(first[row], before)
                sums[row][h].add_incoming(new[row][h], loop)
        builder.cbranch(builder.icmp_signed("<", following, builder.lshr(self._depth, INDEX(2))), loop, after)
        builder.position_at_end(after)
        for h in range(count):
            scale = self._load(self._scales, INDEX(4 * dot.lanes * h), vector)
            for row in range(self._rows):
                of_row = spread(builder, self._load(self._row_scales, INDEX(4 * row), _FLOAT), vector)
                self._finish(row, h, builder.sitofp(new[row][h], vector), builder.fmul(of_row, scale), 0)

    def groups(self, half: int) -> None:
        """Emit a loop over the D / G blocks of half a panel, with a loop over G / 32 in it."""
        builder, dot, kind = self._builder, self._dot, self._kind
        count, vector = HALF // dot.lanes, vector_of(dot.lanes)
        pairs = [(row, h) for row in range(self._rows) for h in range(count)]
        num_groups = builder.udiv(self._depth, self._group)
        block_bytes = builder.add(builder.mul(self._group, INDEX(HALF * kind.bits // 8)), INDEX(kind.head_bytes))
        panel = builder.gep(self._panel, [builder.mul(builder.mul(num_groups, block_bytes), INDEX(half))])
        num_steps = builder.udiv(self._group, INDEX(kind.step))
        before, outer = builder.block, builder.append_basic_block("outer")
        inner, closing, after = (builder.append_basic_block(name) for name in ("inner", "closing", "after"))
        builder.branch(outer)

        builder.position_at_end(outer)
        group = builder.phi(INDEX)
        totals = {pair: builder.phi(vector) for pair in pairs}
        block = builder.gep(panel, [builder.mul(group, block_bytes)])
        first: dict[tuple[int, int], Any] = {}
        of_activations: list[Any] = []
        for row in range(self._rows):
            place = builder.add(builder.mul(group, self._row_bytes), INDEX(4 * row))
            of_activations.append(self._load(self._sums, place, _WORD))
            total = spread(builder, of_activations[row], dot.sums)
            for h in range(count):
                first[row, h] = self._first_with_zeros(total, block, h) if kind.has_zeros else self._first(total)
        builder.branch(inner)

        builder.position_at_end(inner)
        step = builder.phi(INDEX)
        sums = {pair: builder.phi(dot.sums) for pair in pairs}
        whole_step = builder.add(builder.mul(group, num_steps), step)
        row_bytes = 4 * HALF
        num_chunks = kind.step // 4 * kind.bits // 8
        self._prefetch(builder.add(whole_step, builder.mul(INDEX(half), builder.mul(num_groups, num_steps))),
                       kind.lines_of_step)  # fmt: skip
        codes = ir.VectorType(_BYTE, 4 * dot.lanes)
        new = dict(sums)
        for chunk in range(num_chunks):
            at = builder.add(self._scaled(step, num_chunks * row_bytes), INDEX(kind.head_bytes + chunk * row_bytes))
            loaded = [self._load(block, builder.add(at, INDEX(4 * dot.lanes * h)), codes) for h in range(count)]
            parts = [self._codes(one) for one in loaded]
            for part in range(8 // kind.bits):
                weights = [dot.prepare(parts[h][part], bits=kind.bits) for h in range(count)]
                quad = builder.add(self._scaled(whole_step, kind.step // 4), INDEX(chunk * 8 // kind.bits + part))
                for row in range(self._rows):
                    activation = self._activation(quad, row)
                    for h in range(count):
                        new[row, h] = dot.add(new[row, h], weights[h], activation)
        next_step = builder.add(step, INDEX(1))
        step.add_incoming(INDEX(0), outer)
        step.add_incoming(next_step, inner)
        for pair in pairs:
            sums[pair].add_incoming(first[pair], outer)
            sums[pair].add_incoming(new[pair], inner)
        builder.cbranch(builder.icmp_signed("<", next_step, num_steps), inner, closing)

        builder.position_at_end(closing)
        ended: dict[tuple[int, int], Any] = {}
        for h in range(count):
            scale = self._group_scale(block, h)
            for row in range(self._rows):
                ended[row, h] = multiply_add(builder, builder.sitofp(new[row, h], vector), scale, totals[row, h])
            if kind.has_offsets:
                offset = self._load(block, INDEX(4 * (HALF + dot.lanes * h)), vector)
                for row in range(self._rows):
                    total = spread(builder, builder.sitofp(of_activations[row], _FLOAT), vector)
                    ended[row, h] = multiply_add(builder, total, offset, ended[row, h])
        next_group = builder.add(group, INDEX(1))
        group.add_incoming(INDEX(0), before)
        group.add_incoming(next_group, closing)
        for pair in pairs:
            totals[pair].add_incoming(ir.Constant(vector, [0.0] * vector.count), before)
            totals[pair].add_incoming(ended[pair], closing)
        builder.cbranch(builder.icmp_signed("<", next_group, num_groups), outer, after)

        builder.position_at_end(after)
        for row in range(self._rows):
            of_row = spread(builder, self._load(self._row_scales, INDEX(4 * row), _FLOAT), vector)
            for h in range(count):
                scale = of_row
                if kind.has_scales_apart:
                    place = INDEX(4 * (half * HALF + dot.lanes * h))
                    scale = builder.fmul(of_row, self._load(self._scales, place, vector))
                self._finish(row, h, ended[row, h], scale, half * HALF)


def emit_codes(builder: Any, kind: WeightKind, level: DotLevel, rows: int, height: Any, values: Any) -> None:
    """Emit the loops for a tile of `rows` rows, or those of its rows; `values` are `multiply_codes`' from x on."""
    tile = _Tile(builder, kind, level, rows, height, values)
    if kind.has_groups:
        tile.groups(0)
        tile.groups(1)
    else:
        tile.channels()


def _by_rows(builder: Any, kind: WeightKind, level: DotLevel, values: Any) -> None:
    """Emit a loop that takes a few rows at a time, because there are only 16 registers."""
    done = builder.append_basic_block("done")
    height, (x, sums, row_scales, panel, scales, bias, out, stride, *others) = values[0], values[1:]
    before, head = builder.block, builder.append_basic_block("head")
    following = builder.append_basic_block("following")
    builder.branch(head)
    builder.position_at_end(head)
    first = builder.phi(INDEX)
    first.add_incoming(INDEX(0), before)
    left = builder.sub(height, first)
    count = builder.select(builder.icmp_signed("<", left, INDEX(_FEW)), left, INDEX(_FEW))
    offset = builder.mul(first, INDEX(4))
    moved = [builder.gep(base, [offset]) for base in (x, sums, row_scales)]
    target = builder.gep(out, [builder.mul(offset, stride)])
    choice = builder.switch(count, done)
    for rows in range(1, _FEW + 1):
        block = builder.append_basic_block(f"rows{rows}")
        choice.add_case(ir.Constant(INDEX, rows), block)
        builder.position_at_end(block)
        emit_codes(builder, kind, level, rows, height, [*moved, panel, scales, bias, target, stride, *others])
        builder.branch(following)
    builder.position_at_end(following)
    next_first = builder.add(first, count)
    first.add_incoming(next_first, following)
    builder.cbranch(builder.icmp_signed("<", next_first, height), head, done)
    builder.position_at_end(done)


@cache
def multiply_codes(kind: WeightKind, level: DotLevel) -> Any:
    """Return the function that computes a tile, with int64 arguments, most of them addresses.

    (height, x, sums, row scales, panel, scales, bias, out, stride, depth, group, ahead, ahead_step): R = `height`
    rows, at most TALL, `[D / 4, R, 4] int8`, times a panel of `kind`, plus `bias` `[32]`, to `out` with `stride` floats
    between rows; meanwhile prefetches the bytes from `ahead` on, `ahead_step` for each part of the panel that its loop
    takes. `sums` `[D / G, R] int32` are sums of activations, times minus the zero of a code; times minus one if groups
    have zeros, and times one if they have offsets. `row scales` `[R]` and `scales` `[32]` (of outputs, if the kind has
    them apart) are float32.
    """

    def tile(context: Any, height: Any, x: Any, sums: Any, row_scales: Any, panel: Any, scales: Any, bias: Any,
             out: Any, stride: Any, depth: Any, group: Any, ahead: Any, ahead_step: Any) -> Any:  # fmt: skip
        def generate(ctx: Any, builder: Any, sig: Any, args: Any) -> Any:
            values = with_pointers(builder, args, dict.fromkeys([1, 2, 3, 4, 5, 6, 7, 11], _BYTE.as_pointer()))
            if level.lanes * 32 == _WIDEST:  # the sums of all rows fit into the registers
                by_height(
                    builder, args[0], lambda rows: emit_codes(builder, kind, level, rows, INDEX(rows), values[1:])
                )
            else:
                _by_rows(builder, kind, level, values)
            return ctx.get_dummy_value()

        return types.void(*[types.int64] * 13), generate

    return intrinsic(tile)
