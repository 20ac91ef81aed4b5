"""Random traffic over all tiers, with faults, compared with the contents that every page must have."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b, shake_128
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faulty_tiers import FaultyDevice, FaultyStore
from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    HostTier,
    KeyChain,
    PagesStored,
    PrefetchMode,
    PrefetchPolicy,
    Recall,
    SharedFolder,
    StatePages,
    TierCounters,
    TieredIndex,
    TierLog,
    WritePolicy,
)
from pagewood.kvpool.tiers.pages.arrays import Int32
from pagewood.kvpool.tiers.plain_cache import PlainCache
from pagewood.kvpool.tiers.testing import ManualLane, manual_lanes

PAGE = 2
LAYER_BYTES = (24, 40)
PAGE_BYTES = sum(LAYER_BYTES)
STATE_BYTES = (100, 60)  # a state fills three pages
LANES = ("demote", "load", "store", "fetch")
GARBAGE = 0xEE
NAMES = KeyChain(PAGE, fingerprint=b"names")  # under which pages are reported
KEYS = KeyChain(PAGE, fingerprint=b"")  # of the index
STEMS = ([1] * 10, [1, 2] * 5, [1] * 4 + [2] * 8, [3] * 12)

CACHES: list[Any] = [PlainCache]
if find_spec("pagewood.radixcache") is not None:  # it is absent when this package is tested alone
    from pagewood.radixcache import RadixCache

    CACHES.append(RadixCache)


def content(tokens: Int32, namespace: str | None) -> bytes:
    """Return what the last page of these tokens must hold, over all layers."""
    return blake2b(repr(namespace).encode() + tokens.tobytes(), digest_size=PAGE_BYTES).digest()


def state_behind(tokens: Int32, namespace: str | None) -> bytes:
    """Return what the state at the end of these tokens must be, over all layers."""
    return shake_128(repr(namespace).encode() + tokens.tobytes()).digest(sum(STATE_BYTES))


@dataclass(slots=True, eq=False)
class Running:
    """A running request: its lease and its private pages."""

    lease: Any
    private: list[int]


class Beside:
    """Indices beside each other as one: a request uses any of them, and the pages of all are in one pool."""

    def __init__(self, indices: Sequence[TieredIndex], rng: random.Random) -> None:
        self.counters = indices[0].counters
        self._all = indices
        self._rng = rng
        self._owners: dict[int, tuple[object, TieredIndex]] = {}
        """By id of a node or a recall, which is kept, so that no other gets its id."""

    def __getattr__(self, name: str) -> Any:
        """Return a number of pages, or a function that calls an index: the owner of its first argument, if any."""
        if name.startswith("num_"):
            return sum(getattr(index, name) for index in self._all)

        def call(*arguments: Any, after: Any = None, **options: Any) -> Any:
            first = after or (arguments[0] if arguments else None)
            _, index = self._owners.get(id(first), (None, self._rng.choice(self._all)))
            found = getattr(index, name)(*arguments, **({} if after is None else {"after": after}), **options)
            for one in (found, getattr(found, "node", None)):
                if one is not None:
                    self._owners[id(one)] = one, index
            return found

        return call

    def evict(self, num_pages: int) -> Int32:
        evicted = np.empty(0, np.int32)
        for index in self._rng.sample(self._all, len(self._all)):
            evicted = np.append(evicted, index.evict(num_pages - len(evicted)))
        return evicted

    def clear(self) -> Int32:
        return np.concatenate([index.clear() for index in self._all])

    def check(self) -> None:
        for index in self._all:
            index.check()

    def locate(self, *prefix: Any) -> Any:
        return max((index.locate(*prefix) for index in self._all), key=lambda hits: hits.num_tokens)

    def close(self) -> None:
        for index in self._all:
            index.close()


class FollowedDisk(FaultyStore):
    """A disk that fails on request, and reports what it gains and loses."""

    def __init__(self, disk: DiskTier) -> None:
        super().__init__(disk)
        self.disk = disk
        self.track = disk.track

    def __contains__(self, key: bytes) -> bool:
        return key in self.disk


class Reader:
    """Follows a log of the tiers by its changes alone; `held` has the names of the pages of each tier."""

    def __init__(self, log: TierLog) -> None:
        self.log = log
        self.held: dict[str, set[bytes]] = {"host": set(), "disk": set()}

    def read(self) -> None:
        for change in self.log.read():
            names = set(change.names)
            assert len(names) == len(change.names) > 0
            if isinstance(change, PagesStored):
                assert not names & self.held[change.tier]
                assert len(change.tokens) == PAGE * len(names)
                start = NAMES.root(change.namespace) if change.parent is None else change.parent
                assert NAMES.extend(start, change.tokens) == change.names
                self.held[change.tier] |= names
            else:
                assert names <= self.held[change.tier]
                self.held[change.tier] -= names


class Traffic:
    """Makes an engine's calls in a random order, and overwrites pages as soon as they are free.

    Args:
        seed: Seed of all random choices.
        folder: Folder of the stores.
        make_cache: Makes the cache of the device's pages.
        has_faults: If True, copies fail, files are corrupted, stores are small, and the process restarts. If False, all
            tiers have room for everything.
        num_indices: Beside each other.
        has_states: Whether there are places for states, which some prefixes have at their ends.
    """

    def __init__(
        self,
        seed: int,
        folder: Path,
        make_cache: Callable[[int], Any],
        *,
        has_faults: bool,
        num_indices: int = 1,
        has_states: bool = False,
    ) -> None:
        self.num_indices = num_indices
        self.rng = rng = random.Random(seed)
        self.folder, self.make_cache, self.has_faults = folder, make_cache, has_faults
        self.now_s = 0.0
        self.seen: dict[tuple[str | None, bytes], None] = {}
        self.num_pages = rng.randint(7, 16)
        self.num_host_pages = rng.randint(3, 30 if has_states else 12) if has_faults else 1000
        self.policy, self.mode = rng.choice(list(WritePolicy)), rng.choice(list(PrefetchMode))
        self.below = rng.choice(["nothing", "disk", "remote", "both"])
        self.layers = [np.full((self.num_pages, n), GARBAGE, np.uint8) for n in LAYER_BYTES]
        self.num_places = rng.randint(2, 5) if has_states else 0
        self.states = [np.full((self.num_places, n), GARBAGE, np.uint8) for n in STATE_BYTES]
        self.behind: dict[tuple[str | None, bytes], None] = {}  # the prefixes that had states
        self.num_states_loaded = 0
        self.total = TierCounters()
        self.has_restarted = False
        self.boot()

    def boot(self) -> None:
        """Do what a server does when it starts."""
        self.allocator = PageAllocator(self.num_pages)
        self.device = FaultyDevice(ArrayPages([[layer] for layer in self.layers]))
        self.lanes = manual_lanes(max_pending=2)
        self.disk = self.remote = None
        num_bytes = (12 + 5 * self.num_places if self.has_faults else 1000) * PAGE_BYTES
        if self.below in ("disk", "both"):
            self.disk = FollowedDisk(DiskTier(self.folder / "shard-0", page_bytes=PAGE_BYTES, num_bytes=num_bytes))
        if self.below in ("remote", "both"):
            self.remote = FaultyStore(SharedFolder(self.folder / "s", page_bytes=PAGE_BYTES, num_bytes=num_bytes * 9))
        self.host = HostTier(page_bytes=PAGE_BYTES, num_pages=self.num_host_pages)
        self.index: Any = TieredIndex(
            self.make_cache(PAGE),
            device=StatePages(self.device, [[layer] for layer in self.states]) if self.num_places else self.device,
            host=self.host,
            disk=self.disk,
            remote=self.remote,
            page_size=PAGE,
            write_policy=self.policy,
            prefetch=PrefetchPolicy(mode=self.mode, base_s=20.0),
            lanes=self.lanes,
            clock=lambda: self.now_s,
        )
        self.reader = Reader(TierLog(NAMES, page_size=PAGE))
        if self.num_indices == 1:
            self.index.follow_tiers(self.reader.log)
        else:
            others = [self.index.beside(self.make_cache(PAGE)) for _ in range(1, self.num_indices)]
            self.index = Beside([self.index, *others], self.rng)
        self.running: list[Running] = []
        self.recalls: list[Recall] = []
        self.free_places = list(range(self.num_places))

    def walk(self, num_steps: int) -> None:
        """Take random steps, and check everything after each."""
        steps = [self.run_request] * 5 + [self.end_request] * 6 + [self.evict] * 5 + [self.recall] * 6
        steps += [self.advance] * 12 + [self.cancel] + [self.copy] * 14 + [self.pass_time] * 2
        steps += [self.evict_states] * 3 if self.num_places else []
        faults = [self.fail_device, self.fail_store, self.corrupt, self.restart, self.clear]
        for _ in range(num_steps):
            self.rng.choice(steps)()
            if self.has_faults and self.rng.random() < 0.04:
                self.rng.choice(faults)()
            self.check_owners()
            self.check_contents()
            if self.rng.random() < 0.4 and self.num_indices == 1:
                self.check_reports()
            if not self.has_faults:
                self.check_nothing_is_lost()
        self.close()

    def prompt(self) -> tuple[Int32, str | None]:
        stem = self.rng.choice(STEMS)
        tail = [self.rng.randint(1, 2) for _ in range(self.rng.choice((0, 0, 0, 1, 4)))]
        tokens = np.array(stem[: self.rng.choice((4, 8, 12))] + tail, np.int32)
        return tokens, self.rng.choice((None, None, "tenant"))

    def take(self, n: int) -> Int32 | None:
        """Do what an engine does when it needs pages."""
        missing = n - self.allocator.num_free
        if missing > self.index.num_evictable:
            return None
        if missing > 0:
            evicted = self.index.evict(missing)
            assert len(evicted) == missing
            self.free(evicted.tolist())
        return self.allocator.alloc(n)

    def take_state(self) -> int | None:
        """Do what an engine does when it needs a place for a state."""
        if not self.free_places:
            self.free_states(self.index.evict_snapshots(1).tolist())
        return self.free_places.pop() if self.free_places else None

    def free_states(self, places: list[int]) -> None:
        assert not {*places} & {*self.free_places}
        for layer in self.states:
            layer[places] = GARBAGE
        self.free_places += places

    def evict_states(self) -> None:
        self.free_states(self.index.evict_snapshots(self.rng.randint(0, 3)).tolist())

    def keep_state(self, tokens: Int32, namespace: str | None) -> None:
        """Give a prefix of published tokens a state, if there is a place for it."""
        place = self.take_state() if self.num_places and self.rng.random() < 0.8 else None
        if place is None:
            return
        prefix = tokens[: self.rng.randint(1, len(tokens) // PAGE) * PAGE]
        image = np.frombuffer(state_behind(prefix, namespace), np.uint8)
        self.states[0][place], self.states[1][place] = image[: STATE_BYTES[0]], image[STATE_BYTES[0] :]
        if not self.index.attach(self.index.peek(prefix, namespace).node, place):
            self.free_states([place])
        self.behind[namespace, prefix.tobytes()] = None

    def free(self, pages: list[int]) -> None:
        for layer in self.layers:
            layer[pages] = GARBAGE
        self.allocator.free(np.array(pages, np.int32))  # raises if a page has two owners

    def run_request(self) -> None:
        """Match, compute what is missing, publish."""
        tokens, namespace = self.prompt()
        match = self.index.match(tokens, namespace)
        lease = self.index.lock(match.node)
        start, end = len(match.pages), len(tokens) // PAGE
        pages = self.take(end - start)
        if pages is None:
            self.index.unlock(lease)
            return
        for index, page in enumerate(pages.tolist(), start):
            image = np.frombuffer(content(tokens[: (index + 1) * PAGE], namespace), np.uint8)
            self.layers[0][page], self.layers[1][page] = image[: LAYER_BYTES[0]], image[LAYER_BYTES[0] :]
            self.seen[namespace, tokens[: (index + 1) * PAGE].tobytes()] = None
        if self.rng.random() < 0.3 and self.recalls:
            self.advance()  # may publish the same tokens
        insertion = self.index.insert(tokens[start * PAGE :], pages, namespace, after=lease)
        published = self.index.lock(insertion.node)
        self.index.unlock(lease)
        self.running.append(Running(published, pages[: insertion.num_existing].tolist()))
        self.keep_state(tokens, namespace)

    def end_request(self) -> None:
        if self.running:
            running = self.running.pop(self.rng.randrange(len(self.running)))
            self.index.unlock(running.lease)
            self.free(running.private)

    def evict(self) -> None:
        n = self.rng.randint(1, 8)
        at_least = min(n, self.index.num_evictable)
        evicted = self.index.evict(n)
        assert at_least <= len(evicted) <= n  # a copy that ended in the meantime may free more
        self.free(evicted.tolist())

    def clear(self) -> None:
        num_evictable = self.index.num_evictable
        pages = self.index.clear()
        assert len(pages) >= num_evictable  # a copy that ended in the meantime may free more
        self.free(pages.tolist())
        assert self.index.num_evictable == 0

    def recall(self) -> None:
        if len(self.recalls) >= 3 or not self.seen:
            return
        namespace, data = self.rng.choice(list(self.seen))
        tokens = np.append(np.frombuffer(data, np.int32), np.int32(9)) if self.rng.random() < 0.9 else self.prompt()[0]
        recall = self.index.recall(tokens.astype(np.int32), namespace)
        if recall is not None:
            self.recalls.append(recall)

    def advance(self) -> None:
        if self.recalls:
            if self.rng.random() < 0.5:
                getattr(self.lanes, self.rng.choice(("fetch", "load"))).run(1)
            recall = self.rng.choice(self.recalls)
            self.index.advance(recall, self.take, take_state=self.take_state)
            self.num_states_loaded += recall.place is not None
            if recall.is_over:
                self.recalls.remove(recall)

    def cancel(self) -> None:
        if self.recalls:
            recall = self.recalls.pop(self.rng.randrange(len(self.recalls)))
            self.index.cancel(recall)
            assert recall.is_over

    def copy(self) -> None:
        lane: ManualLane = getattr(self.lanes, self.rng.choice(LANES))
        lane.run(self.rng.randint(1, 3))

    def pass_time(self) -> None:
        self.now_s += self.rng.choice((0.5, 3.0))
        self.index.poll()

    def restart(self) -> None:
        """End the process, perhaps without closing the index, and start another."""
        if self.rng.random() < 0.5:
            self.close()
        else:
            self.count()
            for store in (self.disk, self.remote):
                if store is not None:
                    store.close()
        for layer in (*self.layers, *self.states):
            layer.fill(GARBAGE)
        self.has_restarted = True
        self.boot()

    def fail_device(self) -> None:
        setattr(self.device, self.rng.choice(("num_reads_failing", "num_writes_failing")), 1)

    def fail_store(self) -> None:
        store = self.rng.choice((self.disk, self.remote))
        if store is not None:
            setattr(store, self.rng.choice(("num_puts_failing", "num_gets_failing", "num_gets_short")), 1)

    def corrupt(self) -> None:
        """Damage a file of a store."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        if not files:
            return
        path = self.rng.choice(files)
        start = 4096 * 2 if path.name == "shard-0" else 0  # only the pages of a disk tier, or a whole segment
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            for _ in range(1 if start == 0 else 8):
                offset = file.seek(self.rng.randrange(start, size))
                byte = file.read(1)[0]
                file.seek(offset)
                file.write(bytes([byte ^ self.rng.randint(1, 255)]))
            if start == 0 and self.rng.random() < 0.3:
                file.truncate(self.rng.randrange(size))

    def check_owners(self) -> None:
        """Check that every device page and every host slot has one owner."""
        num_private = sum(len(running.private) for running in self.running)
        assert self.allocator.num_free + self.index.num_pages + num_private == self.num_pages
        if self.num_places:
            assert len(self.free_places) + self.index.num_snapshots == self.num_places
        self.index.check()

    def check_contents(self) -> None:
        """Check the contents of all pages that can be matched, in every namespace."""
        for namespace, data in self.seen:
            tokens = np.frombuffer(data, np.int32)
            match = self.index.peek(tokens, namespace)
            for index, page in enumerate(match.pages.tolist(), 1):
                image = b"".join(layer[page].tobytes() for layer in self.layers)
                assert image == content(tokens[: index * PAGE], namespace), f"page {page} has the wrong contents"
            if self.num_places and (match := self.index.peek(tokens, namespace, needs_snapshot=True)).num_tokens:
                place = self.index.snapshot(match.node)
                image = b"".join(layer[place].tobytes() for layer in self.states)
                assert image == state_behind(tokens[: match.num_tokens], namespace), f"place {place} has another state"

    def check_reports(self) -> None:
        """Check that a reader knows what the tiers hold, but for what the disk had before a request needed it.

        That is from before a restart, or was fetched from the remote store for a recall that had been cancelled.
        """
        may_be_unknown = self.has_restarted or self.below == "both"
        self.reader.read()
        num_held = self.index.num_pages + self.host.num_held + (self.disk.disk.num_held if self.disk else 0)
        assert self.reader.log.num_pages <= num_held  # pages that are nowhere are forgotten
        tiers: dict[str, Any] = {"host": self.host, "disk": self.disk or ()}
        for namespace, data in self.seen:
            tokens = np.frombuffer(data, np.int32)
            key = KEYS.extend(KEYS.root(namespace), tokens)[-1]
            name = NAMES.extend(NAMES.root(namespace), tokens)[-1]
            for tier, holder in tiers.items():
                is_reported = name in self.reader.held[tier]
                if is_reported or tier == "host" or not may_be_unknown:
                    assert is_reported == (key in holder)

    def check_nothing_is_lost(self) -> None:
        """Check that all that was computed is still in a tier, unless the policy drops pages used once."""
        if self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        self.index.poll()
        for namespace, data in self.seen:
            tokens = np.frombuffer(data, np.int32)
            hits = self.index.locate(tokens, namespace)
            assert hits.num_tokens == len(tokens) or self.is_under_way(), f"{hits} of {len(tokens)} tokens"
        for namespace, data in self.behind:
            hits = self.index.locate(np.frombuffer(data, np.int32), namespace)
            assert hits.num_usable * 4 == len(data) or self.is_under_way(), f"{hits} of a prefix with a state"

    def is_under_way(self) -> bool:
        """Return whether a copy may be in flight, in either direction."""
        return any(getattr(self.lanes, lane).num_pending for lane in LANES)

    def close(self) -> None:
        """End as a server does; check that nothing is pinned, taken, locked or being loaded."""
        for running in self.running:
            self.index.unlock(running.lease)
            self.free(running.private)
        self.running.clear()
        self.index.close()
        assert (self.index.num_loading, self.index.num_locked, self.host.num_taken, self.host.num_pinned) == (0,) * 4
        self.check_owners()
        self.count()

    def count(self) -> None:
        counters = self.index.counters
        for name in ("num_demoted", "num_dropped", "num_stored", "num_fetched", "num_loaded", "num_failed"):
            setattr(self.total, name, getattr(self.total, name) + getattr(counters, name))


