"""A whole step in one compiled function: threads go through a list of instructions and share the parts of each.

Each thread that calls it claims parts of an instruction until none is left, waits until all of them are done, and goes
on to the next instruction. So threads synchronise without system calls, a delayed thread delays the others by two parts
at most, and the result does not depend on how many threads there are and when they arrive.

Legend: T tokens of the step, W wanted tokens, N instructions.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled import matmul, rows
from pagewood.engine.runner.cpu.compiled.attention import attend_item, store, store_codes
from pagewood.engine.runner.cpu.compiled.kernel import Kernel, inlined, kernel
from pagewood.engine.runner.cpu.compiled.memory import codes, fetch_add, floats, integers, vector, wait_for
from pagewood.engine.runner.cpu.compiled.sampling import NUM_CHOICE_COLUMNS, draw
from pagewood.engine.runner.cpu.compiled.tile import TALL, WIDTH

NUM_COLUMNS = 12
"""Columns of an instruction: the operation, which of the counts is its number of rows, and its operands."""
COUNTER_STRIDE = 8
"""int64 of a cache line: each instruction's counters have a line of their own."""
_ROWS = 4  # of a part, where an instruction goes row by row


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
    """x, packed, size."""
    MULTIPLY = 6
    """x, packed, panels, bias, out, depth, size."""
    SPLIT = 7
    """qkv, cosines, sines, q norm or 0, k norm or 0, q, k, v, size of q, size of k."""
    STORE = 8
    """k, v, memory, size of k, key heads, page size, scales or 0."""
    ATTEND = 9
    """q, memory, out, size of q, key heads, page size, window, scales or 0."""
    SILU_MUL = 10
    """gate and up, out, size."""
    DRAW = 11
    """logits, choices, tokens, size."""


@inlined
def _num_parts(op: Any, one: Any, num_rows: Any, items: Any) -> Any:
    """Return how many parts an instruction has."""
    if op == Operation.MULTIPLY:
        return matmul.num_products(num_rows, one[8])
    if op == Operation.PACK:
        return matmul.num_tiles(num_rows) if num_rows > 1 else 0  # a single row needs no packing
    if op == Operation.ATTEND:
        return items.shape[0]
    if op == Operation.DRAW:
        return num_rows
    return (num_rows + _ROWS - 1) // _ROWS


def step_kernel(dim: int, *, int8: bool) -> Kernel:
    """Return the kernel for heads of `dim` elements, whose KV memory is int8 with scales, or float32."""
    attend = attend_item(dim, codes=int8)
    put, numbers_at = (store_codes, codes) if int8 else (store, vector)

    @inlined
    def move(op: Any, one: Any, first: Any, last: Any) -> None:
        if op == Operation.TAKE:
            rows.take(one[2], integers(one[3], last), one[4], one[5], first, last)
        elif op == Operation.GATHER:
            rows.take(one[3], integers(one[2], last), one[4], one[5], first, last)
        else:
            rows.take_panels(one[3], integers(one[2], last), one[4], one[5], first, last)

    @inlined
    def change(op: Any, one: Any, number: Any, num_rows: Any, first: Any, last: Any) -> None:
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
        else:
            q_size, k_size = one[10], one[11]
            rows.split_heads(
                floats(one[2], num_rows, q_size + 2 * k_size), floats(one[3], num_rows, dim // 2),
                floats(one[4], num_rows, dim // 2), vector(one[5], dim if one[5] != 0 else 0),
                vector(one[6], dim if one[6] != 0 else 0), number, floats(one[7], num_rows, q_size),
                floats(one[8], num_rows, k_size), floats(one[9], num_rows, k_size), first, last,
            )  # fmt: skip

    def step(instructions: Any, numbers: Any, counts: Any, counters: Any, page_table: Any, grant_rows: Any,
             starts: Any, offsets: Any, items: Any, memory_size: Any) -> None:  # fmt: skip
        margin = np.empty(TALL * WIDTH, np.float32)
        for i in range(instructions.shape[0]):
            one = instructions[i]
            op, num_rows = one[0], counts[one[1]]
            num_parts = _num_parts(op, one, num_rows, items)
            num_done = 0
            part = fetch_add(counters, i * COUNTER_STRIDE, 1) if num_parts > 0 else 0
            while part < num_parts:
                num_done += 1
                following = part
                is_ahead = op == Operation.MULTIPLY or op == Operation.ATTEND
                if is_ahead:  # claimed one ahead, so that its operands can be prefetched
                    following = fetch_add(counters, i * COUNTER_STRIDE, 1)
                first, last = part * _ROWS, min(part * _ROWS + _ROWS, num_rows)
                if op == Operation.MULTIPLY:
                    depth, size = one[7], one[8]
                    padded = (size + WIDTH - 1) // WIDTH * WIDTH
                    matmul.multiply(
                        vector(one[2] if num_rows == 1 else one[3], num_rows * depth),
                        vector(one[4], padded * depth), vector(one[5], padded), floats(one[6], num_rows, size),
                        depth, part, following, margin,
                    )  # fmt: skip
                elif op == Operation.PACK:
                    matmul.pack(floats(one[2], num_rows, one[4]), vector(one[3], num_rows * one[4]), part)
                elif op == Operation.ATTEND:
                    q_size = one[5]
                    attend(
                        numbers_at(one[3], memory_size), vector(one[9], memory_size // dim if one[9] != 0 else 0),
                        floats(one[2], num_rows, q_size), floats(one[4], num_rows, q_size), page_table, grant_rows,
                        starts, offsets, items, part, following, one[6], one[7], one[8], numbers[i],
                    )  # fmt: skip
                elif op == Operation.STORE:
                    k_size = one[5]
                    put(numbers_at(one[4], memory_size), vector(one[8], memory_size // dim if one[8] != 0 else 0),
                        floats(one[2], num_rows, k_size), floats(one[3], num_rows, k_size), page_table, grant_rows,
                        starts, offsets, one[6], one[7], first, last)  # fmt: skip
                elif op == Operation.DRAW:
                    at = one[3] + part * NUM_CHOICE_COLUMNS * 4
                    draw(vector(one[2] + part * one[5] * 4, one[5]), vector(at, NUM_CHOICE_COLUMNS),
                         integers(at, NUM_CHOICE_COLUMNS), integers(one[4] + part * 4, 1))  # fmt: skip
                elif op <= Operation.TAKE:
                    move(op, one, first, last)
                else:
                    change(op, one, numbers[i], num_rows, first, last)
                part = following if is_ahead else fetch_add(counters, i * COUNTER_STRIDE, 1)
            if num_done > 0:
                fetch_add(counters, i * COUNTER_STRIDE + 1, num_done)
            wait_for(counters, i * COUNTER_STRIDE + 1, num_parts)

    return kernel(
        "void(i8[:,::1], f8[::1], i8[::1], i8[::1], i4[:,::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i8)",
        variant=2 * dim + int8,
    )(step)
