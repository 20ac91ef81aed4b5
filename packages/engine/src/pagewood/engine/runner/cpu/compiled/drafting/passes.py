"""Drafting with a model: tokens that pass from one forward pass to the next, and which slots of its KV are valid.

A slot of a drafter's KV has a tag: a hash of all tokens of its row up to its own position, which is chained, so that a
row's hashes cost one step a token. A slot is valid for a row if its tag equals the row's hash at that position. So
cached prefixes, preempted rows and pages that came from another tier need no bookkeeping. A collision, or keys that are
half copied, would change drafts, and never the text.

Legend: S sampled grants of a scope, W wanted tokens, E elements of a hidden state.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.drawing.choice import NUM_CHOICE_COLUMNS, POSITION
from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, instruction, single_rows
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import integer_rows, integers, longs, vector
from pagewood.engine.runner.splitmix import mix

_mix = exact(mix)  # not in this folder, so not in the stamp of cached code: a published hash does not change
_SALT = np.uint64(0xA24BAED4963EE407)
_NEVER = np.float32(-np.inf)


@inlined
def _chained(before: Any, token: Any) -> Any:
    """Return the hash of a row's tokens up to one, from the hash of those before it."""
    return np.int64(_mix(np.uint64(before) ^ (np.uint64(token) + np.uint64(1)) * _SALT))


@inlined
def _known(scope: Any, row: Any) -> Any:
    """Return the row of the token table."""
    width = scope[Column.TOKENS_PER_ROW]
    return integers(scope[Column.TOKEN_TABLE] + 4 * np.int64(row) * width, width)


@instruction(single_rows)
@inlined
def fill(scope: InScope, s: Part, shift: Any) -> None:
    """Read the tokens of sampled grant `s` from the token table, each from `shift` positions after its own."""
    g = integers(scope[Column.SAMPLED], 0)[s]
    offsets, tokens = integers(scope[Column.OFFSETS], 0), integers(scope[Column.TOKENS], 0)
    start, first = np.int64(integers(scope[Column.STARTS], 0)[g]) + shift, np.int64(offsets[g])
    known, last = _known(scope, integers(scope[Column.ROWS], 0)[g]), scope[Column.TOKENS_PER_ROW] - 1
    for i in range(offsets[g + 1] - first):
        tokens[first + i] = known[min(start + i, last)]


