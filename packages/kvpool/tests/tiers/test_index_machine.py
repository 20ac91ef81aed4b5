"""Random traffic over all tiers, with faults, against an oracle that knows what every page must hold."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagewood.kvpool import PageAllocator
from pagewood.kvpool.tiers import (
    ArrayPages,
    DiskTier,
    HostTier,
    PrefetchMode,
    PrefetchPolicy,
    Recall,
    SharedFolder,
    TieredIndex,
    WritePolicy,
)  # fmt: skip
from pagewood.kvpool.tiers.arrays import Int32
from pagewood.kvpool.tiers.plain_cache import PlainCache
from pagewood.kvpool.tiers.testing import FaultyDevice, FaultyStore, ManualLane, manual_lanes

PAGE = 2
LAYER_BYTES = (24, 40)
LANES = ("demote", "load", "store", "fetch")
GARBAGE = 0xEE

prompts = st.builds(
    lambda stem, tail: np.array(stem + tail, np.int32),
    st.sampled_from([[1] * 4, [1] * 8, [1, 2] * 5, [3] * 12]),
    st.lists(st.integers(1, 2), max_size=6),
)
namespaces = st.sampled_from([None, "tenant"])


def content(tokens: Int32, namespace: str | None) -> bytes:
    """What the last page of these tokens must hold, all layers."""
    return blake2b(repr(namespace).encode() + tokens.tobytes(), digest_size=64).digest()


@dataclass(slots=True, eq=False)
class Held:
    """A request that runs: its lease and the pages that are its own."""

    lease: Any
    private: list[int]


class Traffic(RuleBasedStateMachine):
    """An engine's calls, in any order; pages that come free are overwritten at once."""

    make_cache: Callable[[int], Any] = PlainCache
    has_faults = True
    num_host_pages = 8

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now_s = 0.0
        self.seen: set[tuple[str | None, bytes]] = set()

    @initialize(
        num_pages=st.integers(8, 24),
        policy=st.sampled_from(WritePolicy),
        mode=st.sampled_from(PrefetchMode),
        below=st.sampled_from(["nothing", "disk", "remote", "both"]),
    )
    def start(self, num_pages: int, policy: WritePolicy, mode: PrefetchMode, below: str) -> None:
        self.num_pages, self.policy, self.mode, self.below = num_pages, policy, mode, below
        self.layers = [np.full((num_pages, n), GARBAGE, np.uint8) for n in LAYER_BYTES]
        self.boot()

    def boot(self) -> None:
        """What a server does when it starts."""
        self.allocator = PageAllocator(self.num_pages)
        self.device = FaultyDevice(ArrayPages(self.layers))
        self.lanes = manual_lanes(max_pending=2)
        path, page_bytes = Path(self.folder.name), sum(LAYER_BYTES)
        self.disk = self.remote = None
        if self.below in ("disk", "both"):
            num_bytes = (12 if self.has_faults else 200) * page_bytes
            self.disk = FaultyStore(DiskTier(path / "shard-0", page_bytes=page_bytes, num_bytes=num_bytes))
        if self.below in ("remote", "both"):
            self.remote = FaultyStore(SharedFolder(path / "shared", page_bytes=page_bytes, num_bytes=1000 * page_bytes))
        self.host = HostTier(page_bytes=page_bytes, num_pages=self.num_host_pages)
        self.index = TieredIndex(
            type(self).make_cache(PAGE),
            device=self.device,
            host=self.host,
            disk=self.disk,
            remote=self.remote,
            page_size=PAGE,
            write_policy=self.policy,
            prefetch=PrefetchPolicy(mode=self.mode, base_s=2.0),
            lanes=self.lanes,
            clock=lambda: self.now_s,
        )
        self.running: list[Held] = []
        self.recalls: list[Recall] = []

    def take(self, n: int) -> Int32 | None:
        """What an engine does when it needs pages."""
        if n > self.allocator.num_free + self.index.num_evictable:
            return None
        lacking = n - self.allocator.num_free
        if lacking > 0:
            evicted = self.index.evict(lacking)
            assert len(evicted) == lacking
            self.scribble(evicted.tolist())
            self.allocator.free(evicted)
        return self.allocator.alloc(n)

    def scribble(self, pages: list[int]) -> None:
        for layer in self.layers:
            layer[pages] = GARBAGE

    @rule(tokens=prompts, namespace=namespaces)
    def run_request(self, tokens: Int32, namespace: str | None) -> None:
        """Match, compute what is missing, publish."""
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
            self.seen.add((namespace, tokens[: (index + 1) * PAGE].tobytes()))
        insertion = self.index.insert(tokens[start * PAGE :], pages, namespace, after=lease)
        published = self.index.lock(insertion.node)
        self.index.unlock(lease)
        self.running.append(Held(published, pages[: insertion.num_existing].tolist()))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end_request(self, data: st.DataObject) -> None:
        held = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.index.unlock(held.lease)
        self.scribble(held.private)
        self.allocator.free(np.array(held.private, np.int32))

    @rule(n=st.integers(1, 8))
    def evict(self, n: int) -> None:
        expected = min(n, self.index.num_evictable)
        evicted = self.index.evict(n)
        assert len(evicted) == expected
        self.scribble(evicted.tolist())
        self.allocator.free(evicted)  # raises if a page has two owners

    @rule(tokens=prompts, namespace=namespaces)
    def recall(self, tokens: Int32, namespace: str | None) -> None:
        recall = self.index.recall(tokens, namespace)
        if recall is not None:
            self.recalls.append(recall)

    @precondition(lambda self: self.recalls)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        recall = data.draw(st.sampled_from(self.recalls))
        self.index.advance(recall, self.take)
        if recall.is_over:
            self.recalls.remove(recall)

    @precondition(lambda self: self.recalls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        recall = self.recalls.pop(data.draw(st.integers(0, len(self.recalls) - 1)))
        self.index.cancel(recall)
        assert recall.is_over

    @rule(name=st.sampled_from(LANES), n=st.integers(1, 3))
    def copy(self, name: str, n: int) -> None:
        lane: ManualLane = getattr(self.lanes, name)
        lane.run(n)

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.index.poll()

    @rule(flush=st.booleans())
    def restart(self, flush: bool) -> None:
        """The process ends, perhaps in the middle of everything, and another takes its place."""
        if flush:
            self.index.close()
            self.audit()
        for store in (self.disk, self.remote):
            if store is not None:
                store.close()
        self.scribble(list(range(self.num_pages)))
        self.boot()

    @precondition(lambda self: self.has_faults)
    @rule(read=st.booleans())
    def fail_device(self, read: bool) -> None:
        if read:
            self.device.num_reads_failing = 1
        else:
            self.device.num_writes_failing = 1

    @precondition(lambda self: self.has_faults)
    @rule(kind=st.sampled_from(["num_puts_failing", "num_gets_failing", "num_gets_short"]), is_disk=st.booleans())
    def fail_store(self, kind: str, is_disk: bool) -> None:
        store = self.disk if is_disk else self.remote
        if store is not None:
            setattr(store, kind, 1)

    @precondition(lambda self: self.has_faults)
    @rule(data=st.data())
    def corrupt(self, data: st.DataObject) -> None:
        """Something else writes to the files of the stores."""
        files = sorted(path for path in Path(self.folder.name).rglob("*") if path.is_file())
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        start = 4096 * 2 if path.name == "shard-0" else 0  # the pages of a disk tier, all of a shared page
        with path.open("r+b") as file:
            size = file.seek(0, 2)
            offset = data.draw(st.integers(start, size - 1))
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ data.draw(st.integers(1, 255))]))

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "index"):
            return
        num_private = sum(len(held.private) for held in self.running)
        assert self.allocator.num_free + self.index.num_pages + num_private == self.num_pages
        self.index.check()

    @invariant()
    def what_matches_is_right(self) -> None:
        """All that can be matched holds what it must, in every namespace."""
        if not hasattr(self, "index"):
            return
        for namespace, data in self.seen:
            tokens = np.frombuffer(data, np.int32)
            match = self.index.peek(tokens, namespace)
            for index, page in enumerate(match.pages.tolist(), 1):
                image = b"".join(layer[page].tobytes() for layer in self.layers)
                assert image == content(tokens[: index * PAGE], namespace), f"page {page} holds something else"

    def audit(self) -> None:
        """When nothing is under way, nothing is pinned, taken or being loaded."""
        assert (self.index.num_loading, self.host.num_taken, self.host.num_pinned) == (0, 0, 0)

    def teardown(self) -> None:
        if hasattr(self, "index"):
            for held in self.running:
                self.index.unlock(held.lease)
            self.index.close()
            self.audit()
            assert self.index.num_locked == 0
            for store in (self.disk, self.remote):
                if store is not None:
                    store.close()
        self.folder.cleanup()


class Lossless(Traffic):
    """Without faults and with room for everything below, nothing that was computed is ever computed again."""

    has_faults = False
    num_host_pages = 400

    @invariant()
    def nothing_is_forgotten(self) -> None:
        if not hasattr(self, "index") or self.policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        for lane in LANES:
            getattr(self.lanes, lane).run(100)
        self.index.poll()
        for lane in LANES:
            getattr(self.lanes, lane).run(100)
        self.index.poll()
        for namespace, data in self.seen:
            tokens = np.frombuffer(data, np.int32)
            hits = self.index.locate(tokens, namespace)
            assert hits.num_tokens == len(tokens), f"{hits} of {len(tokens)} tokens"

    def restart(self, flush: bool) -> None:
        """Only a restart that flushes, to a disk that has room, keeps everything."""


Traffic.TestCase.settings = Lossless.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTraffic = Traffic.TestCase
TestLossless = Lossless.TestCase

if find_spec("pagewood.radixcache") is not None:
    from pagewood.radixcache import RadixCache

    class OverRadix(Traffic):
        """The same over a real radix tree."""

        make_cache = RadixCache

    OverRadix.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
    TestOverRadix = OverRadix.TestCase
