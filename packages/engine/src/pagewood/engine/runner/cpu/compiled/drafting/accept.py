"""Verifying drafted tokens, by comparison or by rejection sampling.

`accept` accepts a draft while it equals the token that the target draws at its position. `reject` accepts it with a
probability, so that the tokens follow the target's distribution.

The drafts of a grant are a chain or a tree. Its node 0 is the last known token of the row. In a tree, a parent comes
before its children, node i lies in slot start + i of the row, and its position is start + its depth.

Legend: T tokens of a scope, G grants, S sampled grants, W wanted tokens.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.drafting.rejection import verify
from pagewood.engine.runner.cpu.compiled.drawing.sampling import NUM_CHOICE_COLUMNS, POSITION, best_of
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import floats, integer_rows, integers, vector


@inlined
def accept(scope: Any, s: Any, drawn_at: Any, found_at: Any, counts_at: Any, nodes_at: Any) -> None:
    """Accept the drafts of sampled grant `s`, and write its tokens to the table and its row's length.

    It yields the token drawn at its first wanted row, and goes on with the draft that equals it. It ends before a token
    that could not be drawn: plain decoding would have yielded the tokens before.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        drawn_at: address of `[W] int32`, the token drawn at each wanted row, or `NO_NUMBER` or `NO_CHANCE`.
        found_at: address of `[W] int32`, written: its tokens, from its first wanted row on, or why there is none.
        counts_at: address of `[S] int32`, written: how many there are.
        nodes_at: address of `[W] int32`, written: the node after which each of them was drawn.
    """
    if scope[Column.SAMPLES] == 0:
        return
    g = integers(scope[Column.SAMPLED], 0)[s]
    firsts, offsets = integers(scope[Column.FIRSTS], 0), integers(scope[Column.OFFSETS], 0)
    first, num_wanted = np.int64(firsts[s]), np.int64(firsts[s + 1] - firsts[s])
    row, base = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(offsets[g + 1]) - num_wanted
    start = np.int64(integers(scope[Column.STARTS], 0)[g])
    position = start + base - offsets[g] + 1  # of the first token that is drawn
    is_tree = integers(scope[Column.TREES], 0)[g] != 0
    parents, drafts = integers(scope[Column.PARENTS], 0), integers(scope[Column.TOKENS], 0)
    width = scope[Column.TOKENS_PER_ROW]
    known = integers(scope[Column.TOKEN_TABLE] + 4 * row * width, width)
    drawn, found, nodes = integers(drawn_at, 0), integers(found_at, 0), integers(nodes_at, 0)
    node, n = np.int64(0), np.int64(0)
    found[first] = drawn[first]
    while node >= 0 and position + n < width:
        token = drawn[first + node]
        if token < 0:
            break
        found[first + n], nodes[first + n], known[position + n] = token, node, token
        n += 1
        following = np.int64(-1)
        for child in range(node + 1, num_wanted if is_tree else min(node + 2, num_wanted)):
            if is_tree and parents[base + child] != node:
                continue
            if drafts[base + child] == token:
                following = child
                break
        node = following
    integers(counts_at, 0)[s] = n
    if n > 0:
        integers(scope[Column.LENGTHS], 0)[row] = position + n


@inlined
def reject(
    scope: Any, s: Any, logits_at: Any, held_at: Any, vocab_size: Any, num_drafts: Any, found_at: Any, counts_at: Any,
    nodes_at: Any, scratch_at: Any,
) -> None:  # fmt: skip
    """Verify the chain of sampled grant `s` by rejection sampling, and write its tokens and its row's length.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        logits_at: address of `[W, V]`, logits of the target.
        held_at: address of `[S, num_drafts, V]`, logits that drafts were drawn from; see `hold_logits`.
        vocab_size: V.
        num_drafts: most drafts of a grant.
        found_at: address of `[W] int32`, written: its tokens, from its first wanted row on, or why there is none.
        counts_at: address of `[S] int32`, written: how many there are; 0 if there is no first token.
        nodes_at: address of `[W] int32`, written: the node after which each of them was drawn.
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
            floats(held_at + 4 * s * num_drafts * vocab_size, num_drafts, vocab_size),
            integers(scope[Column.TOKENS] + 4 * (base + 1), max(num_places - 1, 0)),
            vector(choice_at, NUM_CHOICE_COLUMNS), integers(choice_at, NUM_CHOICE_COLUMNS), found,
            floats(scratch_at + 8 * s * vocab_size, 2, vocab_size),
        )
    )  # fmt: skip
    known = integers(scope[Column.TOKEN_TABLE] + 4 * row * width, width)
    nodes = integers(nodes_at + 4 * first, num_places)
    for i in range(n):
        known[position + i], nodes[i] = found[i], i
    integers(counts_at, 0)[s] = n
    if n > 0:
        integers(scope[Column.LENGTHS], 0)[row] = position + n
    elif num_places > 0:
        found[0] = best_of(vector(logits_at + 4 * first * vocab_size, vocab_size))


