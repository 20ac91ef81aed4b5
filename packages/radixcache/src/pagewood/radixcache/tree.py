"""The radix tree over bytes: edges are split, joined, attached, locked, trimmed and detached here."""

import sys
from collections.abc import Callable
from typing import Any, Protocol

from pagewood.radixcache.arrays import ITEM_BYTES, Key, num_common_items
from pagewood.radixcache.namespaces import Namespace, require_namespace
from pagewood.radixcache.node import ABSORBED, Edge, Node, Space
from pagewood.radixcache.order import Order
from pagewood.radixcache.order.recency import RecencyList
from pagewood.radixcache.pages import PageSet

MAX_JOINED_BYTES = 128 * 1024
"""Largest joined edge in bytes, key and page ids together. Beyond it, copying costs more than joining saves."""


class Listener(Protocol):
    """Receives notifications after pages have entered or left the tree.

    `parent_page` is the id of the page before the first of these pages; None at the root.
    """

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """The tree has adopted pages."""
        ...

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """The tree has removed the last pages of a path."""
        ...

    def cleared(self, space: Space) -> None:
        """The tree has removed all unlocked pages of a namespace; `removed` was called for each of them before."""
        ...


class Tree:
    """The edges of all namespaces, and the page counts.

    Invariant: the children of an edge differ in their first page, every edge except a root holds at least one page, and
    the counts are those of the edges.

    Methods that move edges do not update their recency: the caller does this next, through the eviction order.

    Attributes:
        page_size: tokens per page.
        page_bytes: bytes of the token ids of one page.
        make_order: returns a new, empty eviction order.
        order: the eviction order of all namespaces without limits.
        spaces: the namespaces with pages, leases or limits, by name.
        pages: the ids of all pages in the tree.
        listeners: objects that are notified of changes.
        num_pages: pages in the tree.
        num_locked: pages of locked prefixes.
        now: number of operations so far that used a prefix.
    """

    __slots__ = (
        "listeners", "make_order", "now", "num_locked", "num_pages", "order", "page_bytes", "page_size", "pages",
        "spaces",
    )  # fmt: skip

    def __init__(self, page_size: int, make_order: Callable[[], Order]) -> None:
        self.page_size = page_size
        self.page_bytes = page_size * ITEM_BYTES
        self.make_order = make_order
        self.order = make_order()
        self.spaces: dict[Namespace, Space] = {}  # written by: keep, _forget_if_idle
        self.pages = PageSet()
        self.listeners: list[Listener] = []  # written by: RadixCache
        self.num_pages = 0  # written by: attach, trim, detach
        self.num_locked = 0  # written by: lock, unlock
        self.now = 0  # written by: tick

    def tick(self) -> int:
        """Count an operation and return its number."""
        self.now += 1
        return self.now

    def root(self, namespace: Any) -> Edge:
        """Return the root of a namespace; a new one on each call if the namespace has no pages, leases or limits.

        Raises:
            ValueError: `namespace` is not a namespace.
        """
        try:
            space = self.spaces.get(namespace)
        except TypeError:  # not hashable
            space = None
        if space is None:
            require_namespace(namespace)
            space = Space(self, namespace, self.order)
        return space.root

    def descend(self, edge: Edge, key: Key) -> tuple[Edge, int, list[bytes]]:
        """Follow `key`, a whole number of pages, downwards from the end of `edge`.

        Returns:
            The last edge that shares a page with the key (it may continue beyond the shared part), the number of pages
            followed, and their ids, with one item per edge.
        """
        page_bytes = self.page_bytes
        offset, size = 0, len(key)
        parts: list[bytes] = []
        while offset < size:
            first = key[offset : offset + page_bytes]
            child = edge.children.get(first if isinstance(first, bytes) else bytes(first))
            if child is None:
                break
            edge, here = child, child.key
            end = offset + len(here)
            if (
                key.startswith(here, offset)
                if isinstance(key, bytes)
                else end <= size and here.startswith(key[offset:end])
            ):
                parts.append(edge.values)
                offset = end
            else:
                num_pages = num_common_items(here, key, offset) // self.page_size
                parts.append(edge.values[: num_pages * ITEM_BYTES])
                offset += num_pages * page_bytes
                break
        return edge, offset // page_bytes, parts

    def locate(self, node: Any) -> Edge:
        """Return the edge that contains the end of the node's prefix now.

        Raises:
            ValueError: `node` does not belong to this tree, or the end of its prefix has been evicted.
        """
        if type(node) is not Node or node.edge.space.owner is not self:
            raise ValueError(f"node must be a handle from this cache, got {node!r}")
        edge: Edge = node.edge
        end: int = node.end
        if not end:
            return self.root(edge.space.name)
        while edge.start >= end and edge.parent is not None:  # cut by a split, or absorbed
            edge = edge.parent
        if edge.end < end:
            raise ValueError(f"node must be cached, got {node!r}, which has been evicted")
        return edge

    def split(self, edge: Edge, end: int) -> Edge:
        """Cut `edge` so that its upper part ends at `end`, and return the upper part, as recent as the lower one."""
        page_bytes = self.page_bytes
        num_pages = end - edge.start
        key_cut, value_cut = num_pages * page_bytes, num_pages * ITEM_BYTES
        key, values, parent = edge.key, edge.values, edge.parent
        assert parent is not None  # a root has no pages, so it is never cut
        children = {key[key_cut : key_cut + page_bytes]: edge}
        num_pins = 1 if edge.num_pins else 0
        upper = Edge(edge.space, parent, key[:key_cut], values[:value_cut], edge.start, end, children, 0, num_pins)
        parent.children[key[:page_bytes]] = upper
        edge.parent = upper
        edge.key, edge.values, edge.start = key[key_cut:], values[value_cut:], end
        edge.space.order.split(upper, edge)
        return upper

    def attach(self, parent: Edge, key: bytes, values: bytes) -> Edge:
        """Add a leaf and return it; its pages must be in `pages` already, and the caller calls `Order.publish` next."""
        space = parent.space
        num_pages = len(values) // ITEM_BYTES
        if parent.parent is None:
            self.keep(space)
        edge = Edge(space, parent, key, values, parent.end, parent.end + num_pages, {})
        parent.children[key[: self.page_bytes]] = edge
        space.order.adopt(edge, self.now)
        self.num_pages += num_pages
        space.num_pages += num_pages
        if self.listeners:
            parent_page = last_page(parent)
            for listener in self.listeners:
                listener.stored(space, parent_page, key, values)
        return edge

    def grow(self, edge: Edge, key: bytes, values: bytes) -> bool:
        """Append pages, which must be in `pages` already, to a leaf that has one lease; this lease covers them too.

        Returns:
            False, with nothing changed, if `edge` is no such leaf, or if unlocking would not join the pages to it.
        """
        space = edge.space
        if (
            edge.num_leases != 1
            or edge.children
            or edge.parent is None
            or edge.is_trimmed
            or not isinstance(space.order, RecencyList)
            or len(edge.key) + len(edge.values) + len(key) + len(values) > MAX_JOINED_BYTES
        ):
            return False
        parent_page = last_item(edge.values)
        num_pages = len(values) // ITEM_BYTES
        edge.key += key
        edge.values += values
        edge.end += num_pages
        self.num_pages += num_pages
        self.num_locked += num_pages
        space.num_pages += num_pages
        space.num_locked += num_pages
        for listener in self.listeners:
            listener.stored(space, parent_page, key, values)
        return True

    def lock(self, edge: Edge) -> None:
        """Add a lease. The cost is one step per edge on the path that no other lease locks."""
        edge.num_leases += 1
        space = edge.space
        while True:
            edge.num_pins += 1
            if edge.num_pins > 1:
                return
            if edge.parent is None:
                self.keep(space)
                return
            space.order.lock(edge)
            num_pages = edge.end - edge.start
            self.num_locked += num_pages
            space.num_locked += num_pages
            edge = edge.parent

    def unlock(self, edge: Edge) -> None:
        """Drop a lease; edges that no lease locks any more count as used now, and may be joined."""
        edge.num_leases -= 1
        space, lowest, now = edge.space, edge, self.tick()
        num_edges = 0
        while True:
            edge.num_pins -= 1
            if edge.num_pins:
                break
            if edge.parent is None:
                self._forget_if_idle(space)
                break
            num_pages = edge.end - edge.start
            self.num_locked -= num_pages
            space.num_locked -= num_pages
            space.order.unlock(edge, now)
            num_edges += 1
            edge = edge.parent
        if num_edges and (num_edges > 1 or len(lowest.children) == 1):
            self._join_chains(lowest, num_edges)

    def trim(self, edge: Edge, end: int) -> bytes:
        """Remove the pages of an unlocked leaf from `end` on, but not the whole leaf, and return their ids."""
        cut = end - edge.start
        key, values = edge.key[cut * self.page_bytes :], edge.values[cut * ITEM_BYTES :]
        edge.key, edge.values = edge.key[: cut * self.page_bytes], edge.values[: cut * ITEM_BYTES]
        self.num_pages -= edge.end - end
        edge.space.num_pages -= edge.end - end
        edge.end = end
        edge.is_trimmed = True
        if self.listeners:
            self._notify_removed(edge.space, edge, key, values)
        edge.space.order.expose(edge)
        return values

    def detach(self, edge: Edge) -> bytes:
        """Remove an unlocked leaf from the tree and return its page ids."""
        parent, space = edge.parent, edge.space
        assert parent is not None  # a root is never evicted
        space.order.drop(edge)
        del parent.children[edge.key[: self.page_bytes]]
        num_pages = edge.end - edge.start
        self.num_pages -= num_pages
        space.num_pages -= num_pages
        edge.end = edge.start
        if self.listeners:
            self._notify_removed(space, parent, edge.key, edge.values)
        if parent.parent is None:
            self._forget_if_idle(space)
        elif not parent.children:
            space.order.expose(parent)
        return edge.values

    def keep(self, space: Space) -> None:
        """Register a namespace that gets its first page, lease or limit."""
        self.spaces.setdefault(space.name, space)

    def _forget_if_idle(self, space: Space) -> None:
        """Drop a namespace without pages, leases and limits, so that unused namespaces cost nothing."""
        if not space.root.children and not space.root.num_pins and not space.is_limited:
            del self.spaces[space.name]

    def _join_chains(self, edge: Edge, num_edges: int) -> None:
        """Join unlocked edges where this does not change the eviction order, so that a long path has few edges.

        Args:
            edge: the lowest of them.
            num_edges: how many they are: `edge`, its parent, and so on.
        """
        chain = list(edge.children.values()) if len(edge.children) == 1 else []
        num_bytes = len(chain[0].key) + len(chain[0].values) if chain else 0
        for _ in range(num_edges):
            more = len(edge.key) + len(edge.values)
            if (
                chain
                and num_bytes + more <= MAX_JOINED_BYTES
                and len(edge.children) == 1
                and not edge.is_trimmed
                and len(chain[0].children) <= 1
                and edge.space.order.can_absorb(edge, chain[-1])
            ):
                chain.append(edge)
                num_bytes += more
            else:
                if len(chain) > 1:
                    self._join(chain)
                chain, num_bytes = [edge], more
            assert edge.parent is not None  # a root is not among them
            edge = edge.parent
        if len(chain) > 1:
            self._join(chain)

    def _join(self, chain: list[Edge]) -> None:
        """Merge all edges of a chain into the last one; each edge is the only child of the next."""
        lowest, upper = chain[0], chain[-1]
        if len(chain) == 2:
            upper.key += lowest.key
            upper.values += lowest.values
        else:
            upper.key = b"".join([edge.key for edge in reversed(chain)])
            upper.values = b"".join([edge.values for edge in reversed(chain)])
        upper.end = lowest.end
        upper.children = lowest.children
        upper.is_trimmed = lowest.is_trimmed
        for child in upper.children.values():
            child.parent = upper
        for edge in chain[:-1]:
            upper.space.order.absorb(upper, edge)
            edge.parent = upper
            edge.start = edge.end = ABSORBED
            edge.key = edge.values = b""
            edge.children = {}

    def _notify_removed(self, space: Space, parent: Edge, key: bytes, values: bytes) -> None:
        parent_page = last_page(parent)
        for listener in self.listeners:
            listener.removed(space, parent_page, key, values)


def last_page(edge: Edge) -> int | None:
    """Return the id of the last page of an edge, or None for a root."""
    return last_item(edge.values) if edge.values else None


def last_item(values: bytes) -> int:
    """Return the last page id of `values`, which has at least one."""
    return int.from_bytes(values[-ITEM_BYTES:], sys.byteorder, signed=True)
