"""The choice of experts, the order in which their rows lie, and the sum of their results.

A token uses K experts. Each pair of a token and one of its experts has a slot, and the slots of an expert lie side by
side, in the order of tokens. A run is a part of the slots of one expert, as long as one thread multiplies with a panel.
Where other ranks have other experts, only pairs with an expert of this rank have slots; see `placing`.

Legend: T tokens, N experts, K chosen experts of a token, S slots, T times K, R runs.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.models.ops import CLAMP_ALPHA, CLAMP_LIMIT
from pagewood.engine.runner.cpu.compiled.instruction import (
    Count,
    First,
    Last,
    NumRows,
    Real,
    Unit,
    blocks_of_rows,
    instruction,
    one_part,
)
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integer_rows, integers, longs, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp
from pagewood.engine.runner.cpu.compiled.products.matmul import BLOCK
from pagewood.engine.runner.cpu.compiled.products.tile import TALL

RUN = BLOCK * TALL
"""Most slots of a run."""
NUM_RUN_COLUMNS = 3
"""Columns of the table of runs: expert, first slot, number of slots."""
_F, _U = np.float32, np.uint64  # the last is for indices: numba does not test it for negative values
_LEAST = np.float32(-np.inf)
_ALPHA, _LIMIT = np.float32(CLAMP_ALPHA), np.float32(CLAMP_LIMIT)


@inlined
def _to_scores(x: Any, size: Any, is_sigmoid: Any) -> None:
    """Replace `x` `[size]` by its softmax, or each number by its sigmoid."""
    if is_sigmoid != 0:
        for i in range(_U(size)):
            x[i] = _F(1.0) / (_F(1.0) + exp(-x[i]))
        return
    most = x[0]
    for i in range(size):
        most = max(most, x[i])
    total = _F(0.0)
    for i in range(_U(size)):
        x[i] = exp(x[i] - most)
        total += x[i]
    for i in range(_U(size)):
        x[i] /= total


@inlined
def _best(ranked: Any, is_used: Any) -> Any:
    """Return the first of the largest numbers that are not used, and mark it; with NaN, any that is not used."""
    best = -1
    for i in range(ranked.shape[0]):
        if is_used[i] == 0 and (best < 0 or ranked[i] > ranked[best]):
            best = i
    is_used[best] = 1
    return best


@inlined
def _leave_groups(ranked: Any, num_groups: Any, num_chosen: Any, best_of_group: Any) -> None:
    """Set the numbers of all but the best groups to minus infinity."""
    size = ranked.shape[0] // num_groups
    of_groups, is_chosen = np.empty(num_groups, np.float32), np.zeros(num_groups, np.int8)
    for group in range(num_groups):
        first, second = _LEAST, _LEAST
        for i in range(group * size, group * size + size):
            if ranked[i] > first:
                first, second = ranked[i], first
            elif ranked[i] > second:
                second = ranked[i]
        of_groups[group] = first + second if best_of_group == 2 else first
    for _ in range(num_chosen):
        _best(of_groups, is_chosen)
    for i in range(ranked.shape[0]):
        if is_chosen[i // size] == 0:
            ranked[i] = _LEAST


@instruction(blocks_of_rows)
@inlined
def choose(
    logits_at: Any, bias_at: Any, chosen_at: Any, shares_at: Any, num_experts: Any, num_chosen: Any, is_sigmoid: Any,
    scores_chosen_only: Any, num_groups: Any, num_chosen_groups: Any, best_of_group: Any, renormalises: Any,
    epsilon: Real, least_sum: Real, factor: Real, first: First, last: Last,
) -> None:  # fmt: skip
    """Write the experts `chosen` `[T, K] int32` of tokens, the best first, and their `shares` `[T, K]`.

    The outputs of the router are `logits` `[T, N]`, and `bias` `[N]` is added to scores for the choice, if it is not 0.
    Either kind of score is told apart by `is_sigmoid`; `RouterConfig` has the other numbers.
    """
    logits, chosen = floats(logits_at, 0, num_experts), integer_rows(chosen_at, 0, num_chosen)
    shares, bias = floats(shares_at, 0, num_chosen), vector(bias_at, num_experts)
    scores, ranked = np.empty(num_experts, np.float32), np.empty(num_experts, np.float32)
    is_used, own = np.empty(num_experts, np.int8), np.empty(num_chosen, np.float32)
    for row in range(first, last):
        for i in range(_U(num_experts)):
            scores[i] = logits[row, i]
        if scores_chosen_only == 0:
            _to_scores(scores, num_experts, is_sigmoid)
        for i in range(_U(num_experts)):
            ranked[i] = scores[i]
        if bias_at != 0:
            for i in range(_U(num_experts)):
                ranked[i] += bias[i]
        if num_groups > 1:
            _leave_groups(ranked, num_groups, num_chosen_groups, best_of_group)
        is_used[:] = 0
        for k in range(num_chosen):
            best = _best(ranked, is_used)
            chosen[row, k], own[k] = best, scores[best]
        if scores_chosen_only != 0:
            _to_scores(own, num_chosen, is_sigmoid)
        divisor = _F(1.0)
        if renormalises != 0:
            total = _F(0.0)
            for k in range(num_chosen):
                total += own[k]
            divisor = max(total + _F(epsilon), _F(least_sum))
        for k in range(num_chosen):
            shares[row, k] = own[k] / divisor * _F(factor)


@instruction(blocks_of_rows)
@inlined
def scale_chosen(shares_at: Any, chosen_at: Any, factors_at: Any, num_chosen: Any, first: First, last: Last) -> None:
    """Multiply `shares` `[T, K]` of experts `chosen` `[T, K] int32` by the `factors` `[N]` of these experts."""
    shares, chosen = floats(shares_at, 0, num_chosen), integer_rows(chosen_at, 0, num_chosen)
    factors = vector(factors_at, 0)
    for row in range(first, last):
        for k in range(num_chosen):
            shares[row, k] *= factors[chosen[row, k]]


@instruction(one_part)
@inlined
def group(
    chosen_at: Any, places_at: Any, slots_at: Any, runs_at: Any, first_expert: Any, num_experts: Any,
    num_chosen: Any, num_slots_at: Count, num_runs_at: Count, num_rows: NumRows,
) -> None:  # fmt: skip
    """Give every pair of a token and one of the experts here a slot, and cut the slots of each expert into runs.

    Args:
        chosen_at: `[T, K] int32`.
        places_at: `[S] int32`, written: the pair of each slot, t K + k.
        slots_at: `[T, K] int32`, written: the slot of each pair; -1: its expert is not here.
        runs_at: `[R, NUM_RUN_COLUMNS] int32`, written, by expert, the first one that is here being 0.
        first_expert: that one.
        num_experts: N, those that are here.
        num_chosen: K.
        num_slots_at: written: S.
        num_runs_at: written: R.
        num_rows: T.
    """
    total = num_rows * num_chosen
    chosen, places, slots = integers(chosen_at, total), integers(places_at, total), integers(slots_at, total)
    runs = integer_rows(runs_at, 0, NUM_RUN_COLUMNS)
    free = np.zeros(num_experts + 1, np.int64)  # of each expert: at first its slots, then the first one that is free
    for pair in range(total):
        expert = chosen[pair] - first_expert
        if 0 <= expert < num_experts:
            free[expert + 1] += 1
    num_runs, start = 0, 0
    for expert in range(num_experts):
        count = free[expert + 1]
        free[expert] = start
        parts = (count + RUN - 1) // RUN
        for part in range(parts):
            first, last = start + count * part // parts, start + count * (part + 1) // parts
            runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = expert, first, last - first
            num_runs += 1
        start += count
    for pair in range(total):
        expert = chosen[pair] - first_expert
        if 0 <= expert < num_experts:
            slot = free[expert]
            free[expert] = slot + 1
            places[slot], slots[pair] = pair, slot
        else:
            slots[pair] = -1
    longs(num_slots_at, 1)[0], longs(num_runs_at, 1)[0] = start, num_runs


@instruction(blocks_of_rows)
@inlined
def spread(
    x_at: Any, places_at: Any, shares_at: Any, out_at: Any, size: Any, depth: Any, num_chosen: Any, first: First,
    last: Last,
) -> None:  # fmt: skip
    """Copy the row of each slot's token, `size` numbers, to `out` `[S, depth]`, with zeros behind them.

    Args:
        x_at: `[T, size]`.
        places_at: `[S] int32`, see `group`.
        shares_at: `[T, K]`, multiplied with rows; 0: not there.
        out_at: written.
        size: of a row.
        depth: at least `size`.
        num_chosen: K.
        first: first slot.
        last: the one behind the last.
    """
    places, shares = integers(places_at, 0), vector(shares_at, 0)
    for slot in range(first, last):
        pair = np.int64(places[slot])
        x, out = vector(x_at + 4 * (pair // num_chosen) * size, size), vector(out_at + 4 * slot * depth, depth)
        share = shares[pair] if shares_at != 0 else _F(1.0)
        for i in range(_U(size)):
            out[i] = x[i] * share
        for i in range(_U(size), _U(depth)):
            out[i] = _F(0.0)


@instruction(blocks_of_rows)
@inlined
def fill_up(x_at: Any, out_at: Any, size: Any, depth: Any, first: First, last: Last) -> None:
    """Copy `x` `[S, size]` to `out` `[S, depth]`, with zeros behind each row."""
    for slot in range(first, last):
        x, out = vector(x_at + 4 * slot * size, size), vector(out_at + 4 * slot * depth, depth)
        for i in range(_U(size)):
            out[i] = x[i]
        for i in range(_U(size), _U(depth)):
            out[i] = _F(0.0)


@instruction(blocks_of_rows)
@inlined
def collect(
    x_at: Any, slots_at: Any, shares_at: Any, out_at: Any, size: Any, num_chosen: Any, first: First, last: Last
) -> None:
    """Add up the rows of each token's slots, times their shares, in the order in which its experts were chosen.

    A token without slots gets zeros.

    Args:
        x_at: `[S, size]`.
        slots_at: `[T, K] int32`, see `group`.
        shares_at: `[T, K]`; 0: not there.
        out_at: `[T, size]`, written.
        size: of a row.
        num_chosen: K.
        first: first token.
        last: the one behind the last.
    """
    slots, shares = integer_rows(slots_at, 0, num_chosen), floats(shares_at, 0, num_chosen)
    for row in range(first, last):
        out, is_first = vector(out_at + 4 * row * size, size), True
        for k in range(num_chosen):
            slot = np.int64(slots[row, k])
            if slot < 0:
                continue
            x = vector(x_at + 4 * slot * size, size)
            share = shares[row, k] if shares_at != 0 else _F(1.0)
            if is_first:
                for i in range(_U(size)):
                    out[i] = x[i] * share
            else:
                for i in range(_U(size)):
                    out[i] += x[i] * share
            is_first = False
        if is_first:
            for i in range(_U(size)):
                out[i] = _F(0.0)


@instruction(blocks_of_rows)
@inlined
def add_gated(x_at: Any, y_at: Any, gate_at: Any, size: Any, first: First, last: Last) -> None:
    """Add `y` `[T, size]`, times the sigmoid of `gate` `[T]` (0: not there), to `x`."""
    x, y, gates = floats(x_at, 0, size), floats(y_at, 0, size), vector(gate_at, 0)
    for row in range(_U(first), _U(last)):
        share = _F(1.0) / (_F(1.0) + exp(-gates[row])) if gate_at != 0 else _F(1.0)
        for i in range(_U(size)):
            x[row, i] += y[row, i] * share


@instruction(blocks_of_rows)
@inlined
def clamped_mul(gate_up_at: Any, out_at: Any, size: Any, first: First, last: Last) -> None:
    """Write g sigmoid(alpha g) (u + 1), of limited halves g and u of `gate_up` `[S, 2 size]`, to `out`."""
    gate_up, out = floats(gate_up_at, 0, 2 * size), floats(out_at, 0, size)
    size = _U(size)
    for row in range(_U(first), _U(last)):
        for i in range(size):
            gate = min(gate_up[row, i], _LIMIT)
            other = min(max(gate_up[row, size + i], -_LIMIT), _LIMIT)
            out[row, i] = gate / (_F(1.0) + exp(-_ALPHA * gate)) * (other + _F(1.0))


ROUTING = Unit("routing", choose, scale_chosen, group, spread, fill_up, collect, add_gated, clamped_mul)
"""For models with experts."""
