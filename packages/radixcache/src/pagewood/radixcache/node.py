"""What the tree is made of: edges, the namespaces that they belong to, and the handles that point into them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagewood.radixcache.order import Order
    from pagewood.radixcache.usage import Usage

ABSORBED = 1 << 62
"""Where an edge starts that has become part of its parent: behind every handle, so that handles go on to the parent."""


@dataclass(slots=True, eq=False)
class Edge:
    """A run of whole pages below `parent`, covering the pages `[start, end)` of every sequence that passes through it.

    Invariant: `num_pins` is `num_leases` plus the number of children whose `num_pins` is not zero, so an edge is locked
    exactly if a lease ends at it or below it, and the children of an unlocked edge are unlocked.

    Keys and page ids are bytes, so that comparing is memcmp and cutting is memcpy. The object outlives its place in the
    tree wherever a handle still points to it: a split keeps this object for the lower part; an evicted edge is left
    with `end == start`, which is how a stale handle is noticed; an absorbed one with `start == ABSORBED`.
    """

    space: Space
    parent: Edge | None = field(repr=False)  # written by: Tree
    key: bytes = field(repr=False)  # written by: Tree; int32 token ids
    values: bytes = field(repr=False)  # written by: Tree; int32 page ids
    start: int  # written by: Tree
    end: int  # written by: Tree
    children: dict[bytes, Edge] = field(repr=False)  # written by: Tree; by the bytes of the child's first page
    num_leases: int = 0  # written by: Tree.lock, Tree.unlock
    num_pins: int = 0  # written by: Tree.lock, Tree.unlock
    is_trimmed: bool = False  # written by: Tree; it has lost pages off its end, so it must not grow
    used: int = field(default=0, repr=False)  # written by: RecencyList, SmallMain; the tick of its last use
    usage: Usage | None = field(default=None, repr=False)  # written by: Scored
    older: Edge = field(init=False, repr=False)  # written by: RecencyList
    newer: Edge = field(init=False, repr=False)  # written by: RecencyList

    @property
    def is_free_leaf(self) -> bool:
        """Nothing follows it and nothing locks it, so its last page can be given up."""
        return not self.num_pins and not self.children and self.end > self.start and self.parent is not None


@dataclass(slots=True, eq=False)
class Space:
    """A namespace: its root, its sizes, its limits, and the order of eviction that its edges are in.

    Invariant: the sizes are those of the edges below `root`, and `floor <= quota` where there is a quota.
    """

    owner: object = field(repr=False)
    name: str | None
    order: Order = field(repr=False)  # written by: Limits.set
    root: Edge = field(init=False, repr=False)
    num_pages: int = 0  # written by: Tree.attach, Tree.trim, Tree.detach
    num_locked: int = 0  # written by: Tree.lock, Tree.unlock
    quota: int | None = None  # written by: Limits.set; pages
    floor: int = 0  # written by: Limits.set; pages
    is_limited: bool = False  # written by: Limits.set; it has, or has had, limits, and so an order of its own

    def __post_init__(self) -> None:
        self.root = Edge(self, None, b"", b"", 0, 0, {})


class Node:
    """An opaque handle of one prefix: the first `end` pages on the way from the root through `edge`.

    Invariant: it means the same tokens for as long as they are cached, whatever is split around it. Keep it, pass it
    back to the cache that gave it out, and read `namespace` and `num_pages`; the rest is the cache's.
    """

    __slots__ = ("edge", "end", "is_match", "num_locks")

    def __init__(self, edge: Edge, end: int, is_match: bool = False) -> None:
        self.edge = edge  # written by: RadixCache._edge_ending_at; nearer to the end of the prefix than before
        self.end = end
        self.is_match = is_match  # written by: RadixCache.lock; a match of it has not been counted as a hit yet
        self.num_locks = 0  # written by: RadixCache.lock, RadixCache.unlock; those through this handle

    @property
    def namespace(self) -> str | None:
        """The namespace that the prefix is cached in."""
        return self.edge.space.name

    @property
    def num_pages(self) -> int:
        """The length of the prefix."""
        return self.end

    def __repr__(self) -> str:
        return f"Node(namespace={self.namespace!r}, num_pages={self.end})"
