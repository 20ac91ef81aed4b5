"""The suffix index against a brute force over whole texts, and its bounds."""

# pyright: basic
# numba has no types.

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagewood.engine.runner.cpu.compiled.drafting.suffix import NUM_CANDIDATES
from pagewood.engine.runner.cpu.drafts.suffix import SuffixIndex

UNKNOWN = -7  # beyond the known tokens
WIDTH = 96


def ints(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


class BruteForce:
    """All outputs of a namespace as lists, searched whole.

    An output is a list of tokens and the number of tokens at its start that only precede it.
    """

    def __init__(self, depth: int, factor: float, min_share: float) -> None:
        self.depth, self.factor, self.min_share = depth, factor, min_share
        self.outputs: dict[int, list[tuple[list[int], int]]] = {}

    def begin(self, namespace: int, prompt: list[int]) -> tuple[list[int], int]:
        context = prompt[-self.depth :]
        output = (context, len(context))
        self.outputs.setdefault(namespace, []).append(output)
        return output

    def best(self, namespace: int, text: list[int], most: int) -> tuple[int, list[list[int]]]:
        """Return the length of the longest match, and all that follows the matches of that length."""
        followers: dict[int, list[list[int]]] = {}
        for place in range(2, len(text)):
            tail = text[place:]
            while len(tail) < most:
                tail.append(tail[-(len(text) - place)])
            followers.setdefault(self._match(text, text[:place]), []).append(tail[:most])
        for output, first in self.outputs.get(namespace, []):
            for place in range(max(first, 1), len(output)):
                followers.setdefault(self._match(text, output[:place]), []).append(output[place : place + most])
        longest = max(followers, default=0)
        return (longest, followers[longest]) if longest >= 2 else (0, [])

    def check(self, namespace: int, text: list[int], most: int, draft: list[int]) -> None:
        """Assert that a draft is one of the most frequent continuations, where several may be equally frequent."""
        longest, followers = self.best(namespace, text, most)
        limit = min(most, int(self.factor * longest + 1e-6))
        if len(followers) > NUM_CANDIDATES:  # only some of them vote
            assert len(draft) <= limit
            assert any(follower[: len(draft)] == draft for follower in followers)
            return
        path: list[int] = []
        alive = followers
        for token in draft:
            votes = [follower[len(path)] for follower in alive if len(follower) > len(path)]
            assert votes.count(token) == max(map(votes.count, votes))
            path.append(token)
            alive = [follower for follower in followers if follower[: len(path)] == path]
            assert len(alive) >= self.min_share * len(followers)
        assert len(draft) <= limit
        if len(draft) < limit and followers:
            votes = [follower[len(path)] for follower in alive if len(follower) > len(path)]
            assert max(map(votes.count, votes), default=0) < max(self.min_share * len(followers), 1)

    def _match(self, text: list[int], other: list[int]) -> int:
        n = 0
        while n < min(self.depth, len(text), len(other)) and text[-1 - n] == other[-1 - n]:
            n += 1
        return n


class Drafting(RuleBasedStateMachine):
    """Requests of three namespaces come, grow, are preempted and leave; each draft is compared with a brute force."""

    NUM_ROWS = 4

    @initialize(
        depth=st.sampled_from([2, 3, 5, 9, 24]),
        factor=st.sampled_from([0.5, 1.0, 2.0]),
        min_share=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
        alphabet=st.integers(1, 4),
    )
    def start(self, depth: int, factor: float, min_share: float, alphabet: int) -> None:
        self.table = np.full((self.NUM_ROWS, WIDTH), UNKNOWN, np.int32)
        self.index = SuffixIndex(
            self.table,
            max_tokens=1 << 16,
            max_depth=depth,
            max_spec_factor=factor,
            min_token_prob=min_share,
            max_steps=1 << 16,
        )
        self.oracle = BruteForce(depth, factor, min_share)
        self.alphabet = alphabet
        self.texts: list[list[int]] = [[] for _ in range(self.NUM_ROWS)]
        self.outputs: list[tuple[list[int], int]] = [([], 0) for _ in range(self.NUM_ROWS)]
        self.namespaces = [0] * self.NUM_ROWS
        for row in range(self.NUM_ROWS):
            self._begin(row, [])

    def tokens(self, data: st.DataObject, most: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, self.alphabet), max_size=most))

    @rule(data=st.data(), row=st.integers(0, NUM_ROWS - 1), namespace=st.sampled_from([0, -(1 << 63), 77]))
    def admit(self, data: st.DataObject, row: int, namespace: int) -> None:
        self.namespaces[row] = namespace
        self._begin(row, self.tokens(data, 30))

    @rule(row=st.integers(0, NUM_ROWS - 1), other=st.integers(0, NUM_ROWS - 1))
    def preempt(self, row: int, other: int) -> None:
        """A request goes on in another row, with all its tokens as its prompt."""
        self.namespaces[other] = self.namespaces[row]
        self._begin(other, list(self.texts[row]))

    def _begin(self, row: int, prompt: list[int]) -> None:
        self.texts[row] = prompt
        self.table[row] = UNKNOWN
        self.table[row, : len(prompt)] = prompt
        self.index.begin(row, self.namespaces[row], len(prompt))
        self.outputs[row] = self.oracle.begin(self.namespaces[row], prompt)

    @rule(data=st.data(), rows=st.permutations(range(NUM_ROWS)), number=st.integers(1, NUM_ROWS))
    def grow(self, data: st.DataObject, rows: list[int], number: int) -> None:
        """Some rows gain tokens in one step."""
        for row in rows[:number]:
            new = self.tokens(data, min(9, WIDTH - len(self.texts[row])))
            self.table[row, len(self.texts[row]) : len(self.texts[row]) + len(new)] = new
            self.texts[row] = self.texts[row] + new
            self.outputs[row][0].extend(new)
        which = ints(*rows[:number])
        self.index.advance(which, ints(*(len(self.texts[row]) for row in which)))

    @rule(data=st.data(), rows=st.permutations(range(NUM_ROWS)), number=st.integers(1, NUM_ROWS))
    def draft(self, data: st.DataObject, rows: list[int], number: int) -> None:
        which = ints(*rows[:number])
        ends = ints(*(len(self.texts[row]) for row in which))
        most = ints(*data.draw(st.lists(st.integers(0, 12), min_size=number, max_size=number)))
        counts = np.full(number, -1, np.int32)
        self.index.draft(which, ends, most, counts)
        for row, end, limit, count in zip(which.tolist(), ends, most, counts, strict=True):
            draft = self.table[row, end : end + count].tolist()
            self.table[row, end : end + count] = UNKNOWN
            self.oracle.check(self.namespaces[row], self.texts[row], min(limit, WIDTH - end), draft)

    @invariant()
    def nothing_else_is_written(self) -> None:
        for row, text in enumerate(getattr(self, "texts", [])):
            assert self.table[row, : len(text)].tolist() == text
            assert (self.table[row, len(text) :] == UNKNOWN).all()


