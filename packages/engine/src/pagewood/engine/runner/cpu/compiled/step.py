"""A whole step in one compiled function: threads go through a list of instructions and share the parts of each.

The code of heads of one size, and that of drafters, are functions of their own, which instructions name by address. So
they are compiled only where they are needed, and the rest once for all models.

Each thread that calls it claims parts of an instruction until none is left, waits until all of them are done, and goes
on to the next instruction. So threads synchronise without system calls, a delayed thread delays the others by two parts
at most, and the result does not depend on how many threads there are and when they arrive. For two threads to meet
takes longer than most instructions with a single part. So the thread that claims such an instruction also computes
those behind it, without claims, up to the next one with several parts.

Legend: T tokens of the step, W wanted tokens, N instructions.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled import rows
from pagewood.engine.runner.cpu.compiled.attention.pages import attend_item, store, store_codes
from pagewood.engine.runner.cpu.compiled.drafting import passes as drafting
from pagewood.engine.runner.cpu.compiled.drafting import tree
from pagewood.engine.runner.cpu.compiled.drafting.accept import accept, compact, plant, reject
from pagewood.engine.runner.cpu.compiled.drawing.adjust import adjust
from pagewood.engine.runner.cpu.compiled.drawing.report import report as report_token
from pagewood.engine.runner.cpu.compiled.drawing.sampling import NUM_CHOICE_COLUMNS, draw
from pagewood.engine.runner.cpu.compiled.layout import NUM_SCOPE_COLUMNS, Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import Kernel, inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import (
    call_part,
    codes,
    fetch_add,
    floats,
    integers,
    long_rows,
    longs,
    vector,
    wait_a_moment,
    wait_for,
    write_time,
)
from pagewood.engine.runner.cpu.compiled.pool import pool
from pagewood.engine.runner.cpu.compiled.products import matmul
from pagewood.engine.runner.cpu.compiled.products.dot import DotLevel
from pagewood.engine.runner.cpu.compiled.products.packed_weights import (
    ProductLevel,
    look_up,
    multiplier,
    num_packed_parts,
    reader,
)
from pagewood.engine.runner.cpu.compiled.products.quantise import quantise
from pagewood.engine.runner.cpu.compiled.products.round_pairs import round_pairs
from pagewood.engine.runner.cpu.compiled.products.tile import TALL, WIDTH
from pagewood.engine.runner.cpu.compiled.products.weight_kind import WeightKind

NUM_COLUMNS = 16
"""Columns of an instruction: the operation, which of the counts is its number of rows, its operands, and two more."""
PART_ROWS = NUM_COLUMNS - 2
"""Column with the rows of a part, where an instruction goes row by row; see `rows_of_part`."""
FUNCTION = NUM_COLUMNS - 1
"""Column with the address of the function that computes the parts of the instruction; 0: `step` has its code."""
VARIANTS = 256
"""More than any number of a `packed_kernel`."""
_LEVELS = 16  # more than any number of a level; VARIANTS is a multiple of it
COUNTER_STRIDE = 8
"""int64 of a cache line: each instruction's counters have a line of their own."""
_LEAST_ROWS, _PART_SIZE = 4, 8192  # elements; what is smaller takes a thread less time than it takes two to meet


