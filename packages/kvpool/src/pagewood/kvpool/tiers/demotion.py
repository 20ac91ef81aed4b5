"""The way down: which device pages the host lacks, and copying them out before anybody may reuse them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pagewood.kvpool.tiers.counters import TierCounters
from pagewood.kvpool.tiers.device import DevicePages
from pagewood.kvpool.tiers.host import HostTier
from pagewood.kvpool.tiers.lane import Lanes, Work
from pagewood.kvpool.tiers.policy import WritePolicy
from pagewood.kvpool.tiers.store import PageStore
from pagewood.kvpool.tiers.transfer import Transfer

_log = logging.getLogger(__name__)

BATCH_PAGES = 64
"""Pages of one transfer on the way down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyOut:
    """Device pages on their way to the host."""

    transfer: Transfer
    pages: list[int]
    keys: list[bytes]
    slots: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WriteBehind:
    """Host pages on their way to the stores."""

    transfer: Transfer
    slots: list[int]


class Demotion:
    """Copies pages from the device to the host, and from there to the stores.

    Invariant: `release` returns when no copy reads the released pages any more, so whoever gets them may write to them;
    and a page that came down to the host stays there until the stores have been offered it.

    It holds slots of the host only while it fills them, and pins them only while they wait for the stores.
    """

    __slots__ = (
        "_copying",
        "_counters",
        "_device",
        "_dirty",
        "_host",
        "_keys",
        "_lanes",
        "_min_uses",
        "_out",
        "_policy",
        "_stores",
        "_storing",
        "_unstored",
        "_wanted",
    )  # fmt: skip

    def __init__(
        self,
        *,
        device: DevicePages,
        host: HostTier,
        stores: Sequence[PageStore],
        lanes: Lanes,
        policy: WritePolicy,
        min_uses: int,
        counters: TierCounters,
    ) -> None:
        self._device = device
        self._host = host
        self._stores = stores
        self._lanes = lanes
        self._policy = policy
        self._min_uses = min_uses if policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        self._counters = counters
        self._keys: dict[int, bytes] = {}
        """Of the pages that the device's cache owns."""  # written by: adopt, release
        self._dirty: dict[int, int] = {}
        """Uses of each page that the host lacks."""  # written by: adopt, use, release, _begin_copies, _finish_copies
        self._wanted: dict[int, None] = {}
        """Dirty pages that the policy wants copied now."""  # written by: _want, release, flush, abandon, _begin_copies
        self._copying: dict[int, Transfer] = {}
        """What reads each page."""  # written by: _begin_copies, _finish_copies
        self._out: list[_CopyOut] = []  # written by: _begin_copies, _finish_copies
        self._unstored: dict[bytes, int] = {}
        """Pinned slots that wait for the stores."""  # written by: hold, _begin_stores
        self._storing: list[_WriteBehind] = []  # written by: _begin_stores, _finish_stores

    @property
    def num_slots(self) -> int:
        """Host slots that it is filling."""
        return sum(len(out.slots) for out in self._out)

    def key_of(self, page: int) -> bytes:
        """Return the key of a page that the device's cache owns."""
        return self._keys[page]

    def adopt(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Take note that the device's cache owns these pages now; it is their first use."""
        for page, key in zip(pages, keys, strict=True):
            self._keys[page] = key
            if key not in self._host:
                self._dirty[page] = 1
                self._want(page)

    def use(self, pages: Iterable[int]) -> None:
        """Count a use of cached pages."""
        if self._dirty and self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            for page in pages:
                if page in self._dirty:
                    self._dirty[page] += 1
                    self._want(page)

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages that the device's cache has evicted, after a copy of those that are worth one."""
        for page in pages:
            transfer = self._copying.get(page)
            if transfer is not None:
                self._lanes.demote.wait(transfer)
        self._finish_copies()
        worth = [page for page in pages if self._dirty.get(page, 0) >= self._min_uses]
        num_copied = self._copy_now(worth)
        self._counters.num_dropped += sum(page in self._dirty for page in pages) - num_copied
        for page in pages:
            del self._keys[page]
            self._dirty.pop(page, None)
            self._wanted.pop(page, None)

    def hold(self, key: bytes, slot: int, *, is_stored: bool) -> None:
        """Let the host hold the page that a taken slot was filled with, until the stores have it if they lack it."""
        if self._host.put(key, slot) and self._stores and not is_stored:
            self._host.pin((slot,))
            self._unstored[key] = slot

    def poll(self) -> None:
        """Take in what is finished, and begin what is due and has room."""
        self._finish_copies()
        self._begin_copies()
        self._finish_stores()
        self._begin_stores()

    def settle(self) -> None:
        """Take in what is finished, and begin nothing."""
        self._finish_copies()
        self._finish_stores()

    def flush(self) -> None:
        """Copy out everything that is worth it, and wait until the stores have it or have failed."""
        self._wanted.update(dict.fromkeys(page for page, uses in self._dirty.items() if uses >= self._min_uses))
        self._drain()

    def abandon(self) -> None:
        """Copy nothing more out of the device, and wait until the stores have what is on the host or have failed."""
        self._wanted.clear()
        self._drain()

    def _drain(self) -> None:
        while True:
            self.poll()
            if self._storing:
                self._lanes.store.wait(self._storing[0].transfer)
            elif self._out:
                self._lanes.demote.wait(self._out[0].transfer)
            else:
                return

    def _want(self, page: int) -> None:
        if self._policy is not WritePolicy.WRITE_BACK and self._dirty[page] >= self._min_uses:
            self._wanted[page] = None

    def _copy_now(self, pages: Sequence[int]) -> int:
        """Copy evicted pages while the caller waits; return how many the host had room for."""
        slots = self._host.take(len(pages)) if pages else []
        pages = pages[: len(slots)]
        if not slots:
            return 0
        try:
            self._device.read(pages, self._host.memory, slots)
        except Exception:  # a cache may forget; the memory of the device must come free
            _log.exception("%d pages could not be copied out and are forgotten", len(pages))
            self._host.give_back(slots)
            self._counters.num_failed += len(pages)
            return 0
        for page, slot in zip(pages, slots, strict=True):
            self.hold(self._keys[page], slot, is_stored=False)
        self._counters.num_demoted += len(pages)
        return len(pages)

    def _begin_copies(self) -> None:
        while self._wanted:
            pages = list(islice(self._wanted, BATCH_PAGES))
            num_bytes = len(pages) * self._device.page_bytes
            slots = self._host.take(len(pages)) if self._lanes.demote.accepts(num_bytes) else []
            if not slots:
                return
            pages = pages[: len(slots)]
            transfer = self._lanes.demote.submit(self._read(pages, slots), num_bytes)
            assert transfer is not None
            keys = [self._keys[page] for page in pages]
            self._out.append(_CopyOut(transfer=transfer, pages=pages, keys=keys, slots=slots))
            for page in pages:
                self._copying[page] = transfer
                del self._dirty[page], self._wanted[page]

    def _read(self, pages: list[int], slots: list[int]) -> Work:
        return lambda _: self._device.read(pages, self._host.memory, slots)

    def _finish_copies(self) -> None:
        done = [out for out in self._out if out.transfer.is_done]
        if not done:
            return
        self._out = [out for out in self._out if not out.transfer.is_done]
        for out in done:
            for page in out.pages:
                del self._copying[page]
            if out.transfer.error is None:
                for key, slot in zip(out.keys, out.slots, strict=True):
                    self.hold(key, slot, is_stored=False)
                self._counters.num_demoted += len(out.pages)
                continue
            _log.error("%d pages could not be copied out", len(out.pages), exc_info=out.transfer.error)
            self._host.give_back(out.slots)
            self._counters.num_failed += len(out.pages)
            self._dirty.update(dict.fromkeys(out.pages, self._min_uses))  # eviction tries once more

    def _begin_stores(self) -> None:
        while self._unstored:
            keys = list(islice(self._unstored, BATCH_PAGES))
            num_bytes = len(keys) * self._device.page_bytes
            if not self._lanes.store.accepts(num_bytes):
                return
            slots = [self._unstored.pop(key) for key in keys]
            transfer = self._lanes.store.submit(self._put(keys, slots), num_bytes)
            assert transfer is not None
            self._storing.append(_WriteBehind(transfer=transfer, slots=slots))

    def _put(self, keys: list[bytes], slots: list[int]) -> Work:
        def work(_: Transfer) -> None:
            failure: Exception | None = None
            rows = [self._host.row(slot) for slot in slots]
            for store in self._stores:
                try:
                    store.put(keys, rows)
                except OSError as error:  # the other stores still get theirs
                    failure = error
            if failure is not None:
                raise failure

        return work

    def _finish_stores(self) -> None:
        for write in [write for write in self._storing if write.transfer.is_done]:
            self._storing.remove(write)
            self._host.unpin(write.slots)
            if write.transfer.error is None:
                self._counters.num_stored += len(write.slots)
            else:
                self._counters.num_failed += len(write.slots)
                _log.error("a store could not keep %d pages: %s", len(write.slots), write.transfer.error)