Drafting.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
test_drafts_equal_those_of_a_brute_force = Drafting.TestCase


def index_of(
    *texts: list[int], max_tokens: int = 1 << 14, num_rows: int = 4, width: int = 4096, **limits: Any
) -> SuffixIndex:
    """Return an index with one output per text, in namespace 1; the outputs have no prompt."""
    index = SuffixIndex(np.zeros((num_rows, width), np.int32), max_tokens=max_tokens, **limits)
    for text in texts:
        write(index, 0, text)
    return index


def write(index: SuffixIndex, row: int, text: list[int], *, namespace: int = 1, num_prompt: int = 0) -> None:
    """Give a row to a request with this text, and index it."""
    index._tokens[row, : len(text)] = text
    index.begin(row, namespace, num_prompt)
    index.advance(ints(row), ints(len(text)))


def draft(index: SuffixIndex, text: list[int], *, most: int = 8, namespace: int = 1, row: int = 3) -> list[int]:
    """Return the draft for a prompt."""
    index._tokens[row, : len(text)] = text
    index.begin(row, namespace, len(text))
    counts = ints(-1)
    index.draft(ints(row), ints(len(text)), ints(most), counts)
    return index._tokens[row, len(text) : len(text) + counts[0]].tolist()


def test_the_most_frequent_continuation_wins() -> None:
    index = index_of([1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 3, 7], [1, 2, 5, 6], [1, 2, 5, 8], max_spec_factor=2.0)
    assert draft(index, [9, 1, 2]) == [5, 6]


def test_a_draft_ends_where_its_share_is_too_small() -> None:
    texts = [[1, 2, 3, 4, 10 + i] for i in range(4)]
    assert draft(index_of(*texts, max_spec_factor=9.0, min_token_prob=0.25), [1, 2]) == [3, 4, 10 + 3]
    assert draft(index_of(*texts, max_spec_factor=9.0, min_token_prob=0.26), [1, 2]) == [3, 4]


def test_a_longer_match_wins_over_a_more_frequent_one() -> None:
    assert draft(index_of([7, 1, 2, 3], [8, 1, 2, 4], [9, 1, 2, 4]), [7, 1, 2], most=1) == [3]