class Operation(IntEnum):
    """What an instruction does. Operands are addresses, except sizes and numbers."""

    GATHER = 0
    """tokens `[rows]`, table `[V, size]`, out, size."""
    GATHER_PANELS = 1
    """tokens `[rows]`, panels `[P, size, 32]`, out, size."""
    TAKE = 2
    """x, wanted `[rows]`, out, size."""
    NORM = 3
    """x, weight, out, size."""
    ADD_NORM = 4
    """x, residual, weight, out, size."""
    PACK = 5
    """x, packed, size, size that is filled up with zeros, outputs of the product."""
    MULTIPLY = 6
    """x, packed, panels, bias, out, depth, size."""
    SPLIT = 7
    """qkv, cosines, sines, q norm or 0, k norm or 0, q, k, v, size of q, size of k, head_dim."""
    STORE = 8
    """k, v, memory, size of k, key heads, page size, scales or 0, scope, size of the memory, first row of the page
    table: tables of groups of layers lie behind each other."""
    ATTEND = 9
    """q, memory, out, size of q, key heads, page size, window, scales or 0, scope, size of the memory, first
    row of the page table, head_dim."""
    SILU_MUL = 10
    """gate and up, out, size."""
    DRAW = 11
    """logits, choices, tokens, size."""
    PUT = 12
    """x, out, size of x, size of out, first column in out."""
    CLEAR_FIRST = 13
    """x, sines, size, columns of sines."""
    REPORT = 14
    """scope, logits `[W, V]`, V, logits before their change `[W, V]`, accepted tokens `[W]`, their numbers `[S]`, their
    nodes `[W]`, reports `[W, NUM_REPORT_COLUMNS]`; see `report`. The rows are wanted tokens, if any is reported."""
    ADJUST = 15
    """scope, logits `[W, V]`, V, logits before their change `[W, V]`; see `adjust`. The rows are sampled grants, if any
    has adjustments."""
    ACCEPT = 16
    """scope, drawn tokens `[W]`, accepted tokens `[W]`, their numbers `[rows]`, their nodes `[W]`; see `accept`. The
    rows of this instruction and the next two are sampled grants; its number is the probability of `accept` or -1."""
    PLANT = 17
    """scope."""
    COMPACT = 18
    """scope, memory, groups of a page, page size, words of a slot in a group, nodes `[W]`, numbers of tokens `[rows]`,
    first row of the page table."""
    CLOCK = 19
    """address of two int64, written: seconds and nanoseconds when all instructions before are done."""
    FILL = 20
    """scope, shift. The rows of this and the following are sampled grants; see `compiled.drafting.passes`."""
    TAG = 21
    """scope, tags `[pages, page size]`, page size, hashes `[rows of the runner]`."""
    NOTE = 22
    """scope, drawn tokens `[rows]`, shift."""
    LAST = 23
    """scope, scope of the target, numbers of accepted tokens `[rows]`; the rows are those of the target's scope."""
    KEEP = 24
    """scope, x `[rows, size]`, states `[rows of the runner, size]`, size."""
    RECALL = 25
    """scope, states `[rows of the runner, size]`, out `[rows, size]`, size."""
    SPREAD = 26
    """scope, logits `[rows, size]`, size, token map `[size]`, out `[rows, V]`, V."""
    POOL = 27
    """scope, states `[rows, size]`, size, sums `[rows, size]`; see `pool`. The rows are kept tokens, the parts pooled
    grants."""
    HOLD_LOGITS = 34
    """scope, scope of the target, logits `[rows, V]`, held logits `[grants of the target, drafts, V]`, V, drafts, index
    of the draft; see `drafting.hold_logits`."""
    REJECT = 35
    """scope, logits `[W, V]`, held logits `[rows, drafts, V]`, V, drafts, accepted tokens `[W]`, their numbers
    `[rows]`, their nodes `[W]`, scratch `[rows, 2 V]`; see `accept.reject`."""
    STASH = 32
    """scope, x `[T, size]`, size, stash `[rows of the runner, depth, size]`, depth."""
    UNSTASH = 33
    """scope, stash `[rows of the runner, depth, size]`, depth, out `[T, size]`, size."""
    EXPAND = 40
    """logits, choices, tokens `[rows, K]`, scores `[rows, K]`, V, K. The rows are wanted tokens; for this and the
    following see `compiled.drafting.tree`."""
    SELECT = 41
    """scope, tokens `[W, K]`, scores `[W, K]`, candidates, beams, K, levels, level, firsts. The rows of this and the
    following are sampled grants."""
    CLIMB = 42
    """scope, candidates, beams, K, levels, level, tags `[pages, page size]`, page size, firsts."""
    KEEP_BEAM = 43
    """scope, x `[W, size]`, held states `[rows of the runner, K, size]`, K, nodes of the beam, size."""
    INHERIT = 44
    """scope, states `[rows of the runner, size]`, held states, candidates, beams, K, levels, level, out `[T, size]`,
    size, firsts."""
    GRAFT = 45
    """scope of the target, candidates, K, levels."""
    LINE_UP = 46
    """scope, scope of the target, places `[T]`; the rows are all grants."""
    TRACE = 47
    """scope, scope of the target, places `[T]`, nodes `[W]`, numbers of accepted tokens `[rows]`; the rows are those of
    the target's scope."""

    QUANTISE = 50
    """x `[rows, K]`, codes `[rows, D] int8`, sums `[rows, D / group] int32`, scales `[rows]`, K, D, group, factor,
    variant; see `compiled.products.quantise`. Or x, pairs `[rows, D] bfloat16`, 0, 0, K, D, 0, 0, variant; see
    `compiled.products.round_pairs`. The parts are tiles. For this and the following, variant says which kernel."""
    MULTIPLY_PACKED = 51
    """x `[rows, D]`, or what is packed; packed x, codes or pairs; sums or 0, scales of rows or 0, panels, scales of
    outputs or 0, bias, out, D, size, group * VARIANTS + variant."""
    LOOK_UP = 52
    """tokens `[rows]`, panels, scales or 0, out `[rows, K]`, K, D, group, variant. The parts are rows."""

    NORM_ADD = 60
    """x, weight, residual, size. For this and the following see `frame`."""
    NORM_COLUMNS = 61
    """x, weight, size of x, first column, columns."""
    GELU_MUL = 62
    """gate and up, out, size."""
    SCALE = 63
    """x, size."""
    COLUMNS = 64
    """x, out, size of x, size of out, first column in x."""


