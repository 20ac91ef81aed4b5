"""The queues of S3-FIFO: a small queue for new runs, and a main queue for runs that were used again."""

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from pagewood.radixcache.node import Edge

_MAX_FREQUENCY = 3


@dataclass(slots=True)
class _Place:
    """The state of a run in the queues.

    Invariant: `num_pages` is the length of the run while it is unlocked, and 0 while it is locked.
    """

    is_main: bool  # written by: SmallMain
    frequency: int = 0  # written by: SmallMain
    is_queued: bool = False  # written by: SmallMain
    num_pages: int = 0  # written by: SmallMain


class SmallMain:
    """The unlocked leaves in two queues.

    Invariant: every unlocked leaf is in exactly one queue, the one that its place names, and only once. Other entries
    of a queue are dropped when they reach its head. A run keeps its place while it is locked or has children.
    """

    __slots__ = (
        "_forgotten", "_main", "_num_pages", "_num_small_pages", "_page_bytes", "_places", "_small", "_small_share",
    )  # fmt: skip

    def __init__(self, small_share: float, *, page_bytes: int) -> None:
        self._small_share = small_share
        self._page_bytes = page_bytes
        self._small: deque[Edge] = deque()  # written by: _enter, _skim, first
        self._main: deque[Edge] = deque()  # written by: _enter, _skim, first
        self._places: dict[Edge, _Place] = {}  # written by: adopt, split, drop, take_over
        self._forgotten: OrderedDict[int, None] = (
            OrderedDict()
        )  # written by: adopt, drop; marks of runs evicted from the small queue
        self._num_pages = 0  # written by: _count; unlocked pages
        self._num_small_pages = 0  # written by: _count; unlocked pages of the small queue

    def __iter__(self) -> Iterator[Edge]:
        """Iterate over the unlocked leaves in queue order, the small queue first."""
        return (edge for edge in [*self._small, *self._main] if edge.is_free_leaf and edge in self._places)

    def adopt(self, edge: Edge, now: int) -> None:
        """Add a new leaf to the small queue, or to the main queue if it was recently evicted from the small one."""
        mark = self._mark(edge)
        is_known = mark in self._forgotten
        if is_known:
            del self._forgotten[mark]
        self._places[edge] = _Place(is_known)
        edge.used = now
        self.expose(edge)

    def publish(self, edge: Edge, now: int) -> None:
        """Do nothing: first in, first out."""

    def touch(self, edge: Edge, now: int) -> None:
        """Do nothing: first in, first out."""

    def hit(self, edge: Edge) -> None:
        """Count a use along the whole path."""
        while edge.parent is not None:
            place = self._places[edge]
            place.frequency = min(_MAX_FREQUENCY, place.frequency + 1)
            edge = edge.parent

    def lock(self, edge: Edge) -> None:
        """Exclude its pages from the sizes."""
        self._count(self._places[edge], 0)

    def unlock(self, edge: Edge, now: int) -> None:
        """Include its pages in the sizes."""
        edge.used = now
        self._count(self._places[edge], edge.end - edge.start)
        self.expose(edge)

    def split(self, upper: Edge, lower: Edge) -> None:
        """Give the upper part the same place."""
        place = self._places[lower]
        self._places[upper] = _Place(place.is_main, place.frequency)
        upper.used = lower.used
        if not lower.num_pins:
            self._count(place, lower.end - lower.start)
            self._count(self._places[upper], upper.end - upper.start)

    def can_absorb(self, upper: Edge, lower: Edge) -> bool:
        """Return False: the places differ."""
        return False

    def absorb(self, upper: Edge, lower: Edge) -> None:
        """Never called, because `can_absorb` returns False."""
        raise AssertionError("edges with places must not be absorbed")

    def drop(self, edge: Edge) -> None:
        """Forget the place; remember a run of the small queue by its mark."""
        place = self._places.pop(edge)
        self._count(place, 0)
        if not place.is_main:
            self._forgotten[self._mark(edge)] = None
            while len(self._forgotten) > len(self._places) + 1:
                self._forgotten.popitem(last=False)

    def expose(self, edge: Edge) -> None:
        """Ensure that an unlocked leaf is queued."""
        if edge.is_free_leaf:
            place = self._places[edge]
            self._count(place, edge.end - edge.start)
            if not place.is_queued:
                place.is_queued = True
                (self._main if place.is_main else self._small).append(edge)

    def first(self) -> Edge | None:
        """Return the next unlocked leaf that was not used again; runs that were used again are moved on."""
        while True:
            small, main = self._skim(self._small), self._skim(self._main)
            if small is None and main is None:
                return None
            is_small_full = self._num_small_pages >= self._small_share * self._num_pages
            if small is not None and (main is None or is_small_full):
                place = self._places[small]
                if place.frequency <= 1:
                    return small
                self._small.popleft()
                self._count(place, 0)
                place.is_main, place.frequency = True, 0
                self._count(place, small.end - small.start)
                self._main.append(small)
            elif main is not None:
                place = self._places[main]
                if not place.frequency:
                    return main
                place.frequency -= 1
                self._main.rotate(-1)

    def cut(self, edge: Edge) -> int:
        """Return the start of the edge: whole runs are evicted."""
        return edge.start

    def head(self) -> int:
        """Return the tick at which `first` was adopted or unlocked."""
        first = self.first()
        return 0 if first is None else first.used

    def take_over(self, other: Self, edges: list[Edge]) -> None:
        """Move the places of edges to this order, in the order of the other queues."""
        moving = set(edges)
        queued = [edge for edge in other if edge in moving]
        for edge in edges:
            place = self._places[edge] = other._places.pop(edge)
            other._count(place, 0)
            place.is_queued = False
            if not edge.num_pins:
                self._count(place, edge.end - edge.start)
        for edge in queued:
            self.expose(edge)

    def check(self, edges: list[Edge]) -> None:
        """Raise AssertionError unless every unlocked leaf is queued once, and the sizes are right."""
        queued = [*self._small, *self._main]
        if len({id(edge) for edge in queued}) != len(queued):
            raise AssertionError("a run must be queued only once")
        if self._num_pages != sum(edge.end - edge.start for edge in edges):
            raise AssertionError("_num_pages must be the number of unlocked pages")
        if self._num_small_pages != sum(place.num_pages for place in self._places.values() if not place.is_main):
            raise AssertionError("_num_small_pages must be the number of unlocked pages in the small queue")
        for edge in edges:
            place = self._places[edge]
            if edge.is_free_leaf and edge not in (self._main if place.is_main else self._small):
                raise AssertionError(f"an unlocked leaf must be queued: {edge!r}")

    def _skim(self, queue: deque[Edge]) -> Edge | None:
        """Return the first unlocked leaf of a queue, dropping other entries before it."""
        while queue:
            edge = queue[0]
            place = self._places.get(edge)
            if place is not None and edge.is_free_leaf:
                return edge
            queue.popleft()
            if place is not None:
                place.is_queued = False
        return None

    def _count(self, place: _Place, num_pages: int) -> None:
        """Set the number of unlocked pages of a place."""
        change = num_pages - place.num_pages
        place.num_pages = num_pages
        self._num_pages += change
        if not place.is_main:
            self._num_small_pages += change

    def _mark(self, edge: Edge) -> int:
        """Return the key by which a run is remembered after its eviction: its position and its first page."""
        return hash((edge.space.name, edge.start, edge.key[: self._page_bytes]))
