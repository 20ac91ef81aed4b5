"""Grammars for the echo model: which tokens may follow is a hash of the text, and often there is only one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from pagewood.engine.api import Grammar, Refusal
from pagewood.engine.core.messages.arrays import Int32
from pagewood.engine.grammar.entry import Entry, Marks, TokenTexts
from pagewood.engine.grammar.later import LaterMatcher
from pagewood.engine.grammar.mask import EndTokens
from pagewood.engine.grammar.matcher import Matcher

_SLOW_MS = (0, 3, 15, 60)
"""How long a slow grammar says that a token has taken, one of these."""
_KINDS = (1, 1, 2, 3, 5)
"""How many tokens may follow a text, one of these."""


def allowed_tokens(grammar: Grammar, text: Sequence[int], end_tokens: frozenset[int], vocab_size: int) -> list[int]:
    """Return the tokens that may follow a text, ascending; none if it is complete and no token ends it."""
    inside = text_inside(grammar, text)
    if inside is None:
        return [token for token in range(vocab_size) if token not in end_tokens]
    text = inside
    seed, length, _, _ = map(int, grammar.text.split())
    if len(text) >= length:
        return sorted(end_tokens)
    rng = random.Random(f"{seed} {len(text)} {text[-1] if text else 0}")
    count, can_end = rng.choice(_KINDS), rng.random() < 0.1
    candidates = [token for token in rng.sample(range(vocab_size), count + len(end_tokens)) if token not in end_tokens]
    return sorted({*candidates[:count], *(end_tokens if can_end else ())})


def text_inside(grammar: Grammar, text: Sequence[int]) -> Sequence[int] | None:
    """Return the part of a text to which the grammar applies: the part after its first mark; None: no mark has come."""
    if not grammar.after:
        return text
    ends = [end for end in range(1, len(text) + 1) if _said(text[:end]).endswith(grammar.after)]
    return text[ends[0] :] if ends else None


def behind(matcher: Matcher, marks: tuple[str, ...], end_tokens: frozenset[int], vocab_size: int) -> LaterMatcher:
    """Return `matcher` after some marks; the text of a token is its number in `<>`."""
    entry = Entry(_marks(marks, vocab_size), matcher)
    return LaterMatcher(matcher, entry, EndTokens(end_tokens, others=frozenset(), vocab_size=vocab_size))


@cache
def _marks(marks: tuple[str, ...], vocab_size: int) -> Marks:
    texts = [_said([token]).encode() for token in range(vocab_size)]
    return Marks(marks, TokenTexts(texts=texts, vocab_size=vocab_size))


def _said(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


class EchoMatcher:
    """The state of a request in a grammar; satisfies `grammar.matcher.Matcher`."""

    def __init__(self, grammar: Grammar, end_tokens: frozenset[int], vocab_size: int) -> None:
        self._grammar = replace(grammar, after=())
        self._end_tokens = end_tokens
        self._vocab_size = vocab_size
        self._text: list[int] = []  # written by: advance
        self.error: str | None = None  # written by: fill, advance

    def _next(self, more: Sequence[int] = ()) -> list[int]:
        return allowed_tokens(self._grammar, [*self._text, *more], self._end_tokens, self._vocab_size)

    def fill(self, row: Int32) -> None:
        """Write the tokens that may come next."""
        row[:] = 0
        if len(self._text) >= int(self._grammar.text.split()[2]):
            self.error = "made to fail"
            return
        write_mask(self._next(), row)

    def fill_ahead(self, drafts: Sequence[int], rows: Int32) -> int:
        """Write the masks along a chain of drafts; a failure after one of them is no failure of this matcher."""
        state = self
        for num, draft in enumerate(drafts):
            state.fill(rows[num])
            if state.error is not None or draft in self._end_tokens or not state.accepts((draft,)):
                return num + 1
            state = state.copy()
            state.advance((draft,))
        state.fill(rows[len(drafts)])
        return len(drafts) + 1

    def advance(self, tokens: Sequence[int]) -> bool:
        """Go on by some tokens."""
        for token in tokens:
            if self.error is None and token not in self._next():
                self.error = f"{token} is not one of {self._next()}"
            self._text.append(token)
        return self.error is None

    def accepts(self, tokens: Sequence[int]) -> int:
        """Return how many of these are allowed."""
        for num, token in enumerate(tokens):
            if token not in self._next(tokens[:num]):
                return num
        return len(tokens)

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that must come next."""
        forced: list[int] = []
        while len(found := self._next(forced)) == 1 and found[0] not in self._end_tokens:
            forced += found
        return tuple(forced)

    @property
    def is_finished(self) -> bool:
        """Whether nothing but the end can follow."""
        return len(self._text) >= int(self._grammar.text.split()[1])

    @property
    def can_end(self) -> bool:
        """Whether the text is complete."""
        return self.is_finished or not self._end_tokens.isdisjoint(self._next())

    @property
    def slow_ms(self) -> int:
        """Milliseconds that a token is said to have taken: more than 0 for every third grammar."""
        seed = int(self._grammar.text.split()[0])
        return 0 if seed % 3 else _SLOW_MS[(seed // 3 + len(self._text)) % len(_SLOW_MS)]

    def copy(self) -> EchoMatcher:
        """Return another one in the same state."""
        copy = EchoMatcher(self._grammar, self._end_tokens, self._vocab_size)
        copy._text, copy.error = list(self._text), self.error
        return copy


class EchoCompiler:
    """Compiles grammars of the echo model, each after some polls; satisfies `core.masks.constrain.Compiler`."""

    def __init__(self, rng: random.Random, vocab_size: int) -> None:
        self._rng = rng
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar, *, end_tokens: frozenset[int], priority: int = 0) -> EchoCompiling:
        """Return a grammar that is done later."""
        if grammar.text.endswith("1"):
            return EchoCompiling(self._rng.randrange(9), Refusal(message="wrong", code="invalid_grammar"))
        matcher = EchoMatcher(grammar, end_tokens, self._vocab_size)
        later = behind(matcher, grammar.after, end_tokens, self._vocab_size) if grammar.after else matcher
        return EchoCompiling(self._rng.randrange(9), later)

    def close(self) -> None:
        """Do nothing."""


class EchoCompiling:
    """A grammar that is done after some polls."""

    def __init__(self, num_polls: int, result: Matcher | Refusal) -> None:
        self._num_polls = num_polls  # written by: done
        self._result = result

    def prefer(self, priority: int) -> None:
        """Do nothing."""

    def done(self) -> bool:
        """Count a poll."""
        self._num_polls -= 1
        return self._num_polls < 0

    def result(self) -> Matcher | Refusal:
        """Return the matcher or the refusal."""
        return self._result


def write_mask(tokens: Sequence[int], row: Int32) -> None:
    """Set the bits of some tokens in a mask."""
    words = row.view(np.uint32)
    for token in tokens:
        words[token // 32] |= np.uint32(1 << token % 32)


def read_mask(row: Int32, vocab_size: int) -> list[int]:
    """Return the tokens that a mask allows, ascending."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), count=vocab_size, bitorder="little")).tolist()
