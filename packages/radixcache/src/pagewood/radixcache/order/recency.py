"""Leaf-LRU order in constant time."""

from collections.abc import Iterator
from typing import Self

from pagewood.radixcache.node import Edge, Space


class RecencyList:
    """The unlocked edges in the order in which they can be evicted, as an intrusive doubly linked list.

    Invariant: the list holds every unlocked edge, and each is older than its parent, if that is unlocked too.

    So the oldest edge of all is always a leaf, and the least recently used one; no leaf is ever searched for, and a
    parent that becomes a leaf is already in its place. Why it holds, given that the tree keeps to the words of `Order`:

    - The unlocked edges are closed downwards (a lease locks its whole path), so an unlocked edge that has children has
      all of them in the list.
    - `touch`, and `unlock` along a path that loses its lease, move edges to the newest end from the deepest upwards.
      Each moved edge is then younger than all that was not moved, and older than its parent, which either moves after
      it or is locked and not in the list.
    - `split` puts the upper part right behind the lower one.
    - `lock`, `drop` and `absorb` take an edge away when it is locked (all its ancestors are then locked too), evicted
      (it then has no children) or part of its neighbour. Taking an edge away leaves the order of the others alone.
    """

    __slots__ = ("_ends", "is_alone")

    def __init__(self) -> None:
        ends = Space(self, None, self).root
        ends.older = ends.newer = ends
        self._ends = ends  # its `newer` is the oldest edge, its `older` is the newest
        self.is_alone = True  # written by: Limits.set; no other order is compared with this one

    def __iter__(self) -> Iterator[Edge]:
        """Go through the unlocked edges, oldest first."""
        edge = self._ends.newer
        while edge is not self._ends:
            yield edge
            edge = edge.newer

    def adopt(self, edge: Edge, now: int) -> None:
        """Put a new leaf at the newest end."""
        self._add(edge)
        edge.used = now

    def publish(self, edge: Edge, now: int) -> None:
        """Make the unlocked part of the path the most recent."""
        self.touch(edge, now)

    def touch(self, edge: Edge, now: int) -> None:
        """Make the unlocked part of the path the most recent."""
        ends = self._ends
        while not edge.num_pins and edge.parent is not None:  # a root is not in the list
            edge.used = now
            if ends.older is not edge:
                older, newer = edge.older, edge.newer
                older.newer = newer
                newer.older = older
                newest = ends.older
                newest.newer = ends.older = edge
                edge.older = newest
                edge.newer = ends
            edge = edge.parent

    def hit(self, edge: Edge) -> None:
        """Nothing: recency does not count."""

    def lock(self, edge: Edge) -> None:
        """Take out an edge."""
        older, newer = edge.older, edge.newer
        older.newer = newer
        newer.older = older
        edge.older = edge.newer = self._ends  # a dead edge that a handle keeps must not keep its neighbours

    def unlock(self, edge: Edge, now: int) -> None:
        """Put an edge at the newest end."""
        self._add(edge)
        edge.used = now

    def split(self, upper: Edge, lower: Edge) -> None:
        """Put the upper part right behind the lower one."""
        upper.used = lower.used
        if not lower.num_pins:
            newer = lower.newer
            lower.newer = newer.older = upper
            upper.older = lower
            upper.newer = newer

    def can_absorb(self, upper: Edge, lower: Edge) -> bool:
        """Return whether nothing is between the two; what other orders hold between them the ticks would say."""
        return lower.newer is upper and (self.is_alone or lower.used == upper.used)

    def absorb(self, upper: Edge, lower: Edge) -> None:
        """Take out the lower part."""
        self.lock(lower)

    def drop(self, edge: Edge) -> None:
        """Take out an edge."""
        self.lock(edge)

    def expose(self, edge: Edge) -> None:
        """Nothing: the edge is in its place."""

    def first(self) -> Edge | None:
        """Return the least recently used unlocked leaf."""
        edge = self._ends.newer
        return None if edge is self._ends else edge

    def cut(self, edge: Edge) -> int:
        """Return the start of the edge: it was used as a whole."""
        return edge.start

    def head(self) -> int:
        """Return when the oldest was used."""
        return self._ends.newer.used

    def take_over(self, other: Self, edges: list[Edge]) -> None:
        """Move the unlocked edges here, in the order in which they are there."""
        moving = set(edges)
        for edge in [edge for edge in other if edge in moving]:
            other.lock(edge)
            self._add(edge)

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless the list holds `edges`, and children before their parents."""
        ranks: dict[int, int] = {}
        for rank, edge in enumerate(self):
            if edge.older.newer is not edge or edge.newer.older is not edge:
                raise AssertionError(f"neighbours in the order agree: {edge!r}")
            ranks[id(edge)] = rank
        if ranks.keys() != {id(edge) for edge in edges}:
            raise AssertionError("the order holds the unlocked edges")
        for edge in edges:
            if ranks[id(edge)] >= ranks.get(id(edge.parent), len(ranks)):
                raise AssertionError(f"an edge is older than its parent: {edge!r}")
            if edge.newer is not self._ends and edge.used > edge.newer.used:
                raise AssertionError(f"ticks rise with recency: {edge!r}")

    def _add(self, edge: Edge) -> None:
        ends = self._ends
        newest = ends.older
        newest.newer = ends.older = edge
        edge.older = newest
        edge.newer = ends
