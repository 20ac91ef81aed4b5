"""Leaf-LRU order in constant time."""

from collections.abc import Iterator

from pagewood.radixcache.node import Edge


class LeafLRU:
    """The unlocked edges in the order in which they can be evicted, as an intrusive doubly linked list.

    Invariant: the list holds every unlocked edge, and each is older than its parent, if that is unlocked too.

    So the oldest edge of all is always a leaf, and the least recently used one; no leaf is ever searched for, and a
    parent that becomes a leaf is already in its place. Why it holds, given that callers keep to the methods' words:

    - The unlocked edges are closed downwards (a lease locks its whole path), so an unlocked edge that has children has
      all of them in the list.
    - `touch`, and `add` along a path that loses its lease, move edges to the newest end from the deepest upwards. Each
      moved edge is then younger than all that was not moved, and older than its parent, which either moves after it or
      is locked and not in the list.
    - `remove` takes an edge away when it is locked (all its ancestors are then locked too) or evicted (it then has no
      children). Taking an edge away leaves the order of the others alone.
    """

    __slots__ = ("_ends",)

    def __init__(self) -> None:
        ends = Edge(None, None, b"", b"", 0, 0, {})
        ends.older = ends.newer = ends
        self._ends = ends  # its `newer` is the oldest edge, its `older` is the newest

    def __iter__(self) -> Iterator[Edge]:
        """Go through the unlocked edges, oldest first."""
        edge = self._ends.newer
        while edge is not self._ends:
            yield edge
            edge = edge.newer

    def oldest(self) -> Edge | None:
        """Return the least recently used unlocked leaf."""
        edge = self._ends.newer
        return None if edge is self._ends else edge

    def add(self, edge: Edge) -> None:
        """Put an unlocked edge at the newest end; its unlocked ancestors must follow it there at once."""
        ends = self._ends
        newest = ends.older
        newest.newer = ends.older = edge
        edge.older = newest
        edge.newer = ends

    def remove(self, edge: Edge) -> None:
        """Take out an edge that is being locked or evicted."""
        older, newer = edge.older, edge.newer
        older.newer = newer
        newer.older = older
        edge.older = edge.newer = self._ends  # a dead edge that a handle keeps must not keep its neighbours

    def touch(self, edge: Edge) -> None:
        """Make the unlocked part of the path that ends with `edge` the most recent."""
        while not edge.num_pins and edge.parent is not None:  # a root is not in the list
            older, newer = edge.older, edge.newer
            older.newer = newer
            newer.older = older
            self.add(edge)
            edge = edge.parent
