"""Which rank computes each expert of a token, where ranks have whole experts, and how many rows each expert gets.

Legend: T tokens, N experts, K chosen experts of a token, R ranks, P placed experts, M most copies of an expert; see
`models.expert_map`.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.models.expert_map import TURN
from pagewood.engine.runner.cpu.compiled.instruction import (
    First,
    Last,
    NumRows,
    Unit,
    blocks_of_rows,
    instruction,
    one_part,
)
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import integer_rows, integers, longs

_TURN, _BITS, _HALF = np.int64(TURN), np.int64(0xFFFFFFFF), np.int64(16)


@instruction(blocks_of_rows)
@inlined
def place_chosen(
    chosen_at: Any, logits_at: Any, table_at: Any, ranks_at: Any, out_at: Any, num_experts: Any, num_chosen: Any,
    most_copies: Any, num_ranks: Any, first: First, last: Last,
) -> None:  # fmt: skip
    """Write the placed expert that computes each chosen one to `out` `[T, K] int32`.

    Args:
        chosen_at: `[T, K] int32`.
        logits_at: `[T, N]`, read as int32.
        table_at: `[N, M] int32`, the placed numbers of each expert; -1 behind them.
        ranks_at: `[P] int32`, the rank of each placed expert.
        out_at: written.
        num_experts: N.
        num_chosen: K.
        most_copies: M.
        num_ranks: R.
        first: first token.
        last: the one behind the last.
    """
    chosen, bits = integer_rows(chosen_at, 0, num_chosen), integer_rows(logits_at, 0, num_experts)
    table, ranks = integer_rows(table_at, 0, most_copies), integers(ranks_at, 0)
    out = integer_rows(out_at, 0, num_chosen)
    loads = np.empty(num_ranks, np.int32)  # of the token's experts that have a rank
    for row in range(first, last):
        loads[:] = 0
        for k in range(num_chosen):
            expert = chosen[row, k]
            if most_copies == 1 or table[expert, 1] < 0:
                out[row, k] = table[expert, 0]
                loads[ranks[table[expert, 0]]] += 1
        for k in range(num_chosen):
            expert = chosen[row, k]
            if most_copies == 1 or table[expert, 1] < 0:
                continue
            count = 2
            while count < most_copies and table[expert, count] >= 0:
                count += 1
            turn = ((np.int64(bits[row, expert]) & _BITS) * _TURN & _BITS) >> _HALF
            best = table[expert, turn % count]
            for other in range(1, count):
                one = table[expert, (turn + other) % count]
                if loads[ranks[one]] < loads[ranks[best]]:
                    best = one
            loads[ranks[best]] += 1
            out[row, k] = best


@instruction(one_part)
@inlined
def count_rows(chosen_at: Any, counts_at: Any, num_chosen: Any, num_rows: NumRows) -> None:
    """Add the rows of each placed expert among `chosen` `[T, K] int32` to `counts` `[P] int64`."""
    chosen, counts = integers(chosen_at, 0), longs(counts_at, 0)
    for pair in range(num_rows * num_chosen):
        counts[chosen[pair]] += 1


PLACING = Unit("placing", place_chosen, count_rows)
"""For models whose ranks have whole experts, not in their usual order, or whose rows of experts are counted."""
