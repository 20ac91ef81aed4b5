"""What the tree is made of: edges, and the handles that point into them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Edge:
    """A run of whole pages below `parent`, covering the pages `[start, end)` of every sequence that passes through it.

    Invariant: `num_pins` is `num_leases` plus the number of children whose `num_pins` is not zero, so an edge is locked
    exactly if a lease ends at it or below it, and the children of an unlocked edge are unlocked.

    Keys and page ids are bytes, so that comparing is memcmp and cutting is memcpy. The object outlives its place in the
    tree wherever a handle still points to it: a split keeps this object for the lower part, and an evicted edge is left
    with `end == start`, which is how a stale handle is noticed.
    """

    namespace: str | None
    parent: Edge | None = field(repr=False)  # written by: Tree.split
    key: bytes = field(repr=False)  # written by: Tree.split, Tree.evict; int32 token ids
    values: bytes = field(repr=False)  # written by: Tree.split, Tree.evict; int32 page ids
    start: int  # written by: Tree.split
    end: int  # written by: Tree.evict, Tree.detach
    children: dict[bytes, Edge] = field(repr=False)  # written by: Tree; by the bytes of the child's first page
    num_leases: int = field(default=0, kw_only=True)  # written by: Tree.lock, Tree.unlock
    num_pins: int = field(default=0, kw_only=True)  # written by: Tree.lock, Tree.unlock
    older: Edge = field(init=False, repr=False)  # written by: LeafLRU
    newer: Edge = field(init=False, repr=False)  # written by: LeafLRU


class Node:
    """An opaque handle of one prefix: the first `end` pages on the way from the root through `edge`.

    Invariant: it means the same tokens for as long as they are cached, whatever is split around it. Keep it, pass it
    back to the cache that gave it out, and read `namespace` and `num_pages`; the rest is the cache's.
    """

    __slots__ = ("edge", "end")

    def __init__(self, edge: Edge, end: int) -> None:
        self.edge = edge
        self.end = end

    @property
    def namespace(self) -> str | None:
        """The namespace that the prefix is cached in."""
        return self.edge.namespace

    @property
    def num_pages(self) -> int:
        """The length of the prefix."""
        return self.end

    def __repr__(self) -> str:
        return f"Node(namespace={self.namespace!r}, num_pages={self.end})"
