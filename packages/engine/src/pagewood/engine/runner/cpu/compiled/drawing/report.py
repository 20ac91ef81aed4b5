"""Log probabilities of tokens, from the logits of a step: those of tokens that were drawn, and of prompt tokens.

Legend: V vocab_size, W wanted tokens, S sampled grants, K alternatives of a token.
"""

# pyright: basic
# numba has no types.

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pagewood.engine.api import MAX_LOGPROBS
from pagewood.engine.core.messages.sampling_table import SamplingColumn
from pagewood.engine.runner.cpu.compiled.drawing.choice import NUM_CHOICE_COLUMNS, best_of, kept_range
from pagewood.engine.runner.cpu.compiled.instruction import InScope, Part, instruction
from pagewood.engine.runner.cpu.compiled.layout import NUM_ADJUSTMENT_COLUMNS, Adjustment, Column
from pagewood.engine.runner.cpu.compiled.machine.kernel import exact, inlined
from pagewood.engine.runner.cpu.compiled.machine.memory import integer_rows, integers, long_rows, vector
from pagewood.engine.runner.cpu.compiled.machine.numeric import exp

_F = np.float32
_U = np.uint64  # type of indices: numba does not test an unsigned index for negative values
_NUM_SUMS = 64
_PER_SUM = 64  # numbers that are added in float32
RANGE_COLUMN = 3 + 2 * MAX_LOGPROBS
NUM_REPORT_COLUMNS = RANGE_COLUMN + 2
"""Columns of a report: log probability (float32), rank, K, then K tokens, and from MAX_LOGPROBS later on their log
probabilities (float32); from RANGE_COLUMN on the result of `kept_range` (float32), if it is wanted and the temperature
is not 0."""


@exact
def _distance(largest: Any, x: Any, temperature: Any) -> Any:
    """Return how far a logit is below the largest, after temperature; rounded as where tokens are drawn."""
    return largest / temperature - x / temperature


@exact
def _log_mass(logits: Any, largest: Any, temperature: Any, nearest: Any, limit: Any) -> Any:
    """Return the logarithm of the sum of e to the power of minus the distances in [nearest, limit].

    There are many sums side by side, so that numbers are added as vectors.
    """
    size = _U(logits.shape[0])
    sums, total = np.zeros(_NUM_SUMS, np.float32), 0.0
    n = 0
    for start in range(_U(0), size, _U(_NUM_SUMS)):
        for j in range(_U(min(size - start, _U(_NUM_SUMS)))):
            distance = _distance(largest, logits[start + j], temperature)
            sums[j] += exp(-distance) if nearest <= distance <= limit else _F(0.0)
        n += 1
        if n == _PER_SUM:
            for j in range(_NUM_SUMS):
                total += np.float64(sums[j])
                sums[j] = _F(0.0)
            n = 0
    for j in range(_NUM_SUMS):
        total += np.float64(sums[j])
    return _F(math.log(total))


@exact
def _key(logits: Any, i: Any, best: Any, temperature: Any, nearest: Any, limit: Any) -> Any:
    """Return a number by which tokens are ordered as by their probability: minus infinity if they have none."""
    if temperature == _F(0.0):
        return logits[i] if i == best else -_F(np.inf)
    distance = _distance(logits[best], logits[i], temperature)
    return logits[i] if nearest <= distance <= limit else -_F(np.inf)


@exact
def _find_top(
    logits: Any, best: Any, temperature: Any, nearest: Any, limit: Any, num: Any, ids: Any, values: Any
) -> None:
    """Write the `num` most probable tokens and their keys, best first, of equal ones the smaller token first."""
    n = 0
    for i in range(logits.shape[0]):
        if n == num and not logits[i] > values[n - 1]:
            continue
        x = _key(logits, i, best, temperature, nearest, limit)
        if n == num and not x > values[n - 1]:
            continue
        place = n if n < num else n - 1
        while place > 0 and x > values[place - 1]:
            ids[place], values[place] = ids[place - 1], values[place - 1]
            place -= 1
        ids[place], values[place] = i, x
        n = min(n + 1, num)


