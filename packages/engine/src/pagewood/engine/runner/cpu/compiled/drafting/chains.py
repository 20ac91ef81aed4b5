"""Planning the chains that a model drafts in a step, and laying out the passes that compute them.

Legend: G grants of a step, S sampled grants, P passes that draft.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np

from pagewood.engine.core.messages.sampling_table import NUM_SAMPLING_COLUMNS
from pagewood.engine.runner.cpu.compiled.drafting.passes import adjust_scope, follow
from pagewood.engine.runner.cpu.compiled.layout import NUM_KINDS, Column, Outcome, lay_out_scope
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import integers


class Entry(IntEnum):
    """A column of a table of entries. An entry is a row for which a drafter computes something in a step."""

    ROW = 0
    SAMPLED = 1
    """Which of the sampled grants it belongs to."""
    START = 2
    """First position that the first pass computes."""
    COUNT = 3
    """How many positions the first pass computes."""
    NUM_DRAFTS = 4
    """How many tokens are drafted."""


class Tally(IntEnum):
    """A number of `DraftCounts`."""

    READY = 0
    REBUILT = 1
    POSTPONED = 2
    SHORT = 3


@inlined
def _enter(entries: Any, n: Any, row: Any, s: Any, start: Any, count: Any, num_drafts: Any) -> None:
    entries[n, Entry.ROW], entries[n, Entry.SAMPLED], entries[n, Entry.START] = row, s, start
    entries[n, Entry.COUNT], entries[n, Entry.NUM_DRAFTS] = count, num_drafts


@kernel(
    "i8(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i4[:,::1], i8[::1], i8, i4[::1], i8[::1], i4[::1], "
    "i8[::1], i4[::1], i8, i8, i4[:,::1], i8[::1])"
)
def plan_model(
    rows: Any, nums: Any, sampled: Any, promised: Any, lengths: Any, tokens: Any, pages: Any, tags: Any,
    page_size: Any, positions: Any, chains: Any, begins: Any, work: Any, last: Any, max_rebuilt: Any, follows: Any,
    entries: Any, tally: Any,
) -> Any:  # fmt: skip
    """Plan the passes of a draft model; return the number of entries, one for each grant that promises more tokens.

    The first pass computes a row's positions whose slots are not valid, and its last known token. A row that lacks too
    many of them gets no drafts until it has caught up.

    Args:
        rows: `[G]`, row of each grant.
        nums: `[G]`, tokens of each grant; set to 1 for those that get no drafts.
        sampled: `[S]`.
        promised: `[S]`.
        lengths: `[rows]`, how many tokens of each row are known.
        tokens: this and the next six: see `follow`.
        pages: `[rows, pages of a row]`.
        tags: `[pages * page_size]`.
        page_size: slots of a page.
        positions: `[rows]`.
        chains: `[rows]`.
        begins: `[rows]`.
        work: `[rows]`, written: the hash from which the program tags slots.
        last: `[rows]`, first position that each row had not computed when it was planned last; advanced.
        max_rebuilt: most positions that are computed again in a step.
        follows: 0 if `follow_rows` has followed the rows.
        entries: `[>= S, columns of Entry]`, written.
        tally: by `Tally`, increased.
    """
    n = 0
    for s in range(sampled.shape[0]):
        if promised[s] <= 1:
            continue
        g = sampled[s]
        row = rows[g]
        end = np.int64(lengths[row]) - 1
        if follows != 0:
            follow(row, end, tokens, pages, tags, page_size, positions, chains, begins, 0)
        work[row] = chains[row]
        start = np.int64(positions[row])
        missing = end - start
        # A row that accepted all of its drafts lacks the last of them: no pass has computed it.
        expected = min(missing, 1) if last[row] == start else 0
        count = missing + 1
        if missing > max_rebuilt:
            nums[g], count = 1, max_rebuilt
            tally[Tally.POSTPONED] += 1
            tally[Tally.REBUILT] += max_rebuilt - expected
        else:
            tally[Tally.REBUILT] += missing - expected
        if missing <= expected:
            tally[Tally.READY] += 1
        last[row] = start + count + nums[g] - 2
        _enter(entries, n, row, s, start, count, nums[g] - 1)
        n += 1
    return n


@kernel("void(i4[::1], i4[::1], i4[:,::1], i4[:,::1], i8[::1], i8, i4[::1], i8[::1], i4[::1], i4[::1], i8)")
def follow_rows(
    rows: Any, lengths: Any, tokens: Any, pages: Any, tags: Any, page_size: Any, positions: Any, chains: Any,
    begins: Any, owners: Any, rank: Any,
) -> None:  # fmt: skip
    """Follow those of some rows that a rank has, up to the first slot that is not valid, or to the last known token.

    Args:
        rows: `[G]`.
        lengths: this and the next seven: see `plan_model`.
        tokens: `[rows, positions]`.
        pages: `[rows, pages of a row]`.
        tags: `[pages * page_size]`.
        page_size: slots of a page.
        positions: `[rows]`.
        chains: `[rows]`.
        begins: `[rows]`.
        owners: `[G]`, the rank that has each.
        rank: this one.
    """
    for g in range(rows.shape[0]):
        if owners[g] == rank:
            end = np.int64(lengths[rows[g]]) - 1
            follow(rows[g], end, tokens, pages, tags, page_size, positions, chains, begins, 0)


@kernel(
    "i8(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i4[:,::1], i8[::1], i8, i4[::1], i8[::1], "
    "i4[::1], i8[::1], b1[::1], i4[::1], i8, b1, i4[::1], i8, i4[::1], i4[:,::1], i8[::1], i4[:,::1], i8[::1])"
)
def plan_head(
    rows: Any, starts: Any, nums: Any, sampled: Any, promised: Any, lengths: Any, tokens: Any, pages: Any, tags: Any,
    page_size: Any, positions: Any, chains: Any, begins: Any, work: Any, has_state: Any, missing: Any, depth: Any,
    is_idle: Any, owners: Any, rank: Any, firsts: Any, late: Any, num_late: Any, entries: Any, tally: Any,
) -> Any:  # fmt: skip
    """Plan the passes of a head; return the number of entries, one for each grant that gets drafts.

    A row that gets drafts after the head has left it out first catches up, with the hidden states that are remembered
    of its last positions. If the head leaves out this step, -1 is returned.

    Args:
        rows: `[G]`, row of each grant.
        starts: `[G]`, first position of each, an upper bound.
        nums: `[G]`, tokens of each grant; set to 1 where drafts are wanted and the row cannot have a state.
        sampled: `[S]`.
        promised: `[S]`.
        lengths: this and the next eight: see `plan_model`.
        tokens: `[rows, positions]`.
        pages: `[rows, pages of a row]`.
        tags: `[pages * page_size]`.
        page_size: slots of a page.
        positions: `[rows]`.
        chains: `[rows]`.
        begins: `[rows]`.
        work: `[rows]`.
        has_state: `[rows]`, whether the head's state of a row is that of its last known token; updated.
        missing: `[rows]`, first position of each row that the head has left out; -1: none. Updated.
        depth: positions of a row whose hidden states are remembered.
        is_idle: whether the head leaves out this step, which has no drafts, and those after it.
        owners: `[G]`, the rank that has each row, because only it knows which slots are valid; or `[0]`: this one.
        rank: this one.
        firsts: `[>= G]`, written: first position of each grant.
        late: `[3, >= S]`, written: row, first position and number of positions of each row that catches up.
        num_late: `[1]`, written: rows that catch up.
        entries: `[>= S, columns of Entry]`, written.
        tally: by `Tally`, increased.
    """
    num_late[0] = 0
    if is_idle:
        for s in range(sampled.shape[0]):  # the states of others are not remembered
            g = sampled[s]
            row = rows[g]
            if missing[row] < 0:
                missing[row] = max(0, min(starts[g], lengths[row] - 1))
            has_state[row] = False
        return -1
    n, s = 0, 0
    for g in range(rows.shape[0]):
        row = rows[g]
        first = np.int64(max(0, min(starts[g], lengths[row] - 1)))
        firsts[g] = first
        is_sampled = s < sampled.shape[0] and sampled[s] == g
        wants_drafts = is_sampled and promised[s] > 1
        begin, is_own = begins[row], owners.shape[0] == 0 or owners[g] == rank
        if missing[row] >= 0 and not wants_drafts:
            work[row] = 0  # the row stays behind: what it computes is not valid
        else:
            if missing[row] >= 0:
                late_first = max(np.int64(missing[row]), first - depth)
                if is_own:
                    follow(row, late_first, tokens, pages, tags, page_size, positions, chains, begins, 1)
                work[row] = chains[row]
                kept = begins[row]
                if is_own:
                    follow(row, first, tokens, pages, tags, page_size, positions, chains, begins, 1)
                has_state[row] = late_first < first
                if has_state[row]:
                    begins[row] = kept
                    m = num_late[0]
                    late[0, m], late[1, m], late[2, m] = row, late_first, first - late_first
                    num_late[0] = m + 1
                    tally[Tally.REBUILT] += first - late_first
                missing[row] = -1
            else:
                if is_own:
                    follow(row, first, tokens, pages, tags, page_size, positions, chains, begins, 1)
                work[row] = chains[row]
                if has_state[row] and wants_drafts:
                    tally[Tally.READY] += 1
            if wants_drafts and not has_state[row]:
                tally[Tally.POSTPONED] += 1
                nums[g] = 1
            if begins[row] != begin:
                tally[Tally.SHORT] += 1
            if is_sampled:
                if nums[g] > 1 and wants_drafts:
                    _enter(entries, n, row, s, lengths[row] - 1, 1, nums[g] - 1)
                    n += 1
                has_state[row] = True  # after this step
        if is_sampled:
            s += 1
    return n


@kernel("i8(i8[:,::1], i8[::1], i8[::1], i4[:,::1], i8, i8[::1], i4[:,::1], i4[::1], i8)")
def lay_out_chains(
    scopes: Any, counts: Any, indices: Any, entries: Any, num_entries: Any, rotations: Any, sampling: Any, begins: Any,
    lag: Any,
) -> Any:  # fmt: skip
    """Lay out the passes that draft; return the largest `Outcome`, or TOO_FAR at the first pass that has it.

    The first pass computes the positions of each entry, and pass d > 0 one token of each entry with more than d
    drafts. A draft model draws the next draft in each. A head draws the first draft from a state that it has, and pass
    d computes the pair of draft d, so it is one position behind.

    Args:
        scopes: `[scopes, NUM_SCOPE_COLUMNS]`, the rows of the passes are completed.
        counts: `[scopes * NUM_KINDS]`, written: the numbers of rows of the passes.
        indices: `[P]`, scope of each pass.
        entries: `[>= num_entries, columns of Entry]`.
        num_entries: entries of this step.
        rotations: `[3]`, see `lay_out`.
        sampling: `[S, NUM_SAMPLING_COLUMNS]`, see `SamplingArrays.words`.
        begins: `[rows]`, first position that each row attends to; or `[0]`.
        lag: 1 for a head, 0 for a draft model.
    """
    lengths = integers(scopes[indices[0], Column.LENGTHS], 0)
    row_of, start_of = np.empty(num_entries, np.int32), np.empty(num_entries, np.int32)
    num_of, every, ones = (
        np.empty(num_entries, np.int32), np.arange(num_entries).astype(np.int32), np.ones(num_entries, np.int32)
    )  # fmt: skip
    sampling_of = np.empty((num_entries, NUM_SAMPLING_COLUMNS), np.int32)
    result = np.int64(Outcome.DONE)
    for d in range(indices.shape[0]):
        n = 0
        for k in range(num_entries):
            if d > 0 and entries[k, Entry.NUM_DRAFTS] <= d:
                continue
            row, s = entries[k, Entry.ROW], entries[k, Entry.SAMPLED]
            row_of[n] = row
            start_of[n] = entries[k, Entry.START] if d == 0 else lengths[row] - 1
            num_of[n] = entries[k, Entry.COUNT] if d == 0 else 1
            sampling_of[n] = sampling[s]
            n += 1
        if n == 0:
            break
        shift = min(d, lag)
        scope, at = scopes[indices[d]], indices[d] * NUM_KINDS
        outcome = np.int64(
            lay_out_scope(
                scope, counts[at : at + NUM_KINDS], rotations, row_of[:n], start_of[:n], num_of[:n], every[:n],
                ones[:n], sampling_of[:n], d - shift, 0,
            )
        )  # fmt: skip
        if outcome == Outcome.TOO_FAR:
            return outcome
        if outcome == Outcome.DONE and begins.shape[0] > 0:
            adjust_scope(scope, n, begins, shift)
        result = max(result, outcome)
    return result


@kernel("i8(i8[:,::1], i8[::1], i8, i8[::1], i4[::1], i4[::1], i4[::1], i4[::1])")
def lay_out_pairs(
    scopes: Any, counts: Any, index: Any, rotations: Any, rows: Any, firsts: Any, nums: Any, begins: Any
) -> Any:
    """Lay out a pass of a head over positions that the target has computed; return an `Outcome`.

    Args:
        scopes: `[scopes, NUM_SCOPE_COLUMNS]`, the row of the pass is completed.
        counts: `[scopes * NUM_KINDS]`, written: the numbers of rows of the pass.
        index: scope of the pass.
        rotations: `[3]`, see `lay_out`.
        rows: `[G]`, row of each grant.
        firsts: `[>= G]`, first position of each.
        nums: `[G]`, tokens of each.
        begins: `[rows]`, first position that each row attends to.
    """
    num_grants = rows.shape[0]
    every, ones = np.arange(num_grants).astype(np.int32), np.ones(num_grants, np.int32)
    greedy = np.zeros((num_grants, NUM_SAMPLING_COLUMNS), np.int32)
    scope, at = scopes[index], index * NUM_KINDS
    outcome = np.int64(
        lay_out_scope(  # nothing is drawn after it
            scope, counts[at : at + NUM_KINDS], rotations, rows, firsts[:num_grants], nums, every, ones, greedy, 0, 0
        )
    )  # fmt: skip
    if outcome == Outcome.DONE:
        adjust_scope(scope, num_grants, begins, 0)
    return outcome


@kernel("i8(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[:,::1])")
def select(rows: Any, nums: Any, sampled: Any, promised: Any, lengths: Any, out: Any) -> Any:
    """Return how many grants promise more than one token, and write what a `LookupDrafter` needs of each.

    Args:
        rows: `[G]`, row of each grant.
        nums: `[G]`, tokens of each.
        sampled: `[S]`.
        promised: `[S]`.
        lengths: `[rows]`, how many tokens of each row are known.
        out: `[4, >= S]`, written: row, number of known tokens, most drafts, and 0 drafts.
    """
    n = 0
    for s in range(sampled.shape[0]):
        if promised[s] > 1:
            g = sampled[s]
            out[0, n], out[1, n], out[2, n], out[3, n] = rows[g], lengths[rows[g]], nums[g] - 1, 0
            n += 1
    return n


@kernel("void(i4[::1], i4[::1], i4[::1], i4[:,::1])")
def shrink(nums: Any, sampled: Any, promised: Any, found: Any) -> None:
    """Lower `nums` of the grants that `select` has written to `found`, to the drafts that were found for each."""
    n = 0
    for s in range(sampled.shape[0]):
        if promised[s] > 1:
            nums[sampled[s]] = 1 + min(found[3, n], found[2, n])
            n += 1
