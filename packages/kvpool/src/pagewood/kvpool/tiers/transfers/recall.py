"""Brings the KV of a waiting request back: from a store to the host, and from the host to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from pagewood.kvpool.tiers.pages.arrays import Bytes, Int32
from pagewood.kvpool.tiers.pages.device import DevicePages, PageHolder
from pagewood.kvpool.tiers.pages.host import HostTier
from pagewood.kvpool.tiers.pages.keys import Namespace
from pagewood.kvpool.tiers.prefix_cache import Match, PrefixCache
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.tier_log import TierLog
from pagewood.kvpool.tiers.transfers.counters import TierCounters
from pagewood.kvpool.tiers.transfers.demotion import Demotion
from pagewood.kvpool.tiers.transfers.lane import Lanes, Work
from pagewood.kvpool.tiers.transfers.policy import PrefetchPolicy
from pagewood.kvpool.tiers.transfers.transfer import Transfer

_log = logging.getLogger(__name__)

# Pages that are fetched at a time. Progress is counted in such groups.
_GROUP_PAGES = 16

# Returns n device pages, which then belong to the index, or None if there are none to spare now.
Take = Callable[[int], "Int32 | None"]


class _Stage(Enum):
    """The stage of a recall.

    Attributes:
        QUERYING: The remote store is being queried for the pages.
        PLANNED: The pages to fetch are known.
        FETCHING: Pages are being copied from a store to the host.
        HELD: All pages that can be fetched are on the host.
        LOADING: Pages are being copied from the host to the device.
        OVER: Nothing is left to do.
    """

    QUERYING = auto()
    PLANNED = auto()
    FETCHING = auto()
    HELD = auto()
    LOADING = auto()
    OVER = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Recall:
    """The KV of one token sequence on its way back to the device; made by `TieredIndex.recall`.

    An engine whose forward pass can wait for layers may use `pages` before the load has ended: it calls
    `load.wait_layer(i)` before layer i reads them.

    Attributes:
        tokens: `[n] int32`, the tokens, whole pages.
        namespace: Namespace of the tokens.
        keys: Keys of all pages of the tokens.
        deadline_s: When to stop waiting for a store, by the index's clock.
        priority: Of its copies, higher first.
        num_known: Number of leading pages that the tiers are known to have.
        stage: The present stage.
        transfer: The transfer that the recall waits for, if any.
        found: The answer of the remote store, empty until it has answered.
        slots: Host slots that are being filled (FETCHING), or pinned and read (LOADING).
        missing: Keys of the slots that are being filled.
        pages: `[n] int32`, device pages that are being loaded.
        first_page: Index in the sequence of the first of `pages`.
        lease: Lock on the prefix before `pages` on the device.
    """

    tokens: Int32
    namespace: Namespace
    keys: list[bytes]
    deadline_s: float
    priority: int  # written by: Recalls
    num_known: int  # written by: Recalls
    stage: _Stage = _Stage.PLANNED  # written by: Recalls
    transfer: Transfer | None = None  # written by: Recalls
    found: list[bool] = field(default_factory=list[bool])  # written by: Recalls
    slots: list[int] = field(default_factory=list[int])  # written by: Recalls
    missing: list[bytes] = field(default_factory=list[bytes])  # written by: Recalls
    pages: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # written by: Recalls
    first_page: int = 0  # written by: Recalls
    lease: Any = None  # written by: Recalls

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.stage is _Stage.OVER

    @property
    def load(self) -> Transfer | None:
        """The copy to the device, or None if it has not started or is over."""
        return self.transfer if self.stage is _Stage.LOADING else None


@dataclass(slots=True, eq=False, kw_only=True)
class Probe:
    """How much of a token sequence the device and the tiers have, before anything is copied.

    Made by `TieredIndex.probe`. An engine polls it, and nothing waits for it.
    """

    num_near: int
    """Leading pages on the device, on the host and on the disk."""
    deadline_s: float
    """Until when the remote store may answer, by the index's clock."""
    transfer: Transfer | None
    """The query of the remote store; None: there is nothing to ask it."""  # written by: Recalls
    found: list[bool] = field(default_factory=list[bool])
    """Its answer, for the pages after `num_near`."""  # written by: Recalls


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abandoned:
    """Memory that a cancelled transfer may still access.

    Attributes:
        transfer: The transfer.
        taken: Host slots that it fills.
        pinned: Host slots that it reads.
        pages: Device pages that it writes.
    """

    transfer: Transfer
    taken: list[int]
    pinned: list[int]
    pages: list[int]


