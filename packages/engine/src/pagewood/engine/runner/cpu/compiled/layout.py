"""From the grants of a step to the inputs of a forward pass: tokens, rotations, wanted rows, choices, attention items.

A program computes one or more scopes. A scope is a group of tokens that go through a model together. A row of the table
of scopes says where the scope's tables are and how long they are, so that instructions find them by address.

Legend: T tokens of a scope, G grants, S sampled grants, W wanted tokens, K kept tokens, P pooled grants, F
head_dim / 2.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from enum import IntEnum
from typing import Any

from pagewood.engine.runner.cpu.compiled.drawing.choice import NUM_CHOICE_COLUMNS, fill_choice
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import (
    fetch_add,
    floats,
    integer_rows,
    integers,
    long_rows,
    vector,
)


class Column(IntEnum):
    """A column of the table of scopes. Each is an address, except sizes and numbers; 0 is "not there"."""

    PAGE_TABLE = 0
    """`[rows, pages of a row] int32`."""
    PAGES_PER_ROW = 1
    TOKEN_TABLE = 2
    """`[rows, TOKENS_PER_ROW] int32`, token ids by position."""
    TOKENS_PER_ROW = 3
    LENGTHS = 4
    """`[rows] int32`, how many tokens of each row are known."""
    VOCAB_SIZE = 5
    NUM_KV_HEADS = 6
    TILE = 7
    """Query tokens of an attention item."""
    COSINE_TABLE = 8
    """`[NUM_ROTATIONS, F] float32`, by place; the place of a position is that of its row in ROTATION_SHIFTS more."""
    SINE_TABLE = 9
    NUM_ROTATIONS = 10
    HALF = 11
    """F."""
    MOST_TOKENS = 12
    """Tokens for which the scope has memory."""
    MOST_WANTED = 13
    ROWS = 14
    """`[G] int32`, row of each grant; this and all following tables are filled by `lay_out`."""
    STARTS = 15
    """`[G] int32`, position of the first token of each grant."""
    OFFSETS = 16
    """`[G + 1] int32`, first token of each grant in the scope."""
    BEGINS = 17
    """`[G] int32`, first position that the grant attends to; not there: 0. `lay_out` does not fill it."""
    ITEMS = 18
    """`[items, 4] int32`, see `cut`."""
    NUM_GRANTS = 19
    NUM_ITEMS = 20
    TOKENS = 21
    """`[T] int32`, token ids."""
    COSINES = 22
    """`[T, F] float32`."""
    SINES = 23
    WANTED = 24
    """`[K] int32`, tokens whose last hidden state is wanted; the first W are those whose logits are wanted."""
    CHOICES = 25
    """`[W, NUM_CHOICE_COLUMNS]`, how to draw the token after each."""
    SAMPLED = 26
    """`[S] int32`, indices of the sampled grants."""
    FIRSTS = 27
    """`[S + 1] int32`, first wanted row of each sampled grant."""
    SAMPLES = 28
    """1 if tokens are accepted and written to the tables, 0 if only logits are wanted."""
    ADJUSTMENTS = 29
    """`[rows, NUM_ADJUSTMENT_COLUMNS] int64`, how the logits of each row are changed; see `compiled.drawing.adjust`."""
    NUM_ADJUSTED = 30
    """Sampled grants whose logits are changed."""
    NUM_REPORTED = 31
    """Sampled grants whose tokens are reported, plus the reported prompt tokens; see `compiled.drawing.report`."""
    NUM_SAMPLED = 32
    """S."""
    SCORED = 33
    """`[wanted rows behind those of sampled grants, 2] int32`, the prompt token after each, and its alternatives."""
    MOST_KEPT = 34
    """K for which the scope has memory."""
    POOLED = 35
    """`[NUM_POOLED, 2] int32`, of each pooled grant the first of its kept rows, and their number."""
    NUM_POOLED = 36
    GATE = 37
    """`[1 + rows] int64`: the address of the masks of the step, 0 until they are there; then, for each row that waits
    for some, 1 plus the index of its first mask, and 0 for the others. Not there: no row waits. `lay_out` does not fill
    it."""
    LONGEST = 38
    """An upper bound of the positions that a grant sees; filled by `lay_out`."""
    ROTATION_SHIFTS = 39
    """`[rows] int32`, see `models.rope`."""
    OWNERS = 40
    """`[T, 2] int32`, whose each token of all ranks is, see `exchange.gather_rows`; this and the following three are in
    the scope of the tokens that one of the ranks has, and `exchange.divide` fills them."""
    KEPT_OWNERS = 41
    """`[K, 2] int32`, the same for kept tokens."""
    PLACES = 42
    """`[own T] int32`, the places of the rank's tokens among those of all."""
    KEPT_PLACES = 43
    """`[own K] int32`, the same for kept tokens."""
    STATES = 44
    """`[G, 2] int32`, of each grant the place of the state that it reads (-1: zeros) and of that which it leaves (-1:
    none); not there: no layer is recurrent. `lay_out` does not fill it, nor the next."""
    SAVES = 45
    """`[T] int32`, the place of a copy of the state behind a token; -1: there is none."""
    FEATURES = 46
    """`[T] int64`, the address of the row of an image that belongs to each token, 0 for tokens of text; not there: the
    step has no images. `lay_out` does not fill it, nor the next."""
    ENDS = 47
    """`[T] int32`, where the positions end that each token sees, if it may see later ones of its image; not there: a
    token sees its own position and those before it."""


