"""One prefix cache over device, host, disk and remote memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import numpy as np

from pagewood.kvpool.arrays import check_at_least_one, require_whole
from pagewood.kvpool.tiers.pages.arrays import Int32
from pagewood.kvpool.tiers.pages.device import DevicePages, PageHolder
from pagewood.kvpool.tiers.pages.host import HostTier
from pagewood.kvpool.tiers.pages.keys import KeyChain, Namespace
from pagewood.kvpool.tiers.pages.states import StatePages
from pagewood.kvpool.tiers.prefix_cache import Match, Prefix, PrefixCache, TieredInsertion, TieredMatch
from pagewood.kvpool.tiers.stores.breaker import Breaker
from pagewood.kvpool.tiers.stores.store import PageStore
from pagewood.kvpool.tiers.tier_log import TierLog
from pagewood.kvpool.tiers.transfers.counters import TierCounters
from pagewood.kvpool.tiers.transfers.demotion import Demotion
from pagewood.kvpool.tiers.transfers.lane import Lanes, thread_lanes
from pagewood.kvpool.tiers.transfers.policy import PrefetchPolicy, WritePolicy
from pagewood.kvpool.tiers.transfers.recall import Probe, Recall, Recalls, Take, TakeState, snapshots_of


class _All(Enum):
    ALL = "all"


ALL = _All.ALL
"""Stands for all namespaces, or for no particular one, because None is a namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """The number of tokens of the longest known prefix in each tier; a page counts for the nearest tier that has it.

    After the device's part, the tiers may alternate from page to page. The numbers are totals.

    Attributes:
        num_device: Tokens on the device.
        num_host: Tokens in host memory.
        num_disk: Tokens on the disk.
        num_remote: Tokens in the remote store.
        num_usable: Tokens of the longest prefix that a request can use. With states of recurrent layers, this is the
            longest one at whose end the device or a tier has a state.
    """

    num_device: int
    num_host: int
    num_disk: int
    num_remote: int
    num_usable: int

    @property
    def num_tokens(self) -> int:
        """Length of the whole prefix, in tokens."""
        return self.num_device + self.num_host + self.num_disk + self.num_remote


