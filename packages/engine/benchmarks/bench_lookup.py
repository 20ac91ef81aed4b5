"""Drafts that look text up: microseconds by context and number of rows, and per token that is indexed.

The text is random with a skew, so that a few tokens are frequent.
Run: pytest packages/engine/benchmarks/bench_lookup.py --benchmark-enable
"""

# pyright: basic
# numba and pytest-benchmark are typed in part only.

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.runner.cpu.compiled.drafting.lookup import MAX_N, MIN_N, draft_ngrams
from pagewood.engine.runner.cpu.drafts.suffix import SuffixIndex

CONTEXTS = [1024, 8192, 32768]
NUM_ROWS = [1, 16]
MOST = 8


def text(num_rows: int, length: int) -> Int32:
    """Return a token table `[num_rows, length + MOST]` of skewed random tokens."""
    drawn = np.random.default_rng(0).zipf(1.3, (num_rows, length + MOST))
    return np.minimum(drawn, 30_000).astype(np.int32)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("length", CONTEXTS)
def test_ngrams(benchmark: Any, length: int, num_rows: int) -> None:
    draft_ngrams.compile()
    tokens, rows = text(num_rows, length), np.arange(num_rows, dtype=np.int32)
    ends, most, counts = (np.full(num_rows, number, np.int32) for number in (length, MOST, 0))
    benchmark(lambda: draft_ngrams(tokens, rows, ends, most, MIN_N, MAX_N, counts))


def filled(tokens: Int32, num_tokens: int) -> SuffixIndex:
    """Return an index with outputs of 1,000 tokens, whose rows hold requests of the same namespace."""
    index = SuffixIndex(tokens)
    outputs = text(1, num_tokens)[0]
    kept = tokens[0].copy()
    for start in range(0, num_tokens, 1000):
        tokens[0, :1000] = outputs[start : start + 1000]
        index.begin(0, 1, 0)
        index.advance(np.zeros(1, np.int32), np.full(1, 1000, np.int32))
    tokens[0] = kept
    for row in range(len(tokens)):
        index.begin(row, 1, tokens.shape[1] - MOST)
    return index


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("length", CONTEXTS)
@pytest.mark.parametrize("num_tokens", [20_000, 800_000])
def test_suffixes(benchmark: Any, num_tokens: int, length: int, num_rows: int) -> None:
    tokens, rows = text(num_rows, length), np.arange(num_rows, dtype=np.int32)
    index = filled(tokens, num_tokens)
    ends, most, counts = (np.full(num_rows, number, np.int32) for number in (length, MOST, 0))
    benchmark(lambda: index.draft(rows, ends, most, counts))


@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_indexing_a_step(benchmark: Any, num_rows: int) -> None:
    """Each row gains one token."""
    tokens, rows = text(num_rows, 100_000), np.arange(num_rows, dtype=np.int32)
    index, end = filled(tokens, 20_000), 0
    for row in rows.tolist():
        index.begin(row, 1, 0)

    def step() -> None:
        nonlocal end
        end = end % 100_000 + 1
        index.advance(rows, np.full(num_rows, end, np.int32))

    benchmark(step)