class Adjustment(IntEnum):
    """A column of the table of adjustments and reports."""

    IS_ON = 0
    """1 or 0."""
    NUM_PROMPT = 1
    """Tokens of the prompt."""
    PENALTIES = 2
    """Address of `[3] float32`, see `core.messages.adjustments`; 0: none."""
    BIASES = 3
    """Address of `[NUM_BIASES, 3] int32`: token, end, and the value as float32."""
    NUM_BIASES = 4
    REPORTED = 5
    """1 plus the alternatives that are reported with each token; 0: tokens are not reported."""
    IS_PROCESSED = 6
    """1 if reports are of the distribution that tokens are drawn from, 0 if of the model's."""
    WORDS = 7
    """Address of the bad words, int32: of each its size, then its tokens."""
    NUM_WORDS = 8
    HAS_RANGE = 9
    """1 if reports have the range of the filters, otherwise 0."""


NUM_ADJUSTMENT_COLUMNS = len(Adjustment)
NUM_SCOPE_COLUMNS = len(Column)
NUM_KINDS = 4
"""Numbers of rows of a scope, consecutive in the counts of a run: tokens, wanted tokens, sampled grants, kept tokens
(see `tape.Scope`)."""


class Outcome(IntEnum):
    """What `lay_out` returns."""

    DONE = 0
    TOO_LARGE = 1
    """The scope has memory for fewer tokens; the counts say how much is needed."""
    TOO_FAR = 2
    """The tables of rotations are too short; NUM_ROTATIONS says how many are needed."""
    BAD_TOKEN = 3
    """A token is not in the vocabulary."""


@inlined
def cut(counts: Any, num_kv_heads: Any, tile: Any, items: Any) -> Any:
    """Cut grants into items of at most `tile` tokens, heads of one tile side by side; return how many there are.

    Args:
        counts: `[grants] int32`, number of tokens of each.
        num_kv_heads: G.
        tile: query tokens of an item.
        items: `[>= N, 4] int32`, written: grant, key head, first token of the grant, number of tokens.
    """
    n = 0
    for grant in range(counts.shape[0]):
        for first in range(0, counts[grant], tile):
            for head in range(num_kv_heads):
                items[n, 0], items[n, 1] = grant, head
                items[n, 2], items[n, 3] = first, min(tile, counts[grant] - first)
                n += 1
    return n


