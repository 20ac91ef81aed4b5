"""Depth first through the tree of cached prefixes, the subtree with the most waiting requests first."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from pagewood.schedpolicy.orders.match_sweep import MatchSweep
from pagewood.schedpolicy.orders.prefix_tree import PrefixTree
from pagewood.schedpolicy.requests import PrefixWaiting

P = TypeVar("P", bound=PrefixWaiting)


class DepthFirstWeight(Generic[P]):
    """Serves requests that share a cached prefix together, largest family first; requests without a match come last.

    The prefix of a family stays cached while the family is served. A small family can starve: combine it with `Ageing`.

    Only cached prefixes of waiting requests matter. So the tree here is built from those, and changes when one of them
    changes; the cost of a pass depends on how many requests are taken, not on the size of the cache. Invariant: every
    waiting request rests at the node where its cached prefix ends.

    Source: `dfs-weight` of SGLang, which walks the whole cache twice in each pass.
    """

    __slots__ = ("_sweep", "_tree")

    def __init__(self, *, notified: bool = False) -> None:
        """Start empty; with `notified`, the caller calls `update` on every change of `num_matched`."""
        self._tree = PrefixTree[P]()
        self._sweep = None if notified else MatchSweep[P]()

    def add(self, request: P) -> None:
        """Add a request."""
        self._tree.add(request, _cached_prefix(request))
        if self._sweep is not None:
            self._sweep.add(request)

    def remove(self, request: P) -> None:
        """Remove a request."""
        self._tree.discard(request)
        if self._sweep is not None:
            self._sweep.discard(request)

    admit = remove
    park = remove

    def stop(self, request: P) -> None:
        """Do nothing: running requests do not affect this order."""

    def update(self, request: P) -> None:
        """Move a request to the node where its cached prefix ends now."""
        prefix = _cached_prefix(request)  # may raise
        self._tree.discard(request)
        self._tree.add(request, prefix)
        if self._sweep is not None:
            self._sweep.read(request)

    def ordered(self, now_s: float) -> Iterator[P]:
        """Yield the waiting requests, family by family."""
        if self._sweep is not None:
            for request in self._sweep.changed():
                self.update(request)
        return iter(self._tree)

    def __contains__(self, request: P) -> bool:
        """Return whether a request is waiting here."""
        return request in self._tree

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._tree)


def _cached_prefix(request: PrefixWaiting) -> bytes:
    return request.prefix(request.num_matched) if request.num_matched else b""
