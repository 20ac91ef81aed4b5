"""Changing the logits of rows that have penalties, biases or bad words, before a token is drawn from them.

What is changed depends on the text before the drawn token only. It is read from the token table, and behind the known
tokens from the drafts of the grant, so nothing is kept between steps, and a verified position gets the logits of a
decoded one. A row costs time in proportion to its text, not to the vocabulary.

Legend: V vocab_size, W wanted tokens, L tokens before the drawn one.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np

from pagewood.engine.runner.cpu.compiled.drawing.masks import apply_mask
from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, instruction
from pagewood.engine.runner.cpu.compiled.layout import NUM_ADJUSTMENT_COLUMNS, Adjustment, Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import (
    integer_rows,
    integers,
    long_rows,
    longs,
    vector,
    wait_for_host,
)

_F = np.float32
_HASH = np.uint32(2654435769)


@inlined
def _count(token: Any, is_output: Any, keys: Any, counts: Any, mask: Any) -> None:
    """Count a token in a table with open addresses."""
    place = np.int64((np.uint32(token) * _HASH) >> np.uint32(7)) & mask
    while keys[place] >= 0 and keys[place] != token:
        place = (place + 1) & mask
    keys[place] = token
    counts[place] += is_output


@exact
def _penalise(logits: Any, keys: Any, counts: Any, penalties: Any) -> None:
    """Change the logits of the tokens in a table."""
    repetition, frequency, presence = penalties[0], penalties[1], penalties[2]
    for place in range(keys.shape[0]):
        token = keys[place]
        if 0 <= token < logits.shape[0]:
            x = logits[token]
            if repetition != _F(1.0):
                x = x / repetition if x > _F(0.0) else x * repetition
            if counts[place] > 0:
                x = x - frequency * _F(counts[place]) - presence
            logits[token] = x


@exact
def _add_biases(logits: Any, biases: Any, values: Any, position: Any) -> None:
    """Add the biases that apply to a token drawn at a position."""
    for i in range(biases.shape[0]):
        token = biases[i, 0]
        if position < biases[i, 1] and 0 <= token < logits.shape[0]:
            logits[token] += values[3 * i + 2]


@exact
def _forbid(logits: Any, words: Any, num_words: Any, known: Any, start: Any, drafts: Any, depth: Any) -> None:
    """Give no probability to the last token of each bad word whose other tokens end the text.

    Args:
        logits: `[V]`.
        words: see `Adjustment.WORDS`.
        num_words: of the row.
        known: tokens of the row up to position `start`.
        start: first position of the grant.
        drafts: tokens of the grant, from that of `start` on.
        depth: tokens of the text behind position `start`.
    """
    at = 0
    for _ in range(num_words):
        size = np.int64(words[at])
        is_match = size - 1 <= start + depth + 1
        i = 1  # tokens before the drawn one
        while is_match and i < size:
            level = depth + 1 - i
            if level > 0:
                is_match = drafts[level] == words[at + size - i]
            else:
                is_match = known[start + level] == words[at + size - i]
            i += 1
        last = np.int64(words[at + size])
        if is_match and last < logits.shape[0]:
            logits[last] = -np.inf
        at += size + 1


@inlined
def _num_adjusted(num_rows: Any, scope: Any) -> Any:
    """Return the parts: one for each sampled grant, if any is adjusted."""
    return num_rows if scope[Column.NUM_ADJUSTED] > 0 else 0


@instruction(_num_adjusted)
@inlined
def adjust(scope: InScope, s: Part, logits_at: Any, vocab_size: Any, raw_at: Any) -> None:
    """Change the logits of sampled grant `s`, if its row has adjustments.

    If the row's tokens are reported by the model's own logits, these are kept. A row that is constrained waits for its
    masks; other threads go on with other rows meanwhile.

    Args:
        scope: a row of the table of scopes.
        s: index of the sampled grant.
        logits_at: address of `[W, V]`.
        vocab_size: V.
        raw_at: address of `[W, V]`, written: the logits before the change, if they are reported.
    """
    g = integers(scope[Column.SAMPLED], 0)[s]
    row = np.int64(integers(scope[Column.ROWS], 0)[g])
    entry = long_rows(scope[Column.ADJUSTMENTS], 0, NUM_ADJUSTMENT_COLUMNS)[row]
    if entry[Adjustment.IS_ON] == 0:
        return
    firsts, offsets = integers(scope[Column.FIRSTS], 0), integers(scope[Column.OFFSETS], 0)
    first, num_wanted = np.int64(firsts[s]), np.int64(firsts[s + 1] - firsts[s])
    start = np.int64(integers(scope[Column.STARTS], 0)[g])
    base = np.int64(offsets[g + 1]) - num_wanted  # first wanted token
    known = integers(scope[Column.TOKEN_TABLE] + 4 * row * scope[Column.TOKENS_PER_ROW], 0)
    of_grant = integers(scope[Column.TOKENS] + 4 * np.int64(offsets[g]), 0)
    words, num_words = integers(entry[Adjustment.WORDS], 0), entry[Adjustment.NUM_WORDS]
    num_prompt, num_biases = entry[Adjustment.NUM_PROMPT], entry[Adjustment.NUM_BIASES]
    biases, values = integer_rows(entry[Adjustment.BIASES], num_biases, 3), vector(entry[Adjustment.BIASES], 0)
    is_kept = entry[Adjustment.REPORTED] > 0 and entry[Adjustment.IS_PROCESSED] == 0
    mask_size = (vocab_size + 31) // 32
    masks_at = np.int64(0)
    if scope[Column.GATE] != 0:
        gate = longs(scope[Column.GATE], 0)
        if gate[1 + row] > 0:
            wait_for_host(gate, 0, 1)
            masks_at = gate[0] + 4 * mask_size * (gate[1 + row] - 1)
    for j in range(num_wanted):
        depth = base + j - np.int64(offsets[g])
        position = start + depth + 1
        logits = vector(logits_at + 4 * (first + j) * vocab_size, vocab_size)
        if is_kept:
            raw = vector(raw_at + 4 * (first + j) * vocab_size, vocab_size)
            for i in range(vocab_size):
                raw[i] = logits[i]
        if entry[Adjustment.PENALTIES] != 0:
            size = np.int64(8)
            while size < 2 * position:
                size *= 2
            keys, counts = np.full(size, -1, np.int32), np.zeros(size, np.int32)
            for i in range(start + 1):
                _count(known[i], i >= num_prompt, keys, counts, size - 1)
            for i in range(1, depth + 1):
                _count(of_grant[i], start + i >= num_prompt, keys, counts, size - 1)
            _penalise(logits, keys, counts, vector(entry[Adjustment.PENALTIES], 3))
        _add_biases(logits, biases, values, position)
        if num_words > 0:
            _forbid(logits, words, num_words, known, start, of_grant, depth)
        if masks_at != 0:
            apply_mask(logits, integers(masks_at + 4 * mask_size * j, mask_size))