@inlined
def lay_out_scope(
    scope: Any, counts: Any, rotations: Any, rows: Any, starts: Any, nums: Any, sampled: Any, promised: Any,
    sampling: Any, ahead: Any, all_wanted: Any,
) -> Any:  # fmt: skip
    """Fill the tables and the inputs of a scope; return an `Outcome`.

    A grant begins at `starts`, or at the last known token of its row if that is earlier, plus `ahead`. The wanted
    tokens of a sampled grant that promises one token are its last one, otherwise all of its tokens.

    Args:
        scope: the row of the table of scopes, completed.
        counts: `[NUM_KINDS]`, written: the numbers of rows of the scope.
        rotations: `[3]`, addresses of the tables of cosines and sines, and their length.
        rows: `[G]`, row of each grant.
        starts: `[G]`, first position of each grant, an upper bound.
        nums: `[G]`, tokens of each grant.
        sampled: `[S]`, the grants that yield tokens, ascending.
        promised: `[S]`, the most tokens that each yields.
        sampling: `[S, NUM_SAMPLING_COLUMNS]`, see `SamplingArrays.words`.
        ahead: how many positions after the last known token a draft model computes; 0 for known tokens.
        all_wanted: 1 if all tokens of sampled grants are wanted, and none is accepted.
    """
    num_grants, num_sampled = rows.shape[0], sampled.shape[0]
    shifts = integers(scope[Column.ROTATION_SHIFTS], 0)
    num_tokens, num_wanted, end, last_place = 0, 0, 0, 0
    for g in range(num_grants):
        num_tokens += nums[g]
        end = max(end, starts[g] + ahead + nums[g])
        last_place = max(last_place, starts[g] + ahead + nums[g] + shifts[rows[g]])
    for s in range(num_sampled):
        num_wanted += nums[sampled[s]] if promised[s] > 1 or all_wanted != 0 else 1
    counts[0], counts[1], counts[2], counts[3] = num_tokens, num_wanted, num_sampled, num_wanted
    scope[Column.COSINE_TABLE], scope[Column.SINE_TABLE] = rotations[0], rotations[1]
    scope[Column.NUM_ROTATIONS] = rotations[2]
    if num_tokens > scope[Column.MOST_TOKENS] or num_wanted > scope[Column.MOST_WANTED]:  # of kept ones there are more
        return Outcome.TOO_LARGE
    if last_place > scope[Column.NUM_ROTATIONS]:
        scope[Column.NUM_ROTATIONS] = last_place
        return Outcome.TOO_FAR
    scope[Column.LONGEST] = end
    lengths = integers(scope[Column.LENGTHS], 0)
    width, half, vocab_size = scope[Column.TOKENS_PER_ROW], scope[Column.HALF], scope[Column.VOCAB_SIZE]
    cosine_table, sine_table = scope[Column.COSINE_TABLE], scope[Column.SINE_TABLE]
    row_of, start_of = integers(scope[Column.ROWS], num_grants), integers(scope[Column.STARTS], num_grants)
    offsets = integers(scope[Column.OFFSETS], num_grants + 1)
    tokens = integers(scope[Column.TOKENS], num_tokens)
    cosines, sines = floats(scope[Column.COSINES], num_tokens, half), floats(scope[Column.SINES], num_tokens, half)
    token = 0
    is_bad = False
    for g in range(num_grants):
        row = rows[g]
        start = max(0, min(starts[g], lengths[row] - 1) + ahead)
        row_of[g], start_of[g], offsets[g] = row, start, token
        place = start + shifts[row]
        known = integers(scope[Column.TOKEN_TABLE] + 4 * (row * width + start), nums[g])
        for i in range(nums[g]):
            tokens[token] = known[i]
            is_bad |= known[i] < 0 or known[i] >= vocab_size
            cosine = vector(cosine_table + 4 * half * (place + i), half)
            sine = vector(sine_table + 4 * half * (place + i), half)
            for d in range(half):
                cosines[token, d] = cosine[d]
                sines[token, d] = sine[d]
            token += 1
    offsets[num_grants] = token
    wanted, firsts = integers(scope[Column.WANTED], num_wanted), integers(scope[Column.FIRSTS], num_sampled + 1)
    grant_of = integers(scope[Column.SAMPLED], num_sampled)
    w, num_adjusted, num_reported = 0, 0, 0
    adjustments = long_rows(scope[Column.ADJUSTMENTS], 0, NUM_ADJUSTMENT_COLUMNS)
    for s in range(num_sampled):
        g = sampled[s]
        grant_of[s], firsts[s] = g, w
        num_adjusted += adjustments[rows[g], Adjustment.IS_ON]
        num_reported += 1 if adjustments[rows[g], Adjustment.REPORTED] > 0 else 0
        n = nums[g] if promised[s] > 1 or all_wanted != 0 else 1
        for j in range(n):
            i = nums[g] - n + j
            wanted[w] = offsets[g] + i
            choice_at = scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * w
            fill_choice(integers(choice_at, NUM_CHOICE_COLUMNS), sampling[s], start_of[g] + i + 1)
            w += 1
    firsts[num_sampled] = w
    scope[Column.NUM_GRANTS], scope[Column.SAMPLES] = num_grants, 1 - all_wanted
    scope[Column.NUM_ADJUSTED] = num_adjusted * (1 - all_wanted)
    scope[Column.NUM_REPORTED], scope[Column.NUM_SAMPLED] = num_reported * (1 - all_wanted), num_sampled
    scope[Column.NUM_ITEMS] = cut(
        nums, scope[Column.NUM_KV_HEADS], scope[Column.TILE], integer_rows(scope[Column.ITEMS], num_tokens, 4)
    )
    return Outcome.BAD_TOKEN if is_bad else Outcome.DONE


