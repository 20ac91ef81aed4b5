import hashlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagewood.schedpolicy.routing.prefix_index import PrefixIndex, rank

BLOCKS = st.lists(st.integers(0, 11), max_size=5, unique=True)
SLOTS = st.integers(0, 2)


class Index(RuleBasedStateMachine):
    """The index under random events equals a dictionary of sets, without the blocks of low ranks where it is full."""

    @initialize(max_blocks=st.sampled_from((1, 7, 1000)))
    def begin(self, max_blocks: int):
        self.max_blocks = max_blocks
        self.index = PrefixIndex(block_size=16, max_blocks=max_blocks)
        self.held: dict[int, set[int]] = {}
        self.position: dict[int, int | None] = {}

    @rule(slot=SLOTS, position=st.sampled_from((0, 5, None)))
    def open(self, slot: int, position: int | None):
        if slot in self.held:
            with pytest.raises(ValueError, match="slot must be free"):
                self.index.open(slot)
            return
        self.index.open(slot, position=position)
        self.held[slot], self.position[slot] = set(), position

    @rule(slot=SLOTS)
    def close(self, slot: int):
        if slot in self.held:
            self.index.close(slot)
            del self.held[slot], self.position[slot]

    @rule(
        slot=SLOTS,
        skipped=st.sampled_from((0, 0, 0, 0, 1, -1)),
        events=st.lists(st.tuples(st.sampled_from(("BlockStored", "BlockRemoved", "AllBlocksCleared")), BLOCKS)),
        medium=st.sampled_from(("GPU", "GPU", None, "CPU")),
        is_map=st.booleans(),
    )
    def apply(self, slot: int, skipped: int, events: list[tuple[str, list[int]]], medium: str | None, is_map: bool):
        if slot not in self.held:
            return
        position = self.position[slot]
        start = max(0, (position or 0) + skipped)
        plain: list[object] = []
        for kind, blocks in events:
            fields: dict[str, object] = {}
            if kind == "BlockStored":
                fields = {"block_hashes": blocks, "parent_block_hash": None, "token_ids": [], "block_size": 16}
                fields |= {"lora_id": None, "medium": medium}
            elif kind == "BlockRemoved":
                fields = {"block_hashes": blocks, "medium": medium}
            plain.append({"type": kind} | fields if is_map else [kind, *fields.values()])
        is_in_sync = self.index.apply(slot, start, start + 1, plain)
        if position is not None and start > position:
            self.held[slot], self.position[slot] = set(), None
        elif position is not None and start == position:
            for kind, blocks in events:
                if kind == "AllBlocksCleared":
                    self.held[slot] = set()
                elif medium != "CPU":
                    change = self.held[slot].update if kind == "BlockStored" else self.held[slot].difference_update
                    change(blocks)
            self.position[slot] = position + 1
        assert is_in_sync == (self.position[slot] is not None)

    @rule(slot=SLOTS, position=st.integers(0, 9), blocks=BLOCKS)
    def restore(self, slot: int, position: int, blocks: list[int]):
        if slot in self.held:
            self.index.restore(slot, position, blocks)
            self.held[slot], self.position[slot] = set(blocks), position

    @rule(slot=SLOTS)
    def lose(self, slot: int):
        if slot in self.held:
            self.index.lose(slot)
            self.held[slot], self.position[slot] = set(), None

    @rule(hashes=st.lists(st.integers(0, 11), max_size=6))
    def match(self, hashes: list[int]):
        runs = self.index.runs(hashes)
        assert [num for num, _ in runs] == sorted({num for num, _ in runs}, reverse=True)
        for slot in self.held:
            held, least, num_blocks = self.index.blocks(slot), self.index.least_rank(slot), 0
            for num, name in enumerate(hashes, 1):
                if name in held:
                    num_blocks = num
                elif rank(name) >= least:
                    break
            assert next((num for num, bits in runs if bits >> slot & 1), 0) == num_blocks

    @invariant()
    def is_exact_but_for_low_ranks(self):
        if not hasattr(self, "index"):
            return
        known = {slot: set(self.index.blocks(slot)) for slot in self.held}
        assert sum(map(len, known.values())) == self.index.num_blocks <= self.max_blocks
        assert {slot: self.index.position(slot) for slot in self.held} == self.position
        for slot, held in self.held.items():
            least = self.index.least_rank(slot)
            assert known[slot] == {name for name in held if rank(name) >= least}
            assert not least or self.max_blocks < 1000


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"type": "BlockMoved"}, "event must be one of BlockStored, BlockRemoved, AllBlocksCleared, got {'type'"),
        (["BlockStored", "abc"], "block_hashes must be a list of ints or bytes, got 'abc'"),
        (["BlockRemoved", [1.5]], r"block_hashes must be a list of ints or bytes, got \[1.5\]"),
        (["BlockRemoved", [True]], r"block_hashes must be a list of ints or bytes, got \[True\]"),
        ({"type": "BlockStored", "block_hashes": [1], "block_size": 32}, "block_size must be 16, got 32"),
        (7, "event must be one of"),
    ],
)
def test_an_event_of_another_form_leaves_the_replica_empty_until_a_snapshot(event: Any, message: str):
    index = PrefixIndex(block_size=16)
    index.open(0)
    index.apply(0, 0, 1, [["BlockStored", [1, 2]]])
    with pytest.raises(ValueError, match=message):
        index.apply(0, 1, 2, [["BlockStored", [3]], event])
    assert (index.blocks(0), index.position(0)) == (frozenset(), None)
    index.restore(0, 2, [1])
    assert index.apply(0, 2, 3, [["BlockStored", [b"name"]]])
    assert index.runs([1, b"name"]) == [(2, 1)]


