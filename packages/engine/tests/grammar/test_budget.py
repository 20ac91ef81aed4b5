"""A grammar whose masks take long ends its requests with an error, and is not used again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from grammars.libraries import llguidance_for
from grammars.vocabularies import embedded
from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.grammar import GrammarCompiler, Matcher, mask_words
from pagewood.engine.grammar.budget import MAX_DEBT_S, PER_MASK_S, GrammarBudget
from pagewood.engine.grammar.mask import EndTokens
from pagewood.engine.grammar.request_matcher import RequestMatcher

VOCAB = 64


class Clock:
    """Seconds of work, which a state takes."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Working:
    """A state that allows every token; each call takes as long as its name is given."""

    def __init__(self, clock: Clock, seconds: dict[str, float]) -> None:
        self.clock = clock
        self.seconds = seconds
        self.failure: str | None = None

    def _work(self, name: str) -> None:
        self.clock.now_s += self.seconds.get(name, 0.0)

    def fill(self, row: Any) -> None:
        self._work("fill")
        row[:] = -1

    def consume(self, tokens: list[int]) -> bool:
        self._work("consume")
        return True

    def num_allowed(self, tokens: list[int]) -> int:
        self._work("num_allowed")
        return len(tokens)

    def roll_back(self, num_tokens: int) -> None:
        self._work("roll_back")

    def restart(self) -> None:
        self._work("restart")

    def forced(self) -> tuple[int, ...]:
        self._work("forced")
        return ()

    can_end = False
    is_stopped = False

    def copy(self) -> Working:
        return Working(self.clock, self.seconds)


def matchers(num: int, **seconds: float) -> list[RequestMatcher]:
    """Return matchers of one grammar whose calls take some time."""
    clock = Clock()
    budget = GrammarBudget(clock=clock)
    ends = EndTokens(frozenset({1}), others=frozenset(), vocab_size=VOCAB)
    states = [Working(clock, seconds) for _ in range(num)]
    return [RequestMatcher(state, ends=ends, vocab_size=VOCAB, budget=budget) for state in states]


def steps_until_it_fails(matcher: Matcher, most: int) -> int:
    row = np.zeros(mask_words(VOCAB), np.int32)
    for step in range(most):
        matcher.fill(row)
        matcher.forced()
        matcher.accepts([2, 3])
        matcher.fill_ahead([2, 3], np.zeros((3, mask_words(VOCAB)), np.int32))
        matcher.advance([2])
        if matcher.error is not None:
            return step
    return most


@pytest.mark.parametrize("call", ["fill", "consume", "num_allowed", "roll_back", "forced"])
def test_every_slow_call_is_counted(call: str) -> None:
    (matcher,) = matchers(1, **{call: 0.1})
    num_masks = 5  # of a step, each of which pays for a part of the slow call
    assert steps_until_it_fails(matcher, 100) <= 1 + MAX_DEBT_S / (0.1 - num_masks * PER_MASK_S)
    assert "took 0.5 s more than its masks may take" in (matcher.error or "")
    row = np.ones(mask_words(VOCAB), np.int32)
    matcher.fill(row)
    assert not row.any()
    assert not matcher.advance([2])
    assert matcher.accepts([2]) == 0


def test_masks_within_their_time_cost_nothing() -> None:
    (matcher,) = matchers(1, fill=PER_MASK_S / 2, consume=PER_MASK_S / 10)
    assert steps_until_it_fails(matcher, 5_000) == 5_000


def test_some_slow_masks_are_paid_for_by_fast_ones() -> None:
    (matcher,) = matchers(1, fill=MAX_DEBT_S * 0.9)
    row = np.zeros(mask_words(VOCAB), np.int32)
    matcher.fill(row)
    state: Any = matcher._state  # pyright: ignore[reportPrivateUsage]
    for _ in range(3):
        state.seconds["fill"] = 0.0
        for _ in range(int(MAX_DEBT_S / PER_MASK_S)):
            matcher.fill(row)
        state.seconds["fill"] = MAX_DEBT_S * 0.9
        matcher.fill(row)
    assert matcher.error is None


def test_the_requests_of_a_grammar_and_their_copies_share_its_time() -> None:
    first, second = matchers(2, fill=MAX_DEBT_S + 2 * PER_MASK_S)
    copy = second.copy()
    first.fill(np.zeros(mask_words(VOCAB), np.int32))
    for matcher in (first, second, copy):
        matcher.fill(np.zeros(mask_words(VOCAB), np.int32))
        assert "masks may take" in (matcher.error or "")


def test_an_ambiguous_grammar_ends_and_is_then_refused() -> None:
    vocabulary = embedded()
    compiler = GrammarCompiler(lambda: llguidance_for(vocabulary), deadline_s=60.0)
    grammar = Grammar(kind="lark", text='start: start start | "a"' + ' | "b"' * 800)
    pending = compiler.compile(grammar, end_tokens=frozenset())
    assert pending.wait()
    matcher = pending.result()
    assert not isinstance(matcher, Refusal)
    row = np.zeros(mask_words(vocabulary.vocab_size), np.int32)
    for _ in range(2_000):
        matcher.fill(row)
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed) or not matcher.advance([int(allowed[-1])]):
            break
    assert "masks may take" in (matcher.error or "")
    again = compiler.compile(grammar, end_tokens=frozenset()).result()
    assert isinstance(again, Refusal)
    assert (again.code, again.message[:24]) == ("invalid_grammar", "the grammar is too slow:")
    compiler.close()


def test_a_matcher_says_how_long_its_tokens_have_lately_taken() -> None:
    (matcher,) = matchers(1, fill=0.0041, consume=0.002, forced=0.001)
    state: Any = matcher._state  # pyright: ignore[reportPrivateUsage]
    row = np.zeros(mask_words(VOCAB), np.int32)
    slow: list[int] = []
    for step in range(30):
        if step == 2:
            state.seconds = {}
        matcher.fill(row)
        matcher.advance([2])
        matcher.forced()
        slow.append(matcher.slow_ms)
    assert slow[:3] == [4, 7, 6]  # the work of a token counts when the next one has come
    assert slow[1:] == sorted(slow[1:], reverse=True)
    assert slow[-1] == 0
    assert matcher.copy().slow_ms == 0
