"""What the ranks of a model give each other while they compute, through memory that their processes share.

An exchange goes by pieces of at most `PIECE` elements. A rank writes its piece to its own place, counts its arrival,
waits for the arrivals of all others, and reads theirs. Values are added in the order of ranks, so all ranks get the
same bits, whenever each of them arrives. A thread makes system calls only in a long wait.

A lane is a sequence of pieces that one thread of each rank takes in turn. A lane has two places per rank, which it uses
alternately. A rank that writes to a place again has seen all ranks arrive at the piece in between, so they have read
what was there. All ranks have the same instructions with the same rows, so the counts of a lane agree by themselves.
That holds where rows are divided among ranks too: pieces are those of the rows of all ranks.

Legend: T tokens, R ranks, L lanes.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.instruction import InScope, NumRows, Part, Unit, instruction, one_part
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, Column, cut
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel, strict
from pagewood.engine.runner.cpu.compiled.machine.memory import (
    fetch_add,
    integer_rows,
    integers,
    longs,
    read_shared,
    vector,
    wait_for_rank,
)

NUM_LANES = 16
"""L, the most threads of a rank that exchange at the same time."""
PIECE = 16_384
"""Elements of a place: what a core has in its own cache, and a row of most models."""
LINE = 16
"""int64 of two cache lines, which processors fetch together: every counter has these to itself."""
_U = np.uint64


@inlined
def lanes(num_rows: Any, size: Any) -> Any:
    """Return the parts of an exchange of rows of `size` elements: one for each lane that gets a piece."""
    return min(NUM_LANES, (num_rows * size + PIECE - 1) // PIECE)


@inlined
def place_of(places_at: Any, rank: Any, lane: Any, number: Any) -> Any:
    """Return the address of the place of a rank for a piece of a lane."""
    return places_at + 4 * PIECE * (2 * (rank * NUM_LANES + lane) + number % 2)


@inlined
def size_at(number: Any) -> Any:
    """Return the place in a line of arrivals that has the number of elements of a piece, for those who carry it on."""
    return 1 + number % 2


@inlined
def _number(arrivals_at: Any, rank: Any, lane: Any) -> Any:
    """Return the number of the next piece that a rank gives in a lane."""
    return read_shared(longs(arrivals_at, 0), LINE * (rank * NUM_LANES + lane))


@inlined
def _arrive(number: Any, num: Any, rank: Any, count: Any, arrivals_at: Any, ended_at: Any, lane: Any) -> Any:
    """Say that the piece of this rank, of `num` elements, is in its place, and wait for all others.

    Returns:
        False if the group has ended.
    """
    arrivals, own = longs(arrivals_at, 0), LINE * (rank * NUM_LANES + lane)
    arrivals[_U(own + size_at(number))] = num
    fetch_add(arrivals, own, 1)
    for other in range(count):
        if other != rank and not wait_for_rank(
            arrivals, LINE * (other * NUM_LANES + lane), number + 1, longs(ended_at, 1)
        ):
            return False
    return True


@inlined
def _copy(x_at: Any, out_at: Any, num: Any) -> None:
    """Copy `num` elements."""
    x, out = vector(x_at, num), vector(out_at, num)
    for i in range(_U(num)):
        out[i] = x[i]


@inlined
def _meet(
    x_at: Any, num: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any, ended_at: Any, lane: Any
) -> Any:
    """Give `num` elements to all ranks and wait for theirs; return the number of the piece; -1: the group has ended."""
    number = _number(arrivals_at, rank, lane)
    _copy(x_at, place_of(places_at, rank, lane, number), num)
    return number if _arrive(number, num, rank, count, arrivals_at, ended_at, lane) else -1


@strict
def _add(a_at: Any, b_at: Any, out_at: Any, num: Any) -> None:
    """Write a + b to `out`, `[num]` each; `out` may be one of them."""
    a, b, out = vector(a_at, num), vector(b_at, num), vector(out_at, num)
    for i in range(_U(num)):
        out[i] = a[i] + b[i]


@instruction(lanes)
@inlined
def sum_ranks(
    x_at: Any, size: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any, ended_at: Any,
    num_rows: NumRows, part: Part,
) -> None:  # fmt: skip
    """Replace `x` `[T, size]` by its sum over the ranks, added in their order.

    If the group has ended, nothing is waited for, and the result has no meaning.

    Args:
        x_at: of this rank.
        size: of a row.
        rank: this one.
        count: R, at least 2.
        places_at: `[R, L, 2, PIECE]`.
        arrivals_at: `[R, L, LINE] int64`, how many pieces a rank has given in a lane, in the first of each line; then
            the elements of the last two of them.
        ended_at: `[1] int64`, other than 0 when the group has ended.
        num_rows: T.
        part: the lane.
    """
    start, end = part * PIECE, num_rows * size
    while start < end:
        num, own_at = min(PIECE, end - start), x_at + 4 * start
        number = _meet(own_at, num, rank, count, places_at, arrivals_at, ended_at, part)
        if number < 0:
            break
        _add(place_of(places_at, 0, part, number), place_of(places_at, 1, part, number), own_at, num)
        for other in range(2, count):
            _add(own_at, place_of(places_at, other, part, number), own_at, num)
        start += NUM_LANES * PIECE


@instruction(lanes)
@inlined
def gather_ranks(
    x_at: Any, out_at: Any, size: Any, out_size: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any,
    ended_at: Any, num_rows: NumRows, part: Part,
) -> None:  # fmt: skip
    """Write the columns `x` `[T, size]` of all ranks side by side to `out` `[T, out_size]`; see `sum_ranks`.

    The last of the R times `size` columns are left out if there are more than `out_size`.
    """
    start, end = part * PIECE, num_rows * size
    while start < end:
        num = min(PIECE, end - start)
        number = _meet(x_at + 4 * start, num, rank, count, places_at, arrivals_at, ended_at, part)
        if number < 0:
            break
        for other in range(count):
            place, at = vector(place_of(places_at, other, part, number), num), 0
            while at < num:
                row, column = (start + at) // size, (start + at) % size
                width = min(size - column, num - at)
                first = other * size + column
                out = vector(out_at + 4 * (row * out_size + first), width)
                for i in range(_U(max(0, min(width, out_size - first)))):
                    out[i] = place[_U(at) + i]
                at += width
        start += NUM_LANES * PIECE


@instruction(lanes)
@inlined
def gather_rows(
    x_at: Any, owners_at: Any, out_at: Any, size: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any,
    ended_at: Any, num_rows: NumRows, part: Part,
) -> None:  # fmt: skip
    """Write the rows of all ranks to `out` `[T, size]`; `x` `[own rows, size]` are those of this rank.

    Args:
        x_at: of this rank, which may have no row; it takes part in all pieces nevertheless.
        owners_at: `[T, 2] int32`, the rank that has each row, and the number of the row among those of its rank.
        out_at: see above.
        size: of a row.
        rank: see `sum_ranks`, also for the rest.
        count: R.
        places_at: of pieces.
        arrivals_at: counters.
        ended_at: whether the group has ended.
        num_rows: T.
        part: the lane.
    """
    owners = integer_rows(owners_at, 0, 2)
    start, end = part * PIECE, num_rows * size
    while start < end:
        num, number, at = min(PIECE, end - start), _number(arrivals_at, rank, part), 0
        while at < num:
            row, column = (start + at) // size, (start + at) % size
            width = min(size - column, num - at)
            if owners[row, 0] == rank:
                own_at = x_at + 4 * (owners[row, 1] * size + column)
                _copy(own_at, place_of(places_at, rank, part, number) + 4 * at, width)
                _copy(own_at, out_at + 4 * (start + at), width)
            at += width
        if not _arrive(number, num, rank, count, arrivals_at, ended_at, part):
            break
        at = 0
        while at < num:
            row, column = (start + at) // size, (start + at) % size
            width = min(size - column, num - at)
            if owners[row, 0] != rank:
                _copy(place_of(places_at, owners[row, 0], part, number) + 4 * at, out_at + 4 * (start + at), width)
            at += width
        start += NUM_LANES * PIECE


@instruction(lanes)
@inlined
def sum_rows(
    x_at: Any, owners_at: Any, out_at: Any, size: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any,
    ended_at: Any, num_rows: NumRows, part: Part,
) -> None:  # fmt: skip
    """Write the sums over ranks of the rows of this rank to `out` `[own rows, size]`; `x` `[T, size]` are parts.

    A sum is added in the order of the ranks, whichever of them has the row. For the arguments see `gather_rows`.
    """
    owners = integer_rows(owners_at, 0, 2)
    start, end = part * PIECE, num_rows * size
    while start < end:
        num = min(PIECE, end - start)
        number = _meet(x_at + 4 * start, num, rank, count, places_at, arrivals_at, ended_at, part)
        if number < 0:
            break
        at = 0
        while at < num:
            row, column = (start + at) // size, (start + at) % size
            width = min(size - column, num - at)
            if owners[row, 0] == rank:
                own_at = out_at + 4 * (owners[row, 1] * size + column)
                first, second = place_of(places_at, 0, part, number), place_of(places_at, 1, part, number)
                _add(first + 4 * at, second + 4 * at, own_at, width)
                for other in range(2, count):
                    _add(own_at, place_of(places_at, other, part, number) + 4 * at, own_at, width)
            at += width
        start += NUM_LANES * PIECE


@inlined
def _divide_kept(whole: Any, part: Any, num_kept: Any, rank: Any, count: Any) -> Any:
    """Divide the kept tokens of a scope among ranks; return how many this rank has. For the rest see `divide`."""
    kept, own_kept = integers(whole[Column.WANTED], 0), integers(part[Column.WANTED], 0)
    owners, kept_owners = integer_rows(part[Column.OWNERS], 0, 2), integer_rows(part[Column.KEPT_OWNERS], 0, 2)
    kept_places, nums = integers(part[Column.KEPT_PLACES], 0), np.zeros(count, np.int32)
    for k in range(num_kept):
        owner, number = owners[kept[k], 0], nums[owners[kept[k], 0]]
        kept_owners[k, 0], kept_owners[k, 1] = owner, number
        if owner == rank:
            kept_places[number], own_kept[number] = k, owners[kept[k], 1]
        nums[owner] += 1
    return nums[rank]


@inlined
def _own_place(place: Any, num_states: Any) -> Any:
    """Return the number of a place of states in the memory of its rank; below 0: no place."""
    return place if place < 0 else place % num_states


@kernel("void(i8[:,::1], i8[::1], i8, i8, i8, i8, i8, i8)")
def divide(
    scopes: Any, counts: Any, whole_index: Any, index: Any, num_pages: Any, num_states: Any, rank: Any, count: Any
) -> None:
    """Fill the scope of the tokens that this rank has, from that of the tokens of all ranks, which is laid out.

    Args:
        scopes: `[scopes, NUM_SCOPE_COLUMNS]`, changed.
        counts: `[scopes * NUM_KINDS]`, changed: the numbers of rows of the rank's scope. None of its tokens are wanted.
        whole_index: the scope of all ranks, whose page table has the ids of all pages.
        index: the scope of this rank, which has memory for as many rows.
        num_pages: pages of each rank; a row belongs to the rank of its first page.
        num_states: places of states of each rank, if the scopes have tables of them.
        rank: this one.
        count: R.
    """
    whole, part = scopes[whole_index], scopes[index]
    states, saves = integers(whole[Column.STATES], 0), integers(whole[Column.SAVES], 0)
    own_states, own_saves = integers(part[Column.STATES], 0), integers(part[Column.SAVES], 0)
    num_grants, half = whole[Column.NUM_GRANTS], whole[Column.HALF]
    table, width = whole[Column.PAGE_TABLE], whole[Column.PAGES_PER_ROW]
    rows, starts, offsets = (
        integers(whole[Column.ROWS], 0), integers(whole[Column.STARTS], 0), integers(whole[Column.OFFSETS], 0)
    )  # fmt: skip
    own_rows, own_starts, own_offsets = (
        integers(part[Column.ROWS], 0), integers(part[Column.STARTS], 0), integers(part[Column.OFFSETS], 0)
    )  # fmt: skip
    owners, places = integer_rows(part[Column.OWNERS], 0, 2), integers(part[Column.PLACES], 0)
    own_nums, numbers = np.empty(num_grants, np.int32), np.full(num_grants, -1, np.int32)
    n, nums = 0, np.zeros(count, np.int32)
    for g in range(num_grants):
        owner = integers(table + 4 * np.int64(rows[g]) * width, 1)[0] // num_pages
        if owner == rank:
            own_rows[n], own_starts[n], own_offsets[n] = rows[g], starts[g], nums[rank]
            own_nums[n], numbers[g] = offsets[g + 1] - offsets[g], n
            if whole[Column.BEGINS] != 0:
                integers(part[Column.BEGINS], 0)[n] = integers(whole[Column.BEGINS], 0)[g]
            if whole[Column.STATES] != 0:
                own_states[2 * n] = _own_place(states[2 * g], num_states)
                own_states[2 * n + 1] = _own_place(states[2 * g + 1], num_states)
            n += 1
        for token in range(offsets[g], offsets[g + 1]):
            owners[token, 0], owners[token, 1] = owner, nums[owner]
            if owner == rank:
                places[nums[rank]] = token
                if whole[Column.STATES] != 0:
                    own_saves[nums[rank]] = _own_place(saves[token], num_states)
            nums[owner] += 1
    own_offsets[n] = nums[rank]
    for column in (Column.COSINES, Column.SINES):
        for i in range(nums[rank]):
            _copy(whole[column] + 4 * half * places[i], part[column] + 4 * half * i, half)
    m, sampled, own_sampled = 0, integers(whole[Column.SAMPLED], 0), integers(part[Column.SAMPLED], 0)
    for s in range(whole[Column.NUM_SAMPLED]):
        if numbers[sampled[s]] >= 0:
            own_sampled[m] = numbers[sampled[s]]
            m += 1
    num_kept = _divide_kept(whole, part, counts[whole_index * NUM_KINDS + 3], rank, count)
    at = index * NUM_KINDS
    counts[at], counts[at + 1], counts[at + 2], counts[at + 3] = nums[rank], 0, m, num_kept
    part[Column.NUM_GRANTS], part[Column.NUM_SAMPLED], part[Column.LONGEST] = n, m, whole[Column.LONGEST]
    part[Column.NUM_ITEMS] = cut(
        own_nums[:n], part[Column.NUM_KV_HEADS], part[Column.TILE], integer_rows(part[Column.ITEMS], 0, 4)
    )


@instruction(one_part)
@inlined
def divide_kept(whole: InScope, scope: InScope, rank: Any, count: Any, num_rows: NumRows) -> None:
    """Divide the kept tokens of `whole` again, whose tokens have become others of the same grants; see `divide`."""
    _divide_kept(whole, scope, num_rows, rank, count)


@kernel("void(i4[::1], i4[::1], i8, i8, i8, i8, i8)", is_long=True)
def gather_values(
    values: Any, owners: Any, rank: Any, count: Any, places_at: Any, arrivals_at: Any, ended_at: Any
) -> None:
    """Replace `values` `[n]` that other ranks have by theirs, on the host, while no program runs.

    If the group has ended, nothing is waited for, and those that have not come stay as they are.

    Args:
        values: of which this rank has its own, changed.
        owners: `[n]`, the rank that has each.
        rank: see `sum_ranks`, also for the rest.
        count: R.
        places_at: of pieces.
        arrivals_at: counters.
        ended_at: whether the group has ended.
    """
    for start in range(0, values.shape[0], PIECE):
        num = min(PIECE, values.shape[0] - start)
        number = _meet(values[start:].ctypes.data, num, rank, count, places_at, arrivals_at, ended_at, 0)
        if number < 0:
            break
        for i in range(num):
            owner = owners[start + i]
            if owner != rank:
                values[start + i] = integers(place_of(places_at, owner, 0, number), num)[i]


@instruction(one_part)
@inlined
def witness(x_at: Any, size: Any, out_at: Any, num_rows: NumRows) -> None:
    """Add the sum of the bits of `x` `[T, size]`, read as int32, to `out` `[1] int64`."""
    bits, out, total = integers(x_at, 0), longs(out_at, 1), np.int64(0)
    for i in range(_U(num_rows * size)):
        total += np.int64(bits[i])
    out[0] += total


EXCHANGE = Unit("exchange", sum_ranks, gather_ranks, witness)
"""For models that are divided among ranks."""
ROW_EXCHANGE = Unit("row_exchange", gather_rows, sum_rows, divide_kept)
"""For those whose rows are divided too."""


@kernel("b1(i8[::1], i8, i8, i8[::1])", is_long=True)
def wait_for_all(counters: Any, count: Any, wanted: Any, ended: Any) -> Any:
    """Wait until the counters of all ranks are at least `wanted`; return False if the group ends before that.

    Args:
        counters: `[R, LINE]` flat, the first of each line.
        count: R.
        wanted: what each must reach.
        ended: `[>= 1]`, other than 0 when the group has ended.
    """
    for rank in range(count):  # noqa: SIM110 (numba compiles no generators)
        if not wait_for_rank(counters, LINE * rank, wanted, ended):
            return False
    return True


@kernel("void(i8[::1], i8)")
def count_step(counters: Any, rank: Any) -> None:
    """Add 1 to the counter of a rank, `[R, LINE]` flat; who sees it also sees what was written before."""
    fetch_add(counters, LINE * rank, 1)
