"""Snapshots: states of recurrent layers at the ends of cached prefixes, evicted apart from the pages."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagewood.radixcache.arrays import ITEM_BYTES, Int32, from_bytes
from pagewood.radixcache.node import Edge, Node, Space
from pagewood.radixcache.pages import grown
from pagewood.radixcache.tree import Tree, last_item


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attached:
    """A snapshot, and the prefix at whose end it is."""

    snapshot: int
    node: Node


class Snapshots:
    """The snapshots that the cache owns: those of cached prefixes, in the order of eviction, and those without one.

    A prefix is known by the id of its last page, which identifies it as long as the page is cached, whatever is split
    or joined. So the tree knows nothing of snapshots, and a cache without them does nothing for them.

    Superseded snapshots are evicted first, then the others; in both groups the least recently used first. A snapshot is
    superseded when another one is attached further down its path and no other sequence branches off between the two: a
    prompt that continues this path uses the other one. A use puts it back among the others. So what is left is the
    last snapshot of each conversation, and those at branch points.

    Invariant: `_owned` holds the attached snapshots and those in `_loose`, no page is in two of `_superseded`,
    `_others` and `_evicted_at_s`, and `_is_place` is true exactly for the pages in one of them; its last item is false.
    """

    __slots__ = ("_clock", "_evicted_at_s", "_is_place", "_loose", "_others", "_owned", "_superseded")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._superseded: OrderedDict[int, _Attached] = OrderedDict()  # by page; written by: use, _supersede, _take
        self._others: OrderedDict[int, _Attached] = OrderedDict()  # by page; written by: attach, use, _supersede, _take
        self._evicted_at_s: dict[int, float] = {}  # cached pages that had one; written by: attach, evict, removed
        self._is_place: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)  # written by: attach, removed
        self._owned: set[int] = set()  # written by: attach, evict
        self._loose: list[int] = []  # their pages are gone; written by: removed, evict

    def __len__(self) -> int:
        return len(self._owned)

    def __contains__(self, snapshot: int) -> bool:
        return snapshot in self._owned

    def at(self, edge: Edge, end: int) -> int | None:
        """Return the snapshot of the prefix that ends with page `end` of `edge`, or None."""
        attached = self._attached(_page_before(edge, end)) if end else None
        return None if attached is None else attached.snapshot

    def attach(self, edge: Edge, end: int, snapshot: int) -> bool:
        """Adopt a snapshot of the prefix that ends with page `end` of `edge`; False, and a use, if it has one."""
        page = _page_before(edge, end)
        if self._attached(page) is not None:
            self.use(page)
            return False
        self._supersede(edge, end)
        self._evicted_at_s.pop(page, None)
        self._others[page] = _Attached(snapshot=snapshot, node=Node(edge, end))
        if page + 1 >= len(self._is_place):
            self._is_place = grown(self._is_place, page + 2)
        self._is_place[page] = True
        self._owned.add(snapshot)
        return True

    def use(self, page: int) -> None:
        """Make the snapshot at a page the last one to be evicted."""
        attached = self._superseded.pop(page, None)
        if attached is not None:
            self._others[page] = attached
        else:
            self._others.move_to_end(page)

    def cut(self, edge: Edge, parts: list[bytes], *, is_use: bool) -> tuple[Edge, int, list[bytes]]:
        """Shorten the result of `Tree.descend` from a root to the last snapshot on its path.

        Returns:
            The edge that contains the end of the shorter path, its number of pages, and their ids.
        """
        values = b"".join(parts)
        pages = from_bytes([values])
        end = self.last(pages)
        while edge.start >= end and edge.parent is not None:
            edge = edge.parent
        if is_use and end:
            self.use(int(pages[end - 1]))
        return edge, end, [values[: end * ITEM_BYTES]]

    def last(self, pages: Int32) -> int:
        """Return the number of pages up to the last snapshot on a path; 0 if there is none."""
        for index in self._places(pages):
            if self._attached(int(pages[index])) is not None:
                return index + 1
        return 0

    def lost(self, pages: Int32) -> tuple[int, float | None]:
        """Return the number of pages up to the last evicted snapshot on a path, and when it was evicted; 0 if none."""
        for index in self._places(pages):
            evicted_at_s = self._evicted_at_s.get(int(pages[index]))
            if evicted_at_s is not None:
                return index + 1, evicted_at_s
        return 0, None

    def evict(self, tree: Tree, num_snapshots: int) -> list[int]:
        """Return the snapshots whose prefix is gone, and evict further ones of unlocked prefixes up to `num_snapshots`.

        Snapshots of locked prefixes are passed over, and become the last of their queue. But a superseded one stays
        only while a lease ends at it: a request that has gone on does not need it, and must not displace those of
        others.
        """
        freed, self._loose = self._loose, []
        for queue in (self._superseded, self._others):
            for _ in range(len(queue)):
                if len(freed) >= num_snapshots:
                    break
                page, attached = next(iter(queue.items()))
                edge, end = tree.locate(attached.node), attached.node.end
                ends_here = edge.num_leases > 0 and edge.end == end
                if ends_here or (edge.num_pins and queue is self._others):
                    queue.move_to_end(page)
                else:
                    freed.append(self._take(page))
                    self._evicted_at_s[page] = self._clock()
        self._owned.difference_update(freed)
        return freed

    def stored(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Do nothing: new pages have no snapshots."""

    def removed(self, space: Space, parent_page: int | None, key: bytes, values: bytes) -> None:
        """Keep the snapshots of removed pages for `evict`, and forget what was evicted there."""
        pages = from_bytes([values])
        for index in self._places(pages):
            page = int(pages[index])
            self._is_place[page] = False
            if self._evicted_at_s.pop(page, None) is None:
                self._loose.append(self._take(page))

    def cleared(self, space: Space) -> None:
        """Do nothing: `removed` was called for each page."""

    def check(self, tree: Tree) -> None:
        """Raise AssertionError unless the invariant holds and each place is the end of a cached prefix."""
        attached = {**self._superseded, **self._others}
        snapshots = [*(each.snapshot for each in attached.values()), *self._loose]
        if len(snapshots) != len(self._owned) or set(snapshots) != self._owned:
            raise AssertionError("the owned snapshots must be those attached and those without a prefix, each once")
        places = [*self._superseded, *self._others, *self._evicted_at_s]
        if sorted(places) != np.flatnonzero(self._is_place).tolist():
            raise AssertionError("_is_place must be true for the pages with a snapshot, now or before, and no others")
        for page, each in attached.items():
            if _page_before(tree.locate(each.node), each.node.end) != page:
                raise AssertionError(f"a snapshot must be stored under the last page of its prefix: {each.node!r}")
        for page in self._evicted_at_s:
            if page not in tree.pages:
                raise AssertionError(f"a page that had a snapshot must be cached: {page}")

    def _attached(self, page: int) -> _Attached | None:
        return self._others.get(page) or self._superseded.get(page)

    def _take(self, page: int) -> int:
        """Detach the snapshot at a page, and return it."""
        queue = self._superseded if page in self._superseded else self._others
        return queue.pop(page).snapshot

    def _supersede(self, edge: Edge, end: int) -> None:
        """Let the last snapshot before `end` be evicted early if nothing else branches off after it."""
        values = edge.values[: (end - 1 - edge.start) * ITEM_BYTES]
        while True:
            pages = from_bytes([values])
            last = self.last(pages)
            if last:
                page = int(pages[last - 1])
                if page in self._others:
                    self._superseded[page] = self._others.pop(page)
                return
            if edge.parent is None or len(edge.parent.children) > 1:
                return
            edge = edge.parent
            values = edge.values

    def _places(self, pages: Int32) -> list[int]:
        """Return the indices of the pages that have a snapshot or had one, the last first."""
        return np.flatnonzero(self._is_place.take(pages, mode="clip"))[::-1].tolist()  # the last flag is false


def _page_before(edge: Edge, end: int) -> int:
    """Return the id of the last of the first `end` pages of a path; it is in `edge`."""
    cut = (end - edge.start) * ITEM_BYTES
    return last_item(edge.values[cut - ITEM_BYTES : cut])
