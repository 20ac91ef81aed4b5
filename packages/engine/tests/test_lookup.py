"""Drafts of n-grams against a brute force over all places, on texts that repeat themselves."""

# pyright: basic
# numba has no types.

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagewood.engine.runner.cpu.compiled.drafting.lookup import MAX_N, MIN_N, draft_ngrams

UNKNOWN = -7  # beyond the known tokens
draft_ngrams.compile()


def expected(text: list[int], most: int, min_n: int, max_n: int) -> list[int]:
    """Return the draft for a text, from the definition."""
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[len(text) - n :]:
                copied = list(text)
                for j in range(most):
                    copied.append(copied[place + j])
                return copied[len(text) :]
    return []


def drafts(texts: list[list[int]], most: list[int], width: int, min_n: int, max_n: int) -> list[list[int]]:
    """Return the drafts for texts in rows in reverse order, and check that nothing else is written."""
    table = np.full((len(texts) + 1, width), UNKNOWN, np.int32)
    rows = np.arange(len(texts), 0, -1, dtype=np.int32)
    for row, text in zip(rows, texts, strict=True):
        table[row, : len(text)] = text
    before = table.copy()
    ends, counts = np.array([len(text) for text in texts], np.int32), np.full(len(texts), -1, np.int32)
    draft_ngrams(table, rows, ends, np.array(most, np.int32), min_n, max_n, counts)
    found: list[list[int]] = []
    for row, end, count in zip(rows, ends, counts, strict=True):
        found.append(table[row, end : end + count].tolist())
        before[row, end : end + count] = table[row, end : end + count]
    assert np.array_equal(table, before)
    return found


@settings(max_examples=300, deadline=None)
@given(data=st.data(), alphabet=st.integers(1, 4), min_n=st.integers(1, 4), more=st.integers(0, 6))
def test_the_latest_of_the_longest_matches_is_copied(data: st.DataObject, alphabet: int, min_n: int, more: int) -> None:
    texts = data.draw(st.lists(st.lists(st.integers(0, alphabet), max_size=40), min_size=1, max_size=4))
    most = data.draw(st.lists(st.integers(0, 9), min_size=len(texts), max_size=len(texts)))
    width = max(len(text) for text in texts) + data.draw(st.integers(0, 9))
    found = drafts(texts, most, width, min_n, min_n + more)
    for text, limit, draft in zip(texts, most, found, strict=True):
        assert draft == expected(text, min(limit, width - len(text)), min_n, min_n + more)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.sampled_from([127, 128, 129, 255, 256, 257, 500]),
    alphabet=st.sampled_from([2, 5, 30, 1000]),
    min_n=st.integers(1, 3),
)
@example(seed=0, length=2, alphabet=2, min_n=1)
def test_long_texts_are_searched_whole(seed: int, length: int, alphabet: int, min_n: int) -> None:
    text = np.random.default_rng(seed).integers(0, alphabet, length).tolist()
    assert drafts([text], [5], length + 5, min_n, MAX_N) == [expected(text, 5, min_n, MAX_N)]


@pytest.mark.parametrize("place", [2, 3, 127, 128, 129, 130, 131, 383, 384, 385, 397])
def test_a_match_is_found_at_any_distance(place: int) -> None:
    text = list(range(1000, 1400))
    text[place - 2 : place] = text[-2:] = [1, 2]
    assert drafts([text], [3], 420, MIN_N, MAX_N) == [(text + text[place:])[place : place + 3]]


def test_a_repetition_is_drafted_beyond_the_end() -> None:
    assert drafts([[9, 1, 2, 3, 1, 2, 3]], [8], 20, 2, 5) == [[1, 2, 3, 1, 2, 3, 1, 2]]
    assert drafts([[4, 4, 4]], [5], 20, 1, 5) == [[4] * 5]


@pytest.mark.parametrize(
    ("text", "most", "width"), [([], 4, 8), ([1], 4, 8), ([1, 1, 1], 0, 8), ([1, 1, 1], 4, 3), ([1, 2, 3, 4], 4, 8)]
)
def test_nothing_is_drafted(text: list[int], most: int, width: int) -> None:
    assert drafts([text], [most], width, 1, 4) == [[]]


def test_a_draft_ends_with_the_row() -> None:
    assert drafts([[1, 1, 1, 1]], [9], 6, MIN_N, MAX_N) == [[1, 1]]
