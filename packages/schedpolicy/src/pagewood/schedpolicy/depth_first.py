"""Depth first through the tree of cached prefixes, the subtree with the most waiting requests first."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from pagewood.schedpolicy.match_sweep import MatchSweep
from pagewood.schedpolicy.prefix_tree import PrefixTree
from pagewood.schedpolicy.requests import PrefixWaiting

P = TypeVar("P", bound=PrefixWaiting)


class DepthFirstWeight(Generic[P]):
    """Requests that share a cached prefix go together, the largest family first; those without a match come last.

    What one family needs stays cached while it is served. A small family can starve: combine it with `Ageing`.

    Only the part of the cache that somebody waits for matters, so the tree here is made of the waiting requests'
    cached prefixes, and is changed where one of them changes: a pass costs what is taken from it, and nothing for the
    size of the cache. Invariant: every waiting request rests in the tree where its cached prefix ends.

    Source: `dfs-weight` of SGLang, which walks the whole cache twice a pass.
    """

    __slots__ = ("_sweep", "_tree")

    def __init__(self, *, notified: bool = False) -> None:
        """Start empty; with `notified`, the caller calls `update` on every change of `num_matched`."""
        self._tree = PrefixTree[P]()
        self._sweep = None if notified else MatchSweep[P]()

    def add(self, request: P) -> None:
        """Take a request in."""
        self._tree.add(request, _cached_prefix(request))
        if self._sweep is not None:
            self._sweep.add(request)

    def remove(self, request: P) -> None:
        """Let a request go."""
        self._tree.discard(request)
        if self._sweep is not None:
            self._sweep.discard(request)

    admit = remove
    park = remove

    def stop(self, request: P) -> None:
        """Do nothing: who runs does not matter here."""

    def update(self, request: P) -> None:
        """Move a request to where its cached prefix ends now."""
        self._tree.discard(request)
        self._tree.add(request, _cached_prefix(request))
        if self._sweep is not None:
            self._sweep.read(request)

    def ordered(self, now_s: float) -> Iterator[P]:
        """Yield the waiting requests, family by family."""
        if self._sweep is not None:
            for request in self._sweep.changed():
                self.update(request)
        return iter(self._tree)

    def __contains__(self, request: P) -> bool:
        """Return whether the request waits here."""
        return request in self._tree

    def __len__(self) -> int:
        """Return how many requests wait here."""
        return len(self._tree)


def _cached_prefix(request: PrefixWaiting) -> bytes:
    return request.prefix(request.num_matched) if request.num_matched else b""
