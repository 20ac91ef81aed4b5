"""Accepting drafted tokens: a draft is accepted while it equals the token that the target model draws at its position.

Legend: T tokens of a scope, G grants, S sampled grants, W wanted tokens.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

from pagewood.engine.runner.cpu.compiled.kernel import inlined
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.memory import integers


@inlined
def accept(scope: Any, s: Any, drawn_at: Any, found_at: Any, counts_at: Any) -> None:
    """Accept the drafts of sampled grant `s`, and write its tokens to the table and its row's length.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        drawn_at: address of `[W] int32`, the token drawn at each wanted row, -1 where logits are not numbers.
        found_at: address of `[W] int32`, written: its tokens, from its first wanted row on.
        counts_at: address of `[S] int32`, written: how many there are.
    """
    g = integers(scope[Column.SAMPLED], 0)[s]
    firsts = integers(scope[Column.FIRSTS], 0)
    first, num_wanted = firsts[s], firsts[s + 1] - firsts[s]
    offsets = integers(scope[Column.OFFSETS], 0)
    row, last = integers(scope[Column.ROWS], 0)[g], offsets[g + 1]
    end = integers(scope[Column.STARTS], 0)[g] + last - offsets[g]
    position = end - num_wanted + 1  # of the first token that is drawn
    drafts = integers(scope[Column.TOKENS], 0)
    width = scope[Column.TOKENS_PER_ROW]
    known = integers(scope[Column.TOKEN_TABLE] + 4 * row * width, width)
    drawn, found = integers(drawn_at, 0), integers(found_at, 0)
    n = 0
    while n < num_wanted and position + n < width:
        token = drawn[first + n]
        if token < 0:
            break
        found[first + n] = token
        known[position + n] = token
        n += 1
        if n < num_wanted and drafts[last - num_wanted + n] != token:
            break
    integers(counts_at, 0)[s] = n
    if n > 0:
        integers(scope[Column.LENGTHS], 0)[row] = position + n
