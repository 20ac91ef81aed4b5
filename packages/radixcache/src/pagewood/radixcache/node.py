"""The data structures of the tree: edges, namespaces, and handles that point to prefixes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagewood.radixcache.namespaces import Namespace

if TYPE_CHECKING:
    from pagewood.radixcache.order import Order
    from pagewood.radixcache.usage import Usage

ABSORBED = 1 << 62
"""The `start` of an edge that was merged into its parent.

It is larger than the end of any handle, so `Tree.locate` continues with the parent.
"""


class Edge:
    """A run of whole pages below `parent`, covering the pages `[start, end)` of every sequence that passes through it.

    Invariant: `num_pins` is `num_leases` plus the number of children with a non-zero `num_pins`. So an edge is locked
    exactly when a lease ends at it or below it, and all children of an unlocked edge are unlocked.

    Keys and page ids are bytes, so comparing them is a memcmp and cutting them is a memcpy. An edge object may outlive
    its place in the tree, because handles refer to it. A split keeps the object for the lower part. An evicted edge has
    `end == start`, which identifies stale handles. A merged edge has `start == ABSORBED`.

    Attributes:
        space: the namespace of the edge.
        parent: the edge that this one follows; None for a root.
        key: the token ids, as int32 bytes.
        values: the page ids, as int32 bytes.
        start: number of pages before this edge on its path.
        end: number of pages on the path up to the end of this edge.
        children: the edges that follow, keyed by the bytes of their first page.
        num_leases: leases that end at this edge.
        num_pins: `num_leases` plus the number of locked children.
        is_trimmed: whether pages were evicted from its end; then no other edge may be joined to its end.
        used: tick of the last use; kept by `RecencyList` and `SmallMain`.
        usage: how the pages have been used; kept by `Scored`.
        older: the previous edge in the recency list.
        newer: the next edge in the recency list.
    """

    __slots__ = (
        "children", "end", "is_trimmed", "key", "newer", "num_leases", "num_pins", "older", "parent", "space", "start",
        "usage", "used", "values",
    )  # fmt: skip

    def __init__(
        self,
        space: Space,
        parent: Edge | None,
        key: bytes,
        values: bytes,
        start: int,
        end: int,
        children: dict[bytes, Edge],
        num_leases: int = 0,
        num_pins: int = 0,
    ) -> None:
        self.space = space
        self.parent = parent  # written by: Tree
        self.key = key  # written by: Tree
        self.values = values  # written by: Tree
        self.start = start  # written by: Tree
        self.end = end  # written by: Tree
        self.children = children  # written by: Tree
        self.num_leases = num_leases  # written by: Tree.lock, Tree.unlock
        self.num_pins = num_pins  # written by: Tree.lock, Tree.unlock
        self.is_trimmed = False  # written by: Tree
        self.used = 0  # written by: RecencyList, SmallMain
        self.usage: Usage | None = None  # written by: Scored
        self.older: Edge  # written by: RecencyList, WatchedRecency
        self.newer: Edge  # written by: RecencyList, WatchedRecency

    @property
    def is_free_leaf(self) -> bool:
        """Whether the last page can be evicted: no child follows it, and no lease locks it."""
        return not self.num_pins and not self.children and self.end > self.start and self.parent is not None

    def __repr__(self) -> str:
        pages = f"start={self.start}, end={self.end}, is_trimmed={self.is_trimmed}"
        return f"Edge(namespace={self.space.name!r}, {pages}, num_leases={self.num_leases}, num_pins={self.num_pins})"


class Space:
    """A namespace: its root, its page counts, its limits, and the eviction order that contains its edges.

    Invariant: the counts are those of the edges below `root`, and `floor <= quota` if there is a quota.

    Attributes:
        owner: the tree that the namespace belongs to.
        name: the name of the namespace; None is a namespace too.
        order: the eviction order of its edges.
        root: the edge of the empty prefix.
        num_pages: pages in the namespace.
        num_locked: pages of locked prefixes.
        quota: pages that it may hold before it is evicted from first; None means no quota.
        floor: pages that evictions for other namespaces leave in it.
        is_limited: whether limits were ever set, so that it has an eviction order of its own.
    """

    __slots__ = ("floor", "is_limited", "name", "num_locked", "num_pages", "order", "owner", "quota", "root")

    def __init__(self, owner: object, name: Namespace, order: Order) -> None:
        self.owner = owner
        self.name = name
        self.order = order  # written by: Limits.set
        self.root = Edge(self, None, b"", b"", 0, 0, {})
        self.num_pages = 0  # written by: Tree.attach, Tree.trim, Tree.detach
        self.num_locked = 0  # written by: Tree.lock, Tree.unlock
        self.quota: int | None = None  # written by: Limits.set
        self.floor = 0  # written by: Limits.set
        self.is_limited = False  # written by: Limits.set


class Node:
    """An opaque handle of one prefix: the first `end` pages on the path from the root through `edge`.

    Invariant: it stands for the same tokens as long as they are cached, whatever is split or joined around them.

    Keep it and pass it back to the cache that returned it. Callers may read `namespace` and `num_pages`; the attributes
    below are internal.

    Attributes:
        edge: an edge at which the search for the end of the prefix starts.
        end: length of the prefix in pages.
        is_match: whether it comes from a match that has not been counted as a hit yet.
        num_locks: locks taken through this handle.
    """

    __slots__ = ("edge", "end", "is_match", "num_locks")

    def __init__(self, edge: Edge, end: int, is_match: bool = False) -> None:
        self.edge = edge  # written by: RadixCache._edge_ending_at
        self.end = end
        self.is_match = is_match  # written by: RadixCache.lock
        self.num_locks = 0  # written by: RadixCache.lock, RadixCache.unlock

    @property
    def namespace(self) -> Namespace:
        """The namespace of the prefix."""
        return self.edge.space.name

    @property
    def num_pages(self) -> int:
        """The length of the prefix in pages."""
        return self.end

    def __repr__(self) -> str:
        return f"Node(namespace={self.namespace!r}, num_pages={self.end})"
