"""The order of LRU over leaves, with every operation in constant time."""

from collections.abc import Iterator
from typing import Any

from pagewood.radixcache.node import Edge, Space


class RecencyList:
    """The unlocked edges in the order in which they can be evicted, as an intrusive doubly linked list.

    Invariant: the list contains every unlocked edge, and each is older than its parent if the parent is unlocked too.

    So the oldest edge is always a leaf, and the least recently used one. The list never searches for a leaf, and a
    parent that becomes a leaf is already at its place. The invariant holds, provided that the tree follows the `Order`
    protocol:

    - A lease locks its whole path. So all descendants of an unlocked edge are unlocked, and in the list.
    - `touch`, and `unlock` along a path that loses its lease, move edges to the newest end, from the deepest upwards.
      Each moved edge is then younger than all edges that were not moved, and older than its parent, which either moves
      after it or is locked and not in the list.
    - `split` puts the upper part directly after the lower one.
    - `lock`, `drop` and `absorb` remove an edge when it is locked (its ancestors are then locked too), evicted (it then
      has no children) or merged into its neighbour. Removing an edge does not change the order of the others.

    Attributes:
        is_only_order: whether no other order exists that this one is compared with.
    """

    __slots__ = ("_ends", "is_only_order")

    def __init__(self) -> None:
        ends = Space(self, None, self).root
        ends.older = ends.newer = ends
        self._ends = ends  # sentinel: its `newer` is the oldest edge, its `older` is the newest
        self.is_only_order = True  # written by: Limits.set

    def __iter__(self) -> Iterator[Edge]:
        """Iterate over the unlocked edges, oldest first."""
        edge = self._ends.newer
        while edge is not self._ends:
            yield edge
            edge = edge.newer

    def adopt(self, edge: Edge, now: int) -> None:
        """Add a new leaf at the newest end."""
        self._add(edge)
        edge.used = now

    def publish(self, edge: Edge, now: int) -> None:
        """Move the unlocked part of the path to the newest end."""
        self.touch(edge, now)

    def touch(self, edge: Edge, now: int) -> None:
        """Move the unlocked part of the path to the newest end."""
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
        """Do nothing: hits do not affect recency."""

    def lock(self, edge: Edge) -> None:
        """Remove an edge."""
        older, newer = edge.older, edge.newer
        older.newer = newer
        newer.older = older
        edge.older = edge.newer = self._ends  # an evicted edge that a handle keeps must not keep its neighbours alive

    def unlock(self, edge: Edge, now: int) -> None:
        """Add an edge at the newest end."""
        self._add(edge)
        edge.used = now

    def split(self, upper: Edge, lower: Edge) -> None:
        """Put the upper part directly after the lower one."""
        upper.used = lower.used
        if not lower.num_pins:
            newer = lower.newer
            lower.newer = newer.older = upper
            upper.older = lower
            upper.newer = newer

    def can_absorb(self, upper: Edge, lower: Edge) -> bool:
        """Return whether no edge is between the two, in this order or in any other order that it is compared with."""
        return lower.newer is upper and (self.is_only_order or lower.used == upper.used)

    def absorb(self, upper: Edge, lower: Edge) -> None:
        """Remove the lower part."""
        self.lock(lower)

    def drop(self, edge: Edge) -> None:
        """Remove an edge."""
        self.lock(edge)

    def expose(self, edge: Edge) -> None:
        """Do nothing: the edge is already at its place."""

    def first(self) -> Edge | None:
        """Return the least recently used unlocked leaf."""
        edge = self._ends.newer
        return None if edge is self._ends else edge

    def cut(self, edge: Edge) -> int:
        """Return the start of the edge: all its pages were last used together."""
        return edge.start

    def head(self) -> Any:
        """Return the tick at which the oldest edge was last used."""
        return self._ends.newer.used

    def take_over(self, other: Any, edges: list[Edge]) -> None:
        """Move the unlocked edges to this list, in their order in the other list."""
        moving = set(edges)
        for edge in [edge for edge in other if edge in moving]:
            other.lock(edge)
            self._add(edge)

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless the list contains exactly `edges`, with children before their parents."""
        ranks: dict[int, int] = {}
        for rank, edge in enumerate(self):
            if edge.older.newer is not edge or edge.newer.older is not edge:
                raise AssertionError(f"neighbours in the list must refer to each other: {edge!r}")
            ranks[id(edge)] = rank
        if ranks.keys() != {id(edge) for edge in edges}:
            raise AssertionError("the list must contain exactly the unlocked edges")
        for edge in edges:
            if ranks[id(edge)] >= ranks.get(id(edge.parent), len(ranks)):
                raise AssertionError(f"an edge must be older than its parent: {edge!r}")
            if edge.newer is not self._ends and edge.used > edge.newer.used:
                raise AssertionError(f"ticks must rise along the list: {edge!r}")

    def _add(self, edge: Edge) -> None:
        ends = self._ends
        newest = ends.older
        newest.newer = ends.older = edge
        edge.older = newest
        edge.newer = ends