class TieredIndex:
    """A prefix cache whose evicted pages move to other memories and come back when a request needs them.

    Invariant: no copy reads or writes a page that `evict` has returned. A page that `recall` takes belongs to the index
    until `evict` returns it. So every device page has one owner at any time, even if copies fail or are cancelled.

    Use it like the cache that it wraps. Its methods mean the same, and see only the pages on the device. Methods that
    the wrapped cache lacks raise ValueError. `recall` and `advance` are new; they serve a request that waits for
    admission:

        recall = index.recall(tokens, namespace)              # when it arrives; None if there is nothing to bring back
        while recall and index.advance(recall, take): ...     # before it is admitted; True: call again later
        match = index.match(tokens, namespace)                # then as usual; what was brought back is on the device

    Published pages must not change, and pages must not be freed while a launched step uses them. Not thread-safe: one
    thread uses the index, and the workers of its lanes access only memory that it has given to them.

    Source: the hierarchical cache of SGLang (HiCache). Here the lower tiers find pages by content instead of by a tree.

    Attributes:
        counters: Numbers of pages copied so far.
    """

    __slots__ = (
        "_cache", "_chain", "_demotion", "_disk", "_host", "_lanes", "_log", "_make_recalls", "_open", "_page_size",
        "_recalls", "_states", "_stores", "counters",
    )  # fmt: skip

    def __init__(
        self,
        cache: PrefixCache,
        *,
        device: DevicePages,
        host: HostTier,
        disk: PageStore | None = None,
        remote: PageStore | None = None,
        page_size: int,
        fingerprint: bytes = b"",
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        min_uses: int = 2,
        prefetch: PrefetchPolicy | None = None,
        lanes: Lanes | None = None,
        clock: Callable[[], float] = time.monotonic,
        holder: PageHolder | None = None,
        states: StatePages | None = None,
    ) -> None:
        """Create an index over an empty cache.

        Args:
            cache: Prefix cache of the device's pages, empty, such as `pagewood.radixcache.RadixCache`.
            device: Memory of these pages; `StatePages` if the model has recurrent layers. The cache then owns places of
                states too, which move between the tiers as their pages do.
            host: Main memory.
            disk: A store whose `exists` the index waits for, such as `DiskTier`, which answers at once.
            remote: A store whose `exists` may take time, such as `SharedFolder`.
            page_size: Tokens per page.
            fingerprint: The other dependencies of the KV (weights, dtype, layout); see `KeyChain`.
            write_policy: When pages are copied to the host. From there they go to the stores at once.
            min_uses: Uses that WRITE_THROUGH_SELECTIVE requires.
            prefetch: How long a request waits for a store; by default `PrefetchPolicy()`.
            lanes: Where copies run; by default a thread for each kind of copy.
            clock: Monotonic clock, in seconds.
            holder: Is notified of copies, if cached pages may lose a part of what they hold; None: they do not.
            states: The `StatePages` behind `device`, if that copies more than they do; None: `device`, if it is one.

        Raises:
            ValueError: The page sizes of `device` and `host` differ, or `page_size` or `min_uses` is less than 1, or
                there are states, and `cache` does not own them or pages may lose a part of what they hold.
        """
        if device.page_bytes != host.page_bytes:
            raise ValueError(
                f"host must have the device's page size, {device.page_bytes} bytes, got {host.page_bytes} bytes"
            )
        check_at_least_one(min_uses=min_uses)
        self._states = device if isinstance(device, StatePages) else states
        if self._states is not None and holder is not None:
            raise ValueError("holder must be None with states of recurrent layers, got a PageHolder")
        self._chain = KeyChain(page_size, fingerprint=fingerprint)
        self._page_size = page_size
        self._host = host
        self._disk = disk
        self._log: TierLog | None = None  # written by: follow_tiers
        disk = None if disk is None else Breaker(disk, name="the disk tier", clock=clock)
        remote = None if remote is None else Breaker(remote, name="the remote tier", clock=clock)
        self._stores = (disk, remote)
        self._lanes = thread_lanes() if lanes is None else lanes
        self.counters = TierCounters()
        self._demotion = Demotion(
            device=device,
            host=host,
            stores=[store for store in self._stores if store is not None],
            lanes=self._lanes,
            policy=write_policy,
            min_uses=min_uses,
            counters=self.counters,
            holder=holder,
        )
        self._make_recalls = partial(
            Recalls,
            device=device,
            host=host,
            disk=disk,
            remote=remote,
            lanes=self._lanes,
            demotion=self._demotion,
            policy=prefetch or PrefetchPolicy(),
            page_size=page_size,
            counters=self.counters,
            clock=clock,
            holder=holder,
            states=self._states,
        )
        # The indices that share what is below the device, and have not been closed.
        self._open: list[TieredIndex] = []  # written by: _begin, close
        self._begin(cache)

    def _begin(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._recalls = self._make_recalls(cache=cache)
        self._open.append(self)

    def beside(self, cache: PrefixCache) -> TieredIndex:
        """Return an index over another empty cache, which shares the device, the host, the stores and the counters.

        The caches own different pages of the device: those of the ranks of a model, for instance. Each index brings
        back what any of them has copied down. One thread uses all of them.

        Raises:
            ValueError: `follow_tiers` was called, because a log does not know of several caches.
        """
        if self._log is not None:
            raise ValueError("an index whose tiers are followed by a log must have no other beside it")
        index = copy(self)
        index._begin(cache)
        return index

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self._page_size

    @property
    def num_pages(self) -> int:
        """Number of device pages that the index owns: cached, being loaded, or spare."""
        return self._cache.num_pages + self._recalls.num_loading + self._recalls.num_spare

    @property
    def num_evictable(self) -> int:
        """Number of device pages that `evict` can return now."""
        return self._cache.num_evictable + self._recalls.num_spare

    @property
    def num_locked(self) -> int:
        """Number of device pages on a locked path."""
        return self._cache.num_locked

    @property
    def num_loading(self) -> int:
        """Number of device pages that a copy may be writing."""
        return self._recalls.num_loading

    def match(self, tokens: Int32, namespace: Namespace = None, *, needs_snapshot: bool = False) -> TieredMatch:
        """Find the longest prefix on the device, if need be with a state at its end; this counts as a use."""
        if not needs_snapshot:
            match = self._cache.match(tokens, namespace)
        else:
            match: Match = self._call("match", tokens, namespace, needs_snapshot=True)
            self._demotion.use(self._parts_of(self._call("snapshot", match.node)) if match.num_tokens else ())
        self._demotion.use(match.pages.tolist())
        return self._tiered(match, namespace)

    def peek(self, tokens: Int32, namespace: Namespace = None, *, needs_snapshot: bool = False) -> TieredMatch:
        """Find the same; this does not count as a use."""
        if needs_snapshot:
            return self._tiered(self._call("peek", tokens, namespace, needs_snapshot=True), namespace)
        return self._tiered(self._cache.peek(tokens, namespace), namespace)

    @property
    def num_snapshots(self) -> int:
        """Number of places of states that the index owns: of cached prefixes, being loaded, or spare."""
        return snapshots_of(self._cache).num_snapshots + self._recalls.num_places

    def attach(self, node: Prefix, snapshot: int) -> bool:
        """Adopt the place of the state at the end of a prefix; return False if the prefix has a state already.

        Raises:
            ValueError: The prefix was evicted, or the device's cache does not own states.
        """
        if not self._call("attach", node.handle, snapshot):
            return False
        if self._states is not None:
            self._demotion.adopt(self._states.parts_of(snapshot), self._states.keys_of(node.key))
            self.poll()
        return True

    def snapshot(self, node: Prefix) -> int | None:
        """Return the place of the state at the end of a prefix, which still belongs to the index, or None.

        Raises:
            ValueError: The prefix was evicted, or the device's cache does not own states.
        """
        return self._call("snapshot", node.handle)

    def evict_snapshots(self, num_snapshots: int) -> Int32:
        """Disown places of states that are not needed any more, and others until they are at least `num_snapshots`.

        As `evict`, it copies what the policy wants to keep, and the caller may write to the places at once.

        Raises:
            ValueError: `num_snapshots` is negative or not an integer, or the device's cache does not own states.
        """
        self.poll()
        spare = self._recalls.take_places()
        evicted: Int32 = self._call("evict_snapshots", max(0, num_snapshots - len(spare)))
        self._demotion.release([part for place in evicted.tolist() for part in self._parts_of(place)])
        return np.concatenate([np.array(spare, np.int32), evicted])

    def watch_group(self) -> Any:
        """Return a group of live matches of the device's cache; they cover only pages on the device.

        Raises:
            ValueError: The device's cache does not support live matches.
        """
        return self._call("watch_group")

    def watch(self, tokens: Int32, namespace: Namespace = None) -> Any:
        """Return a live match of the device's cache; it covers only pages on the device.

        Raises:
            ValueError: The device's cache does not support live matches.
        """
        return self._call("watch", tokens, namespace)

    def root(self, namespace: Namespace = None) -> Prefix:
        """Return the handle of the empty prefix.

        Raises:
            ValueError: The device's cache has no `root`.
        """
        return Prefix(handle=self._call("root", namespace), key=self._chain.root(namespace), namespace=namespace)

    def limit(self, namespace: Namespace, *, quota: int | None = None, floor: int = 0) -> None:
        """Set the limits of a namespace on the device, in pages; the other tiers have none.

        Raises:
            ValueError: The limits are out of range, or the device's cache has no limits.
        """
        self._call("limit", namespace, quota=quota, floor=floor)

    def retain(self, node: Prefix, *, priority: int, until: float = math.inf, start: int = 0) -> None:
        """Give the pages of a prefix a priority on the device, as `RadixCache.retain` does.

        Raises:
            ValueError: The prefix was evicted, or the device's cache keeps no priorities.
        """
        self._call("retain", node.handle, priority=priority, until=until, start=start)

    def release(self, node: Prefix, *, keeps_longer: bool = False) -> Int32:
        """Remove a branch that is not needed any more from the device, without copying it, and return its pages.

        With `keeps_longer`, only if no longer prefix follows it.

        Copies that the host and the stores have of it stay until they are the least recently used.

        Raises:
            ValueError: The prefix was evicted, or the device's cache has no `release`.
        """
        self.poll()
        pages: Int32 = self._call("release", node.handle, **({"keeps_longer": True} if keeps_longer else {}))
        self._demotion.drop(pages.tolist())
        self._collect_states(0, self._demotion.drop)
        return pages

    def observe(self, observer: Any) -> None:
        """Notify an observer of every page that enters or leaves the device's cache.

        Raises:
            ValueError: The device's cache has no observers.
        """
        self._call("observe", observer)

    def runs(self) -> Iterator[Any]:
        """Iterate over everything on the device, as `RadixCache.runs` does.

        Raises:
            ValueError: The device's cache has no `runs`.
        """
        return self._call("runs")

    def follow_tiers(self, log: TierLog) -> None:
        """Report pages that the host and the disk gain or lose to a log; `observe` does this for the device.

        A disk of another class than `DiskTier` is followed if it satisfies `tier_log.FollowedTier`. The remote store is
        not, because other processes use it too.

        Raises:
            ValueError: The device's cache holds pages and has no `runs`, or there is an index `beside` this one.
        """
        if len(self._open) > 1:
            raise ValueError(f"log must follow an index without others beside it, got {len(self._open)} indices")
        disk: Any = self._disk
        log.follow(host=self._host, disk=disk if hasattr(disk, "track") else None)
        for run in self.runs() if self._cache.num_pages else ():
            parent_key = None if run.parent_page is None else self._demotion.key_of(run.parent_page)
            keys = [self._demotion.key_of(page) for page in run.pages.tolist()]
            log.describe(parent_key, keys, run.tokens, run.namespace)
        self._demotion.follow(log)
        self._recalls.follow(log)
        self._log = log

    def explain(self, tokens: Int32, namespace: Namespace = None, **options: bool) -> Any:
        """Return why the prefix on the device is not longer; the options are those of `RadixCache.explain`.

        Raises:
            ValueError: The device's cache has no `explain`.
        """
        return self._call("explain", tokens, namespace, **options)

    def num_pages_in(self, namespace: Namespace = None) -> int:
        """Return the number of cached device pages of one namespace.

        Raises:
            ValueError: The device's cache does not count them.
        """
        return self._call("num_pages_in", namespace)

    def locate(self, tokens: Int32, namespace: Namespace = None) -> Hits:
        """Return the parts of the longest known prefix in each tier; queries the remote store, if any, and waits for
        it.

        Raises:
            OSError: The query to the remote store failed.
        """
        start = self._cache.peek(tokens, namespace).num_tokens // self._page_size
        every = self._keys(tokens, namespace)
        keys = every[start:]
        counts = [0, 0, 0]
        for where in self._where(keys):
            if not any(where):
                break
            counts[where.index(True)] += self._page_size
        num_usable = num_pages = start + sum(counts) // self._page_size
        if self._states is not None:
            num_usable = self.peek(tokens, namespace, needs_snapshot=True).num_tokens // self._page_size
            marks = [self._states.mark_of(key) for key in every[:num_pages]]
            ends = (end for end, where in enumerate(self._where(marks), 1) if any(where))
            num_usable = max(num_usable, *ends, 0)
        return Hits(
            num_device=start * self._page_size, num_host=counts[0], num_disk=counts[1], num_remote=counts[2],
            num_usable=num_usable * self._page_size,
        )  # fmt: skip

    def _where(self, keys: list[bytes]) -> Iterator[tuple[bool, ...]]:
        """Return for each page whether the host, the disk and the remote store have it."""
        answers = [[key in self._host for key in keys]]
        answers += [[False] * len(keys) if store is None else store.exists(keys) for store in self._stores]
        return zip(*answers, strict=True)

    def insert(
        self,
        tokens: Int32,
        pages: Int32,
        namespace: Namespace = None,
        *,
        after: Prefix | None = None,
        relock: bool = False,
    ) -> TieredInsertion:
        """Adopt the pages that the device's cache does not have; tokens and pages follow the locked prefix `after`.

        With `relock`, the whole prefix is locked then instead of `after`.

        Raises:
            ValueError: `relock` without `after`; or the device's cache refuses the arguments.
        """
        if relock and after is None:
            raise ValueError("after must be a locked prefix to relock, got None")
        base = after or Prefix(handle=None, key=self._chain.root(namespace), namespace=namespace)
        keys = self._chain.extend(base.key, tokens)
        insertion = self._cache.insert(tokens, pages, namespace, after=base.handle)
        n = insertion.num_existing
        if self._log is not None:
            is_first = base.key == self._chain.root(base.namespace)
            self._log.describe(None if is_first else base.key, keys, tokens, base.namespace)
        self._demotion.adopt(pages[n : len(keys)].tolist(), keys[n:])
        self.poll()
        node = Prefix(handle=insertion.node, key=keys[-1] if keys else base.key, namespace=base.namespace)
        if relock:
            node = self.lock(node)
            self.unlock(base)
        return TieredInsertion(num_existing=n, node=node, inner=insertion)

    def lock(self, node: Prefix) -> Prefix:
        """Keep a prefix on the device; return the handle that unlocks it."""
        return Prefix(handle=self._cache.lock(node.handle), key=node.key, namespace=node.namespace)

    def relock(self, lease: Prefix, node: Prefix) -> Prefix:
        """Lock `node`, then unlock `lease`; return the handle that unlocks it.

        Raises:
            ValueError: The prefix of `node` was evicted, or the device's cache has no `relock`. Nothing has changed.
        """
        handle = self._call("relock", lease.handle, node.handle)
        return Prefix(handle=handle, key=node.key, namespace=node.namespace)

    def unlock(self, node: Prefix) -> None:
        """Undo one lock."""
        self._cache.unlock(node.handle)

    def evict(self, num_pages: int, namespace: Any = ALL) -> Int32:
        """Disown up to `num_pages` unlocked device pages and return them; the caller may write to them at once.

        Pages that the policy wants to keep and that have no copy yet are copied to the host first, and a copy that
        already reads one of the pages is waited for. Both are copies in memory; `evict` never waits for a disk.

        Args:
            num_pages: Number of pages, >= 0.
            namespace: The namespace that needs the pages, so that its own floor does not protect it; `ALL` for no
                particular one. The device's cache must have limits then.

        Raises:
            ValueError: `num_pages` is negative or not an integer.
        """
        if require_whole("num_pages", num_pages) < 0:
            raise ValueError(f"num_pages must be >= 0, got {num_pages}")
        self.poll()
        spare = self._recalls.take_spare(num_pages)
        num_more = num_pages - len(spare)
        evicted = self._cache.evict(num_more) if namespace is ALL else self._call("evict", num_more, namespace)
        self._demotion.release(evicted.tolist())
        self._collect_states(0, self._demotion.release)
        return np.concatenate([np.array(spare, np.int32), evicted])

    def _collect_states(self, num_snapshots: int, leave: Callable[[Sequence[int]], None]) -> None:
        """Make the places of states whose pages are gone spare, and further ones until they are `num_snapshots`.

        Args:
            num_snapshots: Of the device's cache.
            leave: What is done with their parts.
        """
        if self._states is not None:
            places = self._call("evict_snapshots", num_snapshots).tolist()
            leave([part for place in places for part in self._parts_of(place)])
            self._recalls.give_places(places)

    def keep(self, pages: Int32) -> None:
        """Copy pages of the device's cache that are going to lose a part of what they hold, as `evict` would.

        Args:
            pages: `[n] int32`; no copy reads them, see `PageHolder`.
        """
        self._demotion.keep(pages.tolist())

    def finish_copies(self) -> None:
        """Wait for the copies to the host that have begun, which hold device pages."""
        self._demotion.finish()

    def clear(self, namespace: Any = ALL) -> Int32:
        """Drop all pages that are not in use from device and host without copying them, and return the device's.

        Pages of locked prefixes stay, and so do host pages that a recall reads or that must still go to a store. The
        stores keep their pages.

        Args:
            namespace: `ALL`, or the namespace whose device pages are dropped. The host does not know the namespaces of
                its pages. So with a namespace it keeps its pages, and they can be recalled.

        Raises:
            ValueError: The device's cache cannot clear a namespace.
        """
        self.poll()
        if namespace is not ALL:
            dropped = self._call("clear", namespace)
            self._demotion.drop(dropped.tolist())
            self._collect_states(0, self._demotion.drop)
            return dropped
        spare = self._recalls.take_spare(self._recalls.num_spare)
        dropped = self._cache.evict(self._cache.num_evictable)
        self._demotion.drop(dropped.tolist())
        self._collect_states(0 if self._states is None else self.num_snapshots, self._demotion.drop)
        self._host.clear()
        return np.concatenate([np.array(spare, np.int32), dropped])

    def probe(self, tokens: Int32, namespace: Namespace = None) -> Probe:
        """Ask device and tiers, the remote store too, how much of these tokens they have; copies nothing."""
        return self._recalls.probe(tokens, namespace, self._keys(tokens, namespace))

    def num_near(self, tokens: Int32, namespace: Namespace = None) -> int:
        """Return the tokens of the longest prefix on the device, the host and the disk; asks no remote store.

        With states of recurrent layers, that of the longest one with a state at its end.
        """
        return self._recalls.num_near(tokens, namespace, self._keys(tokens, namespace)) * self._page_size

    def num_found(self, probe: Probe) -> int | None:
        """Return the tokens of the longest prefix that a probe has found, never waiting.

        None: the remote store has not answered, and has time left (`PrefetchPolicy.base_s`). Later its pages count as
        absent.
        """
        num_pages = self._recalls.num_found(probe)
        return None if num_pages is None else num_pages * self._page_size

    def keys_of(self, tokens: Int32, namespace: Namespace = None) -> list[bytes]:
        """Return the keys of the whole pages of these tokens and of the states at their ends, for `unstored`."""
        keys = self._keys(tokens, namespace)
        return keys if self._states is None else [*keys, *map(self._states.mark_of, keys)]

    def unstored(self) -> set[bytes]:
        """Return the keys of the pages that are on their way to the stores; those of a copy that failed are not."""
        return self._demotion.unstored()

    def recall(self, tokens: Int32, namespace: Namespace = None, *, priority: int = 0) -> Recall | None:
        """Start to bring back pages of these tokens from the other tiers; return None if they have none.

        Copying from the stores to the host starts at once. Call `advance` until the recall is over, or `cancel` it. Its
        copies go before those of recalls of lower priority that have not begun.
        """
        return self._recalls.begin(tokens, namespace, self._keys(tokens, namespace), priority=priority)

    def advance(
        self, recall: Recall, take: Take, *, take_state: TakeState | None = None, priority: int | None = None
    ) -> bool:
        """Do the next due work of a recall; never waits.

        Args:
            recall: A recall under way.
            take: Given a number n, returns n free device pages, which then belong to the index. It may call `evict`. It
                returns None if it has no pages to spare; the recall then tries again at the next call.
            take_state: The same for the place of a state; it may call `evict_snapshots`. Without it, no prefix comes
                back if layers are recurrent.
            priority: New priority of the copies that are not queued yet; None: unchanged.

        Returns:
            True if the caller should call again later instead of admitting the request now. False if the recall is
            over, or has no pages to load to.
        """
        self.poll()
        return self._recalls.advance(recall, take, take_state=take_state, priority=priority)

    def cancel(self, recall: Recall) -> None:
        """Cancel a recall and return at once; `evict` returns its device pages when no copy uses them any more."""
        self._recalls.cancel(recall)

    def poll(self) -> None:
        """Process finished copies and start new ones.

        `insert`, `evict` and `advance` do this too, so only an idle engine needs to call it.
        """
        self._recalls.poll()
        self._demotion.poll()

    def flush(self) -> None:
        """Copy the pages that the policy would copy at eviction, and wait until the stores have them."""
        self._demotion.flush()

    def close(self, *, keep_stores: bool = False) -> None:
        """Cancel all recalls, flush if there is a store, end the lanes, and close the stores.

        As long as an index `beside` this one is open, only recalls are cancelled.

        Args:
            keep_stores: If True, do not close the stores, so that another index can replace this one with the same host
                and stores. Use this if the device's pages can no longer be trusted: nothing more is copied from them.
        """
        self._recalls.cancel_all()
        if self in self._open:
            self._open.remove(self)
        if self._open:
            return
        stores = [store for store in self._stores if store is not None]
        if keep_stores:
            self._demotion.abandon()
        elif stores:
            self._demotion.flush()
        self._lanes.close()
        self._demotion.settle()
        for store in stores:
            if not keep_stores:
                store.close()

    def check(self) -> None:
        """Verify that every slot of the host has exactly one owner, and the device's cache, if it has a `check`.

        Raises:
            AssertionError: A slot is lost, or has two owners, or the cache has found an error.
        """
        if hasattr(self._cache, "check"):
            self._call("check")
        num_filling = self._demotion.num_slots + sum(index._recalls.num_slots for index in self._open)
        assert self._host.num_taken == num_filling, f"{self._host.num_taken} slots are taken, {num_filling} are in use"

    def _keys(self, tokens: Int32, namespace: Namespace) -> list[bytes]:
        return self._chain.extend(self._chain.root(namespace), tokens)

    def _parts_of(self, place: int) -> list[int]:
        return [] if self._states is None else self._states.parts_of(place)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method that not every cache of the device has."""
        call = getattr(self._cache, method, None)
        if call is None:
            raise ValueError(f"cache must have the method {method}, got {type(self._cache).__name__}")
        return call(*arguments, **options)

    def _tiered(self, match: Match, namespace: Namespace) -> TieredMatch:
        num_tokens, pages = match.num_tokens, match.pages
        key = self._demotion.key_of(int(pages[-1])) if num_tokens else self._chain.root(namespace)
        node = Prefix(handle=match.node, key=key, namespace=namespace)
        return TieredMatch(num_tokens=num_tokens, pages=pages, node=node, inner=match)
