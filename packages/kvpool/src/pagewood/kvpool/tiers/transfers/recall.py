"""Brings the KV of a waiting request back: from a store to the host, and from the host to the device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import numpy as np

from pagewood.kvpool.tiers.pages.arrays import Bytes, Int32
from pagewood.kvpool.tiers.pages.device import DevicePages, PageHolder
from pagewood.kvpool.tiers.pages.host import HostTier
from pagewood.kvpool.tiers.pages.keys import Namespace
from pagewood.kvpool.tiers.pages.states import StatePages
from pagewood.kvpool.tiers.prefix_cache import Match, PrefixCache, SnapshotCache
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.tier_log import TierLog
from pagewood.kvpool.tiers.transfers.counters import TierCounters
from pagewood.kvpool.tiers.transfers.demotion import Demotion
from pagewood.kvpool.tiers.transfers.lane import Lanes, Work
from pagewood.kvpool.tiers.transfers.policy import PrefetchPolicy
from pagewood.kvpool.tiers.transfers.reach import Reach
from pagewood.kvpool.tiers.transfers.transfer import Transfer

_log = logging.getLogger(__name__)

# Pages that are fetched at a time. Progress is counted in such groups.
_GROUP_PAGES = 16

# Returns n device pages, which then belong to the index, or None if there are none to spare now.
Take = Callable[[int], "Int32 | None"]

# Returns the place of a state on the device, which then belongs to the index, or None if there is none to spare now.
TakeState = Callable[[], "int | None"]


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
        reach: What the tiers are known to have of them.
        deadline_s: When to stop waiting for a store, by the index's clock.
        priority: Of its copies, higher first.
        stage: The present stage.
        transfer: The transfer that the recall waits for, if any.
        found: The answer of the remote store, empty until it has answered.
        slots: Host slots that are being filled (FETCHING), or pinned and read (LOADING).
        missing: Keys of the slots that are being filled.
        pages: `[n] int32`, device pages that are being loaded.
        first_page: Index in the sequence of the first of `pages`.
        state_end: Pages of the prefix whose state is being loaded.
        place: The place on the device that it is loaded to; None: no state is loaded.
        lease: Lock on the prefix before `pages` on the device.
    """

    tokens: Int32
    namespace: Namespace
    reach: Reach
    deadline_s: float
    priority: int  # written by: Recalls
    stage: _Stage = _Stage.PLANNED  # written by: Recalls
    transfer: Transfer | None = None  # written by: Recalls
    found: list[bool] = field(default_factory=list[bool])  # written by: Recalls
    slots: list[int] = field(default_factory=list[int])  # written by: Recalls
    missing: list[bytes] = field(default_factory=list[bytes])  # written by: Recalls
    pages: Int32 = field(default_factory=lambda: np.empty(0, np.int32))  # written by: Recalls
    first_page: int = 0  # written by: Recalls
    state_end: int = 0  # written by: Recalls
    place: int | None = None  # written by: Recalls
    lease: Any = None  # written by: Recalls

    @property
    def keys(self) -> list[bytes]:
        """Keys of all pages of the tokens."""
        return self.reach.keys

    @property
    def num_known(self) -> int:
        """Tokens whose pages are known to be on the device or in a tier; a state that belongs to them may not be."""
        return self.reach.num_pages * len(self.tokens) // max(1, len(self.keys))

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
    """Leading pages on the device, host and disk that a request can use; later those of the remote store too."""
    # written by: Recalls
    reach: Reach
    """What is known of the others."""
    deadline_s: float
    """Until when the remote store may answer, by the index's clock."""
    transfer: Transfer | None
    """The query of the remote store; None: there is nothing to ask it."""  # written by: Recalls
    found: list[bool] = field(default_factory=list[bool])
    """Its answer to the question of `reach`."""  # written by: Recalls


@dataclass(frozen=True, slots=True, kw_only=True)
class _Abandoned:
    """Memory that a cancelled transfer may still access.

    Attributes:
        transfer: The transfer.
        taken: Host slots that it fills.
        pinned: Host slots that it reads.
        pages: Device pages that it writes.
        places: Places of states that it writes.
    """

    transfer: Transfer
    taken: list[int]
    pinned: list[int]
    pages: list[int]
    places: list[int]