@inlined
def _add_scored(scope: Any, counts: Any, scored: Any, outcome: Any) -> Any:
    """Make tokens of prompts wanted, behind those of sampled grants; return an `Outcome`.

    Args:
        scope: the row of the table of scopes, as `lay_out_scope` has left it.
        counts: `[NUM_KINDS]`, changed.
        scored: `[Q, 3]`, see `Batch.scored`.
        outcome: what `lay_out_scope` has returned.
    """
    first, num = counts[1], 0
    for q in range(scored.shape[0]):
        num += scored[q, 1]
    counts[1] = counts[3] = first + num
    if outcome != Outcome.DONE or first + num > scope[Column.MOST_WANTED]:
        return outcome if outcome != Outcome.DONE else Outcome.TOO_LARGE
    rows, starts, offsets = (
        integers(scope[Column.ROWS], 0), integers(scope[Column.STARTS], 0), integers(scope[Column.OFFSETS], 0)
    )  # fmt: skip
    wanted, reported = integers(scope[Column.WANTED], 0), integer_rows(scope[Column.SCORED], 0, 2)
    w = 0
    for q in range(scored.shape[0]):
        g = scored[q, 0]
        known = integers(scope[Column.TOKEN_TABLE] + 4 * rows[g] * scope[Column.TOKENS_PER_ROW], 0)
        for i in range(scored[q, 1]):
            wanted[first + w] = offsets[g] + i
            reported[w, 0], reported[w, 1] = known[starts[g] + i + 1], scored[q, 2]
            choice_at = scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * (first + w)
            integers(choice_at, NUM_CHOICE_COLUMNS)[:] = 0  # greedy: what is drawn is not used
            w += 1
    scope[Column.NUM_REPORTED] += num
    return outcome


@inlined
def _add_pooled(scope: Any, counts: Any, pooled: Any, outcome: Any) -> Any:
    """Keep the states of tokens of prompts, behind those of wanted tokens; return an `Outcome`.

    Args:
        scope: the row of the table of scopes, as `lay_out_scope` has left it.
        counts: `[NUM_KINDS]`, changed.
        pooled: `[P, 3]`, see `Batch.pooled`.
        outcome: what the functions before have returned.
    """
    k = counts[3]
    for p in range(pooled.shape[0]):
        counts[3] += pooled[p, 2]
    if outcome != Outcome.DONE or counts[3] > scope[Column.MOST_KEPT]:
        return outcome if outcome != Outcome.DONE else Outcome.TOO_LARGE
    offsets, wanted = integers(scope[Column.OFFSETS], 0), integers(scope[Column.WANTED], 0)
    spans = integer_rows(scope[Column.POOLED], 0, 2)
    for p in range(pooled.shape[0]):
        spans[p, 0], spans[p, 1] = k, pooled[p, 2]
        for i in range(pooled[p, 2]):
            wanted[k] = offsets[pooled[p, 0]] + pooled[p, 1] + i
            k += 1
    scope[Column.NUM_POOLED] = pooled.shape[0]
    return outcome


@kernel(
    "i8(i8[:,::1], i8, i8[::1], i8[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i8, i8, "
    "i4[:,::1], i4[:,::1])"
)
def lay_out(
    scopes: Any, index: Any, counts: Any, rotations: Any, rows: Any, starts: Any, nums: Any, sampled: Any,
    promised: Any, sampling: Any, ahead: Any, all_wanted: Any, scored: Any, pooled: Any,
) -> Any:  # fmt: skip
    """Call `lay_out_scope` for the scope with this index in `scopes` `[scopes, NUM_SCOPE_COLUMNS]`.

    The tokens of `scored` `[Q, 3]`, see `Batch.scored`, are wanted too, and the states of `pooled` `[P, 3]`.
    """
    own = counts[index * NUM_KINDS : (index + 1) * NUM_KINDS]
    outcome = lay_out_scope(
        scopes[index], own, rotations, rows, starts, nums, sampled, promised, sampling, ahead, all_wanted
    )
    if scored.shape[0] > 0:
        outcome = _add_scored(scopes[index], own, scored, outcome)
    return _add_pooled(scopes[index], own, pooled, outcome) if pooled.shape[0] > 0 else outcome


