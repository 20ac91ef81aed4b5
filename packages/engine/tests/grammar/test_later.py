"""A grammar behind certain tokens: free before them, and behind them as if the text began there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewood.engine.api import Grammar
from pagewood.engine.grammar.later import LaterMatcher
from pagewood.engine.testing.echo_grammar import EchoMatcher, allowed_tokens, read_mask

VOCAB_SIZE = 12


@given(
    after=st.lists(st.integers(0, 1), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 99),
    choices=st.lists(st.integers(0, 999), max_size=30),
    num_ahead=st.integers(0, 5),
)
def test_masks_are_those_of_the_text_behind(
    after: tuple[int, ...], seed: int, choices: list[int], num_ahead: int
) -> None:
    grammar, ends = Grammar(kind="regex", text=f"{seed} 12 999 0", after=after), frozenset((7,))
    matcher = LaterMatcher(EchoMatcher(grammar, ends, VOCAB_SIZE), after)
    text: list[int] = []
    for choice in choices:
        allowed = allowed_tokens(grammar, text, ends, VOCAB_SIZE)
        matcher.fill(row := np.zeros(1, np.int32))
        assert read_mask(row, VOCAB_SIZE) == allowed
        token = allowed[choice % len(allowed)]
        if token in ends:
            break
        copy = matcher.copy()
        assert matcher.accepts([token]) == 1
        assert matcher.advance([token])
        copy.fill(again := np.zeros(1, np.int32))
        assert (again == row).all()
        text.append(token)
    drafts: list[int] = []
    for choice in range(num_ahead):
        allowed = allowed_tokens(grammar, text + drafts, ends, VOCAB_SIZE)
        drafts.append(allowed[(choice + seed) % len(allowed)])
        if drafts[-1] in ends:
            break
    num = matcher.fill_ahead(drafts, rows := np.zeros((num_ahead + 1, 1), np.int32))
    assert num >= len(drafts)
    for place in range(num):
        expected = allowed_tokens(grammar, text + drafts[:place], ends, VOCAB_SIZE)
        assert read_mask(rows[place], VOCAB_SIZE) == expected
    if matcher.forced():
        assert [matcher.forced()[0]] == allowed_tokens(grammar, text, ends, VOCAB_SIZE)


def test_too_many_tokens_before_are_refused() -> None:
    with pytest.raises(ValueError, match=r"grammar\.after must hold at most 32 token ids"):
        Grammar(kind="regex", text="a", after=(1,) * 33)
    with pytest.raises(ValueError, match=r"got \(-1,\)"):
        Grammar(kind="regex", text="a", after=(-1,))