@inlined
def plant(scope: Any, s: Any) -> None:
    """Give the nodes of sampled grant `s`, if it is a tree, their paths, rotations and positions, by their parents."""
    g = integers(scope[Column.SAMPLED], 0)[s]
    if integers(scope[Column.TREES], 0)[g] == 0:
        return
    offsets = integers(scope[Column.OFFSETS], 0)
    base, count = np.int64(offsets[g]), np.int64(offsets[g + 1] - offsets[g])
    start, first = np.int64(integers(scope[Column.STARTS], 0)[g]), np.int64(integers(scope[Column.FIRSTS], 0)[s])
    half, path_size = scope[Column.HALF], scope[Column.PATH_SIZE]
    parents = integers(scope[Column.PARENTS], 0)
    for i in range(count):
        path = integers(scope[Column.PATHS] + 4 * (base + i) * path_size, path_size)
        depth = np.int64(0)
        if i > 0:
            parent = max(np.int64(0), min(np.int64(parents[base + i]), i - 1))
            others = integers(scope[Column.PATHS] + 4 * (base + parent) * path_size, path_size)
            depth = np.int64(others[0]) + 1
            for j in range(1, depth + 1):
                path[j] = others[j]
        path[0], path[1 + depth] = depth, i
        for table, out in (
            (scope[Column.COSINE_TABLE], scope[Column.COSINES]),
            (scope[Column.SINE_TABLE], scope[Column.SINES]),
        ):
            source, target = vector(table + 4 * half * (start + depth), half), vector(out + 4 * half * (base + i), half)
            for d in range(half):
                target[d] = source[d]
        at = scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * (first + i)
        integers(at, NUM_CHOICE_COLUMNS)[POSITION] = start + depth + 1


@inlined
def compact(
    scope: Any, s: Any, memory: Any, groups: Any, page_size: Any, words: Any, nodes_at: Any, counts_at: Any,
    first_row: Any,
) -> None:  # fmt: skip
    """Move what the pages hold of the accepted nodes of sampled grant `s`, if it is a tree, to consecutive slots.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        memory: address of `[pages, groups, page_size, words]`, words of four bytes.
        groups: of a page, for example its key heads and its value heads.
        page_size: slots of a page.
        words: of a slot in a group.
        nodes_at: see `accept`.
        counts_at: see `accept`.
        first_row: of the page table of the memory.
    """
    g = integers(scope[Column.SAMPLED], 0)[s]
    if integers(scope[Column.TREES], 0)[g] == 0 or scope[Column.SAMPLES] == 0:
        return
    page_table = integer_rows(scope[Column.PAGE_TABLE], 0, scope[Column.PAGES_PER_ROW])
    row, start = first_row + integers(scope[Column.ROWS], 0)[g], np.int64(integers(scope[Column.STARTS], 0)[g])
    first = integers(scope[Column.FIRSTS], 0)[s]
    nodes = integers(nodes_at, 0)
    for depth in range(1, integers(counts_at, 0)[s]):  # ascending: a node is at least as large as its depth
        source, target = start + nodes[first + depth], start + depth
        if source == target:
            continue
        source_page = np.int64(page_table[row, source // page_size])
        target_page = np.int64(page_table[row, target // page_size])
        for group in range(groups):
            held = ((source_page * groups + group) * page_size + source % page_size) * words
            place = ((target_page * groups + group) * page_size + target % page_size) * words
            for i in range(words):
                integers(memory + 4 * (place + i), 1)[0] = integers(memory + 4 * (held + i), 1)[0]