def test_a_longer_match_wins_over_many_later_ones() -> None:
    text = [1, 2, 3, 50, *[9, 2, 3, 60] * 40, 1, 2, 3]
    assert draft(index_of(), text, most=1) == [50]
    assert draft(index_of([*text[:4], 5, *range(70, 120)], [9, 2, 3, 60] * 40), [1, 2, 3, 50], most=1) == [5]


def test_an_output_begins_with_the_end_of_its_prompt() -> None:
    index = index_of()
    write(index, 0, [*range(100, 140), 5, 6, 7], num_prompt=40)
    assert draft(index, [1, 138, 139]) == [5, 6]
    assert draft(index, [1, 137, 138]) == []  # the prompt itself is not indexed


@pytest.mark.parametrize("others", [[2, 3], [-1, 0, 1 << 62]])
def test_a_namespace_never_drafts_from_another(others: list[int]) -> None:
    index = index_of([1, 2, 3, 4])
    for namespace in others:
        assert draft(index, [1, 2], namespace=namespace) == []
        write(index, 0, [1, 2, 9, 9], namespace=namespace)
        assert draft(index, [1, 2], namespace=namespace) == [9, 9]
    assert draft(index, [1, 2]) == [3, 4]


def test_logs_of_namespaces_share_no_memory() -> None:
    index = index_of()
    for namespace in range(4):
        write(index, 0, list(range(3000)), namespace=namespace)
    arrays = [
        array
        for outputs in index._outputs.values()
        for log in {id(log): log for log in (outputs.log, outputs.older)}.values()
        for array in (log.tokens, log.chains, log.links, log.used)
        if log.tokens.size
    ]
    assert len(arrays) == 16
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_requests_of_several_namespaces_in_one_step() -> None:
    index = index_of(num_rows=6)
    for row in range(6):
        index._tokens[row, :4] = [1, 2, 10 + row % 3, 20 + row % 3]
        index.begin(row, row % 3, 0)
    index.advance(np.arange(6, dtype=np.int32), np.full(6, 4, np.int32))
    for row in range(6):
        index._tokens[row, :2] = [1, 2]
        index.begin(row, row % 3, 2)
    counts = np.zeros(6, np.int32)
    index.draft(np.arange(6, dtype=np.int32), np.full(6, 2, np.int32), np.arange(6, dtype=np.int32), counts)
    assert counts.tolist() == [0, 1, 2, 2, 2, 2]
    assert index._tokens[3:, 2:4].tolist() == [[10, 20], [11, 21], [12, 22]]


@settings(max_examples=30, deadline=None)
@given(data=st.data(), max_tokens=st.sampled_from([256, 1000, 1024, 5000]), num_namespaces=st.integers(1, 9))
def test_the_room_is_bounded(data: st.DataObject, max_tokens: int, num_namespaces: int) -> None:
    index = index_of(max_tokens=max_tokens)
    generator = np.random.default_rng(data.draw(st.integers(0, 1000)))
    for _ in range(30):
        text = generator.integers(0, 50, generator.integers(1, 900)).tolist()
        namespace = int(generator.integers(0, num_namespaces))
        write(index, int(generator.integers(0, 3)), text, namespace=namespace, num_prompt=min(len(text), 20))
        arrays = [log.tokens for outputs in index._outputs.values() for log in (outputs.log, outputs.older)]
        assert index.capacity == sum(map(len, arrays)) <= max_tokens
        assert index.num_bytes <= 20.25 * max_tokens + 100 * index.num_namespaces
        if len(text) > 60:  # a draft from the older log may end where that log ended
            found = draft(index, text[-12:-4], namespace=namespace, most=4)
            assert found
            assert found == text[-4:][: len(found)]


def test_the_oldest_outputs_are_dropped_first() -> None:
    index = index_of(max_tokens=1024)
    for i in range(40):
        write(index, 0, list(range(100 * i, 100 * i + 60)))
    kept = [draft(index, list(range(100 * i, 100 * i + 8))) != [] for i in range(40)]
    assert kept == sorted(kept)
    assert 5 <= sum(kept) <= 16  # between one log of two and both; an output takes two blocks of 32


def test_the_namespace_that_is_idle_for_longest_is_dropped_first() -> None:
    index = index_of(max_tokens=1 << 14)
    for namespace in (1, 2, 3, 4):
        write(index, 0, [1, 2, 3], namespace=namespace)
    write(index, 0, [1, 2, 3], namespace=1)
    write(index, 0, [1, 2, 3], namespace=5)
    assert [draft(index, [1, 2], namespace=namespace) for namespace in (1, 2, 3, 4, 5)] == [[3], [], [3], [3], [3]]


