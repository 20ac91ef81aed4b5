"""Pages and states of a recurrent model in two pools, under one cache: a hit continues exactly like a miss."""

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewood.kvpool import OutOfPages, PageAllocator
from pagewood.radixcache import Node, RadixCache

PAGE = 2
NUM_PAGES, NUM_SLOTS = 12, 4

Int32 = npt.NDArray[np.int32]


def after(state: int, tokens: Int32) -> int:
    """Return the state of a model after `tokens`: a number that depends on all of them and on their order."""
    for token in tokens.tolist():
        state = (state * 31 + token + 1) % 1_000_003
    return state


class Engine:
    """Runs one prompt at a time, with states in slots of a pool.

    Invariant: each page and each slot is free or belongs to the cache.
    """

    def __init__(self) -> None:
        self.cache = RadixCache(PAGE)
        self.pages, self.slots = PageAllocator(NUM_PAGES), PageAllocator(NUM_SLOTS)
        self.states = np.zeros(NUM_SLOTS, np.int64)
        self.num_hits = 0

    def run(self, prompt: Int32) -> int:
        """Return the state after a prompt, and take snapshots at its end and where other prompts branch off."""
        branch = self.cache.peek(prompt).num_tokens
        match = self.cache.match(prompt, needs_snapshot=True)
        lease = self.cache.lock(match.node)
        slot = self.cache.snapshot(lease)
        state = 0 if slot is None else int(self.states[slot])
        self.num_hits += slot is not None
        start = match.num_tokens
        for end in sorted({branch, len(prompt) // PAGE * PAGE}):
            if end <= start:
                continue
            try:
                pages = self.pages.alloc((end - start) // PAGE, evict=self.cache.evict)
            except OutOfPages:  # its own prefix holds them
                break
            state = after(state, prompt[start:end])
            done = self.cache.insert(prompt[start:end], pages, after=lease, relock=True)
            self.pages.free(pages[: done.num_existing])
            lease, start = done.node, end
            self.take_snapshot(lease, state)
        self.cache.unlock(lease)
        return after(state, prompt[start:])

    def take_snapshot(self, lease: Node, state: int) -> None:
        """Copy the state into a slot, if there is one, and attach it."""
        try:
            slot = self.slots.alloc(1, evict=self.cache.evict_snapshots)
        except OutOfPages:  # its own prefix has all snapshots
            return
        self.states[slot] = state
        if not self.cache.attach(lease, int(slot[0])):
            self.slots.free(slot)

    def check(self) -> None:
        """Raise AssertionError if a page or a slot is lost, or belongs to two."""
        self.cache.check()
        assert self.pages.num_free + self.cache.num_pages == NUM_PAGES
        assert self.slots.num_free + self.cache.num_snapshots == NUM_SLOTS


@given(prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=20), min_size=1, max_size=12))
@settings(deadline=None)
def test_a_hit_has_the_state_of_a_miss_and_nothing_is_lost(prompts: list[list[int]]) -> None:
    engine = Engine()
    for prompt in prompts:
        tokens = np.array(prompt, np.int32)
        assert engine.run(tokens) == after(0, tokens)
        engine.check()
    engine.pages.free(engine.cache.clear())
    engine.slots.free(engine.cache.evict_snapshots(0))
    engine.check()
    assert (engine.pages.num_free, engine.slots.num_free) == (NUM_PAGES, NUM_SLOTS)


def test_the_earlier_turns_of_a_conversation_give_way_first() -> None:
    """A shared prefix was used before them, but they are superseded, also while the conversation runs."""
    engine, shared = Engine(), [7, 7, 7, 7]
    for end in (0, 1):  # the second prompt branches off, so a snapshot is taken there
        engine.run(np.array([*shared, end, end], np.int32))
    turns: list[int] = []
    for number in range(4):
        turns += [1, number]
        engine.run(np.array(turns, np.int32))
        engine.check()
    assert engine.num_hits == 3
    assert engine.cache.peek(np.array([*shared, 2, 2], np.int32), needs_snapshot=True).num_tokens == len(shared)