class Recalls:
    """All recalls under way.

    Invariant: a device page that was taken is being loaded, or belongs to the cache, or is spare; so is the place of a
    state. No lock, pin or taken slot outlives the recall and the transfer that needed it.
    """

    __slots__ = (
        "_abandoned", "_active", "_cache", "_clock", "_counters", "_demotion", "_device", "_disk", "_holder", "_host",
        "_lanes", "_log", "_page_size", "_policy", "_remote", "_snapshots", "_spare", "_spare_places", "_states",
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
        states: StatePages | None = None,
    ) -> None:
        """Bring pages back to the device from `host`, `disk` and `remote`; `TieredIndex` describes the arguments.

        `states` is `device` if layers are recurrent; `cache` then owns the places of states, too.
        """
        self._cache = cache
        self._states = states
        self._snapshots = None if states is None else snapshots_of(cache)
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
        # The same for places of states.
        self._spare_places: list[int] = []  # written by: give_places, take_places
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
    def num_places(self) -> int:
        """Number of places of states that a load is writing, or that came back and are not in use."""
        loading = sum(recall.place is not None for recall in self._active)
        return loading + sum(len(abandoned.places) for abandoned in self._abandoned) + len(self._spare_places)

    def give_places(self, places: Iterable[int]) -> None:
        """Make places of states spare."""
        self._spare_places.extend(places)

    def take_places(self) -> list[int]:
        """Return all spare places of states; they belong to the caller."""
        places, self._spare_places = self._spare_places, []
        return places

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
        reach = self._reach(match, keys)
        start = self._start(match, tokens, namespace, reach)
        num_possible = (reach.goal if self._remote is None else len(keys)) - start
        if num_possible <= 0 or num_possible * self._page_size < self._policy.min_tokens:
            return None
        if self._states is not None and reach.goal:
            self._host.touch(self._states.keys_of(keys[reach.goal - 1]))
        self._host.touch(keys)
        patience_s = self._policy.patience_s((len(keys) - start) * self._page_size)
        recall = Recall(
            tokens=tokens[: len(keys) * self._page_size].copy(),
            namespace=namespace,
            reach=reach,
            deadline_s=self._clock() + patience_s,
            priority=priority,
        )
        self._active[recall] = None
        self._describe(recall, reach.num_pages)
        self._query(recall)
        if recall.stage is _Stage.PLANNED:
            self._fetch(recall)
        return recall

    def probe(self, tokens: Int32, namespace: Namespace, keys: list[bytes]) -> Probe:
        """Ask what the tiers have of a sequence. A store without room for the question counts as empty."""
        match = self._cache.peek(tokens, namespace)
        reach = self._reach(match, keys)
        num_near = max(reach.goal, self._start(match, tokens, namespace, reach))
        deadline_s = self._clock() + self._policy.patience_s(0)
        probe = Probe(num_near=num_near, reach=reach, deadline_s=deadline_s, transfer=None)
        remote = self._remote
        if remote is not None and (rest := reach.question()):
            probe.transfer = self._lanes.fetch.submit(lambda _: probe.found.extend(remote.exists(rest)), len(rest))
        return probe

    def num_found(self, probe: Probe) -> int | None:
        """Return the leading pages that a probe has found; None: the remote store may still answer."""
        transfer = probe.transfer
        if transfer is None:
            return probe.num_near
        if transfer.is_done:
            if transfer.error is None:
                probe.reach.learn(probe.found)
                probe.num_near = max(probe.num_near, probe.reach.goal)
            probe.transfer = None
            return probe.num_near
        if self._clock() < probe.deadline_s:
            return None
        transfer.cancel()
        return probe.num_near

    def num_near(self, tokens: Int32, namespace: Namespace, keys: list[bytes]) -> int:
        """Return the number of leading pages of a sequence that are on the device, on the host or on the disk.

        With states, those that a request can use.
        """
        match = self._cache.peek(tokens, namespace)
        reach = self._reach(match, keys)
        return max(reach.goal, self._start(match, tokens, namespace, reach))

    def _reach(self, match: Match, keys: list[bytes]) -> Reach:
        """Return what the device, the host and the disk have of a sequence, of whose pages `match` is cached."""
        num_cached = match.num_tokens // self._page_size
        num_pages = num_cached + self.num_leading(keys[num_cached:])
        if self._states is None:
            return Reach(keys=keys, num_pages=num_pages)
        marks = [self._states.mark_of(key) for key in keys]
        near = zip(marks, self._on_disk(marks), strict=True)
        ends = [end for end, (mark, is_there) in enumerate(near, 1) if is_there or mark in self._host]
        return Reach(keys=keys, num_pages=num_pages, marks=marks, ends=ends)

    def num_leading(self, keys: Sequence[bytes]) -> int:
        """Return the number of leading pages of these that are on the host or on the disk, without a gap."""
        on_disk = self._on_disk(keys)
        for index, key in enumerate(keys):
            if key not in self._host and not on_disk[index]:
                return index
        return len(keys)

    def _on_disk(self, keys: Sequence[bytes]) -> list[bool]:
        if self._disk is not None:
            with suppress(OSError):  # logged by the breaker
                return self._disk.exists(keys)
        return [False] * len(keys)

    def advance(
        self, recall: Recall, take: Take, *, take_state: TakeState | None = None, priority: int | None = None
    ) -> bool:
        """Do the next due work; return whether to wait for more. A new priority applies to the next copies."""
        if priority is not None:
            recall.priority = priority
        is_late = self._clock() >= recall.deadline_s
        transfer = recall.transfer
        if recall.stage is _Stage.QUERYING and transfer is not None and (transfer.is_done or is_late):
            if transfer.is_done and transfer.error is None:
                recall.reach.learn(recall.found)
            transfer.cancel()
            recall.transfer, recall.stage = None, _Stage.PLANNED
            match = self._cache.peek(recall.tokens, recall.namespace)
            start = self._start(match, recall.tokens, recall.namespace, recall.reach)
            if (recall.reach.goal - start) * self._page_size < self._policy.min_tokens:
                self._end(recall)
        if recall.stage is _Stage.PLANNED:
            self._fetch(recall)
            if is_late and recall.stage is _Stage.PLANNED:
                recall.stage = _Stage.HELD
        transfer = recall.transfer
        if recall.stage is _Stage.FETCHING and transfer is not None and (transfer.is_done or is_late):
            self._settle(recall, transfer)
            if self._states is not None and not is_late and self._has_lost(recall):
                recall.stage = _Stage.PLANNED
        if recall.stage is _Stage.HELD:
            return self._load(recall, take, take_state)
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
            places = [] if recall.place is None else [recall.place]
            self._abandon(transfer, pinned=recall.slots, pages=recall.pages.tolist(), places=places)
        elif transfer is not None:
            transfer.cancel()
        self._end(recall)

    def cancel_all(self) -> None:
        """Cancel all recalls, and wait until nothing is being copied."""
        for recall in list(self._active):
            self.cancel(recall)
        for abandoned in self._abandoned:
            is_load = abandoned.pages or abandoned.places
            (self._lanes.load if is_load else self._lanes.fetch).wait(abandoned.transfer)
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
            self.give_places(abandoned.places)

    def _query(self, recall: Recall) -> None:
        """Query the remote store for what is not known, if there is one and its lane has room."""
        remote = self._remote
        if remote is None or not (keys := recall.reach.question()):
            return

        def work(_: Transfer) -> None:
            recall.found.extend(remote.exists(keys))

        recall.transfer = self._lanes.fetch.submit(work, len(keys), priority=recall.priority)
        if recall.transfer is not None:
            recall.stage = _Stage.QUERYING

    def _fetch(self, recall: Recall) -> None:
        """Start to fetch the pages that the host does not have; the stage stays PLANNED if there is no room now."""
        match = self._cache.peek(recall.tokens, recall.namespace)
        start = self._start(match, recall.tokens, recall.namespace, recall.reach)
        goal, first = recall.reach.goal, start
        if self._states is not None:
            first = match.num_tokens // self._page_size  # pages may be there without their state
        missing = [key for key in recall.keys[first:goal] if key not in self._host]
        if self._states is not None and goal > start:
            missing += [key for key in self._states.keys_of(recall.keys[goal - 1]) if key not in self._host]
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
        self._describe(recall, recall.reach.num_pages)
        self._counters.num_fetched += n
        rest = recall.slots[n:]
        if not transfer.is_done:
            self._abandon(transfer, taken=rest)
        else:
            self._host.give_back(rest)
        recall.transfer, recall.slots, recall.stage = None, [], _Stage.HELD

    def _has_lost(self, recall: Recall) -> bool:
        """Return whether a fetch brought less than what was known; then a shorter prefix may be complete."""
        lost = next((key for key in recall.missing if key not in self._host), None)
        if lost is not None:
            recall.reach.lower(lost)
        return lost is not None

    def _load(self, recall: Recall, take: Take, take_state: TakeState | None) -> bool:
        """Start to copy pages, and the state at their end, from the host to the device; return whether to wait."""
        match = self._cache.match(recall.tokens, recall.namespace)
        start = num_cached = match.num_tokens // self._page_size
        slots = self._leading_slots(recall.keys[num_cached:])
        end, of_state = 0, list[int]()
        if self._states is not None:
            end, of_state = self._state_on_host(recall, num_cached + len(slots))
            slots = slots[: max(0, end - num_cached)]
        if self._holder is not None:
            start = self._holder.first_lacking(match.pages.tolist(), num_cached + len(slots))
            again = self._leading_slots(recall.keys[start:num_cached])
            if len(again) < num_cached - start:
                start = num_cached
            elif start < num_cached:
                slots = again + slots
                match = self._cache.match(recall.tokens[: start * self._page_size], recall.namespace)
        num_pages = len(slots)
        slots += of_state
        if not slots:
            self._end(recall)
            return False
        num_bytes = len(slots) * self._host.page_bytes
        if not self._lanes.load.accepts(num_bytes, priority=recall.priority):
            return True
        lease = self._cache.lock(match.node)  # `take` may evict pages of the device and of the host
        self._host.pin(slots)
        place = take_state() if of_state and take_state is not None else None
        pages = None
        if place is not None or not of_state:
            pages = take(num_pages) if num_pages else np.empty(0, np.int32)
        if pages is None:
            self.give_places(() if place is None else (place,))
            self._cache.unlock(lease)
            self._host.unpin(slots)
            return False
        ids = pages.tolist()
        if self._states is not None and place is not None:
            ids += self._states.parts_of(place)
            recall.place, recall.state_end = place, end
        work = self._write(ids, slots)
        recall.transfer = self._lanes.load.submit(work, num_bytes, priority=recall.priority)
        recall.pages, recall.slots, recall.lease, recall.first_page = pages, slots, lease, start
        recall.stage = _Stage.LOADING
        return True

    def _give_back(self, pages: list[int]) -> None:
        """Make pages spare."""
        if self._holder is not None:
            self._holder.give_back(pages)
        self._spare.extend(pages)

    def _state_on_host(self, recall: Recall, num_pages: int) -> tuple[int, list[int]]:
        """Return the pages of the longest prefix of `num_pages` pages whose state is whole on the host, and its slots.

        Only if the device has no state there, or further on; otherwise (0, []).
        """
        assert self._states is not None
        assert self._snapshots is not None
        match = self._snapshots.peek(recall.tokens, recall.namespace, needs_snapshot=True)
        marks = recall.reach.marks or ()
        for end in range(num_pages, match.num_tokens // self._page_size, -1):
            if marks[end - 1] in self._host:
                slots = self._leading_slots(self._states.keys_of(recall.keys[end - 1]))
                if len(slots) == self._states.num_parts:
                    return end, slots
        return 0, []

    def _leading_slots(self, keys: Sequence[bytes]) -> list[int]:
        """Return the slots of the leading pages of these that are on the host."""
        slots: list[int] = []
        for key in keys:
            slot = self._host.slot_of(key)
            if slot is None:
                break
            slots.append(slot)
        return slots

    def _start(self, match: Match, tokens: Int32, namespace: Namespace, reach: Reach) -> int:
        """Return the first page to bring back of a sequence, of which `match` is cached.

        It is a cached one if that lacks something, and the host or the disk has it and those behind it; or if a request
        could not use it, because no state follows on the device.
        """
        if self._snapshots is not None:
            return self._snapshots.peek(tokens, namespace, needs_snapshot=True).num_tokens // self._page_size
        num_cached = match.num_tokens // self._page_size
        if self._holder is None:
            return num_cached
        start = self._holder.first_lacking(match.pages.tolist(), reach.num_pages)
        return start if self.num_leading(reach.keys[start:num_cached]) == num_cached - start else num_cached

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
            self._attach(recall)
            self._describe(recall, end)
            if self._holder is not None:
                self._holder.adopt(pages[n:].tolist(), self._host.memory, recall.slots[n:])
                whole = self._cache.peek(recall.tokens[: (start + n) * self._page_size], recall.namespace)
                cached, memory = whole.pages[start:].tolist(), self._host.memory
                self._counters.num_loaded += self._holder.fill(cached, pages[:n].tolist(), memory, recall.slots[:n])
            self._demotion.adopt(pages[n:].tolist(), recall.keys[start + n : end])
            self._counters.num_loaded += len(pages) - n
        else:
            num_failed = len(recall.slots)
            _log.error("failed to load %d pages, they will be computed instead: %s", num_failed, transfer.error)
            self._counters.num_failed += num_failed
            n = len(pages)
        if recall.place is not None:
            self.give_places((recall.place,))
        self._give_back(pages[:n].tolist())
        self._host.unpin(recall.slots)
        self._cache.unlock(recall.lease)
        self._end(recall)

    def _attach(self, recall: Recall) -> None:
        """Let the cache adopt the place of a loaded state, unless the prefix has one in the meantime."""
        if self._states is None or self._snapshots is None or recall.place is None:
            return
        prefix = self._snapshots.peek(recall.tokens[: recall.state_end * self._page_size], recall.namespace)
        if self._snapshots.attach(prefix.node, recall.place):
            keys = self._states.keys_of(recall.keys[recall.state_end - 1])
            self._demotion.adopt(self._states.parts_of(recall.place), keys)
            self._counters.num_loaded += len(keys)
            recall.place = None

    def _abandon(
        self,
        transfer: Transfer,
        *,
        taken: Sequence[int] = (),
        pinned: Sequence[int] = (),
        pages: Sequence[int] = (),
        places: Sequence[int] = (),
    ) -> None:
        self._abandoned.append(
            _Abandoned(
                transfer=transfer, taken=list(taken), pinned=list(pinned), pages=list(pages), places=list(places)
            )
        )

    def _describe(self, recall: Recall, num_pages: int) -> None:
        """Describe the leading pages of a recall to the log, if there is one."""
        if self._log is not None:
            self._log.describe(None, recall.keys[:num_pages], recall.tokens, recall.namespace)

    def _end(self, recall: Recall) -> None:
        self._active.pop(recall, None)
        recall.stage, recall.transfer, recall.slots, recall.pages = _Stage.OVER, None, [], recall.pages[:0]
        recall.place = None


def _try_get(store: PageStore | None, keys: list[bytes], rows: list[Bytes]) -> list[bool]:
    if store is None:
        return [False] * len(keys)
    try:
        return store.get(keys, rows)
    except OSError:  # logged by the breaker
        return [False] * len(keys)


def snapshots_of(cache: PrefixCache) -> SnapshotCache:
    """Return a cache that owns places of states.

    Raises:
        ValueError: It does not know states.
    """
    if not isinstance(cache, SnapshotCache):
        raise ValueError(f"cache must own places of states for recurrent layers, got {type(cache).__name__}")
    return cache
