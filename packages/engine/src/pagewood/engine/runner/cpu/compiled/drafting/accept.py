"""Verifying drafted tokens, by comparison or by rejection sampling.

`accept` accepts a draft while it equals the token that the target draws at its position. `reject` accepts it with a
probability, so that the tokens follow the target's distribution.

Legend: T tokens of a scope, G grants, S sampled grants, W wanted tokens.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.drafting.rejection import verify
from pagewood.engine.runner.cpu.compiled.drawing.choice import NUM_CHOICE_COLUMNS, best_of
from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, instruction, single_rows
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integers, vector


@instruction(single_rows)
@inlined
def accept(scope: InScope, s: Part, drawn_at: Any, found_at: Any, counts_at: Any) -> None:
    """Accept the drafts of sampled grant `s`, and write its tokens to the table and its row's length.

    It yields the token drawn at its first wanted row, and goes on with the draft that equals it. It ends before a token
    that could not be drawn: plain decoding would have yielded the tokens before.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        drawn_at: address of `[W] int32`, the token drawn at each wanted row, or `NO_NUMBER` or `NO_CHANCE`.
        found_at: address of `[W] int32`, written: its tokens, from its first wanted row on, or why there is none.
        counts_at: address of `[S] int32`, written: how many there are.
    """
    if scope[Column.SAMPLES] == 0:
        return
    g = integers(scope[Column.SAMPLED], 0)[s]
    firsts, offsets = integers(scope[Column.FIRSTS], 0), integers(scope[Column.OFFSETS], 0)
    first, num_wanted = np.int64(firsts[s]), np.int64(firsts[s + 1] - firsts[s])
    row, base = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(offsets[g + 1]) - num_wanted
    start = np.int64(integers(scope[Column.STARTS], 0)[g])
    position = start + base - offsets[g] + 1  # of the first token that is drawn
    tokens, width = integers(scope[Column.TOKENS], 0), scope[Column.TOKENS_PER_ROW]
    known = integers(scope[Column.TOKEN_TABLE] + 4 * row * width, width)
    drawn, found = integers(drawn_at, 0), integers(found_at, 0)
    n = np.int64(0)
    found[first] = drawn[first]
    while position + n < width:
        token = drawn[first + n]
        if token < 0:
            break
        found[first + n], known[position + n] = token, token
        n += 1
        if n == num_wanted or tokens[base + n] != token:
            break
    integers(counts_at, 0)[s] = n
    if n > 0:
        integers(scope[Column.LENGTHS], 0)[row] = position + n


@instruction(single_rows)
@inlined
def reject(
    scope: InScope, s: Part, logits_at: Any, held_at: Any, vocab_size: Any, num_drafts: Any, found_at: Any,
    counts_at: Any, scratch_at: Any,
) -> None:  # fmt: skip
    """Verify the chain of sampled grant `s` by rejection sampling, and write its tokens and its row's length.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        logits_at: address of `[W, V]`, logits of the target.
        held_at: address of `[rows of the runner, num_drafts, V]`, logits that drafts were drawn from; see
            `hold_logits`.
        vocab_size: V.
        num_drafts: most drafts of a grant.
        found_at: address of `[W] int32`, written: its tokens, from its first wanted row on, or why there is none.
        counts_at: address of `[S] int32`, written: how many there are; 0 if there is no first token.
        scratch_at: address of `[S, 2 V] float32`, overwritten.
    """
    if scope[Column.SAMPLES] == 0:
        return
    g = integers(scope[Column.SAMPLED], 0)[s]
    firsts, offsets = integers(scope[Column.FIRSTS], 0), integers(scope[Column.OFFSETS], 0)
    first, num_wanted = np.int64(firsts[s]), np.int64(firsts[s + 1] - firsts[s])
    row, base = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(offsets[g + 1]) - num_wanted
    position = np.int64(integers(scope[Column.STARTS], 0)[g]) + base - offsets[g] + 1  # of the first token
    width = scope[Column.TOKENS_PER_ROW]
    num_places = max(min(num_wanted, num_drafts + 1, width - position), 0)
    choice_at = scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * first
    found = integers(found_at + 4 * first, num_places)
    n = np.int64(
        verify(
            floats(logits_at + 4 * first * vocab_size, num_places, vocab_size),
            floats(held_at + 4 * row * num_drafts * vocab_size, num_drafts, vocab_size),
            integers(scope[Column.TOKENS] + 4 * (base + 1), max(num_places - 1, 0)),
            vector(choice_at, NUM_CHOICE_COLUMNS), integers(choice_at, NUM_CHOICE_COLUMNS), found,
            floats(scratch_at + 8 * s * vocab_size, 2, vocab_size),
        )
    )  # fmt: skip
    known = integers(scope[Column.TOKEN_TABLE] + 4 * row * width, width)
    for i in range(n):
        known[position + i] = found[i]
    integers(counts_at, 0)[s] = n
    if n > 0:
        integers(scope[Column.LENGTHS], 0)[row] = position + n
    elif num_places > 0:
        found[0] = best_of(vector(logits_at + 4 * first * vocab_size, vocab_size))