@exact
def _describe(logits: Any, token: Any, num_top: Any, best: Any, temperature: Any, nearest: Any, limit: Any,
              out: Any, whole: Any) -> None:  # fmt: skip
    """Write a report.

    Args:
        logits: `[V]`.
        token: that is reported.
        num_top: K.
        best: the token with the largest logit.
        temperature: 0: the largest logit has all of the probability.
        nearest: how far below the largest logit, after temperature, a token must lie to have a probability.
        limit: how far it may lie.
        out: `[NUM_REPORT_COLUMNS] float32`, written.
        whole: the same memory as int32.
    """
    largest = logits[best]
    is_greedy = temperature == _F(0.0)
    log_mass = _F(0.0) if is_greedy else _log_mass(logits, largest, temperature, nearest, limit)
    num = min(num_top, logits.shape[0])
    own, rank = _key(logits, token, best, temperature, nearest, limit), 1
    for i in range(logits.shape[0]):
        if logits[i] > own:
            rank += _key(logits, i, best, temperature, nearest, limit) > own
    whole[1], whole[2] = rank, num
    ids, values = whole[3 : 3 + MAX_LOGPROBS], out[3 + MAX_LOGPROBS :]
    if num > 0:
        _find_top(logits, best, temperature, nearest, limit, num, ids, values)
    for k in range(num + 1):
        x = own if k == num else values[k]
        value = x  # minus infinity stays what it is
        if x > -_F(np.inf):
            value = _F(0.0) if is_greedy else -_distance(largest, x, temperature) - log_mass
        if k == num:
            out[0] = value
        else:
            values[k] = value


@inlined
def _num_reported(num_rows: Any, scope: Any) -> Any:
    """Return the parts: one for each wanted token, if any is reported."""
    return num_rows if scope[Column.NUM_REPORTED] > 0 else 0


@instruction(_num_reported)
@inlined
def report(
    scope: InScope, w: Part, logits_at: Any, vocab_size: Any, raw_at: Any, found_at: Any, counts_at: Any,
    out_at: Any,
) -> None:  # fmt: skip
    """Report the token after wanted token `w`, if it was drawn or belongs to a prompt, and its request asks for it.

    Args:
        scope: a row of the table of scopes.
        w: index of the wanted token.
        logits_at: address of `[W, V]`, from which tokens were drawn.
        vocab_size: V.
        raw_at: address of `[W, V]`, the logits before they were changed, of rows with changes that are reported.
        found_at: address of `[W] int32`, the tokens of a grant, from its first wanted row on.
        counts_at: address of `[S] int32`, how many there are.
        out_at: address of `[W, NUM_REPORT_COLUMNS]`, written.
    """
    num_sampled = scope[Column.NUM_SAMPLED]
    firsts = integers(scope[Column.FIRSTS], 0)
    logits = vector(logits_at + 4 * w * vocab_size, vocab_size)
    at = out_at + 4 * w * NUM_REPORT_COLUMNS
    out, whole = vector(at, NUM_REPORT_COLUMNS), integers(at, NUM_REPORT_COLUMNS)
    temperature, nearest, limit = _F(1.0), _F(0.0), _F(np.inf)
    if w >= firsts[num_sampled]:
        scored = integer_rows(scope[Column.SCORED], 0, 2)[w - firsts[num_sampled]]
        token, num_top = np.int64(scored[0]), np.int64(scored[1])
        best = best_of(logits)
    else:
        s = np.int64(0)
        while firsts[s + 1] <= w:
            s += 1
        g = integers(scope[Column.SAMPLED], 0)[s]
        row = np.int64(integers(scope[Column.ROWS], 0)[g])
        entry = long_rows(scope[Column.ADJUSTMENTS], 0, NUM_ADJUSTMENT_COLUMNS)[row]
        if entry[Adjustment.REPORTED] == 0:
            return
        if w - firsts[s] >= integers(counts_at, 0)[s]:
            return
        token, num_top = np.int64(integers(found_at, 0)[w]), entry[Adjustment.REPORTED] - 1
        is_processed = entry[Adjustment.IS_PROCESSED] != 0
        if is_processed or entry[Adjustment.HAS_RANGE] != 0:
            best = best_of(logits)
            choice_at = scope[Column.CHOICES] + 4 * NUM_CHOICE_COLUMNS * w
            choice = vector(choice_at, NUM_CHOICE_COLUMNS)
            if best >= 0 and choice[SamplingColumn.TEMPERATURE] > _F(0.0):
                nearest, limit = kept_range(logits, best, choice, integers(choice_at, NUM_CHOICE_COLUMNS))
                out[RANGE_COLUMN], out[RANGE_COLUMN + 1] = nearest, limit
            if is_processed:
                temperature = choice[SamplingColumn.TEMPERATURE]
        if not is_processed:
            nearest, limit = _F(0.0), _F(np.inf)
            if entry[Adjustment.IS_ON] != 0:
                logits = vector(raw_at + 4 * w * vocab_size, vocab_size)
            best = best_of(logits)
    if best < 0 or not 0 <= token < vocab_size:
        out[0], whole[1], whole[2] = _F(np.nan), 0, 0
        return
    _describe(logits, token, num_top, best, temperature, nearest, limit, out, whole)
