"""Copies pages down, from the device to the host and from the host to the stores, before device pages are reused."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from pagewood.kvpool.tiers.pages.device import DevicePages, PageHolder
from pagewood.kvpool.tiers.pages.host import HostTier
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.tier_log import TierLog
from pagewood.kvpool.tiers.transfers.counters import TierCounters
from pagewood.kvpool.tiers.transfers.lane import Lanes, Work
from pagewood.kvpool.tiers.transfers.policy import WritePolicy
from pagewood.kvpool.tiers.transfers.transfer import Transfer

_log = logging.getLogger(__name__)

# Largest number of pages in one transfer to the host or to the stores.
BATCH_PAGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyOut:
    """Device pages that are being copied to the host."""

    transfer: Transfer
    pages: list[int]
    keys: list[bytes]
    slots: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _WriteBehind:
    """Host pages that are being copied to the stores."""

    transfer: Transfer
    slots: list[int]
    keys: list[bytes]


class Demotion:
    """Copies pages from the device to the host, and from there to the stores.

    Invariant: when `release` returns, no copy reads the released pages, so their next owner may write to them. A page
    that was copied to the host stays there until it has been offered to the stores.

    Slots of the host are taken only while they are being filled, and pinned only while they wait for the stores.
    """

    __slots__ = (
        "_copying",
        "_counters",
        "_device",
        "_dirty",
        "_holder",
        "_host",
        "_keys",
        "_lanes",
        "_log",
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
        holder: PageHolder | None = None,
    ) -> None:
        """Copy the pages of `device` to `host` and `stores`.

        Args:
            device: Memory of the device's pages.
            host: The host tier.
            stores: Stores below the host.
            lanes: Where copies run.
            policy: When a page is copied to the host.
            min_uses: Uses that WRITE_THROUGH_SELECTIVE requires.
            counters: Counters to update.
            holder: See `TieredIndex`.
        """
        self._device = device
        self._holder = holder
        self._host = host
        self._stores = stores
        self._lanes = lanes
        self._policy = policy
        self._min_uses = min_uses if policy is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        self._counters = counters
        # The key of each page that the device's cache owns.
        self._keys: dict[int, bytes] = {}  # written by: adopt, _forget
        # The number of uses of each page that the host does not have.
        self._dirty: dict[int, int] = {}  # written by: adopt, use, keep, _forget, _begin_copies, _finish_copies
        # Dirty pages that the policy wants to copy now.
        self._wanted: dict[int, None] = {}  # written by: _want, keep, _forget, flush, abandon, _begin_copies
        # The transfer that reads each page.
        self._copying: dict[int, Transfer] = {}  # written by: _begin_copies, _finish_copies
        self._out: list[_CopyOut] = []  # written by: _begin_copies, _finish_copies
        # Pinned slots that wait for the stores, by key.
        self._unstored: dict[bytes, int] = {}  # written by: hold, _begin_stores
        self._storing: list[_WriteBehind] = []  # written by: _begin_stores, _finish_stores
        self._log: TierLog | None = None  # written by: follow

    @property
    def num_slots(self) -> int:
        """Number of host slots that are being filled."""
        return sum(len(out.slots) for out in self._out)

    def key_of(self, page: int) -> bytes:
        """Return the key of a page that the device's cache owns."""
        return self._keys[page]

    def unstored(self) -> set[bytes]:
        """Return the keys of the pages on their way to the stores: those that the policy wants to copy, and copies that
        have not ended."""
        keys = {self._keys[page] for page in self._wanted}
        keys.update(*(out.keys for out in self._out), self._unstored, *(write.keys for write in self._storing))
        return keys

    def follow(self, log: TierLog) -> None:
        """From now on, report to a log which described pages are on the device."""
        self._log = log
        log.entered(self._keys.values())

    def adopt(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Record that the device's cache now owns these pages; this counts as their first use."""
        for page, key in zip(pages, keys, strict=True):
            self._keys[page] = key
            if key not in self._host:
                self._dirty[page] = 1
                self._want(page)
        if self._log is not None:
            self._log.entered(keys)

    def use(self, pages: Iterable[int]) -> None:
        """Count a use of cached pages."""
        if self._dirty and self._policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            for page in pages:
                if page in self._dirty:
                    self._dirty[page] += 1
                    self._want(page)

    def release(self, pages: Sequence[int]) -> None:
        """Forget pages that the device's cache has evicted, after copying those that the policy wants to keep."""
        self._end_copies_of(pages)
        worth = [page for page in pages if self._dirty.get(page, 0) >= self._min_uses]
        num_copied = self._copy_now(worth)
        self._counters.num_dropped += sum(page in self._dirty for page in pages) - num_copied
        self._forget(pages)

    def keep(self, pages: Sequence[int]) -> None:
        """Copy cached pages that are going to lose a part of what they hold, as `release` does."""
        worth = [page for page in pages if self._dirty.get(page, 0) >= self._min_uses]
        for page in worth[: self._copy_now(worth)]:
            del self._dirty[page]
            self._wanted.pop(page, None)

    def finish(self) -> None:
        """Wait for the copies to the host that have begun."""
        for out in self._out:
            self._lanes.demote.wait(out.transfer)
        self._finish_copies()

    def drop(self, pages: Sequence[int]) -> None:
        """Forget pages that the device's cache has evicted, and copy none."""
        self._end_copies_of(pages)
        self._counters.num_dropped += sum(page in self._dirty for page in pages)
        self._forget(pages)

    def _end_copies_of(self, pages: Sequence[int]) -> None:
        """Wait for the copies that read these pages."""
        for page in pages:
            transfer = self._copying.get(page)
            if transfer is not None:
                self._lanes.demote.wait(transfer)
        self._finish_copies()

    def _forget(self, pages: Sequence[int]) -> None:
        if self._log is not None:
            self._log.left(self._keys[page] for page in pages)
        for page in pages:
            del self._keys[page]
            self._dirty.pop(page, None)
            self._wanted.pop(page, None)

    def hold(self, key: bytes, slot: int, *, is_stored: bool) -> None:
        """Hand a taken and filled slot with its page to the host; pin it if it must still go to the stores."""
        if self._host.put(key, slot) and self._stores and not is_stored:
            self._host.pin((slot,))
            self._unstored[key] = slot

    def poll(self) -> None:
        """Process finished copies, and start due copies if there is room."""
        self._finish_copies()
        self._finish_stores()  # first, because it makes room on the host
        self._begin_copies()
        self._begin_stores()

    def settle(self) -> None:
        """Process finished copies, and start none."""
        self._finish_copies()
        self._finish_stores()

    def flush(self) -> None:
        """Copy every page that the policy wants to keep, and wait until the stores have it or have failed."""
        self._wanted.update(dict.fromkeys(page for page, uses in self._dirty.items() if uses >= self._min_uses))
        self._drain()

    def abandon(self) -> None:
        """Copy nothing more out of the device; wait until the stores have the host's pages or have failed."""
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
        """Copy evicted pages while the caller waits; return how many were copied."""
        slots = self._host.take(len(pages)) if pages else []
        pages = pages[: len(slots)]
        if not slots:
            return 0
        try:
            self._device.read(pages, self._host.memory, slots)
        except Exception:  # the KV may be lost, but the device pages must become free
            _log.exception("failed to copy %d evicted pages to the host; their KV is lost", len(pages))
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
            if self._holder is not None:
                self._holder.hold(pages)
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
            if self._holder is not None:
                self._holder.let_go(out.pages)
            if out.transfer.error is None:
                for key, slot in zip(out.keys, out.slots, strict=True):
                    self.hold(key, slot, is_stored=False)
                self._counters.num_demoted += len(out.pages)
                continue
            _log.error("failed to copy %d pages to the host", len(out.pages), exc_info=out.transfer.error)
            self._host.give_back(out.slots)
            self._counters.num_failed += len(out.pages)
            self._dirty.update(dict.fromkeys(out.pages, self._min_uses))  # eviction tries again

    def _begin_stores(self) -> None:
        while self._unstored:
            keys = list(islice(self._unstored, BATCH_PAGES))
            num_bytes = len(keys) * self._device.page_bytes
            if not self._lanes.store.accepts(num_bytes):
                return
            slots = [self._unstored.pop(key) for key in keys]
            transfer = self._lanes.store.submit(self._put(keys, slots), num_bytes)
            assert transfer is not None
            self._storing.append(_WriteBehind(transfer=transfer, slots=slots, keys=keys))

    def _put(self, keys: list[bytes], slots: list[int]) -> Work:
        def work(_: Transfer) -> None:
            failure: Exception | None = None
            rows = [self._host.row(slot) for slot in slots]
            for store in self._stores:
                try:
                    store.put(keys, rows)
                except OSError as error:  # the other stores still get the pages
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
                self._counters.num_failed += len(write.slots)  # logged by the breaker
