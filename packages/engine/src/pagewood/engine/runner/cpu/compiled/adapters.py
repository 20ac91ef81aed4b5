"""What adapters add to projections: rows grouped by adapter, times A (shrink), times B (expand).

The rows of a step have any mix of adapters, and of none. They are grouped by the slot of their adapter, and the slots'
rows are cut into runs; rows without an adapter are in no run, and nothing touches them. Both products go through the
tiles of other products, so the sum of a row has one order whatever rows lie beside it.

A projection may consist of several modules with the same inputs, one below the other (its components), of which an
adapter changes some. The matrices A of an adapter lie below each other and are multiplied together.

Every expert has projections of its own, which are neighbours in the table. The rows of experts, by expert already, are
grouped by slot within an expert; a run is then of one slot and one expert.

Legend: T rows, K inputs, N outputs, C components, R columns of all A of a slot (a multiple of 16), Z most of them.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import (
    Count,
    InScope,
    NumRows,
    Part,
    Unit,
    instruction,
    one_part,
    single_rows,
)
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integer_rows, integers, longs, shorts, vector
from pagewood.engine.runner.cpu.compiled.products.matmul import BLOCK
from pagewood.engine.runner.cpu.compiled.products.tile import (
    LOW,
    NARROW,
    TALL,
    WIDTH,
    multiply_narrow,
    multiply_narrow_by_half,
    multiply_rows,
    multiply_rows_by_half,
)

MOST_COMPONENTS = 3
"""C is at most this: queries, keys and values."""
PANELS = 16
"""Panels of outputs that a part of an expansion computes: less work than that takes a thread less than a claim."""
RUN = BLOCK * TALL
"""Most rows of a run."""
NUM_RUN_COLUMNS = 3
"""Columns of the table of runs: the row of projection 0 in the table of slots, first place in the order, their number.
Projection p has that row + p; where rows are those of experts, projection 0 is one of the first expert."""
_U = np.uint64


class SiteColumn(IntEnum):
    """A column of what a slot says of a projection."""

    SHRINK = 0
    """Address of the panels of all A, `[K, 32]` each, the last of them narrow, `[K, 16]`, if R is no multiple of 32;
    or of an embedding's transposed A `[K, R]`; 0: the adapter does not change this projection."""
    SIZE = 1
    """R."""
    IS_HALF = 2
    """1: the panels are bfloat16, as uint16; 0: float32."""
    COMPONENTS = 3
    """The first of `ComponentColumn` of the first component; those of the others follow."""


class ComponentColumn(IntEnum):
    """A column of what a slot says of a component with N outputs."""

    EXPAND = 0
    """Address of `[N / 32, rank, 32]`, the panels of B, scaled; 0: no product is added."""
    FIRST = 1
    """Which of the R columns is the first of its own A."""
    RANK = 2
    FACTORS = 3
    """Address of `[N]`, which multiply what the model computes; 0: ones."""
    BIAS = 4
    """Address of `[N]`, added; 0: zeros."""
    IS_HALF = 5
    """As `SiteColumn.IS_HALF`, of the panels of B."""


NUM_COMPONENT_COLUMNS = len(ComponentColumn)
NUM_SITE_COLUMNS = SiteColumn.COMPONENTS + MOST_COMPONENTS * NUM_COMPONENT_COLUMNS


@inlined
def _group(slots: Any, first: Any, last: Any, free: Any, num_sites: Any, entry: Any, order: Any, start: Any, runs: Any,
           num_runs: Any) -> Any:  # fmt: skip
    """Write the rows in [first, last) with one of the `slots` `[T]` to `order` from `start` on, by slot, and the runs.

    The table has `num_sites` rows of a slot; `entry` is added to the row of each run. `free` `[slots + 1]` is changed.
    Return the ends of what `order` and `runs` hold.
    """
    free[:] = 0  # of each slot: at first its rows, then the first place that is free
    for place in range(first, last):
        if slots[place] >= 0:
            free[slots[place] + 1] += 1
    for slot in range(free.shape[0] - 1):
        count = free[slot + 1]
        free[slot] = start
        parts = (count + RUN - 1) // RUN
        for part in range(parts):
            begin, end = start + count * part // parts, start + count * (part + 1) // parts
            runs[num_runs, 0], runs[num_runs, 1], runs[num_runs, 2] = slot * num_sites + entry, begin, end - begin
            num_runs += 1
        start += count
    for place in range(first, last):
        if slots[place] >= 0:
            order[free[slots[place]]] = place
            free[slots[place]] += 1
    return start, num_runs


