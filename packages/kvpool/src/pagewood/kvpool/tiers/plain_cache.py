"""A prefix cache as plain as it can be: the oracle for tests that want no other package."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagewood.kvpool.tiers.arrays import Int32


@dataclass(frozen=True, slots=True)
class PlainNode:
    """A prefix: its namespace and its tokens as bytes."""

    namespace: str | None
    prefix: bytes


@dataclass(frozen=True, slots=True)
class PlainMatch:
    """The longest cached prefix."""

    num_tokens: int
    pages: Int32
    node: PlainNode


@dataclass(frozen=True, slots=True)
class PlainInsertion:
    """What was adopted."""

    num_existing: int
    node: PlainNode


class PlainCache:
    """Every cached prefix is an entry of a dict, and every question is a search through all of them.

    Invariant: with a prefix, all shorter ones of whole pages are cached.
    """

    def __init__(self, page_size: int) -> None:
        self._page_bytes = page_size * 4
        self._page_size = page_size
        self._pages: dict[PlainNode, int] = {}  # least recently used first; written by: insert, evict, match
        self._locks: list[PlainNode] = []  # written by: lock, unlock

    @property
    def num_pages(self) -> int:
        """Pages it owns."""
        return len(self._pages)

    @property
    def num_locked(self) -> int:
        """Pages of locked prefixes."""
        return sum(self._is_locked(node) for node in self._pages)

    @property
    def num_evictable(self) -> int:
        """Pages of the others."""
        return self.num_pages - self.num_locked

    def match(self, tokens: Int32, namespace: str | None = None) -> PlainMatch:
        """Find the longest cached prefix; it counts as a use."""
        found = self.peek(tokens, namespace)
        for node in self._path(found.node):
            self._pages[node] = self._pages.pop(node)
        return found

    def peek(self, tokens: Int32, namespace: str | None = None) -> PlainMatch:
        """Find the longest cached prefix."""
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
        self, tokens: Int32, pages: Int32, namespace: str | None = None, *, after: PlainNode | None = None
    ) -> PlainInsertion:
        """Adopt the pages that are lacking."""
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
        """Keep a prefix."""
        self._locks.append(node)
        return node

    def unlock(self, node: PlainNode) -> None:
        """Undo one lock."""
        self._locks.remove(node)

    def evict(self, num_pages: int) -> Int32:
        """Disown the least recently used pages that nothing follows and nobody locked."""
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