@instruction(single_rows)
@inlined
def tag(scope: InScope, s: Part, tags_at: Any, page_size: Any, chains_at: Any) -> None:
    """Tag the slots that sampled grant `s` computes, and advance its row's hash.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        tags_at: address of `[pages, page_size] int64`.
        page_size: slots of a page.
        chains_at: address of `[rows] int64`, the hash of each row before the grant.
    """
    g = integers(scope[Column.SAMPLED], 0)[s]
    offsets = integers(scope[Column.OFFSETS], 0)
    row, start = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(integers(scope[Column.STARTS], 0)[g])
    pages = integer_rows(scope[Column.PAGE_TABLE], 0, scope[Column.PAGES_PER_ROW])
    known, tags, chains = _known(scope, row), longs(tags_at, 0), longs(chains_at, 0)
    chain = chains[row]
    for position in range(start, start + offsets[g + 1] - offsets[g]):
        chain = _chained(chain, known[position])
        tags[np.int64(pages[row, position // page_size]) * page_size + position % page_size] = chain
    chains[row] = chain


@instruction(single_rows)
@inlined
def note(scope: InScope, s: Part, drawn_at: Any, shift: Any) -> None:
    """Write the token that a drafter drew for sampled grant `s` to the token table, if its position is not known yet.

    Args:
        scope: a row of the table of scopes, each of whose sampled grants has one wanted token.
        s: index of the sampled grant.
        drawn_at: address of `[S] int32`; -1, of logits that are not numbers, becomes token 0.
        shift: how many positions the token lies behind the one after the grant.
    """
    g = integers(scope[Column.SAMPLED], 0)[s]
    offsets = integers(scope[Column.OFFSETS], 0)
    row, start = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(integers(scope[Column.STARTS], 0)[g])
    position = start + offsets[g + 1] - offsets[g] + shift
    if position < integers(scope[Column.LENGTHS], 0)[row] or position >= scope[Column.TOKENS_PER_ROW]:
        return
    _known(scope, row)[position] = max(integers(drawn_at, 0)[s], 0)


@instruction(single_rows)
@inlined
def spread(s: Part, logits_at: Any, size: Any, token_map_at: Any, out_at: Any, vocab_size: Any) -> None:
    """Write row `s` of logits over a part of the vocabulary as logits over all of it.

    A token is drawn with noise of its own, so a drafter that draws among the target's numbers gets the same noise.

    Args:
        s: the row.
        logits_at: address of `[S, size]`.
        size: tokens in the part.
        token_map_at: address of `[size] int32`, the token of each.
        out_at: address of `[S, vocab_size]`, written.
        vocab_size: tokens in the vocabulary.
    """
    logits, out = vector(logits_at + 4 * s * size, size), vector(out_at + 4 * s * vocab_size, vocab_size)
    tokens = integers(token_map_at, size)
    for i in range(vocab_size):
        out[i] = _NEVER
    for i in range(size):
        out[tokens[i]] = logits[i]


@instruction(single_rows)
@inlined
def hold_logits(
    scope: InScope, s: Part, logits_at: Any, held_at: Any, vocab_size: Any, num_drafts: Any, index: Any
) -> None:
    """Copy the logits that a draft of sampled grant `s` was drawn from to the place of its row.

    Args:
        scope: a row of the table of scopes, each of whose sampled grants has one wanted token.
        s: index of the sampled grant in `scope`.
        logits_at: address of `[S, V]`.
        held_at: address of `[rows of the runner, num_drafts, V]`, written.
        vocab_size: V.
        num_drafts: most drafts of a grant.
        index: of the draft in its grant.
    """
    row = np.int64(integers(scope[Column.ROWS], 0)[integers(scope[Column.SAMPLED], 0)[s]])
    source = vector(logits_at + 4 * s * vocab_size, vocab_size)
    held = vector(held_at + 4 * (row * num_drafts + index) * vocab_size, vocab_size)
    for i in range(vocab_size):
        held[i] = source[i]


@instruction(single_rows)
@inlined
def last(scope: InScope, target: InScope, s: Part, counts_at: Any) -> None:
    """Make the token before the last accepted one the wanted token of the grant in `scope`.

    Args:
        scope: a row of the table of scopes, which computes the grants of `target`, all of them sampled.
        target: the row of the scope in which tokens were accepted.
        s: index of the sampled grant in `target`.
        counts_at: address of `[S] int32`, how many tokens each has yielded.
    """
    if target[Column.SAMPLES] == 0:
        return
    g = integers(target[Column.SAMPLED], 0)[s]
    firsts, end = integers(target[Column.FIRSTS], 0), integers(target[Column.OFFSETS], 0)[g + 1]
    integers(scope[Column.WANTED], 0)[g] = end - (firsts[s + 1] - firsts[s]) + max(integers(counts_at, 0)[s], 1) - 1


@instruction(single_rows)
@inlined
def keep(scope: InScope, s: Part, x_at: Any, states_at: Any, size: Any) -> None:
    """Copy row `s` of the matrix at `x_at` `[S, size]` to the row of grant `s` in `states_at` `[rows, size]`."""
    row = np.int64(integers(scope[Column.ROWS], 0)[integers(scope[Column.SAMPLED], 0)[s]])
    source, target = vector(x_at + 4 * s * size, size), vector(states_at + 4 * row * size, size)
    for i in range(size):
        target[i] = source[i]


@instruction(single_rows)
@inlined
def recall(scope: InScope, s: Part, states_at: Any, out_at: Any, size: Any) -> None:
    """Copy the row of sampled grant `s` in `states_at` to row `s` of the matrix at `out_at`, as `keep` does."""
    row = np.int64(integers(scope[Column.ROWS], 0)[integers(scope[Column.SAMPLED], 0)[s]])
    source, target = vector(states_at + 4 * row * size, size), vector(out_at + 4 * s * size, size)
    for i in range(size):
        target[i] = source[i]


@instruction(single_rows)
@inlined
def stash(scope: InScope, s: Part, x_at: Any, x_size: Any, column: Any, size: Any, stash_at: Any, depth: Any) -> None:
    """Remember the hidden states of the last positions that sampled grant `s` computes, or columns of other rows.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        x_at: address of `[T, x_size]`.
        x_size: columns of `x`.
        column: the first that is remembered.
        size: E, columns that are remembered.
        stash_at: address of `[rows, depth, size]`, written: position p is at p % depth.
        depth: positions of each row that are remembered.
    """
    g = integers(scope[Column.SAMPLED], 0)[s]
    offsets = integers(scope[Column.OFFSETS], 0)
    row, start = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(integers(scope[Column.STARTS], 0)[g])
    first = np.int64(offsets[g])
    n = np.int64(offsets[g + 1]) - first
    for i in range(max(n - depth, 0), n):
        source = vector(x_at + 4 * ((first + i) * x_size + column), size)
        target = vector(stash_at + 4 * (row * depth + (start + i) % depth) * size, size)
        for j in range(size):
            target[j] = source[j]


@instruction(single_rows)
@inlined
def unstash(scope: InScope, s: Part, stash_at: Any, depth: Any, out_at: Any, size: Any) -> None:
    """Read the hidden states of the positions of sampled grant `s`, as `stash` wrote them, to `out_at` `[T, size]`."""
    g = integers(scope[Column.SAMPLED], 0)[s]
    offsets = integers(scope[Column.OFFSETS], 0)
    row, start = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(integers(scope[Column.STARTS], 0)[g])
    first = np.int64(offsets[g])
    for i in range(offsets[g + 1] - first):
        source = vector(stash_at + 4 * (row * depth + (start + i) % depth) * size, size)
        target = vector(out_at + 4 * (first + i) * size, size)
        for j in range(size):
            target[j] = source[j]


@inlined
def follow(
    row: Any, end: Any, tokens: Any, pages: Any, tags: Any, page_size: Any, positions: Any, chains: Any, begins: Any,
    passes_gaps: Any,
) -> None:  # fmt: skip
    """Follow a row from its position on, up to the first slot that is not valid, or to the end.

    Args:
        row: whose slots are followed.
        end: position at which to end.
        tokens: `[rows, positions]`.
        pages: `[rows, pages of a row]`.
        tags: `[pages * page_size]`.
        page_size: slots of a page.
        positions: `[rows]`, advanced.
        chains: `[rows]`, the hash of the tokens before the position, advanced.
        begins: `[rows]`, with `passes_gaps`: the position after the last slot that is not valid.
        passes_gaps: 1 to go on behind slots that are not valid.
    """
    position, chain = np.int64(positions[row]), chains[row]
    while position < end:
        chained = _chained(chain, tokens[row, position])
        if tags[np.int64(pages[row, position // page_size]) * page_size + position % page_size] != chained:
            if passes_gaps == 0:
                break
            begins[row] = position + 1
        chain = chained
        position += 1
    positions[row], chains[row] = position, chain


@inlined
def adjust_scope(scope: Any, num_wanted: Any, begins: Any, shift: Any) -> None:
    """Complete a scope that is laid out: where its rows' attention begins, and later positions of its draws.

    Args:
        scope: a row of the table of scopes, which has a table BEGINS.
        num_wanted: W.
        begins: `[rows]`, first position that each row attends to.
        shift: added to the positions of draws.
    """
    begin_of, row_of = integers(scope[Column.BEGINS], 0), integers(scope[Column.ROWS], 0)
    for g in range(scope[Column.NUM_GRANTS]):
        begin_of[g] = begins[row_of[g]]
    for w in range(num_wanted):
        integers(scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * w, NUM_CHOICE_COLUMNS)[POSITION] += shift
