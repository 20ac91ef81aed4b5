"""A brute-force prefix cache that works page by page."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagewood.radixcache.namespaces import ANY, AnyNamespace, Namespace
from pagewood.radixcache.order.choice import AnyPolicy
from pagewood.radixcache.policies import LRU, S3FIFO, Policy, QueueInformed, Retained
from pagewood.radixcache.usage import Usage

PageTokens: TypeAlias = tuple[int, ...]
"""The tokens of one whole page."""

Prefix: TypeAlias = tuple[PageTokens, ...]
"""Whole pages from the start of a sequence."""

Key: TypeAlias = tuple[Namespace, Prefix]
"""A namespace and a prefix: identifies the last page of the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedPage:
    """A page and its own usage.

    Attributes:
        page: page id.
        usage: how the page has been used; no other page shares it.
    """

    page: int
    usage: Usage


class Oracle:
    """A dict from every cached prefix to its last page, plus lists of everything else, all searched linearly.

    Invariant: if a prefix is cached, all shorter prefixes of it are cached.

    Args:
        page_size: tokens per page.
        policy: scores the pages; not shared with the tested cache. S3FIFO does not score pages: then `evict` is
            meaningless.

    Attributes:
        page_size: tokens per page.
        is_informed: whether watched pages are evicted last.
        clock: the clock of `Retained`, or None.
        policy: scores the pages.
        pages: every cached prefix, with its last page.
        leases: the locked prefixes.
        watches: the watched prefixes.
        limits: quota and floor of each limited namespace.
        ever_evicted: every prefix that was evicted at some time.
        snapshots: the snapshots of cached prefixes, the next to be evicted first.
        superseded: those of these prefixes whose snapshots are evicted before the others.
        loose: the snapshots of prefixes that were evicted.
        lost: the cached prefixes whose snapshot was evicted.
        tick: number of operations so far.
    """

    def __init__(self, page_size: int, policy: AnyPolicy) -> None:
        inner = policy.policy if isinstance(policy, QueueInformed) else policy
        self.page_size = page_size
        self.is_informed = isinstance(policy, QueueInformed)
        self.clock = inner.clock if isinstance(inner, Retained) else None
        scores = inner.policy if isinstance(inner, Retained) else inner
        self.policy: Policy = LRU() if isinstance(scores, S3FIFO) else scores
        self.pages: dict[Key, CachedPage] = {}
        self.leases: list[Key] = []
        self.watches: list[Key] = []  # written by: machine
        self.limits: dict[Namespace, tuple[float, int]] = {}  # written by: machine
        self.ever_evicted: set[Key] = set()
        self.snapshots: dict[Key, int] = {}
        self.superseded: set[Key] = set()
        self.loose: list[int] = []
        self.lost: set[Key] = set()
        self.tick = 0

    def match(self, namespace: Namespace, prefix: Prefix) -> list[int]:
        """Return the pages of the longest cached prefix."""
        found: list[int] = []
        for end in range(1, len(prefix) + 1):
            cached = self.pages.get((namespace, prefix[:end]))
            if cached is None:
                break
            found.append(cached.page)
        return found

    def partial(self, namespace: Namespace, prefix: Prefix, rest: tuple[int, ...]) -> dict[int, int]:
        """Return the pages that follow a cached prefix, and how many leading tokens each shares with `rest`."""
        shared: dict[int, int] = {}
        for (name, other), cached in self.pages.items():
            if name == namespace and len(other) == len(prefix) + 1 and other[:-1] == prefix:
                pairs = zip(other[-1], rest, strict=False)
                differences = [index for index, (left, right) in enumerate(pairs) if left != right]
                shared[cached.page] = min([*differences, len(rest), self.page_size])
        return shared

    def touch(self, namespace: Namespace, prefix: Prefix) -> None:
        """Count the unlocked pages of a prefix as used."""
        self.tick += 1
        for end in range(1, len(prefix) + 1):
            if not self.is_locked(namespace, prefix[:end]):
                self._use(namespace, prefix[:end])

    def insert(self, namespace: Namespace, prefix: Prefix, pages: list[int]) -> int:
        """Adopt those of the last pages of `prefix` that are missing, and return how many were cached already."""
        self.tick += 1
        start = len(prefix) - len(pages)
        num_existing = max(0, len(self.match(namespace, prefix)) - start)
        for end in range(start + num_existing, len(prefix)):
            usage = Usage(created=self.tick, last_used=self.tick)
            self.pages[namespace, prefix[: end + 1]] = CachedPage(page=pages[end - start], usage=usage)
        for end in range(1, len(prefix) + 1):
            self.pages[namespace, prefix[:end]].usage.num_sequence_tokens = len(prefix) * self.page_size
            self._use(namespace, prefix[:end])
        return num_existing

    def is_locked(self, namespace: Namespace, prefix: Prefix) -> bool:
        """Return whether a lease holds the last page of `prefix`."""
        return any(name == namespace and held[: len(prefix)] == prefix for name, held in self.leases)

    def lock(self, namespace: Namespace, prefix: Prefix, *, is_hit: bool) -> None:
        """Add a lease on a prefix; count it as a hit if it comes from a match."""
        self.leases.append((namespace, prefix))
        for end in range(1, len(prefix) + 1 if is_hit else 1):
            usage = self.pages[namespace, prefix[:end]].usage
            usage.num_uses += 1
            self.policy.used(usage)

    def unlock(self, index: int) -> None:
        """Drop a lease."""
        self.touch(*self.leases.pop(index))

    def retain(self, namespace: Namespace, prefix: Prefix, start: int, priority: int, until: float) -> None:
        """Give the pages of a prefix a priority, from page `start` on."""
        for end in range(start + 1, len(prefix) + 1):
            self.pages[namespace, prefix[:end]].usage.priorities += ((priority, until),)

    def evict(self, num_pages: int, beneficiary: Namespace | AnyNamespace = ANY) -> list[int]:
        """Evict pages one by one, each time the unlocked leaf page that is first in order."""
        freed: list[int] = []
        while len(freed) < num_pages and (leaves := self._candidates(beneficiary)):
            first = min(leaves, key=self._rank)
            self.policy.evicted(self._score(first))
            freed.append(self._drop(first))
        return freed

    def remove(self, pages: list[int]) -> None:
        """Remove pages that a cache has evicted.

        Raises:
            AssertionError: a page is locked, or another page follows it.
        """
        keys = {cached.page: key for key, cached in self.pages.items()}
        for key in sorted((keys[page] for page in pages), key=lambda key: -len(key[1])):
            assert key in self._unlocked_leaves(), f"{key} is locked, or something follows it"
            self._drop(key)

    def clear(self, namespace: Namespace) -> list[int]:
        """Remove the unlocked pages of a namespace."""
        mine = [key for key in self.pages if key[0] == namespace and not self.is_locked(*key)]
        return [self._drop(key) for key in mine]

    def release(self, namespace: Namespace, prefix: Prefix, *, keeps_longer: bool) -> list[int]:
        """Remove the unlocked pages after a prefix, unless they stay, and those at its end that nothing else needs."""
        below = [key for key in self.pages if key[0] == namespace and key[1][: len(prefix)] == prefix != key[1]]
        below = [] if keeps_longer else below
        freed = [self._drop(key) for key in below if not self.is_locked(*key)]
        while (namespace, prefix) in self._unlocked_leaves():
            freed.append(self._drop((namespace, prefix)))
            prefix = prefix[:-1]
        return freed

    def attach(self, namespace: Namespace, prefix: Prefix, snapshot: int) -> bool:
        """Attach a snapshot to a prefix; return False, and count a use, if the prefix has one."""
        key = namespace, prefix
        if key in self.snapshots:
            self.use_snapshot(namespace, prefix)
            return False
        for end in range(len(prefix) - 1, 0, -1):
            earlier = namespace, prefix[:end]
            if sum(name == namespace and other[:-1] == prefix[:end] for name, other in self.pages) > 1:
                break
            if earlier in self.snapshots:
                if earlier not in self.superseded:
                    self.superseded.add(earlier)
                    self.snapshots[earlier] = self.snapshots.pop(earlier)
                break
        self.snapshots[key] = snapshot
        self.lost.discard(key)
        return True

    def match_snapshot(self, namespace: Namespace, prefix: Prefix) -> int:
        """Return the number of pages of the longest cached prefix that ends with a snapshot."""
        ends = range(1, len(prefix) + 1)
        return max((end for end in ends if (namespace, prefix[:end]) in self.snapshots), default=0)

    def use_snapshot(self, namespace: Namespace, prefix: Prefix) -> None:
        """Make the snapshot of a prefix the last one to be evicted."""
        key = namespace, prefix
        self.superseded.discard(key)
        self.snapshots[key] = self.snapshots.pop(key)

    def evict_snapshots(self, num_snapshots: int) -> list[int]:
        """Return the snapshots of evicted prefixes, and evict further ones of unlocked prefixes one by one."""
        freed, self.loose = self.loose, []
        ranked = sorted(self.snapshots, key=lambda key: key not in self.superseded)  # stable
        for key in ranked:
            if len(freed) < num_snapshots:
                snapshot = self.snapshots.pop(key)
                if key in self.leases or (self.is_locked(*key) and key not in self.superseded):
                    self.snapshots[key] = snapshot
                else:
                    freed.append(snapshot)
                    self.superseded.discard(key)
                    self.lost.add(key)
        return freed

    def num_locked(self) -> int:
        """Return the number of pages held by leases."""
        return sum(self.is_locked(*key) for key in self.pages)

    def num_in(self, namespace: Namespace) -> int:
        """Return the number of pages in a namespace."""
        return sum(key[0] == namespace for key in self.pages)

    def num_evictable(self) -> int:
        """Return the number of pages that `evict` can return for no namespace in particular."""
        total = 0
        for namespace in {key[0] for key in self.pages}:
            num_unlocked = sum(key[0] == namespace and not self.is_locked(*key) for key in self.pages)
            floor = self.limits.get(namespace, (math.inf, 0))[1]
            total += min(num_unlocked, max(0, self.num_in(namespace) - floor))
        return total

    def _use(self, namespace: Namespace, prefix: Prefix) -> None:
        usage = self.pages[namespace, prefix].usage
        usage.last_used = self.tick
        self.policy.used(usage)

    def _unlocked_leaves(self) -> list[Key]:
        inner = {(namespace, prefix[:-1]) for namespace, prefix in self.pages}
        return [key for key in self.pages if key not in inner and not self.is_locked(*key)]

    def _candidates(self, beneficiary: Namespace | AnyNamespace) -> list[Key]:
        """Return the pages of which one is evicted next."""
        leaves = self._unlocked_leaves()
        over = [key for key in leaves if self.num_in(key[0]) > self.limits.get(key[0], (math.inf, 0))[0]]
        if over:
            return over
        return [
            key
            for key in leaves
            if key[0] == beneficiary or self.num_in(key[0]) > self.limits.get(key[0], (math.inf, 0))[1]
        ]

    def _score(self, key: Key) -> Any:
        return self.policy.score(self.pages[key].usage, len(key[1]) * self.page_size)

    def _rank(self, key: Key) -> Any:
        namespace, prefix = key
        usage = self.pages[key].usage
        is_watched = any(name == namespace and held[: len(prefix)] == prefix for name, held in self.watches)
        now_s = 0.0 if self.clock is None else self.clock()
        priority = max((priority for priority, until in usage.priorities if now_s < until), default=0)
        return self.is_informed and is_watched, priority, self._score(key)

    def _drop(self, key: Key) -> int:
        self.ever_evicted.add(key)
        self.superseded.discard(key)
        self.lost.discard(key)
        if key in self.snapshots:
            self.loose.append(self.snapshots.pop(key))
        return self.pages.pop(key).page