class Recalls:
    """All recalls under way.

    Invariant: a device page that was taken is being loaded, or belongs to the cache, or is spare. No lock, pin or taken
    slot outlives the recall and the transfer that needed it.
    """

    __slots__ = (
        "_abandoned", "_active", "_cache", "_clock", "_counters", "_demotion", "_device", "_disk", "_holder", "_host",
        "_lanes",        "_log", "_page_size", "_policy", "_remote", "_spare",
    )  # fmt: skip

    def __init__(
        self,
        *,
        cache: PrefixCache,
        device: DevicePages,
        host: HostTier,
        disk: PageStore | None,
        remote: PageStore | None,
        lanes: Lanes,
        demotion: Demotion,
        policy: PrefetchPolicy,
        page_size: int,
        counters: TierCounters,
        clock: Callable[[], float],
        holder: PageHolder | None = None,
    ) -> None:
        """Bring pages back to the device from `host`, `disk` and `remote`; `TieredIndex` describes the arguments."""
        self._cache = cache
        self._device = device
        self._holder = holder
        self._host = host
        self._disk = disk
        self._remote = remote
        self._lanes = lanes
        self._demotion = demotion
        self._policy = policy
        self._page_size = page_size
        self._counters = counters
        self._clock = clock
        self._active: dict[Recall, None] = {}  # written by: begin, _end
        self._abandoned: list[_Abandoned] = []  # written by: _abandon, poll
        # Device pages that came back and are not in use.
        self._spare: list[int] = []  # written by: _give_back, take_spare
        self._log: TierLog | None = None  # written by: follow

    def follow(self, log: TierLog) -> None:
        """From now on, describe to a log the pages that recalls find in the tiers."""
        self._log = log

    @property
    def num_loading(self) -> int:
        """Number of device pages that a load is writing, or may still write."""
        loading = sum(len(recall.pages) for recall in self._active)
        return loading + sum(len(abandoned.pages) for abandoned in self._abandoned)

    @property
    def num_spare(self) -> int:
        """Number of device pages that came back and are not in use."""
        return len(self._spare)

    @property
    def num_slots(self) -> int:
        """Number of host slots that are being filled."""
        filling = sum(len(recall.slots) for recall in self._active if recall.stage is _Stage.FETCHING)
        return filling + sum(len(abandoned.taken) for abandoned in self._abandoned)

    def take_spare(self, n: int) -> list[int]:
        """Return up to `n` spare pages; they belong to the caller."""
        start = max(0, len(self._spare) - n)
        pages = self._spare[start:]
        del self._spare[start:]
        return pages

    def begin(self, tokens: Int32, namespace: Namespace, keys: list[bytes], *, priority: int = 0) -> Recall | None:
        """Start to bring back the pages after the device's prefix; return None if no tier has any."""
        match = self._cache.peek(tokens, namespace)
        num_cached = match.num_tokens // self._page_size
        num_known = num_cached + self.num_leading(keys[num_cached:])
        start = self._start(match, keys, num_known)
        num_possible = (num_known if self._remote is None else len(keys)) - start
        if not num_possible or num_possible * self._page_size < self._policy.min_tokens:
            return None
        self._host.touch(keys)
        patience_s = self._policy.patience_s((len(keys) - start) * self._page_size)
        recall = Recall(
            tokens=tokens[: len(keys) * self._page_size].copy(),
            namespace=namespace,
            keys=keys,
            deadline_s=self._clock() + patience_s,
            priority=priority,
            num_known=num_known,
        )
        self._active[recall] = None
        self._describe(recall, num_known)
        self._query(recall)
        if recall.stage is _Stage.PLANNED:
            self._fetch(recall)
        return recall

    def probe(self, tokens: Int32, namespace: Namespace, keys: list[bytes]) -> Probe:
        """Ask what the tiers have of a sequence. A store without room for the question counts as empty."""
        num_near = self.num_near(tokens, namespace, keys)
        remote, rest = self._remote, keys[num_near:]
        deadline_s = self._clock() + self._policy.patience_s(0)
        probe = Probe(num_near=num_near, deadline_s=deadline_s, transfer=None)
        if remote is not None and rest:
            probe.transfer = self._lanes.fetch.submit(lambda _: probe.found.extend(remote.exists(rest)), len(rest))
        return probe

    def num_found(self, probe: Probe) -> int | None:
        """Return the leading pages that a probe has found; None: the remote store may still answer."""
        transfer = probe.transfer
        if transfer is None:
            return probe.num_near
        if transfer.is_done:
            return probe.num_near + ((*probe.found, False).index(False) if transfer.error is None else 0)
        if self._clock() < probe.deadline_s:
            return None
        transfer.cancel()
        return probe.num_near

    def num_near(self, tokens: Int32, namespace: Namespace, keys: list[bytes]) -> int:
        """Return the number of leading pages of a sequence that are on the device, on the host or on the disk."""
        num_cached = self._cache.peek(tokens, namespace).num_tokens // self._page_size
        return num_cached + self.num_leading(keys[num_cached:])

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages of these that are on the host or on the disk, without a gap."""
        on_disk = [False] * len(keys)
        if self._disk is not None:
            with suppress(OSError):  # logged by the breaker
                on_disk = self._disk.exists(keys)
        for index, key in enumerate(keys):
            if key not in self._host and not on_disk[index]:
                return index
        return len(keys)

    def advance(self, recall: Recall, take: Take, *, priority: int | None = None) -> bool:
        """Do the next due work; return whether to wait for more. A new priority applies to the next copies."""
        if priority is not None:
            recall.priority = priority
        is_late = self._clock() >= recall.deadline_s
        transfer = recall.transfer
        if recall.stage is _Stage.QUERYING and transfer is not None and (transfer.is_done or is_late):
            if transfer.is_done and transfer.error is None:
                recall.num_known += (*recall.found, False).index(False)
            transfer.cancel()
            recall.transfer, recall.stage = None, _Stage.PLANNED
            match = self._cache.peek(recall.tokens, recall.namespace)
            start = self._start(match, recall.keys, recall.num_known)
            if (recall.num_known - start) * self._page_size < self._policy.min_tokens:
                self._end(recall)
        if recall.stage is _Stage.PLANNED:
            self._fetch(recall)
            if is_late and recall.stage is _Stage.PLANNED:
                recall.stage = _Stage.HELD
        transfer = recall.transfer
        if recall.stage is _Stage.FETCHING and transfer is not None and (transfer.is_done or is_late):
            self._settle(recall, transfer)
        if recall.stage is _Stage.HELD:
            return self._load(recall, take)
        if recall.stage is _Stage.LOADING and transfer is not None and transfer.is_done:
            self._finish_load(recall, transfer)
        return not recall.is_over

    def cancel(self, recall: Recall) -> None:
        """Cancel a recall; pages that have arrived on the host stay there."""
        transfer = recall.transfer
        if recall.stage is _Stage.FETCHING and transfer is not None:
            self._settle(recall, transfer)
        elif recall.stage is _Stage.LOADING and transfer is not None:
            transfer.cancel()
            self._cache.unlock(recall.lease)
            self._abandon(transfer, pinned=recall.slots, pages=recall.pages.tolist())
        elif transfer is not None:
            transfer.cancel()
        self._end(recall)

    def cancel_all(self) -> None:
        """Cancel all recalls, and wait until nothing is being copied."""
        for recall in list(self._active):
            self.cancel(recall)
        for abandoned in self._abandoned:
            (self._lanes.load if abandoned.pages else self._lanes.fetch).wait(abandoned.transfer)
        self.poll()

    def poll(self) -> None:
        """Take back the memory of cancelled transfers that have ended."""
        if not self._abandoned:
            return
        for abandoned in [abandoned for abandoned in self._abandoned if abandoned.transfer.is_done]:
            self._abandoned.remove(abandoned)
            self._host.give_back(abandoned.taken)
            self._host.unpin(abandoned.pinned)
            self._give_back(abandoned.pages)

    def _query(self, recall: Recall) -> None:
        """Query the remote store for the pages after `num_known`, if there is one and its lane has room."""
        remote, keys = self._remote, recall.keys[recall.num_known :]
        if remote is None or not keys:
            return

        def work(_: Transfer) -> None:
            recall.found.extend(remote.exists(keys))

        recall.transfer = self._lanes.fetch.submit(work, len(keys), priority=recall.priority)
        if recall.transfer is not None:
            recall.stage = _Stage.QUERYING

    def _fetch(self, recall: Recall) -> None:
        """Start to fetch the pages that the host does not have; the stage stays PLANNED if there is no room now."""
        start = self._start(self._cache.peek(recall.tokens, recall.namespace), recall.keys, recall.num_known)
        missing = [key for key in recall.keys[start : recall.num_known] if key not in self._host]
        if not missing:
            recall.stage = _Stage.HELD
            return
        num_bytes = len(missing) * self._host.page_bytes
        has_room = self._lanes.fetch.accepts(num_bytes, priority=recall.priority)
        slots = self._host.take(len(missing)) if has_room else []
        if not slots:
            return
        missing = missing[: len(slots)]
        work = self._get(missing, slots)
        recall.transfer = self._lanes.fetch.submit(work, num_bytes, priority=recall.priority)
        recall.missing, recall.slots, recall.stage = missing, slots, _Stage.FETCHING

    def _get(self, keys: list[bytes], slots: list[int]) -> Work:
        """Return the work of fetching pages in order, up to the first page that no store has."""

        def work(transfer: Transfer) -> None:
            for start in range(0, len(keys), _GROUP_PAGES):
                group = keys[start : start + _GROUP_PAGES]
                found = self._get_group(group, [self._host.row(slot) for slot in slots[start : start + _GROUP_PAGES]])
                num_found = (*found, False).index(False)
                transfer.advance(num_pages=start + num_found)
                if num_found < len(group):
                    return

        return work

    def _get_group(self, keys: list[bytes], rows: list[Bytes]) -> list[bool]:
        """Fetch pages from the disk and the rest from the remote store; keep a copy of the latter on the disk."""
        found = _try_get(self._disk, keys, rows)
        missing = [index for index, is_there in enumerate(found) if not is_there]
        if missing and self._remote is not None:
            missing_keys, missing_rows = [keys[i] for i in missing], [rows[i] for i in missing]
            answers = _try_get(self._remote, missing_keys, missing_rows)
            for index, is_there in zip(missing, answers, strict=True):
                found[index] = is_there
            near = [index for index, is_there in zip(missing, answers, strict=True) if is_there]
            if near and self._disk is not None:
                with suppress(OSError):  # logged by the breaker
                    self._disk.put([keys[i] for i in near], [rows[i] for i in near])
        return found

    def _settle(self, recall: Recall, transfer: Transfer) -> None:
        """End the fetch; pages that have arrived belong to the host."""
        transfer.cancel()
        n = transfer.num_pages
        for key, slot in zip(recall.missing[:n], recall.slots[:n], strict=True):
            self._demotion.hold(key, slot, is_stored=True)
        self._describe(recall, recall.num_known)
        self._counters.num_fetched += n
        rest = recall.slots[n:]
        if not transfer.is_done:
            self._abandon(transfer, taken=rest)
        else:
            self._host.give_back(rest)
        recall.transfer, recall.slots, recall.stage = None, [], _Stage.HELD

    def _load(self, recall: Recall, take: Take) -> bool:
        """Start to copy pages from the host to the device; return whether to wait."""
        match = self._cache.match(recall.tokens, recall.namespace)
        start = num_cached = match.num_tokens // self._page_size
        slots = self._leading_slots(recall.keys[num_cached:])
        if self._holder is not None:
            start = self._holder.first_lacking(match.pages.tolist(), num_cached + len(slots))
            again = self._leading_slots(recall.keys[start:num_cached])
            if len(again) < num_cached - start:
                start = num_cached
            elif start < num_cached:
                slots = again + slots
                match = self._cache.match(recall.tokens[: start * self._page_size], recall.namespace)
        if not slots:
            self._end(recall)
            return False
        num_bytes = len(slots) * self._host.page_bytes
        if not self._lanes.load.accepts(num_bytes, priority=recall.priority):
            return True
        lease = self._cache.lock(match.node)  # `take` may evict pages of the device and of the host
        self._host.pin(slots)
        pages = take(len(slots))
        if pages is None:
            self._cache.unlock(lease)
            self._host.unpin(slots)
            return False
        work = self._write(pages.tolist(), slots)
        recall.transfer = self._lanes.load.submit(work, num_bytes, priority=recall.priority)
        recall.pages, recall.slots, recall.lease, recall.first_page = pages, slots, lease, start
        recall.stage = _Stage.LOADING
        return True

    def _give_back(self, pages: list[int]) -> None:
        """Make pages spare."""
        if self._holder is not None:
            self._holder.give_back(pages)
        self._spare.extend(pages)

    def _leading_slots(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading pages of these that are on the host."""
        slots: list[int] = []
        for key in keys:
            slot = self._host.slot_of(key)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _start(self, match: Match, keys: Sequence[bytes], num_pages: int) -> int:
        """Return the first page to bring back for a prefix of some pages, of which `match` is cached.

        It is a cached one if that lacks something, and the host or the disk has it and those behind it.
        """
        num_cached = match.num_tokens // self._page_size
        if self._holder is None:
            return num_cached
        start = self._holder.first_lacking(match.pages.tolist(), num_pages)
        return start if self.num_leading(keys[start:num_cached]) == num_cached - start else num_cached

    def _write(self, pages: list[int], slots: list[int]) -> Work:
        def work(transfer: Transfer) -> None:
            self._device.write(pages, self._host.memory, slots, lambda n: transfer.advance(num_layers=n))

        return work

    def _finish_load(self, recall: Recall, transfer: Transfer) -> None:
        """Let the cache adopt the loaded pages; pages of positions that it has in the meantime become spare."""
        pages, start = recall.pages, recall.first_page
        end = start + len(pages)
        if transfer.error is None:
            tokens = recall.tokens[start * self._page_size : end * self._page_size]
            n = self._cache.insert(tokens, pages, recall.namespace, after=recall.lease).num_existing
            self._describe(recall, end)
            if self._holder is not None:
                self._holder.adopt(pages[n:].tolist(), self._host.memory, recall.slots[n:])
                whole = self._cache.peek(recall.tokens[: (start + n) * self._page_size], recall.namespace)
                cached, memory = whole.pages[start:].tolist(), self._host.memory
                self._counters.num_loaded += self._holder.fill(cached, pages[:n].tolist(), memory, recall.slots[:n])
            self._demotion.adopt(pages[n:].tolist(), recall.keys[start + n : end])
            self._counters.num_loaded += len(pages) - n
        else:
            _log.error("failed to load %d pages, they will be computed instead: %s", len(pages), transfer.error)
            self._counters.num_failed += len(pages)
            n = len(pages)
        self._give_back(pages[:n].tolist())
        self._host.unpin(recall.slots)
        self._cache.unlock(recall.lease)
        self._end(recall)

    def _abandon(
        self, transfer: Transfer, *, taken: Sequence[int] = (), pinned: Sequence[int] = (), pages: Sequence[int] = ()
    ) -> None:
        self._abandoned.append(_Abandoned(transfer=transfer, taken=list(taken), pinned=list(pinned), pages=list(pages)))

    def _describe(self, recall: Recall, num_pages: int) -> None:
        """Describe the leading pages of a recall to the log, if there is one."""
        if self._log is not None:
            self._log.describe(None, recall.keys[:num_pages], recall.tokens, recall.namespace)

    def _end(self, recall: Recall) -> None:
        self._active.pop(recall, None)
        recall.stage, recall.transfer, recall.slots, recall.pages = _Stage.OVER, None, [], recall.pages[:0]


def _try_get(store: PageStore | None, keys: list[bytes], rows: list[Bytes]) -> list[bool]:
    if store is None:
        return [False] * len(keys)
    try:
        return store.get(keys, rows)
    except OSError:  # logged by the breaker
        return [False] * len(keys)
