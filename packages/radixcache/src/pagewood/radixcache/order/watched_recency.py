"""The order of LRU over leaves in which watched pages come last, with nearly every operation in constant time."""

from collections.abc import Callable, Iterator
from typing import Any

from pagewood.radixcache.node import Edge, Space
from pagewood.radixcache.order.recency import RecencyList


class WatchedRecency(RecencyList):
    """LRU, except that pages covered by an open watch are evicted after all others.

    Invariant: the list of `RecencyList` is divided into two, each sorted by last use; an edge that was set aside is
    either watched to its end or not a leaf, and it comes after its children in the same list.

    The order checks whether an edge is watched only when it is the oldest of the first list. It is then set aside if it
    is watched to its end, or if its children were set aside before. A use moves it back, and so does the end of its
    last watch. So a watch costs nothing while nothing is evicted, and eviction looks once at each watched edge.

    Args:
        watched_end: returns the end of the longest watched part of an edge.
    """

    __slots__ = ("_aside", "_aside_ends", "_first_end", "_watched_end")

    def __init__(self, watched_end: Callable[[Edge], int]) -> None:
        super().__init__()
        self._watched_end = watched_end
        self._aside: set[Edge] = set()  # the edges of the second list; written by: touch, lock, split, _move
        ends = Space(self, None, self).root
        ends.older = ends.newer = ends
        self._aside_ends = ends
        self._first_end = 0  # of the watched part of the edge that `first` has returned; written by: first

    def __iter__(self) -> Iterator[Edge]:
        """Iterate over the edges of the first list, then over those of the second."""
        yield from super().__iter__()
        edge = self._aside_ends.newer
        while edge is not self._aside_ends:
            yield edge
            edge = edge.newer

    def touch(self, edge: Edge, now: int) -> None:
        """Move the unlocked part of the path to the newest end of the first list."""
        if self._aside:
            step = edge
            while not step.num_pins and step.parent is not None:
                self._aside.discard(step)
                step = step.parent
        super().touch(edge, now)

    def lock(self, edge: Edge) -> None:
        """Remove an edge."""
        self._aside.discard(edge)
        super().lock(edge)

    def split(self, upper: Edge, lower: Edge) -> None:
        """Put the upper part directly after the lower one, in the same list."""
        if lower in self._aside:
            self._aside.add(upper)
        super().split(upper, lower)

    def expose(self, edge: Edge) -> None:
        """Move an edge back to the first list if it can be evicted like any other now."""
        if edge in self._aside and edge.is_free_leaf and self._watched_end(edge) < edge.end:
            after = self._ends.newer
            while after is not self._ends and after.used < edge.used:
                after = after.newer
            self._move(edge, after.older)
            self._aside.discard(edge)

    def first(self) -> Edge | None:
        """Return the least recently used leaf that is not watched to its end, otherwise the oldest watched one."""
        ends = self._ends
        while (edge := ends.newer) is not ends:
            if not edge.children:
                self._first_end = self._watched_end(edge)
                if self._first_end < edge.end:
                    return edge
            self._set_aside(edge)
        edge = self._aside_ends.newer
        self._first_end = 0
        return None if edge is self._aside_ends else edge

    def cut(self, edge: Edge) -> int:
        """Return the end of the watched part of the edge, or its start if it is watched to its end."""
        return max(edge.start, self._first_end)

    def head(self) -> Any:
        """Return whether `first` has returned a watched edge, and the tick at which it was last used."""
        edge = self._ends.newer
        is_watched = edge is self._ends
        return is_watched, (self._aside_ends.newer if is_watched else edge).used

    def take_over(self, other: Any, edges: list[Edge]) -> None:
        """Move the unlocked edges to the lists of this order that they have in the other one."""
        moving = set(edges)
        for edge in [edge for edge in other if edge in moving]:
            is_aside = edge in other._aside
            other.lock(edge)
            self._add(edge)
            if is_aside:
                self._move(edge, self._aside_ends.older)
                self._aside.add(edge)

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless the lists contain exactly `edges`, each sorted and children before parents."""
        lists: list[list[Edge]] = [[], []]
        for edge in self:
            if edge.older.newer is not edge or edge.newer.older is not edge:
                raise AssertionError(f"neighbours in the list must refer to each other: {edge!r}")
            lists[edge in self._aside].append(edge)
        if len(lists[0]) + len(lists[1]) != len(edges) or {*lists[0], *lists[1]} != set(edges):
            raise AssertionError("the lists must contain exactly the unlocked edges")
        for each in lists:
            ranks = {edge: rank for rank, edge in enumerate(each)}
            for edge, rank in ranks.items():
                if edge.parent is not None and rank >= ranks.get(edge.parent, len(each)):
                    raise AssertionError(f"an edge must be older than its parent: {edge!r}")
                if rank and each[rank - 1].used > edge.used:
                    raise AssertionError(f"ticks must rise along a list: {edge!r}")
        for edge in lists[1]:
            if edge.is_free_leaf and self._watched_end(edge) < edge.end:
                raise AssertionError(f"a leaf that was set aside must be watched to its end: {edge!r}")

    def _set_aside(self, edge: Edge) -> None:
        """Move the oldest edge of the first list to its place in the second, before its parent, after its children."""
        before = self._aside_ends.older
        is_leaf = not edge.children
        while before is not self._aside_ends and (before.used > edge.used or (is_leaf and before.used == edge.used)):
            before = before.older
        self._move(edge, before)
        self._aside.add(edge)

    def _move(self, edge: Edge, older: Edge) -> None:
        """Take an edge out of its place and put it directly after `older`."""
        edge.older.newer = edge.newer
        edge.newer.older = edge.older
        newer = older.newer
        older.newer = newer.older = edge
        edge.older = older
        edge.newer = newer
