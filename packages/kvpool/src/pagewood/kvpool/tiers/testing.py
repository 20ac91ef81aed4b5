"""Conformance tests for stores, and lanes that copy on request only; needs hypothesis.

A store of your own conforms if this test passes; `make_store(page_bytes)` makes an empty one with room for 64 pages:

    TestMyStore = store_conformance(make_store).TestCase

`manual_lanes` are for tests of an engine that uses a `TieredIndex`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from pagewood.kvpool.tiers.pages.arrays import Bytes
from pagewood.kvpool.tiers.pages.keys import KEY_BYTES
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.transfers.lane import Lanes, Work, run
from pagewood.kvpool.tiers.transfers.transfer import Transfer


class ManualLane:
    """A lane that copies only when a test calls `run` or `wait`, so that the test controls the copies in flight."""

    __slots__ = ("_max_pending", "_pending")

    def __init__(self, *, max_pending: int = 4) -> None:
        """Create an empty lane.

        Args:
            max_pending: Number of transfers that it accepts.
        """
        self._max_pending = max_pending
        self._pending: list[tuple[int, Work, Transfer]] = []  # with priorities; written by: submit, run

    @property
    def num_pending(self) -> int:
        """Number of transfers that wait."""
        return len(self._pending)

    def accepts(self, num_bytes: int, *, priority: int = 0) -> bool:
        """Return whether there is room for one more transfer of a priority; transfers of lower priority do not
        count."""
        return sum(other >= priority for other, _, _ in self._pending) < self._max_pending

    def submit(self, work: Work, num_bytes: int, *, priority: int = 0) -> Transfer | None:
        """Queue a copy; return None if there is no room."""
        if not self.accepts(num_bytes, priority=priority):
            return None
        transfer = Transfer(num_bytes)
        self._pending.append((priority, work, transfer))
        return transfer

    def run(self, n: int = 1) -> None:
        """Do up to `n` transfers, the highest priority first."""
        for _ in range(min(n, len(self._pending))):
            place = max(range(len(self._pending)), key=lambda place: self._pending[place][0])
            _, work, transfer = self._pending.pop(place)
            transfer.finish(run(work, transfer))

    def wait(self, transfer: Transfer) -> None:
        """Do all transfers up to this one."""
        while not transfer.is_done:
            self.run()

    def close(self) -> None:
        """Do all transfers."""
        self.run(len(self._pending))


def manual_lanes(*, max_pending: int = 4) -> Lanes:
    """Return lanes that copy only on request; see `ManualLane`."""
    return Lanes(**{name: ManualLane(max_pending=max_pending) for name in ("demote", "load", "store", "fetch")})


_NUM_KEYS = 12
_PAGE_BYTES = (1, 64, 4096, 8200)


def _key(index: int) -> bytes:
    return bytes([index]) * KEY_BYTES


def _page(index: int, page_bytes: int) -> Bytes:
    return np.random.default_rng(index).integers(0, 256, page_bytes, np.uint8)


class StoreMachine(RuleBasedStateMachine):
    """Makes the same random calls to a store and to a record of the stored pages; made by `store_conformance`."""

    make_store: Callable[[int], PageStore]

    @initialize(page_bytes=st.sampled_from(_PAGE_BYTES))
    def make(self, page_bytes: int) -> None:
        """Start with an empty store."""
        self.page_bytes = page_bytes
        self.store = self.make_store(page_bytes)
        self.put_so_far: set[int] = set()

    @rule(indices=st.lists(st.integers(0, _NUM_KEYS - 1), unique=True))
    def put(self, indices: list[int]) -> None:
        """Store some pages, perhaps again, and fetch them; the memory belongs to the caller after each call."""
        pages = [_page(index, self.page_bytes) for index in indices]
        self.store.put([_key(index) for index in indices], pages)
        for page in pages:
            page.fill(0)
        self.put_so_far.update(indices)
        self._fetch(indices)

    @rule(indices=st.lists(st.integers(0, _NUM_KEYS - 1)))
    def get(self, indices: list[int]) -> None:
        """Fetch pages, whether they were put or not. All 12 pages fit, so the store must not forget any."""
        self._fetch(indices)

    def _fetch(self, indices: list[int]) -> None:
        memory = np.zeros((len(indices), self.page_bytes), np.uint8)
        found = self.store.get([_key(index) for index in indices], list(memory))
        assert found == [index in self.put_so_far for index in indices], f"get({indices}) answered {found}"
        for index, row, is_there in zip(indices, memory, found, strict=True):
            if is_there:
                assert np.array_equal(row, _page(index, self.page_bytes)), f"page {index} came back changed"

    @rule(indices=st.lists(st.integers(0, _NUM_KEYS - 1)))
    def exists(self, indices: list[int]) -> None:
        """Query pages."""
        found = self.store.exists([_key(index) for index in indices])
        assert found == [index in self.put_so_far for index in indices], f"exists({indices}) answered {found}"

    @rule(extra=st.integers(-1, 1).filter(bool))
    def put_wrong_size(self, extra: int) -> None:
        """Put a page of the wrong size."""
        try:
            self.store.put([_key(_NUM_KEYS)], [np.zeros(self.page_bytes + extra, np.uint8)])
        except ValueError:
            return
        raise AssertionError(f"put of {self.page_bytes + extra} bytes must raise ValueError")

    def teardown(self) -> None:
        """Close the store."""
        if hasattr(self, "store"):
            self.store.close()


def store_conformance(make_store: Callable[[int], PageStore]) -> type[StoreMachine]:
    """Return a hypothesis state machine that tests the stores made by `make_store(page_bytes)`.

    Its `TestCase` attribute is a test class for pytest or unittest.
    """
    return type("StoreConformance", (StoreMachine,), {"make_store": staticmethod(make_store)})