@instruction(one_part)
@inlined
def group_tokens(
    scope: InScope, row_slots_at: Any, row_starts_at: Any, slots_at: Any, order_at: Any, runs_at: Any,
    num_slots: Any, num_sites: Any, num_runs_at: Count, num_rows: NumRows,
) -> None:  # fmt: skip
    """Group the tokens of a scope by the slot of their request.

    Args:
        scope: of the tokens.
        row_slots_at: `[rows of the runner] int32`, the slot of each request's adapter; -1: it has none.
        row_starts_at: `[rows of the runner] int32`, the first position that the adapter computes.
        slots_at: `[T] int32`, written: the slot of each token; -1: the model alone computes it.
        order_at: `[T] int32`, written: the tokens with a slot, by slot.
        runs_at: `[T, NUM_RUN_COLUMNS] int32`, written.
        num_slots: slots are below it.
        num_sites: of the model.
        num_runs_at: written.
        num_rows: T.
    """
    row_slots, row_starts, slots = integers(row_slots_at, 0), integers(row_starts_at, 0), integers(slots_at, num_rows)
    rows, offsets = integers(scope[Column.ROWS], 0), integers(scope[Column.OFFSETS], 0)
    starts = integers(scope[Column.STARTS], 0)
    for grant in range(scope[Column.NUM_GRANTS]):
        slot, first = row_slots[rows[grant]], offsets[grant] + row_starts[rows[grant]] - starts[grant]
        for token in range(offsets[grant], offsets[grant + 1]):
            slots[token] = slot if token >= first else -1
    runs = integer_rows(runs_at, num_rows, NUM_RUN_COLUMNS)
    order, free = integers(order_at, num_rows), np.empty(num_slots + 1, np.int64)
    _, num_runs = _group(slots, 0, num_rows, free, num_sites, 0, order, 0, runs, 0)
    longs(num_runs_at, 1)[0] = num_runs


@instruction(one_part)
@inlined
def group_kept(
    scope: InScope, slots_at: Any, kept_slots_at: Any, order_at: Any, runs_at: Any, num_slots: Any,
    num_sites: Any, num_runs_at: Count, num_rows: NumRows,
) -> None:  # fmt: skip
    """Like `group_tokens`, for the kept tokens of a scope, or for the wanted ones, which are the first of these.

    `slots` `[tokens] int32` are those of all tokens.
    """
    slots, kept_slots, kept = (
        integers(slots_at, 0),
        integers(kept_slots_at, num_rows),
        integers(scope[Column.WANTED], 0),
    )
    for row in range(num_rows):
        kept_slots[row] = slots[kept[row]]
    runs = integer_rows(runs_at, num_rows, NUM_RUN_COLUMNS)
    order, free = integers(order_at, num_rows), np.empty(num_slots + 1, np.int64)
    _, num_runs = _group(kept_slots, 0, num_rows, free, num_sites, 0, order, 0, runs, 0)
    longs(num_runs_at, 1)[0] = num_runs


@inlined
def _changes(table_at: Any, entry: Any) -> Any:
    """Whether an adapter changes the projection of a row of the table."""
    own = longs(table_at + 8 * NUM_SITE_COLUMNS * entry, NUM_SITE_COLUMNS)
    bits = np.int64(0)
    for column in range(NUM_SITE_COLUMNS):
        bits |= own[column]
    return bits != 0


