"""The simplest prefix cache: an oracle for tests, and a stand-in where `pagewood-radixcache` is not installed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagewood.kvpool.tiers.pages.arrays import Int32
from pagewood.kvpool.tiers.pages.keys import Namespace


@dataclass(frozen=True, slots=True)
class PlainNode:
    """A prefix.

    Attributes:
        namespace: Its namespace.
        prefix: Its tokens as bytes.
    """

    namespace: Namespace
    prefix: bytes


@dataclass(frozen=True, slots=True)
class PlainMatch:
    """The longest cached prefix of some tokens.

    Attributes:
        num_tokens: Its length in tokens, whole pages.
        pages: `[num_tokens / page_size] int32`, page ids.
        node: Handle to lock it with.
    """

    num_tokens: int
    pages: Int32
    node: PlainNode


@dataclass(frozen=True, slots=True)
class PlainInsertion:
    """The result of an insertion.

    Attributes:
        num_existing: Number of leading pages that were already cached.
        node: Handle of the whole inserted prefix.
    """

    num_existing: int
    node: PlainNode


class PlainCache:
    """A prefix cache with one dict entry for each cached prefix; most calls search all entries. Slow.

    Invariant: if a prefix is cached, so are all its shorter prefixes of whole pages.
    """

    def __init__(self, page_size: int) -> None:
        """Create an empty cache with `page_size` tokens per page."""
        self._page_bytes = page_size * 4
        self._page_size = page_size
        # Page ids, least recently used first.
        self._pages: dict[PlainNode, int] = {}  # written by: insert, evict, match
        self._locks: list[PlainNode] = []  # written by: lock, unlock

    @property
    def num_pages(self) -> int:
        """Number of pages that it owns."""
        return len(self._pages)

    @property
    def num_locked(self) -> int:
        """Number of pages of locked prefixes."""
        return sum(self._is_locked(node) for node in self._pages)

    @property
    def num_evictable(self) -> int:
        """Number of pages that are not locked."""
        return self.num_pages - self.num_locked

    def match(self, tokens: Int32, namespace: Namespace = None) -> PlainMatch:
        """Find the longest cached prefix; this counts as a use."""
        found = self.peek(tokens, namespace)
        for node in self._path(found.node):
            self._pages[node] = self._pages.pop(node)
        return found

    def peek(self, tokens: Int32, namespace: Namespace = None) -> PlainMatch:
        """Find the longest cached prefix; this does not count as a use."""
        data = tokens.tobytes()
        pages: list[int] = []
        while True:
            end = (len(pages) + 1) * self._page_bytes
            page = self._pages.get(PlainNode(namespace, data[:end])) if end <= len(data) else None
            if page is None:
                node = PlainNode(namespace, data[: len(pages) * self._page_bytes])
                return PlainMatch(len(pages) * self._page_size, np.array(pages, np.int32), node)
            pages.append(page)

    def insert(
        self, tokens: Int32, pages: Int32, namespace: Namespace = None, *, after: PlainNode | None = None
    ) -> PlainInsertion:
        """Adopt the pages that are not cached yet."""
        base = PlainNode(namespace, b"") if after is None else after
        data = tokens.tobytes()
        node, num_existing = base, 0
        for index in range(len(data) // self._page_bytes):
            node = PlainNode(base.namespace, base.prefix + data[: (index + 1) * self._page_bytes])
            if node in self._pages:
                num_existing += 1
            else:
                self._pages[node] = int(pages[index])
        return PlainInsertion(num_existing, node)

    def lock(self, node: PlainNode) -> PlainNode:
        """Protect a prefix from eviction; return the handle that unlocks it."""
        self._locks.append(node)
        return node

    def unlock(self, node: PlainNode) -> None:
        """Undo one lock."""
        self._locks.remove(node)

    def evict(self, num_pages: int) -> Int32:
        """Disown up to `num_pages` pages, least recently used first.

        A page can be evicted if it is not locked and no cached prefix continues it.
        """
        freed: list[int] = []
        while len(freed) < num_pages:
            leaves = [node for node in self._pages if not self._is_locked(node) and not self._has_child(node)]
            if not leaves:
                break
            freed.append(self._pages.pop(leaves[0]))
        return np.array(freed, np.int32)

    def _path(self, node: PlainNode) -> list[PlainNode]:
        ends = range(len(node.prefix), 0, -self._page_bytes)
        return [PlainNode(node.namespace, node.prefix[:end]) for end in ends]

    def _is_locked(self, node: PlainNode) -> bool:
        return any(lock.namespace == node.namespace and lock.prefix.startswith(node.prefix) for lock in self._locks)

    def _has_child(self, node: PlainNode) -> bool:
        return any(
            other.namespace == node.namespace and other.prefix != node.prefix and other.prefix.startswith(node.prefix)
            for other in self._pages
        )
