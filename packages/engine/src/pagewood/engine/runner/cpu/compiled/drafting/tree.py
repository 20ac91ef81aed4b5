"""Growing a tree of drafts level by level, and choosing the nodes that the target verifies.

A row's tree begins at its last known token. Every level offers candidates: of each node of the beam, the `topk` tokens
that the drafter would choose first. Its best candidates, `topk` at most, are the beam, which the drafter computes for
the next level. At the end the best candidates of all levels are the nodes of the tree. A candidate is as good as the
sum of the logarithms of the probabilities on its path, so it is never better than its parent.

The probability of a token is its share of exp(logit - T log E), for the temperature T and the token's noise E at the
row's position. Greedy rows have T = 0, which leaves the softmax. With T > 0, the order of these numbers is that of the
race by which the target draws. So the first candidate is the token that the drafter would draw with the same noise,
and the others are those that a target of slightly other logits would draw.

Each row of the runner has candidates, `[C, 4]` with the columns token, parent (-1: the last known token), score
(float32) and place (in the beam, 0: not there), and a beam, `[levels, topk]` indices of candidates, -1 where there is
none. The first level has topk candidates and every further one topk^2, so C = topk + (levels - 1) topk^2. The node of
the beam in place p lies in the p-th slot behind the root of the drafter's tree, which is in place 0. `firsts` has the
first place of each level and the end of the last, `[levels + 1]`.

Legend: S sampled grants of a scope, W wanted tokens, K topk, E elements of a hidden state.
Source: Li et al., EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees, 2024 (expansion and choice).
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagewood.engine.core.sampling import SamplingColumn
from pagewood.engine.runner.cpu.compiled.drawing.noise import exponential, row_key
from pagewood.engine.runner.cpu.compiled.drawing.race import first_to_arrive
from pagewood.engine.runner.cpu.compiled.drawing.sampling import (
    NUM_CHOICE_COLUMNS,
    POSITION,
    best_of,
    kept_range,
    seed_of,
)
from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, instruction, single_rows
from pagewood.engine.runner.cpu.compiled.layout import Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined, kernel
from pagewood.engine.runner.cpu.compiled.machine.memory import integer_rows, integers, longs, vector

NUM_NODE_COLUMNS = 4
_TOKEN, _PARENT, _SCORE, _PLACE = range(NUM_NODE_COLUMNS)
_F = np.float32
_NONE = _F(-np.inf)  # the score of a candidate that is not there
_REACH = 16.0  # how far below the largest logit a logit may lie, in units of the temperature if that is above 1


@exact
def _number(logits: Any, best: Any, i: Any, temperature: Any, key: Any) -> Any:
    """Return the logit of a token, less the largest one, with its noise."""
    distance = np.float64(logits[best]) - np.float64(logits[i])
    return -distance - temperature * math.log(exponential(key, i)) if temperature > 0.0 else -distance


@instruction(single_rows)
@exact
def expand(
    logits_at: Any, choices_at: Any, tokens_at: Any, scores_at: Any, vocab_size: Any, topk: Any, w: Part
) -> None:
    """Write the K best tokens, the first one that is drawn, then descending, and the logarithms of their probabilities.

    Tokens whose logits lie far below the largest one are left out, as those that the filters rule out. There are no
    candidates if a logit is not a number.

    Args:
        logits_at: address of `[W, V] float32`.
        choices_at: address of `[W, NUM_CHOICE_COLUMNS]`, how to draw.
        tokens_at: address of `[W, K] int32`, written; -1 where there are fewer.
        scores_at: address of `[W, K] float32`, written; minus infinity where there are fewer.
        vocab_size: V.
        topk: K.
        w: the row.
    """
    logits, at = vector(logits_at + 4 * vocab_size * w, vocab_size), choices_at + 4 * NUM_CHOICE_COLUMNS * w
    choice, exact_choice = vector(at, NUM_CHOICE_COLUMNS), integers(at, NUM_CHOICE_COLUMNS)
    tokens, scores = integers(tokens_at + 4 * topk * w, topk), vector(scores_at + 4 * topk * w, topk)
    for j in range(tokens.shape[0]):
        tokens[j], scores[j] = -1, _NONE
    best, scale = best_of(logits), choice[SamplingColumn.TEMPERATURE]
    temperature = np.float64(scale)
    if best < 0:
        return
    first, nearest, limit, key = np.int64(best), _F(0.0), _F(np.inf), np.uint64(0)
    if temperature > 0.0:
        key = row_key(seed_of(exact_choice), exact_choice[POSITION])
        nearest, limit = kept_range(logits, best, choice, exact_choice)
        first = first_to_arrive(logits, best, scale, nearest, limit, key)
    tokens[0], scores[0] = first, _F(0.0)
    if not abs(logits[best]) < np.inf:
        return
    count, total, lead = 1, 1.0, _number(logits, best, first, temperature, key)
    lowest = _F(logits[best] - _REACH * max(1.0, temperature))
    for i in range(logits.shape[0]):
        if logits[i] < lowest or i == first:
            continue
        if temperature > 0.0 and not nearest <= logits[best] / scale - logits[i] / scale <= limit:
            continue
        score = _F(_number(logits, best, i, temperature, key) - lead)
        total += math.exp(score)
        if count == tokens.shape[0] and not score > scores[count - 1]:
            continue
        count = min(count + 1, tokens.shape[0])
        at = count - 1
        while at > 1 and score > scores[at - 1]:
            tokens[at], scores[at] = tokens[at - 1], scores[at - 1]
            at -= 1
        if at > 0:
            tokens[at], scores[at] = i, score
    shift = _F(math.log(total))
    for j in range(count):
        scores[j] -= shift


@inlined
def _num_candidates(topk: Any, level: Any) -> Any:
    """Return how many candidates the levels before `level` have; levels count from 1."""
    return 0 if level < 2 else topk + (level - 2) * topk * topk


@inlined
def _nodes_of(nodes_at: Any, row: Any, size: Any) -> Any:
    """Return the candidates of a row, as integers."""
    return integer_rows(nodes_at + 4 * NUM_NODE_COLUMNS * row * size, size, NUM_NODE_COLUMNS)


@inlined
def _scores_of(nodes_at: Any, row: Any, size: Any) -> Any:
    """Return the same memory as `_nodes_of`, flat, as float32."""
    return vector(nodes_at + 4 * NUM_NODE_COLUMNS * row * size, NUM_NODE_COLUMNS * size)


@inlined
def _best(scores: Any, first: Any, last: Any, taken: Any, column: Any) -> Any:
    """Return the best candidate in [first, last) whose `column` of `taken` is 0, the first of equal ones, or -1."""
    best, score = np.int64(-1), _NONE
    for c in range(first, last):
        if taken[c, column] == 0 and scores[NUM_NODE_COLUMNS * c + _SCORE] > score:
            best, score = np.int64(c), scores[NUM_NODE_COLUMNS * c + _SCORE]
    return best


@instruction(single_rows)
@inlined
def select(
    scope: InScope, s: Part, tokens_at: Any, scores_at: Any, nodes_at: Any, beams_at: Any, topk: Any, num_levels: Any,
    level: Any, firsts_at: Any,
) -> None:  # fmt: skip
    """Enter the candidates of a level for sampled grant `s`, and choose the beam among them.

    Args:
        scope: a row of the table of scopes; the grant's wanted rows are the nodes of the beam before, in their order.
        s: index of the sampled grant.
        tokens_at: address of `[W, topk] int32`, see `expand`.
        scores_at: address of `[W, topk] float32`.
        nodes_at: address of `[rows, C, 4]`, the candidates of all rows of the runner.
        beams_at: address of `[rows, num_levels, topk] int32`, their beams.
        topk: K.
        num_levels: of the largest tree.
        level: from 1 on; the first one empties the row.
        firsts_at: address of `[num_levels + 1] int32`.
    """
    firsts = integers(firsts_at, num_levels + 1)
    row = np.int64(integers(scope[Column.ROWS], 0)[integers(scope[Column.SAMPLED], 0)[s]])
    start, size = np.int64(integers(scope[Column.FIRSTS], 0)[s]), _num_candidates(topk, num_levels + 1)
    nodes, scores = _nodes_of(nodes_at, row, size), _scores_of(nodes_at, row, size)
    beams = integer_rows(beams_at + 4 * row * num_levels * topk, num_levels, topk)
    tokens, new_scores = integers(tokens_at, 0), vector(scores_at, 0)
    if level == 1:
        for c in range(size):
            nodes[c, _PLACE], scores[NUM_NODE_COLUMNS * c + _SCORE] = 0, _NONE
    first = last = _num_candidates(topk, level)
    for b in range(1 if level == 1 else firsts[level - 1] - firsts[level - 2]):
        parent = -1 if level == 1 else beams[level - 2, b]
        score = _F(0.0)
        if parent >= 0:
            score = scores[NUM_NODE_COLUMNS * parent + _SCORE]
        elif level > 1:
            score = _NONE
        for j in range(topk):
            source = (start + b) * topk + j
            nodes[last, _TOKEN], nodes[last, _PARENT], nodes[last, _PLACE] = tokens[source], parent, 0
            scores[NUM_NODE_COLUMNS * last + _SCORE] = score + new_scores[source]
            last += 1
    for b in range(firsts[level] - firsts[level - 1]):
        best = _best(scores, first, last, nodes, _PLACE)
        beams[level - 1, b] = best
        if best >= 0:
            nodes[best, _PLACE] = firsts[level - 1] + b


@instruction(single_rows)
@inlined
def climb(
    scope: InScope, s: Part, nodes_at: Any, beams_at: Any, topk: Any, num_levels: Any, level: Any, tags_at: Any,
    page_size: Any, firsts_at: Any,
) -> None:  # fmt: skip
    """Make the beam of a level the tokens of sampled grant `s`, with the paths that lead to them.

    The tags of their slots become 0, because these slots do not hold the row's text.

    Args:
        scope: a row of the table of scopes, whose grants have the beam's tokens each.
        s: index of the sampled grant.
        nodes_at: see `select`.
        beams_at: see `select`.
        topk: K.
        num_levels: of the largest tree.
        level: of the beam.
        tags_at: address of `[pages, page_size] int64`.
        page_size: slots of a page.
        firsts_at: see `select`.
    """
    firsts = integers(firsts_at, num_levels + 1)
    g = integers(scope[Column.SAMPLED], 0)[s]
    row, start = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(integers(scope[Column.STARTS], 0)[g])
    base, size = np.int64(integers(scope[Column.OFFSETS], 0)[g]), _num_candidates(topk, num_levels + 1)
    nodes, beams = _nodes_of(nodes_at, row, size), integers(beams_at + 4 * row * num_levels * topk, num_levels * topk)
    pages, tags = integer_rows(scope[Column.PAGE_TABLE], 0, scope[Column.PAGES_PER_ROW]), longs(tags_at, 0)
    tokens, path_size = integers(scope[Column.TOKENS], 0), scope[Column.PATH_SIZE]
    for b in range(firsts[level] - firsts[level - 1]):
        node, slot = beams[(level - 1) * topk + b], start + b
        tokens[base + b] = nodes[node, _TOKEN] if node >= 0 else 0
        path = integers(scope[Column.PATHS] + 4 * (base + b) * path_size, path_size)
        path[0], path[1] = level, 0
        for depth in range(level, 0, -1):
            path[1 + depth] = firsts[depth - 1]  # any node of that depth: no result is read
            if node >= 0:
                path[1 + depth] = nodes[node, _PLACE]
                node = nodes[node, _PARENT]
        tags[np.int64(pages[row, slot // page_size]) * page_size + slot % page_size] = 0


@instruction(single_rows)
@inlined
def keep_beam(scope: InScope, s: Part, x_at: Any, held_at: Any, topk: Any, num: Any, size: Any) -> None:
    """Copy the `num` wanted rows of sampled grant `s` in `x_at` `[W, size]` to `held_at` `[rows, topk, size]`."""
    row = np.int64(integers(scope[Column.ROWS], 0)[integers(scope[Column.SAMPLED], 0)[s]])
    first = np.int64(integers(scope[Column.FIRSTS], 0)[s])
    source = vector(x_at + 4 * first * size, num * size)
    target = vector(held_at + 4 * row * topk * size, num * size)
    for i in range(num * size):
        target[i] = source[i]


@instruction(single_rows)
@inlined
def inherit(
    scope: InScope, s: Part, states_at: Any, held_at: Any, nodes_at: Any, beams_at: Any, topk: Any, num_levels: Any,
    level: Any, out_at: Any, size: Any, firsts_at: Any,
) -> None:  # fmt: skip
    """Copy the hidden states of the parents of a beam to the rows of its nodes in `out_at` `[T, size]`.

    Args:
        scope: a row of the table of scopes, whose grants have the beam's tokens each.
        s: index of the sampled grant.
        states_at: address of `[rows, size]`, the states that the nodes of the first level come from.
        held_at: address of `[rows, topk, size]`, those of the beam before, see `keep_beam`.
        nodes_at: see `select`.
        beams_at: see `select`.
        topk: K.
        num_levels: of the largest tree.
        level: of the beam.
        out_at: written.
        size: E.
        firsts_at: see `select`.
    """
    firsts = integers(firsts_at, num_levels + 1)
    g = integers(scope[Column.SAMPLED], 0)[s]
    row, base = np.int64(integers(scope[Column.ROWS], 0)[g]), np.int64(integers(scope[Column.OFFSETS], 0)[g])
    nodes = _nodes_of(nodes_at, row, _num_candidates(topk, num_levels + 1))
    beams = integers(beams_at + 4 * row * num_levels * topk, num_levels * topk)
    for b in range(firsts[level] - firsts[level - 1]):
        at, node = states_at + 4 * row * size, beams[(level - 1) * topk + b]
        if level > 1:
            place = nodes[nodes[node, _PARENT], _PLACE] if node >= 0 else firsts[level - 2]
            at = held_at + 4 * (row * topk + place - firsts[level - 2]) * size
        source, target = vector(at, size), vector(out_at + 4 * (base + b) * size, size)
        for i in range(size):
            target[i] = source[i]


@instruction(single_rows)
@inlined
def graft(scope: InScope, s: Part, nodes_at: Any, topk: Any, num_levels: Any) -> None:
    """Give sampled grant `s` of the target the best candidates as drafts, with their parents; overwrites their places.

    If there are fewer than nodes, the others are children of the root with token 0, which may be verified like any.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        nodes_at: see `select`.
        topk: K.
        num_levels: of the largest tree.
    """
    g, firsts = integers(scope[Column.SAMPLED], 0)[s], integers(scope[Column.FIRSTS], 0)
    num_wanted = np.int64(firsts[s + 1] - firsts[s])
    if num_wanted < 2 or scope[Column.SAMPLES] == 0:
        return
    row, size = np.int64(integers(scope[Column.ROWS], 0)[g]), _num_candidates(topk, num_levels + 1)
    base = np.int64(integers(scope[Column.OFFSETS], 0)[g + 1]) - num_wanted
    tokens, parents = integers(scope[Column.TOKENS], 0), integers(scope[Column.PARENTS], 0)
    nodes, scores = _nodes_of(nodes_at, row, size), _scores_of(nodes_at, row, size)
    for c in range(size):
        nodes[c, _PLACE] = 0
    for _ in range(1, num_wanted):
        best = _best(scores, 0, size, nodes, _PLACE)
        if best >= 0:
            nodes[best, _PLACE] = 1
    parents[base] = -1
    n = 1
    for c in range(size):  # parents come before their children
        if nodes[c, _PLACE] != 0:
            nodes[c, _PLACE] = n
            parent = nodes[c, _PARENT]
            tokens[base + n], parents[base + n] = nodes[c, _TOKEN], nodes[parent, _PLACE] if parent >= 0 else 0
            n += 1
    for i in range(n, num_wanted):
        tokens[base + i], parents[base + i] = 0, 0


@instruction(single_rows)
@inlined
def line_up(scope: InScope, target: InScope, g: Part, places_at: Any) -> None:
    """Write which token of `target` each token of grant `g` in `scope` is, as long as no tree is in the way.

    Args:
        scope: a row of the table of scopes, which computes the grants of `target`, all of them sampled.
        target: a row of the table of scopes.
        g: index of the grant, in both.
        places_at: address of `[T] int32`, written.
    """
    offsets, others, places = (
        integers(scope[Column.OFFSETS], 0),
        integers(target[Column.OFFSETS], 0),
        integers(places_at, 0),
    )
    for i in range(offsets[g + 1] - offsets[g]):
        places[offsets[g] + i] = others[g] + i


@instruction(single_rows)
@inlined
def trace(scope: InScope, target: InScope, s: Part, places_at: Any, nodes_at: Any, counts_at: Any) -> None:
    """Complete the grant in `scope` that belongs to sampled grant `s` of `target`, where tokens have been accepted.

    Its wanted token is the one before the last accepted token. The tokens of a tree become its accepted nodes; those
    behind are repeated, and what is computed for them is overwritten before it is read.

    Args:
        scope: see `line_up`.
        target: see `line_up`.
        s: index of the sampled grant in `target`.
        places_at: see `line_up`.
        nodes_at: address of `[W] int32`, the node after which each token was drawn.
        counts_at: address of `[S] int32`, how many tokens each sampled grant has yielded.
    """
    if target[Column.SAMPLES] == 0:
        return
    g = integers(target[Column.SAMPLED], 0)[s]
    firsts, first = integers(target[Column.FIRSTS], 0), np.int64(integers(target[Column.FIRSTS], 0)[s])
    offsets, base = integers(scope[Column.OFFSETS], 0), np.int64(integers(target[Column.OFFSETS], 0)[g])
    last = max(np.int64(integers(counts_at, 0)[s]), np.int64(1)) - 1
    begin, end = np.int64(offsets[g]), np.int64(offsets[g + 1])
    if integers(target[Column.TREES], 0)[g] == 0:
        integers(scope[Column.WANTED], 0)[g] = end - np.int64(firsts[s + 1] - firsts[s]) + last
        return
    integers(scope[Column.WANTED], 0)[g] = begin + last
    nodes, places = integers(nodes_at, 0), integers(places_at, 0)
    for i in range(1, end - begin):
        places[begin + i] = base + nodes[first + min(i, last)]


@kernel("void(i8[:,::1], i8, i8, i8, i8, i8, i8)")
def shape(scopes: Any, index: Any, num_grants: Any, num: Any, first: Any, level: Any, shift: Any) -> None:
    """Complete a scope that is laid out: its tokens are the beam of a level of each grant's tree.

    Args:
        scopes: `[scopes, NUM_SCOPE_COLUMNS]`.
        index: of the scope; its grants have `num` tokens, all wanted, and begin at the position of the beam.
        num_grants: all sampled.
        num: nodes of the beam.
        first: the place of its first node.
        level: of the beam.
        shift: added to the positions of draws.
    """
    scope = scopes[index]
    half, starts, trees = scope[Column.HALF], integers(scope[Column.STARTS], 0), integers(scope[Column.TREES], 0)
    for g in range(num_grants):
        position = np.int64(starts[g])
        starts[g], trees[g] = position - level + first, 1 + first
        for b in range(num):
            token = g * num + b
            for table, out in (
                (scope[Column.COSINE_TABLE], scope[Column.COSINES]),
                (scope[Column.SINE_TABLE], scope[Column.SINES]),
            ):
                source, target = vector(table + 4 * half * position, half), vector(out + 4 * half * token, half)
                for d in range(half):
                    target[d] = source[d]
            at = scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * token
            integers(at, NUM_CHOICE_COLUMNS)[POSITION] = position + 1 + shift