@inlined
def _num_parts(op: Any, one: Any, num_rows: Any, scopes: Any) -> Any:
    """Return how many parts an instruction has."""
    if op == Operation.MULTIPLY:
        return matmul.num_products(matmul.num_float_tiles(num_rows, one[8]), one[8], 1)
    if op == Operation.PACK:
        return matmul.num_packed(num_rows, one[4], one[5], one[6])
    if op == Operation.MULTIPLY_PACKED:
        return num_packed_parts(one[12] % VARIANTS // _LEVELS, one[12] % _LEVELS, num_rows, one[11])
    if op == Operation.QUANTISE:
        return matmul.num_tiles(num_rows)
    if op == Operation.ATTEND:
        return scopes[one[10], Column.NUM_ITEMS]
    if op == Operation.CLOCK:
        return 1
    if op == Operation.ADJUST:
        return num_rows if scopes[one[2], Column.NUM_ADJUSTED] > 0 else 0
    if op == Operation.REPORT:
        return num_rows if scopes[one[2], Column.NUM_REPORTED] > 0 else 0
    if op == Operation.POOL:
        return scopes[one[2], Column.NUM_POOLED]
    if op == Operation.DRAW or (op >= Operation.ACCEPT and op < Operation.NORM_ADD):
        return num_rows
    return (num_rows + one[PART_ROWS] - 1) // one[PART_ROWS]


def rows_of_part(size: int) -> int:
    """Return the rows of a part of an instruction that goes row by row; `size` elements are in its longest rows."""
    return max(_LEAST_ROWS, _PART_SIZE // size)


_PART = "void(i8, i8, f8, i8, i8, i8, i8)"
"""Signature of a function that computes one part of an instruction: operation, address of the instruction, its number,
its rows, address of the table of scopes, part, and the part that the thread computes next."""


@cache
def heads_kernel(dim: int, *, int8: bool) -> Kernel:
    """Return the function that computes parts of SPLIT and ATTEND.

    Args:
        dim: elements of a head, a constant in its loops.
        int8: whether the KV memory is int8 with scales, or float32.
    """
    attend = attend_item(dim, codes=int8)
    numbers_at = codes if int8 else vector

    def heads(op: Any, one_at: Any, number: Any, num_rows: Any, scopes_at: Any, part: Any, following: Any) -> None:
        one = longs(one_at, NUM_COLUMNS)
        if op == Operation.ATTEND:
            q_size, memory_size = one[5], one[11]
            attend(
                numbers_at(one[3], memory_size), vector(one[9], memory_size // dim if one[9] != 0 else 0),
                floats(one[2], num_rows, q_size), floats(one[4], num_rows, q_size),
                long_rows(scopes_at, 0, NUM_SCOPE_COLUMNS)[one[10]], one[12], part, following, one[6], one[7], one[8],
                number,
            )  # fmt: skip
        else:
            q_size, k_size = one[10], one[11]
            first, last = part * one[PART_ROWS], min((part + 1) * one[PART_ROWS], num_rows)
            rows.split_heads(
                floats(one[2], num_rows, q_size + 2 * k_size), floats(one[3], num_rows, dim // 2),
                floats(one[4], num_rows, dim // 2), vector(one[5], dim if one[5] != 0 else 0),
                vector(one[6], dim if one[6] != 0 else 0), number, floats(one[7], num_rows, q_size),
                floats(one[8], num_rows, k_size), floats(one[9], num_rows, k_size), first, last,
            )  # fmt: skip

    return kernel(_PART, variant=dim * 2 + int8)(heads)


@cache
def packed_kernel(kind: WeightKind, level: ProductLevel) -> Kernel:
    """Return the function that computes parts of QUANTISE, MULTIPLY_PACKED and LOOK_UP, for one kind of weights.

    Args:
        kind: how the weights lie in memory.
        level: instructions for products.
    """
    multiply, read, has_bytes = multiplier(kind, level), reader(kind), isinstance(level, DotLevel)

    def packed(op: Any, one_at: Any, number: Any, num_rows: Any, scopes_at: Any, part: Any, following: Any) -> None:
        one = longs(one_at, NUM_COLUMNS)
        if op == Operation.MULTIPLY_PACKED:
            multiply(
                one[2], one[3], one[4], one[5], one[6], one[7], one[8], one[9], num_rows,
                one[10], one[11], one[12] // VARIANTS, part, following,
            )  # fmt: skip
        elif op == Operation.QUANTISE:
            if has_bytes:
                quantise(one[2], one[3], one[4], one[5], num_rows, one[6], one[7], one[8], one[9], part)
            else:
                round_pairs(one[2], one[3], num_rows, one[6], one[7], part)
        else:
            look_up(read, one[2], one[3], one[4], one[5], one[6], one[7], one[8], part)

    return kernel(_PART, variant=packed_variant(kind, level))(packed)


def packed_variant(kind: WeightKind, level: ProductLevel) -> int:
    """Return the number below VARIANTS that stands for a `packed_kernel` in instructions."""
    return kind * _LEVELS + level


@inlined
def _grow(op: Any, one: Any, scopes: Any, part: Any) -> None:
    scope = scopes[one[2]]
    if op == Operation.SELECT:
        tree.select(scope, part, one[3], one[4], one[5], one[6], one[7], one[8], one[9], one[10])
    elif op == Operation.CLIMB:
        tree.climb(scope, part, one[3], one[4], one[5], one[6], one[7], one[8], one[9], one[10])
    elif op == Operation.KEEP_BEAM:
        tree.keep_beam(scope, part, one[3], one[4], one[5], one[6], one[7])
    elif op == Operation.INHERIT:
        tree.inherit(scope, part, one[3], one[4], one[5], one[6], one[7], one[8], one[9], one[10], one[11],
                     one[12])  # fmt: skip
    elif op == Operation.GRAFT:
        tree.graft(scope, part, one[3], one[4], one[5])
    elif op == Operation.LINE_UP:
        tree.line_up(scope, scopes[one[3]], part, one[4])
    else:
        tree.trace(scope, scopes[one[3]], part, one[4], one[5], one[6])


@inlined
def _hand_on(op: Any, one: Any, scopes: Any, part: Any) -> None:
    scope = scopes[one[2]]
    if op == Operation.FILL:
        drafting.fill(scope, part, one[3])
    elif op == Operation.TAG:
        drafting.tag(scope, part, one[3], one[4], one[5])
    elif op == Operation.NOTE:
        drafting.note(scope, part, one[3], one[4])
    elif op == Operation.LAST:
        drafting.last(scope, scopes[one[3]], part, one[4])
    elif op == Operation.KEEP:
        drafting.keep(scope, part, one[3], one[4], one[5])
    elif op == Operation.RECALL:
        drafting.recall(scope, part, one[3], one[4], one[5])
    elif op == Operation.STASH:
        drafting.stash(scope, part, one[3], one[4], one[5], one[6])
    elif op == Operation.UNSTASH:
        drafting.unstash(scope, part, one[3], one[4], one[5], one[6])
    elif op == Operation.HOLD_LOGITS:
        drafting.hold_logits(scope, scopes[one[3]], part, one[4], one[5], one[6], one[7], one[8])
    elif op == Operation.REJECT:
        reject(scope, part, one[3], one[4], one[5], one[6], one[7], one[8], one[9], one[10])
    else:
        drafting.spread(part, one[3], one[4], one[5], one[6], one[7])


@kernel(_PART)
def draft(op: Any, one_at: Any, number: Any, num_rows: Any, scopes_at: Any, part: Any, following: Any) -> None:
    """Compute a part of an instruction of a drafter, `Operation.FILL` or one behind it."""
    one, scopes = longs(one_at, NUM_COLUMNS), long_rows(scopes_at, 0, NUM_SCOPE_COLUMNS)
    if op == Operation.EXPAND:
        at, topk = one[3] + part * NUM_CHOICE_COLUMNS * 4, one[7]
        tree.expand(vector(one[2] + part * one[6] * 4, one[6]), vector(at, NUM_CHOICE_COLUMNS),
                    integers(at, NUM_CHOICE_COLUMNS), integers(one[4] + part * topk * 4, topk),
                    vector(one[5] + part * topk * 4, topk))  # fmt: skip
    elif op > Operation.EXPAND:
        _grow(op, one, scopes, part)
    else:
        _hand_on(op, one, scopes, part)


@kernel(_PART)
def report(op: Any, one_at: Any, number: Any, num_rows: Any, scopes_at: Any, part: Any, following: Any) -> None:
    """Compute a part of REPORT or POOL."""
    one, scopes = longs(one_at, NUM_COLUMNS), long_rows(scopes_at, 0, NUM_SCOPE_COLUMNS)
    if op == Operation.POOL:
        pool(scopes[one[2]], part, one[3], one[4], one[5])
        return
    report_token(scopes[one[2]], part, one[3], one[4], one[5], one[6], one[7], one[8], one[9])


@kernel(_PART)
def frame(op: Any, one_at: Any, number: Any, num_rows: Any, scopes_at: Any, part: Any, following: Any) -> None:
    """Compute a part of an instruction that few families need: of other frames, norms, activations and ropes."""
    one = longs(one_at, NUM_COLUMNS)
    first, last = part * one[PART_ROWS], min((part + 1) * one[PART_ROWS], num_rows)
    if op == Operation.NORM_ADD:
        size = one[5]
        rows.norm_add(floats(one[2], num_rows, size), vector(one[3], size), number, floats(one[4], num_rows, size),
                      first, last)  # fmt: skip
    elif op == Operation.GELU_MUL:
        rows.gelu_mul(floats(one[2], num_rows, 2 * one[4]), floats(one[3], num_rows, one[4]), first, last)
    elif op == Operation.SCALE:
        rows.scale(floats(one[2], num_rows, one[3]), number, first, last)
    elif op == Operation.COLUMNS:
        rows.columns(floats(one[2], num_rows, one[4]), floats(one[3], num_rows, one[5]), one[6], first, last)
    else:
        rows.norm_columns(floats(one[2], num_rows, one[4]), vector(one[3], one[6]), number, one[5], first, last)


@inlined
def _move(op: Any, one: Any, first: Any, last: Any) -> None:
    if op == Operation.TAKE:
        rows.take(one[2], integers(one[3], last), one[4], one[5], first, last)
    elif op == Operation.GATHER:
        rows.take(one[3], integers(one[2], last), one[4], one[5], first, last)
    else:
        rows.take_panels(one[3], integers(one[2], last), one[4], one[5], first, last)


@inlined
def _settle(op: Any, one: Any, scopes: Any, part: Any) -> None:
    if op == Operation.ACCEPT:
        accept(scopes[one[2]], part, one[3], one[4], one[5], one[6])
    elif op == Operation.PLANT:
        plant(scopes[one[2]], part)
    elif op == Operation.COMPACT:
        compact(scopes[one[2]], part, one[3], one[4], one[5], one[6], one[7], one[8], one[9])
    else:
        write_time(one[2])


@inlined
def _change(op: Any, one: Any, number: Any, num_rows: Any, first: Any, last: Any) -> None:
    if op == Operation.NORM:
        size = one[5]
        rows.norm(floats(one[2], num_rows, size), vector(one[3], size), number, floats(one[4], num_rows, size),
                  first, last)  # fmt: skip
    elif op == Operation.ADD_NORM:
        size = one[6]
        rows.add_norm(floats(one[2], num_rows, size), floats(one[3], num_rows, size), vector(one[4], size), number,
                      floats(one[5], num_rows, size), first, last)  # fmt: skip
    elif op == Operation.SILU_MUL:
        size = one[4]
        rows.silu_mul(floats(one[2], num_rows, 2 * size), floats(one[3], num_rows, size), first, last)
    elif op == Operation.PUT:
        rows.put(floats(one[2], num_rows, one[4]), floats(one[3], num_rows, one[5]), one[6], first, last)
    else:
        rows.clear_first(floats(one[2], num_rows, one[4]), floats(one[3], num_rows, one[5]), first, last)


@inlined
def _store(one: Any, num_rows: Any, scopes: Any, first: Any, last: Any) -> None:
    k_size, memory_size = one[5], one[10]
    k, v, scope = floats(one[2], num_rows, k_size), floats(one[3], num_rows, k_size), scopes[one[9]]
    if one[8] != 0:
        scales = vector(one[8], memory_size * one[6] // k_size)
        store_codes(codes(one[4], memory_size), scales, k, v, scope, one[11], one[6], one[7], first, last)
    else:
        store(vector(one[4], memory_size), vector(0, 0), k, v, scope, one[11], one[6], one[7], first, last)


@kernel("void(i8[:,::1], f8[::1], i8[::1], i8[::1], i8[:,::1], i8[::1], i8)", is_long=True)
def step(instructions: Any, numbers: Any, counts: Any, counters: Any, scopes: Any, runs: Any, awaited: Any) -> None:
    """Run a program; see `Program.start` for the first arguments.

    Args:
        instructions: of the program.
        numbers: of the program.
        counts: of the run.
        counters: of the run.
        scopes: of the run.
        runs: `[>= 1]`, how many runs the thread that makes them has begun.
        awaited: 0: this is that thread, and the run is its next one; > 0: this thread helps, and then waits for a
            moment until this number of runs has begun; < 0: it helps and does not wait.
    """
    if awaited == 0:
        fetch_add(runs, 0, 1)
    margin = np.empty(TALL * WIDTH, np.float32)
    i, alone = 0, -1  # the instruction, and the first of those that this thread computes alone; -1: it does not
    while i < instructions.shape[0]:
        one = instructions[i]
        op, num_rows = one[0], counts[one[1]]
        num_parts = _num_parts(op, one, num_rows, scopes)
        if num_parts < 1:  # not even claimed
            i += 1
            continue
        if num_parts > 1 and alone >= 0:
            fetch_add(counters, alone * COUNTER_STRIDE + 1, i - alone)
            alone = -1
        part = 0 if alone >= 0 else fetch_add(counters, i * COUNTER_STRIDE, 1)
        num_done = 0
        while part < num_parts:
            num_done += 1
            following = part
            is_ahead = op == Operation.MULTIPLY or op == Operation.MULTIPLY_PACKED or op == Operation.ATTEND
            if num_parts > 1 and is_ahead:  # claimed one ahead, so that its operands can be prefetched
                following = fetch_add(counters, i * COUNTER_STRIDE, 1)
            first, last = part * one[PART_ROWS], min((part + 1) * one[PART_ROWS], num_rows)
            if op == Operation.MULTIPLY:
                depth, size = one[7], one[8]
                padded = (size + WIDTH - 1) // WIDTH * WIDTH
                matmul.multiply(
                    vector(one[2], num_rows * depth), vector(one[3], num_rows * depth),
                    vector(one[4], padded * depth), vector(one[5], padded), floats(one[6], num_rows, size),
                    depth, part, following, margin,
                )  # fmt: skip
            elif one[FUNCTION] != 0:
                at = instructions.ctypes.data + 8 * NUM_COLUMNS * i
                call_part(one[FUNCTION], op, at, numbers[i], num_rows, scopes.ctypes.data, part, following)
            elif op == Operation.PACK:
                matmul.pack(floats(one[2], num_rows, one[4]), vector(one[3], num_rows * one[5]), one[5], one[6], part)
            elif op == Operation.STORE:
                _store(one, num_rows, scopes, first, last)
            elif op == Operation.DRAW:
                at = one[3] + part * NUM_CHOICE_COLUMNS * 4
                draw(vector(one[2] + part * one[5] * 4, one[5]), vector(at, NUM_CHOICE_COLUMNS),
                     integers(at, NUM_CHOICE_COLUMNS), integers(one[4] + part * 4, 1))  # fmt: skip
            elif op == Operation.ADJUST:
                adjust(scopes[one[2]], part, one[3], one[4], one[5])
            elif op >= Operation.ACCEPT:
                _settle(op, one, scopes, part)
            elif op <= Operation.TAKE:
                _move(op, one, first, last)
            else:
                _change(op, one, numbers[i], num_rows, first, last)
            if num_parts == 1:
                break
            part = following if is_ahead else fetch_add(counters, i * COUNTER_STRIDE, 1)
        if num_parts > 1:
            if num_done > 0:
                fetch_add(counters, i * COUNTER_STRIDE + 1, num_done)
            wait_for(counters, i * COUNTER_STRIDE + 1, num_parts)
            i += 1
        elif num_done > 0:
            alone = i if alone < 0 else alone
            i += 1
        else:
            wait_for(counters, i * COUNTER_STRIDE + 1, 1)
            i += fetch_add(counters, i * COUNTER_STRIDE + 1, 0)
    if alone >= 0:
        fetch_add(counters, alone * COUNTER_STRIDE + 1, i - alone)
    if awaited > 0:
        wait_a_moment(runs, 0, awaited)


class StepKernel:
    """Runs programs: `step`, and the functions that instructions name by address. All are compiled."""

    __slots__ = ("_drafts", "_frame", "_heads", "_packed", "_report", "_runs")

    def __init__(self, *, heads: Mapping[int, Kernel], drafts: bool, packed: Mapping[int, Kernel]) -> None:
        """Take the functions for heads, by their number of elements, those of drafters or not, and `packed_kernel`s.

        The last are given by `packed_variant`.
        """
        self._packed = {variant: one.address for variant, one in packed.items()}
        self._heads = {dim: one.address for dim, one in heads.items()}
        self._drafts = draft.address if drafts else 0
        self._report = report.address
        self._frame = frame.address
        self._runs: Any = np.zeros(COUNTER_STRIDE, np.int64)
        """[0]: how many runs have begun."""  # written by: step, pass_by

    def function(self, operation: Operation, last_operand: object) -> int:
        """Return the address of the function that an instruction calls; 0: `step` has its code.

        Args:
            operation: of the instruction.
            last_operand: of SPLIT and ATTEND, the elements of a head; of products with packed weights, the variant.

        Raises:
            ValueError: the function was not compiled.
        """
        if operation in (Operation.SPLIT, Operation.ATTEND):
            if not isinstance(last_operand, int) or last_operand not in self._heads:
                raise ValueError(f"heads must have one of {list(self._heads)} elements, got {last_operand}")
            return self._heads[last_operand]
        if operation in (Operation.REPORT, Operation.POOL):
            return self._report
        if operation < Operation.FILL:
            return 0
        if operation >= Operation.NORM_ADD:
            return self._frame
        if operation >= Operation.QUANTISE:
            variant = last_operand % VARIANTS if isinstance(last_operand, int) else -1
            if variant not in self._packed:
                raise ValueError(f"the kernel was compiled without packed weights of variant {variant}")
            return self._packed[variant]
        if not self._drafts:
            raise ValueError(f"the kernel was compiled without drafters, which {operation.name} belongs to")
        return self._drafts

    @property
    def num_begun(self) -> int:
        """How many runs have begun."""
        return int(self._runs[0])

    def run(self, *args: Any) -> None:
        """Run a program without the interpreter's lock, on the thread that makes all runs; see `Program.start`."""
        step(*args, self._runs, 0)

    def help(self, *args: Any, num_begun: int = 0) -> None:
        """Help to run it, on any other thread, and then wait for a moment until `num_begun` runs have begun."""
        step(*args, self._runs, num_begun or -1)

    def pass_by(self) -> None:
        """Count a run that is not made, on the thread that makes all runs.

        This thread keeps the interpreter's lock meanwhile. So it completes the empty step before a thread that waits
        for the run goes on; otherwise the next step would begin only when that thread gives the lock away.
        """
        self._runs[0] += 1