@pytest.mark.parametrize("make_cache", CACHES)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 10 else [pytest.mark.slow]) for seed in range(24)]
)
def test_under_faults_no_page_is_lost_or_wrong_or_owned_twice(seed: int, make_cache: Any, tmp_path: Path) -> None:
    Traffic(seed, tmp_path, make_cache, has_faults=True).walk(400)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else [pytest.mark.slow]) for seed in range(60)]
)
def test_indices_beside_each_other(seed: int, tmp_path: Path) -> None:
    Traffic(seed, tmp_path, PlainCache, has_faults=seed % 4 > 0, num_indices=2 + seed % 3).walk(400)


@pytest.mark.parametrize("seed", range(12))
def test_without_faults_and_with_enough_room_nothing_is_lost(seed: int, tmp_path: Path) -> None:
    Traffic(seed, tmp_path, PlainCache, has_faults=False).walk(300)


@pytest.mark.skipif(len(CACHES) < 2, reason="only pagewood-radixcache keeps places of states")
@pytest.mark.parametrize("has_faults", [False, True])
def test_states_move_with_their_pages(has_faults: bool, tmp_path: Path) -> None:
    num_loaded = 0
    for seed in range(5):
        traffic = Traffic(seed, tmp_path / str(seed), CACHES[-1], has_faults=has_faults, has_states=True)
        traffic.walk(250)
        num_loaded += traffic.num_states_loaded
    assert num_loaded > 5


def test_the_traffic_makes_every_kind_of_copy(tmp_path: Path) -> None:
    """Otherwise the tests above would prove little."""
    totals = TierCounters()
    for seed in range(8):
        traffic = Traffic(seed, tmp_path / str(seed), PlainCache, has_faults=True)
        traffic.walk(400)
        for name in ("num_demoted", "num_dropped", "num_stored", "num_fetched", "num_loaded", "num_failed"):
            setattr(totals, name, getattr(totals, name) + getattr(traffic.total, name))
    assert min(totals.num_demoted, totals.num_dropped, totals.num_stored, totals.num_loaded) > 40, totals
    assert min(totals.num_fetched, totals.num_failed) > 20, totals
