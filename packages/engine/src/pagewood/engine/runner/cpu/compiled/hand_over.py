"""What a stage of a model gives the next one while they compute, through memory that their processes share.

Rows go by pieces of at most `PIECE` elements, in lanes as those of an exchange. A lane has some places. A stage that
sends writes to the next place when the other one has read what was there, and counts the piece; the other one waits for
it, reads it, and counts what it has read. So a stage can be ahead by as many pieces as there are places, and goes on
with its next step while the other one still computes. A thread makes system calls only in a long wait.

Legend: T tokens, L lanes, D places of a lane.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.exchange import LINE, NUM_LANES, PIECE, lanes
from pagewood.engine.runner.cpu.compiled.instruction import NumRows, Part, Unit, instruction
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import fetch_add, longs, read_shared, vector, wait_for_rank

DEPTH = 8
"""D: 8 MiB of all lanes together, half a step of 1,024 tokens at a hidden size of 4,096."""
_U = np.uint64


@inlined
def _place(places_at: Any, lane: Any, number: Any) -> Any:
    """Return the address of the place of a piece of a lane."""
    return places_at + 4 * PIECE * (lane * DEPTH + number % DEPTH)


@inlined
def size_at(number: Any) -> Any:
    """Return the place in a line of pieces that has the number of elements of a piece, for those who carry it on."""
    return 1 + number % DEPTH


@inlined
def _copy(source_at: Any, target_at: Any, num: Any) -> None:
    """Copy `num` elements."""
    source, target = vector(source_at, num), vector(target_at, num)
    for i in range(_U(num)):
        target[i] = source[i]


@instruction(lanes)
@inlined
def send_rows(
    x_at: Any, size: Any, places_at: Any, sent_at: Any, taken_at: Any, ended_at: Any, num_rows: NumRows, part: Part
) -> None:  # fmt: skip
    """Give `x` `[T, size]` to the next stage. If the group has ended, nothing is waited for.

    Args:
        x_at: of this stage.
        size: of a row.
        places_at: `[L, D, PIECE]`.
        sent_at: `[L, LINE] int64`, how many pieces were sent in a lane, in the first of each line; then the elements
            of the last D of them.
        taken_at: `[L, LINE] int64`, how many were read.
        ended_at: `[1] int64`, other than 0 when the group has ended.
        num_rows: T.
        part: the lane.
    """
    start, end, own = part * PIECE, num_rows * size, LINE * part
    sent, taken = longs(sent_at, 0), longs(taken_at, 0)
    while start < end:
        num, number = min(PIECE, end - start), read_shared(sent, own)
        if not wait_for_rank(taken, own, number + 1 - DEPTH, longs(ended_at, 1)):
            break
        _copy(x_at + 4 * start, _place(places_at, part, number), num)
        sent[_U(own + size_at(number))] = num
        fetch_add(sent, own, 1)
        start += NUM_LANES * PIECE


@instruction(lanes)
@inlined
def receive_rows(
    out_at: Any, size: Any, places_at: Any, sent_at: Any, taken_at: Any, ended_at: Any, num_rows: NumRows, part: Part
) -> None:  # fmt: skip
    """Write what the stage before has sent to `out` `[T, size]`; see `send_rows`.

    If the group has ended, nothing is waited for, and the result has no meaning.
    """
    start, end, own = part * PIECE, num_rows * size, LINE * part
    sent, taken = longs(sent_at, 0), longs(taken_at, 0)
    while start < end:
        num, number = min(PIECE, end - start), read_shared(taken, own)
        if not wait_for_rank(sent, own, number + 1, longs(ended_at, 1)):
            break
        _copy(_place(places_at, part, number), out_at + 4 * start, num)
        fetch_add(taken, own, 1)
        start += NUM_LANES * PIECE


HAND_OVER = Unit("hand_over", send_rows, receive_rows)
"""For models that are cut into stages."""


@kernel("b1(i8[::1], i8, i8, i8[::1])", is_long=True)
def wait_for_count(counters: Any, at: Any, wanted: Any, ended: Any) -> Any:
    """Wait until `counters[at]` is at least `wanted`; return False if the group ends before that.

    Args:
        counters: flat.
        at: index of the counter.
        wanted: what it must reach.
        ended: `[>= 1]`, other than 0 when the group has ended.
    """
    return wait_for_rank(counters, at, wanted, ended)


@kernel("void(i8[::1], i8, i8)")
def count(counters: Any, at: Any, num: Any) -> None:
    """Add to `counters[at]`; a thread that sees the sum also sees what was written before."""
    fetch_add(counters, at, num)
