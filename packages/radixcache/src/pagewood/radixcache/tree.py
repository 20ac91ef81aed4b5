"""The radix tree over bytes: where edges are cut, locked and given up."""

import sys

from pagewood.radixcache.arrays import ITEM_BYTES, from_bytes, num_common_items
from pagewood.radixcache.lru import LeafLRU
from pagewood.radixcache.node import Edge, Node
from pagewood.radixcache.observer import Observer


class Tree:
    """Edges by namespace, their recency, and the page counts.

    Invariant: the children of an edge differ in their first page, every edge but a root holds at least one page, and
    the counts are those of the edges.
    """

    __slots__ = ("lru", "num_locked", "num_pages", "num_pages_in", "observers", "page_bytes", "page_size", "roots")

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * ITEM_BYTES
        self.lru = LeafLRU()
        self.roots: dict[str | None, Edge] = {}  # written by: _keep, _forget_if_idle
        self.num_pages_in: dict[str | None, int] = {}  # written by: _keep, _forget_if_idle, _count
        self.num_pages = 0  # written by: _count
        self.num_locked = 0  # written by: lock, unlock
        self.observers: list[Observer] = []  # written by: RadixCache.observe

    def root(self, namespace: str | None) -> Edge:
        """Return the namespace's root; one that has neither pages nor leases is made anew each time."""
        return self.roots.get(namespace) or Edge(namespace, None, b"", b"", 0, 0, {})

    def descend(self, edge: Edge, key: bytes) -> tuple[Edge, int, list[bytes]]:
        """Follow `key`, a number of whole pages, down from the end of `edge`.

        Returns:
            The last edge that shares a page with the key (it may reach further than the key follows it), the pages
            followed in all, and their ids, one item per edge.
        """
        page_bytes = self.page_bytes
        offset, size = 0, len(key)
        parts: list[bytes] = []
        while offset < size:
            child = edge.children.get(key[offset : offset + page_bytes])
            if child is None:
                break
            edge = child
            if key.startswith(edge.key, offset):
                parts.append(edge.values)
                offset += len(edge.key)
            else:
                num_pages = num_common_items(edge.key, key, offset) // self.page_size
                parts.append(edge.values[: num_pages * ITEM_BYTES])
                offset += num_pages * page_bytes
                break
        return edge, offset // page_bytes, parts

    def locate(self, node: Node) -> Edge:
        """Return the edge in which the node's prefix ends now.

        Raises:
            ValueError: the end of the prefix has been evicted.
        """
        edge, end = node.edge, node.end
        if not end:
            return self.root(edge.namespace)
        while edge.start >= end and edge.parent is not None:  # cut off since, by splits
            edge = edge.parent
        if edge.end < end:
            raise ValueError(f"node must be cached, got {node!r}, which has been evicted")
        return edge

    def split(self, edge: Edge, end: int) -> Edge:
        """Cut `edge` so that its upper part ends at `end`, and return that part, the most recent of all if unlocked.

        The caller touches or locks the upper part's ancestors next (`LeafLRU.add`).
        """
        page_bytes = self.page_bytes
        num_pages = end - edge.start
        key_cut, value_cut = num_pages * page_bytes, num_pages * ITEM_BYTES
        key, values, parent = edge.key, edge.values, edge.parent
        assert parent is not None  # a root has no pages, so nobody can ask to cut it
        children = {key[key_cut : key_cut + page_bytes]: edge}
        num_pins = 1 if edge.num_pins else 0
        upper = Edge(
            edge.namespace, parent, key[:key_cut], values[:value_cut], edge.start, end, children, num_pins=num_pins
        )
        parent.children[key[:page_bytes]] = upper
        edge.parent = upper
        edge.key, edge.values, edge.start = key[key_cut:], values[value_cut:], end
        if not num_pins:
            self.lru.add(upper)
        return upper

    def attach(self, parent: Edge, key: bytes, values: bytes) -> Edge:
        """Add a leaf, the most recent edge of all, and return it; the caller touches its ancestors next."""
        num_pages = len(values) // ITEM_BYTES
        if parent.parent is None:
            self._keep(parent)
        edge = Edge(parent.namespace, parent, key, values, parent.end, parent.end + num_pages, {})
        parent.children[key[: self.page_bytes]] = edge
        self.lru.add(edge)
        self._count(edge.namespace, num_pages)
        if self.observers:
            self._tell_stored(edge)
        return edge

    def lock(self, edge: Edge) -> None:
        """Add a lease; it costs as many steps as there are edges on the path that no lease has locked yet."""
        edge.num_leases += 1
        pinned = edge
        while True:
            pinned.num_pins += 1
            if pinned.num_pins > 1:
                return
            if pinned.parent is None:
                self._keep(pinned)
                return
            self.lru.remove(pinned)
            self.num_locked += pinned.end - pinned.start
            pinned = pinned.parent

    def unlock(self, edge: Edge) -> None:
        """Drop a lease; what no lease locks any more becomes the most recent."""
        edge.num_leases -= 1
        pinned = edge
        while True:
            pinned.num_pins -= 1
            if pinned.num_pins:
                return
            if pinned.parent is None:
                self._forget_if_idle(pinned)
                return
            self.lru.add(pinned)
            self.num_locked -= pinned.end - pinned.start
            pinned = pinned.parent

    def evict(self, num_pages: int) -> list[bytes]:
        """Give up the `num_pages` least recently used pages, or all the unlocked ones if they are fewer."""
        parts: list[bytes] = []
        while num_pages and (edge := self.lru.oldest()) is not None:
            num_kept = edge.end - edge.start - num_pages
            if num_kept <= 0:
                parts.append(edge.values)
                num_pages = -num_kept
                self.detach(edge)
            else:
                parts.append(edge.values[num_kept * ITEM_BYTES :])
                if self.observers:
                    self._tell_removed(edge.namespace, parts[-1])
                edge.key, edge.values = edge.key[: num_kept * self.page_bytes], edge.values[: num_kept * ITEM_BYTES]
                edge.end -= num_pages
                self._count(edge.namespace, -num_pages)
                num_pages = 0
        return parts

    def clear(self, namespace: str | None) -> list[bytes]:
        """Give up all unlocked pages of a namespace."""
        edges = [self.root(namespace)]
        for edge in edges:
            edges.extend(edge.children.values())
        parts: list[bytes] = []
        for edge in reversed(edges):  # children before their parents
            if edge.parent is not None and not edge.num_pins:
                parts.append(edge.values)
                self.detach(edge)
        for observer in self.observers:
            observer.cleared(namespace)
        return parts

    def detach(self, edge: Edge) -> None:
        """Take an unlocked edge out of the tree."""
        parent = edge.parent
        assert parent is not None  # a root is never evicted
        self.lru.remove(edge)
        del parent.children[edge.key[: self.page_bytes]]
        self._count(edge.namespace, edge.start - edge.end)
        edge.end = edge.start
        if parent.parent is None:
            self._forget_if_idle(parent)
        if self.observers:
            self._tell_removed(edge.namespace, edge.values)

    def _tell_stored(self, edge: Edge) -> None:
        parent_page = last_page(edge.parent)
        tokens, pages = from_bytes([edge.key]), from_bytes([edge.values])
        for observer in self.observers:
            observer.stored(edge.namespace, parent_page, tokens, pages)

    def _tell_removed(self, namespace: str | None, values: bytes) -> None:
        pages = from_bytes([values])
        for observer in self.observers:
            observer.removed(namespace, pages)

    def _keep(self, root: Edge) -> None:
        """Enter a root that gets its first child or lease."""
        if root.namespace not in self.roots:
            self.roots[root.namespace] = root
            self.num_pages_in[root.namespace] = 0

    def _forget_if_idle(self, root: Edge) -> None:
        """Drop a root that neither a page nor a lease needs, so that old namespaces cost nothing."""
        if not root.children and not root.num_pins:
            del self.roots[root.namespace], self.num_pages_in[root.namespace]

    def _count(self, namespace: str | None, num_pages: int) -> None:
        self.num_pages += num_pages
        self.num_pages_in[namespace] += num_pages


def last_page(edge: Edge | None) -> int | None:
    """Return the id of the last page of an edge; None for a root."""
    return None if edge is None or not edge.values else int.from_bytes(edge.values[-ITEM_BYTES:], sys.byteorder)