def test_a_batch_that_is_known_in_part_is_a_gap():
    index = PrefixIndex(block_size=16)
    index.open(0)
    assert index.apply(0, 0, 3, [["BlockStored", [1]], ["BlockStored", [2]], ["BlockStored", [3]]])
    assert not index.apply(0, 2, 4, [["BlockStored", [3]], ["BlockRemoved", [1]]])
    assert index.blocks(0) == frozenset()


def test_a_full_index_still_knows_long_prefixes_on_all_replicas():
    index = PrefixIndex(block_size=16, max_blocks=1000)
    names = [hashlib.sha256(b"%d" % number).digest() for number in range(1200)]
    for slot in range(3):
        index.open(slot)
        assert index.apply(slot, 0, 1, [["BlockStored", names]])
    assert [index.spacing, index.least_rank(0)] == [4, 2]
    assert 500 < index.num_blocks <= 1000
    ((num_blocks, bits),) = index.runs(names)
    assert bits == 0b111
    assert 1160 < num_blocks <= 1200
    assert index.runs([names[1], *range(100)]) == []
    index.lose(1)
    index.restore(1, 1, names[:8])
    assert index.blocks(1) == {*names[:8]}, "it begins again with all of its blocks"
    assert index.runs(names[:8])[0] == (8, 0b010)
    index.restore(1, 1, names[2:8])
    assert rank(names[1]) == 0, "the others skip it"
    assert [bits & 0b010 for _, bits in index.runs(names[1:8])] == [0]


def test_names_have_the_same_ranks_everywhere():
    assert [rank(name) for name in (0, 2, 5, -5, b"a", b"block 23", b"long block 23")] == [64, 2, 3, 0, 0, 6, 6]
    ranks = [rank(name) for name in range(4096)]
    assert [2045 < ranks.count(0) < 2051, 1021 < ranks.count(1) < 1027, 509 < ranks.count(2) < 515] == [True] * 3


def test_limits_are_checked():
    with pytest.raises(ValueError, match="block_size must be >= 1, got 0"):
        PrefixIndex(block_size=0)
    with pytest.raises(ValueError, match="max_blocks must be >= 1, got 0"):
        PrefixIndex(block_size=16, max_blocks=0)
    with pytest.raises(ValueError, match="slot must be >= 0, got -1"):
        PrefixIndex(block_size=16).open(-1)