def test_a_request_outlives_its_namespace() -> None:
    index = index_of(max_tokens=1 << 14)
    write(index, 0, [1, 2, 3], namespace=1)
    for namespace in range(2, 6):
        write(index, 1, [7, 7, 7], namespace=namespace)
    index._tokens[0, 3:6] = [4, 5, 6]
    index.advance(ints(0), ints(6))
    assert draft(index, [2, 3], namespace=1) == [4, 5]


def test_an_output_that_spans_logs_stays_whole() -> None:
    index = index_of(max_tokens=1024, max_depth=24)
    text = list(range(2000))
    index.begin(0, 1, 0)
    for end in range(1, 2001):
        index._tokens[0, end - 1] = text[end - 1]
        index.advance(ints(0), ints(end))
        for place in (end - 1, end - 40, end - 300):
            if place > 24:
                assert draft(index, text[place - 24 : place], most=1) == [text[place]]


@pytest.mark.parametrize("depth", [24, 40])
@pytest.mark.parametrize("left", [0, 1, 2])
def test_an_output_begins_in_a_log_that_has_room_for_its_context(left: int, depth: int) -> None:
    index = index_of(max_tokens=1024, max_depth=depth)
    write(index, 0, list(range(32 * (15 - left))))  # of the 16 blocks of a log, the first is not used
    write(index, 1, list(range(1000, 1050)), num_prompt=45)
    for outputs in index._outputs.values():
        for log in (outputs.log, outputs.older):
            assert 0 <= log.chains.min(initial=0) <= log.chains.max(initial=0) < max(len(log.tokens), 1)
    assert draft(index, list(range(1039, 1045))) == list(range(1045, 1050))
    assert draft(index, list(range(100, 108))) == list(range(108, 116))


@pytest.mark.parametrize("text", [[5] * 3000, [1, 2] * 1500, [1, 2, 3, 4, 5, 6, 7] * 400])
def test_periodic_texts_are_continued(text: list[int]) -> None:
    index = index_of(text)
    write(index, 1, text)
    assert draft(index, text[:-8]) == text[-8:]
    assert draft(index, text[:30], most=40) == text[30:54]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    length=st.sampled_from([127, 128, 129, 255, 256, 257, 700]),
    alphabet=st.sampled_from([3, 10, 40]),
)
def test_long_texts_are_searched_whole(seed: int, length: int, alphabet: int) -> None:
    text = np.random.default_rng(seed).integers(0, alphabet, length).tolist()
    index = index_of(max_steps=1 << 16)
    BruteForce(24, 1.0, 0.1).check(1, text, 8, draft(index, text))
    oracle = BruteForce(24, 1.0, 0.1)
    oracle.begin(1, [])[0].extend(text)
    write(index, 0, text)
    for start in range(0, length - 20, 20):
        part = text[start : start + 4]
        oracle.check(1, part, 8, draft(index, part))


@pytest.mark.parametrize("text", [[], [1]])
def test_a_short_text_has_no_draft(text: list[int]) -> None:
    assert draft(index_of([1, 1, 1, 1]), text) == []


def test_a_draft_ends_with_the_row_and_with_most() -> None:
    index = index_of([1, 2, 3, 4, 5, 6, 7, 8], width=8)
    assert draft(index, [1, 2, 3, 4, 5, 6]) == [7, 8]
    assert draft(index, [1, 2, 3, 4, 5], most=2) == [6, 7]
    assert draft(index, [1, 2, 3, 4, 5], most=0) == []
    assert draft(index, [1, 2, 3, 4, 5, 6, 7, 8]) == []


def test_a_row_has_no_namespace_before_it_begins() -> None:
    index = index_of()
    for use in (lambda: index.advance(ints(2), ints(4)), lambda: index.draft(ints(2), ints(4), ints(4), ints(0))):
        with pytest.raises(ValueError, match="begin must be called for row 2 before it is used"):
            use()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_depth": 1}, "max_depth must be >= 2, got 1"),
        ({"max_spec_factor": 0.0}, "max_spec_factor must be > 0, got 0.0"),
        ({"min_token_prob": 1.5}, r"min_token_prob must be in \[0, 1\], got 1.5"),
        ({"max_tokens": 255}, "max_tokens must be >= 256 for a max_depth of 24, got 255"),
    ],
)
def test_limits_are_checked(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixIndex(np.zeros((1, 8), np.int32), **limits)
