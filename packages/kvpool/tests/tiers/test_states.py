"""States of recurrent layers as pages, and what a recall brings of a prefix; random traffic is in the other tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from faulty_tiers import FaultyStore
from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    HostTier,
    SharedFolder,
    StatePages,
    TieredIndex,
    WritePolicy,
)
from pagewood.kvpool.tiers.pages.keys import KeyChain
from pagewood.kvpool.tiers.plain_cache import PlainCache
from pagewood.kvpool.tiers.testing import ManualLane, manual_lanes

PAGE, PAGE_BYTES, STATE_BYTES, NUM_PARTS = 2, 16, 40, 3
SIZES: Any = {"page_bytes": PAGE_BYTES, "num_bytes": 10_000}
TOKENS = np.arange(16, dtype=np.int32)


@given(
    page_bytes=st.integers(1, 20),
    widths=st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_states_are_copied_out_and_back_in_parts(page_bytes: int, widths: list[list[int]]) -> None:
    rng = np.random.default_rng(0)
    memory = rng.integers(0, 256, (4, page_bytes), np.uint8)
    layers = [[rng.integers(0, 256, (3, width), np.uint8) for width in one] for one in widths]
    before, image = memory.copy(), np.concatenate([array[2] for layer in layers for array in layer])
    device = StatePages(ArrayPages([[memory]]), layers)
    assert device.num_parts == -(-len(image) // page_bytes)
    parts = device.parts_of(2)
    assert not {*parts} & {*device.parts_of(1), *range(4)}
    host = HostTier(page_bytes=page_bytes, num_pages=len(parts) + 1)
    host.memory.fill(0xEE)
    device.read([*parts, 3], host.memory, range(len(parts) + 1))
    whole = host.memory[: len(parts)].reshape(-1)
    assert whole.tobytes() == image.tobytes() + bytes(len(whole) - len(image))
    reports: list[int] = []
    device.write([0, *device.parts_of(0)], host.memory, [len(parts), *range(len(parts))], reports.append)
    assert reports == [0] * len(parts) + [1]
    assert np.concatenate([array[0] for layer in layers for array in layer]).tobytes() == image.tobytes()
    assert np.concatenate([array[2] for layer in layers for array in layer]).tobytes() == image.tobytes()
    assert np.array_equal(memory[0], before[3])


def test_processes_with_parts_of_states_have_one_number_of_parts() -> None:
    """One has no layer, one fewer bytes than the parts have room for, and one as many."""
    key, found = b"a key", list[Any]()
    for widths in ([], [5], [PAGE_BYTES, 2 * PAGE_BYTES - 1]):
        arrays = [np.full((2, width), 7, np.uint8) for width in widths]
        device = StatePages(ArrayPages([[np.zeros((4, PAGE_BYTES), np.uint8)]]), [arrays], num_parts=3)
        images = np.full((3, PAGE_BYTES), 0xEE, np.uint8)
        device.read(device.parts_of(1), images, range(3))
        assert images.reshape(-1).tolist() == [7] * sum(widths) + [0] * (3 * PAGE_BYTES - sum(widths))
        device.write(device.parts_of(0), images + 1, range(3), lambda _: None)
        assert all((array == [[8], [7]]).all() for array in arrays)
        found.append((device.num_parts, device.parts_of(1), device.keys_of(key), device.mark_of(key)))
    assert found[0] == found[1] == found[2]


def test_parts_are_larger_than_pages_if_there_would_be_too_many() -> None:
    memory, state = np.full((3, 2), 7, np.uint8), np.arange(2 * 2000, dtype=np.int64).view(np.uint8).reshape(2, -1)
    expected, device = state[1].copy(), StatePages(ArrayPages([[memory]]), [[state]])
    assert (device.num_parts, device.page_bytes) == (512, 64)
    images = np.full((514, 64), 0xEE, np.uint8)
    device.read([2, *device.parts_of(1), 0], images, range(514))
    assert images[[0, 513]].tolist() == [[7, 7] + [0] * 62] * 2
    assert images[1:513].reshape(-1).tolist() == [*expected.tolist(), *bytes(512 * 64 - 16000)]
    memory[:], reports = 0, list[int]()
    device.write([1, *device.parts_of(0)], images, range(513), reports.append)
    assert memory.tolist() == [[0, 0], [7, 7], [0, 0]]
    assert (state[0] == expected).all()
    assert reports[-1] == 1


def test_keys_of_states_are_those_of_no_page_and_no_other_state() -> None:
    device = StatePages(ArrayPages([[np.zeros((1, 4), np.uint8)]]), [[np.zeros((1, 9), np.uint8)]])
    pages = KeyChain(1, fingerprint=b"").extend(b"", np.arange(5, dtype=np.int32))
    keys = [*pages, *(key for page in pages for key in device.keys_of(page))]
    assert len({*keys}) == len(keys) == 5 + 5 * 3
    assert [device.mark_of(key) for key in pages] == [device.keys_of(key)[-1] for key in pages]


class Engine:
    """What an index with states needs of an engine; page and state of a prefix hold its length."""

    def __init__(self, *, num_host_pages: int = 100, num_places: int = 3, **options: Any) -> None:
        from pagewood.radixcache import RadixCache

        self.memory = np.zeros((20, PAGE_BYTES), np.uint8)
        self.states = np.zeros((num_places, STATE_BYTES), np.uint8)
        self.allocator, self.places = PageAllocator(20), list(range(num_places))
        self.host = HostTier(page_bytes=PAGE_BYTES, num_pages=num_host_pages)
        self.index = TieredIndex(
            RadixCache(PAGE), device=StatePages(ArrayPages([[self.memory]]), [[self.states]]), host=self.host,
            page_size=PAGE, lanes=manual_lanes(), **options,
        )  # fmt: skip

    def compute(self, num_tokens: int, *ends: int) -> None:
        """Publish tokens, with states behind some numbers of tokens."""
        pages = self.allocator.alloc(num_tokens // PAGE)
        self.memory[pages] = np.arange(PAGE, num_tokens + 1, PAGE)[:, None]
        done = self.index.insert(TOKENS[:num_tokens], pages)
        self.allocator.free(pages[: done.num_existing])
        for end in ends:
            place = self.take_state()
            self.states[place] = end
            assert self.index.attach(self.index.peek(TOKENS[:end]).node, place)

    def take_state(self) -> int:
        if not self.places:
            self.evict_states(1)
        return self.places.pop()

    def evict_states(self, n: int = 100) -> None:
        places = self.index.evict_snapshots(n)
        self.states[places] = 0xEE
        self.places += places.tolist()

    def evict(self) -> None:
        """Let pages and states leave the device, and make all copies."""
        pages = self.index.evict(100)
        self.memory[pages] = 0xEE
        self.allocator.free(pages)
        self.evict_states()
        self.copy()

    def copy(self) -> None:
        for _ in range(3):
            self.index.poll()
            for name in ("demote", "store"):
                self.run(name)

    def run(self, name: str) -> None:
        lane = getattr(self.index._lanes, name)  # pyright: ignore[reportPrivateUsage]
        assert isinstance(lane, ManualLane)
        lane.run(100)

    def recall(self, num_tokens: int = 16) -> tuple[int, int]:
        """Bring back what there is; return the tokens whose pages the device has, and those that a request can use."""
        recall = self.index.recall(TOKENS[:num_tokens])
        while recall is not None and self.index.advance(recall, self.allocator.alloc, take_state=self.take_state):
            self.run("fetch")
            self.run("load")
        self.index.check()
        found = self.index.peek(TOKENS[:num_tokens])
        assert self.memory[found.pages, 0].tolist() == list(range(PAGE, found.num_tokens + 1, PAGE))
        usable = self.index.peek(TOKENS[:num_tokens], needs_snapshot=True)
        if usable.num_tokens:
            assert (self.states[self.index.snapshot(usable.node)] == usable.num_tokens).all()
        assert len(self.places) + self.index.num_snapshots == len(self.states)
        return found.num_tokens, usable.num_tokens


@pytest.fixture(autouse=True)
def states() -> None:
    pytest.importorskip("pagewood.radixcache")


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_pages_come_back_as_far_as_a_state_does(policy: WritePolicy) -> None:
    engine = Engine(write_policy=policy, min_uses=1)
    engine.compute(16, 4, 12)
    engine.evict()
    hits = engine.index.locate(TOKENS)
    assert (hits.num_tokens, hits.num_host, hits.num_usable) == (16, 16, 12)
    assert engine.index.num_near(TOKENS) == 12
    assert engine.recall(10) == (4, 4)
    assert engine.recall() == (12, 12)
    assert engine.recall() == (12, 12)


def test_a_state_comes_back_to_pages_that_stayed() -> None:
    engine = Engine(num_places=1)
    engine.compute(16, 12)
    engine.copy()
    engine.evict_states()
    assert engine.index.locate(TOKENS).num_device == 16
    taken: list[int] = []
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    while engine.index.advance(recall, taken.append, take_state=engine.take_state):  # pyright: ignore[reportArgumentType]
        engine.run("load")
    assert not taken  # no page was needed
    assert engine.recall() == (16, 12)


@pytest.mark.parametrize("store", ["disk", "remote"])
def test_a_lost_or_damaged_state_is_a_shorter_match(store: str, tmp_path: Path) -> None:
    def stores() -> dict[str, Any]:
        made = DiskTier(tmp_path / "pages", **SIZES) if store == "disk" else SharedFolder(tmp_path, **SIZES)
        return {store: FaultyStore(made)}

    engine = Engine(**stores())
    engine.compute(16, 4, 12)
    engine.evict()
    engine.index.close()
    again = Engine(**stores())
    assert again.index.num_near(TOKENS) == (12 if store == "disk" else 0)
    probe = again.index.probe(TOKENS)
    again.run("fetch")
    assert again.index.num_found(probe) == 12
    last = bytes([12]) * 8 + bytes(8)  # the last part of the longer state
    path = next(path for path in tmp_path.rglob("*") if path.is_file() and last in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(last) + 3] ^= 1
    path.write_bytes(data)
    if store == "disk":
        assert again.recall() == (4, 4)  # pages behind that are on the host now, and of no use
    else:
        assert again.recall()[1] in (0, 4)  # a folder drops what was stored together
    again.index.close()


def test_a_state_of_which_a_part_was_not_stored_is_none(tmp_path: Path) -> None:
    store = FaultyStore(DiskTier(tmp_path / "pages", **SIZES))
    engine = Engine(disk=store)
    engine.compute(8, 4)
    engine.copy()
    engine.evict_states()
    engine.compute(12)
    place = engine.take_state()
    engine.states[place] = 12
    engine.index.attach(engine.index.peek(TOKENS[:12]).node, place)
    store.num_puts_failing = 1
    engine.evict()
    engine.index.close()
    again = Engine(disk=DiskTier(tmp_path / "pages", **SIZES))
    assert again.recall()[1] == 4
    again.index.close()


def test_a_hand_over_waits_for_the_state(tmp_path: Path) -> None:
    engine = Engine(remote=SharedFolder(tmp_path, **SIZES))
    engine.compute(16)
    engine.copy()
    keys = {*engine.index.keys_of(TOKENS)}
    assert not keys & engine.index.unstored()
    engine.states[engine.places[-1]] = 16
    assert engine.index.attach(engine.index.peek(TOKENS).node, engine.places.pop())
    assert keys & engine.index.unstored()
    engine.copy()
    assert not keys & engine.index.unstored()
    engine.index.close()


def test_places_come_back_whatever_happens_to_their_pages() -> None:
    engine = Engine()
    engine.compute(16, 4, 12)
    lease = engine.index.lock(engine.index.peek(TOKENS[:4]).node)
    engine.allocator.free(engine.index.clear())
    assert engine.recall() == (4, 4)
    engine.index.unlock(lease)
    engine.allocator.free(engine.index.release(engine.index.peek(TOKENS[:4]).node))
    engine.evict_states(0)
    assert len(engine.places) == 3
    engine.compute(16, 8, 16)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    while recall.place is None:
        assert engine.index.advance(recall, engine.allocator.alloc, take_state=engine.take_state)
        engine.run("fetch")
    engine.index.cancel(recall)
    engine.run("load")
    engine.evict_states(0)
    assert len(engine.places) == 3


def test_without_a_place_nothing_comes_back() -> None:
    engine = Engine()
    engine.compute(16, 16)
    engine.evict()
    recall = engine.index.recall(TOKENS)
    assert recall is not None
    assert not engine.index.advance(recall, engine.allocator.alloc, take_state=lambda: None)
    assert engine.allocator.num_free == 20
    assert engine.recall() == (16, 16)


def test_what_states_need_is_checked() -> None:
    memory = ArrayPages([[np.zeros((4, PAGE_BYTES), np.uint8)]])
    device = StatePages(memory, [[np.zeros((2, 5), np.uint8)]])
    options: Any = {"device": device, "host": HostTier(page_bytes=PAGE_BYTES, num_pages=4), "page_size": PAGE}
    with pytest.raises(ValueError, match="cache must own places of states for recurrent layers, got PlainCache"):
        TieredIndex(PlainCache(PAGE), **options)
    with pytest.raises(ValueError, match="holder must be None with states"):
        TieredIndex(PlainCache(PAGE), holder=object(), **options)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="layers must have arrays, and pages bytes, got 0 arrays and 16 bytes"):
        StatePages(memory, [[]])
    with pytest.raises(ValueError, match="num_parts must be at least 1, got 0"):
        StatePages(memory, [], num_parts=0)