@kernel("void(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i4[:,::1], i4[::1])")
def update(
    page_rows: Any, page_columns: Any, page_ids: Any, token_rows: Any, token_positions: Any, token_ids: Any,
    pages: Any, tokens: Any, lengths: Any,
) -> None:  # fmt: skip
    """Enter new pages and tokens into the tables of the runner. Legend: U page updates, N token updates.

    Args:
        page_rows: `[U]`, see `Batch` for this and the next five.
        page_columns: `[U]`.
        page_ids: `[U]`.
        token_rows: `[N]`.
        token_positions: `[N]`, ascending for each row, whose length is then the last of them plus 1.
        token_ids: `[N]`.
        pages: `[rows, pages of a row]`, written.
        tokens: `[rows, positions]`, written.
        lengths: `[rows]`, written.
    """
    for u in range(page_ids.shape[0]):
        pages[page_rows[u], page_columns[u]] = page_ids[u]
    for n in range(token_ids.shape[0]):
        tokens[token_rows[n], token_positions[n]] = token_ids[n]
        lengths[token_rows[n]] = token_positions[n] + 1


@kernel("i8(i4[::1], i4[::1], i4[:,::1], i4[::1], i4[::1], i4[::1], i4[:,::1], i4[::1], i4[::1], i4[::1])")
def find_live(
    rows: Any, sampled: Any, tokens: Any, lengths: Any, checked: Any, limits: Any, stop_ids: Any, kept: Any,
    kept_sampled: Any, places: Any,
) -> Any:  # fmt: skip
    """Return how many grants have a row that has not ended, and write which.

    Args:
        rows: `[G]`, row of each grant.
        sampled: `[S]`; a grant that is not sampled belongs to a prompt, which does not end.
        tokens: `[rows, positions]`, see `RowTables` for this and the next four.
        lengths: `[rows]`.
        checked: `[rows]`, advanced to the length of a row that has not ended.
        limits: `[rows]`.
        stop_ids: `[rows, NUM_STOP_IDS]`.
        kept: `[G]`, written: the live grants.
        kept_sampled: `[>= S]`, written: which sampled grants are live.
        places: `[>= S]`, written: the place of each of these in `kept`.
    """
    n, m, s = 0, 0, 0
    for g in range(rows.shape[0]):
        is_sampled = s < sampled.shape[0] and sampled[s] == g
        has_ended = False
        if is_sampled:
            row = rows[g]
            length = lengths[row]
            if length > checked[row]:
                has_ended = length >= limits[row]
                for position in range(checked[row], length):
                    for k in range(stop_ids.shape[1]):
                        has_ended |= tokens[row, position] == stop_ids[row, k]
                if not has_ended:
                    checked[row] = length
        if not has_ended:
            kept[n] = g
            if is_sampled:
                kept_sampled[m], places[m] = s, n
                m += 1
            n += 1
        s += is_sampled
    return n


@kernel("i8(i8[:,::1], i8, i4[:,::1], i4[:,::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1])")
def collect(
    scopes: Any, index: Any, found: Any, yielded: Any, nums: Any, promised: Any, tokens: Any, counts: Any, drafted: Any
) -> Any:  # fmt: skip
    """Copy what a scope's sampled grants have yielded, one grant after the other; return how many tokens that are.

    Args:
        scopes: of the run.
        index: of the scope.
        found: `[>= W, 1]`, the tokens of a sampled grant begin at its first wanted row.
        yielded: `[>= S, 1]`, number of tokens of each.
        nums: `[G]`, tokens that each grant has computed.
        promised: `[S]`, the most tokens that each yields.
        tokens: `[W]`, written.
        counts: `[S]`, written: number of tokens of each.
        drafted: `[S]`, written: draft tokens of each that were verified; or `[0]`.
    """
    scope, num_sampled = scopes[index], counts.shape[0]
    firsts = integers(scope[Column.FIRSTS], num_sampled + 1)
    grant_of = integers(scope[Column.SAMPLED], num_sampled)
    n = 0
    for s in range(num_sampled):
        counts[s] = yielded[s, 0]
        for j in range(counts[s]):
            tokens[n] = found[firsts[s] + j, 0]
            n += 1
        if drafted.shape[0] > 0:
            drafted[s] = nums[grant_of[s]] - 1 if promised[s] > 1 else 0
    return n


@kernel("void(i8[::1], i8)")
def open_gate(gate: Any, address: Any) -> None:
    """Let the rows that wait at a gate go on; see `Column.GATE`. All that was written before is visible to them.

    Args:
        gate: whose first number is 0.
        address: of the masks.
    """
    fetch_add(gate, 0, address)