@instruction(one_part)
@inlined
def group_experts(
    table_at: Any, gate_up: Any, down: Any, token_slots_at: Any, places_at: Any, expert_runs_at: Any, slots_at: Any,
    order_at: Any, runs_at: Any, num_slots: Any, num_sites: Any, num_chosen: Any, num_runs_at: Count,
    num_rows: NumRows,
) -> None:  # fmt: skip
    """Group the rows of experts by the slot of their request, those of each expert by themselves.

    Rows whose adapter changes nothing of their expert are in no run. The rows of this instruction are the runs of all
    experts, `expert_runs`; for `places` and `num_chosen` see `experts.route.group`.

    Args:
        table_at: see `shrink`.
        gate_up: number of the first expert's first projection; those of the others follow.
        down: the same of its second.
        token_slots_at: `[tokens] int32`, the slot of each token; -1: none.
        places_at: see above.
        expert_runs_at: see above.
        slots_at: `[S] int32`, written: the slot of each row of an expert; -1: none that changes it.
        order_at: see `group_tokens`, also for the next four.
        runs_at: written.
        num_slots: slots are below it.
        num_sites: of the model.
        num_chosen: see above.
        num_runs_at: written.
        num_rows: expert runs.
    """
    token_slots, places, slots = integers(token_slots_at, 0), integers(places_at, 0), integers(slots_at, 0)
    expert_runs, runs = integer_rows(expert_runs_at, num_rows, 3), integer_rows(runs_at, 0, NUM_RUN_COLUMNS)
    order, free = integers(order_at, 0), np.empty(num_slots + 1, np.int64)
    start, num_runs = 0, 0
    for number in range(num_rows):
        expert, first = np.int64(expert_runs[number, 0]), np.int64(expert_runs[number, 1])
        last = first + expert_runs[number, 2]
        known, is_changed = np.int64(-1), False  # the slot of the row before, and whether it changes the expert
        for place in range(first, last):
            slot = np.int64(token_slots[places[place] // num_chosen])
            if slot >= 0 and slot != known:
                entry, known = slot * num_sites + expert, slot
                is_changed = _changes(table_at, entry + gate_up) or _changes(table_at, entry + down)
            slots[place] = slot if slot >= 0 and is_changed else -1
        start, num_runs = _group(slots, first, last, free, num_sites, expert, order, start, runs, num_runs)
    longs(num_runs_at, 1)[0] = num_runs


@inlined
def _num_shrunk(num_rows: Any, most: Any) -> Any:
    return num_rows * (most // WIDTH)


@instruction(_num_shrunk)
@strict
def shrink(
    table_at: Any, site: Any, order_at: Any, runs_at: Any, x_at: Any, out_at: Any, x_size: Any, size: Any, most: Any,
    part: Part,
) -> None:  # fmt: skip
    """Write one panel of `out` `[T, Z]` for one run: its rows of `x`, in the order of the groups, times A.

    Args:
        table_at: `[rows, NUM_SITE_COLUMNS] int64`, those of a slot below each other; see `NUM_RUN_COLUMNS`.
        site: which projection.
        order_at: see `group_tokens`; the same for `runs_at`.
        runs_at: the rows of this instruction.
        x_at: `[T, x_size]`, the input of the projection.
        out_at: written, in the order of the groups.
        x_size: at least K.
        size: K.
        most: Z.
        part: which, run by run.
    """
    runs, panel = integer_rows(runs_at, 0, NUM_RUN_COLUMNS), part % (most // WIDTH)
    run = part // (most // WIDTH)
    entry, first, count = np.int64(runs[run, 0]), np.int64(runs[run, 1]), np.int64(runs[run, 2])
    own = longs(table_at + 8 * NUM_SITE_COLUMNS * (entry + site), NUM_SITE_COLUMNS)
    if own[SiteColumn.SHRINK] == 0 or panel * WIDTH >= own[SiteColumn.SIZE]:
        return
    order, x, out = integers(order_at, 0), vector(x_at, 0), vector(out_at, 0)
    panels, halves = vector(own[SiteColumn.SHRINK], 0), shorts(own[SiteColumn.SHRINK], 0)
    is_half, is_narrow = own[SiteColumn.IS_HALF] != 0, own[SiteColumn.SIZE] - panel * WIDTH == NARROW
    gathered, panel_at, zeros = np.empty(LOW * size, np.float32), panel * size * WIDTH, np.zeros(WIDTH, np.float32)
    num = (count + LOW - 1) // LOW
    for one in range(num):
        begin, end = first + count * one // num, first + count * (one + 1) // num
        count_here, at = end - begin, begin * most + panel * WIDTH
        rows, row_at, stride = x, np.int64(order[begin]) * x_size, np.int64(x_size)
        if order[end - 1] - order[begin] != end - 1 - begin:  # no neighbours, which are read where they are
            for place in range(begin, end):
                source = np.int64(order[place]) * x_size
                for i in range(_U(size)):
                    gathered[_U((place - begin) * size) + i] = x[_U(source) + i]
            rows, row_at, stride = gathered, np.int64(0), np.int64(size)
        if is_half and is_narrow:
            multiply_narrow_by_half(
                count_here, rows, row_at, stride, halves, panel_at, size, zeros, 0, out, at, most, panel_at, 0
            )
        elif is_half:
            multiply_rows_by_half(
                count_here, rows, row_at, stride, halves, panel_at, size, zeros, 0, out, at, most, panel_at, 0
            )
        elif is_narrow:
            multiply_narrow(
                count_here, rows, row_at, stride, panels, panel_at, size, zeros, 0, out, at, most, panel_at, 0
            )
        else:
            multiply_rows(
                count_here, rows, row_at, stride, panels, panel_at, size, zeros, 0, out, at, most, panel_at, 0
            )


@instruction(single_rows)
@strict
def pick(
    table_at: Any, site: Any, order_at: Any, runs_at: Any, tokens_at: Any, out_at: Any, most: Any,
    part: Part,
) -> None:  # fmt: skip
    """Do for an embedding what `shrink` does for a projection: write the rows of the transposed A of one run's tokens.

    Args:
        table_at: see `shrink`, also for the next three.
        site: which embedding.
        order_at: rows by slot.
        runs_at: the rows of this instruction.
        tokens_at: `[T] int32`, ids, below K.
        out_at: `[T, Z]`, written, in the order of the groups.
        most: Z.
        part: which run.
    """
    runs = integer_rows(runs_at, 0, NUM_RUN_COLUMNS)
    entry, first, count = np.int64(runs[part, 0]), np.int64(runs[part, 1]), np.int64(runs[part, 2])
    own = longs(table_at + 8 * NUM_SITE_COLUMNS * (entry + site), NUM_SITE_COLUMNS)
    if own[SiteColumn.SHRINK] == 0:
        return
    order, tokens, out, size = integers(order_at, 0), integers(tokens_at, 0), vector(out_at, 0), own[SiteColumn.SIZE]
    rows = vector(own[SiteColumn.SHRINK], 0)
    for place in range(first, first + count):
        source = np.int64(tokens[order[place]]) * size
        for i in range(size):
            out[place * most + i] = rows[source + i]


@inlined
def _num_expanded(num_rows: Any, num_panels: Any) -> Any:
    return num_rows * ((num_panels + PANELS - 1) // PANELS)


@instruction(_num_expanded)
@strict
def expand(
    table_at: Any, site: Any, order_at: Any, runs_at: Any, x_at: Any, out_at: Any, sizes_at: Any, num_panels: Any,
    size: Any, most: Any, part: Part,
) -> None:  # fmt: skip
    """Add to some panels of `out` `[T, N]`, for the rows of one run, what their adapter adds.

    Args:
        table_at: see `shrink`, also for the next three.
        site: which projection.
        order_at: rows by slot.
        runs_at: the rows of this instruction.
        x_at: `[T, Z]`, the result of `shrink`.
        out_at: `[T, N]`, what the model itself computes; changed.
        sizes_at: `[C] int64`, outputs of each component.
        num_panels: of all components; each begins with a panel of its own.
        size: N.
        most: Z.
        part: which, run by run.
    """
    runs, of_run = integer_rows(runs_at, 0, NUM_RUN_COLUMNS), (num_panels + PANELS - 1) // PANELS
    run, start = part // of_run, part % of_run * PANELS
    entry, first, count = np.int64(runs[run, 0]), np.int64(runs[run, 1]), np.int64(runs[run, 2])
    own = longs(table_at + 8 * NUM_SITE_COLUMNS * (entry + site), NUM_SITE_COLUMNS)
    order, x, sizes, out = integers(order_at, 0), vector(x_at, 0), longs(sizes_at, 0), floats(out_at, 0, size)
    zeros, added = np.zeros(WIDTH, np.float32), np.empty(LOW * WIDTH, np.float32)
    num = (count + LOW - 1) // LOW
    component, base, column = 0, 0, 0  # the component of a panel, its first panel, and its first output
    for panel in range(start, min(start + PANELS, num_panels)):
        while panel - base >= (sizes[component] + WIDTH - 1) // WIDTH:
            base += (sizes[component] + WIDTH - 1) // WIDTH
            column += sizes[component]
            component += 1
        at = SiteColumn.COMPONENTS + component * NUM_COMPONENT_COLUMNS
        weights_at, rank = own[at + ComponentColumn.EXPAND], own[at + ComponentColumn.RANK]
        factors_at, bias_at = own[at + ComponentColumn.FACTORS], own[at + ComponentColumn.BIAS]
        if weights_at == 0 and factors_at == 0 and bias_at == 0:
            continue
        inside = (panel - base) * WIDTH
        width = min(WIDTH, sizes[component] - inside)
        weights, factors, bias = vector(weights_at, 0), vector(factors_at, 0), vector(bias_at, 0)
        halves, is_half = shorts(weights_at, 0), own[at + ComponentColumn.IS_HALF] != 0
        for one in range(num):
            begin, end = first + count * one // num, first + count * (one + 1) // num
            x_place = begin * most + own[at + ComponentColumn.FIRST]
            if weights_at != 0 and is_half:
                multiply_rows_by_half(
                    end - begin, x, x_place, most, halves, inside * rank, rank, zeros, 0, added, 0, WIDTH,
                    inside * rank, 0,
                )  # fmt: skip
            elif weights_at != 0:
                multiply_rows(
                    end - begin, x, x_place, most, weights, inside * rank, rank, zeros, 0, added, 0, WIDTH,
                    inside * rank, 0,
                )  # fmt: skip
            else:
                for i in range(_U(LOW * WIDTH)):
                    added[i] = np.float32(0.0)
            for place in range(begin, end):
                row = order[place]
                for j in range(width):
                    own_value = out[row, column + inside + j]
                    if factors_at != 0:
                        own_value *= factors[inside + j]
                    own_value += added[(place - begin) * WIDTH + j]
                    if bias_at != 0:
                        own_value += bias[inside + j]
                    out[row, column + inside + j] = own_value


ADAPTERS = Unit("adapters", group_tokens, group_kept, group_experts, shrink, pick, expand)
"""For models to whose projections adapters may add."""
