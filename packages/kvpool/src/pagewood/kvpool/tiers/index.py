"""One prefix cache over device, host, disk and remote memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagewood.kvpool.tiers.arrays import Int32
from pagewood.kvpool.tiers.counters import TierCounters
from pagewood.kvpool.tiers.demotion import Demotion
from pagewood.kvpool.tiers.device import DevicePages
from pagewood.kvpool.tiers.host import HostTier
from pagewood.kvpool.tiers.keys import KeyChain
from pagewood.kvpool.tiers.lane import Lanes, thread_lanes
from pagewood.kvpool.tiers.policy import PrefetchPolicy, WritePolicy
from pagewood.kvpool.tiers.prefix_cache import Prefix, PrefixCache, TieredInsertion, TieredMatch, WatchedCache
from pagewood.kvpool.tiers.recall import Recall, Recalls, Take
from pagewood.kvpool.tiers.store import PageStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Hits:
    """Where the longest known prefix of some tokens lies, in tokens, each page counted where it is nearest.

    Behind the device's prefix the tiers may alternate from page to page; the numbers say how much is where.
    """

    num_device: int
    num_host: int
    num_disk: int
    num_remote: int

    @property
    def num_tokens(self) -> int:
        """Length of the whole prefix."""
        return self.num_device + self.num_host + self.num_disk + self.num_remote


class TieredIndex:
    """A prefix cache whose evicted pages go down to other memories, and come back when they are needed again.

    Invariant: a page that `evict` returns is read and written by no copy; a page that `recall` takes is the index's
    until `evict` returns it. So every device page has one owner at any time, whatever copy fails or is called off.

    It is used like the cache that it composes: `match`, `peek`, `insert`, `lock`, `unlock` and `evict` mean the same,
    and see the device only. New are `recall` and `advance`, for a request that waits to be admitted:

        recall = index.recall(tokens, namespace)              # when it arrives; None: nothing to bring back
        while recall and index.advance(recall, take): ...     # before it is admitted; True: go on with something else
        match = index.match(tokens, namespace)                # as ever; what was brought back is on the device

    Published pages must not change any more, and pages must not be freed while a launched step uses them. Not
    thread-safe: one thread uses it, and its lanes' workers touch only memory that it gave them.

    Args:
        cache: of the device's pages, empty, such as `pagewood.radixcache.RadixCache`.
        device: the memory of those pages.
        host: main memory.
        disk: a store that answers `exists` at once, such as `DiskTier`.
        remote: a store that may take its time, such as `SharedFolder`.
        page_size: tokens per page.
        fingerprint: what else the KV depends on (weights, dtype, layout); see `KeyChain`.
        write_policy: when pages go down to the host. From there they go to the stores at once.
        min_uses: uses that WRITE_THROUGH_SELECTIVE asks for.
        prefetch: how long a request waits for a store.
        lanes: where copies run; None: a thread each.
        clock: seconds, monotonic.

    Raises:
        ValueError: the sizes of a page differ, or `page_size` or `min_uses` is less than 1.

    Source: the hierarchical cache of SGLang (HiCache); here the lower tiers know pages by content instead of by tree.
    """

    __slots__ = ("_cache", "_chain", "_demotion", "_host", "_lanes", "_page_size", "_recalls", "_stores", "counters")

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
    ) -> None:
        if device.page_bytes != host.page_bytes:
            raise ValueError(
                f"host must have pages of the device's {device.page_bytes} bytes, got {host.page_bytes} bytes"
            )
        if min_uses < 1:
            raise ValueError(f"min_uses must be >= 1, got {min_uses}")
        self._cache = cache
        self._chain = KeyChain(page_size, fingerprint=fingerprint)
        self._page_size = page_size
        self._host = host
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
        )
        self._recalls = Recalls(
            cache=cache,
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
        )

    @property
    def num_pages(self) -> int:
        """Device pages that it owns: cached, being loaded, or spare."""
        return self._cache.num_pages + self._recalls.num_loading + self._recalls.num_spare

    @property
    def num_evictable(self) -> int:
        """Device pages that `evict` can give back now."""
        return self._cache.num_evictable + self._recalls.num_spare

    @property
    def num_locked(self) -> int:
        """Device pages on a locked path."""
        return self._cache.num_locked

    @property
    def num_loading(self) -> int:
        """Device pages that a copy may be writing."""
        return self._recalls.num_loading

    def match(self, tokens: Int32, namespace: str | None = None) -> TieredMatch:
        """Find the longest prefix on the device; it counts as a use."""
        match = self._cache.match(tokens, namespace)
        self._demotion.use(match.pages.tolist())
        return self._tiered(match.num_tokens, match.pages, match.node, namespace)

    def peek(self, tokens: Int32, namespace: str | None = None) -> TieredMatch:
        """Find the longest prefix on the device; it does not count as a use."""
        match = self._cache.peek(tokens, namespace)
        return self._tiered(match.num_tokens, match.pages, match.node, namespace)

    def watch_group(self) -> Any:
        """Return a group of live matches, as the device's cache has them: of what is on the device.

        Raises:
            ValueError: the device's cache has none.
        """
        if not isinstance(self._cache, WatchedCache):
            raise ValueError(f"cache must have watches, got {type(self._cache).__name__}")
        return self._cache.watch_group()

    def locate(self, tokens: Int32, namespace: str | None = None) -> Hits:
        """Say where the longest known prefix lies; asks the remote store, if there is one, and waits for it.

        Raises:
            OSError: the remote store cannot be asked.
        """
        start = self._cache.peek(tokens, namespace).num_tokens // self._page_size
        keys = self._chain.extend(self._chain.root(namespace), tokens)[start:]
        counts = [0, 0, 0]
        answers = [[key in self._host for key in keys]]
        answers += [[False] * len(keys) if store is None else store.exists(keys) for store in self._stores]
        for where in zip(*answers, strict=True):
            if not any(where):
                break
            counts[where.index(True)] += self._page_size
        return Hits(num_device=start * self._page_size, num_host=counts[0], num_disk=counts[1], num_remote=counts[2])

    def insert(
        self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: Prefix | None = None
    ) -> TieredInsertion:
        """Adopt the pages that the device's cache lacks; tokens and pages follow the locked prefix `after`."""
        parent, handle = (self._chain.root(namespace), None) if after is None else (after.key, after.handle)
        keys = self._chain.extend(parent, tokens)
        insertion = self._cache.insert(tokens, pages, namespace, after=handle)
        n = insertion.num_existing
        self._demotion.adopt(pages[n : len(keys)].tolist(), keys[n:])
        self.poll()
        return TieredInsertion(num_existing=n, node=Prefix(handle=insertion.node, key=keys[-1] if keys else parent))

    def lock(self, node: Prefix) -> Prefix:
        """Keep a prefix on the device; return the handle that unlocks it."""
        return Prefix(handle=self._cache.lock(node.handle), key=node.key)

    def unlock(self, node: Prefix) -> None:
        """Undo one lock."""
        self._cache.unlock(node.handle)

    def evict(self, num_pages: int) -> Int32:
        """Disown up to num_pages unlocked device pages and return them; they may be written to at once.

        Those whose copy is still due are copied to the host first, and a copy of them that is under way is waited for:
        both are copies in memory, and no disk is waited for.
        """
        self.poll()
        spare = self._recalls.take_spare(num_pages)
        evicted = self._cache.evict(num_pages - len(spare))
        self._demotion.release(evicted.tolist())
        return np.concatenate([np.array(spare, np.int32), evicted])

    def recall(self, tokens: Int32, namespace: str | None = None) -> Recall | None:
        """Begin to bring back what the other tiers know of these tokens; None: nothing.

        Pages of stores begin to come to the host at once. `advance` it until it is over, or `cancel` it.
        """
        keys = self._chain.extend(self._chain.root(namespace), tokens)
        return self._recalls.begin(tokens, namespace, keys)

    def advance(self, recall: Recall, take: Take) -> bool:
        """Do what is due in a recall; never waits.

        Args:
            recall: under way.
            take: gives n free device pages away, which belong to the index from then on; or None, if it has none to
                spare, and then the recall tries again at the next call. It may call `evict`.

        Returns:
            Whether to come back instead of admitting the request now. Not so if it is over, or has no pages to load to.
        """
        self.poll()
        return self._recalls.advance(recall, take)

    def cancel(self, recall: Recall) -> None:
        """Call a recall off, and return at once; its device pages come back through `evict` when no copy uses them."""
        self._recalls.cancel(recall)

    def poll(self) -> None:
        """Take in finished copies and begin new ones; every other method does so too, so an idle engine calls this."""
        self._recalls.poll()
        self._demotion.poll()

    def flush(self) -> None:
        """Copy out what the policy would copy at eviction, and wait until the stores have it."""
        self._demotion.flush()

    def close(self, *, keep_stores: bool = False) -> None:
        """Call recalls off, flush if there is a store to flush to, end the lanes, and close the stores.

        Args:
            keep_stores: keep them, for an index that takes the place of this one with the same host and stores. That
                is done when the device's pages are not to be trusted, so nothing more is copied out of them.
        """
        self._recalls.cancel_all()
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
        """Verify the accounting of the host's slots.

        Raises:
            AssertionError: a slot is lost, or has two owners.
        """
        num_filling = self._demotion.num_slots + self._recalls.num_slots
        assert self._host.num_taken == num_filling, f"{self._host.num_taken} slots are taken, {num_filling} are in use"

    def _tiered(self, num_tokens: int, pages: Int32, handle: object, namespace: str | None) -> TieredMatch:
        key = self._demotion.key_of(int(pages[-1])) if num_tokens else self._chain.root(namespace)
        return TieredMatch(num_tokens=num_tokens, pages=pages, node=Prefix(handle=handle, key=key))
